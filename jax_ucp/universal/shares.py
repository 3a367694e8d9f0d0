"""A copy that several processes make, none of which leads: each does its share, and the last to
finish commits.

This is for schedulers that only start processes. What the processes have in common is the directory
that they write to: `ucp-ledger.jsonl` says which copy it is of, a ledger of each share what is
done of it, and `ucp.process_I.json` that a share is complete.
"""

from __future__ import annotations

import collections
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from zlib import crc32

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.in_flight import FILES, each_file
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files, file_size, read_file
from jax_ucp.sources.budget import batches, in_threads
from jax_ucp.sources.checks import Check
from jax_ucp.sources.contents import Contents
from jax_ucp.sources.proved import proved
from jax_ucp.sources.work import HERE, shared_out
from jax_ucp.universal.copy import (
    Block,
    CopyPlan,
    Part,
    commit_copy,
    conversion_note,
    copy_part,
    identity_of,
    is_result,
    of_one_chunk,
    require_target,
)
from jax_ucp.universal.ledger import LEDGER_FILE, Ledger, remove_ledger
from jax_ucp.universal.metadata import digest
from jax_ucp.universal.store import (
    CONVERSION_FILE,
    ZarrStore,
    delete_part,
    part_is_written,
    write_part,
)


@dataclass(frozen=True)
class Share:
    """Share `index` of `count`, from 0 on.

    >>> str(Share(2, 8))
    '2/8'
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"there is no share {self}: shares are 0/{self.count} to"
                f" {self.count - 1}/{self.count}"
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def ledger(self) -> str:
        return f"ucp-ledger_{self.index}_of_{self.count}.jsonl"


class Sized(Protocol):
    """Something of so many bytes."""

    @property
    def nbytes(self) -> int: ...


def parts_of(contents: Contents, plan: CopyPlan, count: int) -> Sequence[Part]:
    """The whole copy in parts of about as many bytes: neighbours go together, and a pack, or what
    lies in one stored chunk, is of one part.
    """
    packs = list(enumerate(plan.packs))
    alone = list(batches(plan.alone, lambda block: 1, 1, 1, partial(of_one_chunk, contents)))
    shares = shared_evenly([*(blocks for _, blocks in packs), *alone], count)
    parts = [Part([], [], []) for _ in range(count)]
    for pack in packs:
        parts[next(shares)].packs.append(pack)
    creates = dict.fromkeys(Part.whole(plan).creates, 0)
    begun: set[str] = set()
    for blocks in alone:
        share = next(shares)
        parts[share].alone.extend(blocks)
        creates.update((block.key, share) for block in blocks if block.key not in begun)
        begun.update(block.key for block in blocks)
    for key, share in creates.items():
        parts[share].creates.append(key)
    return parts


def shared_evenly(groups: Sequence[Sequence[Sized]], count: int) -> Iterator[int]:
    """The share of each group: that in which the middle of its bytes lies."""
    sizes = [sum(piece.nbytes for piece in group) for group in groups]
    total, before = max(1, sum(sizes)), 0
    for size in sizes:
        yield min(count - 1, count * (2 * before + size) // (2 * total))
        before += size


def copy_share(
    contents: Contents,
    plan: CopyPlan,
    target: FilePath,
    share: Share,
    progress: Callable[[Block], None] = lambda block: None,
    begin: Callable[[int], None] = lambda nbytes: None,
) -> bool:
    """Do a share of a copy, and commit it where all others are done. Whether `target` is now a
    checkpoint. `begin` hears of the share's bytes before `progress` hears of a block.

    Each process has the same plan. A share that was stopped is taken up by the same call; one that
    is complete is looked at, and left as it is. A check is of the share that has the first block of
    an array that it proves.

    Raises what `copy` raises; FileExistsError where `target` is a checkpoint that is not the result
    of this copy.
    """
    files = target.folder()
    identity = digest(f"{identity_of(contents, plan)} in {share.count} shares".encode())
    if is_result(target, identity):
        _clear(files, share.count)
        return True
    require_target(contents, target)
    require_same_copy(files, identity)
    parts = parts_of(contents, plan, share.count)
    ours = partial(is_of, _owners(parts), share)
    with (
        shared_out(contents, HERE, "", ours) as coordinator,
        closing(Ledger(target, identity, share.ledger)) as ledger,
    ):
        if not ledger.resumed and is_result(target, identity):
            # committed and cleared away a moment ago: nothing of it is written again
            ledger.remove()
            _clear(files, share.count)
            return True
        store = ZarrStore(coordinator.opened.files(str(target)), plan.arrays, plan.chunks)
        begin(parts[share.index].nbytes)
        with proved(coordinator.opened.proofs):
            copy_part(parts[share.index], plan, store, ledger, progress, coordinator)
        contents.files.require_unchanged()
        write_part(store, share.index)
    if _are_written(files, share.count):
        _commit(contents, plan, target, share.count, identity)
    elif not is_result(target, identity):
        return False
    else:  # by another process that had this share too
        delete_part(files, share.index)
    return True


def _commit(
    contents: Contents, plan: CopyPlan, target: FilePath, count: int, identity: str
) -> None:
    """Make the directory a checkpoint, unless another process does it meanwhile."""
    files = target.folder()
    try:
        with _alone(target):
            if not is_result(target, identity):
                files.write(CONVERSION_FILE, [conversion_note(identity)], durable=True)
                store = ZarrStore(files, plan.arrays, plan.chunks)
                commit_copy(contents, plan, range(count)).write(store)
    except (CorruptData, FileNotFoundError):
        if not is_result(target, identity):
            raise  # else another has committed it, and cleared away what was to be read
    _clear(files, count)


@contextmanager
def _alone(target: FilePath) -> Iterator[None]:
    """Keep other processes from committing. In a bucket they may: its objects are whole, and the
    same whoever writes them.

    Raises FileNotFoundError where another has cleared away the ledger.
    """
    if target.files.is_remote:
        yield
        return
    handle = os.open(str(target / LEDGER_FILE), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _are_written(files: Files, count: int) -> bool:
    """Whether all shares are complete. Few are asked for at once: who is not among the last to
    finish soon finds one that is not.
    """
    for first in range(0, count, FILES):
        some = range(first, min(first + FILES, count))
        if not all(each_file(files, partial(part_is_written, files), some)):
            return False
    return True


def _clear(files: Files, count: int) -> None:
    """Remove the ledgers of a copy that is committed, that of all shares last."""
    if file_size(files, LEDGER_FILE) is None:
        return

    def clear(share: Share) -> None:
        delete_part(files, share.index)
        remove_ledger(files, share.ledger)

    shares = [partial(clear, Share(index, count)) for index in range(count)]
    collections.deque(in_threads(shares, files.is_remote), maxlen=0)
    files.delete(LEDGER_FILE)


def require_same_copy(files: Files, identity: str) -> None:
    """Say which copy the directory is of. Raises FormatError where it is of another."""
    said = conversion_note(identity) + b"\n"
    try:
        files.create(LEDGER_FILE, said)
    except FileExistsError:
        if read_file(files, LEDGER_FILE) != said:
            raise FormatError(
                f"{files} has an unfinished conversion of another source or spec, of files that"
                " were replaced since, with other options (budget, mesh; of an export its format,"
                " dtype, size of files or config), in another number of shares, or by a machine"
                " with another number of processors."
                " Delete the directory, or give another one."
            ) from None


def _owners(parts: Sequence[Part]) -> dict[str, int]:
    """By array the first share that has a block of it."""
    owners: dict[str, int] = {}
    for share, part in enumerate(parts):
        for block in part.blocks:
            owners.setdefault(block.key, share)
    return owners


def is_of(owners: Mapping[str, int], share: Share, check: Check) -> bool:
    """Whether a share runs a check: that with the first of its leaves which `owners` have, or where
    they have none any of all shares.
    """
    of_leaves = [owners[leaf] for leaf in check.leaves if leaf in owners]
    return share.index == (
        min(of_leaves) if of_leaves else crc32(check.name.encode()) % share.count
    )
