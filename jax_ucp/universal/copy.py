"""Copies of any source in the universal format: in blocks, within a budget, resumable."""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from jax_ucp.arguments import whole_number
from jax_ucp.arrays.budget import (
    BATCH_BYTES,
    BATCH_JOBS,
    DEFAULT_BUDGET,
    HELD_BYTES,
    batches,
    run_bounded,
    threads,
)
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import expressions, is_in_rows
from jax_ucp.arrays.protocol import TOGETHER, ArrayInfo
from jax_ucp.files.copying import mid_page
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.local import UNFINISHED
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files
from jax_ucp.garbage import gc_paused
from jax_ucp.jobs.ledger import (
    LEDGER_FILE,
    RESULT_FILE,
    Blocks,
    Ledger,
    Written,
    is_noted,
    result_note,
)
from jax_ucp.jobs.run import Target, Work, run
from jax_ucp.jobs.work import TASK_BOXES, TASK_BYTES, OpenedJob
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
from jax_ucp.universal.linked import NOT_LINKED, Linked, source_folders
from jax_ucp.universal.metadata import digest
from jax_ucp.universal.orbax_tree import orbax_files
from jax_ucp.universal.packs import PACK_BLOCKS, PACK_BYTES, is_indexed, packed_arrays
from jax_ucp.universal.store import (
    COMPANIONS,
    METADATA_FILE,
    Commit,
    ZarrStore,
    array_info,
    is_committed,
    require_storable,
)

# Copies of a block in flight: as read, as encoded, and the data that is read around it, which are
# whole rows of a flat shard, or the stored chunks that contain the block.
COPIES_IN_FLIGHT = 3

# What is read of a block at once: it is still in a core's cache when it is summed, cut into inner
# chunks and written, and its memory is used again.
ROWS_BYTES = 4 << 20

# A stored chunk is cut into lengths that divide it. A part of at most this length may stay whole.
LARGEST_PART = 512
_SMOOTH = (2 * 3 * 5 * 7) ** 62  # what a length shares with it are all its factors up to 7


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """A box of array `key`, read and written at once: `nbytes` of data, `cost` of memory."""

    key: str
    box: Box
    nbytes: int
    cost: int

    @property
    def keys(self) -> tuple[str]:
        return (self.key,)

    @property
    def place(self) -> tuple[str, Box]:
        return self.key, self.box


@dataclass(frozen=True, repr=False)
class CopyPlan:
    """A copy, decided before any byte moves: a block for each outer chunk, some in packs.

    `notes` say how the shardings that chunks are cut for differ from those requested, and name
    rules that apply to no leaf. Arrays that are `linked` are not copied; `folders` are the symbolic
    links below the target that lead to their files.
    """

    arrays: Mapping[str, ArrayInfo]
    chunks: Mapping[str, Chunks]
    blocks: Sequence[CopyBlock]
    budget_bytes: int
    notes: Sequence[str] = ()
    linked: Linked = NOT_LINKED
    folders: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def packed(self) -> frozenset[str]:
        """The arrays that are packed."""
        return packed_arrays(self.arrays, self.chunks)

    @cached_property
    def packs(self) -> Sequence[Sequence[CopyBlock]]:
        """The blocks of each pack, in order."""
        small = (block for block in self.blocks if block.key in self.packed)
        return list(batches(small, lambda block: block.nbytes, PACK_BYTES, PACK_BLOCKS))

    @property
    def unpacked(self) -> Iterator[CopyBlock]:
        """The blocks that are separate files."""
        return (block for block in self.blocks if block.key not in self.packed)

    @property
    def write_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of memory that blocks in flight can take: the budget, or one block."""
        costs = sorted((block.cost for block in self.blocks), reverse=True)
        return min(sum(costs[: threads()]), max(self.budget_bytes, *costs[:1], 0))

    def __repr__(self) -> str:
        return (
            f"<a copy of {len(self.arrays)} arrays: {self.write_bytes:,} bytes in"
            f" {len(self.blocks)} blocks, at most {self.peak_bytes:,} in memory>"
        )


@gc_paused()
def plan_copy(
    contents: Contents, budget_bytes: int = DEFAULT_BUDGET, cells: Mapping[str, Shape] | None = None
) -> CopyPlan:
    """A plan with chunks small enough that `threads()` blocks fit the budget together.

    Chunks are not made smaller than 64 KiB for that. `cells` are, by name of an array, the shapes
    of equal blocks that no chunk may cross. Raises UnsupportedLeaf for a dtype that the universal
    format does not have, ValueError for a budget that is not a positive whole number.
    """
    budget_bytes = whole_number("budget_bytes", budget_bytes)
    outer = max(SMALL_BYTES, min(OUTER_BYTES, budget_bytes // (COPIES_IN_FLIGHT * threads())))
    stored = contents.arrays.arrays()
    arrays: dict[str, ArrayInfo] = {}
    chunks: dict[str, Chunks] = {}
    blocks: list[CopyBlock] = []
    for leaf in contents.leaves:
        if leaf.has_array:
            info = arrays[leaf.name] = array_info(leaf.shape, leaf.dtype)
            require_storable(leaf.label, info.dtype)
            cell = (cells or {}).get(leaf.name)
            chunks[leaf.name], parts = _cut(info, stored[leaf.name].chunk or (), cell, outer)
            blocks.extend([CopyBlock(leaf.name, *part) for part in parts])
    return CopyPlan(arrays, chunks, blocks, budget_bytes)


# Thousands of arrays have few shapes.
@functools.lru_cache(maxsize=64)
def _cut(
    info: ArrayInfo, stored: Shape, cell: Shape | None, max_bytes: int
) -> tuple[Chunks, Sequence[tuple[Box, int, int]]]:
    """The chunks of an array; and the box, bytes and cost of each block, in order."""
    size = info.dtype.itemsize
    cell = _cell(info, stored, max_bytes) if cell is None else cell
    chunks = chunk_shapes(info.shape, size, cell, min(INNER_BYTES, max_bytes), max_bytes)
    boxes = list(grid_boxes(info.shape, chunks.outer))
    if stored:  # blocks of one stored chunk follow one another: it is decoded once for all of them
        boxes.sort(key=lambda box: grid_place(box, stored))
    return chunks, [(box, box.size * size, block_cost(box, stored, size)) for box in boxes]


def block_cost(box: Box, chunk: Shape, itemsize: int) -> int:
    """Bytes of memory for a block: as read, as encoded, and the stored chunks around it.

    Stored chunks from HELD_BYTES on are kept decoded: what they have beside the block counts twice.
    """
    around = whole_chunks(box, chunk).size if chunk else box.size
    cost = (2 * box.size + around) * itemsize
    is_kept = around * itemsize >= HELD_BYTES
    return cost + (around - box.size) * itemsize if is_kept else cost


def _cell(info: ArrayInfo, chunk: Shape, max_bytes: int) -> Shape | None:
    """The stored chunk, if it is larger than a block and divides the array; else None.

    None too if a length has only large divisors. With it no block is in two stored chunks.
    """
    if not chunk or math.prod(chunk) * info.dtype.itemsize <= max_bytes:
        return None
    fits = all(
        n == c or (n % c == 0 and c // math.gcd(c, _SMOOTH) <= LARGEST_PART)
        for n, c in zip(info.shape, chunk, strict=True)
    )
    return chunk if fits else None


class UniversalTarget(Target[CopyBlock]):
    """A copy by a plan; `is_noted`: one process writes `ucp.conversion.json` too."""

    def __init__(
        self,
        contents: Contents,
        plan: CopyPlan,
        path: FilePath,
        on_block: Callable[[CopyBlock], object] = lambda block: None,
        is_noted: bool = False,
    ):
        self.contents, self.plan, self.path = contents, plan, path
        self._on_block, self._is_noted = on_block, is_noted
        self.again = (
            f"{path} is not a checkpoint yet: the same call with a new executor continues it."
        )

    def identity(self) -> str:
        return self._identity

    @cached_property
    def _identity(self) -> str:
        plan = self.plan
        # tuples, whose text numpy and dataclasses do not make in Python
        chunks = sorted([(key, cut.outer, cut.inner) for key, cut in plan.chunks.items()])
        copied = self.contents.identity(), chunks, len(plan.packs)
        return digest(repr((*copied, *sorted(plan.linked.arrays.items()))).encode())

    @cached_property
    @gc_paused()
    def _commit(self) -> Commit:
        """The commit that makes the copy a checkpoint."""
        contents, plan, linked = self.contents, self.plan, self.plan.linked
        outer = {name: chunks.outer for name, chunks in plan.chunks.items()}
        outer |= {name: array.chunk for name, array in linked.arrays.items()}
        ocdbt = bool(linked.arrays) or is_indexed(plan.arrays, plan.chunks)
        files = orbax_files(contents.leaves, outer, ocdbt=ocdbt)
        for name, file in contents.companions.items():
            files[f"{COMPANIONS}/{name}"] = file.read_bytes()
        return Commit(
            contents.leaves,
            packed=plan.packed,
            files=files,
            source=contents.origin,
            extras=contents.extras,
            groups=contents.groups,
            linked=linked,
        )

    def groups(self, count: int) -> Sequence[Sequence[CopyBlock]]:
        """The packs, then the other blocks: all together for one process, else by stored chunk."""
        if count == 1:
            return [*self.plan.packs, list(self.plan.unpacked)]
        belong = partial(_of_one_chunk, self.contents)
        return [*self.plan.packs, *batches(self.plan.unpacked, lambda block: 1, 1, 1, belong)]

    def require_free(self, is_shared: bool) -> None:
        require_target(self.contents, self.path, source_folders(self.plan.linked.sources))

    @contextmanager
    def exclusive(self) -> Iterator[Ledger]:
        with closing(Ledger.open(self.path, self._identity)) as ledger:
            if not ledger.resumed and (self.path / METADATA_FILE).is_file():
                ledger.remove()  # another copy was completed here a moment ago
                raise FileExistsError(f"{self.path} is a checkpoint already; give another path")
            yield ledger
            ledger.remove()

    def progress(self, block: CopyBlock, is_found: bool) -> None:
        self._on_block(block)

    def discard(self, ledger: Ledger) -> None:
        """Remove the copy, unless it was completed when the source was still sound."""
        if not is_committed(self.path.folder()):
            ledger.discard()

    def write(self, work: Work[CopyBlock]) -> None:
        """Write the blocks that the ledger, or the disk, does not have as recorded."""
        plan, is_here = self.plan, work.coordinator.is_here
        files = work.coordinator.opened.files(str(self.path))
        self._written = store = ZarrStore(files, plan.arrays, plan.chunks)
        count = len(plan.packs)
        packs = [(number, group) for number, group in work.groups if number < count]
        unpacked = [block for number, group in work.groups if number >= count for block in group]
        for number, pack in packs:
            store.place_pack(number, [block.place for block in pack])
        # one of several shares does not know yet where the chunks of others are
        beside = [partial(self._commit.prepare, store)] if work.share is None else []
        mine = (key for key in plan.arrays if key not in plan.packed and work.owns(key))
        small_files = ((0, job) for job in (*(partial(store.create, key) for key in mine), *beside))
        with ThreadPoolExecutor(1) as meanwhile:
            described = meanwhile.submit(
                run_bounded, small_files, plan.budget_bytes, files.is_remote
            )
            # Elsewhere a task is durable when it is done.
            tasks = self._tasks(work, packs, unpacked, files)
            work.run(tasks, plan.budget_bytes, files, not is_here)
            described.result()
        files.sync()

    def _tasks(
        self,
        work: Work[CopyBlock],
        packs: Sequence[tuple[int, Sequence[CopyBlock]]],
        unpacked: Sequence[CopyBlock],
        files: Files,
    ) -> Iterator[CopyTask]:
        """Tasks of consecutive blocks; elsewhere larger, with all of a chunk that is decoded."""
        plan = self.plan
        if work.coordinator.is_here:
            # over a network each block is a task of its own
            most = BATCH_BYTES, 1 if files.is_remote else BATCH_JOBS
            belong = None
        else:
            most = TASK_BYTES, TASK_BOXES
            belong = partial(_of_one_chunk, self.contents)
        together = batches(unpacked, lambda block: block.nbytes, *most, belong)
        for number, blocks in itertools.chain(packs, ((None, blocks) for blocks in together)):
            keys = dict.fromkeys(block.key for block in blocks)
            yield CopyTask(
                files.url(),
                {key: plan.arrays[key] for key in keys},
                {key: plan.chunks[key] for key in keys},
                tuple(blocks),
                work.noted(blocks),
                number,
            )

    def commit(self, written: Blocks, prove: Callable[[], None], note: bytes | None) -> None:
        prove()
        store, is_shared = self._written, note is not None
        if self._is_noted:
            note = result_note(self._identity)
        if note is not None:
            store.directory.write(RESULT_FILE, [note], durable=True)
        store.add(written)
        for name, folder in self.plan.folders.items():
            link = str(self.path / name)
            if not os.path.islink(link) or os.readlink(link) != folder:
                os.symlink(folder, link)
        self._commit.write(store, is_shared)

    def is_result(self, identity: str) -> bool:
        folder = self.path.folder()
        return is_committed(folder) and is_noted(folder, identity)


def copy(
    contents: Contents,
    plan: CopyPlan,
    target: FilePath,
    progress: Callable[[CopyBlock], object] = lambda block: None,
    executor: Executor | None = None,
    is_noted: bool = False,
) -> None:
    """Write the checkpoint by the plan; `is_noted`: a completed same copy is left as it is."""
    copy_of = UniversalTarget(contents, plan, target, progress, is_noted)
    is_begun = (target / LEDGER_FILE).is_file()
    if is_begun or not is_noted or not copy_of.is_result(copy_of.identity()):
        run(copy_of, executor)


def require_target(
    contents: Contents, target: FilePath, beside: Collection[str] = frozenset()
) -> None:
    """Raise FileExistsError if a copy can be neither written to `target` nor continued there. The
    names in `beside` may be in it.
    """
    looks = [target.is_file, lambda: {child.name for child in target.children()}]
    is_file, names = each_file(target.files, lambda look: look(), looks)
    # A copy that was stopped after its commit may still have its ledger: it is continued like any
    # other.
    is_begun = LEDGER_FILE in names
    names = names - set(beside)
    if METADATA_FILE in names and not is_begun:
        raise FileExistsError(f"{target} is a checkpoint already; give another path")
    require_outside(target, contents)
    if is_file:
        raise FileExistsError(f"{target} is a file; give a path where a directory can be made")
    # another share may be creating its ledger just now
    ledgers = [n for n in names if n.startswith(LEDGER_FILE) and n.endswith(UNFINISHED)]
    if not is_begun and len(ledgers) < len(names):
        raise FileExistsError(
            f"{target} has files in it that are not those of an unfinished copy; give another path"
        )


def require_outside(target: FilePath, contents: Contents) -> None:
    """Raise FileExistsError if a target is the source or inside it, links resolved."""
    inner, outer = str(target), contents.path
    if not target.files.is_remote:
        inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    if f"{inner}/".startswith(f"{outer.rstrip('/')}/"):
        raise FileExistsError(f"{target} lies in the source, {contents.path}; give another path")


@dataclass(frozen=True)
class CopyTask:
    """Blocks to be copied to `target`: each to a file of its own, or all to the pack `pack`.

    `noted` has the records of a stopped copy. Such a block is read and compared with its record,
    because other programs change files too.
    """

    target: str
    arrays: Mapping[str, ArrayInfo]
    chunks: Mapping[str, Chunks]
    blocks: tuple[CopyBlock, ...]
    noted: tuple[Written | None, ...]
    pack: int | None = None

    @property
    def cost(self) -> int:
        if self.pack is not None:  # some blocks are read at once, and the whole pack is sent
            return sum(block.nbytes for block in self.blocks)
        return max(block.cost for block in self.blocks)

    def run(self, opened: OpenedJob) -> list[Written]:
        """The record of each block, which is written unless it is on disk as noted. Raises
        CorruptData at the first proof that fails.
        """
        files = opened.files(self.target)
        store = ZarrStore(files, self.arrays, self.chunks)
        pairs = list(zip(self.blocks, self.noted, strict=True))
        if self.pack is not None and any(self.noted):
            store.place_pack(self.pack, [block.place for block in self.blocks])
        for of_file in [[pair] for pair in pairs] if self.pack is None else [pairs]:
            places = [block.place for block, _ in of_file]
            on_disk = [
                (place, noted)
                for place, (_, noted) in zip(places, of_file, strict=True)
                if noted and store.holds(*place, noted)
            ]
            if len(on_disk) == len(of_file):
                for (key, box), noted in on_disk:
                    store.written[key][str(box)] = noted
                continue
            if self.pack is not None:
                store.write_pack(self.pack, places, _read_together(opened, places))
                continue
            ((key, box),) = places
            store.write(key, box, _read_rows(opened, store, key, box), durable=False)
        if opened.is_elsewhere:
            files.sync()
        return [store.written[block.key][str(block.box)] for block in self.blocks]


def _read_rows(opened: OpenedJob, store: ZarrStore, key: str, box: Box) -> Iterator[np.ndarray]:
    """The elements of an outer chunk, in blocks of rows where these cost no more to read than the
    whole; each is valid until the next is asked for. Raises CorruptData once a proof of what was
    read fails.
    """
    proofs, source = opened.proofs, opened.contents.arrays  # they observe every read from here on
    info = source.arrays()[key]
    is_small = box.size * info.dtype.itemsize <= ROWS_BYTES
    is_whole = opened.contents.files.is_remote or info.chunk or info.row
    if is_whole or not (is_small or is_in_rows(expressions(source)[key])):
        elements = source.read(key, box)
        proofs.require_sound_so_far()
        yield elements
        return
    for block in store.row_blocks(key, box, ROWS_BYTES):
        elements = _room(block.size * info.dtype.itemsize).view(info.dtype).reshape(block.shape)
        source.read_into(key, [block], [elements])
        proofs.require_sound_so_far()
        yield elements


_of_thread = threading.local()


def _room(nbytes: int) -> np.ndarray:
    """Uninitialised memory: up to ROWS_BYTES it is this thread's, the same each time."""
    if nbytes > ROWS_BYTES:
        return np.empty(nbytes, np.uint8)
    if not hasattr(_of_thread, "room"):
        _of_thread.room = mid_page(ROWS_BYTES)
    return _of_thread.room[:nbytes]


def _read_together(opened: OpenedJob, places: Sequence[tuple[str, Box]]) -> Iterator[np.ndarray]:
    """The elements of each place, in order; many small ones are read at once. Raises CorruptData
    once a proof of what was read fails.
    """
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


def _of_one_chunk(contents: Contents, block: CopyBlock, following: CopyBlock) -> bool:
    """Whether two blocks are in one stored chunk, which is decoded once if copied together."""
    chunk = contents.arrays.arrays()[block.key].chunk if block.key == following.key else None
    return bool(chunk and grid_place(block.box, chunk) == grid_place(following.box, chunk))
