"""Our handlers are registered with Orbax once a program has imported both, in whichever order.

Importing jax_ucp brings in neither Orbax nor JAX: where Orbax is not there yet, an import hook
waits for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ORBAX = "orbax.checkpoint"
_HANDLER = "jax_ucp.handler"


def register_with_orbax() -> None:
    """Register now if Orbax is imported, or else as soon as it is."""
    if _ORBAX in sys.modules:
        importlib.import_module(_HANDLER)
    else:
        sys.meta_path.insert(0, _OrbaxFinder())


class _OrbaxFinder(MetaPathFinder):
    """Finds Orbax as the other finders do, and has our handlers imported after it, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _ORBAX:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(_HANDLER)

        spec.loader.exec_module = exec_module
        return spec
