"""Several boxes of one array at a time, so that no stored chunk is read twice for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jax_ucp.layout.blocks import grid_boxes, rows_of_chunks
from jax_ucp.layout.box import Box
from jax_ucp.storage.source import ArraySource

BLOCK_BYTES = 32 << 20


def read_boxes(source: ArraySource, key: str, boxes: Sequence[Box]) -> list[np.ndarray]:
    """The elements of each box, in memory of the caller's own.

    Where the array has chunks, blocks of whole chunks are read once each and shared out to the boxes they
    meet: the columns that eight devices want of one chunk cost one read of it, not eight.
    """
    info = source.arrays()[key]
    if info.chunk is None or len(boxes) == 1:
        return [_own(source.read(key, box)) for box in boxes]
    out = [np.empty(box.shape, info.dtype) for box in boxes]
    step = rows_of_chunks(info.shape, info.chunk, info.dtype.itemsize, BLOCK_BYTES)
    for block in _blocks_meeting(info.shape, step, boxes):
        hits = [(i, hit) for i, box in enumerate(boxes) if (hit := box.intersect(block)) is not None]
        start = tuple(map(min, zip(*(hit.start for _, hit in hits), strict=True)))
        stop = tuple(map(max, zip(*(hit.stop for _, hit in hits), strict=True)))
        data = source.read(key, Box(start, stop))
        for i, hit in hits:
            out[i][hit.relative_to(boxes[i]).index] = data[hit.relative_to(Box(start, stop)).index]
    return out


def _blocks_meeting(shape: Sequence[int], step: Sequence[int], boxes: Sequence[Box]) -> Iterator[Box]:
    """The blocks of the grid of `step` that share an element with one of the boxes."""
    if not math.prod(shape):
        return
    start = [min(box.start[axis] for box in boxes) // n * n for axis, n in enumerate(step)]
    stop = [max(box.stop[axis] for box in boxes) for axis in range(len(step))]
    for block in grid_boxes([b - a for a, b in zip(start, stop, strict=True)], step):
        if any(box.intersect(block.shift(start)) for box in boxes):
            yield block.shift(start)


def _own(data: np.ndarray) -> np.ndarray:
    return data if data.flags.writeable and data.flags.c_contiguous else data.copy()
