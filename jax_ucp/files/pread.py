"""Bytes of a file straight into memory; no page is mapped.

A mapped page that the disk cannot give ends the process (SIGBUS), where a read raises an error.
"""

from __future__ import annotations

import os

import numpy as np

from jax_ucp.errors import CorruptData
from jax_ucp.files.copying import copy_into
from jax_ucp.layout.blocks import run_boxes

# What goes to places with gaps is read into so much memory first, which stays in a core's cache,
# and then put there.
SCATTERED_BYTES = 1 << 20


def pread_into(handle: int, offset: int, out: np.ndarray) -> None:
    """Fill `out`, row-major and of any strides, from `offset` on. Raises CorruptData."""
    if out.flags.c_contiguous:
        _fill(handle, offset, out)
        return
    room = np.empty(min(SCATTERED_BYTES, out.nbytes), np.uint8)
    # The last axes are filled first: each block is a run of the elements in row-major order.
    for block in run_boxes(out.shape, out.itemsize, len(room)):
        data = room[: block.size * out.itemsize]
        _fill(handle, offset, data)
        copy_into(out[block.index], data.view(out.dtype).reshape(block.shape))
        offset += len(data)


def _fill(handle: int, offset: int, out: np.ndarray) -> None:
    room = out.reshape(-1).view(np.uint8).data
    while room:
        count = os.preadv(handle, [room], offset)  # at most 2 GiB at a time
        if not count:
            raise CorruptData(f"the file ends at byte {offset}, {len(room)} bytes too soon")
        room, offset = room[count:], offset + count
