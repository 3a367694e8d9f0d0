"""Saves of a pytree: decided alike on every process, then written by each in part."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jax_ucp.arrays.budget import DEFAULT_BUDGET, batches, in_order, run_bounded
from jax_ucp.arrays.evaluate import Evaluated
from jax_ucp.arrays.protocol import ArrayInfo, MakesArrays
from jax_ucp.arrays.value import Constant
from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.protocol import Files
from jax_ucp.garbage import gc_paused
from jax_ucp.jobs.ledger import Share, read_complete, write_complete
from jax_ucp.jobs.work import MAX_MESSAGE_BYTES, TooLarge
from jax_ucp.layout.blocks import (
    Cells,
    Chunks,
    chunk_shapes,
    grid_boxes,
    grid_place,
    stack_chunks,
    writer_cells,
)
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sharding.boxes import Device, device_boxes, process_boxes, saved_sharding
from jax_ucp.sharding.transfer import host_bytes, to_host
from jax_ucp.sharding.trees import TreeNode, empty_kind, kind_of, walk
from jax_ucp.text import is_encodable
from jax_ucp.tree import Leaf, SavedSharding, ambiguous_paths, leaf_names
from jax_ucp.universal.metadata import Metadata, digest
from jax_ucp.universal.orbax_tree import orbax_files
from jax_ucp.universal.packs import SAVED_PACK_BYTES, is_indexed, pack_name, packed_arrays
from jax_ucp.universal.stacks import Stacks, as_leaves, homes_of, stack_info, stacks_of
from jax_ucp.universal.store import (
    METADATA_FILE,
    SHARED_STORAGE,
    WHO_ELSE,
    Commit,
    ZarrStore,
    require_storable,
)

# The name of an array or a stack, and a box of it.
Place = tuple[str, Box]

# The elements that a device each holds, by the names of arrays and the boxes there.
Parts = Mapping[str, Mapping[Box, np.ndarray | jax.Array]]


@dataclass(frozen=True)
class Staging:
    """Parts of arrays that go to host memory in stages, each when there is room for it: at most
    `max_bytes`, or what one block needs, are there at once.

    `is_copied` is set when all were there: the devices' memory may be donated then.
    """

    parts: dict[str, dict[Box, np.ndarray | jax.Array]]
    max_bytes: int
    is_copied: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Snapshot(MakesArrays):
    """A tree as this process copies it to host memory, to be written.

    `leaves` and `chunks` are the same on all processes. `blocks` are the outer chunks that this
    process writes; `data` has the parts of each array that it needs for them, by name, but for
    those that are copied while it is written, `staging`. A stack of several arrays has chunks and
    blocks of its own, and its arrays have none.
    """

    leaves: Sequence[Leaf]
    infos: Mapping[str, ArrayInfo]
    chunks: Mapping[str, Chunks]
    blocks: Sequence[Place]
    data: Mapping[str, Mapping[Box, np.ndarray]]
    stacks: Stacks = field(default_factory=dict)
    staging: Staging | None = None

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self.infos

    @property
    def written(self) -> Mapping[str, ArrayInfo]:
        """The arrays that are written, stacks included."""
        homes = homes_of(self.stacks)
        alone = {name: info for name, info in self.infos.items() if name not in homes}
        return alone | {
            stack: stack_info(self.infos[names[0]], len(names))
            for stack, names in self.stacks.items()
        }

    def block(self, key: str, box: Box) -> np.ndarray:
        """The elements of an outer chunk, of an array or of a stack."""
        parts = [self.read(*part) for part in _unstacked([(key, box)], self.stacks)]
        return np.stack(parts) if key in self.stacks else parts[0]

    def read(self, key: str, box: Box) -> np.ndarray:
        """The elements of `box`: a view of the part that holds them all, or a copy from several."""
        parts = self.data[key]
        pieces = _pieces(tuple(parts), box)
        if len(pieces) == 1:
            part, source, _ = pieces[0]
            data = np.asarray(parts[part][source]).view()
        else:
            data = np.empty(box.shape, self.infos[key].dtype)
            for part, source, target in pieces:
                data[target] = parts[part][source]
        data.flags.writeable = False
        return data

    def __reduce__(self) -> tuple[type, tuple[Mapping[str, Constant]]]:
        """Sent as arrays alone, of a process that has all: who reads them does without JAX."""
        if sum(info.nbytes for info in self.infos.values()) > MAX_MESSAGE_BYTES:
            raise TooLarge
        whole = {key: self.read(key, Box.whole(info.shape)) for key, info in self.infos.items()}
        return Evaluated, ({key: Constant(array) for key, array in whole.items()},)


@dataclass(frozen=True)
class Description:
    """The leaves of a tree as the checkpoint will name them, and their arrays, not copied."""

    leaves: Sequence[Leaf]
    arrays: Mapping[str, np.ndarray | jax.Array]


@gc_paused()
def describe(tree: Any) -> Description:
    """The leaves of a tree, and their arrays. Raises UnsupportedLeaf."""
    nodes = list(walk(tree))
    if same := ambiguous_paths(node.path for node in nodes):
        raise UnsupportedLeaf(
            f"keys that differ only in type cannot be told apart on disk: {same[0]}"
        )
    strings = Counter(
        ".".join(map(str, node.path)) for node in nodes if isinstance(node.value, str)
    )
    for name, count in strings.most_common(1):
        if count > 1:
            raise UnsupportedLeaf(
                f"two strings would have one name on disk, {name!r}: rename a key"
            )
    leaves: list[Leaf] = []
    arrays: dict[str, np.ndarray | jax.Array] = {}
    for node, name in zip(nodes, leaf_names([node.path for node in nodes]), strict=True):
        leaf, array = _leaf(node, name)
        text = "".join(map(str, leaf.path)) + (leaf.value if isinstance(leaf.value, str) else "")
        if not is_encodable(text):
            raise UnsupportedLeaf(
                f"{leaf.label!r} has a key or a value that is not text: it cannot be encoded in"
                " UTF-8"
            )
        leaves.append(leaf)
        if array is not None:
            arrays[name] = array
    return Description(leaves, arrays)


@gc_paused()
def take_snapshot(described: Description, max_bytes: int | None = None) -> Snapshot:
    """This process's part of the tree, copied from devices; then the tree may change.

    If the copies take more than `max_bytes` of host memory, none are made here, and the tree may
    not change before the event `staging.is_copied`, when `write_snapshot` has made them.
    """
    arrays = described.arrays
    infos = {name: ArrayInfo(tuple(a.shape), np.dtype(a.dtype)) for name, a in arrays.items()}

    # Arrays of a stack are alike, and the same processes hold them in the same pieces.
    def piece(name: str, info: ArrayInfo) -> tuple[ArrayInfo, Shape, Sharding | None]:
        sharding = _sharding(arrays[name])
        cells = _cells(sharding, info.shape, info.dtype.itemsize, jax.process_count())
        return info, cells.shape, sharding

    stacks = stacks_of({name: piece(name, info) for name, info in infos.items()})
    homes = homes_of(stacks)
    # Of the processes that hold an outer chunk, the one that writes least so far writes it.
    written_bytes = [0] * jax.process_count()
    chunks: dict[str, Chunks] = {}
    blocks: list[Place] = []
    for name, info in infos.items():
        key, _ = homes.get(name, (name, 0))
        if key in chunks:
            continue
        layout = _sharding(arrays[name]), info.shape, info.dtype.itemsize, len(written_bytes)
        chunks[key], writers_of = _writers(*layout, len(stacks.get(key, ())))
        for box, writers in writers_of:
            owner = min(writers, key=written_bytes.__getitem__)
            written_bytes[owner] += box.size * info.dtype.itemsize
            if owner == jax.process_index():
                blocks.append((key, box))
    needed: dict[str, list[Box]] = defaultdict(list)
    for name, box in _unstacked(blocks, stacks):
        needed[name].append(box)
    parts = {name: _parts(arrays[name], tuple(boxes)) for name, boxes in needed.items()}
    snapshot = Snapshot(described.leaves, infos, chunks, blocks, {}, stacks)
    copied = (host_bytes(part) for of in parts.values() for part in of.values())
    if max_bytes is None or sum(copied) <= max_bytes:
        return replace(snapshot, data=_to_host(parts))
    return replace(snapshot, staging=Staging(parts, max_bytes))


def _unstacked(blocks: Sequence[Place], stacks: Stacks) -> Iterator[Place]:
    """The blocks of single arrays; a block of a stack gives one block of each of its arrays."""
    for key, box in blocks:
        if key not in stacks:
            yield key, box
            continue
        part = Box(box.start[1:], box.stop[1:])
        yield from ((name, part) for name in stacks[key][box.start[0] : box.stop[0]])


def write_snapshot(
    snapshot: Snapshot, directory: Files, budget_bytes: int = DEFAULT_BUDGET
) -> tuple[ZarrStore, Commit]:
    """The store with this process's chunks and digests, which are written, and the commit to make
    it a checkpoint. Raises FileExistsError if the directory is a checkpoint.
    """
    with ThreadPoolExecutor(1) as meanwhile:
        found = meanwhile.submit(directory.find, METADATA_FILE)
        store = ZarrStore(directory, snapshot.written, snapshot.chunks)
        commit = _commit(snapshot)
    if found.result() is not None:
        raise FileExistsError(f"{directory} is a checkpoint already; save to another path")
    copies, max_bytes = [(0, lambda: snapshot)], 0
    if snapshot.staging:
        max_bytes = snapshot.staging.max_bytes
        copies = _copies(snapshot, snapshot.staging, commit.packed)
    left, numbers = len(copies), itertools.count(jax.process_index(), jax.process_count())
    for copied in in_order(copies, max_bytes):
        left -= 1
        jobs = _write_jobs(copied, store, commit, numbers, is_last=not left)
        run_bounded(jobs, budget_bytes, directory.is_remote)
        del copied, jobs  # a later stage has their memory
    directory.sync()
    if jax.process_index() != 0:
        write_complete(directory, _part(jax.process_index()), "", store.written)
    return store, commit


def _part(process: int) -> Share:
    return Share(process, jax.process_count())


def _copies(
    snapshot: Snapshot, staging: Staging, packed: frozenset[str]
) -> list[tuple[int, Callable[[], Snapshot]]]:
    """For each stage the bytes of its copies, and a function that makes them: it returns a snapshot
    of the blocks of that stage. After the last one `staging.is_copied` is set.
    """
    stages = _stages(snapshot, staging, packed)
    left = list(stages)

    def copy(blocks: Sequence[Place], places: Iterable[Place]) -> Snapshot:
        parts: dict[str, dict[Box, np.ndarray | jax.Array]] = {
            name: {} for name, _ in _unstacked(blocks, snapshot.stacks)
        }
        for name, box in places:
            parts[name][box] = staging.parts[name][box]
        data = _to_host(parts)
        left.pop()
        if not left:
            staging.parts.clear()
            staging.is_copied.set()
        return replace(snapshot, blocks=blocks, data=data, staging=None)

    return [(sum(parts.values()), partial(copy, blocks, parts)) for blocks, parts in stages]


def _stages(
    snapshot: Snapshot, staging: Staging, packed: frozenset[str]
) -> list[tuple[list[Place], dict[Place, int]]]:
    """The blocks of each stage, with the parts that these need and the bytes of their copies.

    A stage has at most half of `staging.max_bytes`, so that one is copied while another is written;
    a block that needs more is alone, with others that need nothing else. The `packed` arrays come
    first. Blocks of one part come one after the other, so that it is copied once.
    """
    order = {key: (key not in packed, i) for i, (key, _) in enumerate(snapshot.blocks)}

    def rank(need: tuple[Place, dict[Place, int]]) -> tuple[Any, ...]:
        (key, _), parts = need
        return *order[key], min((box.start for _, box in parts), default=())

    needs: list[tuple[Place, dict[Place, int]]] = []
    for block in snapshot.blocks:
        parts = {
            (name, place): host_bytes(part)
            for name, box in _unstacked([block], snapshot.stacks)
            for place, part in staging.parts[name].items()
            if place.intersect(box) is not None
        }
        needs.append((block, parts))
    stages: list[tuple[list[Place], dict[Place, int]]] = []
    nbytes = 0
    for block, parts in sorted(needs, key=rank):
        held = stages[-1][1] if stages else {}
        more = {place: n for place, n in parts.items() if place not in held}
        nbytes += sum(more.values())
        if not stages or (more and nbytes > staging.max_bytes // 2):
            more, nbytes = parts, sum(parts.values())
            stages.append(([], {}))
        stages[-1][0].append(block)
        stages[-1][1].update(more)
    return stages


def _write_jobs(
    snapshot: Snapshot, store: ZarrStore, commit: Commit, numbers: Iterator[int], is_last: bool
) -> Iterator[tuple[int, Callable[[], object]]]:
    """The writes of a snapshot, each with the bytes in flight while it runs; with the last, what is
    beside the chunks. Packs have the next numbers.
    """
    in_pack = [(name, box) for name, box in snapshot.blocks if name in commit.packed]
    infos = store.arrays()

    def nbytes(block: Place) -> int:
        name, box = block
        return box.size * infos[name].dtype.itemsize

    def write(name: str, box: Box) -> None:
        store.write(name, box, [snapshot.block(name, box)], durable=False)

    for pack in batches(in_pack, nbytes, SAVED_PACK_BYTES, len(in_pack)):
        number = next(numbers)
        parts = store.pack_parts(number, pack, itertools.starmap(snapshot.read, pack))
        data = functools.reduce(operator.iadd, parts, bytearray())
        write_pack = partial(
            store.directory.write, pack_name(number), [memoryview(data)], durable=False
        )
        yield len(data), write_pack  # while it is sent, the next one is made
    if is_last and jax.process_count() == 1:  # else the places of others' chunks are not known yet
        yield 0, partial(commit.prepare, store)
    if is_last and jax.process_index() == 0:
        yield from ((0, partial(store.create, name)) for name in infos if name not in commit.packed)
    for block in snapshot.blocks:
        if block[0] not in commit.packed:
            yield 2 * nbytes(block), partial(write, *block)


def commit_snapshot(written: tuple[ZarrStore, Commit]) -> Metadata:
    """Make the directory a checkpoint: process 0 does, after all have written."""
    store, commit = written
    directory = store.directory
    others = list(map(_part, range(1, jax.process_count())))
    again = f"{WHO_ELSE} {SHARED_STORAGE}"
    read = partial(read_complete, directory, identity="", again=again)
    for blocks in each_file(directory, read, others):
        store.add(blocks)
    metadata = commit.write(store, is_shared=bool(others))
    each_file(directory, lambda part: directory.delete(part.complete), others)
    return metadata


def _commit(snapshot: Snapshot) -> Commit:
    packed = packed_arrays(snapshot.written, snapshot.chunks)
    infos, chunks = as_leaves(snapshot.written, snapshot.chunks, snapshot.stacks)
    outer = {name: chunks[name].outer for name in infos}
    files = orbax_files(snapshot.leaves, outer, ocdbt=is_indexed(infos, chunks))
    return Commit(snapshot.leaves, packed, files, stacks=snapshot.stacks)


def content(snapshot: Snapshot) -> list[tuple[str, str, str]]:
    """Each leaf's name, label and description, but for values: the same on all processes."""
    homes = homes_of(snapshot.stacks)

    def description(leaf: Leaf) -> str:
        key, number = homes.get(leaf.name, (leaf.name, None))
        chunks = snapshot.chunks.get(key)
        keys = ",".join(key.kind for key in leaf.path)
        empty = f"an empty {leaf.value}" if leaf.kind == "empty" else leaf.kind
        details = [
            f"{leaf.kind} {leaf.dtype} {list(leaf.shape)}" if leaf.has_array else empty,
            chunks and f"in chunks of {list(chunks.outer)} of {list(chunks.inner)}",
            number is not None and f"number {number} of {key}",
            leaf.sharding and _placed(leaf.sharding),
            leaf.key_impl,
            leaf.axes,
            f"below {keys or 'nothing'}",
        ]
        return ", ".join(map(str, filter(None, details)))

    return [(leaf.name, leaf.label, description(leaf)) for leaf in snapshot.leaves]


@functools.lru_cache(maxsize=1024)
def _placed(sharding: SavedSharding) -> str:
    axes = zip(sharding.axis_names, sharding.axis_sizes, strict=True)
    sizes = ", ".join(f"{name} {size}" for name, size in axes)
    return f"as {sharding.spec} on {sizes} (devices {digest(repr(sharding.device_ids).encode())})"


@functools.lru_cache(maxsize=1024)
def _writers(
    sharding: Sharding | None, shape: Shape, itemsize: int, processes: int, count: int = 0
) -> tuple[Chunks, list[tuple[Box, list[int]]]]:
    """The chunks of an array or a stack, and the processes that could write each outer one."""
    cells = _cells(sharding, shape, itemsize, processes)
    cell = tuple(max(1, n) for n in cells.shape)
    if not count:
        chunks = chunk_shapes(shape, itemsize, cells.shape)
        boxes = grid_boxes(shape, chunks.outer)
        return chunks, [(box, sorted(cells.owners[grid_place(box, cell)])) for box in boxes]
    chunks = stack_chunks(count, shape, itemsize, cell)
    boxes = grid_boxes((count, *shape), chunks.outer)
    places = ((box, grid_place(box, chunks.outer)[1:]) for box in boxes)
    return chunks, [(box, sorted(cells.owners[place])) for box, place in places]


@functools.lru_cache(maxsize=1024)
def _cells(sharding: Sharding | None, shape: Shape, itemsize: int, processes: int) -> Cells:
    """The blocks of an array, each of which one process writes."""
    # A value of the host program has no sharding, and is taken from process 0.
    whole = [frozenset({Box.whole(shape)})]
    boxes_of = process_boxes(sharding, shape, processes) if sharding else whole
    return writer_cells(shape, itemsize, boxes_of)


def _sharding(array: np.ndarray | jax.Array) -> Sharding | None:
    return array.sharding if isinstance(array, jax.Array) else None


def _leaf(node: TreeNode, name: str) -> tuple[Leaf, np.ndarray | jax.Array | None]:
    """The description of a leaf, and its array if it has one."""
    kind, value = kind_of(node), node.value
    if kind in ("none", "str"):
        return Leaf(node.path, name, kind, value=value), None
    if kind == "empty":
        return Leaf(node.path, name, kind, value=empty_kind(value)), None
    impl, sharding = "", None
    if isinstance(value, jax.ShapeDtypeStruct):
        raise UnsupportedLeaf(f"{node.label} is abstract: it has a shape, but no data to save")
    if kind == "prng_key":
        sharding = saved_sharding(value.sharding)
        impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
    if isinstance(value, jax.Array):
        if jax.process_count() > 1 and value.is_fully_addressable:
            raise UnsupportedLeaf(
                f"{node.label} is an array of one process among {jax.process_count()}, whose value"
                " may differ on the others. Make it global: jax.device_put(x, NamedSharding(mesh,"
                " PartitionSpec()))."
            )
        if getattr(getattr(value.sharding, "spec", None), "unreduced", None):
            raise UnsupportedLeaf(
                f"{node.label} is unreduced: its devices hold parts of a sum, not its values"
            )
        sharding = sharding or saved_sharding(value.sharding)
    else:
        try:
            array = np.array(value)  # a copy: the caller may go on and change the original
            array.dtype.newbyteorder("<")
        except (OverflowError, ValueError, TypeError) as error:
            raise UnsupportedLeaf(f"{node.label} cannot be stored as an array: {error}") from None
        if array.dtype == object:
            raise UnsupportedLeaf(f"{node.label} is {value!r:.60}, which no 64-bit array holds")
        value = array.astype(array.dtype.newbyteorder("<"), copy=False)
    shape, dtype = tuple(value.shape), np.dtype(value.dtype)
    require_storable(node.label, dtype)
    leaf = Leaf(node.path, name, kind, shape, dtype.name, None, impl, sharding, node.axes)
    return leaf, value


def _to_host(parts: Parts) -> dict[str, dict[Box, np.ndarray]]:
    """The parts as host arrays."""
    on_devices = [part for of in parts.values() for part in of.values()]
    copied = iter(to_host([part for part in on_devices if isinstance(part, jax.Array)]))
    return {
        name: {
            box: next(copied) if isinstance(part, jax.Array) else part for box, part in of.items()
        }
        for name, of in parts.items()
    }


def _parts(
    array: np.ndarray | jax.Array, boxes: tuple[Box, ...]
) -> dict[Box, np.ndarray | jax.Array]:
    """The parts of an array that the boxes need, by their boxes, where they are."""
    if not isinstance(array, jax.Array):
        return {Box.whole(array.shape): array}
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    sources = _sources(array.sharding, array.shape, boxes)
    return {box: by_device[device] for box, device in sources}


@functools.lru_cache(maxsize=1024)
def _sources(sharding: Sharding, shape: Shape, needed: tuple[Box, ...]) -> list[tuple[Box, Device]]:
    """The distinct boxes here that meet a needed box, each with a device that holds it."""
    boxes = device_boxes(sharding, shape).items()
    return [(box, devices[0]) for box, devices in boxes if any(map(box.intersect, needed))]


@functools.lru_cache(maxsize=1024)
def _pieces(
    parts: tuple[Box, ...], box: Box
) -> list[tuple[Box, tuple[slice | EllipsisType, ...], tuple[slice | EllipsisType, ...]]]:
    """Each part that has elements of `box`, with their numpy indices in the part and in `box`."""
    hits = [(part, hit) for part in parts if (hit := part.intersect(box)) is not None]
    return [(part, hit.relative_to(part).index, hit.relative_to(box).index) for part, hit in hits]
