"""A checkpoint cut for a mesh has the same bits in the chunks that a save from the mesh writes."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import contents_of, faults_of, tree_of_files, warned_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import ShardingWarning
from jax_ucp.sharding.fit import fit_spec
from jax_ucp.sharding.save import describe, take_snapshot

SPECS = [
    P(), P("data"), P(None, "model"), P("data", "model"), P(("model", "data")), P("model", "data"),
]  # fmt: skip
MESHES = [({"data": 4, "model": 2}, 1), ({"data": 2, "model": 16}, 8), ({"x": 3, "model": 4}, 12)]
RULES = [(r"w$", P("data", "model")), (r"bits$", P("model", "x")), (r"b$", P("model"))]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    # NaNs of every payload, both zeros, denormal numbers
    bits = rng.integers(0, 1 << 32, (384, 960), np.uint32)
    return {
        "w": rng.normal(size=(1024, 1536)).astype(np.float32),
        "bits": bits.view(np.float32),
        "b": rng.normal(size=1536).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(-0.0).reshape(()),
        "empty": np.empty((0, 8), np.int8),
    }


@pytest.fixture(scope="module")
def universal(tmp_path_factory):
    path = tmp_path_factory.mktemp("cut")
    (path / "source").write_text("the source")
    source = Checkpoint(contents_of({"param": arrays()}))
    object.__setattr__(source._contents, "path", str(path / "source"))
    return source.save(path / "universal")


@pytest.mark.parametrize(("mesh", "hosts"), MESHES)
def test_it_has_the_same_bits_and_its_mesh_reads_no_byte_too_many(universal, tmp_path, mesh, hosts):
    cut = cut_for(universal, tmp_path / "cut", mesh, hosts)
    assert cut.leaves == universal.leaves
    for name, want in arrays().items():
        assert same_bits(cut.read(f"param/{name}"), want)
    assert faults_of(cut) == []
    assert cut.plan_reads(mesh, rules=RULES, hosts=hosts).amplification == 1.0


def test_cut_again_it_has_the_same_files_and_cut_for_no_mesh_its_sources_files(universal, tmp_path):
    (mesh, hosts), (other, others) = MESHES[:2]
    first = cut_for(universal, tmp_path / "first", mesh, hosts)
    second = cut_for(universal, tmp_path / "second", other, others)
    assert files(second) != files(first)
    assert files(cut_for(second, tmp_path / "again", mesh, hosts)) == files(first)
    assert files(second.save(tmp_path / "back")) == files(universal)


def cut_for(checkpoint: Checkpoint, path: Path, mesh: dict[str, int], hosts: int) -> Checkpoint:
    said = {"mesh": mesh, "rules": RULES, "hosts": hosts}
    with warned_of(checkpoint.plan_save(**said).notes):
        return checkpoint.save(path, **said)


def files(checkpoint: Checkpoint) -> dict[str, bytes]:
    return tree_of_files(Path(checkpoint.path))


@settings(max_examples=25)
@given(st.data())
def test_its_chunks_are_those_of_a_save_from_the_mesh(data):
    sizes = data.draw(st.sampled_from([(8, 1), (4, 2), (2, 4)]))
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("data", "model"))
    tree, rules = {}, []
    for name in "abc":
        scales = st.sampled_from([1, 4, 8])
        lengths = st.builds(lambda n, times: n * times, st.integers(1, 700), scales)
        shape = data.draw(lengths), data.draw(lengths)
        spec = fit_spec(data.draw(st.sampled_from(SPECS)), shape, dict(mesh.shape)).spec
        dtype = data.draw(st.sampled_from([np.int8, np.float32]))
        tree[name] = jax.device_put(np.zeros(shape, dtype), NamedSharding(mesh, P(*spec)))
        rules.append((f"{name}$", P(*spec)))
    arrays = {name: np.asarray(array) for name, array in tree.items()}
    checkpoint = Checkpoint(contents_of({"param": arrays}))
    live = take_snapshot(describe({"param": tree})).chunks
    for given_mesh in (mesh, mesh.abstract_mesh, dict(mesh.shape)):
        assert checkpoint.plan_save(4 << 30, mesh=given_mesh, rules=rules).chunks == live


@pytest.mark.parametrize("budget", [1 << 20, 16 << 20, 1 << 30])
def test_the_budget_holds_for_any_mesh(universal, budget):
    for mesh, hosts in MESHES:
        plan = universal.plan_save(budget, mesh=mesh, rules=RULES, hosts=hosts)
        assert plan.peak_bytes <= budget
        assert plan.write_bytes == universal.nbytes


def test_what_a_mesh_does_not_have_of_a_spec_is_told(universal, tmp_path):
    rules = [(r"w$", P("data", "model")), (r"nothing$", P("model"))]
    asked = {"mesh": {"data": 5, "model": 2}, "rules": rules}
    notes = universal.plan_save(**asked).notes
    assert [note.partition(":")[0] for note in notes][:1] == ["param/w"]
    assert len(notes) == 2
    with pytest.warns(ShardingWarning) as warned:
        universal.save(tmp_path / "cut", **asked)
    assert str(warned[0].message).splitlines()[1:] == [f"  {note}" for note in notes]
    assert [warning.filename for warning in warned] == [__file__]
    assert universal.plan_save().notes == ()
