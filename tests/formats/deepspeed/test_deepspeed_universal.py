"""DeepSpeed's universal folders, against the state that was taken from the live processes before
the save.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case, names_of
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint
from temptation_folders import resummed, stored_tensors

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


def test_a_missing_atom_is_named(folder):
    (folder / "zero" / "embed.position_embeddings.weight" / "fp32.pt").unlink()
    with pytest.raises(
        FormatError, match=r"embed\.position_embeddings\.weight/fp32\.pt is missing"
    ):
        ucp.open(folder)


def test_an_atom_of_another_shape_is_named(folder):
    shutil.copy(
        folder / "zero" / "final_layernorm.gain" / "fp32.pt",
        folder / "zero" / "final_layernorm.bias",
    )
    with pytest.raises(
        FormatError, match=r"final_layernorm\.bias/fp32\.pt has shape \(1,\).*has \(16,\)"
    ):
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
        re.search(r"at zero/final_layernorm\.\w+/fp32\.pt:.*copy at mp_rank_00.*final_layernorm", f)
        for f in faults
    )


def test_states_exchanged_within_a_parameter_are_refused_by_the_names_inside(folder):
    atom = folder / "zero" / "layers.0.mlp.dense_h_to_4h.weight"
    first = (atom / "exp_avg.pt").read_bytes()
    shutil.copy(atom / "exp_avg_sq.pt", atom / "exp_avg.pt")
    (atom / "exp_avg_sq.pt").write_bytes(first)
    with pytest.raises(FormatError, match=r"exp_avg\.pt was written as exp_avg_sq\.pt"):
        ucp.open(folder)


def test_weights_alone_leave_the_optimizer(folder):
    tree = ucp.open(folder, weights_only=True)
    assert {leaf.label.partition("/")[0] for leaf in tree.leaves} == {"param"}
    want = Case("deepspeed_universal/tp2_dp1_z1_fp32_gqa").truth()
    for leaf in tree.leaves:
        np.testing.assert_array_equal(tree.read(leaf.label), want[leaf.label])


def test_latest_universal_must_name_a_folder_that_is_there(folder):
    (folder.parent / "latest_universal").write_text("global_step9_universal")
    with pytest.raises(NotACheckpoint, match="names global_step9_universal"):
        ucp.open(folder.parent)


# Atoms of another save.


@pytest.fixture(params=["z3_bf16_dp2_frozen_tied", "autoep2_dp4_z3_fp32"])
def zero3(request, tmp_path) -> Path:
    shutil.copytree(DATA / request.param, tmp_path / "u")
    return tmp_path / "u" / "global_step5_universal"


@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq"])
def test_every_atom_of_zero3_is_compared_with_what_rank_0_left_of_it(zero3, state):
    shapes = {
        len(path.read_bytes()): path.parent for path in sorted(zero3.glob(f"zero/*/{state}.pt"))
    }
    for folder in shapes.values():
        whole = (folder / f"{state}.pt").read_bytes()
        (folder / f"{state}.pt").write_bytes(doubled(whole))
        for extent in ("sample", "full"):
            with pytest.raises(CorruptData, match=rf"zero/{re.escape(folder.name)}/{state}\.pt"):
                ucp.open(zero3).restore(verify=extent)
        (folder / f"{state}.pt").write_bytes(whole)
    assert [fault for _, fault in ucp.open(zero3).verify() if fault] == []


def doubled(data: bytes) -> bytes:
    """A file of torch.save whose tensor has other values."""
    (tensor,) = stored_tensors({"f.pt": data})
    values = tensor.read({"f.pt": data})
    return resummed(
        data[: tensor.start] + (values * 2 + 1).astype(values.dtype).tobytes() + data[tensor.stop :]
    )


def test_the_state_of_rank_0_of_another_run_is_refused(zero3):
    has_experts = (zero3 / "zero" / "lm_head.weight").is_dir()
    other = "z3_bf16_dp2_frozen_tied" if has_experts else "autoep2_dp4_z3_fp32"
    shutil.copy(DATA / other / "global_step5_universal/zero/optimizer_state.pt", zero3 / "zero")
    with pytest.raises(
        FormatError, match=r"optimizer_state\.pt.*(has \d parameter groups|of another run)"
    ):
        ucp.open(zero3)


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("case", CASES)
def test_a_moment_that_all_parameters_lack_is_named(case, state, tmp_path):
    shutil.copytree(DATA / case, tmp_path / "u")
    for path in tmp_path.glob(f"u/*/zero/*/{state}.pt"):
        path.unlink()
    with pytest.raises(FormatError, match=rf"{state}\b.*\.pt is missing"):
        ucp.open(tmp_path / "u")
    assert {
        leaf.label.split("/")[0] for leaf in ucp.open(tmp_path / "u", weights_only=True).leaves
    } == {"param"}


def test_an_atom_of_the_other_form_is_of_another_checkpoint(folder):
    name = "layers.0.input_layernorm.bias/exp_avg.pt"
    bare = DATA / "autoep2_dp4_z3_fp32/global_step5_universal/zero/model.norm.bias/exp_avg.pt"
    shutil.copy(bare, folder / "zero" / name)
    with pytest.raises(FormatError, match=r"the form of the atoms is a .*, but a .* in zero/"):
        ucp.open(folder)


def test_what_is_no_file_of_torch_in_an_atoms_place_says_what_it_is(folder):
    path = folder / "zero" / "final_layernorm.bias" / "exp_avg.pt"
    data = path.read_bytes()
    for content, what in (
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
        (b"<html>", "web page"),
    ):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=rf"exp_avg\.pt: it is a.*{what}"):
            ucp.open(folder)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(
        FormatError, match=r"exp_avg\.pt: it is a link to nowhere, which does not exist"
    ):
        ucp.open(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(FormatError, match=r"exp_avg\.pt: it is a folder"):
        ucp.open(folder)
    path.rmdir()
    path.write_bytes(data)
    ucp.open(folder)


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


def test_an_atom_that_is_a_mean_lies_between_what_it_is_the_mean_of(folder):
    """The ranks' own copies of a norm, which tensor parallelism does not cut."""
    names = [path.parent.name for path in sorted(folder.glob("zero/*layernorm*/fp32.pt"))]
    alike = [name for name in names if name.endswith("weight") or name.endswith("bias")]
    for name in alike:
        path = folder / "zero" / name / "fp32.pt"
        whole = path.read_bytes()
        path.write_bytes(doubled(whole))
        for extent in ("sample", "full"):
            with pytest.raises(CorruptData, match=rf"param/{re.escape(name)}.*(between|rounded)"):
                ucp.open(folder).restore(verify=extent)
        path.write_bytes(whole)
    ucp.open(folder).restore(verify="full")
