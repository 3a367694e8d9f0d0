"""Any mesh to any mesh is the original."""

import itertools
import math

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import in_lanes, restored_on
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.sharding.boxes import index_box
from jax_ucp.sharding.fit import fit_spec
from workers.reads import bytes_read

MESHES = {
    "8": {"a": 8}, "4x2": {"a": 4, "b": 2}, "2x4": {"a": 2, "b": 4}, "1x8": {"a": 1, "b": 8},
    "2x2x2": {"a": 2, "b": 2, "c": 2}, "c8": {"c": 8}, "4": {"a": 4}, "2x1": {"b": 2, "a": 1}, "3": {"a": 3},
    "1": {"a": 1},
}  # fmt: skip
SPECS = [P(), P("a"), P(None, "a"), P("a", "b"), P(("a", "b")), P("b", ("c", "a"))]
ARRAYS = {
    "even": np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32),
    "odd": np.random.default_rng(1).normal(size=(15, 8, 2)).astype(ml_dtypes.bfloat16),
}
WANT = {f"{name}/{i}": array for name, array in ARRAYS.items() for i in range(len(SPECS))}


def mesh_of(sizes: dict[str, int]) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, str]:
    """A checkpoint from each mesh, with every array under every spec."""
    paths = {}
    for name, sizes in MESHES.items():
        mesh, tree = mesh_of(sizes), {}
        for label, array in WANT.items():
            spec = fit_spec(tuple(SPECS[int(label[-1])]), array.shape, sizes).spec
            tree[label] = jax.device_put(array, NamedSharding(mesh, P(*spec)))
        paths[name] = str(tmp_path_factory.mktemp(name) / "step")
        ocp.Checkpointer(ucp.CheckpointHandler()).save(paths[name], args=ucp.args.Save(tree))
    return paths


def check_shards(array: jax.Array, want: np.ndarray, label: str) -> None:
    for shard in array.addressable_shards:
        part = want[index_box(shard.index, want.shape).index]
        assert same_bits(np.asarray(shard.data), part), label


@pytest.mark.parametrize(("source", "target"), in_lanes([*itertools.product(MESHES, MESHES)]))
def test_every_spec_on_every_mesh_restores_as_every_spec_on_every_other(saved, source, target):
    checkpoint, mesh = ucp.open(saved[source]), mesh_of(MESHES[target])
    for spec in SPECS:
        got = restored_on(mesh, checkpoint, [("", spec)])
        assert set(got) == set(WANT)
        for label, want in WANT.items():
            check_shards(got[label], want, f"{label} as {spec}")
            fitted = fit_spec(tuple(spec), want.shape, MESHES[target])
            placed = NamedSharding(mesh, P(*fitted.spec))
            assert got[label].sharding.is_equivalent_to(placed, want.ndim)


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(["4x2", "2x2x2"], ["8", "2x4", "3"]))
)
def test_without_rules_each_array_keeps_its_saved_spec_as_far_as_meshes_can(saved, source, target):
    checkpoint, mesh = ucp.open(saved[source]), mesh_of(MESHES[target])
    plan = checkpoint.plan(mesh=mesh)
    got = restored_on(mesh, checkpoint)
    for placement in plan.placements:
        want = WANT[placement.leaf.label]
        assert placement.leaf.sharding is not None
        fit = fit_spec(placement.leaf.sharding.spec, want.shape, MESHES[target])
        assert placement.notes == fit.notes
        assert got[placement.leaf.label].sharding.spec == P(*fit.spec)
        check_shards(got[placement.leaf.label], want, placement.leaf.label)
    assert plan.notes == [f"{p.leaf.label}: {note}" for p in plan.placements for note in p.notes]


def test_what_the_mesh_cannot_do_is_said(saved):
    plan = ucp.open(saved["4x2"]).plan(mesh=mesh_of({"a": 3}))
    assert "even/1: axis 0 of 16 is not cut over a: 16 does not divide by 3" in plan.notes
    assert "odd/3: axis 1 of 8 is not cut over b: the mesh has no such axis" in plan.notes


def test_a_transposed_restore_reads_each_byte_once(tmp_path):
    array = np.random.default_rng(2).normal(size=(2048, 1024)).astype(np.float32)
    mesh = mesh_of({"a": 8})
    tree = {"w": jax.device_put(array, NamedSharding(mesh, P("a", None)))}
    ocp.Checkpointer(ucp.CheckpointHandler()).save(tmp_path / "step", args=ucp.args.Save(tree))
    checkpoint = ucp.open(tmp_path / "step")
    with bytes_read() as read:
        got = checkpoint.restore(mesh=mesh, rules=[("w", P(None, "a"))])
    check_shards(got["w"], array, "w")
    # Beside the data: the index of each of 8 files, and a crc32c of 4 bytes with each of 64 inner
    # chunks of each.
    assert array.nbytes <= read() <= array.nbytes * 1.001
