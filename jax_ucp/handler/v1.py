"""The handlers for Orbax v1: `training.Checkpointer`, `save`, `load` and so on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from etils import epath
from orbax.checkpoint import v1
from orbax.checkpoint.experimental.v1._src.context.context import get_context

from jax_ucp.arrays.budget import DEFAULT_BUDGET
from jax_ucp.handler.at_exit import NotedLoop, note
from jax_ucp.handler.items import Restore, Save, SnapshottedSave, begin, restore
from jax_ucp.handler.stock_args import partial_restore, target_of
from jax_ucp.sharding.jax_versions import enable_x64, has_x64, mesh_in_scope, set_mesh

# The name under which v1 keeps the tree of `v1.save`. Source: `_src/layout/checkpoint_layout.py`.
_STATE = "state"


class CheckpointableHandler(v1.CheckpointableHandler[Any, Any]):
    """The handler for `ucp.args.Save` and `ucp.args.Restore` in v1: `v1.save_checkpointables(path,
    {"model": ucp.args.Save(tree)})`, sync and async, and `v1.load_checkpointables(path, {"model":
    ucp.args.Restore(mesh=mesh)})["model"]`, which gives the tree.

    It is registered for every name but `state`, which v1 reserves. With `orbax_context`, trees are
    saved without `Save` around them, under any name.
    """

    async def save(
        self, directory: v1.path.PathAwaitingCreation, checkpointable: Save
    ) -> Awaitable[None]:
        pending = begin(directory.path, lambda: checkpointable, DEFAULT_BUDGET)
        if pending.is_staged:
            with pending.shared.telling():
                await directory.await_creation()
            # a thread, which may go on after this event loop, finishes the save
            pool = ThreadPoolExecutor(1)
            written = pool.submit(pending.finish)
            pool.shutdown(wait=False)
            await asyncio.to_thread(pending.wait_for_host, lambda: not written.done())
            ending = _result(written)
        else:
            ending = self._finish(directory, pending)
        noted = NotedLoop(pending.directory.url())
        note(noted)
        return noted.run(ending)

    async def _finish(
        self, directory: v1.path.PathAwaitingCreation, pending: SnapshottedSave
    ) -> None:
        with pending.shared.telling():
            await directory.await_creation()
        await asyncio.to_thread(pending.finish)

    async def load(
        self, directory: os.PathLike[str], abstract_checkpointable: Restore | None = None
    ) -> Awaitable[Any]:
        x64, mesh = has_x64(), mesh_in_scope()
        args = abstract_checkpointable or Restore()

        def load() -> Any:
            with enable_x64(x64), set_mesh(mesh) if mesh else nullcontext():
                return restore(directory, args, DEFAULT_BUDGET)

        return asyncio.to_thread(load)

    async def metadata(self, directory: os.PathLike[str]) -> Any:
        """Stock Orbax's metadata of the item: its tree, with shapes, dtypes and shardings."""
        return await v1.handlers.PyTreeHandler().metadata(epath.Path(directory))

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Save)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, Restore)


async def _result(written: Future[None]) -> None:
    await asyncio.wrap_future(written)


v1.handlers.register_handler(CheckpointableHandler)


class PyTreeHandler(CheckpointableHandler):
    """The replacement for v1's own handler of pytrees, which takes the same objects."""

    def __init__(self, context: v1.Context | None = None):
        context = context or get_context()
        self._memory = context.memory_options
        self._partial = context.pytree_options.loading.partial_load
        self._stock = v1.handlers.PyTreeHandler()

    async def save(
        self, directory: v1.path.PathAwaitingCreation, checkpointable: Any
    ) -> Awaitable[None]:
        args = checkpointable
        if not isinstance(args, Save):
            bounds = self._memory.write_concurrent_bytes, self._memory.transfer_concurrent_bytes
            args = Save(checkpointable, *bounds)
        return await super().save(directory, args)

    async def load(
        self, directory: os.PathLike[str], abstract_checkpointable: Any = None
    ) -> Awaitable[Any]:
        args = abstract_checkpointable
        if not isinstance(args, Restore):
            # as in v1, a leaf without a sharding goes to the devices that it was saved from, and
            # the result has the target's dtypes
            budget = self._memory.read_concurrent_bytes
            item = None if args is None else target_of(args)
            if item is not None and self._partial:
                args = partial_restore(item, args, budget)
            else:
                args = Restore(item, mesh="saved", cast=item is not None, budget_bytes=budget)
        return await super().load(directory, args)

    def is_handleable(self, checkpointable: Any) -> bool:
        return super().is_handleable(checkpointable) or self._stock.is_handleable(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return super().is_abstract_handleable(
            abstract_checkpointable
        ) or self._stock.is_abstract_handleable(abstract_checkpointable)


# v1 writes the module and name of the handler's class beside an item, and loads the item by the
# handler with that name: without jax_ucp, it is the handler of stock Orbax.
PyTreeHandler.__module__ = v1.handlers.PyTreeHandler.__module__
PyTreeHandler.__qualname__ = v1.handlers.PyTreeHandler.__qualname__


def orbax_context(context: v1.Context | None = None) -> v1.Context:
    """A context of Orbax v1 in which pytrees are kept in the universal format, under any name.

    Other objects, such as dataset iterators, are saved by their own handlers.

    Args:
        context: the context to copy, if given; its other options stay as they are.

    Returns:
        The context, for `with` or for `training.Checkpointer(context=...)`.

    Raises:
        ImportError: where orbax-checkpoint has no v1 as it is now.

    Example:
        >>> import jax_ucp as ucp
        >>> from orbax.checkpoint import v1
        >>> with ucp.orbax_context():
        ...     v1.save("/tmp/run/0", state)  # doctest: +SKIP
        >>> v1.training.Checkpointer("/tmp/run", context=ucp.orbax_context())  # doctest: +SKIP
    """
    ours = v1.Context(context)
    theirs = ours.checkpointables.registry
    registry = v1.handlers.local_registry(include_global_registry=False)
    for handler, name in theirs.get_all_entries():
        is_stock = handler is v1.handlers.PyTreeHandler
        registry.add(
            PyTreeHandler if is_stock else handler,
            checkpointable_name=name,
            secondary_typestrs=theirs.get_secondary_typestrs(handler) or None,
        )
    ours.checkpointables.registry = registry
    return ours
