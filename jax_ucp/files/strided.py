"""Reads of boxes of strided arrays: which ranges of bytes to read, and where their elements go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jax_ucp.files.copying import copy_into
from jax_ucp.files.ranges import ByteRange
from jax_ucp.layout.blocks import run_boxes
from jax_ucp.layout.box import Box

# Elements less than GAP_BYTES apart are read together with the bytes between them, because one more
# read costs about as much as that many bytes. WINDOW_BYTES at once stay in a core's cache.
GAP_BYTES, WINDOW_BYTES = 16 << 10, 1 << 20
# The number of reads that are gathered before they are done.
_READS_TOGETHER = 1 << 12
_ALIGNED = 64  # windows begin at multiples of it


class StridedRead(NamedTuple):
    """Boxes of the array at byte `start`, with `strides` in elements.

    Every out has the shape of its box and the dtype of the array, and any strides.
    """

    start: int
    strides: Sequence[int]
    boxes: Sequence[Box]
    outs: Sequence[np.ndarray]


def read_strided(file: ByteRange, reads: Iterable[StridedRead]) -> None:
    """Read boxes of arrays in one file; what lies in runs of several is requested together."""
    gathered = _GatheredReads(file)
    for start, strides, boxes, outs in reads:
        pairs = [(box, out) for box, out in zip(boxes, outs, strict=True) if box.size]
        if not pairs:
            continue
        steps = [stride * pairs[0][1].itemsize for stride in strides]
        if _share_rows(steps, pairs):
            _read_rows(file, start, steps, pairs)
            continue
        for box, out in pairs:
            gathered.add(start + _offset(box, steps), steps, out)
    gathered.flush()


def _read_rows(
    file: ByteRange, start: int, steps: Sequence[int], pairs: Sequence[tuple[Box, np.ndarray]]
) -> None:
    """Read the rows around boxes once, some at a time, and copy the boxes out of them."""
    dtype, hull = pairs[0][1].dtype, Box.around(box for box, _ in pairs)
    room = np.empty(0, dtype)
    for block in run_boxes(hull.shape, dtype.itemsize, WINDOW_BYTES):
        block = block.shift(hull.start)
        room = room if room.size >= block.size else np.empty(block.size, dtype)
        rows = room[: block.size].reshape(block.shape)
        file.read_into([(start + _offset(block, steps), rows)])
        for box, out in pairs:
            if hit := box.intersect(block):
                inside = out[hit.relative_to(box).index]
                copy_into(inside, rows[hit.relative_to(block).index])


def _share_rows(steps: Sequence[int], pairs: Sequence[tuple[Box, np.ndarray]]) -> bool:
    """Whether boxes are columns that fill at least half of the same rows, which are one run."""
    if len(pairs) < 2:
        return False
    itemsize, hull = pairs[0][1].itemsize, Box.around(box for box, _ in pairs)
    if 2 * sum(box.size for box, _ in pairs) < hull.size or not _is_run(
        hull.shape, steps, itemsize
    ):
        return False
    return not all(_is_run(box.shape, steps, itemsize) for box, _ in pairs)


def _offset(box: Box, steps: Sequence[int]) -> int:
    return sum(a * step for a, step in zip(box.start, steps, strict=True))


class _GatheredReads:
    """Reads that are gathered, and the copies to make from their buffers (windows) afterwards."""

    def __init__(self, file: ByteRange):
        self._file = file
        self._reads: list[tuple[int, np.ndarray]] = []
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        self._room = np.empty(0, np.uint8)
        self._used = 0

    def add(self, at: int, steps: Sequence[int], out: np.ndarray) -> None:
        """Read the elements that lie `steps` bytes apart on each axis, the first at byte `at`."""
        if _is_run(out.shape, steps, out.itemsize):
            self._reads.append((at, out))
        else:
            extent = sum((n - 1) * step for n, step in zip(out.shape, steps, strict=True))
            axis = max((i for i, n in enumerate(out.shape) if n > 1), key=lambda i: steps[i])
            if steps[axis] < GAP_BYTES and extent < WINDOW_BYTES:
                window = self._window(extent + out.itemsize)
                elements = np.ndarray(out.shape, out.dtype, window, strides=tuple(steps))
                self._reads.append((at, window))
                self._copies.append((out, elements))
            else:
                count = out.shape[axis]
                length = 1 if steps[axis] >= GAP_BYTES else count // 2
                for first in range(0, count, length):
                    part = (slice(None),) * axis + (slice(first, first + length),)
                    self.add(at + first * steps[axis], steps, out[part])
        if len(self._reads) >= _READS_TOGETHER:
            self.flush()

    def _window(self, nbytes: int) -> np.ndarray:
        """A buffer of so many bytes, valid until the next flush."""
        if self._used + nbytes > len(self._room):
            self.flush()
        if nbytes > len(self._room):
            self._room = np.empty(max(nbytes, WINDOW_BYTES), np.uint8)
        window = self._room[self._used : self._used + nbytes]
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        return window

    def flush(self) -> None:
        """Do the gathered reads, then the copies."""
        reads, copies = self._reads, self._copies
        self._reads, self._copies, self._used = [], [], 0
        if reads:
            self._file.read_into(reads)
        for out, elements in copies:
            copy_into(out, elements)


def _is_run(shape: Sequence[int], steps: Sequence[int], itemsize: int) -> bool:
    """Whether elements lie one after the other in row-major order.

    >>> _is_run((2, 3), (12, 4), 4), _is_run((2, 2), (12, 4), 4)
    (True, False)
    """
    expected = itemsize
    for n, step in zip(reversed(shape), reversed(steps), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True
