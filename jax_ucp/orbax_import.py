"""Registration of our handlers with Orbax, once a program has imported both, in any order.

Importing jax_ucp imports neither Orbax nor JAX: if Orbax is not imported yet, an import hook waits
for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ORBAX = "orbax.checkpoint"
_HANDLER = "jax_ucp.handler"
_PATCH = "jax_ucp.handler.global_patch"

_is_to_be_patched = False


def register_with_orbax() -> None:
    """Register our handlers now if Orbax is imported, else as soon as it is."""
    if ORBAX in sys.modules:
        importlib.import_module(_HANDLER)
    else:
        sys.meta_path.insert(0, _OrbaxFinder())


def patch_orbax() -> None:
    """Patch Orbax, now or once it is imported, to use the universal format in this process."""
    global _is_to_be_patched
    _is_to_be_patched = True
    if ORBAX in sys.modules:
        importlib.import_module(_PATCH).patch_to_the_end()


class _OrbaxFinder(MetaPathFinder):
    """A finder that finds Orbax by the other finders, and imports our handlers after it, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ORBAX:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(_HANDLER)
            if _is_to_be_patched:
                importlib.import_module(_PATCH).patch_to_the_end()

        spec.loader.exec_module = exec_module
        return spec
