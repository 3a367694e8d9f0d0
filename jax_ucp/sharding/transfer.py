"""Copies of arrays between the host and devices: the one place that knows how they are sent.

On GPUs `np.asarray` of device memory goes through a staging buffer of XLA, at a tenth of the link's
speed (jax issues 21438 and 36651); a copy to `pinned_host` memory does not (jax pull request 22114,
and Orbax's `enable_pinned_host_transfer`, which is on for GPUs alone). Such memory is scarce: XLA
has 64 GB of it at most. So arrays pass through it in pieces, and stay in ordinary memory. The way
to a GPU needs nothing: XLA sends host buffers of less than 1 GiB through pinned memory of its own
(`should_stage_host_to_device_transfers` in `xla/pjrt/pjrt_stream_executor_client.cc`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jax_ucp.arrays.budget import run_bounded
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.layout.box import Box
from jax_ucp.sharding.boxes import Device
from jax_ucp.sharding.jax_versions import enable_x64

PINNED = "pinned_host"

# A piece, and what all pieces hold of pinned memory at once.
PIECE_BYTES = 64 << 20
PINNED_BYTES = 256 << 20

# Of less than this, a call takes longer than the copy, and pinned memory gains nothing.
PINNED_FROM_BYTES = 1 << 20

# Of several that copy at once one takes pinned memory at a time.
_pinned_memory = threading.Lock()


def to_host(parts: Sequence[jax.Array]) -> list[np.ndarray]:
    """The elements of arrays of one device each: copies, but on CPU views of the device's memory.

    All are on the host when it returns: their buffers may be donated then.
    """
    arrays = [
        np.empty(part.shape, part.dtype)
        if part.nbytes >= PINNED_FROM_BYTES and has_pinned(_device(part))
        else None
        for part in parts
    ]
    direct = [part for part, array in zip(parts, arrays, strict=True) if array is None]
    for part in direct:
        if _device(part).platform != "cpu":  # on CPU it only costs
            part.copy_to_host_async()
    pinned = [(part, out) for part, out in zip(parts, arrays, strict=True) if out is not None]
    if pinned:
        with _pinned_memory:
            run_bounded((job for pair in pinned for job in _pieces(*pair)), PINNED_BYTES)
    return [
        np.asarray(part) if out is None else out for part, out in zip(parts, arrays, strict=True)
    ]


def host_bytes(part: np.ndarray | jax.Array) -> int:
    """The bytes of host memory that `to_host` takes for an array; 0 for one that is there."""
    is_here = not isinstance(part, jax.Array) or _device(part).platform == "cpu"
    return 0 if is_here else part.nbytes


def to_device(data: np.ndarray, device: Device) -> jax.Array:
    """The data on a device, floats as integers of their bits: XLA may compute 16 bits in 32, which
    changes a signalling NaN.
    """
    bits = _bits_of(data.dtype)
    return jax.device_put(data if bits is None else np.ascontiguousarray(data).view(bits), device)


def has_pinned(device: Device) -> bool:
    """Whether copies from a device go through its pinned memory."""
    is_gpu = device.platform in ("gpu", "cuda", "rocm")
    return is_gpu and any(memory.kind == PINNED for memory in device.addressable_memories())


def _pieces(part: jax.Array, out: np.ndarray) -> Iterator[tuple[int, Callable[[], None]]]:
    """The copies that fill `out`, each with its bytes of pinned memory."""
    info, whole = ArrayInfo(part.shape, np.dtype(part.dtype)), Box.whole(part.shape)
    if part.sharding.memory_kind == PINNED:  # offloaded: it takes no more of it
        yield 0, partial(_copy_piece, part, whole, out)
        return
    for box in info.blocks([whole], PIECE_BYTES):
        yield box.size * info.dtype.itemsize, partial(_copy_piece, part, box, out)


def _copy_piece(part: jax.Array, box: Box, out: np.ndarray) -> None:
    place, bits = out[box.index], _bits_of(out.dtype)
    if box == Box.whole(part.shape):
        place[...] = np.asarray(_pinned(part))
        return
    with enable_x64(True):  # 64-bit arrays stay that, whatever this thread has
        piece = _cut(part, np.array(box.start, np.int32), box.shape, bits)
        data = np.asarray(_pinned(piece))
    place[...] = data if bits is None else data.view(out.dtype)


def _pinned(part: jax.Array) -> jax.Array:
    return jax.device_put(part, SingleDeviceSharding(_device(part), memory_kind=PINNED))


def _device(part: jax.Array) -> Device:
    (device,) = part.devices()
    return device


def _bits_of(dtype: np.dtype) -> np.dtype | None:
    """The integers that are the bits of floats of whole bytes; None for other types."""
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits % 8:
        return None
    return np.dtype(f"u{dtype.itemsize}")


@functools.partial(jax.jit, static_argnames=("shape", "bits"))
def _cut(
    array: jax.Array, start: jax.Array, shape: tuple[int, ...], bits: np.dtype | None
) -> jax.Array:
    """A block of an array on its device, as integers where `bits` says so."""
    data = array if bits is None else jax.lax.bitcast_convert_type(array, bits)
    return jax.lax.dynamic_slice(data, list(start), shape)
