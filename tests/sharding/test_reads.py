"""What a plan says that hosts read is what a restore's boxes and chunks come to, counted one by one."""

import math

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ucp.layout.blocks import Chunks, grid_boxes
from jax_ucp.sharding.boxes import index_box
from jax_ucp.sharding.fit import fit_spec
from jax_ucp.sharding.reads import planned_reads

SPECS = [(None, None), ("a", "b"), ("b", "a"), (("b", "a"), None), (None, "b")]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_plan_counts_what_the_boxes_of_each_host_touch(data):
    shape = tuple(8 * data.draw(st.integers(1, 3)) for _ in range(2))
    inner = tuple(data.draw(st.integers(1, 9)) for _ in range(2))
    chunks = Chunks(tuple(i * data.draw(st.integers(1, 2)) for i in inner), inner)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    spec = fit_spec(data.draw(st.sampled_from(SPECS)), shape, dict(mesh.shape)).spec
    per_host = data.draw(st.sampled_from([1, 2, 4]))
    found = planned_reads([(shape, 2, chunks, spec)] * 3, dict(mesh.shape), per_host)
    indices = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(shape)
    for host in range(8 // per_host):
        boxes = {index_box(indices[d], shape) for d in mesh.devices.ravel()[host * per_host : (host + 1) * per_host]}
        touched = [
            [frozenset(c for c in grid_boxes(shape, unit) if c.intersect(box)) for box in boxes]
            for unit in (chunks.inner, chunks.outer)
        ]
        assert found.needed[host] == 3 * 2 * sum(box.size for box in boxes)
        assert found.read[host] == 3 * 2 * math.prod(inner) * sum(map(len, set(touched[0])))
        assert found.files[host] == 3 * sum(map(len, set(touched[1])))
