"""Reads of a file into memory by `preadv`, not by mapping.

If the disk cannot give a mapped page, the process ends (SIGBUS), while a read raises an error.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable

import numpy as np

from jax_ucp.errors import CorruptData
from jax_ucp.files.copying import copy_into
from jax_ucp.files.protocol import RangeRead
from jax_ucp.layout.blocks import run_boxes

# Elements of arrays with gaps are read into a buffer of this size, which stays in a core's cache,
# and copied from there.
SCATTERED_BYTES = 1 << 20
# The most arrays that `preadv` takes at once on Linux: IOV_MAX of limits.h.
MOST_ARRAYS = 1024


def pread_into(handle: int, reads: Iterable[RangeRead]) -> None:
    """Fill the arrays of reads of one file; ranges that follow one another are read at once.

    Raises CorruptData where the file ends too soon.
    """
    rooms: list[np.ndarray] = []
    start = stop = 0
    for read in reads:
        if not read.out.flags.c_contiguous:
            out, offset = read.out, read.start
            room = np.empty(min(SCATTERED_BYTES, out.nbytes), np.uint8)
            # Last axes first: each block is a run of the elements in row-major order.
            for block in run_boxes(out.shape, out.itemsize, len(room)):
                data = room[: block.size * out.itemsize]
                _fill(handle, offset, [data])
                copy_into(out[block.index], data.view(out.dtype).reshape(block.shape))
                offset += len(data)
            continue
        if read.start != stop:
            _fill(handle, start, rooms)
            rooms, start = [], read.start
        rooms.append(read.out)
        stop = read.start + read.out.nbytes
    _fill(handle, start, rooms)


def _fill(handle: int, offset: int, outs: Iterable[np.ndarray]) -> None:
    """Fill arrays one after another with the bytes of a file from `offset` on."""
    rooms = deque(out.reshape(-1).view(np.uint8).data for out in outs if out.size)
    while rooms:
        # at most 2 GiB at a time
        count = os.preadv(handle, list(itertools.islice(rooms, MOST_ARRAYS)), offset)
        if not count:
            left = sum(map(len, rooms))
            raise CorruptData(f"the file ends at byte {offset}, {left} bytes too soon")
        offset += count
        while rooms and count >= len(rooms[0]):
            count -= len(rooms.popleft())
        if count:
            rooms[0] = rooms[0][count:]
