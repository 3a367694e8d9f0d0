"""What a process copies of a tree when it saves: what it writes, and no part more."""

import gc

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import boxes_in, mesh_of, numbered
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.sharding.save import Snapshot, _parts, _to_host, describe

MESH = mesh_of(4, 2, names="xy")
SHAPE = (8, 12)
SPECS = [P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y"))]
PLACED = [jax.device_put(numbered(SHAPE, np.int32), NamedSharding(MESH, spec)) for spec in SPECS]


@given(st.sampled_from(PLACED), st.lists(boxes_in(SHAPE), max_size=3))
def test_the_parts_that_are_copied_are_those_that_the_blocks_of_a_process_need(array, boxes):
    data = _to_host({"w": _parts(array, tuple(boxes))})
    snapshot = Snapshot([], {"w": ArrayInfo(SHAPE, array.dtype)}, {}, [], data)
    for box in boxes:
        np.testing.assert_array_equal(snapshot.read("w", box), numbered(SHAPE, np.int32)[box.index])
    for part in data.get("w", ()):
        assert any(part.intersect(box) for box in boxes), part


def test_the_garbage_collector_runs_again_after_a_tree_that_cannot_be_saved():
    with pytest.raises(UnsupportedLeaf):
        describe({"a": object()})
    assert gc.isenabled()
