"""Handlers for Orbax's managers, v0 and v1, that use our format. The only package that imports
Orbax.

They do not call stock Orbax's handlers. The metadata that they write name stock Orbax's standard
handler, so that stock Orbax restores the steps where jax_ucp is not installed.
"""

from typing import TYPE_CHECKING, Any

from jax_ucp.handler.buckets import in_bucket as in_bucket
from jax_ucp.handler.global_patch import orbax_everywhere as orbax_everywhere
from jax_ucp.handler.items import Restore as Restore
from jax_ucp.handler.items import Save as Save
from jax_ucp.handler.v0 import CheckpointHandler as CheckpointHandler
from jax_ucp.handler.v0 import handler_registry as handler_registry
from jax_ucp.handler.versions import HAS_V1, ORBAX_VERSION

if HAS_V1 or TYPE_CHECKING:
    from jax_ucp.handler.v1 import CheckpointableHandler as CheckpointableHandler
    from jax_ucp.handler.v1 import orbax_context as orbax_context


def __getattr__(name: str) -> Any:
    if name in ("CheckpointableHandler", "orbax_context"):
        raise ImportError(
            f"{name} is for Orbax's v1, which orbax-checkpoint {ORBAX_VERSION} does not have as it"
            " is now: update orbax-checkpoint, or use CheckpointHandler, handler_registry or"
            " orbax_everywhere with CheckpointManager"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
