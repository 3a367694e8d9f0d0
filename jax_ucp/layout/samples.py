"""Samples of two copies of an array, for a comparison that is much faster than of all elements."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex

# An array stored in one piece has RUNS runs, one in many pieces a run in each piece.
RUNS = 3
RUN_ELEMENTS = 256
# Blocks of at most so many elements are compared whole: one read costs less than several of parts.
SMALL_BLOCK = 1024


def sample_boxes(*tilings: Sequence[Box]) -> list[Box]:
    """Runs of elements of an array, at least one inside each block of each tiling.

    A tiling consists of the blocks in which one copy of the array is stored, so that every file of
    either copy has a run. A run is a box of at most `RUN_ELEMENTS` elements that follow one another
    in its block, or a small block itself. The last elements of every block of the first tiling are
    included, because they differ if elements were shifted or cut off. Empty blocks have no run.

    >>> [str(box) for box in sample_boxes([Box((0, 0), (1000, 64))])]
    ['[0:4, 0:64]', '[499:503, 0:64]', '[996:1000, 0:64]']
    >>> halves = [Box((0,), (5000,)), Box((5000,), (10000,))]
    >>> [str(box) for box in sample_boxes(halves)]
    ['[4744:5000]', '[9744:10000]']
    >>> [str(box) for box in sample_boxes([Box((0,), (10000,))], halves)]
    ['[0:256]', '[4999:5255]', '[9744:10000]']
    """
    return list(_sample_boxes(tuple(map(tuple, tilings))))


# a model has many arrays of few shapes, which are cut in few ways
@functools.lru_cache(maxsize=1024)
def _sample_boxes(tilings: tuple[tuple[Box, ...], ...]) -> tuple[Box, ...]:
    first, *others = ([block for block in blocks if block.size] for blocks in tilings)
    each = max(1, RUNS // max(1, len(first)))
    runs = _runs_of(first, each)
    for blocks in others:
        if len(blocks) > 1:  # a single one is the whole array
            index = BoxIndex(runs)
            hits = [(block, (runs[i] for i in index.meeting(block))) for block in blocks]
            without = [block for block, met in hits if not any(run.within(block) for run in met)]
            runs += _runs_of(without, 1)
    return tuple(runs)


def _runs_of(blocks: Sequence[Box], count: int) -> list[Box]:
    """`count` runs of each of the blocks."""
    return list(itertools.chain.from_iterable(_runs(block, count) for block in blocks))


def _runs(block: Box, count: int) -> list[Box]:
    """`count` runs of a block, evenly spread; the last elements are always included."""
    if block.size <= SMALL_BLOCK:
        return [block]
    last = block.size - 1
    places = [last] if count == 1 else [i * last // (count - 1) for i in range(count)]
    return list(dict.fromkeys(_run_around(block, place) for place in places))


def _run_around(block: Box, place: int) -> Box:
    """At most `RUN_ELEMENTS` consecutive elements of the block, around the one at `place`; whole
    rows if a row has fewer elements.
    """
    shape = block.shape
    axis, row = len(shape), 1
    while axis and row * shape[axis - 1] <= RUN_ELEMENTS:
        axis -= 1
        row *= shape[axis]
    start, stop = list(block.start), list(block.stop)
    place //= row
    for i in reversed(range(axis)):
        place, at = divmod(place, shape[i])
        length = RUN_ELEMENTS // row if i == axis - 1 else 1
        start[i] += min(at, shape[i] - length)
        stop[i] = start[i] + length
    return Box(tuple(start), tuple(stop))
