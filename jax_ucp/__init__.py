"""Universal Checkpointing for JAX: whatever wrote a checkpoint, every parameter in it can be read
as one whole array, any box at a time, by any mesh.

Names are imported when they are first used, so that looking into a checkpoint does not wait for JAX
or Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jax_ucp.orbax_import import register_with_orbax
from jax_ucp.version import VERSION

if TYPE_CHECKING:
    from jax_ucp import args as args
    from jax_ucp import errors as errors
    from jax_ucp.checkpoint import Checkpoint as Checkpoint
    from jax_ucp.checkpoint import diff as diff
    from jax_ucp.checkpoint import open as open
    from jax_ucp.handler import CheckpointHandler as CheckpointHandler
    from jax_ucp.handler import handler_registry as handler_registry
    from jax_ucp.handler import in_bucket as in_bucket
    from jax_ucp.handler import orbax_context as orbax_context
    from jax_ucp.handler import orbax_everywhere as orbax_everywhere
    from jax_ucp.layout import patterns as patterns
    from jax_ucp.mapping.rules import Mapping as Mapping
    from jax_ucp.shard_spec.rules import Spec as Spec

__version__ = VERSION

_HOMES = {
    "Checkpoint": "jax_ucp.checkpoint",
    "CheckpointHandler": "jax_ucp.handler",
    "Mapping": "jax_ucp.mapping.rules",
    "Spec": "jax_ucp.shard_spec.rules",
    "args": "jax_ucp.args",
    "diff": "jax_ucp.checkpoint",
    "errors": "jax_ucp.errors",
    "handler_registry": "jax_ucp.handler",
    "in_bucket": "jax_ucp.handler",
    "open": "jax_ucp.checkpoint",
    "orbax_context": "jax_ucp.handler",
    "orbax_everywhere": "jax_ucp.handler",
    "patterns": "jax_ucp.layout.patterns",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jax_ucp' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if _HOMES[name].rpartition(".")[2] == name else getattr(home, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


register_with_orbax()
