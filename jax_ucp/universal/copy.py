"""From any source into the universal format: block by block, within a budget of bytes, taken up
where it stopped.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import numpy as np

from jax_ucp.arguments import whole_number
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.local import UNFINISHED
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import read_file
from jax_ucp.garbage import uncollected
from jax_ucp.layout.blocks import (
    INNER_BYTES,
    OUTER_BYTES,
    SMALL_BYTES,
    Chunks,
    chunk_shapes,
    grid_boxes,
    grid_place,
    whole_chunks,
)
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sources.budget import (
    BATCH_BYTES,
    BATCH_JOBS,
    DEFAULT_BUDGET,
    HELD_BYTES,
    batches,
    run_bounded,
    threads,
)
from jax_ucp.sources.contents import Contents
from jax_ucp.sources.protocol import TOGETHER, ArrayInfo
from jax_ucp.sources.proved import proved
from jax_ucp.sources.work import (
    HERE,
    TASK_BOXES,
    TASK_BYTES,
    Coordinator,
    Job,
    OpenedJob,
    Workers,
    shared_out,
)
from jax_ucp.universal.ledger import LEDGER_FILE, Ledger
from jax_ucp.universal.metadata import Metadata, digest
from jax_ucp.universal.orbax_tree import orbax_files
from jax_ucp.universal.packs import PACK_BLOCKS, PACK_BYTES, is_indexed, packed_arrays
from jax_ucp.universal.store import (
    COMPANIONS,
    CONVERSION_FILE,
    METADATA_FILE,
    Commit,
    Written,
    ZarrStore,
    array_info,
    is_committed,
    require_storable,
)

# A block in flight is held as read, and as TensorStore encodes it. Beside that there is what was
# read around it: the rows that a flat shard gives whole, or the chunks that it lies in.
COPIES_IN_FLIGHT = 3

# Chunks of chunks have lengths that divide them. So long a part may be left whole.
LARGEST_PART = 512

# Blocks are waited for together: the disk writes so many bytes while the next ones are read. A
# conversion that is killed writes at most about so many again.
GROUP_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """One read and one write: `box` of array `key`, `nbytes` of data, `cost` bytes of memory
    while it is in flight.
    """

    key: str
    box: Box
    nbytes: int
    cost: int

    @property
    def place(self) -> tuple[str, Box]:
        return self.key, self.box


@dataclass(frozen=True)
class CopyPlan:
    """What a copy will do, decided before any byte moves: one block for each outer chunk of each
    array, some of them together in packs.

    `notes` say what the mesh that the chunks are cut for does not have of what was asked for.
    """

    arrays: Mapping[str, ArrayInfo]
    chunks: Mapping[str, Chunks]
    blocks: Sequence[Block]
    budget_bytes: int
    notes: Sequence[str] = ()

    @cached_property
    def packed(self) -> frozenset[str]:
        """The arrays that are packed."""
        return packed_arrays(self.arrays, self.chunks)

    @cached_property
    def packs(self) -> Sequence[Sequence[Block]]:
        """What each pack has, in the order of the blocks."""
        small = (block for block in self.blocks if block.key in self.packed)
        return list(batches(small, lambda block: block.nbytes, PACK_BYTES, PACK_BLOCKS))

    @property
    def alone(self) -> Iterator[Block]:
        """The blocks that are files of their own."""
        return (block for block in self.blocks if block.key not in self.packed)

    @property
    def write_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def peak_bytes(self) -> int:
        """The most memory that blocks in flight can take: the budget, unless all there is takes
        less.
        """
        costs = sorted((block.cost for block in self.blocks), reverse=True)
        return min(sum(costs[: threads()]), max(self.budget_bytes, *costs[:1], 0))


@dataclass(frozen=True)
class Part:
    """What one process does of a copy: packs by number, blocks that are files of their own, the
    arrays whose `zarr.json` it writes, and what else it writes beside them.
    """

    packs: list[tuple[int, Sequence[Block]]]
    alone: list[Block]
    creates: list[str]
    beside: Sequence[Callable[[], None]] = ()

    @property
    def blocks(self) -> Iterator[Block]:
        yield from itertools.chain.from_iterable(blocks for _, blocks in self.packs)
        yield from self.alone

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @staticmethod
    def whole(plan: CopyPlan, beside: Sequence[Callable[[], None]] = ()) -> Part:
        creates = [key for key in plan.arrays if key not in plan.packed]
        return Part(list(enumerate(plan.packs)), list(plan.alone), creates, beside)


@uncollected()
def plan_copy(
    contents: Contents, budget_bytes: int = DEFAULT_BUDGET, cells: Mapping[str, Shape] | None = None
) -> CopyPlan:
    """Chunks small enough that `threads()` blocks fit the budget together, and the blocks in their
    order.

    Chunks are not made smaller than 64 KiB for that; with a very small budget blocks go one at a
    time. `cells` are, by name of an array, equal blocks that no chunk is to cross.

    Raises UnsupportedLeaf for a dtype that the universal format does not have, ValueError for a
    budget that is none.
    """
    budget_bytes = whole_number("budget_bytes", budget_bytes)
    outer = max(SMALL_BYTES, min(OUTER_BYTES, budget_bytes // (COPIES_IN_FLIGHT * threads())))
    stored = contents.arrays.arrays()
    arrays: dict[str, ArrayInfo] = {}
    chunks: dict[str, Chunks] = {}
    blocks: list[Block] = []
    for leaf in contents.leaves:
        if leaf.has_array:
            info = arrays[leaf.name] = array_info(leaf.shape, leaf.dtype)
            require_storable(leaf.label, info.dtype)
            cell = (cells or {}).get(leaf.name)
            chunks[leaf.name], parts = _cut(info, stored[leaf.name].chunk or (), cell, outer)
            blocks.extend([Block(leaf.name, *part) for part in parts])
    return CopyPlan(arrays, chunks, blocks, budget_bytes)


# Thousands of arrays have few shapes.
@functools.lru_cache(maxsize=64)
def _cut(
    info: ArrayInfo, stored: Shape, cell: Shape | None, max_bytes: int
) -> tuple[Chunks, Sequence[tuple[Box, int, int]]]:
    """The chunks of an array that is stored in other ones, if any; and of each block in its order
    the box, the bytes, and the cost.
    """
    size = info.dtype.itemsize
    cell = _cell(info, stored, max_bytes) if cell is None else cell
    chunks = chunk_shapes(info.shape, size, cell, min(INNER_BYTES, max_bytes), max_bytes)
    boxes = list(grid_boxes(info.shape, chunks.outer))
    if stored:  # blocks of one stored chunk follow one another: it is decoded once for all of them
        boxes.sort(key=lambda box: grid_place(box, stored))
    return chunks, [(box, box.size * size, block_cost(box, stored, size)) for box in boxes]


def block_cost(box: Box, chunk: Shape, itemsize: int) -> int:
    """Bytes of memory while a block is read and written: as read, as encoded, and the stored chunks
    that it lies in.

    Large chunks of which it is a part are held decoded, and before that there is beside them what
    they are made from.
    """
    around = whole_chunks(box, chunk).size if chunk else box.size
    cost = (2 * box.size + around) * itemsize
    is_kept = around * itemsize >= HELD_BYTES
    return cost + (around - box.size) * itemsize if is_kept else cost


def _cell(info: ArrayInfo, chunk: Shape, max_bytes: int) -> Shape | None:
    """A stored chunk that is larger than a block may be, if such chunks divide the array: no block
    is of two.

    None also where a chunk has a length that only large numbers divide: what is cut in it would be
    too small.
    """
    if not chunk or math.prod(chunk) * info.dtype.itemsize <= max_bytes:
        return None
    fits = all(
        n == c or (n % c == 0 and _rough_part(c) <= LARGEST_PART)
        for n, c in zip(info.shape, chunk, strict=True)
    )
    return chunk if fits else None


def _rough_part(length: int) -> int:
    """What is left of a length when it is divided by numbers up to 7, as often as they divide it.

    >>> _rough_part(2048), _rough_part(50257 * 8)
    (1, 50257)
    """
    for divisor in (2, 3, 5, 7):
        while length % divisor == 0:
            length //= divisor
    return length


def copy(
    contents: Contents,
    plan: CopyPlan,
    target: FilePath,
    progress: Callable[[Block], None] = lambda block: None,
    workers: Workers = HERE,
    is_noted: bool = False,
) -> Metadata:
    """Write the checkpoint to `target` by the plan; `progress` hears of each block that is on disk.
    With `is_noted` it says beside the checkpoint of which copy it is the result.

    What the source stores twice is compared while it is copied, the rest of it after that, and its
    files are looked at again before the commit. Stopped at any moment, it leaves no checkpoint at
    `target`; the same call takes up where it was stopped. Of a source that contradicts itself
    nothing is left there.

    Raises FileExistsError if `target` is a checkpoint already, CorruptData if the source
    contradicts itself or changed meanwhile, FormatError if `target` holds another unfinished copy,
    WorkerError where the workers' processes cannot do it, or one of them has ended.
    """
    require_target(contents, target)
    again = f"{target} is not a checkpoint yet: the same call with a new executor continues it."
    with shared_out(contents, workers, again) as coordinator:
        store = ZarrStore(coordinator.opened.files(str(target)), plan.arrays, plan.chunks)
        ledger = Ledger(target, identity_of(contents, plan))
        try:
            if not ledger.resumed and (target / METADATA_FILE).is_file():
                ledger.remove()  # another copy was completed here a moment ago
                raise FileExistsError(f"{target} is a checkpoint already; give another path")
            commit = commit_copy(contents, plan)
            with proved(coordinator.opened.proofs, partial(_discard, target, ledger)):
                part = Part.whole(plan, [partial(commit.prepare, store)])
                copy_part(part, plan, store, ledger, progress, coordinator)
            contents.files.require_unchanged()
            store.directory.sync()
            if is_noted:
                note = conversion_note(identity_of(contents, plan))
                store.directory.write(CONVERSION_FILE, [note], durable=True)
            metadata = commit.write(store)
            ledger.remove()
        finally:
            ledger.close()
    return metadata


@uncollected()
def commit_copy(contents: Contents, plan: CopyPlan, parts: Sequence[int] = ()) -> Commit:
    """What makes a copy a checkpoint, of which these parts were written by others too."""
    outer = {name: chunks.outer for name, chunks in plan.chunks.items()}
    files = orbax_files(contents.leaves, outer, ocdbt=is_indexed(plan.arrays, plan.chunks))
    for name, file in contents.companions.items():
        files[f"{COMPANIONS}/{name}"] = file.read_bytes()
    return Commit(
        contents.leaves,
        parts,
        packed=plan.packed,
        files=files,
        source=contents.origin,
        extras=contents.extras,
        groups=contents.groups,
    )


def require_target(contents: Contents, target: FilePath) -> None:
    """Raises FileExistsError where a copy cannot be written to `target`, or taken up there."""
    looks = [target.is_file, lambda: {child.name for child in target.children()}]
    is_file, names = each_file(target.files, lambda look: look(), looks)
    # A copy stopped after its commit, while it cleared away, still has its ledger: it is taken up
    # like any other.
    is_begun = LEDGER_FILE in names
    if METADATA_FILE in names and not is_begun:
        raise FileExistsError(f"{target} is a checkpoint already; give another path")
    require_outside(target, contents)
    if is_file:
        raise FileExistsError(f"{target} is a file; give a path where a directory can be made")
    if not is_begun and not all(map(_is_beginning, names)):
        raise FileExistsError(
            f"{target} has files in it that are not those of an unfinished copy; give another path"
        )


def _is_beginning(name: str) -> bool:
    """Whether a file is about to be the ledger: another share has begun just now."""
    return name.startswith(LEDGER_FILE) and name.endswith(UNFINISHED)


def require_outside(target: FilePath, contents: Contents) -> None:
    """Raises FileExistsError where a target is the source, or lies in it."""
    if _lies_in(target, contents.path):
        raise FileExistsError(f"{target} lies in the source, {contents.path}; give another path")


def _lies_in(target: FilePath, source: str) -> bool:
    """Whether a target is the source, or in it; on a disk by whichever links."""
    if target.files.is_remote:
        return f"{target}/".startswith(f"{source}/")
    real = os.path.realpath(source)
    return os.path.commonpath((real, os.path.realpath(str(target)))) == real


class _Conversion(msgspec.Struct, forbid_unknown_fields=True):
    """Which copy a directory is of, or is the result of."""

    identity: str


def conversion_note(identity: str) -> bytes:
    """What a directory says of which copy it is the result."""
    return msgspec.json.encode(_Conversion(identity))


def is_result(target: FilePath, identity: str) -> bool:
    """Whether a directory is a checkpoint, and says that it is the result of that copy."""
    folder = target.folder()
    if not is_committed(folder):
        return False
    return read_file(folder, CONVERSION_FILE) == conversion_note(identity)


def copy_once(
    contents: Contents,
    plan: CopyPlan,
    target: FilePath,
    progress: Callable[[Block], None],
    workers: Workers,
) -> None:
    """`copy`, unless it was done: by the same call, which was stopped before what follows it."""
    is_begun = (target / LEDGER_FILE).is_file()
    if is_begun or not is_result(target, identity_of(contents, plan)):
        copy(contents, plan, target, progress, workers, is_noted=True)


def _discard(target: FilePath, ledger: Ledger) -> None:
    """Leave nothing of a copy, unless it was completed when the source was still sound."""
    if not is_committed(target.folder()):
        ledger.discard()


@dataclass(frozen=True)
class CopyTask:
    """Blocks to be copied, one after the other, to `target`, which has these arrays in these
    chunks: each to a file of its own, or all to the pack of that number.

    `noted` is what the ledger of a stopped copy says of each block. What was written is looked at
    then: a ledger says what a block was, and files are changed by others too.
    """

    job: Job
    target: str
    arrays: Mapping[str, ArrayInfo]
    chunks: Mapping[str, Chunks]
    blocks: tuple[Block, ...]
    noted: tuple[Written | None, ...]
    pack: int | None = None

    @property
    def cost(self) -> int:
        if self.pack is not None:  # a part is read at once, and all of it sent
            return sum(block.nbytes for block in self.blocks)
        return max(block.cost for block in self.blocks)

    def run(self, opened: OpenedJob) -> list[Written]:
        """Write what is not on disk as it was noted; nothing more once a proof has failed.

        Returns what is there of each block. Here it is durable when the directory is synced, and
        elsewhere at once.
        """
        files = opened.files(self.target)
        store = ZarrStore(files, self.arrays, self.chunks)
        if self.pack is None:
            for block, noted in zip(self.blocks, self.noted, strict=True):
                self._write(opened, store, [(block, noted)])
        else:
            if any(self.noted):
                store.place_pack(self.pack, [block.place for block in self.blocks])
            self._write(opened, store, list(zip(self.blocks, self.noted, strict=True)))
        if opened.is_elsewhere:
            files.sync()
        return [store.written[block.key][str(block.box)] for block in self.blocks]

    def _write(
        self, opened: OpenedJob, store: ZarrStore, blocks: Sequence[tuple[Block, Written | None]]
    ) -> None:
        """Write what makes one file, unless all of it is there as it was noted."""
        there = [
            (block, noted) for block, noted in blocks if noted and store.holds(*block.place, noted)
        ]
        if len(there) == len(blocks):
            for block, noted in there:
                store.written[block.key][str(block.box)] = noted
            return
        proofs = opened.proofs  # which look at what is read from here on
        places = [block.place for block, _ in blocks]
        if self.pack is not None:
            store.write_pack(self.pack, places, _read_together(opened, places))
            return
        for key, box in places:
            data = opened.contents.arrays.read(key, box)
            proofs.require_sound_so_far()
            store.write(key, box, data, durable=False)


def _read_together(opened: OpenedJob, places: Sequence[tuple[str, Box]]) -> Iterator[np.ndarray]:
    """Each block of small arrays, many of which are read at once."""
    proofs, source = opened.proofs, opened.contents.arrays
    infos = source.arrays()

    def nbytes(place: tuple[str, Box]) -> int:
        key, box = place
        return box.size * infos[key].dtype.itemsize

    for batch in batches(places, nbytes, BATCH_BYTES, TOGETHER):
        outs = [np.empty(box.shape, infos[key].dtype) for key, box in batch]
        wants = [(key, [box], [out]) for (key, box), out in zip(batch, outs, strict=True)]
        source.read_each(wants)
        proofs.require_sound_so_far()
        yield from outs


def copy_part(
    part: Part,
    plan: CopyPlan,
    store: ZarrStore,
    ledger: Ledger,
    progress: Callable[[Block], None],
    coordinator: Coordinator,
) -> None:
    """Write the blocks of a part that the ledger does not have yet, and those that are not on disk
    as it has them.
    """
    # Elsewhere a task is durable when it is done.
    waiting = _Waiting(GROUP_BYTES if coordinator.is_here else 0)

    def finish(task: CopyTask, results: Sequence[Written]) -> None:
        fresh: list[Block] = []
        for block, noted, now in zip(task.blocks, task.noted, results, strict=True):
            store.written[block.key][str(block.box)] = now
            if now == noted:
                progress(block)
            else:
                fresh.append(block)
        settle(waiting.add(fresh))

    def settle(group: Sequence[Block]) -> None:
        """Wait for the disk, and only then say in the ledger that the blocks are there."""
        if not group:
            return
        if coordinator.is_here:
            store.directory.sync()
        ledger.note((*block.place, store.written[block.key][str(block.box)]) for block in group)
        for block in group:
            progress(block)

    for number, pack in part.packs:
        store.place_pack(number, [block.place for block in pack])
    tasks = _tasks(part, plan, store, ledger, coordinator)
    with ThreadPoolExecutor(1) as meanwhile:
        beside = meanwhile.submit(_write_beside, part, plan, store)
        coordinator.run(tasks, finish, plan.budget_bytes, store.directory.is_remote)
        beside.result()
    settle(waiting.blocks)


def _write_beside(part: Part, plan: CopyPlan, store: ZarrStore) -> None:
    """Write what describes the arrays of a part, and what else lies beside them."""
    creations = (partial(store.create, key) for key in part.creates)
    jobs = ((0, job) for job in (*creations, *part.beside))
    run_bounded(jobs, plan.budget_bytes, store.directory.is_remote)


class _Waiting:
    """Blocks that wait for the disk, until they have so many bytes together."""

    def __init__(self, max_bytes: int):
        self.blocks: list[Block] = []
        self._nbytes, self._max_bytes = 0, max_bytes
        self._lock = threading.Lock()

    def add(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Those that need wait no longer."""
        with self._lock:
            self.blocks += blocks
            self._nbytes += sum(block.nbytes for block in blocks)
            if self._nbytes < self._max_bytes:
                return ()
            ready, self.blocks, self._nbytes = self.blocks, [], 0
        return ready


def of_one_chunk(contents: Contents, block: Block, following: Block) -> bool:
    """Whether two blocks lie in one stored chunk, which is decoded once if they go together."""
    chunk = contents.arrays.arrays()[block.key].chunk if block.key == following.key else None
    return bool(chunk and grid_place(block.box, chunk) == grid_place(following.box, chunk))


def _tasks(
    part: Part, plan: CopyPlan, store: ZarrStore, ledger: Ledger, coordinator: Coordinator
) -> Iterator[CopyTask]:
    """The blocks in their order, several small ones together. Elsewhere a task is larger, and all
    that is of one stored chunk goes together, so that one process decodes it.
    """
    if coordinator.is_here:
        # what waits for a network waits alone
        most = BATCH_BYTES, 1 if store.directory.is_remote else BATCH_JOBS
        belong = None
    else:
        most = TASK_BYTES, TASK_BOXES
        belong = partial(of_one_chunk, coordinator.opened.contents)
    together = batches(part.alone, lambda block: block.nbytes, *most, belong)
    for number, blocks in itertools.chain(part.packs, ((None, blocks) for blocks in together)):
        keys = dict.fromkeys(block.key for block in blocks)
        yield CopyTask(
            coordinator.job,
            store.directory.url(),
            {key: plan.arrays[key] for key in keys},
            {key: plan.chunks[key] for key in keys},
            tuple(blocks),
            tuple(ledger.done.get((block.key, str(block.box))) for block in blocks),
            number,
        )


def identity_of(contents: Contents, plan: CopyPlan) -> str:
    """What a ledger must agree with: the source as it was opened, and the blocks."""
    identity = (contents.identity(), sorted(plan.chunks.items()), len(plan.packs))
    return digest(repr(identity).encode())
