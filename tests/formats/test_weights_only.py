"""`weights_only` neither reads nor needs what it leaves out: optimizer files that are damaged,
missing or another's.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import Case
from dcp_writer import Writer
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.files.path import file_path
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.layout.box import Box
from torch_writer import save

DATA = Path(__file__).parent.parent / "data"
WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}


def arrays(checkpoint: ucp.Checkpoint) -> dict[str, np.ndarray]:
    return {leaf.label: checkpoint.read(leaf.label).copy() for leaf in checkpoint.leaves}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    """One bit of the elements of the first tensor that is the optimizer's."""
    file = TorchFile(path)
    key = next(key for key in file.arrays() if key.startswith("optim") and key.endswith("exp_avg"))
    stored = file.read(key, Box.whole(file.arrays()[key].shape)).tobytes()
    data = path.read_bytes()
    assert data.count(stored) == 1
    at = data.index(stored)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


DAMAGE: dict[str, Callable[[Path], None]] = {"missing": Path.unlink, "cut": cut, "empty": emptied}

# Files of the optimizer alone, and whether the weights without them are the module's own, rounded
# ones.
ALONE = {
    "megatron/legacy_tp2_dp2_distopt_bf16": r"distrib_optim\.pt",
    "megatron/legacy_ep2_moe_seq_distopt_fp32": r"distrib_optim\.pt",
    "deepspeed/moe_ep2_dp2_z0_fp32": r"expp_rank_.*",
    "deepspeed_universal/tp2_dp1_z1_fp32_gqa": r"exp_avg(_sq)?\.pt|step\.pt|optimizer_state\.pt",
    "deepspeed_universal/z3_bf16_dp2_frozen_tied": r"exp_avg(_sq)?\.pt|optimizer_state\.pt",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("case", ALONE)
def test_files_of_the_optimizer_alone_need_not_be_there(case, damage, tmp_path):
    folder = Case(case).copied(tmp_path / "c")
    want = arrays(ucp.open(folder, weights_only=True))
    paths = [path for path in folder.rglob("*.pt") if re.fullmatch(ALONE[case], path.name)]
    assert paths
    for path in paths:
        DAMAGE[damage](path)
    checkpoint = ucp.open(folder, weights_only=True)
    found = arrays(checkpoint.save(tmp_path / "copy"))
    assert found.keys() == want.keys()
    assert all(same_bits(found[label], array) for label, array in want.items())
    with pytest.raises(UCPError):
        ucp.open(folder).save(tmp_path / "whole")


MASTERS = (
    "deepspeed/z1_bf16_dp2",
    "deepspeed/z2_fp32_dp3_roundrobin",
    "deepspeed/tp2_dp2_z1_bf16_swiglu",
)
MASTERS += ("deepspeed/moe_ep2_dp2_z1_bf16",)


def of_another_size(path: Path) -> None:
    """As of a run whose parameters were others."""
    tree = {
        "optimizer_state_dict": {"base_optimizer_state": {"state": {}}, "partition_count": [2, 2]}
    }
    tree["optimizer_state_dict"]["single_partition_of_fp32_groups"] = [np.zeros(8, np.float32)] * 2
    save(tree, path)


@pytest.mark.parametrize("damage", [*DAMAGE, "of another size"])
@pytest.mark.parametrize("case", MASTERS)
def test_weights_are_the_modules_own_where_the_masters_cannot_be_read(case, damage, tmp_path):
    folder = Case(case).copied(tmp_path / "c")
    want = arrays(ucp.open(folder, weights_only=True))
    (path,) = folder.rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    (DAMAGE | {"of another size": of_another_size})[damage](path)
    with pytest.raises(
        UCPError, match=re.escape(path.name) if damage != "of another size" else "group"
    ):
        ucp.open(folder)
    checkpoint = ucp.open(folder, weights_only=True)
    found = arrays(checkpoint)
    assert found.keys() == want.keys()
    for label, array in want.items():
        assert same_bits(array.astype(found[label].dtype), found[label]), label
    (note,) = [
        note for note in checkpoint.notes if "their masters were left aside, because" in note
    ]
    assert "the weights are the module's own" in note
    assert path.name in note or damage == "of another size"


def test_optimizer_files_of_more_ranks_do_not_change_the_weights(tmp_path):
    """Its masters of experts have names that the module's tensors have not."""
    folder = Case("deepspeed/autoep2_dp2_z1_bf16").copied(tmp_path / "c")
    want = arrays(ucp.open(folder, weights_only=True))
    (first, *_) = sorted(folder.rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    shutil.copy(first, first.with_name(first.name.replace("mp_rank_00", "mp_rank_01")))
    got = arrays(ucp.open(folder, weights_only=True))
    assert got.keys() == want.keys()
    assert all(same_bits(got[label], want[label]) for label in want)
    with pytest.raises(FormatError, match="belongs to another run"):
        ucp.open(folder)


def test_zero_3_keeps_the_weights_in_these_files_and_says_so(tmp_path):
    folder = Case("deepspeed/z3_fp16_dp2_subgroups").copied(tmp_path / "c")
    (path,) = folder.rglob("zero_pp_rank_1_mp_rank_00_optim_states.pt")
    path.unlink()
    with pytest.raises(UCPError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is missing"):
        ucp.open(folder, weights_only=True)


@pytest.mark.parametrize(("case", "file"), [
    ("deepspeed/z0_fp32_dp2", "mp_rank_00_model_states.pt"),
    ("deepspeed/z1_bf16_dp2", "*rank_1_mp_rank_00_optim*"),
])  # fmt: skip
def test_a_state_that_is_left_aside_is_not_verified(case, file, tmp_path):
    folder = Case(case).copied(tmp_path / "c")
    want = arrays(ucp.open(folder, weights_only=True))
    (path,) = folder.rglob(file)
    flipped(path)
    found = arrays(ucp.open(folder, weights_only=True).save(tmp_path / "copy"))
    assert all(same_bits(found[label], array) for label, array in want.items())
    with pytest.raises(UCPError, match="do not have the CRC"):
        ucp.open(folder).save(tmp_path / "whole")


def test_the_optimizer_of_a_trainers_file_is_not_verified(tmp_path):
    states = {0: {"exp_avg": WEIGHTS["a"] + 7}, 1: {"exp_avg": WEIGHTS["b"] + 7}}
    groups = [{"params": [0, 1], "param_names": ["a", "b"]}]
    save(
        {"model": WEIGHTS, "optim": {"state": states, "param_groups": groups}}, tmp_path / "run.pt"
    )
    flipped(tmp_path / "run.pt")
    found = arrays(ucp.open(tmp_path / "run.pt", weights_only=True).save(tmp_path / "copy"))
    assert found.keys() == {"param/a", "param/b"}
    assert all(same_bits(found[f"param/{name}"], array) for name, array in WEIGHTS.items())
    with pytest.raises(UCPError, match="do not have the CRC"):
        ucp.open(tmp_path / "run.pt").save(tmp_path / "whole")


def dcp(folder: Path) -> Path:
    writer = Writer(folder)
    for name, array in WEIGHTS.items():
        for fqn, file, value in (
            (f"model.{name}", 0, array),
            (f"optim.state.{name}.exp_avg", 1, array + 1),
        ):
            writer.tensor(fqn, value, [(f"__{file}_0.distcp", Box.whole(value.shape))])
            writer.paths[fqn] = (
                ("model", name) if file == 0 else ("optim", "state", name, "exp_avg")
            )
    writer.object("optim.param_groups", "__1_0.distcp", [{"lr": 0.1}])
    writer.paths["optim.param_groups"] = ("optim", "param_groups")
    return writer.finish()


@pytest.mark.parametrize("damage", DAMAGE)
def test_items_of_the_optimizer_need_not_be_there(damage, tmp_path):
    folder = dcp(tmp_path / "c")
    DAMAGE[damage](folder / "__1_0.distcp")
    found = arrays(ucp.open(folder, weights_only=True).save(tmp_path / "copy"))
    assert found.keys() == {"param/a", "param/b"}
    assert all(same_bits(found[f"param/{name}"], array) for name, array in WEIGHTS.items())
    with pytest.raises(UCPError, match=r"__1_0\.distcp"):
        ucp.open(folder)


def test_arrays_of_megatrons_optimizer_need_not_be_there(tmp_path):
    folder = Case("megatron/old0153_tp2_zarr_fp32").copied(tmp_path / "c")
    want = arrays(ucp.open(folder, weights_only=True))
    left = [path for path in folder.glob("iter_*/optimizer.state.*") if path.is_dir()]
    assert left
    for path in left[::2]:
        (path / ".zarray").write_text("{}")
    for path in left[1::2]:
        next(chunk for chunk in path.iterdir() if chunk.name != ".zarray").unlink()
    found = arrays(ucp.open(folder, weights_only=True).save(tmp_path / "copy"))
    assert found.keys() == want.keys()
    assert all(same_bits(found[label], array) for label, array in want.items())


def test_items_of_megatrons_optimizer_are_not_verified(tmp_path):
    folder = Case("megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16").copied(tmp_path / "c")
    want = arrays(ucp.open(folder, weights_only=True))
    inner = folder / "iter_0000003"
    spans = [span for fqn, span in read_metadata(file_path(inner)).spans() if "optimizer." in fqn]
    assert spans
    for span in spans:
        with (inner / span.file).open("r+b") as file:
            file.seek(span.offset)
            file.write(bytes(span.length))
    found = arrays(ucp.open(folder, weights_only=True).save(tmp_path / "copy"))
    assert all(same_bits(found[label], array) for label, array in want.items())
    with pytest.raises(UCPError, match=r"\.distcp"):
        ucp.open(folder).save(tmp_path / "whole")
