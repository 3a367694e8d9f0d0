import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import boxes_in, numbered
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.box_index import BoxIndex

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
shapes_and_two_boxes = shapes.flatmap(lambda s: st.tuples(st.just(s), boxes_in(s), boxes_in(s)))


def elements(box: Box, shape: tuple[int, ...]) -> set[int]:
    return set(numbered(shape)[box.index].ravel().tolist())


@given(shapes_and_two_boxes)
def test_intersection_and_difference_are_those_of_the_sets_of_elements(case):
    shape, a, b = case
    both = a.intersect(b)
    assert (elements(both, shape) if both else set()) == elements(a, shape) & elements(b, shape)
    parts = list(a.minus(b))
    assert len(parts) <= 2 * len(shape)
    assert sum(part.size for part in parts) == len(elements(a, shape) - elements(b, shape))
    union = set().union(*(elements(part, shape) for part in parts))
    assert union == elements(a, shape) - elements(b, shape)
    assert a.within(b) == (elements(a, shape) <= elements(b, shape))


@given(
    shapes.flatmap(
        lambda s: st.tuples(st.just(s), st.tuples(*[st.integers(0, int(np.prod(s)))] * 2))
    )
)
def test_a_flat_range_is_few_boxes_in_row_major_order(case):
    shape, (start, stop) = case[0], sorted(case[1])
    array = numbered(shape)
    boxes = range_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    got = np.concatenate([array[box.index].ravel() for box in boxes]) if boxes else np.array([])
    np.testing.assert_array_equal(got, array.ravel()[start:stop])


def test_a_range_outside_the_array_is_refused():
    with pytest.raises(ValueError, match="does not lie in an array of 12 elements"):
        range_boxes((3, 4), 5, 13)


@given(st.data())
def test_the_index_finds_what_looking_at_every_box_finds(data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    boxes = data.draw(st.lists(boxes_in(shape), max_size=60))
    box = data.draw(boxes_in(shape))
    met = [i for i, other in enumerate(boxes) if other.intersect(box)]
    assert sorted(BoxIndex(boxes).meeting(box)) == met


@pytest.mark.parametrize(
    ("shape", "tile"), [((20_000,), (1,)), ((140, 140), (1, 1)), ((32, 25, 25), (1, 1, 1))]
)
def test_finding_a_box_among_twenty_thousand_looks_at_few_of_them(shape, tile, monkeypatch):
    from jax_ucp.layout import blocks

    tiles = list(blocks.grid_boxes(shape, tile))
    index = BoxIndex(tiles)
    looks, meets = [], Box.meets
    monkeypatch.setattr(Box, "meets", lambda a, b: looks.append(1) or meets(a, b))
    for first in (0, len(tiles) // 2, len(tiles) - 1):
        assert list(index.meeting(tiles[first])) == [first]
    # One hit is one path of about log2(20,000 / 8) = 12 nodes, two looks each, and a leaf of 8
    # boxes.
    assert 0 < len(looks) <= 3 * (2 * 12 + 8 + 2)
