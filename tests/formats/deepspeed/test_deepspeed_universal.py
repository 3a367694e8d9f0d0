"""DeepSpeed's universal folders, against the state that was taken from the live processes."""

from pathlib import Path
from typing import Any

import pytest

import jax_ucp as ucp
from cases import Case
from jax_ucp.errors import FormatError
from torch_writer import edit


@pytest.fixture
def folder(tmp_path) -> Path:
    copied = Case("deepspeed_universal/tp2_dp1_z1_fp32_gqa").copied(tmp_path / "u")
    return copied / "global_step5_universal"


def test_what_lies_beside_is_accounted_for_at_every_level_and_weights_are_noted(folder):
    names = {"model.safetensors", "zero/notes.txt", "copy (1).pt"}
    names.add("zero/final_layernorm.bias/._fp32.pt")
    for name in names:
        (folder / name).write_bytes(b"\0\5\x16\7")
    for path in (folder, folder.parent):
        checkpoint = ucp.open(path)
        skipped = {x.where for x in checkpoint.inventory if x.reason.startswith("lies beside")}
        assert skipped == names
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
