"""The handler for Orbax's `CheckpointManager`."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from jax_ucp.arguments import whole_number
from jax_ucp.arrays.budget import DEFAULT_BUDGET
from jax_ucp.handler.at_exit import NotedCommit, note
from jax_ucp.handler.items import Restore, Save, SnapshottedSave, begin, restore
from jax_ucp.handler.stock_args import RESTORE_ARGS, SAVE_ARGS, restore_args, save_args
from jax_ucp.universal.step import STOCK_HANDLER


class CheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores pytrees for `CheckpointManager`, in the universal format.

    It takes `ucp.args`, and in a `handler_registry` also stock Orbax's arguments for PyTrees.
    `async_save` returns when this process's part of the tree is in host memory, and writes it in
    the background. If a process cannot do its part, or has another tree or step than the others,
    the save raises in all processes, and there is no checkpoint. `restore` also reads checkpoints
    of stock Orbax.

    Args:
        budget_bytes: how much memory blocks may take at once, unless the arguments of a save or a
            restore have another limit.
        snapshot_bytes: how much of the tree a save may hold on the host, as for `ucp.args.Save`,
            unless its arguments have another limit; by default all that this process writes.

    Raises:
        ValueError: for a limit that is not a positive number.

    Example:
        >>> import jax_ucp as ucp, orbax.checkpoint as ocp
        >>> manager = ocp.CheckpointManager(
        ...     "/tmp/run", item_handlers=ucp.CheckpointHandler())  # doctest: +SKIP
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET, snapshot_bytes: int | None = None):
        self._budget_bytes = whole_number("budget_bytes", budget_bytes)
        if snapshot_bytes is not None:
            whole_number("snapshot_bytes", snapshot_bytes)
        self._snapshot_bytes = snapshot_bytes
        # Orbax registers the class by its name, and writes the name of the instance to disk: the
        # class has a name of its own, and every instance that of stock Orbax's handler
        self.typestr = lambda: STOCK_HANDLER

    @classmethod
    def typestr(cls) -> str:
        return "jax_ucp.CheckpointHandler"

    async def async_save(self, directory: os.PathLike[str], args: Any) -> list[Any]:
        """Copy this process's part of the tree to host memory, and write it in the background.

        Args:
            directory: the folder of the item, which Orbax has made or will make.
            args: `ucp.args.Save`, or stock Orbax's arguments for PyTrees.

        Returns:
            One future, for which Orbax waits.
        """
        pending = self._begin(directory, args)
        commit = NotedCommit(pending.directory.url(), asyncio.to_thread(pending.finish))
        note(commit)
        if pending.is_staged:
            await asyncio.to_thread(pending.wait_for_host, commit.is_running)
        return [commit]

    def save(self, directory: os.PathLike[str], args: Any) -> None:
        """Write the tree, and return when it is a checkpoint.

        Args:
            directory: of the item.
            args: as for `async_save`.
        """
        self._begin(directory, args).finish()

    def _begin(self, directory: os.PathLike[str], args: Any) -> SnapshottedSave:
        made = partial(save_args, args)
        return begin(directory, made, self._budget_bytes, self._snapshot_bytes)

    def restore(self, directory: os.PathLike[str], args: Any = None) -> Any:
        """The tree in a directory, ours or stock Orbax's.

        Args:
            directory: of the item.
            args: `ucp.args.Restore`, or stock Orbax's arguments for PyTrees; by default the arrays
                go where they were saved from, as stock Orbax's do.

        Returns:
            The pytree, as `Checkpoint.restore` gives it.
        """
        return restore(directory, restore_args(directory, args), self._budget_bytes)

    def metadata(self, directory: os.PathLike[str]) -> Any:
        """Stock Orbax's metadata of the item.

        Args:
            directory: of the item.

        Returns:
            Shapes, dtypes and shardings in `.tree`, which may be the target of a restore.
        """
        return ocp.PyTreeCheckpointHandler().metadata(epath.Path(directory))


ocp.args.register_with_handler(CheckpointHandler, for_save=True)(Save)
ocp.args.register_with_handler(CheckpointHandler, for_restore=True)(Restore)


def handler_registry(budget_bytes: int = DEFAULT_BUDGET, snapshot_bytes: int | None = None) -> Any:
    """A registry for `CheckpointManager(handler_registry=...)`, for programs that give arguments of
    stock Orbax.

    Every item that is saved or restored by `StandardSave`, `StandardRestore`, `PyTreeSave`,
    `PyTreeRestore`, or by `ucp.args`, goes through our handler; other items, such as JSON, through
    their own.

    Its arguments are those of `CheckpointHandler`.

    Returns:
        A new registry.

    Example:
        >>> import jax_ucp as ucp, orbax.checkpoint as ocp
        >>> manager = ocp.CheckpointManager(
        ...     "/tmp/run", handler_registry=ucp.handler_registry())  # doctest: +SKIP
    """
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = CheckpointHandler(budget_bytes, snapshot_bytes)
    for args in (*SAVE_ARGS, *RESTORE_ARGS):
        registry.add(None, args, handler)
    return registry
