"""What a plan says that hosts read is what a restore's boxes and chunks come to, counted."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import jax_ucp as ucp
from helpers import boxes_of_hosts, mesh_of
from jax_ucp.layout.blocks import Chunks, grid_boxes
from jax_ucp.sharding.fit import fit_spec
from jax_ucp.sharding.reads import HostMesh, PlannedArray, planned_reads

SPECS = [(None, None), ("a", "b"), ("b", "a"), (("b", "a"), None), (None, "b")]
MESH = mesh_of(4, 2, names="ab")
DATA = Path(__file__).parents[1] / "data" / "torch"


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_plan_counts_what_the_boxes_of_each_host_touch(data):
    shape = tuple(8 * data.draw(st.integers(1, 3)) for _ in range(2))
    inner = tuple(data.draw(st.integers(1, 9)) for _ in range(2))
    chunks = Chunks(tuple(i * data.draw(st.integers(1, 2)) for i in inner), inner)
    spec = fit_spec(data.draw(st.sampled_from(SPECS)), shape, dict(MESH.shape)).spec
    hosts = data.draw(st.sampled_from([1, 2, 4, 8]))
    found = planned_reads([PlannedArray(shape, 2, chunks, spec)] * 3, HostMesh.of(MESH, hosts))
    for host, boxes in enumerate(boxes_of_hosts(MESH, shape, spec, hosts)):
        inner_ones, outer_ones = (
            [
                chunk
                for chunk in grid_boxes(shape, unit)
                if any(chunk.intersect(box) for box in boxes)
            ]
            for unit in (chunks.inner, chunks.outer)
        )
        assert found.needed[host] == 3 * 2 * sum(box.size for box in boxes)
        assert found.read[host] == 3 * 2 * math.prod(inner) * len(inner_ones)
        assert found.files[host] == 3 * len(outer_ones)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_file_with_pieces_of_several_arrays_is_opened_once_by_each_host_that_needs_one(data):
    pieces = [
        tuple((data.draw(st.sampled_from("abc")), box) for box in grid_boxes((8, 8), cut))
        for cut in data.draw(
            st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=3)
        )
    ]
    spec, hosts = data.draw(st.sampled_from(SPECS)), data.draw(st.sampled_from([1, 2, 4]))
    arrays = [PlannedArray((8, 8), 4, Chunks((8, 8), (1, 1)), spec, each) for each in pieces]
    found = planned_reads(arrays, HostMesh.of(MESH, hosts))
    for host, boxes in enumerate(boxes_of_hosts(MESH, (8, 8), spec, hosts)):
        flat = [(name, piece) for each in pieces for name, piece in each]
        names = {name for name, piece in flat if any(piece.intersect(box) for box in boxes)}
        assert found.files[host] == len(names)
        needed = 4 * len(pieces) * sum(box.size for box in boxes)
        assert found.read[host] == found.needed[host] == needed


@pytest.mark.parametrize("case", ["dcp_hf_sharded_2d", "dcp_threads2"])
def test_of_an_imported_checkpoint_each_host_opens_the_files_whose_pieces_its_boxes_meet(case):
    checkpoint = ucp.open(DATA / case / "ckpt")
    found = checkpoint.plan_reads(MESH, rules=[("", PartitionSpec("a"))], hosts=4)
    files, needed = [set() for _ in range(4)], np.zeros(4, int)
    for leaf in checkpoint.leaves:
        spec = fit_spec(("a",), leaf.shape, dict(MESH.shape)).spec
        for host, boxes in enumerate(boxes_of_hosts(MESH, leaf.shape, spec, 4)):
            needed[host] += sum(box.size for box in boxes) * np.dtype(leaf.dtype).itemsize
            whole = checkpoint.where(leaf)
            met = [piece for piece in whole if any(box.intersect(piece.target) for box in boxes)]
            files[host] |= {next(p.file for p in met if p.target == piece.target) for piece in met}
    assert found.files.tolist() == [len(each) for each in files]
    assert len(set(found.files.tolist())) > 1
    assert found.needed.tolist() == found.read.tolist() == needed.tolist()
