"""Views over views: where the elements of a parameter are in what is stored at the bottom."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers import MemoryStore
from jax_ucp.layout.patterns import flat_layouts
from jax_ucp.storage.consolidated import Consolidated, ConsolidatedView


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
    whole = flat_layouts({"buffer": buffer.shape}, [len(piece) for piece in stored.values()])["buffer"]
    inner = ConsolidatedView(MemoryStore(stored), {"buffer": Consolidated(whole, [*stored])})
    layout = flat_layouts({"before": (before,), "w": shape}, [len(buffer)])["w"]
    view = ConsolidatedView(inner, {"w": Consolidated(layout, ["buffer"])})
    got = np.full(shape, -1, np.int32)
    for key, fragment in view.where("w"):
        got[fragment.target.index] = stored[key][fragment.source.index].reshape(fragment.target.shape)
    np.testing.assert_array_equal(got, want)
