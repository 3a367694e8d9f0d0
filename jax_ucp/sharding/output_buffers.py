"""Preallocated output buffers of large arrays, filled block by block along stored chunks."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jax_ucp.arrays.gather import aligned_arrays, read_boxes, read_boxes_of_each
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource
from jax_ucp.errors import TreeMismatch
from jax_ucp.layout.box import Box
from jax_ucp.sharding.boxes import Device, index_box
from jax_ucp.sharding.transfer import to_device


@dataclass(frozen=True)
class ReadRequest:
    """The boxes of array `key` wanted as `dtype`, with devices if there is a `sharding`."""

    source: ArraySource
    key: str
    boxes: Mapping[Box, Sequence[Device]]
    dtype: np.dtype
    sharding: Sharding | None

    @property
    def info(self) -> ArrayInfo:
        return self.source.arrays()[self.key]

    @property
    def in_place(self) -> bool:
        """Whether the host buffer is the array's memory: on the host, and on CPU devices."""
        return self.sharding is None or all(
            device.platform == "cpu" for device in self.sharding.device_set
        )

    def read(self, boxes: Sequence[Box]) -> list[np.ndarray]:
        """The elements of each box, in aligned memory of its own; every chunk is read once."""
        return list(map(self.cast, read_boxes(self.source, self.key, boxes))) if boxes else []

    def cast(self, data: np.ndarray) -> np.ndarray:
        """The data as `dtype`. Raises TreeMismatch if integers would change: only floats round."""
        if data.dtype == self.dtype:
            return data
        # a signalling NaN becomes a quiet one; numbers beyond a dtype are infinite, or refused
        with np.errstate(invalid="ignore", over="ignore"):
            result = _converted(data, self.dtype)
            if jnp.issubdtype(data.dtype, jnp.inexact):
                return result
            changed = _converted(np.real(result), data.dtype) != data
        # numbers with a sign and without one come back from each other as they were, and from what
        # is infinite or none some do
        if jnp.issubdtype(self.dtype, jnp.inexact):
            changed |= ~np.isfinite(result)
        else:
            changed |= (result < 0) != (data < 0)
        if changed.any():
            raise TreeMismatch(
                f"{self.key}: values of {data.dtype} do not fit {self.dtype}:"
                f" {data[changed].flat[0]} would become {result[changed].flat[0]}. Restore it as it"
                " is; on devices that needs jax_enable_x64 where it has 64 bits"
            )
        return result

    def array_of(self, data: Mapping[Box, np.ndarray]) -> np.ndarray | jax.Array:
        """The array made of its boxes, or of one around all of them."""
        shape = self.info.shape
        whole = data.get(Box.whole(shape))
        if self.sharding is None:
            assert whole is not None
            return whole
        # all devices are other processes'; JAX would ask for a replicated array all the same
        if not data:
            return jax.make_array_from_single_device_arrays(
                shape, self.sharding, [], dtype=self.dtype
            )

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            if whole is not None:
                return whole[index or ()]
            box = index_box(index or (), shape)
            if box in data:
                return data[box]
            ((hull, around),) = data.items()
            return around[box.relative_to(hull).index]

        return jax.block_until_ready(
            jax.make_array_from_callback(shape, self.sharding, block, self.dtype)
        )

    def parts(self, block: Box) -> list[tuple[Box, Box]]:
        """Each box that a block meets, with the part of it in the block."""
        return [(box, hit) for box in self.boxes if (hit := box.intersect(block)) is not None]

    def blocks(self, max_bytes: int) -> Iterator[Box]:
        """Blocks that cover the boxes and cut no stored chunk, each at most `max_bytes`."""
        return self.info.blocks(
            list(self.boxes), max_bytes // self._bytes_per_element * self.info.dtype.itemsize
        )

    def cost(self, block: Box | None = None) -> int:
        """Bytes in flight while all of it, or a block, is read; at least one stored chunk."""
        boxes = self.boxes if block is None else [hit for _, hit in self.parts(block)]
        wanted = sum(box.size for box in boxes)
        return (
            self._bytes_per_element * max(wanted, math.prod(self.info.chunk or ())) if wanted else 0
        )

    @property
    def _bytes_per_element(self) -> int:
        """Bytes in flight per element: as read and copied, then as cast and sent."""
        stored, result = self.info.dtype.itemsize, self.dtype.itemsize
        if self.in_place and self.info.dtype == self.dtype:
            return stored
        return max(2 * stored, result) + result


def read_at_once(
    source: ArraySource, requests: Sequence[ReadRequest]
) -> Iterator[np.ndarray | jax.Array]:
    """The array of each request, all read at once."""
    wanted = [request for request in requests if request.boxes]
    parts = iter(read_boxes_of_each(source, [(r.key, list(r.boxes)) for r in wanted]))
    for request in requests:
        data = list(map(request.cast, next(parts))) if request.boxes else []
        yield request.array_of(dict(zip(request.boxes, data, strict=True)))


class HostBuffers:
    """Buffers in host memory, which CPU devices use without a copy."""

    def __init__(self, request: ReadRequest):
        self._request = request
        outs = aligned_arrays([box.shape for box in request.boxes], request.dtype)
        self._outs = dict(zip(request.boxes, outs, strict=True))

    def fill(self, block: Box) -> None:
        request, parts = self._request, self._request.parts(block)
        hits = [hit for _, hit in parts]
        places = [self._outs[box][hit.relative_to(box).index] for box, hit in parts]
        if request.info.dtype == request.dtype:
            request.source.read_into(request.key, hits, places)
            return
        for place, data in zip(places, request.read(hits), strict=True):
            place[...] = data

    def array(self) -> np.ndarray | jax.Array:
        return self._request.array_of(self._outs)


class DeviceBuffers:
    """Buffers on accelerators: a block is on the host until it has been copied to them."""

    def __init__(self, request: ReadRequest, sharding: Sharding):
        self._request, self._sharding = request, sharding
        self._lock = threading.Lock()
        self._arrays = {
            device: jnp.zeros(box.shape, request.dtype, device=device)
            for box, devices in request.boxes.items()
            for device in devices
        }

    def fill(self, block: Box) -> None:
        parts = self._request.parts(block)
        done: list[jax.Array] = []
        for (box, hit), data in zip(
            parts, self._request.read([hit for _, hit in parts]), strict=True
        ):
            start = np.array(hit.relative_to(box).start, np.int32)
            for device in self._request.boxes[box]:
                part = to_device(data, device)
                with self._lock:  # a write gives the memory of the array on to the next one
                    self._arrays[device], over = _written(self._arrays[device], part, start)
                done.append(over)
        jax.block_until_ready(done)

    def array(self) -> jax.Array:
        shape, arrays = self._request.info.shape, list(self._arrays.values())
        return jax.make_array_from_single_device_arrays(
            shape, self._sharding, arrays, dtype=self._request.dtype
        )


# The memory for all boxes of an array, filled block by block from several threads.
OutputBuffers = HostBuffers | DeviceBuffers


def output_buffers(request: ReadRequest) -> OutputBuffers | None:
    """Output buffers for reading in blocks, or None for an accelerator's host memory."""
    if request.in_place:
        return HostBuffers(request)
    assert request.sharding is not None
    device = next(iter(request.sharding.addressable_devices))
    usual = request.sharding.memory_kind in (None, device.default_memory().kind)
    return DeviceBuffers(request, request.sharding) if usual else None


@functools.partial(jax.jit, donate_argnums=0)
def _written(array: jax.Array, bits: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The updated array, and a token that is ready when the update is: the array goes on."""
    over = jnp.sum(start)
    if bits.dtype == array.dtype:
        return jax.lax.dynamic_update_slice(array, bits, list(start)), over
    old = jax.lax.bitcast_convert_type(array, bits.dtype)
    new = jax.lax.dynamic_update_slice(old, bits, list(start))
    return jax.lax.bitcast_convert_type(new, array.dtype), over


def _converted(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers in another dtype, also where both have 8 bits or fewer and ml_dtypes has no way
    from one to the other; float32 has all numbers of either.
    """
    try:
        return data.astype(dtype)
    except TypeError:
        return data.astype(np.float32).astype(dtype)
