"""Behind Orbax's `CheckpointManager`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from jax_ucp.arguments import whole_number
from jax_ucp.handler.items import Restore, Save, begin, restore
from jax_ucp.handler.stock_args import RESTORE_ARGS, SAVE_ARGS, restore_args, save_args
from jax_ucp.sources.budget import DEFAULT_BUDGET

# What the step's metadata names as the handler of an item: `CheckpointManager.restore(step)`
# without arguments looks it up. Source: `_src/handlers/pytree_checkpoint_handler.py`,
# `handler_type_registry.py` (0.12.8).
STOCK_TYPESTR = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


class CheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores pytrees for `CheckpointManager`, in the universal format.

    It takes `ucp.args`, and, handed over in a `handler_registry`, stock Orbax's arguments for
    PyTrees. `async_save` returns when this process's part of the tree is in host memory; the rest
    happens in the background. A save of which any process cannot do its part, or would save another
    tree or step than the others, raises in all of them, and is no checkpoint. `restore` also reads
    what stock Orbax wrote. `budget_bytes` bounds what is in flight in either direction, where the
    arguments of a save or a restore do not.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET):
        self._budget_bytes = whole_number("budget_bytes", budget_bytes)
        # Orbax keeps one class per name in its registry, and asks the instance for the name that
        # goes on disk: the class has its own, and every instance says it is stock.
        self.typestr = lambda: STOCK_TYPESTR

    @classmethod
    def typestr(cls) -> str:
        return "jax_ucp.CheckpointHandler"

    async def async_save(self, directory: os.PathLike[str], args: Any) -> list[Any]:
        begun = begin(directory, save_args(args), self._budget_bytes)
        return [
            CommitFutureAwaitingContractedSignals(
                asyncio.to_thread(begun.finish), name="jax_ucp_write"
            )
        ]

    def save(self, directory: os.PathLike[str], args: Any) -> None:
        begin(directory, save_args(args), self._budget_bytes).finish()

    def restore(self, directory: os.PathLike[str], args: Any = None) -> Any:
        return restore(directory, restore_args(directory, args), self._budget_bytes)

    def metadata(self, directory: os.PathLike[str]) -> Any:
        """What stock Orbax says of the item: shapes, dtypes and shardings in `.tree`, which may be
        the target of a restore.
        """
        return ocp.PyTreeCheckpointHandler().metadata(epath.Path(directory))


ocp.args.register_with_handler(CheckpointHandler, for_save=True)(Save)
ocp.args.register_with_handler(CheckpointHandler, for_restore=True)(Restore)


def handler_registry(budget_bytes: int = DEFAULT_BUDGET) -> Any:
    """What `CheckpointManager(handler_registry=...)` takes, for programs whose calls say stock
    Orbax's arguments.

    Every item that is saved or restored by `StandardSave`, `StandardRestore`, `PyTreeSave`,
    `PyTreeRestore`, or by `ucp.args`, goes through our handler; other items, such as JSON, through
    their own.

    Example:
        `CheckpointManager(path, handler_registry=ucp.handler_registry())`
    """
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = CheckpointHandler(budget_bytes)
    for args in (*SAVE_ARGS, *RESTORE_ARGS):
        registry.add(None, args, handler)
    return registry
