"""Exports that are refused, bounded, stopped or killed: what is said, and what is left."""

import json
import shutil
import threading
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import jax_ucp as ucp
from commands import invoke, run
from helpers import MemoryStore, faults_of, memory, tree_of_files
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint, TreeMismatch, UnsupportedLeaf
from jax_ucp.export.folder import new_folder
from jax_ucp.tree import Key, Leaf
from programs import killed

TESTS = Path(__file__).parents[1]
DATA, WORKERS = TESTS / "data", TESTS / "workers"
CASE = DATA / "deepspeed" / "z2_bf16_dp3"
ADAM = {"exp_avg": {"w": np.ones((4, 3), np.float32)}, "step": {"w": np.float32([5]).reshape(())}}


def weights(**arrays: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    return {"param": arrays}


W = np.arange(12, dtype=np.float32).reshape(4, 3)
INT4 = np.ones(3, ml_dtypes.int4)


@pytest.mark.parametrize(("format", "tree", "error", "words"), [
    ("safetensors", weights(ok=W, a=INT4, b=INT4), UnsupportedLeaf, r"a has dtype int4\n.*b has dtype int4\n.*dtype"),
    ("safetensors", weights(__metadata__=W), UnsupportedLeaf, "__metadata__ has a name"),
    ("safetensors", weights(c=W.astype(np.complex128)), UnsupportedLeaf, "(?s)c has dtype complex128.*cast other arrays before"),
    ("dcp", weights(a=INT4), UnsupportedLeaf, r"(?s)model\.a has dtype int4.*cast other arrays before"),
    ("dcp", {"param": {"w": W, "w.b": W}, "b.c": {"w": W}, "c": {"w.b": W}}, TreeMismatch,
        r"optimizer\.state\.w\.b\.c: optimizer / state / w / b\.c, optimizer / state / w\.b / c"),
    ("dcp", {"param": {"w": W}, "other": {"model.w": W}}, TreeMismatch, r"model\.w: model / w, model / w"),
    ("deepspeed", weights(a=INT4), UnsupportedLeaf, "(?s)param of a has dtype int4.*cast other arrays before"),
    ("deepspeed", weights(**{"a/b": W, "..": W}), UnsupportedLeaf, r"'a/b' is not a name of a folder\n.*'\.\.' is no"),
    ("deepspeed", weights(**{"n" * 300: W}), UnsupportedLeaf, "is not a name of a folder"),
    ("deepspeed", {"param": {"w": W}, "fp32": {"w": W}}, UnsupportedLeaf, "'fp32' of w is not a name of a state"),
    ("deepspeed", {"param": {"w": W}, "step": {"w": W}}, UnsupportedLeaf,
        "step of w has shape .4, 3., and is not a num"),
    ("dcp", {"param": {"w": W}, "buffer": {"w": W}}, TreeMismatch, "w as a parameter and as a buffer"),
    ("safetensors", {"other": {"w": W}}, TreeMismatch, "has no parameters"),
    ("dcp", {"exp_avg": {"w": W}}, TreeMismatch, "states of what is not a parameter .*exp_avg of w"),
])  # fmt: skip
def test_what_a_format_cannot_hold_is_named_with_the_remedy(format, tree, error, words, tmp_path):
    with pytest.raises(error, match=f"(?s){words}"):
        memory(tree).export(tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_is_not_of_parameters_is_refused(tmp_path):
    path = Key("dict", "layers"), Key("list", 0), Key("dict", "w")
    leaf = Leaf(path, "w", "array", (4, 3), "float32")
    checkpoint = Checkpoint(Contents("memory", "in memory", [leaf], MemoryStore({"w": W})))
    with pytest.raises(TreeMismatch, match=r"the first layers/0/w\. Map the leaves"):
        checkpoint.export(tmp_path / "out", "dcp")


def test_an_extra_that_would_run_code_is_left_out_and_named(tmp_path):
    record = {"!record": "os.system", "args": ["true"], "fields": {}}
    extras = {"mp_rank_00_model_states.pt": {"x": [record], "y": 1}}
    source = memory(weights(w=W), extras)
    notes = source.plan_export("deepspeed").notes
    assert any(note.startswith("x of mp_rank_00") and "os.system" in note for note in notes)
    source.export(tmp_path / "out", "deepspeed")
    kept = ucp.open(tmp_path / "out").extras["mp_rank_00_model_states.pt"]
    assert kept["y"] == 1
    assert "x" not in kept
    assert not any(b"system" in data for data in tree_of_files(tmp_path).values())


def test_casting_is_done_when_asked_and_said(tmp_path):
    source = memory({"param": {"w": W / 3, "n": np.arange(3)}, **ADAM})
    exported = source.export(tmp_path / "out", "dcp", dtype="bfloat16")
    np.testing.assert_array_equal(exported.read("param/w"), (W / 3).astype(ml_dtypes.bfloat16))
    assert exported.read("param/n").dtype == np.int64
    assert exported.read("exp_avg/w").dtype == np.float32
    assert "cast to bfloat16" in source.plan_export("dcp", dtype="bfloat16").notes[0]
    for name in ("int8", "nothing"):
        with pytest.raises(UnsupportedLeaf, match=f"'{name}' is not a floating dtype"):
            source.plan_export("dcp", dtype=name)


def test_what_is_left_out_is_said():
    extras = {"a.pt": {"lr_scheduler": {"step": 3}, "rng": [1, 2]}}
    source = memory({"param": {"w": W}, **ADAM, "other": {"rope": W}}, extras)
    assert [note.partition(":")[0] for note in source.plan_export("safetensors").notes] == [
        "exp_avg, step are left out",
        "1 tensors beside the model are left out, the first rope",
        (
            "2 extras are left out, which safetensors has no place for; the first is lr_scheduler"
            " of a.pt"
        ),
    ]
    notes = "\n".join(source.plan_export("deepspeed").notes)
    assert "load_lr_scheduler_states=False" in notes
    assert "the settings of the run's own groups stay" in notes
    assert "along axis 0, right or wrong" in notes
    assert "round_robin" not in notes
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    source = memory({"param": {"w": W}}, {"mp_rank_00_model_states.pt": {"ds_config": config}})
    notes = "\n".join(source.plan_export("deepspeed").notes)
    assert "trained with round_robin_gradients: turn it off" in notes


class Counted(MemoryStore):
    """Counts the bytes of blocks that were read and are still alive, at their worst."""

    def __init__(self, data):
        super().__init__(data)
        self.lock, self.alive, self.worst = threading.Lock(), 0, 0

    def read(self, key, box):
        block = super().read(key, box).copy()
        with self.lock:
            self.alive += block.nbytes
            self.worst = max(self.worst, self.alive)

        class Block(np.ndarray):
            def __del__(this):
                if this.base is block:
                    with self.lock:
                        self.alive -= block.nbytes

        return block.view(Block)


@pytest.mark.parametrize("format", ["safetensors", "dcp", "deepspeed"])
def test_no_more_than_the_budget_is_in_memory_whatever_the_size_of_the_checkpoint(format, tmp_path):
    shape = 1500, 700
    arrays = {f"param/{i}": np.full(shape, i, np.float32) for i in range(8)}
    paths = {n: (Key("dict", "param"), Key("dict", n[6:])) for n in arrays}
    leaves = [Leaf(path, name, "array", shape, "float32") for name, path in paths.items()]
    store, budget = Counted(arrays), 4 << 20
    checkpoint = Checkpoint(Contents("memory", "in memory", leaves, store))
    assert checkpoint.nbytes > 8 * budget
    assert checkpoint.plan_export(format, budget_bytes=budget).peak_bytes <= budget
    written: list[int] = []
    how = {"budget_bytes": budget, "progress": written.append}
    exported = checkpoint.export(tmp_path / "out", format, **how)
    assert sum(written) == checkpoint.nbytes
    assert 0 < store.worst <= budget
    for name, array in arrays.items():
        np.testing.assert_array_equal(exported.read(name), array)
    assert faults_of(exported) == []


class Inflated(MemoryStore):
    """Arrays of which any part costs all; counts reads at once, of which one waits for another."""

    def __init__(self, data, wait_s):
        super().__init__(data)
        self.lock, self.reading, self.worst = threading.Lock(), 0, 0
        self.together, self.wait_s = threading.Event(), wait_s

    def arrays(self):
        # rows, in which files have the elements, are cut out of both chunks
        return {k: ArrayInfo(a.shape, a.dtype, (500, 250)) for k, a in self.data.items()}

    def read(self, key, box):
        with self.lock:
            self.reading += 1
            self.worst = max(self.worst, self.reading)
            if self.reading > 1:
                self.together.set()
        self.together.wait(self.wait_s)
        with self.lock:
            self.reading -= 1
        return super().read(key, box)


@pytest.mark.parametrize(("budget", "at_once"), [(1 << 20, False), (64 << 20, True)])
def test_what_is_read_around_a_block_counts_too(budget, at_once, tmp_path):
    arrays = {f"param/{i}": np.full((500, 500), i, np.float32) for i in range(4)}
    paths = {n: (Key("dict", "param"), Key("dict", n[6:])) for n in arrays}
    leaves = [Leaf(path, name, "array", (500, 500), "float32") for name, path in paths.items()]
    store = Inflated(arrays, 60 if at_once else 0.002)
    checkpoint = Checkpoint(Contents("memory", "in memory", leaves, store))
    checkpoint.export(tmp_path / "out", "dcp", budget_bytes=budget)
    assert (store.worst > 1) == at_once


def test_a_target_that_is_in_use_is_left_as_it_is(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    memory(weights(w=W)).export(target, "dcp")  # an empty folder is free
    before = tree_of_files(tmp_path)
    with pytest.raises(FileExistsError, match="is in use"):
        memory(weights(w=W)).export(target, "safetensors")
    assert tree_of_files(tmp_path) == before
    source = ucp.open(target)
    with pytest.raises(FileExistsError, match="lies in the source"):
        source.export(target / "below", "dcp")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="is in use"):
        source.export(tmp_path / "link", "dcp")


def test_two_exports_to_one_place_do_not_meet(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "begun").write_text("by the first")
        with pytest.raises(FileExistsError, match="another export is writing"):
            memory(weights(w=W)).export(tmp_path / "out", "dcp")
        assert (folder / "begun").exists()


def test_a_source_that_contradicts_itself_is_not_exported(tmp_path):
    shutil.copytree(CASE, tmp_path / "case")
    file = next((tmp_path / "case").rglob("mp_rank_00_model_states.pt"))
    with zipfile.ZipFile(file) as members:
        stored = next(members.read(name) for name in members.namelist() if name.endswith("/data/0"))
    file.write_bytes(file.read_bytes().replace(stored, bytes([stored[0] ^ 1]) + stored[1:]))
    with pytest.raises(CorruptData, match="contradicts itself"):
        ucp.open(tmp_path / "case").export(tmp_path / "out", "dcp")
    assert not (tmp_path / "out").exists()


class Failing(MemoryStore):
    def read(self, key, box):
        if key == "param/b":
            raise CorruptData("the disk is gone")
        return super().read(key, box)


@pytest.mark.parametrize("format", ["safetensors", "dcp", "deepspeed"])
def test_an_export_that_fails_leaves_nothing(format, tmp_path):
    paths = {n: (Key("dict", "param"), Key("dict", n)) for n in "ab"}
    leaves = [Leaf(paths[n], f"param/{n}", "array", (4, 3), "float32") for n in "ab"]
    store = Failing({"param/a": W, "param/b": W})
    with pytest.raises(CorruptData, match="the disk is gone"):
        Checkpoint(Contents("memory", "in memory", leaves, store)).export(tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["safetensors", "dcp", "deepspeed"])
def test_an_export_killed_at_any_moment_is_whole_or_not_there(format, tmp_path):
    """Real SIGKILLs, before each file or folder that the export makes, opens to write, renames
    or removes.
    """
    source = tmp_path / "source"
    memory({"param": {"a": W, "b": W + 1}, "exp_avg": {"a": W, "b": W}}).export(source, "dcp")
    kills = killed(f"export {format}", tmp_path, source, 0)
    whole = tree_of_files(tmp_path / "whole" / "out")
    outcomes = set()
    for root, moment in kills:
        there = (root / "out").exists()
        outcomes.add(there)
        if there:
            want = {f"out/{name}": data for name, data in whole.items()}
            assert tree_of_files(root) == want, moment
            continue
        # what is left beside it opens only if all of it is there
        for folder in filter(Path.is_dir, root.rglob("*")):
            try:
                left = ucp.open(folder)
            except (NotACheckpoint, FormatError):
                continue
            assert left.params.keys() == {"a", "b"}, moment
            assert all((left.params[n].read() == W + (n == "b")).all() for n in "ab"), moment
        cut = {"max_shard_bytes": 48} if format == "safetensors" else {}
        ucp.open(source).export(root / "out", format, **cut)
        assert tree_of_files(root) == {f"out/{name}": data for name, data in whole.items()}, moment
    assert len(kills) > 10
    assert outcomes == {False, True}


def test_the_command_says_what_it_wrote_and_what_it_left_out(tmp_path):
    command = "export", CASE, tmp_path / "out", "--format"
    result = invoke(*command, "safetensors", "--dtype", "bfloat16", "--json")
    assert "note: exp_avg, exp_avg_sq, step are left out" in result.stderr
    found = json.loads(result.stdout)
    assert (found["tensors"], found["files"], found["format"]) == (30, 1, "safetensors")
    assert {leaf.dtype for leaf in ucp.open(tmp_path / "out").leaves} == {"bfloat16"}
    assert "is in use" in run(*command, "dcp", code=1)
