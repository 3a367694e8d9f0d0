"""Planned reads of each host of a mesh: integers, no devices, any mesh size."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jax_ucp.arguments import whole_number
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.protocol import TOGETHER, TOGETHER_BYTES
from jax_ucp.files.remote import GAP_BYTES, REQUEST_BYTES
from jax_ucp.layout.blocks import SMALL_BYTES, Chunks, grid_boxes, writer_cells
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sharding.fit import (
    ON_DEVICES,
    Fit,
    Rule,
    axis_names,
    check_rules,
    fit_axes,
    fit_on_host,
    unused_rules,
)
from jax_ucp.text import html_table
from jax_ucp.tree import Axes, Leaf
from jax_ucp.universal.reader import Unstacked
from jax_ucp.universal.shard_codec import CRC_BYTES
from jax_ucp.universal.store import ZarrStore

MAX_DEVICES = 1 << 24  # a plan takes memory for each
MOST_COUNTED = 1 << 20  # inner chunks of an array of which requests are counted, not estimated


@dataclass(frozen=True, slots=True)
class HostMesh:
    """A mesh that need not be there: its axes in order, and by how many hosts its devices are held.

    Devices are in row-major order of the axes, and each host has as many as any other, the first
    ones first.
    """

    axes: tuple[tuple[str, int], ...]
    hosts: int = 1

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh | Mapping[str, int], hosts: int = 1) -> HostMesh:
        """From a mesh of JAX, or sizes by name. Raises ValueError for uneven hosts or sizes."""
        sizes = mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh
        if not isinstance(sizes, Mapping):
            raise ValueError(
                f"mesh={mesh!r:.80} should be a mesh of JAX, or the sizes of its axes by name"
            )
        axes = tuple(
            (str(name), whole_number(f"the mesh axis {name}", size)) for name, size in sizes.items()
        )
        devices = math.prod(size for _, size in axes)
        if devices > MAX_DEVICES:
            raise ValueError(f"a mesh of {devices} devices; at most {MAX_DEVICES} are planned for")
        if devices % whole_number("hosts", hosts):
            raise ValueError(f"{devices} devices cannot be shared out evenly to {hosts} hosts")
        return cls(axes, hosts)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def devices_of_hosts(self) -> list[np.ndarray]:
        """The numbers of each host's devices."""
        return np.split(np.arange(self.devices), self.hosts)


@dataclass(frozen=True, slots=True)
class PlannedArray:
    """An array as it lies on disk, and the spec it is read onto, which fits the mesh.

    An element costs the reading of its inner chunk. Outer chunks are files, unless `pieces` say
    which blocks of the array lie in which files: those of a file are asked for together where they
    are `packed`. Chunks of a stack are those of `count` arrays like it.
    """

    shape: Shape
    itemsize: int
    chunks: Chunks
    spec: tuple[Axes, ...]
    pieces: tuple[tuple[str, Box], ...] = ()
    packed: bool = False
    count: int = 1


@dataclass(frozen=True, repr=False)
class HostReads:
    """By host: bytes of the boxes it needs, bytes of the chunks with them, files opened, and
    requests where the files are behind a network.

    Of our own format requests are those that a restore makes, but for arrays of which a host needs
    more than a block: these come in some requests more. Of others a piece is one, or as many as it
    has bytes for; columns of it may be more, neighbours fewer.
    Checksums and indices, less than 0.1 % of chunks of 64 KiB, are not counted. Of an array that is
    not stored in chunks the bytes wanted are counted; files that are mapped are read by the system
    in whole pages. `notes` say what the mesh does not have of saved specs and rules.
    """

    needed: np.ndarray
    read: np.ndarray
    files: np.ndarray
    requests: np.ndarray
    notes: Sequence[str] = ()

    @property
    def amplification(self) -> float:
        """Bytes read over bytes needed, of all hosts together."""
        return float(self.read.sum() / max(1, self.needed.sum()))

    @property
    def balance(self) -> float:
        """The bytes of the host that reads most, over the mean."""
        return float(self.read.max() * len(self.read) / max(1, self.read.sum()))

    def __repr__(self) -> str:
        return (
            f"<reads of {len(self.read)} hosts: {self.read.sum():,} bytes, {self.amplification:.3f}"
            f" of those needed, at most {self.read.max():,} of one>"
        )

    def _repr_html_(self) -> str:
        columns = (self.read, self.needed, self.files, self.requests)
        hosts = np.stack(columns, axis=1).tolist()
        rows = [(str(host), *map("{:,}".format, numbers)) for host, numbers in enumerate(hosts)]
        heads = ("host", "bytes read", "bytes needed", "files", "requests")
        return html_table(repr(self), heads, rows)


def planned_reads(arrays: Iterable[PlannedArray], mesh: HostMesh) -> HostReads:
    """The reads of arrays onto a mesh, where each host reads a chunk once for all its devices.

    >>> array = PlannedArray((8, 8), 4, Chunks((4, 8), (2, 4)), (None, "x"))
    >>> found = planned_reads([array], HostMesh.of({"x": 4}, hosts=2))
    >>> found.needed.tolist(), found.read.tolist(), found.files.tolist()
    ([128, 128], [128, 128], [2, 2])
    >>> found.requests.tolist()
    [2, 2]
    """
    totals = np.zeros((4, mesh.hosts), np.int64)
    shared: dict[str, np.ndarray] = {}
    in_packs: dict[str, np.ndarray] = {}  # by host, how many arrays, and their bytes
    for array in arrays:
        about = array.shape, array.itemsize, array.chunks, array.count, array.spec, mesh
        reads = _read_bytes(*about)
        totals[:2] += reads
        if not array.pieces:
            totals[2:] += _reads(*about)
            continue
        boxes = tuple([box for _, box in array.pieces])
        opened = _opened(array.shape, array.spec, boxes, mesh)
        for (file, _), by_host in zip(array.pieces, opened.T, strict=True):
            shared[file] = shared[file] | by_host if file in shared else by_host
        if array.packed:
            pack, _ = array.pieces[0]
            in_pack = in_packs.setdefault(pack, np.zeros((2, mesh.hosts), np.int64))
            in_pack += opened.any(axis=1), reads[1] + CRC_BYTES
        else:
            totals[3] += np.maximum(opened.sum(axis=1), -(-reads[1] // REQUEST_BYTES))
    for by_host in shared.values():
        totals[2] += by_host
    for count, nbytes in in_packs.values():  # arrays of one pack are taken to be alike
        each = nbytes / np.maximum(count, 1)
        most = np.clip(TOGETHER_BYTES // np.maximum(each, 1), 1, TOGETHER)
        batches, rest = np.divmod(count, most)
        of_batches = batches * np.ceil(most * each / REQUEST_BYTES)
        totals[3] += (of_batches + np.ceil(rest * each / REQUEST_BYTES)).astype(np.int64)
    return HostReads(totals[0], totals[1], totals[2], totals[3])


def checkpoint_reads(contents: Contents, mesh: HostMesh, rules: Sequence[Rule] = ()) -> HostReads:
    """The reads of a restore onto a mesh, of first replicas. Raises ValueError for rules."""
    check_rules(rules, contents.leaves)
    counts = Counter(
        _planned(contents, leaf, planned_fit(leaf, mesh, rules).spec)
        for leaf in contents.leaves
        if leaf.has_array
    )
    arrays: list[PlannedArray] = []
    for array, count in counts.items():  # arrays that lie alike, or the stack of them
        is_stack = array.chunks.is_stack
        arrays += [replace(array, count=count)] if is_stack else [array] * count
    reads = planned_reads(arrays, mesh)
    return replace(reads, notes=fit_notes(contents.leaves, mesh, rules))


def _planned(contents: Contents, leaf: Leaf, spec: tuple[Axes, ...]) -> PlannedArray:
    """The array of a leaf as it is stored, with its chunks or files, to be restored by `spec`."""
    source = contents.arrays
    info = source.arrays()[leaf.name]
    about = leaf.shape, info.dtype.itemsize
    chunks = source.chunks[leaf.name] if isinstance(source, ZarrStore | Unstacked) else None
    if chunks and chunks.is_stack:
        return PlannedArray(*about, chunks, spec)
    # What can be read alone: of what is near a small file is read whole.
    unit = chunks.inner if chunks and contents.files.is_remote else info.chunk
    inner = unit or (1,) * len(info.shape)
    pieces = contents.locate(leaf)
    if pieces and not any(piece.item for piece in pieces):
        # Each piece is a file, a chunk of a grid, of which the first is whole.
        outer = chunks.outer if chunks else pieces[0].target.shape
        return PlannedArray(*about, Chunks(outer, inner), spec)
    first = {piece.target: piece.file for piece in reversed(pieces)}
    files = tuple((file, box) for box, file in first.items())
    return PlannedArray(*about, Chunks(leaf.shape, inner), spec, files, packed=bool(chunks))


def planned_fit(leaf: Leaf, mesh: HostMesh, rules: Sequence[Rule] = ()) -> Fit:
    """The spec of a leaf restored without target; what is numpy stays with the host."""
    fit = fit_axes if leaf.kind in ON_DEVICES else fit_on_host
    return fit(leaf, mesh.sizes, rules)


def fit_notes(leaves: Sequence[Leaf], mesh: HostMesh, rules: Sequence[Rule] = ()) -> list[str]:
    """Each way in which a leaf is not placed as asked for, and each rule that applies to none."""
    notes: list[str] = []
    for leaf in (leaf for leaf in leaves if leaf.has_array):
        notes += [f"{leaf.label}: {note}" for note in planned_fit(leaf, mesh, rules).notes]
    return notes + unused_rules(rules, leaves)


def mesh_cells(
    leaves: Sequence[Leaf], mesh: HostMesh, rules: Sequence[Rule] = ()
) -> dict[str, Shape]:
    """By array, the block that one host writes; no chunk crosses it. Raises ValueError."""
    check_rules(rules, leaves)
    return {
        leaf.name: planned_cell(
            leaf.shape, np.dtype(leaf.dtype).itemsize, planned_fit(leaf, mesh, rules).spec, mesh
        )
        for leaf in leaves
        if leaf.has_array
    }


@functools.lru_cache(maxsize=1024)
def planned_cell(shape: Shape, itemsize: int, spec: tuple[Axes, ...], mesh: HostMesh) -> Shape:
    """The block of an array that one host writes in a save from the mesh."""
    corners = np.concatenate(_bounds(shape, spec, mesh), axis=1).tolist()
    boxes = [Box(tuple(row[: len(shape)]), tuple(row[len(shape) :])) for row in corners]
    step = mesh.devices // mesh.hosts
    of_hosts = [set(boxes[at : at + step]) for at in range(0, len(boxes), step)]
    return writer_cells(shape, itemsize, of_hosts).shape


@functools.lru_cache(maxsize=1024)
def _read_bytes(
    shape: Shape, itemsize: int, chunks: Chunks, count: int, spec: tuple[Axes, ...], mesh: HostMesh
) -> np.ndarray:
    """By host, of `count` arrays: bytes needed, and bytes read."""
    start, stop = _bounds(shape, spec, mesh)
    hosts, inner = mesh.devices_of_hosts, _of_array(shape, chunks.inner)
    needed = itemsize * touched_units(hosts, start, stop, np.ones_like(inner))
    read = itemsize * math.prod(inner.tolist()) * touched_units(hosts, start, stop, inner)
    return np.array([count * needed, count * read])


@functools.lru_cache(maxsize=1024)
def _reads(
    shape: Shape, itemsize: int, chunks: Chunks, count: int, spec: tuple[Axes, ...], mesh: HostMesh
) -> np.ndarray:
    """By host, of `count` arrays: outer chunks opened, and requests."""
    start, stop = _bounds(shape, spec, mesh)
    together = chunks.outer[0] if chunks.is_stack else 1
    inner, outer = _of_array(shape, chunks.inner), _of_array(shape, chunks.outer)
    files = touched_units(mesh.devices_of_hosts, start, stop, outer)
    small = not chunks.is_stack and math.prod(shape) * itemsize <= SMALL_BYTES
    asked = _Asked(shape, itemsize, outer, inner, count, together, small)
    return np.array([-(-count // together) * files, asked.by(mesh, start, stop)])


def _of_array(shape: Shape, chunk: Shape) -> np.ndarray:
    """A chunk of an array of this shape, without the axis of a stack."""
    return np.maximum(chunk[len(chunk) - len(shape) :], 1)


@dataclass(frozen=True)
class _Asked:
    """The requests for an array, or for a stack of `count` arrays of which files have `together`.

    `outer` and `inner` are one array's chunks. Of a `small` one a host reads one box around all.
    """

    shape: Shape
    itemsize: int
    outer: np.ndarray
    inner: np.ndarray
    count: int
    together: int
    small: bool

    def by(self, mesh: HostMesh, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """By host, for the boxes of its devices."""
        parts = self.outer // self.inner
        ends = -(-np.array(self.shape, np.int64) // self.inner)
        first, last = start // self.inner, -(-stop // self.inner)
        counts = np.empty(mesh.hosts, np.int64)
        known: dict[bytes, int] = {}  # hosts whose boxes lie alike ask alike
        for i, here in enumerate(mesh.devices_of_hosts):
            low, high = first[here], last[here]
            if self.small:
                low, high = low.min(axis=0, keepdims=True), high.max(axis=0, keepdims=True)
            origin = low.min(axis=0) // parts * parts
            grid = np.minimum(ends - origin, -(-(high.max(axis=0) - origin) // parts) * parts)
            boxes = np.concatenate([low - origin, high - origin], axis=1)
            key = boxes.tobytes() + grid.tobytes()
            if key not in known:
                known[key] = self._of(np.unique(boxes, axis=0), grid, parts)
            counts[i] = known[key]
        return counts

    def _of(self, boxes: np.ndarray, grid: np.ndarray, parts: np.ndarray) -> int:
        """The requests of a host that reads these boxes, of inner chunks."""
        if math.prod(grid.tolist()) > MOST_COUNTED:
            nbytes = _union(boxes) * math.prod(self.inner.tolist()) * self.itemsize
            return -(-self.count * nbytes // REQUEST_BYTES)
        covered = np.zeros(grid, bool)
        for low, high in zip(*np.split(boxes, 2, axis=1), strict=True):
            covered[tuple(map(slice, low, high))] = True
        array_bytes = int(covered.sum()) * math.prod(self.inner.tolist()) * self.itemsize
        if not array_bytes:
            return 0
        most = min(max(1, TOGETHER_BYTES // array_bytes), TOGETHER)
        nbytes, requests = math.prod(self.inner.tolist()) * self.itemsize + CRC_BYTES, 0
        for file in grid_boxes(grid.tolist(), parts.tolist()):
            places = np.flatnonzero(covered[file.index]).tolist()
            for first in range(0, self.count, most):
                # of the arrays from `first` on, which lie in one file or several
                last = min(first + most, self.count)
                for begin in range(first // self.together * self.together, last, self.together):
                    width = min(self.together, self.count - begin)
                    low, high = max(first - begin, 0), min(last - begin, width)
                    requests += _requests(
                        [(p * width + low, p * width + high) for p in places], nbytes
                    )
        return requests


def _requests(runs: Iterable[tuple[int, int]], nbytes: int) -> int:
    """How many requests `files.remote` makes for runs of chunks of so many bytes.

    >>> _requests([(0, 3), (4, 5), (9, 10)], 1 << 20), _requests([(0, 5)], 1 << 20)
    (3, 2)
    """
    if nbytes > REQUEST_BYTES:
        return sum(last - first for first, last in runs) * -(-nbytes // REQUEST_BYTES)
    requests, start, stop = 0, 0, -GAP_BYTES - 1
    for first, last in runs:
        at = first * nbytes
        if at - stop > GAP_BYTES or at + nbytes - start > REQUEST_BYTES:
            requests, start = requests + 1, at
        joined = max(1, (REQUEST_BYTES - (at - start)) // nbytes)
        while first + joined < last:
            requests, first = requests + 1, first + joined
            start = first * nbytes
            joined = max(1, REQUEST_BYTES // nbytes)
        stop = last * nbytes
    return requests


def _bounds(shape: Shape, spec: tuple[Axes, ...], mesh: HostMesh) -> tuple[np.ndarray, np.ndarray]:
    """Where the box of each device begins and ends: (devices, axes of the array)."""
    sizes, devices = mesh.sizes, mesh.devices
    places = np.unravel_index(np.arange(devices), tuple(sizes.values())) if sizes else ()
    coordinates = dict(zip(sizes, places, strict=True))
    start, stop = np.zeros((2, devices, len(shape)), np.int64)
    for axis, n in enumerate(shape):
        part, parts = np.zeros(devices, np.int64), 1
        for name in axis_names(spec[axis]) if axis < len(spec) else ():
            part, parts = part * sizes[name] + coordinates[name], parts * sizes[name]
        start[:, axis], stop[:, axis] = part * (n // parts), (part + 1) * (n // parts)
    return start, stop


def touched_units(
    groups: Sequence[np.ndarray],
    start: np.ndarray,
    stop: np.ndarray,
    unit: Sequence[int] | np.ndarray,
) -> np.ndarray:
    """By group, how many blocks of a grid of `unit` its boxes touch, each block once.

    A group is the numbers of its boxes, at least one; `start` and `stop` are by box and axis, and
    no box is empty.
    """
    first, last = start // unit, -(-stop // unit)
    counts = np.empty(len(groups), np.int64)
    known: dict[bytes, int] = {}  # groups whose boxes lie alike, but elsewhere, touch as many
    for i, here in enumerate(groups):
        origin = first[here].min(axis=0)
        boxes = np.concatenate([first[here] - origin, last[here] - origin], axis=1)
        key = boxes.tobytes()
        if key not in known:
            known[key] = _union(np.unique(boxes, axis=0))
        counts[i] = known[key]
    return counts


def _union(boxes: np.ndarray) -> int:
    ndim = boxes.shape[1] // 2
    edges = [np.unique(boxes[:, [axis, ndim + axis]]) for axis in range(ndim)]
    covered = np.zeros([max(0, len(edge) - 1) for edge in edges], bool)
    begin = [np.searchsorted(edge, boxes[:, axis]) for axis, edge in enumerate(edges)]
    end = [np.searchsorted(edge, boxes[:, ndim + axis]) for axis, edge in enumerate(edges)]
    for i in range(len(boxes)):
        covered[tuple(slice(a[i], b[i]) for a, b in zip(begin, end, strict=True))] = True
    volume = covered.astype(np.int64)
    for edge in reversed(edges):
        volume = volume @ np.diff(edge)
    return int(volume)


@functools.lru_cache(maxsize=1024)
def _opened(
    shape: Shape, spec: tuple[Axes, ...], pieces: tuple[Box, ...], mesh: HostMesh
) -> np.ndarray:
    """A mask of the pieces of an array that each host reads of: (hosts, pieces)."""
    corners = np.concatenate(_bounds(shape, spec, mesh), axis=1)
    boxes, of_device = np.unique(corners, axis=0, return_inverse=True)
    start, stop = np.split(boxes[:, None], 2, axis=2)
    low = np.array([box.start for box in pieces], np.int64)
    high = np.array([box.stop for box in pieces], np.int64)
    meets = np.all((start < high) & (stop > low), axis=2)
    boxes_of_hosts = np.split(of_device.ravel(), mesh.hosts)
    return np.array([meets[numbers].any(axis=0) for numbers in boxes_of_hosts])
