"""The elements of two copies to compare where comparing all would cost too much."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex

# An array in one piece has so many runs, one in many pieces a run in each of them; a run has at
# most so many elements.
RUNS = 3
RUN_ELEMENTS = 256
# A block of no more is a run by itself: one read of all of it costs less than several of its parts.
SMALL_BLOCK = 1024


def sample_boxes(*tilings: Sequence[Box]) -> list[Box]:
    """Runs of elements of an array, at least one inside each block of each tiling.

    A tiling is the blocks in which one copy of the array is stored, so that no file of either copy
    is without a run. Every run is a box of at most `RUN_ELEMENTS` elements that lie one after the
    other in its block, or a small block itself. The last elements of every block of the first
    tiling are among them: what was shifted or cut short shows there, even in an array of ones.
    Blocks without elements have no run.

    >>> [str(box) for box in sample_boxes([Box((0, 0), (1000, 64))])]
    ['[0:4, 0:64]', '[499:503, 0:64]', '[996:1000, 0:64]']
    >>> halves = [Box((0,), (5000,)), Box((5000,), (10000,))]
    >>> [str(box) for box in sample_boxes(halves)]
    ['[4744:5000]', '[9744:10000]']
    >>> [str(box) for box in sample_boxes([Box((0,), (10000,))], halves)]
    ['[0:256]', '[4999:5255]', '[9744:10000]']
    """
    return list(_sample_boxes(tuple(map(tuple, tilings))))


# A model has many arrays of few shapes, which are cut in few ways.
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
    """At most `RUN_ELEMENTS` consecutive elements of the block, around that at `place`.

    It has whole rows where a row is shorter than that: then its axes after `axis` are whole.
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
