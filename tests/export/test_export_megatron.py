"""Exports to Megatron's torch_dist: the tensors are those that Megatron itself wrote, by key, shape,
dtype and bit, whatever the source had been divided into. `tests/generators/megatron_runs.py` has
Megatron load them and train on.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import Case, arrays_of, assert_same
from commands import run
from helpers import faults_of, in_lanes
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.codecs.unpickle import each_node
from jax_ucp.errors import TreeMismatch, UnsupportedLeaf
from jax_ucp.files.path import file_path
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.formats.megatron.writer import common_of
from jax_ucp.layout.box import Box

# Whose optimizer's layout is the one that is written.
SAME = ["dist_tp1_pp1_fp32", "dist_tp2_pp1_bf16", "dist_pp2_vpp2_fp32", "dist_ep2_moe_freq_fp32"]
SAME += ["dist_tp2_gqa_swiglu_qknorm_fp32", "dist_ep2_moe_grouped_bf16"]
SAME += ["dist_tp2_dp2_distopt_fully_reshardable_bf16"]
SAME = [f"megatron/{case}" for case in SAME]
# Whose model is the same, and the optimizer in flat buffers, or numbered.
OTHERS = ["dist_ep2_moe_distopt_dp_reshardable_fp32", "dist_tp2_dp2_distopt_dp_reshardable_bf16"]
OTHERS += ["dist_tp2_dp2_distopt_dp_zero_bf16", "old0153_tp2_dp2_distopt_fs_model_space_bf16"]
OTHERS = [f"megatron/{case}" for case in OTHERS] + ["megatron_core/mla", "megatron_core/layout_mtp"]
REBUILT = ["legacy_tp2_fp16_scaler", "legacy_ep2_moe_seq_distopt_fp32", "old0153_tp2_zarr_fp32"]
REBUILT += ["legacy_te_moe_ep2_zero_bf16", "dist_tp2_singleton_swiglu_fp32"]
REBUILT = [f"megatron/{case}" for case in REBUILT]
QWEN3 = "megatron/dist_tp2_gqa_swiglu_qknorm_fp32"
CHAIN = ("megatron-qwen3-to-hf", "hf-qwen3-to-maxtext")
OWN_NORMS = "megatron-deepseek3-to-hf:own_norms"
MASTERS = "megatron/dist_tp2_dp2_distopt_fully_reshardable_bf16"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def stored(folder):
    metadata = read_metadata(file_path(str(folder)), lambda every: set())
    return {key: (t.shape, t.dtype) for key, t in metadata.tensors.items()}, set(metadata.objects)


def common(folder):
    """What is in `common.pt`, tensors with their values."""
    file = TorchFile(file_path(str(folder / "common.pt")))
    keys = [node.key for node in each_node(file.tree) if hasattr(node, "storage")]
    numbers = {key: file.read(key, Box((), ())).item() for key in keys}
    return dict(file.tree), numbers


def in_memory(case, step=None):
    """The states of a case as a tree in memory, after `step` steps, as a JAX run has them."""
    tree = {}
    for label, array in arrays_of(Case(case).open(sizes=None)).items():
        state, name = label.split("/")
        is_step = step is not None and state == "step"
        tree.setdefault(state, {})[name] = np.float32(step) if is_step else array
    return tree


@pytest.fixture(scope="module", params=SAME + OTHERS + REBUILT)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def written(case, tmp_path_factory) -> Path:
    """The case exported, once for all tests."""
    folder = tmp_path_factory.mktemp("written") / "run"
    ucp.open(case.path).export(folder, "megatron")
    return folder


def test_what_is_written_is_read_back_with_every_bit(case, written):
    source, exported = ucp.open(case.path), ucp.open(written)
    assert_same(arrays_of(exported), arrays_of(source))
    assert faults_of(exported) == []
    assert exported.about.step == source.about.step == 3


def test_keys_shapes_and_dtypes_are_those_that_megatron_wrote(case, written):
    own = case.path / "iter_0000003"
    if str(case) in REBUILT:
        return
    (want, objects), (found, others) = stored(own), stored(written / "iter_0000003")
    if str(case) in OTHERS:
        want = {key: value for key, value in want.items() if "optimizer." not in key}
        found = {key: value for key, value in found.items() if "optimizer." not in key}
    assert found == want
    asked = {key for key in objects if "_extra_state/" in key}
    assert asked <= others
    if str(case) in SAME:
        folders = written / "iter_0000003", own
        mine, theirs = (json.loads((folder / "metadata.json").read_text()) for folder in folders)
        assert mine == theirs


def test_what_ranks_have_in_common_is_as_megatron_wrote_it(case, written):
    if str(case) not in SAME:
        return
    tracker = "latest_checkpointed_iteration.txt"
    assert (written / tracker).read_text() == (case.path / tracker).read_text()
    want, numbers = common(case.path / "iter_0000003")
    found, own = common(written / "iter_0000003")
    assert own == numbers
    fields, others = found.pop("args").fields, want.pop("args").fields
    left = {"attention_backend", "exit_signal", "model_type"}  # objects of Megatron's classes
    assert fields == {k: v for k, v in others.items() if k not in left} | {"no_save_rng": True}
    for tree in (found, want):
        for part in tree["optimizer"].values() if 0 in tree["optimizer"] else [tree["optimizer"]]:
            part.get("optimizer", part).pop("state", None)  # `numbers` are those
    assert found == want


def test_weights_are_rounded_from_masters_which_keep_their_dtype(tmp_path):
    case = Case(MASTERS)
    exported = case.open(sizes=None).export(tmp_path / "run", "megatron")
    tensors, _ = stored(tmp_path / "run" / "iter_0000003")
    key = "decoder.layers.self_attention.linear_qkv.weight"
    dtypes = {state: tensors[f"{state}{key}"][1].name for state in ("", "optimizer.state.param.")}
    assert list(dtypes.values()) == ["bfloat16", "float32"]
    assert exported.read(f"param/{QKV}").dtype == np.float32


def test_through_hugging_face_and_maxtext_and_back_every_bit_is_there(tmp_path):
    original = ucp.open(Case(QWEN3).path)
    for names in (CHAIN[:1], CHAIN):
        mapped = original
        for name in names:
            mapped = mapped.map(name)
        mapped.save(tmp_path / names[-1])
        back = ucp.open(tmp_path / names[-1])
        for name in reversed(names):
            back = back.map(ucp.Mapping.load(name).inverse())
        exported = back.export(tmp_path / f"{names[-1]} back", "megatron")
        assert_same(arrays_of(exported), arrays_of(original))
        left = {"attention_backend", "exit_signal", "model_type", "no_save_rng"}
        config = {key: value for key, value in original.config.items() if key not in left}
        assert exported.config == config | {"no_save_rng": True}
        assert stored(Path(str(exported.path)))[0] == stored(Case(QWEN3).path / "iter_0000003")[0]


@pytest.mark.parametrize(
    ("case", "mappings"),
    in_lanes([
        ("megatron/legacy_tp2_dp2_distopt_bf16", ["megatron-llama-to-hf"]),
        ("megatron/legacy_tp2_fp16_scaler", ["megatron-gpt2-to-hf", "hf-gpt2-to-flax"]),
        ("megatron/dist_pp2_vpp2_fp32", ["megatron-gpt2-to-hf", "hf-gpt2-to-flax"]),
        ("megatron_logits/llama31", ["megatron-llama-to-hf"]),
        ("megatron_next/llama", ["megatron-llama-to-hf", "hf-llama-to-tunix"]),
        ("megatron_logits/qwen2", ["megatron-qwen2-to-hf", "hf-qwen2-to-maxtext"]),
        ("megatron/legacy_ep2_moe_seq_distopt_fp32", ["megatron-mixtral-to-hf"]),
        ("megatron/dist_ep2_moe_grouped_bf16", ["megatron-mixtral-to-hf"]),
        ("megatron_next/mixtral", ["megatron-mixtral-to-hf"]),
        ("megatron_logits/qwen3_moe", ["megatron-qwen3-moe-to-hf", "hf-qwen3-moe-to-maxtext"]),
        ("megatron_next/deepseek3", [OWN_NORMS, "hf-deepseek3-to-maxtext"]),
        ("megatron_logits/gpt_oss", ["megatron-gpt-oss-to-hf", "hf-gpt-oss-to-maxtext"]),
    ]),
)  # fmt: skip
def test_a_run_of_each_family_comes_back_from_other_names(case, mappings, tmp_path):
    original = mapped = Case(case).open(sizes=None)
    for name in mappings:
        mapped = mapped.map(name)
    mapped.save(tmp_path / "saved")
    back = ucp.open(tmp_path / "saved")
    for name in reversed(mappings):
        back = back.map(ucp.Mapping.load(name).inverse())
    assert_same(arrays_of(back.export(tmp_path / "run", "megatron")), arrays_of(original))


def test_the_command_writes_what_megatron_loads(tmp_path):
    chain = ",".join(CHAIN)
    run("convert", Case(QWEN3).path, tmp_path / "saved", "--mapping", chain)
    run("export", tmp_path / "saved", tmp_path / "run", "--format", "megatron", "--mapping", chain)
    assert_same(arrays_of(ucp.open(tmp_path / "run")), arrays_of(ucp.open(Case(QWEN3).path)))


def test_a_run_in_memory_goes_on_as_the_run_that_is_given(tmp_path):
    made = ucp.Checkpoint.of(in_memory(QWEN3, step=5))
    exported = made.export(tmp_path / "run", "megatron", like=Case(QWEN3).path)
    file, extras = common_of(exported.extras)
    assert file == "common.pt"
    assert exported.about.step == extras["iteration"] == 5
    assert extras["opt_param_scheduler"]["num_steps"] == 12 + 2 * 4
    assert exported.config["consumed_train_samples"] == 2 * 4
    assert exported.read(f"step/{QKV}") == 5
    want = in_memory(QWEN3)["exp_avg"][QKV]
    np.testing.assert_array_equal(exported.read(f"exp_avg/{QKV}"), want)


def test_groups_are_made_of_arguments_alone(tmp_path):
    args = {**Case(QWEN3).open().config, "use_distributed_optimizer": True}
    made = ucp.Checkpoint.of(in_memory(QWEN3))
    exported = made.export(tmp_path / "run", "megatron", like=args)
    groups = exported.extras["common.pt"]["optimizer/param_groups"]
    assert [(group["wd_mult"], group["weight_decay"]) for group in groups] == [(1, 0.1), (0, 0)]
    assert {(group["lr"], group["step"]) for group in groups} == {(0.01, 3)}
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_weights_alone_are_a_release(tmp_path):
    exported = ucp.open(Case(QWEN3).path, weights_only=True).export(tmp_path / "run", "megatron")
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert exported.path.endswith("release")
    made = ucp.Checkpoint.of({"param": in_memory(QWEN3)["param"]})
    notes = " ".join(made.plan_export("megatron").notes)
    assert "nothing says what the run's arguments are" in notes


def test_rows_that_pad_the_vocabulary_are_zeros_where_they_were_left_out(tmp_path):
    name = "embedding.word_embeddings.weight"
    checkpoint = Case(QWEN3).open(sizes={"vocab": 101})
    assert any("rows 101 to 111" in note for note in checkpoint.plan_export("megatron").notes)
    exported = checkpoint.export(tmp_path / "run", "megatron")
    for state in ("param", "exp_avg"):
        found = exported.read(f"{state}/{name}")
        np.testing.assert_array_equal(found[:101], checkpoint.read(f"{state}/{name}"))
        assert found.shape[0] == 112
        assert not found[101:].any()


def changed(step=None, drop=(), **config):
    tree = in_memory(QWEN3, step)
    for state, name in drop:
        del tree[state][name]
    tree = {state: own for state, own in tree.items() if own}
    return ucp.Checkpoint.of(tree), {**Case(QWEN3).open().config, **config}


def test_layers_that_predict_further_tokens_and_are_gone_are_told(tmp_path):
    checkpoint, config = changed(mtp_num_layers=1)
    notes = checkpoint.plan_export("megatron", like=config).notes
    assert any("goes on without --mtp-num-layers" in note for note in notes)
    exported = checkpoint.export(tmp_path / "run", "megatron", like=config)
    assert exported.config["mtp_num_layers"] is None
    with_them = Case("megatron_core/layout_mtp").open(sizes=None)
    assert not any("mtp" in note for note in with_them.plan_export("megatron").notes)
    assert with_them.export(tmp_path / "mtp", "megatron").config["mtp_num_layers"] == 1


def test_what_megatron_would_load_wrong_or_not_at_all_is_refused():
    hf = Case(QWEN3).open().map(CHAIN[0])
    with pytest.raises(TreeMismatch, match=r"model\.embed_tokens\.weight\n(.*\n)*.*inverse"):
        hf.plan_export("megatron")
    every = [(state, QKV) for state in ("param", "exp_avg", "exp_avg_sq", "step")]
    for made, error, message in [
        (changed(drop=every), TreeMismatch, r"linear_qkv.weight of 2 layers"),
        (changed(num_layers=3), TreeMismatch, "of 3 layers"),
        (changed(expert_model_parallel_size=2), UnsupportedLeaf, "checkpoint of the run as like="),
        (changed(padded_vocab_size=104), TreeMismatch, "112 rows, but args.padded_vocab_size"),
        (changed(drop=every[1:2]), UnsupportedLeaf, f"{QKV} has exp_avg_sq"),
        (changed(drop=[("step", n) for n in in_memory(QWEN3)["step"]]), UnsupportedLeaf, "steps"),
        (changed(use_precision_aware_optimizer=True), UnsupportedLeaf, "precision-aware"),
        (changed(step=5, rampup_batch_size=[1, 1, 8]), UnsupportedLeaf, "batches differ in size"),
    ]:
        checkpoint, config = made
        with pytest.raises(error, match=message):
            checkpoint.plan_export("megatron", like=config)
    older = ucp.Checkpoint.of(in_memory(MASTERS, step=2))
    with pytest.raises(UnsupportedLeaf, match="2 steps, and 3 by its groups"):
        older.plan_export("megatron", like=Case(MASTERS).path)
    with pytest.raises(UnsupportedLeaf, match="Give like"):
        changed()[0].plan_export("megatron")
    tree = in_memory(QWEN3)
    tree["step"][QKV] = np.float32(4)
    with pytest.raises(UnsupportedLeaf, match=rf"here are 3\.0 of .*, 4\.0 of {QKV}"):
        ucp.Checkpoint.of(tree).plan_export("megatron", like=Case(QWEN3).path)
    with pytest.raises(UnsupportedLeaf, match="momentum_buffer"):
        Case("megatron_core/dist_muon").open().plan_export("megatron")
