"""Notes on what no checksum shows: steps that differ between parameters, files that end in zeros."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA
from commands import run, run_json
from dcp_writer import Writer
from helpers import faults_of
from jax_ucp.arrays import suspicions
from jax_ucp.layout.box import Box
from safetensors_writer import write_safetensors
from torch_writer import legacy, save

STEPS, ZEROS = "steps differ between parameters", "ends in zeros"
WEIGHTS = {f"layers.{i}.weight": np.full((3, 4 + i), i + 1, np.float32) for i in range(4)}
Steps = Mapping[str, float]


def states(steps: Steps) -> dict[str, dict[str, np.ndarray]]:
    return {
        name: {
            "step": np.array(steps[name], np.float32),
            "exp_avg": weight,
            "exp_avg_sq": weight**2,
        }
        for name, weight in WEIGHTS.items()
    }


def numbered(steps: Steps) -> dict:
    group = {"lr": 0.1, "betas": (0.9, 0.999), "params": [*range(len(WEIGHTS))]}
    return {"state": dict(enumerate(states(steps).values())), "param_groups": [group]}


def dcp(folder: Path, steps: Steps) -> Path:
    """Two ranks, each with the parameters of a pipeline stage."""
    writer = Writer(folder / "dcp")
    for i, (name, state) in enumerate(states(steps).items()):
        file = f"__{i // 2}_0.distcp"
        tensors = {("model", name): WEIGHTS[name]}
        tensors |= {("optim", "state", name, key): value for key, value in state.items()}
        for path, value in tensors.items():
            array = np.asarray(value)
            writer.paths[".".join(path)] = path
            writer.tensor(".".join(path), array, [(file, Box.whole(array.shape))])
    return writer.finish()


def torch_file(folder: Path, steps: Steps) -> Path:
    save({"model": WEIGHTS, "optimizer": numbered(steps)}, folder / "run.pt")
    return folder / "run.pt"


def unpaired(folder: Path, steps: Steps) -> Path:
    """An optimizer of another number of parameters, so that its states stay under numbers."""
    model = {**WEIGHTS, "more": np.ones((3, 9), np.float32)}
    save({"model": model, "optimizer": numbered(steps)}, folder / "run.pt")
    return folder / "run.pt"


def lightning(folder: Path, steps: Steps) -> Path:
    run = {"state_dict": WEIGHTS, "optimizer_states": [numbered(steps)], "global_step": 5}
    save({**run, "pytorch-lightning_version": "2.5.0"}, folder / "run.ckpt")
    return folder / "run.ckpt"


def universal(folder: Path, steps: Steps) -> Path:
    ucp.open(torch_file(folder, steps)).save(folder / "universal")
    return folder / "universal"


@pytest.mark.parametrize("write", [dcp, torch_file, unpaired, lightning, universal])
def test_steps_that_differ_are_noted_with_their_parameters_and_equal_ones_are_not(write, tmp_path):
    equal, mixed = (dict.fromkeys(WEIGHTS, 5.0) for _ in range(2))
    mixed["layers.2.weight"] = mixed["layers.3.weight"] = 3.0
    for name, steps in (("equal", equal), ("mixed", mixed)):
        (tmp_path / name).mkdir()
        checkpoint = ucp.open(write(tmp_path / name, steps))
        found = [note for note in checkpoint.notes if STEPS in note]
        assert len(found) == (name == "mixed")
        assert faults_of(checkpoint) == []
    (note,) = found
    assert "3 of 2, as " in note
    assert "5 of 2, as " in note


def test_the_files_of_each_step_are_named_and_every_command_has_the_note(tmp_path):
    steps = dict(zip(WEIGHTS, (3.0, 3.0, 5.0, 5.0), strict=True))
    folder = dcp(tmp_path, steps)
    of = "of 2, as optim.state.layers"
    note = f"3 {of}.0.weight.step in __0_0.distcp; 5 {of}.2.weight.step in __1_0.distcp"
    assert note in "".join(ucp.open(folder).notes)
    for command in ("inspect", "verify"):
        assert any(note in said for said in run_json(command, folder)["notes"])
        assert STEPS in " ".join(run(command, folder).split())
    run("report", folder, "--output", tmp_path / "page.html")
    assert STEPS in (tmp_path / "page.html").read_text()


def test_a_step_that_cannot_be_read_is_a_fault_of_verify_and_no_error_of_notes(tmp_path):
    folder = dcp(tmp_path, dict.fromkeys(WEIGHTS, 5.0))
    whole = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(bytes(len(whole)))
    checkpoint = ucp.open(folder)
    assert not [note for note in checkpoint.notes if STEPS in note]
    assert faults_of(checkpoint)


def test_of_many_steps_a_sample_at_even_distances_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(suspicions, "MAX_READS", 2)
    steps = dict(zip(WEIGHTS, (3.0, 3.0, 5.0, 5.0), strict=True))
    (note,) = (note for note in ucp.open(dcp(tmp_path, steps)).notes if STEPS in note)
    assert "3 of 1, as optim.state.layers.0.weight" in note
    assert "5 of 1, as optim.state.layers.2.weight" in note


def hub_folder(folder: Path) -> tuple[Path, Path]:
    shutil.copytree(DATA / "torch" / "hf_llama" / "ckpt", folder / "hub")
    return folder / "hub", folder / "hub" / "model-00002-of-00004.safetensors"


def hf_writer(folder: Path) -> tuple[Path, Path]:
    shutil.copytree(DATA / "torch" / "dcp_hf_sharded" / "ckpt", folder / "hf")
    return folder / "hf", folder / "hf" / "shard-00002-model-00001-of-00001.safetensors"


def gguf(folder: Path) -> tuple[Path, Path]:
    (source,) = (DATA / "gguf" / "llama_f32").rglob("*.gguf")
    return (file := Path(shutil.copy(source, folder / "model.gguf"))), file


def old_torch(folder: Path) -> tuple[Path, Path]:
    """The format before torch 1.6, which has no checksums."""
    file = folder / "model.pt"
    file.write_bytes(legacy({f"w{i}": np.full((64, 4**i), i + 1, np.float32) for i in range(4)}))
    return file, file


def items(folder: Path) -> tuple[Path, Path]:
    path = dcp(folder, dict.fromkeys(WEIGHTS, 5.0))
    return path, path / "__0_0.distcp"


WRITERS: list[Callable[[Path], tuple[Path, Path]]] = [hub_folder, hf_writer, gguf, old_torch, items]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kept", [0.6, 0.7])
def test_a_file_that_ends_in_zeros_is_noted_by_every_command(write, kept, tmp_path):
    path, file = write(tmp_path)
    assert not [note for note in ucp.open(path).notes if ZEROS in note]
    data = file.read_bytes()
    zeros = len(data) - int(kept * len(data))
    file.write_bytes(data[:-zeros] + bytes(zeros))
    (note,) = (note for note in ucp.open(path).notes if ZEROS in note)
    assert str(file) in note
    assert note in run_json("inspect", path)["notes"]
    assert ZEROS in run("verify", path, code=int(write is items))
    run("report", path, "--output", tmp_path / "page.html", code=int(write is items))


@pytest.mark.parametrize("write", WRITERS)
def test_few_zeros_at_the_end_of_a_file_are_usual(write, tmp_path):
    path, file = write(tmp_path)
    data = file.read_bytes()
    zeros = len(data) // 8
    file.write_bytes(data[:-zeros] + bytes(zeros))
    assert not [note for note in ucp.open(path).notes if ZEROS in note]


def test_a_file_of_one_sector_is_never_half_written(tmp_path):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"w": np.zeros(40, np.float32)})
    assert not [note for note in ucp.open(file).notes if ZEROS in note]
