"""Real legacy checkpoints of Megatron, against the state of the live processes."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.megatron.buffers import buffer_walk
from jax_ucp.formats.megatron.legacy_files import writing_ranks
from jax_ucp.formats.megatron.run import Args

DATA = CASES_DATA / "megatron"


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


def test_a_users_spec_overrides_one_rule_of_the_built_in_one(tmp_path):
    root = DATA / "legacy_tp2_dp2_distopt_bf16" / "ckpt"
    name = "decoder.layers.{layer}.mlp.linear_fc1.weight"
    spec = tmp_path / "mine.yaml"
    spec.write_text(f"extends: megatron\nshards: [{{param: '{name}', pattern: {{sharded: 0}}}}]")
    mine, theirs = ucp.open(root, spec=spec), ucp.open(root)
    label = "param/decoder.layers.0.mlp.linear_fc1.weight"
    gate_up = theirs.read(label).reshape(2, 2, 12, 32)
    other = mine.read(label).reshape(2, 2, 12, 32)
    np.testing.assert_array_equal(other, gate_up.transpose(1, 0, 2, 3))
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
def test_a_walk_places_every_tensor_once_inside_its_bucket_whatever_the_size(tensors, dp, limit):
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


def test_expert_parallelism_that_loses_dense_shards_is_refused():
    degrees = {f"{kind}_model_parallel_size": n for kind, n in (("tensor", 4), ("expert", 2))}
    degrees["expert_tensor_parallel_size"] = 1
    with pytest.raises(FormatError, match="does not keep every rank's tensors"):
        writing_ranks(Args(degrees))
