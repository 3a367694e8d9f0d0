"""Megatron's torch_dcp and fsdp_dtensor: what paths mean, gate and up, what several ranks lose.

That real ones are their live state, whole and in boxes, is in `test_megatron.py`.
"""

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import names_of
from helpers import Consolidated, MemoryStore, evaluated
from jax_ucp.errors import FormatError, LayoutError, NotACheckpoint
from jax_ucp.files.path import file_path
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.formats.dcp.source import DcpSource
from jax_ucp.formats.megatron.checks import check_whole
from jax_ucp.formats.megatron.fsdp import (
    check_alike,
    check_degrees,
    check_settings,
    regrouped,
    saved,
)
from jax_ucp.formats.megatron.marks import TRACKER
from jax_ucp.formats.megatron.model import StoredRun, join_gated
from jax_ucp.formats.megatron.run import Args
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import block_layout
from jax_ucp.layout.patterns import Fused, Sharded

DATA = CASES_DATA / "megatron"
CASES = [case for case in names_of("megatron") if case.startswith(("torch_dcp", "fsdp_dtensor"))]


@pytest.mark.parametrize("case", CASES)
def test_a_config_without_a_backend_makes_it_no_plain_dcp(megatron_copy, case):
    folder = megatron_copy(case)
    names = ucp.open(folder).params.keys()
    (folder / "metadata.json").write_text("{}")
    assert ucp.open(folder).params.keys() == names


def read(source, param):
    whole = Box.whole(param.layout.shape)
    return evaluated(source, {"x": param}).read("x", whole)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_gate_and_up_of_every_rank_become_all_gates_then_all_ups(ranks, each, columns, cut):
    shards = [(2 * each, columns)] * ranks
    values = np.arange(2 * each * ranks * columns, dtype=np.float32).reshape(-1, columns)
    pieces = np.array_split(values, 3) if cut else [values]
    source = MemoryStore({str(i): piece for i, piece in enumerate(pieces)})
    stored = Sharded(0).join([piece.shape for piece in pieces])
    by_rank = MemoryStore({str(i): rows for i, rows in enumerate(np.split(values, ranks))})
    layout = Fused(0, {"gate": each * ranks, "up": each * ranks}).join(shards)
    want = read(by_rank, Consolidated(layout, [*by_rank.arrays()]))
    got = read(source, Consolidated(regrouped(stored, ranks), [*source.arrays()]))
    np.testing.assert_array_equal(got, want)


@given(st.integers(1, 3), st.integers(1, 3))
def test_a_gate_above_its_up_is_one_tensor(rows, columns):
    gate, up = (np.full((rows, columns), i, np.float32) for i in (1, 2))
    source = MemoryStore({"gate": gate, "up": up})
    names, box = {"fc.weight_v": "up", "fc.weight_w": "gate"}, Box.whole(gate.shape)
    halves = {name: (gate.shape, [StoredRun(key, 0, box)]) for name, key in names.items()}
    [(name, (shape, runs))] = join_gated(halves).items()
    assert name == "fc.weight"
    layout = block_layout(shape, [run.target for run in runs])
    got = read(source, Consolidated(layout, [run.key for run in runs]))
    np.testing.assert_array_equal(got, np.concatenate([gate, up]))


def test_a_gate_of_another_shape_than_its_up_is_refused():
    shapes = {"fc.weight_w": (3, 2), "fc.weight_v": (4, 2)}
    halves = {n: (shape, [StoredRun(n, 0, Box.whole(shape))]) for n, shape in shapes.items()}
    with pytest.raises(FormatError, match=r"gate has shape \(3, 2\), but up \(4, 2\)"):
        join_gated(halves)


@pytest.mark.parametrize(("format", "kind"), [
    ("fsdp_dtensor", "pipeline_model"), ("torch_dcp", "pipeline_model"), ("torch_dcp", "tensor_model"),
    ("torch_dcp", "expert_model"),
])  # fmt: skip
def test_ranks_that_called_different_tensors_alike_are_refused(format, kind):
    args = {"ckpt_format": format, f"{kind}_parallel_size": 2}
    with pytest.raises(FormatError, match=f"{kind}_parallel_size is 2.*lost.*torch_dist"):
        check_degrees(Args(args), {})


@given(st.permutations([("optimizer", "state"), ("optimizer", "state", 0, "exp_avg")]))
def test_a_value_above_another_is_refused_and_the_optimizer_itself_is_beside(order):
    paths = {f"f{i}": path for i, path in enumerate(order)}
    with pytest.raises(FormatError, match=r"f1: another value is stored at or above this path"):
        saved(paths, dict.fromkeys(paths, 0))
    assert saved({"f": ("optimizer",)}, {"f": 0}).beside == ["f"]


def test_experts_of_which_only_one_ranks_are_stored_are_refused():
    args = Args({"ckpt_format": "fsdp_dtensor", "num_experts": 4})
    weights = [f"decoder.layers.0.mlp.experts.{i}.linear_fc1.weight" for i in range(4)]
    biases = [f"decoder.layers.0.mlp.experts.{i}.linear_fc1.bias" for i in range(2)]
    check_degrees(args, dict.fromkeys(weights))
    with pytest.raises(FormatError, match=r"experts\.\*\.linear_fc1\.bias is there of 2 experts"):
        check_degrees(args, dict.fromkeys([*weights, *biases]))


def test_a_parameter_that_lacks_a_state_of_the_others_is_refused():
    states = {name: {"exp_avg": 0, "step": 0} for name in "abc"} | {"frozen": {}}
    check_alike(states)
    del states["b"]["step"]
    with pytest.raises(FormatError, match=r"b has the states \['exp_avg'\], but 2 other"):
        check_alike(states)


@pytest.mark.parametrize("case", CASES)
def test_a_root_opens_with_its_tracker_without_it_and_by_the_folder(case, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(DATA / case / "ckpt", root)
    by_tracker = ucp.open(root)
    (root / TRACKER).unlink()
    assert ucp.open(root).path == by_tracker.path == ucp.open(root / "iter_0000003").path
    (root / "iter_0000003").rename(tmp_path / "moved")
    renamed = ucp.open(tmp_path / "moved")
    assert list(renamed) == list(by_tracker)


def test_of_several_iterations_without_a_tracker_none_is_taken(tmp_path):
    for step in (3, 4):
        shutil.copytree(DATA / CASES[0] / "ckpt" / "iter_0000003", tmp_path / f"iter_{step:07d}")
    with pytest.raises(NotACheckpoint, match="iter_0000003, iter_0000004: open one"):
        ucp.open(tmp_path)


def test_a_parameter_that_is_a_ranks_part_of_one_is_refused_by_its_name():
    args = Args({"hidden_size": 8, "moe_ffn_hidden_size": 6, "swiglu": True})
    whole = {"decoder.layers.0.mlp.experts.0.linear_fc1.weight": (12, 8), "vision.w": (1,)}
    check_whole(args, whole)
    with pytest.raises(LayoutError, match=r"experts\.0\.linear_fc1\.weight.*needs 12 rows"):
        check_whole(args, {name: (6, 8) for name in whole})


@pytest.mark.parametrize(("setting", "value"), [("step", 4), ("lr", 0.5)])
def test_a_file_of_another_step_is_refused_by_what_its_groups_say(setting, value, tmp_path):
    """Which is all that tells: names, shapes and lengths are those of the other step."""
    shutil.copytree(DATA / "fsdp_dtensor_te_moe_ep2_bf16" / "ckpt", tmp_path / "ckpt")
    folder = file_path(tmp_path / "ckpt" / "iter_0000003")
    metadata = read_metadata(folder)
    source = DcpSource(metadata)
    spans = metadata.objects.items()
    objects = {fqn: source.object(fqn, own[0]).tree for fqn, own in spans}
    check_settings(metadata, objects)
    name = next(fqn for fqn in objects if fqn.endswith(f"output_layer.weight.{setting}"))
    objects[name] = value
    with pytest.raises(FormatError, match=f"{setting} of parameter groups is {value}.*one step"):
        check_settings(metadata, objects)
