"""Grids of runs: what lies in a file where they say is the array, whatever its axes and shards."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.errors import LayoutError
from jax_ucp.layout import runs
from jax_ucp.layout.blocks import grid_boxes
from jax_ucp.layout.box import Box
from jax_ucp.layout.runs import StridedBlock, run_grid


@st.composite
def stored_arrays(draw):
    """An array, the bytes of a file that has it in parts along an axis, and their blocks."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    whole = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    order = draw(st.permutations(range(len(shape))))
    axis = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.sets(st.integers(1, shape[axis]), max_size=3)) - {shape[axis]})
    data, blocks = bytearray(), []
    for start, stop in zip([0, *cuts], [*cuts, shape[axis]], strict=True):
        data += draw(st.binary(max_size=5))
        box = Box.whole(shape)
        own = [((*x[:axis], a, *x[axis + 1 :])) for x, a in ((box.start, start), (box.stop, stop))]
        box = Box(*own)
        part = np.ascontiguousarray(whole[box.index].transpose(order))
        strides = dict(zip(order, part.strides, strict=True))
        distances = tuple(strides[a] for a in range(len(shape)))
        blocks.append(StridedBlock(box, 0, len(data), distances))
        data += part.tobytes()
    return whole, bytes(data), draw(st.permutations(blocks))


def assembled(grid, shape, data: bytes) -> np.ndarray:
    out = np.empty(shape, np.uint16)
    for box, (_, offset) in zip(grid_boxes(shape, grid.chunk), grid.places, strict=True):
        stored = np.frombuffer(data, np.uint16, math.prod(grid.chunk), offset)
        stored = stored.reshape([grid.chunk[axis] for axis in grid.order])
        out[box.index] = stored.transpose(np.argsort(grid.order))
    return out


@given(stored_arrays(), st.integers(2, 64))
def test_the_chunks_of_a_grid_are_the_array(stored, most):
    whole, data, blocks = stored
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "MOST_BYTES", most)
        patch.setattr(runs, "LEAST_BYTES", min(most, 8))
        patch.setattr(runs, "MANY", 10_000)
        grid = run_grid(whole.shape, 2, blocks)
    np.testing.assert_array_equal(assembled(grid, whole.shape, data), whole)
    assert not any(n % c for n, c in zip(whole.shape, grid.chunk, strict=True))


def test_chunks_are_as_long_as_a_reader_wants_them():
    def chunk(shape):
        return run_grid(shape, 2, [StridedBlock(Box.whole(shape), 0, 0, (2 * shape[1], 2))]).chunk

    assert chunk((4096, 4096)) == (1024, 4096)  # 8 MiB
    assert chunk((8, 100)) == (8, 100)
    assert chunk((50_257, 4096)) == (1733, 4096)  # of 29 * 1733 rows, 29 have 232 KiB
    assert chunk((65_537, 4096)) == (65_537, 4096)  # a prime: rows alone would be 8 KiB


def test_many_short_runs_and_elements_that_are_nowhere_are_no_grid():
    shape = (64, 512, 8)
    boxes = [Box((0, 0, i), (64, 512, i + 1)) for i in range(8)]
    halves = [StridedBlock(box, 0, 65_536 * i, (1024, 2, 0)) for i, box in enumerate(boxes)]
    assert run_grid(shape, 2, halves).chunk == (64, 512, 1)
    apart = [StridedBlock(Box.whole(shape), 0, 0, (16_384, 32, 4))]
    with pytest.raises(LayoutError, match=r"262144 runs, the longest of 2 bytes"):
        run_grid(shape, 2, apart)
    with pytest.raises(LayoutError, match="some of its elements are in no file"):
        run_grid(shape, 2, halves[1:])
