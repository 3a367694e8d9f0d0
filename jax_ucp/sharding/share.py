"""Reads shared by processes: each reads a part of what several hold, then they exchange.

Integers say how boxes are cut into pieces; these are read as boxes are; an all-gather joins them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jax_ucp.errors as errors
from jax_ucp.arrays.budget import in_order
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData, TreeMismatch
from jax_ucp.layout.blocks import SMALL_BYTES
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sharding.boxes import Device, index_box
from jax_ucp.sharding.fit import axis_names
from jax_ucp.sharding.jax_versions import set_mesh
from jax_ucp.sharding.reads import touched_units
from jax_ucp.version import VERSION

WORDS_BYTES = 1024  # of a message that processes exchange


@dataclass(frozen=True, slots=True)
class AxisCut:
    """Pieces of `length` elements of one axis, the last ones short or empty.

    Of each box the i-th piece is read by its i-th device, in row-major order of the axes `names`.
    """

    axis: int
    length: int
    names: tuple[str, ...]

    def piece(self, box: Box, i: int) -> Box:
        """The i-th piece of a box.

        >>> [str(AxisCut(0, 4, ("x",)).piece(Box((10,), (17,)), i)) for i in range(3)]
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
    cut: AxisCut

    def boxes(self) -> Mapping[Box, Sequence[Device]]:
        """The pieces that this process reads, each with its device."""
        return {piece: [device] for device, piece in _own_pieces(self).items() if piece.size}

    def padded(self, data: Mapping[Box, np.ndarray] | None) -> list[np.ndarray]:
        """The bits of this process's pieces, padded to one shape; zeros without data."""
        box, axis = self.sharding.shard_shape(self.shape), self.cut.axis
        shape = (*box[:axis], self.cut.length, *box[axis + 1 :])
        bits = np.dtype(f"u{self.dtype.itemsize}")
        parts: list[np.ndarray] = []
        for piece in _own_pieces(self).values():
            if data is None or not piece.size:
                parts.append(np.zeros(shape, bits))
            else:
                missing = [(0, want - have) for want, have in zip(shape, piece.shape, strict=True)]
                part = data[piece].view(bits)
                parts.append(part if piece.shape == shape else np.pad(part, missing))
        return parts

    def gathered(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """The array, joined from all devices' parts; all processes call this, in one order."""
        mesh, axis = _mesh(self.sharding), self.cut.axis
        if not parts:
            return jax.make_array_from_single_device_arrays(
                self.shape, self.sharding, [], dtype=self.dtype
            )
        n = self.sharding.shard_shape(self.shape)[axis]
        copies = math.prod(mesh.shape[name] for name in self.cut.names)
        shape = (
            *self.shape[:axis],
            self.shape[axis] // n * copies * self.cut.length,
            *self.shape[axis + 1 :],
        )
        # the sharding of the pieces, each padded to the length of the cut, side by side
        own = self.sharding.spec
        spec: list[object] = [*own, *[None] * (axis + 1 - len(own))]
        spec[axis] = (*axis_names(spec[axis]), *self.cut.names)
        inner = NamedSharding(mesh, PartitionSpec(*spec))
        arrays = jax.device_put(list(parts), list(_own_pieces(self)))
        pieces = jax.make_array_from_single_device_arrays(shape, inner, arrays)
        outer = NamedSharding(mesh, self.sharding.spec)
        # The caller may have set another mesh, and NaNs are not his program's.
        with set_mesh(mesh), jax.debug_nans(False), jax.debug_infs(False):
            joined = _gather(inner, outer, self.cut, n, self.dtype)(pieces)
            # Not by the program: JAX 0.7.2 compiles none for CPUs with results in another memory.
            kind = self.sharding.memory_kind
            boxes = [
                jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
                for shard in joined.addressable_shards
            ]
            return jax.block_until_ready(
                jax.make_array_from_single_device_arrays(self.shape, self.sharding, boxes)
            )


# The name of an array, how it is shared, its cost in bytes, and what reads the pieces of this
# process.
Read = tuple[str, SharedRead, int, Callable[[], Sequence[np.ndarray]]]


def shared_read(sharding: object, info: ArrayInfo, dtype: np.dtype | None) -> SharedRead | None:
    """How processes share the reading of an array; None if it cannot or would not pay."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    is_sum = sharding.spec.unreduced or sharding.spec.reduced
    if is_sum or not _has_bits(dtype) or info.nbytes <= SMALL_BYTES:
        return None
    names, owners = _free_names(sharding), _owners(sharding.mesh)
    if not names or len(set(owners)) == 1:
        return None
    best = _best_cut(sharding, info, owners)
    return (
        SharedRead(info.shape, np.dtype(dtype), sharding, AxisCut(*best, names)) if best else None
    )


def best_cut(
    start: np.ndarray, stop: np.ndarray, places: np.ndarray, owners: np.ndarray, unit: Sequence[int]
) -> tuple[int, int] | None:
    """The axis and length of the pieces with which all processes together read least.

    None if cutting saves nothing. `start` and `stop` are the boxes of the
    devices, by device and axis, all of one shape; `places` their numbers among those that hold the
    same box, `owners` their processes; `unit` is the shape of a chunk.

    Chunks are read whole, once by every process that wants some of them. An axis is cut evenly, or
    at multiples of the chunk's length, but not if the pieces, padded to one length, would then be
    twice the box. Of cuts that cost the same it is the first axis's: its pieces are the longest
    runs of bytes.

    >>> zeros, places, owners = np.zeros((4, 1), int), np.arange(4), np.array([0, 0, 1, 1])
    >>> best_cut(zeros, zeros + 10, places, owners, (1,)), best_cut(zeros, zeros + 10, places,
    ...     owners, (4,))
    ((0, 3), (0, 4))
    """
    copies = int(places.max()) + 1
    best, least = None, _units_read(start, stop, owners, unit)
    for axis, n in enumerate((stop - start)[0].tolist()):
        even = -(-n // copies)
        for length in (even, -(-even // unit[axis]) * unit[axis]):
            if length * copies < 2 * n:
                first, last = start.copy(), stop.copy()
                first[:, axis] = np.minimum(start[:, axis] + places * length, stop[:, axis])
                last[:, axis] = np.minimum(first[:, axis] + length, stop[:, axis])
                if (units := _units_read(first, last, owners, unit)) < least:
                    best, least = (axis, length), units
    return best


def read_together(
    reads: Sequence[Read], alone: Callable[[], None], budget_bytes: int, remote: bool = False
) -> list[jax.Array]:
    """The arrays of shared reads, in order; then `alone` reads this process's other arrays.

    Every process must call this, with the same reads. One that fails to read goes on with zeros, so
    that none waits for it for ever; in the end all raise: it its own error, the others that error's
    class of ours, or else CorruptData, with its words. Raises TreeMismatch before anything is read
    if the processes would not read the same.
    """
    # Processes that are not about to run the same collectives would wait for one another for ever.
    collectives = [
        (name, r.shape, r.dtype.name, r.cut, r.sharding.spec, dict(r.sharding.mesh.shape))
        for name, r, _, _ in reads
    ]
    require_alike(
        hashlib.sha256(repr(collectives).encode(errors="replace")).hexdigest(),
        "do not read the same as this one: with share_reads=True all processes must restore the"
        " same checkpoint, to the same target, with the same arguments",
    )
    faults: list[Exception] = []

    def parts(shared: SharedRead, read: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
        if not faults:
            try:
                return shared.padded(dict(zip(shared.boxes(), read(), strict=True)))
            except Exception as error:
                faults.append(error)
        return shared.padded(None)

    jobs = ((cost, partial(parts, shared, read)) for _, shared, cost, read in reads)
    # Closed here, whatever happens: its threads must not be waited for by the garbage collector, in
    # any thread.
    with contextlib.closing(in_order(jobs, budget_bytes, remote)) as results:
        # Without a name for what was read: that would keep it while the next is waited for.
        arrays = [shared.gathered(next(results)) for _, shared, _, _ in reads]
    if not faults:
        try:
            alone()
        except Exception as error:
            faults.append(error)
    raise_together(
        faults[0] if faults else None, "could not read its part, and nothing is restored"
    )
    return arrays


def _has_bits(dtype: np.dtype | None) -> bool:
    """Whether elements can be gathered as unsigned integers, which neither round nor change."""
    if dtype is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    if dtype == np.bool_:
        return True
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return info(dtype).bits == 8 * dtype.itemsize


@functools.lru_cache(maxsize=16)
def _owners(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.process_index for device in mesh.devices.flat)


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _free_names(sharding: NamedSharding) -> tuple[str, ...]:
    used = set(itertools.chain.from_iterable(map(axis_names, sharding.spec)))
    sizes = sharding.mesh.shape
    return tuple(name for name in sizes if sizes[name] > 1 and name not in used)


@functools.lru_cache(maxsize=16)
def _places(mesh: Mesh, names: tuple[str, ...]) -> Mapping[Device, int]:
    """The number of each device among those that differ from it only on the axes `names`."""
    at = dict(zip(mesh.axis_names, np.indices(mesh.devices.shape), strict=True))
    places = np.ravel_multi_index(
        [at[name] for name in names], [mesh.shape[name] for name in names]
    )
    return dict(zip(mesh.devices.flat, places.ravel().tolist(), strict=True))


@functools.lru_cache(maxsize=1024)
def _own_pieces(shared: SharedRead) -> Mapping[Device, Box]:
    """The piece of each device that this process has; it may be empty."""
    places = _places(_mesh(shared.sharding), shared.cut.names)
    indices = shared.sharding.addressable_devices_indices_map(shared.shape)
    return {
        d: shared.cut.piece(index_box(i or (), shared.shape), places[d]) for d, i in indices.items()
    }


@functools.lru_cache(maxsize=1024)
def _best_cut(
    sharding: NamedSharding, info: ArrayInfo, owners: tuple[int, ...]
) -> tuple[int, int] | None:
    places = _places(_mesh(sharding), _free_names(sharding))
    indices = sharding.devices_indices_map(info.shape)
    boxes = [index_box(indices[device] or (), info.shape) for device in places]
    start, stop = np.array([box.start for box in boxes]), np.array([box.stop for box in boxes])
    unit = info.chunk or (1,) * len(info.shape)
    return best_cut(start, stop, np.array(list(places.values())), np.array(owners), unit)


def _units_read(
    start: np.ndarray, stop: np.ndarray, owners: np.ndarray, unit: Sequence[int]
) -> int:
    """How many chunks are read for the boxes of devices, once in each process."""
    some = np.flatnonzero((start < stop).all(axis=1))
    groups = [some[owners[some] == owner] for owner in np.unique(owners[some])]
    return int(touched_units(groups, start, stop, unit).sum())


@functools.lru_cache(maxsize=1024)
def _gather(
    inner: NamedSharding, outer: NamedSharding, cut: AxisCut, n: int, dtype: np.dtype
) -> Callable[[jax.Array], jax.Array]:
    """Pieces to boxes, whose length on the axis of the cut is `n`."""

    def join(piece: jax.Array) -> jax.Array:
        padded = lax.all_gather(piece, cut.names, axis=cut.axis, tiled=True)
        bits = lax.slice_in_dim(padded, 0, n, axis=cut.axis)
        return bits.astype(dtype) if dtype == np.bool_ else lax.bitcast_convert_type(bits, dtype)

    # That an all-gather is the same on all its devices is what this check cannot see.
    mapped = jax.shard_map(
        join, mesh=outer.mesh, in_specs=inner.spec, out_specs=outer.spec, check_vma=False
    )
    return jax.jit(mapped, out_shardings=outer)


def require_alike(mine: str, otherwise: str) -> None:
    """Raise TreeMismatch in all processes, which call this, if words or versions differ."""
    words = allgathered(f"{VERSION} {mine}".encode())
    own = words[jax.process_index()]
    others = [process for process, theirs in enumerate(words) if theirs != own]
    versions = {words[process].partition(b" ")[0].decode() for process in others}
    if versions - {VERSION}:
        raise TreeMismatch(
            f"processes {others[:4]} have another version of jax_ucp than this one, which has"
            f" {VERSION}: with share_reads=True all processes must have the same"
        )
    if others:
        raise TreeMismatch(f"processes {others[:4]} {otherwise}")


def raise_together(fault: Exception | None, what: str) -> None:
    """Raise the local error, else the first remote one; all processes call this."""
    text = "" if fault is None else f"{type(fault).__name__}: {fault}"
    messages = allgathered(text.encode(errors="replace"))
    if fault is not None:
        raise fault
    for process, message in enumerate(messages):
        if message:
            text = message.decode(errors="replace")
            kind = getattr(errors, text.partition(": ")[0], CorruptData)
            raise kind(f"process {process} {what}. It says: {text}")


def allgathered(words: bytes) -> list[bytes]:
    """The words of each process, by process: at most `WORDS_BYTES`, without zeros at the end."""
    devices = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([devices[process] for process in sorted(devices)]), ("process",))
    data = np.frombuffer(words[:WORDS_BYTES].ljust(WORDS_BYTES, b"\0"), np.uint8)[None]
    shape, cut = (len(devices), WORDS_BYTES), AxisCut(0, 1, ("process",))
    shared = SharedRead(shape, data.dtype, NamedSharding(mesh, PartitionSpec()), cut)
    rows = np.asarray(shared.gathered([data]).addressable_data(0))
    return [row.tobytes().rstrip(b"\0") for row in rows]
