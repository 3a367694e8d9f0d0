"""What Orbax of other ages wrote, and Flax, T5X and Paxml: trees, values, runs and their steps."""

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jax_ucp as ucp
from cases import DATA, Case, copied, names_of
from commands import run
from helpers import changed_json
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import FormatError, NotACheckpoint

FOLDER = DATA / "jax"
NAMES = names_of("jax")
MANAGER = FOLDER / "orbax05-manager_items" / "ckpt"
UNMERGED = FOLDER / "orbax05-processes_unmerged" / "ckpt"
RUN = FOLDER / "orbax0128-manager_unfinished" / "ckpt"
PAXML = FOLDER / "orbax05-paxml" / "ckpt"


@pytest.mark.parametrize("name", NAMES)
def test_texts_none_and_empty_nodes_are_what_they_were(name):
    about = Case(f"jax/{name}").about
    leaves = {leaf.label: leaf for leaf in Case(f"jax/{name}").open().leaves}
    assert set(leaves) == {*about["others"], *about["dtypes"]}
    for label, value in about["others"].items():
        if value in (None, "empty"):
            assert leaves[label].kind in ("none", "empty")
        else:
            assert (leaves[label].kind, leaves[label].value) == ("str", value)


@pytest.mark.parametrize("name", NAMES)
def test_shardings_and_what_json_items_say_are_kept(name):
    about, checkpoint = Case(f"jax/{name}").about, Case(f"jax/{name}").open()
    for item, value in about.get("extras", {}).items():
        assert [extra for file, extra in checkpoint.extras.items() if item in file] == [value]
    leaves = {leaf.label: leaf for leaf in checkpoint.leaves}
    if checkpoint.format != "orbax" or "aggregate" in name:
        return
    for label, (names, sizes) in about["shardings"].items():
        assert list(leaves[label].sharding.axis_names) == names
        assert list(leaves[label].sharding.axis_sizes) == sizes


# Runs


def test_a_run_opens_its_latest_finished_step_and_the_one_that_is_asked_for():
    assert ucp.open(RUN).path == str(RUN / "2" / "default")
    checkpoint = ucp.open(RUN, step=1)
    assert checkpoint.path == str(RUN / "1" / "default")
    note = checkpoint.notes[0]
    assert note.startswith("a run of Orbax, Flax, T5X or Paxml, opened at 1; not finished: 3.orb")
    assert note.endswith("; there are 2 too (step=)")
    assert any("not finished: 3.orbax-checkpoint-tmp-17" in note for note in checkpoint.notes)
    beside = {item.where for item in checkpoint.inventory if item.status == "skipped"}
    assert {"2", "3.orbax-checkpoint-tmp-17"} <= beside
    with pytest.raises(NotACheckpoint, match=r"no finished step 3; it has 1, 2; not finished: 3."):
        ucp.open(RUN, step=3)
    with pytest.raises(FormatError, match="is one checkpoint, not a run with steps"):
        ucp.open(RUN / "2", step=2)


@pytest.mark.parametrize("run", ["orbax0128-manager_unfinished", "orbax05-flax_msgpack"])
def test_a_run_may_go_on_while_its_latest_step_is_read(run, tmp_path):
    folder = copied(FOLDER / run / "ckpt", tmp_path / "run")
    checkpoint = ucp.open(folder)
    for path in list(folder.iterdir()):
        if not Path(checkpoint.path).is_relative_to(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert len(list(folder.iterdir())) == 1
    checkpoint.restore()


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    for number in ("9", "10", "0011", "2"):
        copied(RUN / "1", tmp_path / "run" / f"step_{number}")
    assert Path(ucp.open(tmp_path / "run").path).parent.name == "step_0011"
    copied(RUN / "1", tmp_path / "run" / "best_12")
    with pytest.raises(NotACheckpoint, match="holds the steps best_12, step_2, step_9, step_10, "):
        ucp.open(tmp_path / "run")


def test_a_step_that_was_not_committed_is_not_taken(tmp_path):
    run = copied(RUN, tmp_path / "run")
    (run / "4.orbax-checkpoint-tmp" / "default").mkdir(parents=True)  # git keeps no empty folder
    (run / "2" / "commit_success.txt").unlink()
    checkpoint = ucp.open(run)
    assert Path(checkpoint.path).parent.name == "1"
    assert any("not finished: 3.orbax-checkpoint-tmp-17, 4.or" in note for note in checkpoint.notes)
    # before 0.12.3 no step had the file
    (run / "1" / "commit_success.txt").unlink()
    assert Path(ucp.open(run).path).parent.name == "2"
    unfinished = {"commit_timestamp_nsecs": None}
    changed_json(run / "2" / "_CHECKPOINT_METADATA", lambda about: about | unfinished)
    assert Path(ucp.open(run).path).parent.name == "1"
    with pytest.raises(NotACheckpoint, match="never finished, by its name"):
        ucp.open(run / "3.orbax-checkpoint-tmp-17")
    shutil.rmtree(run / "1")
    with pytest.raises(NotACheckpoint, match="has no finished step; not finished: 3"):
        ucp.open(run)


def test_a_step_without_the_mark_of_newer_versions_is_one(tmp_path):
    step = copied(MANAGER / "3", tmp_path / "run" / "3")
    (step / "_CHECKPOINT_METADATA").unlink()
    for path in (step, tmp_path / "run"):
        checkpoint = ucp.open(path)
        assert checkpoint.path == str(step / "state")
        assert checkpoint.extras["config/metadata"] == {"layers": 2, "name": "tiny"}


def test_a_save_in_parts_is_none_until_it_is_finalized(tmp_path):
    """The case has a step that is, which opens, and one that is not."""
    run = copied(FOLDER / "orbax0128-v1_partial" / "ckpt", tmp_path / "run")
    assert ucp.open(run).path == str(run / "1" / "state")
    (pending,) = (run / "2.partial_save").iterdir()
    for path in (pending.parent, pending):
        with pytest.raises(NotACheckpoint, match=r"2\.partial_save"):
            ucp.open(path)
    shutil.rmtree(run / "1")
    with pytest.raises(NotACheckpoint):
        ucp.open(run)


@pytest.mark.parametrize(("case", "lost"), [
    ("v1_replica_folders", "manifest.ocdbt"),
    ("v1_split_metadata", "ocdbt_meta"),
])  # fmt: skip
def test_databases_in_several_folders_are_refused_without_what_joins_them(case, lost, tmp_path):
    step = copied(FOLDER / f"orbax0128-{case}" / "ckpt", tmp_path / "step")
    opened = ucp.open(step)
    assert not [item for item in opened.inventory if item.status == "skipped"]
    at = step / "state" / lost
    shutil.rmtree(at) if at.is_dir() else at.unlink()
    with pytest.raises(FormatError, match=lost):
        ucp.open(step)


def test_of_several_trees_of_a_step_the_one_that_is_named_opens():
    path = FOLDER / "orbax01130-manager_two_trees" / "ckpt"
    with pytest.raises(NotACheckpoint, match=r"items opt, params: open one .*/opt, .* model='opt'"):
        ucp.open(path)
    with pytest.raises(NotACheckpoint, match=r"a step with the items opt, params, and no 'paramz'"):
        ucp.open(path, model="paramz")
    assert ucp.open(path, model="opt").path.endswith("3/opt")
    assert ucp.open(path / "3", model="params").source["model"] == "params"


def test_what_items_of_the_newest_version_say_in_json_is_an_extra(tmp_path):
    config = {"layers": 2, "names": ["a", None]}
    args = {"state": ocp.args.StandardSave({"w": np.ones(3)}), "config": ocp.args.JsonSave(config)}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(3, args=ocp.args.Composite(**args), metrics={"loss": 0.5})
        manager.wait_until_finished()
    checkpoint = ucp.open(tmp_path / "run")
    assert checkpoint.extras == {"config/metadata": config, "metrics/metrics": {"loss": 0.5}}
    assert {item.where for item in checkpoint.inventory} == {"_METADATA:w", *checkpoint.extras}
    mine = {"custom_metadata": {"by": "me"}}
    changed_json(tmp_path / "run/3/_CHECKPOINT_METADATA", lambda about: about | mine)
    assert ucp.open(tmp_path / "run").extras["_CHECKPOINT_METADATA"] == mine
    for text in ("[" * 5000 + "]" * 5000, "[" * 400 + "]" * 400, "{"):
        (tmp_path / "run/3/config/metadata").write_text(text)
        checkpoint = ucp.open(tmp_path / "run")
        assert "config/metadata" not in checkpoint.extras
        assert "config" in {item.where for item in checkpoint.inventory}


def test_weights_beside_a_run_could_be_meant_and_a_step_that_is_none_is_named(tmp_path):
    run = copied(FOLDER / "orbax05-flax_msgpack" / "ckpt", tmp_path / "run")
    weights = ucp.Checkpoint.of({"param": {"w": np.ones(2)}})
    weights.export(tmp_path / "weights", "safetensors")
    shutil.copy(next((tmp_path / "weights").glob("*.safetensors")), run / "x.safetensors")
    with pytest.raises(NotACheckpoint, match=r"holds the steps checkpoint_1, .*safetensors, x"):
        ucp.open(run)
    (run / "x.safetensors").unlink()
    for name, data, words in (
        ("checkpoint_1", b"", "checkpoint_1 in it is an empty file: it is empty"),
        ("checkpoint_9", b"<html>", "checkpoint_9 in it does not begin as .* of Flax: it is a"),
    ):
        shutil.rmtree(run)
        run.mkdir()
        (run / name).write_bytes(data)
        with pytest.raises(NotACheckpoint, match=words):
            ucp.open(run)
    shutil.rmtree(run)
    (run / "checkpoint_3").mkdir(parents=True)
    with pytest.raises(NotACheckpoint, match="checkpoint_3 is not a checkpoint of a format"):
        ucp.open(run)


# How arrays are stored


def test_where_the_metadata_say_nothing_of_a_database_its_manifest_does(tmp_path):
    state = copied(MANAGER / "3" / "state", tmp_path / "state")
    assert "use_ocdbt" not in json.loads((state / "_METADATA").read_text())
    (state / "manifest.ocdbt").unlink()
    shutil.rmtree(state / "d")
    # one process wrote it all, and its own database is whole
    want, got = ucp.open(MANAGER), ucp.open(state)
    assert any("was made of them" in note for note in got.notes)
    for leaf in want.leaves:
        assert not leaf.has_array or same_bits(want.read(leaf.label), got.read(leaf.label))


def test_databases_of_processes_are_read_together():
    checkpoint = ucp.open(UNMERGED)
    piece = checkpoint.where("params/layers_0/kernel")[0]
    assert piece.file == "ocdbt.process_0/manifest.ocdbt, ocdbt.process_1/manifest.ocdbt"


def test_folders_of_arrays_are_a_tree_of_their_names_unless_they_belong_to_something_else(tmp_path):
    state = copied(PAXML / "checkpoint_00000003" / "state", tmp_path / "state")
    assert ucp.open(state).restore()["mdl_vars"]["params"]["lm"]["kernel"]["w"].ndim == 2
    shutil.copytree(state / "step", state / "step.inner")
    with pytest.raises(FormatError, match="split at dots, do not form a tree: 'step' is a leaf"):
        ucp.open(state)
    shutil.rmtree(state / "step.inner")
    for name in (".zgroup", "_strings.json"):
        (state / name).write_text("{}")
        with pytest.raises(NotACheckpoint):
            ucp.open(state)
        (state / name).unlink()


def test_a_command_says_what_a_run_is_and_takes_a_step():
    text = run("inspect", RUN, "--step", "1")
    assert "1/default: orbax" in text.splitlines()[0]
    assert np.all(ucp.open(RUN, step=1).read("step") == ucp.open(RUN / "1").read("step"))
