"""DeepSpeed's universal folders, against the state that was taken from the live processes before the save."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from deepspeed_cases import equal, truth
from jax_ucp.errors import FormatError, NotACheckpoint

DATA = Path(__file__).parent.parent / "data" / "deepspeed_universal"
CASES = sorted(path.name for path in DATA.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_every_atom_equals_the_live_state(case, tmp_path):
    checkpoint, want = ucp.open(DATA / case), truth(case)
    assert {leaf.label for leaf in checkpoint.leaves} == set(want)
    kept = checkpoint.save(tmp_path / "converted")
    for label, array in want.items():
        assert equal(checkpoint.read(label), array, label), label
        assert equal(kept.read(label), array, label), label
    assert [fault for _, fault in checkpoint.verify() if fault] == []


@pytest.mark.parametrize("case", CASES)
def test_everything_in_the_folder_is_accounted_for_with_a_reason(case):
    account = ucp.open(DATA / case).account
    assert len({item.where for item in account}) == len(account)
    assert all(item.reason and item.reason != "not understood" for item in account)


def test_universal_and_native_give_the_same_tree():
    native, atoms = ucp.open(DATA.parent / "deepspeed" / CASES[0]), ucp.open(DATA / CASES[0])
    assert {leaf.label: leaf.shape for leaf in native.leaves} == {leaf.label: leaf.shape for leaf in atoms.leaves}


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(DATA / "tp2_dp1_z1_fp32_gqa", tmp_path / "u")
    return tmp_path / "u" / "global_step5_universal"


def test_a_missing_atom_is_named(folder):
    (folder / "zero" / "embed.position_embeddings.weight" / "fp32.pt").unlink()
    with pytest.raises(FormatError, match=r"embed\.position_embeddings\.weight/fp32\.pt is missing"):
        ucp.open(folder)


def test_an_atom_of_another_shape_is_named(folder):
    shutil.copy(folder / "zero" / "final_layernorm.gain" / "fp32.pt", folder / "zero" / "final_layernorm.bias")
    with pytest.raises(FormatError, match=r"final_layernorm\.bias/fp32\.pt has shape \(1,\).*has \(16,\)"):
        ucp.open(folder)


def test_a_folder_of_a_parameter_that_the_model_has_not_is_refused(folder):
    (folder / "zero" / "final_layernorm.bias").rename(folder / "zero" / "x")
    shutil.copytree(folder / "zero" / "x", folder / "zero" / "final_layernorm.bias")
    with pytest.raises(FormatError, match=r"zero/x is there, but the model states have no x"):
        ucp.open(folder)


def test_atoms_exchanged_between_parameters_of_one_shape_fail_verify(folder):
    zero = folder / "zero"
    for state in ("fp32", "exp_avg"):
        a, b = (zero / f"final_layernorm.{name}" / f"{state}.pt" for name in ("weight", "bias"))
        a.rename(zero / "x.pt")
        b.rename(a)
        (zero / "x.pt").rename(b)
    faults = [fault for _, fault in ucp.open(folder).verify() if fault]
    assert len(faults) == 2
    assert all(
        re.search(r"at zero/final_layernorm\.\w+/fp32\.pt:.*copy at mp_rank_00.*final_layernorm", f) for f in faults
    )


def test_weights_alone_leave_the_optimizer(folder):
    tree = ucp.open(folder, weights_only=True)
    assert {leaf.label.partition("/")[0] for leaf in tree.leaves} == {"param"}
    want = truth("tp2_dp1_z1_fp32_gqa")
    for leaf in tree.leaves:
        np.testing.assert_array_equal(tree.read(leaf.label), want[leaf.label])


def test_latest_universal_must_name_a_folder_that_is_there(folder):
    (folder.parent / "latest_universal").write_text("global_step9_universal")
    with pytest.raises(NotACheckpoint, match="names global_step9_universal"):
        ucp.open(folder.parent)
