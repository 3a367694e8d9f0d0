"""Real legacy checkpoints of Megatron, against the state that was taken from the live processes
before the save.
"""

import functools
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case, names_of, swap
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import CorruptData, FormatError, LayoutError, NotACheckpoint
from jax_ucp.formats.megatron.buffers import buffer_walk
from jax_ucp.formats.megatron.legacy_files import writing_ranks
from jax_ucp.formats.megatron.model import parts_of
from jax_ucp.formats.megatron.run import Args
from jax_ucp.layout.box import Box

DATA = CASES_DATA / "megatron"
CASES = [case for case in names_of("megatron") if case.startswith("legacy_")]
# Each master is in two tensors.
HALVED = "legacy_te_precision_aware_bf16"


@pytest.mark.parametrize("case", [case for case in CASES if case != HALVED])
def test_where_says_which_stored_elements_a_parameter_is_made_of(case):
    checkpoint = ucp.open(DATA / case / "ckpt", sizes={"vocab": 101})
    folder = Path(checkpoint.path)
    opened = functools.cache(lambda name: TorchFile(folder / name))
    for label, array in Case(f"megatron/{case}").truth().items():
        out = np.full(array.shape, np.nan, np.float32)
        for piece in checkpoint.where(label) if not label.startswith("step/") else ():
            file = opened(piece.file)
            stored = file.read(piece.item, Box.whole(file.arrays()[piece.item].shape))
            data = (stored.ravel() if piece.source.ndim == 1 else stored)[piece.source.index]
            out[piece.target.index] = data.reshape(piece.target.shape)
        assert label.startswith("step/") or same_bits(out, array), label


@pytest.mark.parametrize("case", CASES)
def test_everything_stored_is_accounted_for_once_with_a_reason(case):
    checkpoint = ucp.open(DATA / case / "ckpt")
    inventory = {item.where: item for item in checkpoint.inventory}
    assert len(inventory) == len(checkpoint.inventory)
    assert all(item.reason and item.reason != "not understood" for item in checkpoint.inventory)
    folder = Path(checkpoint.path)
    for path in folder.glob("*/*.pt"):
        file, name = TorchFile(path), path.relative_to(folder).as_posix()
        assert {f"{name}:{key}" for key in file.arrays()} <= set(inventory)
        for key in file.tree if isinstance(file.tree, dict) and "args" in file.tree else ():
            assert [where for where in inventory if where.startswith(f"{name}:{key}")], (
                f"{name}: {key}"
            )


def test_extras_keep_what_the_run_put_beside_the_model():
    extras = ucp.open(DATA / "legacy_tp2_fp16_scaler" / "ckpt").extras
    first, second = extras["mp_rank_00/model_optim_rng.pt"], extras["mp_rank_01/model_optim_rng.pt"]
    assert first["iteration"] == 3
    assert first["opt_param_scheduler"]["num_steps"] == 12
    assert first["args"]["fields"]["hidden_size"] == 32
    assert set(second["args"]) == {"rank", "local_rank"}
    assert "growth_tracker" in first["optimizer/grad_scaler"]
    assert first["optimizer/param_groups"][0]["max_lr"] == 0.01
    assert first["rng_state"][0]["torch_rng_state"]["dtype"] == "uint8"
    json.dumps(extras)


MANY = [
    "legacy_tp2_pp1_bf16",
    "legacy_tp1_pp2_vpp2_fp32",
    "legacy_ep2_moe_grouped_bf16",
    "legacy_tp2_dp2_distopt_bf16",
]
MANY += ["legacy_pp2_dp2_distopt_buckets_fp32", "legacy_ep2_moe_seq_distopt_fp32"]


@pytest.mark.parametrize("case", MANY)
@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_rank_is_named(megatron_copy, case, which):
    folder = megatron_copy(case)
    lost = sorted(folder.iterdir())[which]
    shutil.rmtree(lost)
    with pytest.raises(FormatError, match=rf"{lost.name}/model_optim_rng\.pt is missing"):
        ucp.open(folder)


@pytest.mark.parametrize("case", MANY)
def test_exchanged_ranks_are_refused_by_name(megatron_copy, case):
    folder = megatron_copy(case)
    a, b = sorted(path.name for path in folder.iterdir())
    swap(folder, a, b)
    with pytest.raises(FormatError, match=r"model_optim_rng\.pt was written by rank"):
        ucp.open(folder)


@pytest.mark.parametrize("case", [case for case in MANY if "distopt" in case])
def test_exchanged_optimizer_files_are_refused_or_found_by_their_twins(
    megatron_copy, case, tmp_path
):
    folder = megatron_copy(case)
    a, b = sorted(path.name for path in folder.iterdir())
    swap(folder, f"{a}/distrib_optim.pt", f"{b}/distrib_optim.pt")
    with pytest.raises((FormatError, CorruptData), match=r"distrib_optim|not what the copy at"):
        ucp.open(folder).save(tmp_path / "never")


@pytest.mark.parametrize("case", CASES)
def test_a_truncated_file_is_named(megatron_copy, case):
    folder = megatron_copy(case)
    for path in sorted(folder.glob("*/*.pt")):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * 2 // 3])
        with pytest.raises(FormatError, match=f"{path.parent.name}/{path.name}"):
            ucp.open(folder)
        path.write_bytes(whole)


def test_a_distributed_optimizers_file_that_is_missing_is_named(megatron_copy):
    folder = megatron_copy("legacy_tp2_dp2_distopt_bf16")
    (folder / "mp_rank_01" / "distrib_optim.pt").unlink()
    with pytest.raises(FormatError, match=r"mp_rank_01/distrib_optim\.pt is missing"):
        ucp.open(folder)


def test_files_of_another_run_are_refused(megatron_copy):
    folder, other = (
        megatron_copy("legacy_tp2_pp1_bf16"),
        megatron_copy("legacy_tp2_dp2_distopt_bf16"),
    )
    shutil.copytree(other / "mp_rank_01", folder / "mp_rank_01", dirs_exist_ok=True)
    with pytest.raises(
        FormatError, match=r"mp_rank_01/model_optim_rng\.pt is of another run .*use_distributed"
    ):
        ucp.open(folder)
    shutil.copytree(
        DATA / "legacy_tp2_pp1_bf16" / "ckpt" / "iter_0000003", folder, dirs_exist_ok=True
    )
    shutil.copytree(folder / "mp_rank_01", folder / "mp_rank_02")
    with pytest.raises(FormatError, match="mp_rank_02 belongs to another run"):
        ucp.open(folder)


def test_a_flipped_bit_in_a_weight_is_found_before_anything_is_converted(megatron_copy, tmp_path):
    folder = megatron_copy("legacy_tp2_pp1_bf16")
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    key = "optimizer/optimizer/state/0/exp_avg"
    assert key in TorchFile(path).arrays()
    file = TorchFile(path)
    stored = file.read(
        "model/decoder.layers.0.mlp.linear_fc1.weight", Box((0, 0), (12, 32))
    ).tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(stored) + 1] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=r"(?s)linear_fc1\.weight.*mp_rank_01"):
        ucp.open(folder).save(tmp_path / "never")


def test_a_folder_of_another_iteration_is_refused(megatron_copy):
    folder = megatron_copy("legacy_tp1_pp1_fp32")
    moved = folder.rename(folder.with_name("iter_0000004"))
    with pytest.raises(FormatError, match="is of iteration 3, but its folder is iter_0000004"):
        ucp.open(moved)
    with pytest.raises(NotACheckpoint, match="no such folder"):
        ucp.open(folder.parent)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with pytest.raises(FormatError, match="should name an iteration"):
        ucp.open(folder.parent)


def test_a_users_spec_overrides_one_rule_of_the_built_in_one(tmp_path):
    root, name = (
        DATA / "legacy_tp2_dp2_distopt_bf16" / "ckpt",
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
    )
    spec = tmp_path / "mine.yaml"
    spec.write_text(f"extends: megatron\nshards: [{{param: '{name}', pattern: {{sharded: 0}}}}]")
    mine, theirs = ucp.open(root, spec=spec), ucp.open(root)
    label = "param/decoder.layers.0.mlp.linear_fc1.weight"
    gate_up = theirs.read(label).reshape(2, 2, 12, 32)
    np.testing.assert_array_equal(
        mine.read(label).reshape(2, 2, 12, 32), gate_up.transpose(1, 0, 2, 3)
    )
    qkv = "param/decoder.layers.0.self_attention.linear_qkv.weight"
    np.testing.assert_array_equal(mine.read(qkv), theirs.read(qkv))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{param: 'decoder.gone', pattern: replicated}", "mine.yaml:2: 'decoder.gone' claims no parameter"),
        ("{param: '*.linear_proj.weight', pattern: replicated}, {param: '*_proj.weight', pattern: replicated}",
         "layers.1.self_attention.linear_proj.weight is claimed by 2 rules"),
        ("{param: '*.linear_proj.weight', pattern: unique}", r"Unique needs 1 shard, found 2[\s\S]*mp_rank_01"),
        ("{param: '*.linear_proj.weight', pattern: {fused: {axis: 1, parts: {a: width}}}}",
         "'width' has no number"),
    ],
)  # fmt: skip
def test_a_spec_that_does_not_fit_is_refused_with_rule_parameter_and_files(tmp_path, rule, message):
    (tmp_path / "mine.yaml").write_text(f"extends: megatron\nshards: [{rule}]")
    with pytest.raises(LayoutError, match=message):
        ucp.open(DATA / "legacy_tp2_pp1_bf16" / "ckpt", spec=tmp_path / "mine.yaml")


def test_sizes_that_contradict_the_shards_are_refused():
    root = DATA / "legacy_tp2_pp1_bf16" / "ckpt"
    with pytest.raises(LayoutError, match=r"word_embeddings.*no leading part of shape \(113, 32\)"):
        ucp.open(root, sizes={"vocab": 113})
    with pytest.raises(LayoutError, match=r"linear_fc1\.weight.*needs 25 rows"):
        ucp.open(root, sizes={"ffn": 50})


@given(
    st.lists(st.tuples(st.integers(1, 500), st.booleans()), max_size=12),
    st.integers(1, 6),
    st.integers(1, 900),
)
def test_a_walk_places_every_tensor_once_inside_its_bucket_whatever_the_bucket_size(
    tensors, dp, limit
):
    sizes, shared = [n for n, _ in tensors], [s for _, s in tensors]
    for bucket_size in (None, limit):
        starts, buckets = buffer_walk(sizes, shared, dp, bucket_size)
        ranges = sorted((a, a + n) for a, n in zip(starts, sizes, strict=True))
        assert starts == sorted(starts, reverse=True)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
        assert sum(buckets) == (ranges[-1][1] if ranges else 0)


def test_the_walk_gives_the_buckets_of_the_worked_example():
    hidden = [32, 32, 1024, 32, 3072, 96, 32, 32, 768, 24, 768, 32]
    first = [3328, 512, *hidden]
    starts, buckets = buffer_walk(first, [True, *[False] * 13], dp=2, bucket_size=2000)
    assert buckets == [4992, 1728, 3328]
    assert starts[:2] == [6720, 4992 + 1216]
    _, buckets = buffer_walk([*hidden, 32, 32, 3328], [*[False] * 14, True], dp=2, bucket_size=None)
    assert buckets == [3328, 6304]


@pytest.mark.parametrize(("t", "p", "e", "etp", "want"), [
    (2, 1, 1, None, [(0, 0, 0, 0), (1, 0, 0, 1)]),
    (1, 2, 1, 1,    [(0, 0, 0, 0), (0, 1, 0, 0)]),
    (2, 1, 2, 1,    [(0, 0, 0, 0), (1, 0, 1, 0)]),
    (2, 1, 2, 2,    [(0, 0, 0, 0), (1, 0, 0, 1), (0, 0, 1, 0), (1, 0, 1, 1)]),
])  # fmt: skip
def test_ranks_that_write_files_are_the_first_of_each_pipeline_stage(t, p, e, etp, want):
    degrees = {"tensor": t, "pipeline": p, "expert": e}
    args = {f"{kind}_model_parallel_size": n for kind, n in degrees.items()} | {
        "expert_tensor_parallel_size": etp
    }
    assert writing_ranks(Args(args)) == want


def test_expert_parallelism_that_loses_dense_shards_is_refused():
    degrees = {
        "tensor_model_parallel_size": 4,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    with pytest.raises(FormatError, match="does not keep every rank's tensors"):
        writing_ranks(Args(degrees))


def test_norms_that_transformer_engine_fuses_get_the_names_of_the_local_spec():
    for fused, plain in [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_bias", "pre_mlp_layernorm.bias"),
    ]:
        (part,) = parts_of(
            f"decoder.layers.1.{fused}", (8,), first_layer=4, experts=range(0), hidden=8
        )
        assert part.name == f"decoder.layers.5.{plain}"


def test_other_files_of_a_rank_are_named_and_those_of_a_layer_wise_optimizer_refused(tmp_path):
    shutil.copytree(DATA / "legacy_te_muon_bf16" / "ckpt", tmp_path / "ckpt")
    folder = tmp_path / "ckpt" / "iter_0000003" / "mp_rank_00"
    (folder / "modelopt_state.pt").write_bytes(b"")
    items = {item.where: item.reason for item in ucp.open(tmp_path / "ckpt").inventory}
    assert "not read" in items["mp_rank_00/modelopt_state.pt"]
    (folder / "layer_wise_optimizer_0.pt").write_bytes(b"")
    with pytest.raises(FormatError, match=r"layer_wise_optimizer_0\.pt.*dist_muon.*weights_only"):
        ucp.open(tmp_path / "ckpt")
    weights = ucp.open(tmp_path / "ckpt", weights_only=True)
    items = {item.where: item.reason for item in weights.inventory}
    assert "weights_only" in items["mp_rank_00/layer_wise_optimizer_0.pt"]
