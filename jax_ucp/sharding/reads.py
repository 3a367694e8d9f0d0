"""What each host of a mesh would read of a checkpoint, counted and not done: integers, no devices, any size of mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jax_ucp.layout.blocks import Chunks, chunk_shapes, writer_cells
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.metadata import Axes


@dataclass(frozen=True)
class HostReads:
    """By host: bytes of the distinct boxes it needs, bytes of the inner chunks that hold them, outer chunks opened.

    A chunk that two boxes of a host share in part counts for each: what is read is at most `read`.
    """

    needed: np.ndarray
    read: np.ndarray
    files: np.ndarray

    @property
    def amplification(self) -> float:
        return float(self.read.sum() / max(1, self.needed.sum()))

    @property
    def balance(self) -> float:
        """The bytes of the host that reads most, over the mean."""
        return float(self.read.max() * len(self.read) / max(1, self.read.sum()))


def planned_reads(
    arrays: Iterable[tuple[Shape, int, Chunks, tuple[Axes, ...]]], mesh: Mapping[str, int], devices_per_host: int
) -> HostReads:
    """The reads of arrays (shape, itemsize, chunks, spec) onto a mesh, devices in row-major order, hosts in turn.

    The specs fit the mesh, as `fit_spec` makes them.

    >>> chunks = Chunks((4, 8), (2, 4))
    >>> found = planned_reads([((8, 8), 4, chunks, (None, "x"))], {"x": 4}, devices_per_host=2)
    >>> found.needed.tolist(), found.read.tolist(), found.files.tolist()
    ([128, 128], [128, 128], [2, 2])
    """
    hosts = math.prod(mesh.values()) // devices_per_host
    totals = np.zeros((3, hosts), np.int64)
    axes = tuple(mesh.items())
    for shape, itemsize, chunks, spec in arrays:
        totals += _reads(shape, itemsize, chunks, spec, axes, devices_per_host)
    return HostReads(*totals)


@functools.lru_cache(maxsize=1024)
def planned_chunks(
    shape: Shape, itemsize: int, spec: tuple[Axes, ...], mesh: tuple[tuple[str, int], ...], devices_per_host: int
) -> Chunks:
    """The chunks that a save from a mesh of (name, size) axes would write."""
    corners = np.concatenate(_bounds(shape, spec, mesh), axis=1).tolist()
    boxes = [Box(tuple(row[: len(shape)]), tuple(row[len(shape) :])) for row in corners]
    held = [set(boxes[at : at + devices_per_host]) for at in range(0, len(boxes), devices_per_host)]
    return chunk_shapes(shape, itemsize, writer_cells(shape, itemsize, held).shape)


@functools.lru_cache(maxsize=1024)
def _reads(
    shape: Shape,
    itemsize: int,
    chunks: Chunks,
    spec: tuple[Axes, ...],
    mesh: tuple[tuple[str, int], ...],
    devices_per_host: int,
) -> np.ndarray:
    """Rows needed, read and files, by host, of one array: many arrays of a model are alike."""
    start, stop = _bounds(shape, spec, mesh)
    host = np.arange(len(start)) // devices_per_host
    hosts = len(start) // devices_per_host
    inner, outer = np.maximum(chunks.inner, 1), np.maximum(chunks.outer, 1)
    return np.array(
        [
            itemsize * _volumes(host, hosts, start, stop, np.ones_like(inner)),
            itemsize * math.prod(inner.tolist()) * _volumes(host, hosts, start, stop, inner),
            _volumes(host, hosts, start, stop, outer),
        ]
    )


def _bounds(shape: Shape, spec: tuple[Axes, ...], mesh: tuple[tuple[str, int], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where the box of each device begins and ends: (devices, axes of the array)."""
    sizes = [size for _, size in mesh]
    coordinates = dict(zip(dict(mesh), np.unravel_index(np.arange(math.prod(sizes)), sizes), strict=True))
    start, stop = np.zeros((2, math.prod(sizes), len(shape)), np.int64)
    for axis, n in enumerate(shape):
        names = spec[axis] if axis < len(spec) else None
        names = (names,) if isinstance(names, str) else names or ()
        part, parts = np.zeros(math.prod(sizes), np.int64), 1
        for name in names:
            part, parts = part * dict(mesh)[name] + coordinates[name], parts * dict(mesh)[name]
        start[:, axis], stop[:, axis] = part * (n // parts), (part + 1) * (n // parts)
    return start, stop


def _volumes(host: np.ndarray, hosts: int, start: np.ndarray, stop: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """By host, how many units its distinct boxes touch, boxes that touch the same units counted once."""
    first, last = start // unit, -(-stop // unit)
    rows = np.unique(np.concatenate([host[:, None], first, last], axis=1), axis=0)
    ndim = start.shape[1]
    volumes = np.prod(rows[:, 1 + ndim :] - rows[:, 1 : 1 + ndim], axis=1)
    return np.bincount(rows[:, 0], weights=volumes, minlength=hosts).astype(np.int64)
