"""Stock Orbax's own handlers of pytrees, which keep them in the universal format for a while.

Frameworks such as tunix, MaxText and Keras build managers, contexts and handlers of stock Orbax
inside themselves, where nobody can hand anything over. Every way of Orbax to a pytree ends in one
of two classes, whose methods are ours within `orbax_everywhere`.

Facts: orbax-checkpoint 0.12.8, `_src/handlers/pytree_checkpoint_handler.py` (v0),
`standard_checkpoint_handler.py` (made of the former, after a look at each leaf, which one process
may not pass while others wait for it), `experimental/v1/_src/handlers/pytree_handler.py`; and
`base_pytree_checkpoint_handler.py`, whose `finalize` wants a file of `array_metadatas` from every
process that saved, where there are any: ours are for readers, and of one process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import orbax.checkpoint as ocp

from jax_ucp.handler.v0 import CheckpointHandler
from jax_ucp.handler.versions import HAS_V1
from jax_ucp.universal.store import METADATA_FILE

Methods = dict[str, Callable[..., Any]]

# Contexts that overlap need not end in the order in which they began, so the first of them puts our
# methods there, and the last takes them away.
_LOCK = threading.Lock()
_PATCHES = contextlib.ExitStack()
_entered: list[None] = []


@contextlib.contextmanager
def orbax_everywhere() -> Iterator[None]:
    """Within it, whatever saves or restores pytrees by Orbax does so in the universal format.

    For frameworks that build their managers themselves: call them within it, unmodified. It holds
    for the whole process, for v0 and v1, and for managers that were made before. Handlers for which
    every host is its own primary, as managers that save to each host's own disk have them, stay as
    they are. Saves in the background end (`wait`, `close`) before it does. Of several that overlap,
    as in several threads, it holds until the last one ends.

    Example:
        >>> import jax_ucp as ucp
        >>> with ucp.orbax_everywhere():
        ...     train()  # doctest: +SKIP
    """
    with _LOCK:
        if not _entered:
            _patch()
        _entered.append(None)
    try:
        yield
    finally:
        with _LOCK:
            _entered.pop()
            if not _entered:
                _PATCHES.close()


def _patch() -> None:
    for handler, methods in _in_the_place_of_stock():
        for name, method in methods.items():
            _PATCHES.enter_context(mock.patch.object(handler, name, method))


def _in_the_place_of_stock() -> Iterator[tuple[type, Methods]]:
    pytree, standard = ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler
    yield pytree, _saving(pytree, ocp.args.PyTreeSave) | _restoring(pytree) | _ending(pytree)
    yield standard, _saving(standard, ocp.args.StandardSave) | _restoring_standard(standard)
    if HAS_V1:
        from orbax.checkpoint import v1

        yield v1.handlers.PyTreeHandler, _v1_methods(v1.handlers.PyTreeHandler)


def _saving(stock: Any, kind: type) -> Methods:
    save, async_save = stock.save, stock.async_save

    def our_save(self: Any, directory: Any, *args: Any, **named: Any) -> None:
        if _is_host_local(self):
            return save(self, directory, *args, **named)
        return CheckpointHandler().save(directory, _arguments(kind, args, named))

    async def our_async_save(self: Any, directory: Any, *args: Any, **named: Any) -> Any:
        if _is_host_local(self):
            return await async_save(self, directory, *args, **named)
        return await CheckpointHandler().async_save(directory, _arguments(kind, args, named))

    return {"save": our_save, "async_save": our_async_save}


def _restoring(stock: Any) -> Methods:
    restore = stock.restore

    def our_restore(self: Any, directory: Any, *args: Any, **named: Any) -> Any:
        if _is_host_local(self):
            return restore(self, directory, *args, **named)
        asked = _arguments(ocp.args.PyTreeRestore, args, named)
        return CheckpointHandler().restore(directory, asked)

    return {"restore": our_restore}


def _restoring_standard(stock: Any) -> Methods:
    """As stock's, which would look up where leaves were saved from before it comes to ours."""
    restore = stock.restore

    def our_restore(self: Any, directory: Any, *args: Any, **named: Any) -> Any:
        if _is_host_local(self):
            return restore(self, directory, *args, **named)
        asked = _arguments(ocp.args.StandardRestore, args, named)
        # what would have to be cut or padded is refused by its shape
        return CheckpointHandler().restore(directory, replace(asked, strict=True))

    return {"restore": our_restore}


def _ending(stock: Any) -> Methods:
    finalize = stock.finalize

    def our_finalize(self: Any, directory: Any) -> None:
        # what stock Orbax began to save before it was ours is its own to the end
        if _is_host_local(self) or not (directory / METADATA_FILE).exists():
            finalize(self, directory)

    return {"finalize": our_finalize}


def _arguments(kind: type, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The arguments of a save or a restore, which may be given one by one, as before Orbax 0.5."""
    given = named.pop("args", None)
    return kind(*args, **named) if given is None else given


def _is_host_local(handler: Any) -> bool:
    pytree = getattr(handler, "_impl", handler)
    return pytree._primary_host is None


def _v1_methods(stock: Any) -> Methods:
    from jax_ucp.handler.v1 import PyTreeHandler

    save, load = stock.save, stock.load

    async def our_save(self: Any, directory: Any, checkpointable: Any) -> Awaitable[None]:
        if self._context.multiprocessing_options.primary_host is None:
            return await save(self, directory, checkpointable)
        return await PyTreeHandler(self._context).save(directory, checkpointable)

    async def our_load(
        self: Any, directory: Any, abstract_checkpointable: Any = None
    ) -> Awaitable[Any]:
        if self._context.multiprocessing_options.primary_host is None:
            return await load(self, directory, abstract_checkpointable)
        return await PyTreeHandler(self._context).load(directory, abstract_checkpointable)

    return {"save": our_save, "load": our_load}
