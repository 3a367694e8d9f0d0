"""What lies in the folder of a checkpoint and is no part of it; arrays of other leaves."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jax_ucp as ucp
from jax_ucp.errors import FormatError, NotACheckpoint

TREE = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.int64),
    "c": 3,
}
FOREIGN = {
    "model-00001-of-00002.safetensors": True,
    "pytorch_model.bin": True,
    "rng_state.pth": True,
}
FOREIGN |= {"optimizer.pt": True, "checkpoint.pt": True, "notes.txt": False, ".DS_Store": False}


def stock(path: Path, ocdbt: bool, zarr3: bool) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(TREE))


KINDS = itertools.product((False, True), repeat=2)
WRITERS = {f"ocdbt {o} zarr3 {z}": lambda at, o=o, z=z: stock(at, o, z) for o, z in KINDS}
WRITERS["universal"] = lambda path: ucp.Checkpoint.of(TREE).save(path)


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_lies_beside_what_is_as_it_was_saved(writer, tmp_path):
    WRITERS[writer](tmp_path / "c")
    assert [item for item in ucp.open(tmp_path / "c").inventory if item.status == "skipped"] == []


@pytest.mark.parametrize("writer", WRITERS)
def test_everything_beside_is_in_the_account_and_what_may_be_of_the_run_is_noted(writer, tmp_path):
    WRITERS[writer](tmp_path / "c")
    for name in FOREIGN:
        (tmp_path / "c" / name).write_bytes(b"other")
    (tmp_path / "c" / "another").mkdir()
    checkpoint = ucp.open(tmp_path / "c")
    skipped = {item.where: item.what for item in checkpoint.inventory if item.status == "skipped"}
    assert skipped == dict.fromkeys(FOREIGN, "file") | {"another": "folder"}
    told = "\n".join(note for note in checkpoint.notes if note.startswith("not read"))
    assert {name: name in told for name in FOREIGN} == FOREIGN


def test_an_array_of_two_versions_of_zarr_is_refused(tmp_path):
    for zarr3 in (False, True):
        stock(tmp_path / f"{zarr3}", ocdbt=False, zarr3=zarr3)
    shutil.copy(tmp_path / "False" / "a" / ".zarray", tmp_path / "True" / "a")
    shutil.copy(tmp_path / "True" / "b" / "zarr.json", tmp_path / "False" / "b")
    for zarr3, name in ((True, "a"), (False, "b")):
        words = rf"/{name} has \.zarray and zarr\.json.* is the one of v{2 + zarr3}"
        with pytest.raises(FormatError, match=words):
            ucp.open(tmp_path / f"{zarr3}")


def test_an_array_that_is_smaller_than_what_a_device_wrote_of_it_is_another(tmp_path):
    import jax.numpy as jnp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    with ocp.Checkpointer(handler) as checkpointer:
        tree = {"w": jnp.ones((3, 4)), "v": jnp.ones(2), "s": jnp.float32(1)}
        checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(tree))
    assert ucp.open(tmp_path / "c").restore()["w"].shape == (3, 4)
    for name, other in (("w", "v"), ("v", "s"), ("s", "w")):
        folder = Path(shutil.copytree(tmp_path / "c", tmp_path / name))
        shutil.rmtree(folder / name)
        shutil.copytree(tmp_path / "c" / other, folder / name)
        with pytest.raises(FormatError, match=rf"/{name} has shape .* but by _METADATA a device"):
            ucp.open(folder)


def test_a_step_names_what_lies_beside_its_item_and_one_without_an_item_says_so(tmp_path):
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(tmp_path / "m", item_handlers=handler) as manager:
        manager.save(7, args=ocp.args.StandardSave(TREE))
        manager.wait_until_finished()
    step = tmp_path / "m" / "7"
    (step / "pytorch_model.bin").write_bytes(b"other")
    checkpoint = ucp.open(step)
    assert "not read: pytorch_model.bin: weights beside the checkpoint" in checkpoint.notes
    skipped = [item.where for item in checkpoint.inventory if item.status == "skipped"]
    assert skipped == ["pytorch_model.bin"]
    shutil.rmtree(step / "default")
    with pytest.raises(NotACheckpoint, match="is a step without a PyTree item"):
        ucp.open(step)


def test_an_item_of_a_step_that_lies_too_deep_is_named(tmp_path):
    step = tmp_path / "step"
    (step / "state").mkdir(parents=True)
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    stock(step / "state" / "state", True, True)
    with pytest.raises(NotACheckpoint, match=r"step/state/state is one, a folder too deep"):
        ucp.open(step)


@pytest.mark.parametrize("item", [True, False], ids=["with an item", "without"])
def test_a_marker_of_a_step_that_is_a_folder_is_no_step(item, tmp_path):
    """As a copy leaves it that puts a file into a folder of its name."""
    step = tmp_path / "7"
    marker = step / "_CHECKPOINT_METADATA"
    marker.mkdir(parents=True)
    (marker / marker.name).write_text("{}")
    if item:
        stock(step / "state", True, True)
    with pytest.raises(NotACheckpoint, match="_CHECKPOINT_METADATA is a folder, but should be"):
        ucp.open(step)


def test_only_what_can_be_a_step_is_called_one(tmp_path):
    for name in ("7", "step_12", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_CHECKPOINT_METADATA").write_text("{}")
    stock(tmp_path / "best" / "state", True, True)
    (tmp_path / "best" / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(NotACheckpoint, match=r"holds the steps 7, best, step_12: open one, .*12$"):
        ucp.open(tmp_path)


@pytest.mark.parametrize("case", ["plain", "ocdbt", "zarr3/state"])
def test_keys_without_the_file_that_says_so_are_not_taken_for_numbers(case, tmp_path):
    at = tmp_path / "c"
    shutil.copytree(Path(__file__).parents[2] / "data" / "orbax" / case, at)
    assert {leaf.kind for leaf in ucp.open(at).leaves if leaf.label == "rng"} == {"prng_key"}
    shutil.rmtree(at / "array_metadatas")
    with pytest.raises(FormatError, match=r"array_metadatas has nothing of rng.*Copy the folder"):
        ucp.open(at)


def test_a_tree_without_anything_like_keys_opens_without_that_file(tmp_path):
    stock(tmp_path / "c", ocdbt=False, zarr3=False)
    shutil.rmtree(tmp_path / "c" / "array_metadatas", ignore_errors=True)
    np.testing.assert_array_equal(ucp.open(tmp_path / "c").restore()["a"], TREE["a"])
