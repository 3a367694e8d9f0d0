"""DeepSpeed's universal folders, against the state that was taken from the live processes before
the save.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import names_of
from jax_ucp.errors import FormatError
from torch_writer import edit

DATA = CASES_DATA / "deepspeed_universal"
CASES = names_of("deepspeed_universal")


def test_universal_and_native_give_the_same_tree():
    native, atoms = ucp.open(DATA.parent / "deepspeed" / CASES[0]), ucp.open(DATA / CASES[0])
    assert {leaf.label: leaf.shape for leaf in native.leaves} == {
        leaf.label: leaf.shape for leaf in atoms.leaves
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(DATA / "tp2_dp1_z1_fp32_gqa", tmp_path / "u")
    return tmp_path / "u" / "global_step5_universal"


def test_what_lies_beside_is_accounted_for_at_every_level_and_weights_are_noted(folder):
    for name in (
        "model.safetensors", "zero/notes.txt", "zero/final_layernorm.bias/._fp32.pt", "copy (1).pt",
    ):  # fmt: skip
        (folder / name).write_bytes(b"\0\5\x16\7")
    for path in (folder, folder.parent):
        checkpoint = ucp.open(path)
        skipped = {
            item.where for item in checkpoint.inventory if item.reason.startswith("lies beside")
        }
        assert skipped == {
            "model.safetensors",
            "zero/notes.txt",
            "zero/final_layernorm.bias/._fp32.pt",
            "copy (1).pt",
        }
        assert "not read: model.safetensors: weights beside the checkpoint" in checkpoint.notes


@pytest.mark.parametrize("what", ["moments", "no betas", "Muon's group", "before the first step"])
def test_moments_are_missed_where_the_optimizer_has_stepped_and_has_betas(folder, what):
    """Without betas, or in a group of Muon, a state may be absent of all parameters."""
    for path in folder.glob("zero/*/exp_avg*.pt"):
        path.unlink()

    def settings(tree: Any) -> None:
        for group in tree["param_groups"]:
            if what == "no betas":
                del group["betas"]
            if what == "Muon's group":
                group["use_muon"] = True

    def counters(tree: Any) -> None:
        if what == "before the first step":
            tree["global_steps"] = 0

    edit(folder / "zero" / "optimizer_state.pt", settings)
    for path in folder.glob("mp_rank_*_model_states.pt"):
        edit(path, counters)
    if what == "moments":
        with pytest.raises(FormatError, match=r"exp_avg\.pt is missing of all parameters"):
            ucp.open(folder)
    else:
        assert not {"exp_avg", "exp_avg_sq"} & {leaf.state for leaf in ucp.open(folder).leaves}
