"""Whatever the budget: the same arrays, each stored chunk read once, no more in flight."""

import itertools
import math
import tracemalloc
from functools import partial

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import MemoryStore, contents_of, grids, in_lanes
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import TreeMismatch
from jax_ucp.sharding.boxes import device_boxes
from jax_ucp.sharding.jax_versions import enable_x64
from jax_ucp.sharding.output_buffers import ReadRequest, output_buffers
from workers.reads import bytes_read

BITS = np.random.default_rng(0).integers(0, 1 << 32, (1536, 768), np.uint32)
WANT = {
    "w": BITS.view(np.float32),
    "count": BITS.astype(np.int32),
    "half": BITS[:768].view(ml_dtypes.bfloat16),
}
SPECS = [P("x"), P(None, "x"), P()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("budget") / "step")
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    tree = {name: jax.device_put(array, sharding) for name, array in WANT.items()}
    ocp.Checkpointer(ucp.CheckpointHandler()).save(path, args=ucp.args.Save(tree))
    return path


@pytest.fixture(params=["cpu", "accelerator"])
def devices_are(request, monkeypatch) -> str:
    """With `accelerator` the CPU devices are taken for devices with a memory of their own."""
    if request.param == "accelerator":
        unsharded = property(lambda wanted: wanted.sharding is None)
        monkeypatch.setattr(ReadRequest, "in_place", unsharded)
    return request.param


@pytest.mark.parametrize(
    ("spec", "count", "budget"),
    in_lanes([*itertools.product(SPECS, [1, 3, 8], [1, 1 << 20, 6 << 20, 1 << 30])]),
)
@pytest.mark.usefixtures("devices_are")
def test_any_budget_restores_every_bit_and_reads_nothing_twice(saved, budget, count, spec):
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    with bytes_read() as read:
        got = ucp.open(saved).restore(mesh=mesh, rules=[("", spec)], budget_bytes=budget)
    for name, want in WANT.items():
        assert got[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        for shard in got[name].addressable_shards:
            assert same_bits(np.asarray(shard.data), want[shard.index])
    needed = sum(array.nbytes for array in WANT.values())
    # Beside the data: crc32c, and of each file the index, which every block reads.
    assert needed <= read() < needed * 1.01


@pytest.mark.parametrize("budget", [1, 1 << 20, 1 << 30])
@pytest.mark.parametrize("kind", ["mesh", "numpy"])
@pytest.mark.usefixtures("devices_are")
def test_any_budget_casts_alike(saved, budget, kind):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:3]), ("x",)), P(None, "x"))
    dtypes = {"w": ml_dtypes.bfloat16, "half": np.float32, "count": np.int32}
    shapes = {name: (array.shape, dtypes[name]) for name, array in WANT.items()}
    if kind == "mesh":
        like = partial(jax.ShapeDtypeStruct, sharding=sharding)
        target = {name: like(*about) for name, about in shapes.items()}
    else:
        target = {name: np.empty(*about) for name, about in shapes.items()}
    got = ucp.open(saved).restore(target, cast=True, budget_bytes=budget)
    for name, want in WANT.items():
        with np.errstate(invalid="ignore"):
            assert same_bits(np.asarray(got[name]), want.astype(dtypes[name]))


@pytest.mark.parametrize("budget", [1, 1 << 30])
@pytest.mark.usefixtures("devices_are")
def test_integers_that_do_not_fit_are_refused_in_every_block(saved, budget):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    target = {"count": jax.ShapeDtypeStruct(WANT["count"].shape, np.int16, sharding=sharding)}
    with pytest.raises(TreeMismatch, match="do not fit int16"):
        ucp.open(saved).restore(target, cast=True, partial=True, budget_bytes=budget)


@pytest.mark.usefixtures("devices_are")
def test_64_bits_land_in_blocks_too():
    want = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, (512, 96))
    with enable_x64(True):
        mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
        checkpoint = Checkpoint(contents_of({"param": {"w": want}}))
        got = checkpoint.restore(mesh=mesh, budget_bytes=1 << 16)
    assert same_bits(np.asarray(got["param"]["w"]), want)


@given(st.data())
def test_blocks_hold_the_boxes_cut_no_chunk_and_are_apart(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    chunk = data.draw(st.none() | st.tuples(*(st.integers(1, n) for n in shape)))
    some = [box for box in data.draw(grids(shape)) if box.size]
    boxes = data.draw(st.lists(st.sampled_from(some), min_size=1, unique=True))
    info = ArrayInfo(shape, np.dtype(np.int16), chunk)
    most = data.draw(st.integers(1, 2 * math.prod(shape)))
    seen = np.zeros(np.multiply(shape, 2), np.int64)  # blocks may reach past the array
    for block in info.blocks(boxes, most):
        seen[block.index] += 1
        assert any(box.intersect(block) for box in boxes)
        itemsize = info.dtype.itemsize
        assert block.size * itemsize <= max(most, itemsize * math.prod(chunk or ()))
        assert all(a % n == 0 for a, n in zip(block.start, chunk or (1,) * len(shape), strict=True))
    assert seen.max() == 1
    assert all(seen[box.index].all() for box in boxes)


@pytest.mark.usefixtures("devices_are")
def test_a_process_without_devices_of_the_mesh_takes_nothing_whatever_the_budget(saved):
    """It has no boxes, and what a stored chunk would cost is none of its business."""
    found = ucp.open(saved)._contents
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    for leaf in found.leaves:
        assert ReadRequest(found.arrays, leaf.name, {}, np.dtype(leaf.dtype), sharding).cost() == 0


class Copies(MemoryStore):
    """A source whose every read takes memory, as one of files does."""

    def read(self, key, box):
        return super().read(key, box).copy()


@pytest.mark.usefixtures("devices_are")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_block_takes_no_more_memory_than_it_costs(spec, dtype):
    array = np.random.default_rng(2).normal(size=(1920, 132)).astype(np.float32)
    mesh, store = Mesh(np.array(jax.devices()[:3]), ("x",)), Copies({"w": array})
    sharding = NamedSharding(mesh, spec)
    with enable_x64(True):
        boxes = device_boxes(sharding, array.shape)
        wanted = ReadRequest(store, "w", boxes, np.dtype(dtype), sharding)
        place = output_buffers(wanted)
        assert place is not None
        for block in wanted.blocks(200_000):
            place.fill(block)  # what compiling takes is no part of it
            tracemalloc.start()
            place.fill(block)
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            # The arrays, which numpy tells tracemalloc of; and Python's own objects.
            assert wanted.cost(block) // 3 < most < wanted.cost(block) + 20_000 <= 220_000
        assert same_bits(np.asarray(place.array()), array.astype(dtype))
