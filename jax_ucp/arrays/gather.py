"""Boxes of an array in aligned memory."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from jax_ucp.arrays.protocol import ArraySource, Want
from jax_ucp.layout.box import Box

ALIGNMENT = 64

# From so many bytes on, memory is mapped for itself; and from so many, in huge pages.
OWN_BYTES = 256 << 10
HUGE_BYTES = 4 << 20


def read_boxes(source: ArraySource, key: str, boxes: Sequence[Box]) -> list[np.ndarray]:
    """The elements of each box, in aligned memory of the caller's own.

    Where the array has chunks, each is read once and shared out to the boxes that it meets: the
    columns that eight devices want of one chunk cost one read of it, not eight.
    """
    return read_boxes_of_each(source, [(key, boxes)])[0]


def read_boxes_of_each(
    source: ArraySource, wanted: Iterable[tuple[str, Sequence[Box]]]
) -> list[list[np.ndarray]]:
    """The elements of boxes of several arrays, as `read_boxes` has those of one."""
    wants: list[Want] = []
    of_each: list[list[np.ndarray]] = []
    for key, boxes in wanted:
        dtype = source.arrays()[key].dtype
        whole = _joined(boxes, ALIGNMENT // dtype.itemsize)
        read = list(boxes) if whole is None else [whole]
        outs = aligned_arrays([box.shape for box in read], dtype)
        wants.append((key, read, outs))
        if whole is not None:  # one read of all rows
            first = whole.start[0]
            outs = [outs[0][box.start[0] - first : box.stop[0] - first] for box in boxes]
        of_each.append(outs)
    source.read_each(wants)
    return of_each


def _joined(boxes: Sequence[Box], multiple: int) -> Box | None:
    """The whole box, if the boxes are its consecutive row slabs, each of a multiple of `multiple`
    elements; else None.

    One read then serves all of them: eight devices that each have an eighth of the rows cost no
    more than one.
    """
    if len(boxes) < 2 or not boxes[0].ndim:
        return None
    first, last = boxes[0], boxes[-1]
    for box, after in itertools.pairwise(boxes):
        if box.stop[0] != after.start[0] or (box.start[1:], box.stop[1:]) != (
            after.start[1:],
            after.stop[1:],
        ):
            return None
    if any(box.size % multiple for box in boxes):
        return None
    return Box(first.start, last.stop)


def aligned_arrays(shapes: Sequence[Sequence[int]], dtype: np.dtype) -> list[np.ndarray]:
    """Arrays in one piece of memory, each at a multiple of 64 bytes.

    XLA's CPU client uses a buffer without a copy only if it is aligned so.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    room = _room(ends[-1])
    return [
        room[start : start + size].view(dtype).reshape(shape)
        for start, size, shape in zip([0, *ends], sizes, shapes, strict=False)
    ]


def _room(nbytes: int) -> np.ndarray:
    """Uninitialised memory of `nbytes` bytes, at a multiple of 64.

    Large memory is mapped from the kernel, which takes it back when the arrays are freed: malloc
    keeps the memory that a thread has freed for that thread alone, and restores in new threads
    would take more every time. Very large memory is mapped in huge pages, because a gibibyte in
    pages of 4 KiB costs a quarter of a million page faults.
    """
    if nbytes < OWN_BYTES:
        room = np.empty(nbytes + ALIGNMENT, np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        return room[first : first + nbytes]
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
