"""Bytes of a file straight into memory that is there already: no page of the file is mapped on the way.

A mapped page that the disk cannot give ends the process (SIGBUS); a read raises an error.
"""

from __future__ import annotations

import os

import numpy as np

from jax_ucp.errors import CorruptData


def pread_into(handle: int, offset: int, out: np.ndarray) -> None:
    """Fill `out`, which is contiguous in row-major order, with the bytes of the file from `offset` on.

    Raises CorruptData where the file ends before.
    """
    room = out.reshape(-1).view(np.uint8).data
    while room:
        count = os.preadv(handle, [room], offset)  # at most 2 GiB at a time
        if not count:
            raise CorruptData(f"the file ends at byte {offset}, {len(room)} bytes too soon")
        room, offset = room[count:], offset + count


def run_start(start: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The first of the elements of a box at `start`, if they lie one after the other in row-major order; else None.

    `strides` are those of the whole tensor, in elements.

    >>> run_start((1, 0), (2, 4), strides=(4, 1)), run_start((1, 0), (2, 3), strides=(4, 1))
    (4, None)
    """
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return None
        expected *= n
    return sum(a * stride for a, stride in zip(start, strides, strict=True))
