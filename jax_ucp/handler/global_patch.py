"""A temporary patch by which stock Orbax's own handlers of pytrees use the universal format.

Frameworks such as tunix, MaxText and Keras create managers, contexts and handlers of stock Orbax
internally, so that users cannot pass their own. All of Orbax's APIs for pytrees end in a few
classes, whose methods are replaced by ours within `orbax_everywhere`.

Facts: orbax-checkpoint 0.12.8, `_src/handlers/pytree_checkpoint_handler.py` (v0),
`standard_checkpoint_handler.py` (made of the former, after a look at each leaf, which one process
may not pass while others wait for it), `experimental/v1/_src/handlers/pytree_handler.py`; and
`base_pytree_checkpoint_handler.py`, whose `finalize` wants a file of `array_metadatas` from every
process that saved, where there are any: ours are for readers, and of one process.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import orbax.checkpoint as ocp

from jax_ucp.handler.v0 import CheckpointHandler
from jax_ucp.handler.versions import HAS_V1
from jax_ucp.universal.store import METADATA_FILE
from jax_ucp.version import VERSION

Method = Callable[..., Any]
Methods = Mapping[type, Mapping[str, Method]]

# Overlapping contexts may end in any order: the first one installs our methods, and the last one
# that ends removes them.
_LOCK = threading.Lock()
_PATCHES = contextlib.ExitStack()
_entered: list[Methods] = []


@contextlib.contextmanager
def orbax_everywhere() -> Iterator[None]:
    """Context in which everything that saves or restores pytrees by Orbax uses the universal
    format.

    It is for frameworks that create their managers themselves: call them within it, unmodified. It
    applies to the whole process, to v0 and v1, and to managers that were created before. Handlers
    for which every host is its own primary, as in managers that save to each host's own disk, are
    not changed. Wait for saves in the background (`wait`, `close`) before it ends. If several
    contexts overlap, as in several threads, it lasts until the last one ends.

    Example:
        >>> import jax_ucp as ucp
        >>> with ucp.orbax_everywhere():
        ...     train()  # doctest: +SKIP
    """
    _enter()
    try:
        yield
    finally:
        with _LOCK:
            _entered.pop()
            if not _entered:
                _PATCHES.close()


def patch_to_the_end() -> None:
    """`orbax_everywhere` for the rest of the process; a line on stderr says what is patched."""
    patched = [f"{handler.__name__} ({', '.join(names)})" for handler, names in _enter().items()]
    sys.stderr.write(
        f"jax_ucp {VERSION}: Orbax {ocp.__version__} keeps pytrees in the universal format in this"
        f" process; patched are {', '.join(patched)}\n"
    )


def _enter() -> Methods:
    """Our methods, which replace stock Orbax's until all contexts that were entered have ended."""
    with _LOCK:
        _entered.append(_entered[0] if _entered else _methods())
        if len(_entered) == 1:
            for handler, methods in _entered[0].items():
                for name, method in methods.items():
                    _PATCHES.enter_context(mock.patch.object(handler, name, method))
        return _entered[0]


def _methods() -> Methods:
    """Our methods that replace stock Orbax's, by class and name."""
    pytree, standard, asked = ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler, ocp.args
    stock_finalize = pytree.finalize

    def finalize(self: Any, directory: Any) -> None:
        # a save that stock Orbax began before the patch is completed by stock Orbax
        if _is_host_local(self) or not (directory / METADATA_FILE).exists():
            stock_finalize(self, directory)

    methods: dict[type, dict[str, Method]] = {}
    # the standard handler is replaced too, because its methods look up where leaves were saved from
    # before they call the other handler's
    for handler, save, restore in (
        (pytree, asked.PyTreeSave, asked.PyTreeRestore),
        (standard, asked.StandardSave, asked.StandardRestore),
    ):
        kinds = {"save": save, "async_save": save, "restore": restore}
        methods[handler] = {
            name: _v0_method(getattr(handler, name), name, kind) for name, kind in kinds.items()
        }
    methods[pytree]["finalize"] = finalize
    if HAS_V1:
        from orbax.checkpoint import v1

        stock = v1.handlers.PyTreeHandler
        methods[stock] = {name: _v1_method(getattr(stock, name), name) for name in ("save", "load")}
    return methods


def _v0_method(stock: Method, name: str, kind: type) -> Method:
    """Our method of that name. It takes `args`, or as before Orbax 0.5 single arguments, of which
    it makes an object of `kind`.
    """

    def method(self: Any, directory: Any, *args: Any, **named: Any) -> Any:
        if _is_host_local(self):
            return stock(self, directory, *args, **named)
        given = named.pop("args", None)
        asked = kind(*args, **named) if given is None else given
        if kind is ocp.args.StandardRestore:
            # arrays that would have to be cut or padded are refused because of their shape
            asked = replace(asked, strict=True)
        bound = getattr(_pytree(self), "_save_device_host_concurrent_bytes", None)
        ours = CheckpointHandler(snapshot_bytes=bound if isinstance(bound, int) else None)
        return getattr(ours, name)(directory, asked)

    return method


def _is_host_local(handler: Any) -> bool:
    return _pytree(handler)._primary_host is None


def _pytree(handler: Any) -> Any:
    """The stock handler of pytrees, which the standard handler contains."""
    return getattr(handler, "_impl", handler)


def _v1_method(stock: Method, name: str) -> Method:
    """Our method in place of one of stock v1's handler, which is called for local saves."""

    def method(self: Any, *args: Any, **named: Any) -> Any:
        from jax_ucp.handler.v1 import PyTreeHandler

        if self._context.multiprocessing_options.primary_host is None:
            return stock(self, *args, **named)
        return getattr(PyTreeHandler(self._context), name)(*args, **named)

    return method
