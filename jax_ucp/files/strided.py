"""Strided arrays out of bytes: which ranges to read for a box, and what of them belongs to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_ucp.files.ranges import ByteRange
from jax_ucp.layout.box import Box

# Elements that lie less than GAP_BYTES apart are read with what is between them, WINDOW_BYTES at
# most at once: one read more costs about as much as so many bytes.
GAP_BYTES, WINDOW_BYTES = 16 << 10, 1 << 20
# So many reads, or bytes of windows, are handed on together.
_READS_TOGETHER, _BYTES_TOGETHER = 1 << 12, 8 << 20


def read_strided(
    file: ByteRange,
    start: int,
    strides: Sequence[int],
    boxes: Sequence[Box],
    outs: Sequence[np.ndarray],
) -> None:
    """Read boxes of the array whose first element is at byte `start`, with `strides` in elements.

    Every out has the shape of its box and the dtype of the array, and any strides.
    """
    reader = _Reader(file)
    for box, out in zip(boxes, outs, strict=True):
        steps = [stride * out.itemsize for stride in strides]
        first = sum(a * step for a, step in zip(box.start, steps, strict=True))
        reader.add(start + first, steps, out)
    reader.flush()


class _Reader:
    """Gathers reads, and what is to be copied out of windows once they have been read."""

    def __init__(self, file: ByteRange):
        self._file = file
        self._reads: list[tuple[int, np.ndarray]] = []
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        self._window_bytes = 0

    def add(self, at: int, steps: Sequence[int], out: np.ndarray) -> None:
        """Read the elements that lie `steps` bytes apart on each axis, the first at byte `at`."""
        if not out.size:
            return
        if _is_run(out.shape, steps, out.itemsize):
            self._reads.append((at, out))
        else:
            self._add_scattered(at, steps, out)
        if len(self._reads) >= _READS_TOGETHER or self._window_bytes >= _BYTES_TOGETHER:
            self.flush()

    def _add_scattered(self, at: int, steps: Sequence[int], out: np.ndarray) -> None:
        extent = sum((n - 1) * step for n, step in zip(out.shape, steps, strict=True))
        axis = max((i for i, n in enumerate(out.shape) if n > 1), key=lambda i: steps[i])
        if steps[axis] < GAP_BYTES and extent < WINDOW_BYTES:
            window = np.empty(extent + out.itemsize, np.uint8)
            elements = np.ndarray(out.shape, out.dtype, window, strides=tuple(steps))
            self._reads.append((at, window))
            self._copies.append((out, elements))
            self._window_bytes += len(window)
            return
        count = out.shape[axis]
        length = 1 if steps[axis] >= GAP_BYTES else count // 2
        for first in range(0, count, length):
            part = (slice(None),) * axis + (slice(first, first + length),)
            self.add(at + first * steps[axis], steps, out[part])

    def flush(self) -> None:
        """Do what was gathered."""
        reads, copies = self._reads, self._copies
        self._reads, self._copies, self._window_bytes = [], [], 0
        if reads:
            self._file.read_into(reads)
        for out, elements in copies:
            out[...] = elements


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


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of an array whose elements lie one after the other.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
