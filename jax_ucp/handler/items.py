"""The arguments by which an item of a step is saved and restored, and the two operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_ucp.arguments import whole_number
from jax_ucp.arrays.checks import Extent
from jax_ucp.checkpoint import open
from jax_ucp.errors import UnsupportedPath
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import Files
from jax_ucp.jobs.ledger import claimed
from jax_ucp.sharding.fit import Rule
from jax_ucp.sharding.save import (
    Description,
    Snapshot,
    Staging,
    commit_snapshot,
    content,
    describe,
    take_snapshot,
    write_snapshot,
)
from jax_ucp.sharding.shared_save import SharedSave, attempt
from jax_ucp.sharding.trees import Missing
from jax_ucp.universal.step import UNFINISHED_STEP

# Google's buckets are left out: there Orbax does not rename by default, and some of them can.
_WITHOUT_RENAMES = "s3://", "s3a://", "az://", "abfs://", "abfss://"


@dataclass
class Save(ocp.args.CheckpointArgs):
    """A pytree to save.

    Args:
        item: arrays, numbers, strings and None in any registered containers.
        budget_bytes: bounds what is in flight while it is written; None leaves it to the handler.
        snapshot_bytes: bounds the copies of it that this process holds on the host until they are
            written. Of a larger state the first copies are written before the save returns, and the
            last in the background. A chunk on disk needs all of the shards that it lies in, so that
            the bound may be passed by these. None leaves it to the handler. On CPU nothing is
            copied, and nothing bounded.

    Raises:
        UnsupportedLeaf: for a leaf that could not be restored as what it was. Among several
            processes the save does, in the process that has the leaf; the others, which would wait
            for that one, raise SaveFailed with its words.
    """

    item: Any
    budget_bytes: int | None = None
    snapshot_bytes: int | None = None
    described: Callable[[], Description] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # here and not in the handler, so that a tree that cannot be saved is refused before Orbax
        # begins anything
        self.described = attempt(self._describe)

    def _describe(self) -> Description:
        for name in ("budget_bytes", "snapshot_bytes"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        return describe(self.item)


@dataclass
class Restore(ocp.args.CheckpointArgs):
    """The arguments of a restore by a manager.

    Without an item and a mesh, arrays go where they were saved from, as by stock Orbax. For numpy
    arrays restore the step that `jax_ucp.open` gives.

    Args:
        item: the `target` of `Checkpoint.restore`.
        budget_bytes: how much memory may be used beside the result; None leaves it to the handler.

    The other arguments are those of `Checkpoint.restore`.
    """

    item: Any = None
    mesh: Mesh | Literal["saved"] | None = None
    rules: Sequence[Rule] = ()
    cast: bool | DTypeLike = False
    partial: bool = False
    missing: Missing = "refuse"
    share_reads: bool = False
    verify: Extent = "sample"
    budget_bytes: int | None = None
    narrow_integers: bool = False


@dataclass(frozen=True)
class SnapshottedSave:
    """A snapshotted save; `finish`, in any thread, writes and commits it."""

    shared: SharedSave
    snapshot: Callable[[], Snapshot]
    directory: Files
    budget_bytes: Callable[[], int]

    def wait_for_host(self, is_running: Callable[[], bool]) -> None:
        """Return when `finish`, in another thread, has copied all to the host or has ended."""
        staging = self._staging
        while staging and not staging.is_copied.wait(0.1) and is_running():
            pass

    @property
    def is_staged(self) -> bool:
        """Whether `finish` copies arrays to the host, so that training has to wait for that."""
        return self._staging is not None

    @property
    def _staging(self) -> Staging | None:
        with suppress(Exception):  # `finish` raises it again
            return self.snapshot().staging

    def finish(self) -> None:
        url = self.directory.url()
        if UNFINISHED_STEP in url and url.startswith(_WITHOUT_RENAMES):
            raise UnsupportedPath(  # not before, since Orbax waits for what it has begun
                f"{url} would have to be renamed by Orbax, and nothing in a bucket can be: give the"
                " manager options=ucp.in_bucket(options), or v1 the context ucp.in_bucket(context)"
            )
        with ExitStack() as kept:
            if jax.process_index() == 0:
                with self.shared.telling():
                    kept.enter_context(claimed(self.directory))
            self.shared.run(
                lambda: content(self.snapshot()),
                lambda: write_snapshot(self.snapshot(), self.directory, self.budget_bytes()),
                commit_snapshot,
            )


def begin(
    path: os.PathLike[str],
    made: Callable[[], Save],
    budget_bytes: int,
    snapshot_bytes: int | None = None,
) -> SnapshottedSave:
    """A save of which this process's part of the tree is in host memory, as far as `snapshot_bytes`
    allow.

    `made` gives the arguments. If that fails in one of several processes, `finish` raises in all.
    """
    args = attempt(made)
    directory = file_path(path).folder()
    shared = SharedSave(directory.url())

    def snapshot() -> Snapshot:
        asked = args().snapshot_bytes
        return take_snapshot(args().described(), snapshot_bytes if asked is None else asked)

    taken = attempt(snapshot)
    return SnapshottedSave(shared, taken, directory, lambda: _budget(args(), budget_bytes))


def restore(directory: os.PathLike[str], args: Restore, budget_bytes: int) -> Any:
    """The tree in the directory, restored by the arguments."""
    options: dict[str, Any] = {each.name: getattr(args, each.name) for each in fields(args)}
    options["target"] = options.pop("item")
    options["budget_bytes"] = _budget(args, budget_bytes)
    if args.item is None and args.mesh is None:
        options["mesh"] = "saved"
    # quantised weights are not converted: the program that restores the tree has saved it like this
    checkpoint = open(directory, dequantize=False, share_reads=args.share_reads)
    return checkpoint.restore(**options)


def _budget(args: Save | Restore, default: int) -> int:
    return default if args.budget_bytes is None else args.budget_bytes
