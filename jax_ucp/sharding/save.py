"""A pytree onto disk: decided from shapes and shardings alike on every process, then written by
each in part.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.files.local import LocalFiles
from jax_ucp.files.protocol import read_file
from jax_ucp.layout.blocks import SMALL_BYTES, Chunks, chunk_shapes, grid_boxes, writer_cells
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sharding.boxes import Device, device_boxes, process_boxes, saved_sharding
from jax_ucp.sharding.trees import Node, empty_kind, kind_of, walk
from jax_ucp.sources.budget import DEFAULT_BUDGET, run_bounded
from jax_ucp.sources.protocol import ArrayInfo, MakesArrays
from jax_ucp.tree import Leaf, SavedSharding, leaf_names, unspeakable_paths
from jax_ucp.universal.metadata import Metadata, digest
from jax_ucp.universal.orbax_tree import orbax_files
from jax_ucp.universal.packs import is_indexed, packed_arrays
from jax_ucp.universal.store import METADATA_FILE, Commit, ZarrStore, require_storable, write_part


@dataclass(frozen=True)
class Snapshot(MakesArrays):
    """A tree taken to host memory by this process, ready to be written.

    `leaves` and `chunks` are the same on all processes; `blocks` are the outer chunks this process
    writes, `data` the parts of each array that it needs for them, by name. It is an `ArraySource`
    of those.
    """

    leaves: Sequence[Leaf]
    infos: Mapping[str, ArrayInfo]
    chunks: Mapping[str, Chunks]
    blocks: Sequence[tuple[str, Box]]
    data: Mapping[str, Mapping[Box, np.ndarray]]

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self.infos

    def read(self, key: str, box: Box) -> np.ndarray:
        found = np.asarray(_assemble(self.data[key], box, self.infos[key].dtype)).view()
        found.flags.writeable = False
        return found


@dataclass(frozen=True)
class Description:
    """The leaves of a tree as the checkpoint will know them, and their arrays by name; nothing
    is copied yet.
    """

    leaves: Sequence[Leaf]
    arrays: Mapping[str, np.ndarray | jax.Array]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which looks at all objects of the program again for each so
    many new ones.

    A snapshot makes some for every part of every array and drops none: of 10,000 arrays it was half
    the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def describe(tree: Any) -> Description:
    """What a tree holds. Raises UnsupportedLeaf for a leaf that could not be restored as what it
    was.
    """
    nodes = list(walk(tree))
    if same := unspeakable_paths(node.path for node in nodes):
        raise UnsupportedLeaf(
            f"keys that differ only in type cannot be told apart on disk: {same[0]}"
        )
    strings = [".".join(map(str, node.path)) for node in nodes if isinstance(node.value, str)]
    if twice := {name for name in strings if strings.count(name) > 1}:
        raise UnsupportedLeaf(
            f"two strings would have one name on disk, {twice.pop()!r}: rename a key"
        )
    leaves: list[Leaf] = []
    arrays: dict[str, np.ndarray | jax.Array] = {}
    for node, name in zip(nodes, leaf_names([node.path for node in nodes]), strict=True):
        leaf, array = _leaf(node, name)
        if not _encodable(leaf):
            raise UnsupportedLeaf(
                f"{leaf.label!r} has a key or a value that is no text: it cannot be encoded in"
                " UTF-8"
            )
        leaves.append(leaf)
        if array is not None:
            arrays[name] = array
    return Description(leaves, arrays)


@_uncollected()
def take_snapshot(described: Description) -> Snapshot:
    """Decide who writes what, and copy this process's part of the tree from its devices.

    When it returns, the tree may be changed, donated or deleted.
    """
    arrays = described.arrays
    owners = _Owners(jax.process_count())
    chunks: dict[str, Chunks] = {}
    blocks: list[tuple[str, Box]] = []
    for name, array in arrays.items():
        chunks[name], owned = owners.assign(array)
        blocks += [(name, box) for box in owned]
    data = _to_host(arrays, blocks)
    infos = {name: ArrayInfo(tuple(a.shape), np.dtype(a.dtype)) for name, a in arrays.items()}
    return Snapshot(described.leaves, infos, chunks, blocks, data)


def write_snapshot(
    snapshot: Snapshot, directory: LocalFiles, budget_bytes: int = DEFAULT_BUDGET
) -> None:
    """Write this process's chunks, and its part of the digests. The directory is not yet a
    checkpoint.
    """
    if read_file(directory, METADATA_FILE) is not None:
        raise FileExistsError(f"{directory} is a checkpoint already; save to another path")
    store = ZarrStore(directory, snapshot.infos, snapshot.chunks)
    packed = packed_arrays(snapshot.infos, snapshot.chunks)

    def write(name: str, box: Box) -> None:
        store.write(name, box, snapshot.read(name, box), durable=False)

    def write_pack() -> None:
        blocks = (
            (name, box, snapshot.read(name, box)) for name, box in snapshot.blocks if name in packed
        )
        store.write_pack(jax.process_index(), blocks)

    def jobs() -> Iterator[tuple[int, Any]]:
        if any(name in packed for name, _ in snapshot.blocks):
            yield 2 * SMALL_BYTES, write_pack
        if jax.process_index() == 0:
            yield from (
                (0, lambda name=name: store.create(name))
                for name in snapshot.infos
                if name not in packed
            )
        for name, box in snapshot.blocks:
            if name in packed:
                continue
            yield (
                2 * box.size * snapshot.infos[name].dtype.itemsize,
                lambda name=name, box=box: write(name, box),
            )

    run_bounded(jobs(), budget_bytes)
    write_part(store, jax.process_index())


def commit_snapshot(snapshot: Snapshot, directory: LocalFiles) -> Metadata:
    """Make the directory a checkpoint. One process does this, after all have written their
    snapshots.
    """
    store = ZarrStore(directory, snapshot.infos, snapshot.chunks)
    packed = packed_arrays(snapshot.infos, snapshot.chunks)
    outer = {name: chunks.outer for name, chunks in snapshot.chunks.items()}
    files = orbax_files(snapshot.leaves, outer, ocdbt=is_indexed(snapshot.infos, snapshot.chunks))
    return Commit(snapshot.leaves, jax.process_count(), packed, files).write(store)


def content(snapshot: Snapshot) -> list[tuple[str, str, str]]:
    """Of each leaf its name, its label, and what all processes must have alike for its chunks to be
    of one array.

    Values are no part of it: those of the host program are taken from process 0.
    """
    return [
        (leaf.name, leaf.label, _about(leaf, snapshot.chunks.get(leaf.name)))
        for leaf in snapshot.leaves
    ]


def _about(leaf: Leaf, chunks: Chunks | None) -> str:
    keys = ",".join(key.kind for key in leaf.path)
    empty = f"an empty {leaf.value}" if leaf.kind == "empty" else leaf.kind
    said = [f"{leaf.kind} {leaf.dtype} {list(leaf.shape)}" if leaf.has_array else empty]
    said += [f"in chunks of {list(chunks.outer)} of {list(chunks.inner)}"] if chunks else []
    said += [_placed(leaf.sharding)] if leaf.sharding else []
    said += [str(detail) for detail in (leaf.key_impl, leaf.axes) if detail]
    return ", ".join([*said, f"below {keys or 'nothing'}"])


@functools.lru_cache(maxsize=1024)
def _placed(sharding: SavedSharding) -> str:
    sizes = ", ".join(
        f"{name} {size}"
        for name, size in zip(sharding.axis_names, sharding.axis_sizes, strict=True)
    )
    return f"as {sharding.spec} on {sizes} (devices {digest(repr(sharding.device_ids).encode())})"


class _Owners:
    """Shares outer chunks out to the processes that hold them, each to the one with the fewest
    bytes so far.
    """

    def __init__(self, processes: int):
        self._bytes = [0] * processes

    def assign(self, array: np.ndarray | jax.Array) -> tuple[Chunks, list[Box]]:
        """The chunks of an array, and which of them this process writes."""
        shape, itemsize = tuple(array.shape), np.dtype(array.dtype).itemsize
        sharding = array.sharding if isinstance(array, jax.Array) else None
        chunks, boxes = _writers(sharding, shape, itemsize, len(self._bytes))
        mine: list[Box] = []
        for box, writers in boxes:
            owner = min(writers, key=self._bytes.__getitem__)
            self._bytes[owner] += box.size * itemsize
            if owner == jax.process_index():
                mine.append(box)
        return chunks, mine


@functools.lru_cache(maxsize=1024)
def _writers(
    sharding: Sharding | None, shape: Shape, itemsize: int, processes: int
) -> tuple[Chunks, list[tuple[Box, list[int]]]]:
    """The chunks of an array, and the processes that could write each outer one. Many arrays of
    a tree are alike.
    """
    # A value of the host program has no sharding, and is taken from process 0.
    held = (
        process_boxes(sharding, shape, processes) if sharding else [frozenset({Box.whole(shape)})]
    )
    cells = writer_cells(shape, itemsize, held)
    chunks = chunk_shapes(shape, itemsize, cells.shape)
    boxes = grid_boxes(shape, chunks.outer)
    return chunks, [(box, sorted(cells.owners[_cell(box, cells.shape)])) for box in boxes]


def _cell(box: Box, cell: Shape) -> Shape:
    return tuple(a // max(1, c) for a, c in zip(box.start, cell, strict=True))


def _leaf(node: Node, name: str) -> tuple[Leaf, np.ndarray | jax.Array | None]:
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
        value = _host_value(node, value)
    dtype = np.dtype(value.dtype)
    require_storable(node.label, dtype)
    return (
        Leaf(
            node.path, name, kind, tuple(value.shape), dtype.name, None, impl, sharding, node.axes
        ),
        value,
    )


def _encodable(leaf: Leaf) -> bool:
    text = "".join(map(str, leaf.path)) + (leaf.value if isinstance(leaf.value, str) else "")
    return text == text.encode(errors="replace").decode()


def _host_value(node: Node, value: Any) -> np.ndarray:
    try:
        array = np.array(value)  # a copy: the caller may go on and change the original
        array.dtype.newbyteorder("<")
    except (OverflowError, ValueError, TypeError) as error:
        raise UnsupportedLeaf(f"{node.label} cannot be stored as an array: {error}") from None
    if array.dtype == object:
        raise UnsupportedLeaf(f"{node.label} is {value!r:.60}, which no 64-bit array holds")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _to_host(
    arrays: Mapping[str, np.ndarray | jax.Array], blocks: Iterable[tuple[str, Box]]
) -> dict[str, dict[Box, np.ndarray]]:
    """The parts of each array that this process holds and the blocks need, by their boxes, as
    host arrays.
    """
    needed: dict[str, list[Box]] = {}
    for name, box in blocks:
        needed.setdefault(name, []).append(box)
    parts: dict[str, dict[Box, jax.Array]] = {}
    data: dict[str, dict[Box, np.ndarray]] = {}
    for name, boxes in needed.items():
        array = arrays[name]
        if isinstance(array, jax.Array):
            by_device = {shard.device: shard.data for shard in array.addressable_shards}
            sources = _sources(array.sharding, array.shape, tuple(boxes))
            parts[name] = {box: by_device[device] for box, device in sources}
            for box, device in sources:
                # there it only costs: what follows is a view of the device's memory
                if device.platform != "cpu":
                    parts[name][box].copy_to_host_async()
        else:
            data[name] = {Box.whole(array.shape): array}
    for name, held in parts.items():
        data[name] = {box: np.asarray(part) for box, part in held.items()}
    return data


@functools.lru_cache(maxsize=1024)
def _sources(sharding: Sharding, shape: Shape, needed: tuple[Box, ...]) -> list[tuple[Box, Device]]:
    """The distinct boxes this process holds that have an element of a needed box, each with a
    device that holds it.
    """
    held = device_boxes(sharding, shape)
    return [
        (box, devices[0])
        for box, devices in held.items()
        if any(box.intersect(b) is not None for b in needed)
    ]


def _assemble(parts: Mapping[Box, np.ndarray], box: Box, dtype: np.dtype) -> np.ndarray:
    """The elements of `box`: a view of the part that holds them all, or put together from
    several.
    """
    pieces = _pieces(tuple(parts), box)
    if len(pieces) == 1:
        part, source, _ = pieces[0]
        return parts[part][source]
    out = np.empty(box.shape, dtype)
    for part, source, target in pieces:
        out[target] = parts[part][source]
    return out


@functools.lru_cache(maxsize=1024)
def _pieces(
    parts: tuple[Box, ...], box: Box
) -> list[tuple[Box, tuple[slice, ...], tuple[slice, ...]]]:
    """Where the elements of `box` are in each part that has some, and where in `box` they go."""
    hits = [(part, hit) for part in parts if (hit := part.intersect(box)) is not None]
    return [(part, hit.relative_to(part).index, hit.relative_to(box).index) for part, hit in hits]
