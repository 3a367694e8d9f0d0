"""What each host of a mesh would read of a checkpoint: integers, no devices, any mesh size."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jax_ucp.arguments import whole_number
from jax_ucp.layout.blocks import Chunks, writer_cells
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sharding.fit import (
    ON_DEVICES,
    Fit,
    Rule,
    check_logical_rules,
    check_rules,
    fit_axes,
    fit_on_host,
    unused_rules,
)
from jax_ucp.sources.contents import Contents
from jax_ucp.tree import Axes, Leaf

MAX_DEVICES = 1 << 24  # a plan takes memory for each


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
        """From a mesh of JAX, or sizes by name.

        Raises ValueError where the hosts cannot have equal shares, or a size cannot be meant.
        """
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
    def devices_per_host(self) -> int:
        return self.devices // self.hosts


@dataclass(frozen=True, slots=True)
class Stored:
    """How an array lies on disk, and the spec it is read onto, which fits the mesh.

    An element costs the reading of its inner chunk. Outer chunks are files, unless `pieces` say
    which blocks of the array lie in which files.
    """

    shape: Shape
    itemsize: int
    chunks: Chunks
    spec: tuple[Axes, ...]
    pieces: tuple[tuple[str, Box], ...] = ()


@dataclass(frozen=True)
class HostReads:
    """By host: bytes of the boxes it needs, bytes of the chunks with them, and files opened.

    Checksums and indices, less than 0.1 % of chunks of 64 KiB, are not counted. Of an array that is
    not stored in chunks the bytes wanted are counted; files that are mapped are read by the system
    in whole pages. `notes` say what the mesh does not have of saved specs and rules.
    """

    needed: np.ndarray
    read: np.ndarray
    files: np.ndarray
    notes: Sequence[str] = ()

    @property
    def amplification(self) -> float:
        """Bytes read over bytes needed, of all hosts together."""
        return float(self.read.sum() / max(1, self.needed.sum()))

    @property
    def balance(self) -> float:
        """The bytes of the host that reads most, over the mean."""
        return float(self.read.max() * len(self.read) / max(1, self.read.sum()))


def planned_reads(arrays: Iterable[Stored], mesh: HostMesh) -> HostReads:
    """The reads of arrays onto a mesh, where each host reads a chunk once for all its devices.

    >>> array = Stored((8, 8), 4, Chunks((4, 8), (2, 4)), (None, "x"))
    >>> found = planned_reads([array], HostMesh.of({"x": 4}, hosts=2))
    >>> found.needed.tolist(), found.read.tolist(), found.files.tolist()
    ([128, 128], [128, 128], [2, 2])
    """
    totals = np.zeros((3, mesh.hosts), np.int64)
    shared: dict[str, np.ndarray] = {}
    for array in arrays:
        reads = _reads(array.shape, array.itemsize, array.chunks, array.spec, mesh)
        totals[:2] += reads[:2]
        if not array.pieces:
            totals[2] += reads[2]
            continue
        for (file, _), by_host in zip(array.pieces, _opened(array, mesh).T, strict=True):
            shared[file] = shared[file] | by_host if file in shared else by_host
    for by_host in shared.values():
        totals[2] += by_host
    return HostReads(totals[0], totals[1], totals[2])


def checkpoint_reads(contents: Contents, mesh: HostMesh, rules: Sequence[Rule] = ()) -> HostReads:
    """The reads of a restore of any checkpoint onto a mesh, by its saved specs and the rules.

    Of replicas the one that is read, the first, is counted. Raises ValueError for a rule that
    cannot be meant.
    """
    check_rules(rules)
    check_logical_rules(rules, contents.leaves)
    infos = contents.arrays.arrays()

    def stored(leaf: Leaf) -> Stored:
        info, pieces = infos[leaf.name], contents.locate(leaf)
        spec = planned_fit(leaf, mesh, rules).spec
        inner = info.chunk or (1,) * len(leaf.shape)
        # files of a grid, of which the first is whole
        if pieces and not any(piece.item for piece in pieces):
            return Stored(
                leaf.shape, info.dtype.itemsize, Chunks(pieces[0].target.shape, inner), spec
            )
        first = {piece.target: piece.file for piece in reversed(pieces)}
        files = tuple((file, box) for box, file in first.items())
        return Stored(leaf.shape, info.dtype.itemsize, Chunks(leaf.shape, inner), spec, files)

    reads = planned_reads((stored(leaf) for leaf in contents.leaves if leaf.has_array), mesh)
    return replace(reads, notes=fit_notes(contents.leaves, mesh, rules))


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
    """By array, the block that one host writes in a save from the mesh; no chunk crosses it.

    Raises ValueError for a rule that cannot be meant.
    """
    check_rules(rules)
    check_logical_rules(rules, leaves)
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
    step = mesh.devices_per_host
    return writer_cells(
        shape, itemsize, [set(boxes[at : at + step]) for at in range(0, len(boxes), step)]
    ).shape


@functools.lru_cache(maxsize=1024)
def _reads(
    shape: Shape, itemsize: int, chunks: Chunks, spec: tuple[Axes, ...], mesh: HostMesh
) -> np.ndarray:
    """By host: bytes needed, bytes read, and outer chunks opened, of one array."""
    start, stop = _bounds(shape, spec, mesh)
    inner, outer = np.maximum(chunks.inner, 1), np.maximum(chunks.outer, 1)
    return np.array(
        [
            itemsize * _touched(mesh, start, stop, np.ones_like(inner)),
            itemsize * math.prod(inner.tolist()) * _touched(mesh, start, stop, inner),
            _touched(mesh, start, stop, outer),
        ]
    )


def _bounds(shape: Shape, spec: tuple[Axes, ...], mesh: HostMesh) -> tuple[np.ndarray, np.ndarray]:
    """Where the box of each device begins and ends: (devices, axes of the array)."""
    sizes, devices = mesh.sizes, mesh.devices
    places = np.unravel_index(np.arange(devices), tuple(sizes.values())) if sizes else ()
    coordinates = dict(zip(sizes, places, strict=True))
    start, stop = np.zeros((2, devices, len(shape)), np.int64)
    for axis, n in enumerate(shape):
        names = spec[axis] if axis < len(spec) else None
        names = (names,) if isinstance(names, str) else names or ()
        part, parts = np.zeros(devices, np.int64), 1
        for name in names:
            part, parts = part * sizes[name] + coordinates[name], parts * sizes[name]
        start[:, axis], stop[:, axis] = part * (n // parts), (part + 1) * (n // parts)
    return start, stop


def _touched(mesh: HostMesh, start: np.ndarray, stop: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """By host, how many units the boxes of its devices touch, each unit once."""
    return touched_units(np.split(np.arange(mesh.devices), mesh.hosts), start, stop, unit)


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
        boxes = np.unique(
            np.concatenate([first[here] - origin, last[here] - origin], axis=1), axis=0
        )
        key = boxes.tobytes()
        if key not in known:
            known[key] = _union(boxes)
        counts[i] = known[key]
    return counts


def _union(boxes: np.ndarray) -> int:
    """The volume of the union of boxes, given as rows of first and last corner."""
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


def _opened(array: Stored, mesh: HostMesh) -> np.ndarray:
    """Which host reads of which piece: (hosts, pieces)."""
    corners = np.concatenate(_bounds(array.shape, array.spec, mesh), axis=1)
    boxes, of_device = np.unique(corners, axis=0, return_inverse=True)
    start, stop = np.split(boxes[:, None], 2, axis=2)
    low = np.array([box.start for _, box in array.pieces], np.int64)
    high = np.array([box.stop for _, box in array.pieces], np.int64)
    meets = np.all((start < high) & (stop > low), axis=2)
    return np.array(
        [meets[devices].any(axis=0) for devices in np.split(of_device.ravel(), mesh.hosts)]
    )
