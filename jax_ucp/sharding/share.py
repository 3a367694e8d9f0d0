"""Reads shared by processes: of what several of them hold each reads a part, and the parts go over the interconnect.

Integers say how boxes are cut into pieces, one for each device that holds a copy; the pieces are read as boxes are; an
all-gather joins them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ucp.errors as errors
from jax_ucp.errors import CorruptData, TreeMismatch, UCPError
from jax_ucp.layout.blocks import SMALL_BYTES
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sharding.boxes import Device, index_box
from jax_ucp.sharding.reads import touched_units
from jax_ucp.storage.budget import in_order
from jax_ucp.storage.source import ArrayInfo

WORDS_BYTES = 1024  # of what a process has to say to the others


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces of `length` elements of one axis, the last ones short or empty.

    Of each box the i-th piece is read by the i-th device that holds the box, counted in row-major order of the mesh
    axes `names`, over which the sharding has copies.
    """

    axis: int
    length: int
    names: tuple[str, ...]

    def piece(self, box: Box, i: int) -> Box:
        """The i-th piece of a box.

        >>> [str(Cut(0, 4, ("x",)).piece(Box((10,), (17,)), i)) for i in range(3)]
        ['[10:14]', '[14:17]', '[17:17]']
        """
        start, stop = list(box.start), list(box.stop)
        start[self.axis] = min(box.start[self.axis] + i * self.length, box.stop[self.axis])
        stop[self.axis] = min(box.start[self.axis] + (i + 1) * self.length, box.stop[self.axis])
        return Box(tuple(start), tuple(stop))


@dataclass(frozen=True, slots=True)
class SharedRead:
    """An array that is read in pieces, as `dtype`, and then lies by `sharding`."""

    shape: Shape
    dtype: np.dtype
    sharding: NamedSharding
    cut: Cut

    def boxes(self) -> Mapping[Box, Sequence[Device]]:
        """The pieces that this process reads, each with its device."""
        return {piece: [device] for device, piece in self._mine() if piece.size}

    def _mine(self) -> Iterator[tuple[Device, Box]]:
        here = self.sharding.addressable_devices
        pieces = _pieces(self.sharding, self.shape, self.cut)
        return ((d, piece) for d, piece in zip(_mesh(self.sharding).devices.flat, pieces, strict=True) if d in here)

    def gathered(self, data: Mapping[Box, np.ndarray]) -> jax.Array:
        """The array, from the pieces that this process has read.

        Every process that has devices of the mesh must call this, all for the same arrays in the same order.
        """
        axis, length = self.cut.axis, self.cut.length
        box, bits = list(self.sharding.shard_shape(self.shape)), np.dtype(f"u{self.dtype.itemsize}")
        parts, n = self.shape[axis] // box[axis], box[axis]
        box[axis] = length

        def padded(piece: Box) -> np.ndarray:
            part = data[piece].view(bits) if piece.size else np.zeros(piece.shape, bits)
            missing = [(0, want - have) for want, have in zip(box, piece.shape, strict=True)]
            return np.pad(part, missing) if any(map(any, missing)) else part

        mine = dict(self._mine())
        if not mine:
            return jax.make_array_from_single_device_arrays(self.shape, self.sharding, [], dtype=self.dtype)
        copies = math.prod(self.sharding.mesh.shape[name] for name in self.cut.names)
        shape = (*self.shape[:axis], parts * copies * length, *self.shape[axis + 1 :])
        arrays = jax.device_put([padded(piece) for piece in mine.values()], list(mine))
        inner = _with_names(self.sharding, self.cut)
        cut = jax.make_array_from_single_device_arrays(shape, inner, arrays, dtype=bits)
        with jax.set_mesh(_mesh(self.sharding)):  # the caller may have set another
            return jax.block_until_ready(_gather(inner, self.sharding, self.cut, n, self.dtype)(cut))


def shared_read(sharding: object, info: ArrayInfo, dtype: np.dtype | None) -> SharedRead | None:
    """How processes share the reading of an array that comes as `dtype`, where they can, and read less for it."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or not _has_bits(dtype):
        return None
    if sharding.spec.unreduced or sharding.spec.reduced:
        return None
    owners = _owners(sharding.mesh)
    cut = best_cut(sharding, info, owners) if len(set(owners)) > 1 else None
    return SharedRead(info.shape, np.dtype(dtype), sharding, cut) if cut else None


@functools.lru_cache(maxsize=1024)
def best_cut(sharding: NamedSharding, info: ArrayInfo, owners: tuple[int, ...]) -> Cut | None:
    """The cut with which all processes together read least; None where they read no less than each all its boxes.

    Chunks are read whole, once by every process that wants some of them. An axis is cut evenly, or at multiples of the
    chunk's length, but not if the pieces, padded to one length, would then be twice the box. Of cuts that cost the same
    it is the first axis's: its pieces are the longest runs of bytes. `owners` are the processes that have the devices
    of the mesh, in its order. Small arrays are not cut: a collective costs more.
    """
    names = _free_names(sharding)
    if info.nbytes <= SMALL_BYTES or not names:
        return None
    boxes = _device_boxes(sharding, info.shape)
    unit = info.chunk or (1,) * len(info.shape)
    copies = math.prod(sharding.mesh.shape[name] for name in names)
    best, least = None, _units_read(boxes, owners, unit)
    for axis, n in enumerate(boxes[0].shape):
        even = -(-n // copies)
        for length in (even, -(-even // unit[axis]) * unit[axis]):
            if length * copies < 2 * n:
                cut = Cut(axis, length, names)
                if (units := _units_read(_pieces(sharding, info.shape, cut), owners, unit)) < least:
                    best, least = cut, units
    return best


def read_together(
    reads: Sequence[tuple[SharedRead, int, Callable[[], Sequence[np.ndarray]]]],
    alone: Callable[[], None],
    budget_bytes: int,
) -> list[jax.Array]:
    """The arrays of shared reads, in order, each given with its cost in bytes and what reads its pieces.

    What this process reads for itself, `alone` reads after them. Every process must call this, with the same reads. One
    that fails to read goes on with zeros, so that none waits for it for ever; in the end all hear of it, and raise: it
    its own error, the others that error's class of ours, or else CorruptData, with its words. Raises TreeMismatch
    before anything is read if the processes would not read the same.
    """
    _check_alike([shared for shared, _, _ in reads])
    faults: list[Exception] = []

    def pieces(shared: SharedRead, read: Callable[[], Sequence[np.ndarray]]) -> Mapping[Box, np.ndarray]:
        boxes = shared.boxes()
        if not faults:
            try:
                return dict(zip(boxes, read(), strict=True))
            except Exception as error:
                faults.append(error)
        return {box: np.zeros(box.shape, shared.dtype) for box in boxes}

    jobs = [(cost, functools.partial(pieces, shared, read)) for shared, cost, read in reads]
    results = in_order(jobs, budget_bytes)
    arrays = [shared.gathered(next(results)) for shared, _, _ in reads]  # nothing but the job holds what was read
    if not faults:
        try:
            alone()
        except Exception as error:
            faults.append(error)
    _tell(faults[0] if faults else None)
    return arrays


def _has_bits(dtype: np.dtype | None) -> bool:
    """Whether elements can be gathered as unsigned integers: nothing on the way then rounds, or changes a NaN."""
    if dtype is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    if dtype == np.bool_:
        return True
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits == 8 * dtype.itemsize


def _owners(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.process_index for device in mesh.devices.flat)


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _names(axes: object) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,) if isinstance(axes, str) else ()


def _free_names(sharding: NamedSharding) -> tuple[str, ...]:
    """The mesh axes over which an array has copies."""
    used = {name for axes in sharding.spec for name in _names(axes)}
    return tuple(name for name, size in sharding.mesh.shape.items() if size > 1 and name not in used)


def _with_names(sharding: NamedSharding, cut: Cut) -> NamedSharding:
    """The sharding of the pieces, each padded to the length of the cut, side by side."""
    spec: list[object] = [*sharding.spec, *[None] * (cut.axis + 1 - len(sharding.spec))]
    spec[cut.axis] = (*_names(spec[cut.axis]), *cut.names)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


@functools.lru_cache(maxsize=1024)
def _device_boxes(sharding: NamedSharding, shape: Shape) -> Sequence[Box]:
    """The box of each device, in the order of the mesh."""
    indices = sharding.devices_indices_map(shape)
    return [index_box(indices[device] or (), shape) for device in _mesh(sharding).devices.flat]


@functools.lru_cache(maxsize=1024)
def _pieces(sharding: NamedSharding, shape: Shape, cut: Cut) -> Sequence[Box]:
    """The piece that each device reads, in the order of the mesh."""
    mesh = sharding.mesh
    at = dict(zip(mesh.axis_names, np.unravel_index(np.arange(mesh.size), mesh.axis_sizes), strict=True))
    places = np.ravel_multi_index([at[name] for name in cut.names], [mesh.shape[name] for name in cut.names])
    return [cut.piece(box, i) for box, i in zip(_device_boxes(sharding, shape), places.tolist(), strict=True)]


def _units_read(boxes: Sequence[Box], owners: Sequence[int], unit: Sequence[int]) -> int:
    """How many chunks are read for the boxes of devices, by each process that has the devices once."""
    by_owner: dict[int, list[int]] = {}
    for i, (box, owner) in enumerate(zip(boxes, owners, strict=True)):
        if box.size:
            by_owner.setdefault(owner, []).append(i)
    start, stop = (np.array([getattr(box, end) for box in boxes], np.int64) for end in ("start", "stop"))
    return int(touched_units([np.array(i) for i in by_owner.values()], start, stop, unit).sum())


@functools.lru_cache(maxsize=1024)
def _gather(
    inner: NamedSharding, outer: NamedSharding, cut: Cut, n: int, dtype: np.dtype
) -> Callable[[jax.Array], jax.Array]:
    """Pieces to boxes, whose length on the axis of the cut is `n`."""

    def join(piece: jax.Array) -> jax.Array:
        padded = lax.all_gather(piece, cut.names, axis=cut.axis, tiled=True)
        bits = lax.slice_in_dim(padded, 0, n, axis=cut.axis)
        return bits.astype(dtype) if dtype == np.bool_ else lax.bitcast_convert_type(bits, dtype)

    # That an all-gather is the same on all its devices is what this check cannot see.
    mapped = jax.shard_map(join, mesh=outer.mesh, in_specs=inner.spec, out_specs=outer.spec, check_vma=False)
    return jax.jit(mapped, out_shardings=outer)


def _check_alike(reads: Sequence[SharedRead]) -> None:
    """Raise TreeMismatch in all processes if they are not about to run the same collectives."""
    plan = [(r.shape, r.dtype.name, r.cut, r.sharding.spec, dict(r.sharding.mesh.shape)) for r in reads]
    mine = hashlib.sha256(repr(plan).encode()).digest()
    if others := [process for process, plan in enumerate(_exchanged(mine)) if plan != mine]:
        raise TreeMismatch(
            f"processes {others[:4]} and this one would share other reads: all must restore the same checkpoint, "
            "to the same target, with the same arguments"
        )


def _tell(fault: Exception | None) -> None:
    """Raise the fault, and in the processes that have none that of the first that has."""
    said = _exchanged(f"{type(fault).__name__}: {fault}".encode() if fault else b"")
    if fault:
        raise fault
    for process, words in enumerate(said):
        if words:
            name, _, text = words.decode(errors="replace").partition(": ")
            kind = getattr(errors, name, None)
            kind = kind if isinstance(kind, type) and issubclass(kind, UCPError) else CorruptData
            raise kind(f"process {process} could not read its part, and nothing is restored. It says: {name}: {text}")


def _exchanged(words: bytes) -> list[bytes]:
    """What each process says, by process: at most `WORDS_BYTES`, without zeros at the end."""
    devices = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([devices[process] for process in sorted(devices)]), ("process",))
    data = np.frombuffer(words[:WORDS_BYTES].ljust(WORDS_BYTES, b"\0"), np.uint8)[None]
    shape, cut = (len(devices), WORDS_BYTES), Cut(0, 1, ("process",))
    shared = SharedRead(shape, data.dtype, NamedSharding(mesh, PartitionSpec()), cut)
    told = shared.gathered(dict.fromkeys(shared.boxes(), data))
    return [row.tobytes().rstrip(b"\0") for row in np.asarray(told.addressable_data(0))]
