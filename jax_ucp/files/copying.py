"""Copies of arrays whose axes lie in memory in different orders."""

from __future__ import annotations

import mmap

import numpy as np

from jax_ucp.layout.blocks import grid_boxes

# The window that is transposed at once fits the caches of a core, and has at most so many columns.
# Its rows begin an odd number of cache lines apart: lines that are a multiple of 4 KiB apart share
# one set of the cache, of 8 to 16 lines, so that the rows of most models' matrices would evict one
# another.
_WINDOW_BYTES, _COLUMNS, _LINE_BYTES = 512 << 10, 4096, 64


def copy_into(out: np.ndarray, elements: np.ndarray) -> None:
    """Copy elements into an array of the same shape and dtype, of any strides.

    Where neighbours on the last axis of `elements` are neighbours on another axis of `out`, as in a
    transposed matrix, they are copied in windows, several times as fast as by numpy.
    """
    # the axis of more than one element whose neighbours are nearest in memory; of several the last
    axes = [axis for axis in reversed(range(out.ndim)) if out.shape[axis] > 1]
    axis = min(axes, key=lambda axis: abs(out.strides[axis]), default=out.ndim - 1)
    if axis == out.ndim - 1 or out.shape[axis] * out.shape[-1] < _COLUMNS:
        out[...] = elements
        return
    out, elements = np.moveaxis(out, axis, -2), np.moveaxis(elements, axis, -2)
    columns = min(_COLUMNS, out.shape[-1])
    rows = min(max(1, _WINDOW_BYTES // (columns * out.itemsize)), out.shape[-2])
    window = np.empty((rows, columns + (_LINE_BYTES // out.itemsize)), out.dtype)
    for box in grid_boxes(out.shape, (*(1,) * (out.ndim - 2), rows, columns)):
        block = window[: box.shape[-2], : box.shape[-1]]
        block[...] = elements[box.index].reshape(block.shape)
        out[box.index] = block


def mid_page(nbytes: int) -> np.ndarray:
    """Uninitialised memory that begins in the middle of a page, to be read into or written from.

    Zen 3 and 4 copy by `REP MOVSB`, as Linux and glibc do, at a third of their speed where the
    destination lies 1 to 31 bytes behind the source, both counted in their pages. Files begin
    with a page, and so, but for 16 bytes, does large memory from malloc. Source of the fact:
    https://lunnova.dev/articles/ryzen-slow-short-rep-mov; measured in docs/design/007-speed.md.
    """
    room = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    first = (mmap.PAGESIZE // 2 - room.ctypes.data) % mmap.PAGESIZE
    return room[first : first + nbytes]
