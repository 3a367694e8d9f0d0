"""Orbax: our format behind `CheckpointManager`. The only file that imports orbax.

A whole handler (`AsyncCheckpointHandler`), so that nothing lies between the tree and the store;
what it writes says that stock Orbax's PyTree handler wrote it, so stock reads it where jax_ucp is
not installed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from orbax.checkpoint import v1
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from jax_ucp.arguments import whole_number
from jax_ucp.checkpoint import open
from jax_ucp.files.local import LocalFiles
from jax_ucp.sharding.fit import Rule
from jax_ucp.sharding.restore import has_x64
from jax_ucp.sharding.save import (
    Description,
    Snapshot,
    commit_snapshot,
    content,
    describe,
    take_snapshot,
    write_snapshot,
)
from jax_ucp.sharding.shared_save import SharedSave, attempt
from jax_ucp.sources.budget import DEFAULT_BUDGET
from jax_ucp.sources.checks import Extent

# What the step's metadata names as the handler of an item: `CheckpointManager.restore(step)`
# without arguments looks it up. Source: `_src/handlers/pytree_checkpoint_handler.py`,
# `handler_type_registry.py` (0.12.8).
STOCK_TYPESTR = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


class CheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores pytrees for `CheckpointManager`, in the universal format.

    `async_save` returns when this process's part of the tree is in host memory; the rest happens in
    the background. A save of which any process cannot do its part, or would save another tree or
    step than the others, raises in all of them, and is no checkpoint. `restore` also reads what
    stock Orbax wrote. `budget_bytes` bounds what is in flight in either direction, where the
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

    async def async_save(self, directory: os.PathLike[str], args: Save) -> list[Any]:
        begun = _begin(directory, args, self._budget_bytes)
        return [
            CommitFutureAwaitingContractedSignals(
                asyncio.to_thread(begun.finish), name="jax_ucp_write"
            )
        ]

    def save(self, directory: os.PathLike[str], args: Save) -> None:
        _begin(directory, args, self._budget_bytes).finish()

    def restore(self, directory: os.PathLike[str], args: Restore | None = None) -> Any:
        args = args or Restore()
        return _restore(directory, args, _budget(args, self._budget_bytes))

    def metadata(self, directory: os.PathLike[str]) -> Any:
        """The tree with a `jax.ShapeDtypeStruct` for every array: a target for `Restore`."""
        return open(directory).abstract()


@ocp.args.register_with_handler(CheckpointHandler, for_save=True)
@dataclass
class Save(ocp.args.CheckpointArgs):
    """A pytree to save: arrays, numbers, strings and None in any registered containers.

    `budget_bytes` bounds what is in flight while it is written; None leaves it to the handler.

    Raises UnsupportedLeaf for a leaf that could not be restored as what it was. Among several
    processes the save does, in the process that has the leaf; the others, which would wait for that
    one, raise SaveFailed with its words.
    """

    item: Any
    budget_bytes: int | None = None
    described: Callable[[], Description] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Here, and not in the handler: what cannot be saved is refused before Orbax has begun
        # anything.
        self.described = attempt(self._describe)

    def _describe(self) -> Description:
        if self.budget_bytes is not None:
            whole_number("budget_bytes", self.budget_bytes)
        return describe(self.item)


@ocp.args.register_with_handler(CheckpointHandler, for_restore=True)
@dataclass
class Restore(ocp.args.CheckpointArgs):
    """What to restore, and where: the arguments of `Checkpoint.restore`; a budget may be None."""

    item: Any = None
    mesh: Mesh | None = None
    rules: Sequence[Rule] = ()
    cast: bool | DTypeLike = False
    partial: bool = False
    share_reads: bool = False
    verify: Extent = "sample"
    budget_bytes: int | None = None
    narrow_integers: bool = False


def _budget(args: Save | Restore, default: int) -> int:
    return default if args.budget_bytes is None else args.budget_bytes


@dataclass(frozen=True)
class _Begun:
    """A save whose tree may change again, and which `finish`, in any thread, makes a checkpoint."""

    shared: SharedSave
    snapshot: Callable[[], Snapshot]
    directory: LocalFiles
    budget_bytes: int

    def finish(self) -> None:
        self.shared.run(
            lambda: content(self.snapshot()),
            lambda: write_snapshot(self.snapshot(), self.directory, self.budget_bytes),
            lambda: commit_snapshot(self.snapshot(), self.directory),
        )


def _begin(path: os.PathLike[str], args: Save, budget_bytes: int) -> _Begun:
    directory = LocalFiles(path)
    shared = SharedSave(directory.root)
    snapshot = attempt(lambda: take_snapshot(args.described()))
    return _Begun(shared, snapshot, directory, _budget(args, budget_bytes))


def _restore(directory: os.PathLike[str], args: Restore, budget_bytes: int) -> Any:
    names = ("mesh", "rules", "cast", "partial", "share_reads", "narrow_integers", "verify")
    options = {name: getattr(args, name) for name in names}
    # The program that saved the tree restores it: codes and scales are leaves of it like any other.
    checkpoint = open(directory, dequantize=False)
    return checkpoint.restore(args.item, **options, budget_bytes=budget_bytes)


class CheckpointableHandler(v1.CheckpointableHandler[Save, Restore]):
    """The same for Orbax v1: `v1.save_checkpointables(path, {"model": ucp.args.Save(tree)})`, sync
    and async, and `v1.load_checkpointables(path, {"model": ucp.args.Restore(mesh=mesh)})["model"]`,
    which is the tree.

    It is registered for `Save` and `Restore` under every name but `state` and `pytree`, which v1
    keeps for its own.
    """

    async def save(
        self, directory: v1.path.PathAwaitingCreation, checkpointable: Save
    ) -> Awaitable[None]:
        return self._finish(directory, _begin(directory.path, checkpointable, DEFAULT_BUDGET))

    async def _finish(self, directory: v1.path.PathAwaitingCreation, begun: _Begun) -> None:
        with begun.shared.telling():
            await directory.await_creation()
        await asyncio.to_thread(begun.finish)

    async def load(
        self, directory: os.PathLike[str], abstract_checkpointable: Restore | None = None
    ) -> Awaitable[Any]:
        x64 = has_x64()
        args = abstract_checkpointable or Restore()

        def restore() -> Any:
            with jax.enable_x64(x64):
                return _restore(directory, args, _budget(args, DEFAULT_BUDGET))

        return asyncio.to_thread(restore)

    async def metadata(self, directory: os.PathLike[str]) -> Restore:
        """A target: the tree with a `jax.ShapeDtypeStruct` for every array."""
        return Restore(await asyncio.to_thread(lambda: open(directory).abstract()))

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Save)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, Restore)


v1.handlers.register_handler(CheckpointableHandler)
