"""The evaluator of array expressions: what it asks of the sources, and who sees what is read."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import MemoryStore, boxes_in, numbered
from jax_ucp.arrays.checks import BoxWatcher, watching
from jax_ucp.arrays.evaluate import expressions, is_in_rows, read, read_each, read_into
from jax_ucp.arrays.protocol import ArrayInfo, Want
from jax_ucp.arrays.value import Array, Computed, Constant, Rule, cut, joined, users
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import MOST_READ, Part, box_part, range_parts

pytestmark = pytest.mark.fast


class CountingStore(MemoryStore):
    """A store that counts the calls by which arrays are read together."""

    batches = 0

    def read_each(self, wants: Sequence[Want]) -> None:
        self.batches += 1
        super().read_each(wants)


def flat_shards(whole: np.ndarray, cuts: Sequence = (), margin=0) -> tuple[CountingStore, Array]:
    """A store of flat shards `f0`, `f1`, ... of an array, cut at these positions; and the array.

    Before and after its elements each shard has `margin` others.
    """
    parts: list[Part] = []
    shards: list[np.ndarray] = []
    for i, (start, stop) in enumerate(itertools.pairwise([0, *cuts, whole.size])):
        shards.append(np.pad(whole.reshape(-1)[start:stop], margin, constant_values=-1))
        parts += range_parts(i, margin, whole.shape, start, stop)
    store = CountingStore({f"f{i}": shard for i, shard in enumerate(shards)})
    layout = ParamLayout(whole.shape, tuple(shard.shape for shard in shards), tuple(parts))
    return store, joined("w", layout, list(expressions(store).values()))


@given(st.data())
def test_boxes_of_flat_shards_are_those_of_the_whole_and_little_else_is_read(data):
    shape = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple))
    size = math.prod(shape)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3)) - {size})
    whole = numbered(shape)
    store, array = flat_shards(whole, cuts, data.draw(st.integers(0, 2)))
    boxes = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=4))
    # places with gaps, in column-major order
    outs = [np.full((*box.shape[::-1], 2), -1) for box in boxes]
    read_into(array, boxes, [out[..., 0].T for out in outs])
    for box, out in zip(boxes, outs, strict=True):
        assert np.array_equal(out[..., 0].T, whole[box.index])
        assert (out[..., 1] == -1).all()
    read = sum(box.size for _, box in store.reads)
    assert read <= MOST_READ * sum(box.size for box in boxes)


def test_columns_that_devices_want_of_the_same_rows_are_one_read():
    whole = numbered((8, 8))
    store, array = flat_shards(whole, margin=3)
    boxes = [Box((0, i), (8, i + 2)) for i in range(0, 8, 2)]
    outs = [np.empty((8, 2), np.int64) for _ in boxes]
    read_into(array, boxes, outs)
    assert np.array_equal(np.concatenate(outs, axis=1), whole)
    assert store.reads == [("f0", Box((3,), (67,)))]


def test_one_column_reads_its_elements_one_by_one():
    whole = numbered((8, 8))
    store, array = flat_shards(whole)
    assert np.array_equal(read(array, Box((0, 5), (8, 6))), whole[:, 5:6])
    assert store.reads == [("f0", Box((8 * i + 5,), (8 * i + 6,))) for i in range(8)]


def test_several_expressions_over_a_source_are_one_call_of_it():
    whole = numbered((6, 4))
    store, array = flat_shards(whole, [7, 15])
    other = cut("", array, 8, (2, 4))
    outs = [np.empty((6, 4), np.int64), np.empty((2, 4), np.int64)]
    boxes = [[Box.whole((6, 4))], [Box.whole((2, 4))]]
    read_each([(array, boxes[0], [outs[0]]), (other, boxes[1], [outs[1]])])
    assert np.array_equal(outs[0], whole)
    assert np.array_equal(outs[1], whole[2:4])
    assert store.batches == 1


@dataclass(frozen=True)
class FromTable(Rule):
    """Element i is `table[codes[i]]`."""

    entries: int

    @property
    def elementwise(self) -> Sequence[str]:
        return ["codes"]

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return {"codes": box, "table": Box((0,), (self.entries,))}

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        return parts["table"][parts["codes"]]


def test_what_every_box_of_a_rule_needs_is_read_once():
    codes, table = np.array([[0, 2], [1, 1], [2, 0]]), np.array([0.5, -1.0, 8.0])
    store = MemoryStore({"codes": codes, "table": table})
    array = Computed(FromTable(3), expressions(store), ArrayInfo((3, 2), table.dtype))
    boxes = [Box((i, 0), (i + 1, 2)) for i in range(3)]
    outs = [np.empty((1, 2)) for _ in boxes]
    read_into(array, boxes, outs)
    assert np.array_equal(np.concatenate(outs), table[codes])
    assert store.reads.count(("table", Box((0,), (3,)))) == 1
    assert len(store.reads) == 4


def test_a_watcher_of_an_input_sees_what_is_read_through_what_is_made_of_it():
    whole = numbered((6, 4))
    _, array = flat_shards(whole, [9])
    seen = []

    class Kept(BoxWatcher):
        def see(self, boxes: Sequence[Box], arrays: Sequence[np.ndarray]) -> None:
            seen.extend((box, part.copy()) for box, part in zip(boxes, arrays, strict=True))

    layer = cut("", array, 8, (2, 4))
    with watching([Kept(id(array))]):
        read(layer, Box((0, 1), (2, 4)))
    read(layer, Box((0, 0), (1, 1)))
    [(box, elements)] = seen
    assert box == Box((2, 1), (4, 4))
    assert np.array_equal(elements, whole[2:4, 1:])


def test_users_are_found_at_any_depth():
    store = MemoryStore({"a": numbered((4,)), "b": numbered((4,)), "c": numbered((4,))})
    of = expressions(store)
    half = Box((0,), (4,))
    parts = box_part(0, half, half), box_part(1, half, Box((4,), (8,)))
    pair = joined("pair", ParamLayout((8,), ((4,), (4,)), parts), [of["a"], of["b"]])
    made = {"pair": pair, "last": cut("", cut("", pair, 2, (4,)), 1, (2,)), "c": of["c"]}
    assert users(made, of) == {"a": {"pair", "last"}, "b": {"pair", "last"}, "c": {"c"}}


def test_blocks_of_rows_are_read_of_what_lies_in_rows_alone():
    lies, decoded = (
        Constant(numbered((6, 4))),
        expressions(MemoryStore({"w": numbered((6, 4))}))["w"],
    )
    halves = ParamLayout((6, 8), ((6, 4),) * 2, tuple(
        box_part(i, Box.whole((6, 4)), Box((0, 4 * i), (6, 4 * i + 4))) for i in range(2)
    ))  # fmt: skip
    assert is_in_rows(lies)
    assert not is_in_rows(decoded)
    assert is_in_rows(joined("w", halves, [lies, lies]))
    assert not is_in_rows(joined("w", halves, [lies, decoded]))
    assert is_in_rows(cut("w", lies, 4, (5, 4)))
    assert not is_in_rows(cut("w", lies, 4, (5, 4), transposed=True))
