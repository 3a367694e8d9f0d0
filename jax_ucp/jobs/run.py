"""The one way in which jobs are run: by one process, which may give blocks to an executor, or by
processes that do a share each, without a leader.

A job writes a checkpoint to a target. A `Target` defines the parts of the result, and how it is
completed. This module decides which process writes each block, what the ledgers record, and what
happens after a kill.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar
from zlib import crc32

from jax_ucp.arrays.checks import Check
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.proved import proved
from jax_ucp.errors import CorruptData
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files
from jax_ucp.garbage import gc_frozen
from jax_ucp.jobs.ledger import (
    Blocks,
    Ledger,
    Share,
    Written,
    are_complete,
    clear,
    committing,
    read_complete,
    require_same_job,
    result_note,
    write_complete,
)
from jax_ucp.jobs.work import Coordinator, Task, shared_out
from jax_ucp.layout.box import Box

# Bytes of blocks that are synced together: the disk writes them while the next ones are read. A job
# that is killed writes at most about this many bytes again.
GROUP_BYTES = 256 << 20


class Block(Protocol):
    """A planned unit of work, which is read and written at once."""

    @property
    def keys(self) -> Iterable[str]:
        """The arrays whose elements it has."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def place(self) -> tuple[str, Box]:
        """Its name in a ledger: an array or a file, and the elements or bytes in it."""
        ...


AnyBlock = TypeVar("AnyBlock", bound=Block)
AnyBlock_co = TypeVar("AnyBlock_co", bound=Block, covariant=True)


class BlockTask(Task[Sequence[Written]], Protocol[AnyBlock_co]):
    """Blocks to be written, unless they are on disk as `noted`; the result has their records."""

    @property
    def blocks(self) -> Sequence[AnyBlock_co]: ...

    @property
    def noted(self) -> Sequence[Written | None]: ...


@dataclass(frozen=True)
class Work(Generic[AnyBlock]):
    """The part of a job that this process does: groups of blocks, by their numbers among all
    groups. `progress` is called with each block that is on disk, and whether it was found there.
    """

    groups: Sequence[tuple[int, Sequence[AnyBlock]]]
    owners: Mapping[str, int]
    share: Share | None
    coordinator: Coordinator
    ledger: Ledger
    progress: Callable[[AnyBlock, bool], object]

    def owns(self, key: str) -> bool:
        """Whether this process writes the metadata of an array, because it has its first block."""
        return self.share is None or self.share.index == self.owners.get(key, 0)

    def noted(self, blocks: Iterable[AnyBlock]) -> tuple[Written | None, ...]:
        """The record of each block in the ledger of a stopped process, or None."""
        done = self.ledger.done
        places = [block.place for block in blocks]
        return tuple(done.get(key, {}).get(str(box)) for key, box in places)

    def run(
        self,
        tasks: Iterable[BlockTask[AnyBlock]],
        budget_bytes: int,
        files: Files,
        is_durable: bool,
    ) -> None:
        """Write blocks to `files`. If `is_durable`, the blocks of a task are durable when it is
        done; otherwise they are durable when the files are synced.
        """
        written, lock = self.ledger.written, threading.Lock()
        waiting: list[AnyBlock] = []
        waiting_bytes = 0

        def finish(task: BlockTask[AnyBlock], results: Sequence[Written]) -> None:
            fresh: list[AnyBlock] = []
            for block, noted, now in zip(task.blocks, task.noted, results, strict=True):
                key, box = block.place
                written[key][str(box)] = now
                if now == noted:
                    self.progress(block, True)
                else:
                    fresh.append(block)
            settle(fresh, 0 if is_durable else GROUP_BYTES)

        def settle(fresh: Sequence[AnyBlock], nbytes: int) -> None:
            """Record blocks in the ledger, once the disk has them, if so many bytes wait."""
            nonlocal waiting, waiting_bytes
            with lock:
                waiting += fresh
                waiting_bytes += sum(block.nbytes for block in fresh)
                if not waiting or waiting_bytes < nbytes:
                    return
                group, waiting, waiting_bytes = waiting, [], 0
            if not is_durable:
                files.sync()
            self.ledger.note([block.place for block in group])
            for block in group:
                self.progress(block, False)

        self.coordinator.run(tasks, finish, budget_bytes, files.is_remote)
        settle((), 0)


class Target(Protocol[AnyBlock]):
    """The result of a job on a checkpoint: blocks that any process may write, and a commit."""

    contents: Contents
    path: FilePath  # the result
    again: str  # what to do when a worker's process has ended

    @property
    def place(self) -> FilePath:
        """The folder of its blocks and ledgers until it is committed."""
        return self.path

    @abstractmethod
    def identity(self) -> str:
        """The identity on which all processes of the job must agree: of the source as it was
        opened, and the blocks.
        """
        ...

    @abstractmethod
    def groups(self, count: int) -> Sequence[Sequence[AnyBlock]]:
        """All blocks in order, in groups. One of `count` processes writes all blocks of a group."""
        ...

    @abstractmethod
    def require_free(self, is_shared: bool) -> None:
        """Raise FileExistsError if the target cannot be made, or continued, at its path."""
        ...

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[Ledger]:
        """Context in which one process writes the whole target, with the ledger. If it ends without
        an error, the target is complete.
        """
        ...

    def joined(self) -> AbstractContextManager[object]:
        """Context in which a share is written."""
        return nullcontext()

    @abstractmethod
    def write(self, work: Work[AnyBlock]) -> None:
        """Write the blocks of this process and the metadata of the arrays it owns, durably."""
        ...

    @abstractmethod
    def commit(self, written: Blocks, prove: Callable[[], None], note: bytes | None) -> None:
        """Complete the target, whose blocks are all written. `prove` is called when all is read. A
        note is written to the folder, and names the job.

        Raises CorruptData if a file that was written is lost.
        """
        ...

    @abstractmethod
    def is_result(self, identity: str) -> bool:
        """Whether the path has the complete result of the job with this identity."""
        ...

    @abstractmethod
    def progress(self, block: AnyBlock, is_found: bool) -> None:
        """Report a block that is on disk; `is_found` if a stopped process wrote it."""
        ...

    def discard(self, ledger: Ledger) -> None:
        """Remove an unfinished target whose source contradicts itself, unless `alone` does."""

    def clear(self, share: Share) -> None:
        """Remove the ledgers of a committed job in shares, of which this process did one."""
        clear(self.path.folder(), share)


def run(target: Target[AnyBlock], executor: Executor | None = None) -> None:
    """Make the target.

    Data that the source stores twice is compared while it is copied, the rest of it after that, and
    the source's files are checked for changes before the commit. Stopped at any moment, a job
    leaves nothing at the path that can be opened; the same call makes the target, or continues it.
    If the source contradicts itself, nothing is left.

    Raises FileExistsError if the path is in use, CorruptData if the source contradicts itself or
    changed meanwhile, FormatError if another unfinished job is there, WorkerError if the executor's
    processes cannot do the work, or one of them has ended.
    """
    contents = target.contents
    target.require_free(False)
    with shared_out(contents, executor, target.again) as coordinator, target.exclusive() as ledger:
        undo = partial(target.discard, ledger)
        with proved(coordinator.opened.proofs, undo) as require_proved:

            def prove() -> None:
                require_proved()
                contents.files.require_unchanged()

            groups = list(enumerate(target.groups(1)))
            with gc_frozen():
                target.write(Work(groups, {}, None, coordinator, ledger, target.progress))
                target.commit(ledger.written, prove, None)


def run_share(
    target: Target[AnyBlock], share: Share, begin: Callable[[int], None] = lambda nbytes: None
) -> bool:
    """Do a share, and commit if all others are done. Returns whether the target is now complete.
    `begin` is called with the bytes of the share before any progress is reported.

    Each process has the same target. The same call continues a share that was stopped; a share that
    is complete is checked, and left as it is. A check is run by the share that has the first block
    of an array that it proves.

    Raises the errors of `run`, and FileExistsError if something other than the result of this job
    is at the path.
    """
    identity = f"{target.identity()} in {share.count} shares"
    is_made = target.is_result(identity)
    try:
        if not is_made:
            target.require_free(True)
            with target.joined():
                is_made = _do_share(target, identity, share, begin)
    except (FileExistsError, FileNotFoundError):
        if not target.is_result(identity):
            raise  # else another process has committed it, and removed its files
        is_made = True
    # it may have been committed by another process that had this share too
    if not is_made and not target.is_result(identity):
        return False
    target.clear(share)
    return True


def _do_share(
    target: Target[AnyBlock], identity: str, share: Share, begin: Callable[[int], None]
) -> bool:
    """Write a share, and commit if all are complete. Returns whether the target is complete."""
    files, contents = target.place.folder(), target.contents
    require_same_job(files, identity)
    groups, owners = share_groups(target.groups(share.count), share)
    ours = partial(_is_of, owners, share)
    with (
        shared_out(contents, None, "", ours) as coordinator,
        closing(Ledger.open(target.place, identity, share.ledger)) as ledger,
    ):
        if not ledger.resumed and target.is_result(identity):
            # another process has just committed it and removed its ledgers: write nothing again
            ledger.remove()
            return True
        begin(sum(block.nbytes for _, group in groups for block in group))
        with proved(coordinator.opened.proofs), gc_frozen():
            target.write(Work(groups, owners, share, coordinator, ledger, target.progress))
        contents.files.require_unchanged()
        write_complete(files, share, identity, ledger.written)
        if not are_complete(files, share.count):
            return False
        try:
            with committing(target.place):
                if not target.is_result(identity):
                    written: dict[str, dict[str, Written]] = {}  # by all shares
                    for each in (Share(index, share.count) for index in range(share.count)):
                        again = f"Delete it, if it is there, and run share {each} again."
                        for key, blocks in read_complete(files, each, identity, again).items():
                            written.setdefault(key, {}).update(blocks)
                    prove = contents.files.require_unchanged
                    target.commit(written, prove, result_note(identity))
        except CorruptData:
            if not target.is_result(identity):
                raise  # else another process has committed it, and removed its ledgers
    return True


def share_groups(
    groups: Sequence[Sequence[AnyBlock]], share: Share
) -> tuple[list[tuple[int, Sequence[AnyBlock]]], dict[str, int]]:
    """The groups of a share, with their numbers, and the first share with a block of each array."""
    ours: list[tuple[int, Sequence[AnyBlock]]] = []
    owners: dict[str, int] = {}
    for number, (group, of) in enumerate(zip(groups, shares_of(groups, share.count), strict=True)):
        if of == share.index:
            ours.append((number, group))
        for block in group:
            for key in block.keys:
                owners.setdefault(key, of)
    return ours, owners


def shares_of(groups: Sequence[Sequence[Block]], count: int) -> Iterator[int]:
    """The share of each group: the one that contains the middle of the group's bytes."""
    sizes = [sum(block.nbytes for block in group) for group in groups]
    total, before = max(1, sum(sizes)), 0
    for size in sizes:
        yield min(count - 1, count * (2 * before + size) // (2 * total))
        before += size


def _is_of(owners: Mapping[str, int], share: Share, check: Check) -> bool:
    """Whether a share runs a check: the first share in `owners` of any of the check's leaves, or if
    they are not in `owners`, a share chosen by the check's label.
    """
    of_leaves = [owners[leaf] for leaf in check.leaves if leaf in owners]
    return share.index == (
        min(of_leaves) if of_leaves else crc32(check.label.encode()) % share.count
    )
