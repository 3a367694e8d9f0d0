"""Views over views: where the elements of a parameter are in what is stored at the bottom."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers import Consolidated, MemoryStore, evaluated, numbered
from jax_ucp.layout.box import Box
from jax_ucp.layout.patterns import Sharded, flat_layouts


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.integers(0, 5),
    st.lists(st.integers(0, 64), max_size=4),
)
def test_where_goes_through_a_flat_shard_that_is_made_of_shards(shape, before, cuts):
    """A parameter lies somewhere in a flat buffer, which is cut anywhere into what is stored."""
    want = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    buffer = np.concatenate([np.full(before, -1, np.int32), want.ravel()])
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(buffer)}), len(buffer)]
    stored = {f"s{i}": buffer[a:b] for i, (a, b) in enumerate(itertools.pairwise(edges))}
    lengths = [len(piece) for piece in stored.values()]
    whole = flat_layouts({"buffer": buffer.shape}, lengths)["buffer"]
    layout = flat_layouts({"before": (before,), "w": shape}, [len(buffer)])["w"]
    slices = {"buffer": Consolidated(whole, [*stored])}
    view = evaluated(MemoryStore(stored), slices, {"w": Consolidated(layout, ["buffer"])})
    got = np.full(shape, -1, np.int32)
    for piece in view.locate("w", Box.whole(shape)):
        got[piece.target.index] = stored[piece.file][piece.source.index].reshape(piece.target.shape)
    np.testing.assert_array_equal(got, want)


@given(st.integers(0, 6), st.integers(0, 4), st.integers(0, 4))
def test_any_box_may_be_empty(row, column, width):
    whole = numbered((6, 4))
    rows = Consolidated(Sharded(0).join([(3, 4)] * 2), ["0", "1"])
    view = evaluated(MemoryStore({"0": whole[:3], "1": whole[3:]}), {"w": rows})
    box = Box((row, column), (row, min(4, column + width)))
    np.testing.assert_array_equal(view.read("w", box), whole[box.index])
