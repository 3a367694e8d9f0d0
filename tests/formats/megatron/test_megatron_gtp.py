"""Weights that ranks of generalized tensor parallelism cut once more: equal, or refused.

How Megatron stores them is written here by its source, in numpy alone.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from helpers import numbered
from jax_ucp.errors import FormatError
from jax_ucp.files.path import file_path
from jax_ucp.formats.megatron.checks import check_gtp
from jax_ucp.formats.megatron.run import Args
from torch_writer import edit

WHERE = file_path("common.pt")
LAYER = "decoder.layers.0"
# Each parameter, the argument that is its length, and whether tensor-parallel ranks cut its rows.
ROWS = {
    "embedding.word_embeddings.weight": ("padded_vocab_size", True),
    "output_layer.weight": ("padded_vocab_size", True),
    f"{LAYER}.self_attention.linear_qkv.weight": ("kv_channels", True),
    f"{LAYER}.self_attention.linear_proj.weight": ("hidden_size", False),
    f"{LAYER}.mlp.linear_fc1.weight": ("ffn_hidden_size", True),
    f"{LAYER}.mlp.linear_fc2.weight": ("hidden_size", False),
    f"{LAYER}.mlp.shared_experts.linear_fc1.weight": ("moe_shared_expert_intermediate_size", True),
    f"{LAYER}.mlp.experts.1.linear_fc1.weight": ("moe_ffn_hidden_size", True),
    f"{LAYER}.mlp.experts.1.linear_fc2.weight": ("hidden_size", False),
}


def as_stored(weight: np.ndarray, ranks: int, shards: int, align: int, gated: bool) -> np.ndarray:
    """The whole that is stored of a weight of which each rank has a slice with padding, cut."""
    wholes, gates, ups = [], [], []
    for own in np.split(weight, ranks):
        fill = -len(own) % (align * shards)
        for shard in np.split(np.pad(own, ((0, fill), (0, 0))), shards):
            wholes.append(shard)
            gate, up = np.split(shard, 2)
            gates.append(gate)
            ups.append(up)
    return np.concatenate([*gates, *ups] if gated else wholes)


def gated_whole(weight: np.ndarray, ranks: int) -> np.ndarray:
    """As without GTP: the gates of all ranks, then the ups."""
    halves = [np.split(own, 2) for own in np.split(weight, ranks)]
    return np.concatenate([half[i] for i in (0, 1) for half in halves])


@given(
    st.sampled_from(sorted(ROWS)), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12),
    st.sampled_from([8, 16, 32]), st.booleans(), st.sampled_from([None, "mxfp8"]),
)  # fmt: skip
def test_what_is_accepted_is_stored_as_it_is(name, ranks, shards, count, unit, gated, recipe):
    argument, cut = ROWS[name]
    expert = ".experts." in name
    gated = gated and name.endswith("fc1.weight")
    ranks_of_rows = ranks if cut else 1
    length = ranks_of_rows * count * unit
    weight = numbered((length * (1 + gated), 1))
    align = 32 if recipe else 16
    stored = as_stored(weight, ranks_of_rows, shards, align, gated) if shards > 1 else None
    args = {
        "tensor_model_parallel_size": ranks,
        "expert_tensor_parallel_size": ranks,
        ("expert_" if expert else "") + "tensor_parallel_num_weight_shards": ranks * shards,
        argument: length,
        "num_attention_heads": 1,
        "group_query_attention": False,
        "num_query_groups": 7,  # means nothing
        "swiglu": gated,
        "fp8_recipe": recipe,
    }
    if argument == "kv_channels":
        weight = numbered((3 * length, 1))
        stored = as_stored(weight, ranks, shards, align, False)
    plain = gated_whole(weight, ranks) if gated else weight
    same = shards == 1 or (stored.shape == plain.shape and bool((stored == plain).all()))
    shape = plain.shape if shards == 1 else stored.shape
    refused = ""
    try:
        check_gtp(Args(args), WHERE, {name: shape})
    except FormatError as error:
        refused = str(error)
    assert bool(refused) == (not same or (gated and shards > 1))
    assert not refused or name in refused


@pytest.mark.parametrize("name", [
    f"{LAYER}.self_attention.linear_kv_down_proj.weight", f"{LAYER}.mixer.in_proj.weight",
    "mtp.layers.0.eh_proj.weight", "embedding.word_embeddings.weight",
])  # fmt: skip
def test_a_length_that_args_do_not_say_is_refused(name):
    args = Args({"tensor_model_parallel_size": 1, "tensor_parallel_num_weight_shards": 2})
    with pytest.raises(FormatError, match="not known here"):
        check_gtp(args, WHERE, {name: (64, 64)})


@pytest.mark.parametrize("name", [
    f"{LAYER}.input_layernorm.weight", f"{LAYER}.mlp.router.weight", f"{LAYER}.mlp.linear_fc1.bias",
    "embedding.position_embeddings.weight",
])  # fmt: skip
def test_what_every_rank_has_whole_has_no_padding(name):
    args = Args({"tensor_model_parallel_size": 1, "tensor_parallel_num_weight_shards": 2})
    check_gtp(args, WHERE, {name: (7, 3) if "layernorm" not in name else (7,)})


@pytest.mark.parametrize(("case", "file", "said"), [
    ("dist_tp2_pp1_bf16",               "common.pt", r"word_embeddings\.weight has 112 rows .* 32"),
    ("dist_tp2_gqa_swiglu_qknorm_fp32", "common.pt", r"gated layer|word_embeddings"),
    ("legacy_tp2_pp1_bf16",             "mp_rank_00/model_optim_rng.pt", r"shards of one rank alone"),
])  # fmt: skip
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_of_such_ranks_is_refused(megatron_copy, case, file, said, weights_only):
    folder = megatron_copy(case)
    names = ucp.open(folder).params.keys()

    def shards(n: int) -> None:
        name = "tensor_parallel_num_weight_shards"
        edit(folder / file, lambda tree: tree["args"].state.update({name: n}))

    shards(2)
    assert ucp.open(folder).params.keys() == names
    shards(4)
    with pytest.raises(FormatError, match=said):
        ucp.open(folder, weights_only=weights_only)
