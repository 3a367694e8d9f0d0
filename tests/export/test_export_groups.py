"""Torch's `param_groups` in exports: what an optimizer was told for each parameter."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import Case
from helpers import contents_of, in_lanes
from jax_ucp.arrays.optimizer_groups import Group, groups_of
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.files.path import file_path
from jax_ucp.formats.exporting import export_target, plan_export
from jax_ucp.jobs.run import run

DATA = Path(__file__).parents[1] / "data"
NAMES = ("a.weight", "a.bias", "norm", "head")

# One source for each way in which groups are stored: by place, by name, by number with names, as
# ZeRO-0 and ZeRO-3 do.
CASES = ["deepspeed/z0_fp32_dp2", "deepspeed/z1_fp32_dp2_sgd", "deepspeed/z3_fp16_dp2_subgroups"]
CASES += ["deepspeed/moe_ep2_dp2_z1_bf16", "deepspeed/z2_bf16_dp2_frozen_tied"]
CASES += ["torch/dcp_named_optimizer"]
CASES += ["torch/fsdp2_dp4_uneven", "torch/titan_flat"]
CASES += ["deepspeed_universal/z3_bf16_dp2_frozen_tied"]
TARGETS = [("dcp", None), ("deepspeed", 1), ("deepspeed", 3)]


@pytest.mark.parametrize(("format", "stage"), TARGETS)
@pytest.mark.parametrize("case", in_lanes([(case,) for case in CASES]))
def test_an_export_says_of_each_parameter_what_its_source_says(case, format, stage, tmp_path):
    source = Case(case).open()
    exported = source.export(tmp_path / "once", format, zero_stage=stage)
    again = exported.export(tmp_path / "twice", format, zero_stage=stage)
    assert len(source.groups) > 1
    assert list(source.groups) == list(exported.groups) == list(again.groups)


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(1 << 70), 1 << 70)
SETTINGS = st.dictionaries(
    st.sampled_from(["lr", "betas", "weight_decay", "fused", "name", "state"]),
    NUMBERS | st.none() | st.booleans() | st.text(max_size=3) | st.lists(NUMBERS, max_size=2),
    max_size=3,
)


def told(said: dict[str, dict], moments: bool = True) -> ucp.Checkpoint:
    """A checkpoint of four parameters, of which `said` says what the optimizer was told."""
    states = ("param", "exp_avg") if moments else ("param",)
    arrays = [np.full((2, 3), i, np.float32) for i in range(len(NAMES))]
    tree = {state: dict(zip(NAMES, arrays, strict=True)) for state in states}
    return ucp.Checkpoint(replace(contents_of(tree), groups=groups_of(said)))


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(NAMES), SETTINGS), st.booleans(), st.sampled_from(TARGETS))
def test_any_settings_of_any_parameters_come_back(tmp_path_factory, said, moments, target):
    source = told(said, moments)
    format, stage = target
    exported = source.export(tmp_path_factory.mktemp("law") / "out", format, zero_stage=stage)
    assert list(exported.groups) == list(source.groups)


@pytest.mark.parametrize(
    ("format", "instead"), [("dcp", "has no settings"), ("deepspeed", "own groups stay")]
)
def test_what_nothing_says_is_not_invented(format, instead, tmp_path):
    some = told({"norm": {"lr": 0.1}})
    notes = some.plan_export(format).notes
    (note,) = [note for note in notes if note.startswith("nothing says what")]
    assert "told for 3 parameters, the first a.weight" in note
    assert instead in note
    assert list(some.export(tmp_path / "some", format).groups) == [Group(("norm",), {"lr": 0.1})]
    assert list(told({}).export(tmp_path / "none", format).groups) == []
    every = told({name: {"lr": 0.1} for name in NAMES})
    notes = every.plan_export(format).notes
    assert not [note for note in notes if note.startswith("nothing says what")]


def test_groups_follow_a_mapping_to_its_names(tmp_path):
    source = ucp.open(DATA / "torch" / "fsdp2_dp4_uneven" / "ckpt")
    rules = [{"param": name, "leaf": f"my.{name}"} for name in source.params]
    renamed = ucp.Mapping.from_dict({"leaves": rules})
    exported = source.map(renamed).export(tmp_path / "out", "dcp")
    mine = [tuple(f"my.{name}" for name in group.params) for group in source.groups]
    want = [Group(mine[i], group.settings) for i, group in enumerate(source.groups)]
    assert list(exported.groups) == want
    objects = {name: value for some in exported.extras.values() for name, value in some.items()}
    lists = [value for name, value in objects.items() if name.endswith(".params")]
    wanted = sorted(name for group in want for name in group.params)
    assert sorted(name for some in lists for name in some) == wanted


def test_a_run_of_jax_keeps_the_groups_of_its_parameters():
    params = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    tx = optax.adamw(1e-3)
    run = ucp.Checkpoint.of({"params": params, "opt_state": tx.init(params)})
    groups = [Group(("w",), {"lr": 0.1}), Group(("b",), {"lr": 0.2})]
    states = ucp.Checkpoint(replace(run._contents, groups=groups)).torch_states(tx)
    assert list(states.groups) == groups


def optimizer_state(folder: Path) -> dict:
    (file,) = folder.glob("*/zero/optimizer_state.pt")
    tree = TorchFile(file).tree
    assert isinstance(tree, dict)
    return tree


def test_deepspeed_is_given_the_groups_of_its_source_in_order_and_more_than_a_run_has(tmp_path):
    """Two groups alike are one to us; to the loader, which goes by order, they are two."""
    alike = {"lr": 0.1, "betas": {"!tuple": [0.9, 0.95]}}
    words = [alike, {**alike}, {"lr": 0.3}]
    extras = {"bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": {"param_groups": words}}
    alike = {"lr": 0.1, "betas": [0.9, 0.95]}
    settings = {"a.weight": alike, "a.bias": alike, "norm": {"lr": 0.3}}
    checkpoint = told(settings | {"head": {"lr": 0.3}})
    contents = replace(checkpoint._contents, extras=extras)
    plan = plan_export(contents, "deepspeed", zero_stage=1)
    run(export_target(contents, plan, file_path(tmp_path / "out")))
    groups = optimizer_state(tmp_path / "out")["param_groups"]
    assert len(groups) == 256
    assert [group.get("lr") for group in groups[:4]] == [0.1, 0.1, 0.3, None]
    assert groups[0]["betas"] == (0.9, 0.95)
    assert list(ucp.open(tmp_path / "out").groups) == list(checkpoint.groups)


def test_zero_3_which_takes_the_first_group_for_all_is_given_what_all_agree_on(tmp_path):
    decay = {"a.weight": 0.1, "a.bias": 0.0, "norm": 0.0, "head": 0.1}
    settings = {name: {"lr": 0.1, "weight_decay": rate} for name, rate in decay.items()}
    told(settings).export(tmp_path / "out", "deepspeed", zero_stage=3)
    state = optimizer_state(tmp_path / "out")["optimizer_state_dict"]
    assert state["param_groups"] == [{"lr": 0.1, "params": []}]


def test_groups_that_are_written_are_not_said_to_be_left_out():
    source = ucp.open(DATA / "torch" / "fsdp2_tp_2x2_uneven" / "ckpt")
    names = [name for some in source.extras.values() for name in some]
    assert all("param_groups" in name for name in names)
    assert f"{len(names)} extras are left out" in "\n".join(source.plan_export("safetensors").notes)
    assert "extras are left out" not in "\n".join(source.plan_export("deepspeed").notes)


def test_deepspeed_users_are_told_that_the_order_counts():
    source = ucp.open(DATA / "torch" / "fsdp2_tp_2x2" / "ckpt")
    notes = "\n".join(source.plan_export("deepspeed").notes)
    firsts = ", ".join(group.params[0] for group in source.groups)
    assert f"those of the run must begin with {firsts}" in notes
    own = ucp.open(DATA / "deepspeed" / "z1_fp32_dp4").plan_export("deepspeed").notes
    assert "must begin with" not in "\n".join(own)


def test_no_group_is_written_for_deepspeed_whose_parameters_differ_in_their_step(tmp_path):
    """Its loader asserts so (`load_hp_checkpoint_state_from_checkpoint_dir`, DeepSpeed 0.19.8)."""
    ones = {name: np.ones(3, np.float32) for name in NAMES}
    steps = {name: np.array(5 + (name == "norm"), np.float32) for name in NAMES}
    contents = contents_of({"param": ones, "exp_avg": ones, "step": steps})
    groups = groups_of({name: {"lr": float(name == "norm")} for name in NAMES})
    apart = ucp.Checkpoint(replace(contents, groups=groups))
    both = r".* 5\.0 of head, 6\.0 of norm\nExport"
    with pytest.raises(UnsupportedLeaf, match=f"ZeRO-3 has one step{both} for ZeRO-1 or 2"):
        apart.plan_export("deepspeed", zero_stage=3)
    assert float(apart.export(tmp_path / "apart", "deepspeed", zero_stage=2).read("step/norm")) == 6
    groups = groups_of({name: {"lr": 0.1} for name in NAMES})
    together = ucp.Checkpoint(replace(contents, groups=groups))
    for stage in (1, 2, 3):
        with pytest.raises(UnsupportedLeaf, match=f"no group whose parameters{both} to another"):
            together.plan_export("deepspeed", zero_stage=stage)
