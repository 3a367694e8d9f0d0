"""Thousands of arrays of which each process has a piece: stacks, from the save to every reader."""

import itertools
import json
import math
import shutil
from pathlib import Path

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_ucp as ucp
from helpers import faults_of, flip_bit, in_lanes, mesh_of
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.layout import blocks
from jax_ucp.layout.box import Box
from jax_ucp.sharding import reads, restore
from jax_ucp.sharding import save as save_module
from jax_ucp.universal import metadata, stacks
from remote_files import counted

MESH = mesh_of(4, 2, names="ab")
DAMAGED = "layers/layer_0/up and 4 arrays like it [0:5, 0:256, 0:128]"
SPECS = [("a", "b"), ("b", "a"), (("a", "b"), None), (None, ("b", "a")), (None, None)]


@pytest.fixture(autouse=True)
def _from_few(monkeypatch):
    monkeypatch.setattr(stacks, "STACK_FROM", 6)
    monkeypatch.setattr(stacks, "SMALL_BYTES", 0)


def tree(spec=("a", "b"), count: int = 5) -> dict:
    """Arrays of two shapes, layer by layer, and some that are alone."""
    sharding = NamedSharding(MESH, PartitionSpec(*spec))

    def array(seed, shape, dtype=np.float32):
        return np.random.default_rng(seed).standard_normal(shape).astype(dtype)

    layers = {
        f"layer_{i}": {
            "up": jax.device_put(array(2 * i, (256, 128)), sharding),
            "down": jax.device_put(array(2 * i + 1, (128, 256)), sharding),
        }
        for i in range(count)
    }
    return {"layers": layers, "other": array(99, (7, 3)), "step": 3, "name": "x"}


def save(folder: Path, want: dict) -> Path:
    path = folder / "saved"
    ucp.CheckpointHandler().save(path, ucp.args.Save(want))
    return path


def assert_same(restored, want) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, restored, want)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_what_was_saved_is_restored_by_us_and_by_stock_orbax(tmp_path):
    want = tree()
    path = save(tmp_path, want)
    said = json.loads((path / "ucp.json").read_bytes())
    assert said["version"] == 2
    counts = {stack: len(names) for stack, names in said["stacks"].items()}
    assert counts == {"ucp.stack_0": 5, "ucp.stack_1": 5}
    assert not list(path.glob("layers.*"))
    checkpoint = ucp.open(path)
    assert_same(checkpoint.restore(), want)
    assert faults_of(checkpoint) == []
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        assert_same(checkpointer.restore(path), want)


@pytest.mark.parametrize(
    ("before", "after", "far"), in_lanes([*itertools.product(SPECS, SPECS, [False, True])])
)
def test_any_mesh_to_any_mesh(tmp_path, before, after, far):
    want = tree(before)
    path = save(tmp_path, want)
    with counted() as files:
        checkpoint = ucp.open(f"counted://{path}" if far else path)
        files.asked.clear()
        restored = checkpoint.restore(mesh=MESH, rules=[("layers", PartitionSpec(*after))])
        assert files.asked["fetch"] <= far * (2 + len([*path.glob("ucp.stack_*/c.*")]))
    assert_same(restored, want)


def test_a_host_reads_what_it_needs_of_all_arrays_in_few_requests(tmp_path, monkeypatch):
    """A quarter of what each of the writers had, on the axis that was cut."""
    monkeypatch.setattr(blocks, "STACK_BYTES", 1 << 10)
    path = save(tmp_path, tree((("a", "b"), None), count=40))
    with counted() as files:
        checkpoint = ucp.open(f"counted://{path}")
        source = checkpoint._contents.arrays
        files.asked.clear()
        files.nbytes = 0
        box = Box((64, 0), (128, 128))
        outs = [np.empty(box.shape, np.float32) for _ in range(40)]
        names = [f"layers.layer_{i}.up" for i in range(40)]
        source.read_each([(name, [box], [out]) for name, out in zip(names, outs, strict=True)])
        assert files.asked["fetch"] == 1
        assert files.nbytes <= 1.01 * sum(out.nbytes for out in outs)
    whole = checkpoint.restore()["layers"]
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out, whole[f"layer_{i}"]["up"][64:128])


def test_a_checkpoint_of_stacks_is_copied_and_inspected_leaf_by_leaf(tmp_path):
    want = tree()
    checkpoint = ucp.open(save(tmp_path, want))
    checkpoint.save(tmp_path / "copy")
    assert_same(ucp.open(tmp_path / "copy").restore(), want)
    for leaf in checkpoint.leaves:
        pieces = list(checkpoint.where(leaf)) if leaf.has_array else []
        covered = np.zeros(leaf.shape, int)
        for piece in pieces:
            assert (tmp_path / "saved" / piece.file).is_file()
            assert piece.source.size == piece.target.size
            covered[piece.target.index] += 1
        assert not leaf.has_array or (covered == 1).all()


@pytest.mark.parametrize("far", [False, True])
def test_a_flipped_bit_is_an_error_to_who_reads_it_and_in_the_index_to_verify(tmp_path, far):
    path = save(tmp_path, tree())
    file = next(path.glob("ucp.stack_1/c.*"))
    data = file.read_bytes()
    with counted():
        flip_bit(file, 1000, bit=2)
        checkpoint = ucp.open(f"counted://{path}" if far else path)
        with pytest.raises(CorruptData, match="does not have the crc32c that is stored"):
            checkpoint.restore()
        assert [check for check, fault in checkpoint.verify() if fault] == [DAMAGED]
        file.write_bytes(data)
        flip_bit(file, len(data) - 50, bit=2)
        checkpoint = ucp.open(f"counted://{path}" if far else path)
        checkpoint.restore()
        assert [check for check, fault in checkpoint.verify() if fault] == [DAMAGED]


def test_pieces_that_were_exchanged_are_an_error(tmp_path):
    """They are whole, and of another array of the stack."""
    path = save(tmp_path, tree((None, None)))
    file = next(path.glob("ucp.stack_1/c.*"))
    data, nbytes = file.read_bytes(), json.loads((path / "ucp.json").read_bytes())
    nbytes = 4 * math.prod(nbytes["arrays"]["ucp.stack_1"]["inner"]) + 4
    file.write_bytes(data[nbytes : 2 * nbytes] + data[:nbytes] + data[2 * nbytes :])
    with pytest.raises(CorruptData, match="are not those that were saved"):
        ucp.open(path).restore()


def test_a_stack_without_one_of_its_files_is_not_opened(tmp_path):
    path = save(tmp_path, tree())
    file = next(path.glob("ucp.stack_0/c.*"))
    file.unlink()
    with pytest.raises(CorruptData, match=f"ucp.stack_0/{file.name} is missing"):
        ucp.open(path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda said: said["stacks"]["ucp.stack_0"].pop(), "has no leaf, or the leaf no array"),
    (lambda said: said["stacks"]["ucp.stack_0"].append("step"), "an array twice|no array"),
    (lambda said: said["stacks"].update({"ucp.stack_9": []}), "has arrays of 0 kinds"),
    (lambda said: said["stacks"]["ucp.stack_0"].append("layers.layer_0.up"), "twice"),
    (
        lambda said: said["stacks"]["ucp.stack_0"].append(said["stacks"]["ucp.stack_1"].pop()),
        "has arrays of 2 kinds",
    ),
    (lambda said: said.update(version=1), "has version 1, and the content of 2$"),
    (lambda said: said.pop("stacks"), "has version 2, and the content of 1$"),
    (lambda said: said["arrays"]["ucp.stack_0"]["inner"].__setitem__(0, 5), "of several arrays|inner"),
])  # fmt: skip
def test_stacks_that_no_writer_makes_are_refused(tmp_path, change, message):
    path = save(tmp_path, tree())
    said = json.loads((path / "ucp.json").read_bytes())
    change(said)
    rewrite(path, said)
    with pytest.raises(FormatError, match=message):
        ucp.open(path)


def test_processes_that_would_stack_other_arrays_do_not_have_the_same_content():
    """By what is recorded of a sharding the types of a mesh's axes are all one."""
    explicit = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 2)

    def snapshot(kinds):
        spec = PartitionSpec("a")
        shardings = [NamedSharding((MESH, explicit)[kind], spec) for kind in kinds]
        arrays = {f"w{i}": jax.device_put(np.ones((8, 4)), s) for i, s in enumerate(shardings)}
        return save_module.take_snapshot(save_module.describe(arrays))

    one, other = snapshot([0, 1] * 4), snapshot([0, 0, 1, 1] * 2)
    assert one.stacks["ucp.stack_0"] != other.stacks["ucp.stack_0"]
    assert one.chunks == other.chunks
    assert save_module.content(one) != save_module.content(other)


def rewrite(path: Path, said: dict) -> None:
    """`ucp.json` with the right digest."""
    said["digest"] = ""
    bare = msgspec.json.encode(said)
    said["digest"] = metadata.digest(bare)
    (path / "ucp.json").write_bytes(msgspec.json.encode(said))


def test_few_arrays_are_not_stacked_and_the_file_is_of_the_first_version(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "STACK_FROM", 11)
    path = save(tmp_path, tree())
    said = json.loads((path / "ucp.json").read_bytes())
    assert said["version"] == 1
    assert "stacks" not in said


def test_where_an_index_could_not_have_the_parts_arrays_are_not_stacked(tmp_path, monkeypatch):
    """Stock Orbax finds arrays by the index."""
    monkeypatch.setattr(stacks, "MAX_ENTRIES", 40)  # 8 parts of each of 10 arrays, or one file
    path = save(tmp_path, tree())
    assert json.loads((path / "ucp.json").read_bytes())["version"] == 1
    monkeypatch.setattr(stacks, "MAX_ENTRIES", 20)  # not even the files
    path = save(tmp_path / "more", tree())
    assert json.loads((path / "ucp.json").read_bytes())["version"] == 2


def test_of_many_inner_chunks_none_is_recorded_and_all_are_read(tmp_path, monkeypatch):
    want = tree()
    monkeypatch.setattr(stacks, "MAX_RECORDED", 1)
    path = save(tmp_path, want)
    said = json.loads((path / "ucp.json").read_bytes())
    assert not said["arrays"]["ucp.stack_0"].get("crcs")
    checkpoint = ucp.open(path)
    assert_same(checkpoint.restore(), want)
    assert faults_of(checkpoint) == []


def _changed(leaf):
    return -leaf if isinstance(leaf, jax.Array) else leaf


def test_of_many_inner_chunks_a_file_of_another_step_is_found_by_all_that_read_digests(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(stacks, "MAX_RECORDED", 1)
    want = tree()
    path, later = save(tmp_path / "one", want), save(tmp_path / "two", jax.tree.map(_changed, want))
    chunk = min(path.glob("ucp.stack_0/c.*"))
    shutil.copy(later / chunk.relative_to(path), chunk)
    checkpoint = ucp.open(path)
    with pytest.raises(CorruptData):
        checkpoint.restore(verify="full")
    assert faults_of(checkpoint)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(2, 40),
    st.integers(1, 4000),
)
def test_parts_of_a_cell_divide_it_and_outer_chunks_hold_the_stack_once(axes, count, most):
    cell, shape = tuple(c for c, _ in axes), tuple(c * n for c, n in axes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "OUTER_BYTES", most)
        patch.setattr(blocks, "STACK_BYTES", 16)
        chunks = blocks.stack_chunks(count, shape, 4, cell)
    assert chunks.inner[0] == 1
    assert chunks.outer[1:] == cell
    assert all(o % i == 0 for o, i in zip(chunks.outer, chunks.inner, strict=True))
    assert 4 * math.prod(chunks.inner) >= min(16, 4 * math.prod(cell))
    assert math.prod(chunks.outer) * 4 <= max(most, 4 * math.prod(cell))


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_plan_counts_the_requests_for_stacks(tmp_path_factory, data):
    before, after = data.draw(st.sampled_from(SPECS)), data.draw(st.sampled_from(SPECS))
    count, rules = data.draw(st.integers(3, 9)), [("layers", PartitionSpec(*after))]
    with pytest.MonkeyPatch.context() as patch, counted() as files:
        patch.setattr(blocks, "OUTER_BYTES", data.draw(st.sampled_from([1 << 18, 3 << 18])))
        patch.setattr(blocks, "STACK_BYTES", data.draw(st.sampled_from([1 << 12, 1 << 14])))
        together = data.draw(st.sampled_from([1 << 17, 1 << 19, 1 << 24]))
        for module in (reads, restore):
            patch.setattr(module, "TOGETHER_BYTES", together)
        caches = save_module._writers, reads._reads
        for cache in caches:
            cache.cache_clear()
        want = {"layers": tree(before, count)["layers"]}
        checkpoint = ucp.open(f"counted://{save(tmp_path_factory.mktemp('some'), want)}")
        planned = checkpoint.plan_reads(MESH, rules=rules)
        files.asked.clear()
        restored = checkpoint.restore(mesh=MESH, rules=rules)
        asked = files.asked["fetch"]
        for cache in caches:
            cache.cache_clear()
    assert asked == planned.requests.tolist()[0]
    assert_same(restored, want)
