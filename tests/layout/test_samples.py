"""Which elements are compared where comparing all would cost too much: laws of the choice."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers import grids
from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import RUN_ELEMENTS, RUNS, SMALL_BLOCK, sample_boxes

SHAPES = st.lists(st.integers(0, 40), max_size=4)
SHAPES |= st.lists(st.integers(1, 3000), min_size=1, max_size=2)
SHAPES = SHAPES.map(tuple)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]]]:
    """A shape, and some ways to cut it; blocks may have no elements."""
    shape = draw(SHAPES)
    return shape, draw(st.lists(grids(shape), min_size=1, max_size=3))


def positions(box: Box, block: Box) -> np.ndarray:
    """Where the elements of a box lie in the row-major order of a block around it."""
    inside = box.relative_to(block)
    index = np.indices(inside.shape).reshape(inside.ndim, math.prod(inside.shape))
    index += np.array(inside.start, int).reshape(inside.ndim, 1)
    return np.ravel_multi_index(list(index), block.shape) if block.ndim else np.zeros(1, int)


@given(tilings())
def test_every_block_of_every_tiling_has_a_run_inside(case):
    _, every = case
    runs = sample_boxes(*every)
    for blocks in every:
        for block in blocks:
            is_met = any(run.within(block) for run in runs)
            assert not block.size or is_met, f"{block} is not met by {runs}"


@given(tilings())
def test_a_run_is_short_and_lies_in_one_piece_of_a_block(case):
    _, every = case
    for run in sample_boxes(*every):
        assert 0 < run.size <= RUN_ELEMENTS or any(run in blocks for blocks in every)
        assert run.size <= SMALL_BLOCK
        homes = [block for blocks in every for block in blocks if block.size and run.within(block)]
        assert any(np.ptp(positions(run, home)) == run.size - 1 for home in homes)


@given(tilings())
def test_there_are_no_more_runs_than_blocks_need(case):
    _, every = case
    filled = [sum(block.size > 0 for block in blocks) for blocks in every]
    assert len(sample_boxes(*every)) <= max(RUNS, filled[0]) + sum(filled[1:])


@given(tilings())
def test_the_last_elements_of_the_blocks_of_the_first_tiling_are_among_them(case):
    _, every = case
    runs = sample_boxes(*every)
    for block in every[0]:
        last = Box(tuple(n - 1 for n in block.stop), block.stop)
        assert not block.size or any(last.within(run) for run in runs)


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_an_array_in_one_piece_has_runs_at_its_ends_and_between(rows, columns):
    block = Box.whole((rows, columns))
    runs = sample_boxes([block])
    firsts = [Box(run.start, tuple(a + 1 for a in run.start)) for run in runs]
    starts = [int(positions(first, block)[0]) for first in firsts]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    covered = sum(run.size for run in runs)
    assert covered >= min(rows * columns, RUN_ELEMENTS // 2 + 1)
    if rows * columns <= SMALL_BLOCK:
        assert runs == [block]
    elif rows * columns > 4 * RUNS * RUN_ELEMENTS:
        assert len(runs) == RUNS
        assert rows * columns / 4 < starts[1] + RUN_ELEMENTS
        assert starts[1] < rows * columns * 3 / 4
