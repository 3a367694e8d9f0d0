"""DeepSpeed's universal folders, against the state that was taken from the live processes before
the save.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case, names_of

DATA = CASES_DATA / "deepspeed_universal"
CASES = names_of("deepspeed_universal")


@pytest.mark.parametrize("case", CASES)
def test_every_atom_equals_the_live_state(case, tmp_path):
    live = Case(f"deepspeed_universal/{case}")
    checkpoint, want = live.open(), live.truth()
    assert {leaf.label for leaf in checkpoint.leaves} == set(want)
    kept = checkpoint.save(tmp_path / "converted")
    for label, array in want.items():
        assert live.equal(checkpoint.read(label), array, label), label
        assert live.equal(kept.read(label), array, label), label
    assert [fault for _, fault in checkpoint.verify() if fault] == []


@pytest.mark.parametrize("case", CASES)
def test_everything_in_the_folder_is_accounted_for_with_a_reason(case):
    inventory = ucp.open(DATA / case).inventory
    assert len({item.where for item in inventory}) == len(inventory)
    assert all(item.reason and item.reason != "not understood" for item in inventory)


def test_universal_and_native_give_the_same_tree():
    native, atoms = ucp.open(DATA.parent / "deepspeed" / CASES[0]), ucp.open(DATA / CASES[0])
    assert {leaf.label: leaf.shape for leaf in native.leaves} == {
        leaf.label: leaf.shape for leaf in atoms.leaves
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(DATA / "tp2_dp1_z1_fp32_gqa", tmp_path / "u")
    return tmp_path / "u" / "global_step5_universal"


def test_weights_alone_leave_the_optimizer(folder):
    tree = ucp.open(folder, weights_only=True)
    assert {leaf.label.partition("/")[0] for leaf in tree.leaves} == {"param"}
    want = Case("deepspeed_universal/tp2_dp1_z1_fp32_gqa").truth()
    for leaf in tree.leaves:
        np.testing.assert_array_equal(tree.read(leaf.label), want[leaf.label])


def test_what_lies_beside_is_accounted_for_at_every_level_and_weights_are_noted(folder):
    for name in (
        "model.safetensors",
        "zero/notes.txt",
        "zero/final_layernorm.bias/._fp32.pt",
        "copy (1).pt",
    ):
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
