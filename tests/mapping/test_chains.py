"""Mappings one after another: from Megatron's names to Hugging Face's, and on to MaxText, and back.

`tests/data/megatron` and `megatron_logits` have the logits that Megatron's own model gave, and
`megatron_next` the losses with which its run went on.
`tests/decoder.py` gives what MaxText's gives; `examples/megatron_logits.py` compares those of
transformers.
"""

import json
import re

import jax
import numpy as np
import optax
import pytest

import decoder
import jax_ucp as ucp
from cases import Case, arrays_of, assert_same
from commands import run, run_json
from helpers import in_lanes
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import LayoutError, SpecError, TreeMismatch
from jax_ucp.mapping.binding import outcomes
from jax_ucp.mapping.model_config import config_from, given_config
from jax_ucp.mapping.rules import shipped
from safetensors_writer import write_safetensors

# Case -> its mapping to Hugging Face's names, and the one from there.
CHAINS = [
    ("megatron/dist_tp2_singleton_swiglu_fp32", "megatron-llama-to-hf", "hf-llama2-to-maxtext"),
    ("megatron/legacy_tp2_dp2_distopt_bf16", "megatron-llama-to-hf", "hf-llama2-to-maxtext"),
    ("megatron_logits/llama31", "megatron-llama-to-hf", "hf-llama-to-maxtext"),
    ("megatron_logits/qwen2", "megatron-qwen2-to-hf", "hf-qwen2-to-maxtext"),
    ("megatron/dist_tp2_gqa_swiglu_qknorm_fp32", "megatron-qwen3-to-hf", "hf-qwen3-to-maxtext"),
    ("megatron/legacy_ep2_moe_seq_distopt_fp32", "megatron-mixtral-to-hf", "hf-mixtral-to-maxtext"),
    ("megatron/dist_ep2_moe_grouped_bf16", "megatron-mixtral-to-hf", "hf-mixtral-to-maxtext"),
    ("megatron_logits/mixtral", "megatron-mixtral-to-hf", "hf-mixtral-to-maxtext"),
    ("megatron_logits/qwen3_moe", "megatron-qwen3-moe-to-hf", "hf-qwen3-moe-to-maxtext"),
    ("megatron_logits/deepseek3", "megatron-deepseek3-to-hf:own_norms", "hf-deepseek3-to-maxtext"),
    ("megatron_logits/gpt_oss", "megatron-gpt-oss-to-hf", "hf-gpt-oss-to-maxtext"),
]
DEEPSEEK3, GPT_OSS = CHAINS[-2:]
GPT2 = [
    ("megatron/legacy_tp2_fp16_scaler", "megatron-gpt2-to-hf", "hf-gpt2-to-flax"),
    ("megatron/dist_pp2_vpp2_fp32", "megatron-gpt2-to-hf", "hf-gpt2-to-flax"),
    ("megatron_deepspeed/gpt2_tp2", "deepspeed-gpt2-to-hf", "hf-gpt2-to-flax"),
    ("megatron_deepspeed/gpt2_tp2_before_fpdt", "deepspeed-gpt2-to-hf", "hf-gpt2-to-flax"),
    ("megatron_deepspeed/gpt2_pp2_tp2", "deepspeed-gpt2-to-hf:pipeline", "hf-gpt2-to-flax"),
]
DEEPSPEED = GPT2[2:]
EVERY = [*CHAINS, *GPT2]
QWEN3 = CHAINS[4]
# Those that scale the query, with whose moments no run goes on, and the same without.
SCALED = [
    ("megatron_next/llama", "megatron-llama-to-hf", "hf-llama2-to-maxtext"),
    ("megatron_next/mixtral", "megatron-mixtral-to-hf", "hf-mixtral-to-maxtext"),
]
WITHOUT_SCALES = [(case, first, f"{second} without scales") for case, first, second in SCALED]
# Case -> the mappings from Hugging Face's names by which its run goes on.
NEXT = [
    ("megatron_next/llama", "megatron-llama-to-hf", "hf-llama-to-tunix"),
    ("megatron_next/qwen3", "megatron-qwen3-to-hf", "hf-qwen3-to-tunix"),
    ("megatron_next/qwen3", "megatron-qwen3-to-hf", "hf-qwen3-to-maxtext"),
    ("megatron_next/qwen3_moe", "megatron-qwen3-moe-to-hf", "hf-qwen3-moe-to-tunix"),
    ("megatron_next/qwen3_moe", "megatron-qwen3-moe-to-hf", "hf-qwen3-moe-to-maxtext"),
    ("megatron_next/deepseek3", "megatron-deepseek3-to-hf", "hf-deepseek3-to-maxtext"),
    *WITHOUT_SCALES,
]
UNSCALED = "megatron_logits/qwen3_moe_unscaled"
SMALL = """\
leaves: [{param: a, leaf: b}]
config: {model_type: '"small"', length: width, deep: {name: '"x" if scaled else "y"', none: null}}
"""


def rules_of(name):
    """The mapping of that name, or the same without its scales."""
    base, _, without = name.partition(" without ")
    content = ucp.Mapping.load(base).to_dict()
    for rule in content["leaves"]:
        rule.pop(without.removesuffix("s"), None)
    return ucp.Mapping.from_dict(content)


def chained(case, *mappings):
    checkpoint = Case(case).open()
    for mapping in mappings:
        checkpoint = checkpoint.map(rules_of(mapping))
    return checkpoint


def decoder_config(checkpoint):
    """The config as the decoder reads it."""
    return {**checkpoint.config, "rope_parameters": checkpoint.config["rope_scaling"]}


def test_every_mapping_from_megatron_is_tried():
    megatrons = ("megatron-", "deepspeed-")
    names = {name for name in shipped() if name.startswith(megatrons) and name.endswith("-to-hf")}
    assert {mapping.partition(":")[0] for _, mapping, _ in EVERY} == names


@pytest.mark.parametrize(("case", "first", "second"), CHAINS)
def test_the_logits_are_those_of_megatron_and_others_with_parts_exchanged(case, first, second):
    mapped, measured = chained(case, first, second), Case(case).measured()
    want = measured["logits_ref" if "bf16" in case else "logits"]

    def off(tree):
        got = decoder.logits(tree, decoder_config(mapped), measured["tokens"])
        return np.abs(got - want).max() / np.abs(want).max()

    tree = mapped.restore()["param"]
    assert off(tree) <= 1e-6
    layers = tree["params"]["decoder"].get("layers") or tree["params"]["decoder"]["moe_layers"]
    layers = layers.get("layers_0", layers)
    attention = layers.get("self_attention") or layers["GptOssAttention"]
    query = attention.get("query") or attention["wq_b"]
    query["kernel"] = query["kernel"][:, :, ::-1]
    assert off(tree) > 1e-3
    query["kernel"] = query["kernel"][:, :, ::-1]
    if "sinks" in attention:
        attention["sinks"] = attention["sinks"][::-1]
        assert off(tree) > 1e-3
        attention["sinks"] = attention["sinks"][::-1]
    layers = layers.get("DeepSeekMoeBlock_0", layers)
    for experts in filter(None, map(layers.get, ("MoeBlock_0", "moe_block", "GptOssMlp"))):
        if "bias" in experts["gate"]:
            bias, of_experts = experts["gate"]["bias"], 0 if "GptOssMlp" in layers else 1
            experts["gate"]["bias"] = np.flip(bias, of_experts)
            assert off(tree) > 1e-3
            experts["gate"]["bias"] = bias
        experts["wo"] = experts["wo"][::-1]
        assert off(tree) > 1e-3
        experts["wo"] = experts["wo"][::-1]
    if "key" in attention:
        attention["key"], attention["value"] = attention["value"], attention["key"]
    else:  # in one, keys as wide as values
        both = attention["wkv_b"]
        both["kernel"] = np.roll(both["kernel"], both["kernel"].shape[-1] // 2, axis=-1)
    assert off(tree) > 1e-1


@pytest.mark.parametrize(("case", "first", "second"), GPT2)
def test_logits_of_gpt2_are_those_of_megatron_and_others_with_exchanged_heads(case, first, second):
    mapped, measured = chained(case, first, second), Case(case).measured()
    tree = mapped.restore()["param"]
    want = measured["logits_ref"] if "logits_ref" in measured else measured["logits"]

    def off(config):
        got = decoder.gpt2_logits(tree, config, measured["tokens"])
        return np.abs(got - want).max() / np.abs(want).max()

    assert off(mapped.config) <= 1e-6
    [other] = {"gelu", "gelu_new"} - {mapped.config["activation_function"]}
    assert off({**mapped.config, "activation_function": other}) > 1e-5
    attention = tree["transformer"]["h"]["1"]["attn"]["c_proj"]
    attention["kernel"] = np.roll(attention["kernel"], mapped.config["n_embd"] // 4, axis=1)
    assert off(mapped.config) > 1e-3


@pytest.mark.parametrize(("case", "first", "second"), DEEPSPEED)
def test_rows_of_queries_keys_and_values_are_those_of_the_version_that_wrote_them(
    case, first, second, tmp_path
):
    live = Case(case)
    truth = live.truth().items()
    weights = {x.partition("/")[2]: array for x, array in truth if x.startswith("param/")}
    write_safetensors(tmp_path / "w.safetensors", weights)
    own = live.open().config
    older = {key: value for key, value in own.items() if key != "ds_sequence_parallel_fpdt"}
    measured = live.measured()
    for config in (older, {**older, "ds_sequence_parallel_fpdt": False}):
        mapped = ucp.open(tmp_path / "w.safetensors").map(first, config=config).map(second)
        logits = decoder.gpt2_logits(mapped.restore()["param"], mapped.config, measured["tokens"])
        off = np.abs(logits - measured["logits"]).max() / np.abs(measured["logits"]).max()
        assert (off <= 1e-6) == (config == own)
        assert off <= 1e-6 or off > 1e-2
    some = {key: value for key, value in older.items() if key != "world_size"}
    with pytest.raises(LayoutError, match=r"requires order: .* has none of ds_sequence"):
        ucp.open(tmp_path / "w.safetensors").map(first, config=some)


def test_gelu_that_is_fused_with_its_bias_is_the_approximation():
    case, first, _ = GPT2[0]
    rules, config = ucp.Mapping.load(first).config, Case(case).open().config
    lengths: dict[str, int] = dict.fromkeys(("vocab", "embed", "layer", "heads", "mlp"), 1)
    configs = ({**config, "bias_gelu_fusion": fused} for fused in (False, True))
    kinds = [config_from(rules, one, lengths)["activation_function"] for one in configs]
    assert kinds == ["gelu", "gelu_new"]


@pytest.mark.parametrize(
    ("case", "first", "second"),
    in_lanes([*EVERY, *(chain for chain in NEXT if "llama" in chain[1]), *WITHOUT_SCALES[1:]]),
)
def test_saved_in_between_it_is_the_same_and_back_through_both_every_bit_is_there_again(
    case, first, second, tmp_path
):
    # moments do not follow a query that is scaled, and the rest of linear_qkv's has no place alone
    is_scaled = any(rule.factor != 1 for rule in rules_of(second).rules)
    original = Case(case).open(weights_only=is_scaled)
    original.map(first).save(tmp_path / "hf")
    between = ucp.open(tmp_path / "hf").map(rules_of(second))
    at_once = original.map(first).map(rules_of(second))
    assert between.config == at_once.config
    saved = at_once.save(tmp_path / "saved")
    assert_same(arrays_of(between), arrays_of(saved))
    back = saved.map(rules_of(second).inverse()).map(ucp.Mapping.load(first).inverse())
    assert back.config == original.config
    found, want = arrays_of(back), arrays_of(original)
    rounded = {label for label in want if is_scaled and ".linear_qkv." in label}
    for label in rounded:
        near = 2 ** -(7 if found[label].dtype.itemsize == 2 else 22)
        values = (each[label].astype(np.float32) for each in (found, want))
        np.testing.assert_allclose(*values, rtol=near)
    assert_same(*({k: v for k, v in each.items() if k not in rounded} for each in (found, want)))


@pytest.mark.parametrize(("case", "first", "second"), [*NEXT, GPT_OSS])
def test_moments_of_the_live_run_lie_where_weights_in_their_place_would(
    case, first, second, tmp_path
):
    mapped, truth = chained(case, first, second), Case(case).truth()
    for state in ("param", "exp_avg", "exp_avg_sq"):
        of_state = (f"{state}/", "buffer/")  # a buffer has no moments: it stands for itself
        own = {label: array for label, array in truth.items() if label.startswith(of_state)}
        file = tmp_path / f"{state}.safetensors"
        write_safetensors(file, {label.partition("/")[2]: array for label, array in own.items()})
        as_weights = ucp.open(file).map(first, config=Case(case).open().config)
        want = arrays_of(as_weights.map(rules_of(second)))
        if state != "param" and any(label.startswith("buffer/") for label in truth):
            want = {label: want[label] for label in want if not label.endswith("gate/bias")}
        own = [leaf.label for leaf in mapped.leaves if leaf.label.startswith(f"{state}/")]
        found = {label.replace(state, "param", 1): mapped.read(label) for label in own}
        assert_same(found, want)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [*SCALED, *(chain for chain in NEXT if chain[2].endswith("maxtext"))],
)
def test_the_next_loss_of_the_weights_is_that_of_megatron(case, first, second):
    measured = Case(case).measured()
    mapped = chained(case, first, second)
    tokens = measured["tokens"][0]
    logits = decoder.logits(mapped.restore()["param"], decoder_config(mapped), tokens[:, :-1])
    chosen = np.take_along_axis(decoder.softmax(logits), tokens[:, 1:, None], -1)
    np.testing.assert_allclose(-np.log(chosen).mean(), measured["losses"][0], rtol=1e-6)


def trained(mapped):
    """What a run trains, and which of it decays."""
    params = mapped.abstract()["exp_avg"]  # without buffers, which are not trained
    groups = [(group.params, bool(group.settings["weight_decay"])) for group in mapped.groups]
    decays = {name: decay for params, decay in groups for name in params}

    def name(path):
        return jax.tree_util.keystr(path, simple=True, separator="/")

    return params, jax.tree_util.tree_map_with_path(lambda path, leaf: decays[name(path)], params)


@pytest.mark.parametrize(("case", "first", "second"), NEXT)
def test_an_optax_state_takes_all_of_the_run(case, first, second):
    mapped = chained(case, first, second)
    params, mask = trained(mapped)
    plan = mapped.plan_optimizer(optax.adamw(1e-2, b2=0.95, weight_decay=0.1, mask=mask), params)
    assert (plan.step, plan.left) == (3, {})
    state = plan.restore()[0]
    for moment, name in ((state.mu, "exp_avg"), (state.nu, "exp_avg_sq")):
        stored = mapped.restore()[name]
        assert jax.tree.all(jax.tree.map(lambda a, b: same_bits(np.asarray(a), b), moment, stored))


def test_other_settings_than_those_of_the_run_are_refused():
    mapped = chained(*NEXT[1])
    params, mask = trained(mapped)
    through_gradient = optax.chain(optax.add_decayed_weights(0.1, mask), optax.adam(1e-2, b2=0.95))
    others = {
        r"keeps 0.95 of exp_avg_sq .* tx 0.999": optax.adamw(1e-2, weight_decay=0.1, mask=mask),
        r"decays it in proportion \(AdamW\)": through_gradient,
        "has weight_decay=0.0 for it, and tx decays": optax.adamw(1e-2, b2=0.95, weight_decay=0.1),
    }
    for words, tx in others.items():
        with pytest.raises(TreeMismatch, match=words):
            mapped.plan_optimizer(tx, params)


@pytest.mark.parametrize(("case", "first", "second"), SCALED)
def test_a_run_whose_query_is_scaled_does_not_go_on_with_its_optimizer(case, first, second):
    mapped = chained(case, first, second)
    params = mapped.abstract()["param"]
    with pytest.raises(TreeMismatch, match=r"query/kernel.*nor has one that a mapping scales"):
        mapped.plan_optimizer(optax.adam(1e-2, b2=0.95), params, check=False)


def test_leaves_are_read_from_the_files_of_the_ranks_each_element_once():
    case, first, second = QWEN3
    stored = Case(case).open(weights_only=True)
    mapped = stored.map(first).map(second)
    assert mapped.plan().read_bytes == stored.plan().read_bytes
    files = {piece.file for param in mapped.params.values() for piece in param.where()}
    assert {file.rpartition(".")[2] for file in files} == {"distcp"}


def test_one_mapping_from_megatron_fits_a_checkpoint():
    for case, first, _ in EVERY:
        config = Case(case).open().config
        mappings = [ucp.Mapping.load(name) for _, name, _ in EVERY]
        fitting = [all(one.state == "met" for one in outcomes(each, config)) for each in mappings]
        found = {name for fits, (_, name, _) in zip(fitting, EVERY, strict=True) if fits}
        assert {name.partition(":")[0] for name in found} == {first.partition(":")[0]}


def test_the_command_offers_chains_and_takes_them(tmp_path):
    case, first, second = QWEN3
    path, chain = Case(case).path, f"{first},{second}"
    found = {entry["name"]: entry for entry in run_json("mappings", path)["mappings"]}
    assert found[chain]["fits"]
    assert found[chain]["target"] == "maxtext 0.2.5"
    assert "rope_theta" in found[f"{first},hf-qwen3-to-tunix"]["why"]
    sizes = ("--size", "vocab=101")
    assert run_json("map", path, "--mapping", chain, *sizes)["faults"] == []
    run("convert", path, tmp_path / "run", "--mapping", chain, *sizes)
    assert_same(arrays_of(ucp.open(tmp_path / "run")), arrays_of(chained(case, first, second)))
    run("convert", tmp_path / "run", tmp_path / "back", "--mapping", chain, "--inverse")
    assert_same(arrays_of(ucp.open(tmp_path / "back")), arrays_of(Case(case).open()))
    assert "x in assume" in run("map", path, "--mapping", chain, "--assume", "x", code=1)


def test_norms_inside_linears_as_transformer_engine_has_them_are_the_same_leaves(tmp_path):
    case, own_norms, _ = DEEPSEEK3
    want, original = chained(case, own_norms), Case(case).open()
    names = {"q_layernorm.weight": "linear_q_up_proj.layer_norm_weight"}
    names["kv_layernorm.weight"] = "linear_kv_up_proj.layer_norm_weight"
    kept = [label for label in original if label.startswith(("param/", "buffer/"))]
    weights = {label.partition("/")[2]: original.read(label) for label in kept}
    ends = {name: ".".join(name.split(".")[-2:]) for name in weights}
    renamed = {name: name.replace(end, names.get(end, end)) for name, end in ends.items()}
    fused = {renamed[name]: array for name, array in weights.items()}
    write_safetensors(tmp_path / "fused.safetensors", fused)
    opened = ucp.open(tmp_path / "fused.safetensors")
    mapped = opened.map("megatron-deepseek3-to-hf", config=original.config)
    assert mapped.config == want.config
    found = arrays_of(mapped)
    assert_same(found, {label: array for label, array in arrays_of(want).items() if label in found})
    mapped.save(tmp_path / "saved")
    rules = ucp.Mapping.load("megatron-deepseek3-to-hf").inverse()
    back = {leaf.param for leaf in ucp.open(tmp_path / "saved").map(rules).leaves}
    assert back == fused.keys()


def test_the_command_offers_a_chain_that_takes_buffers():
    case, first, second = DEEPSEEK3
    listed = run_json("mappings", Case(case).path)["mappings"]
    fitting = {one["name"] for one in listed if one["fits"]}
    name = first.partition(":")[0]
    assert {name, f"{name},{second}"} <= fitting


def test_a_run_with_buffers_goes_back_into_files_of_megatron(tmp_path):
    case, first, _ = DEEPSEEK3
    original = Case(case).open(sizes=None)
    original.map(first).save(tmp_path / "hf")
    back = ucp.open(tmp_path / "hf").map(ucp.Mapping.load(first).inverse())
    assert_same(arrays_of(back.export(tmp_path / "run", "megatron")), arrays_of(original))


def test_counts_that_follow_from_arguments_follow_from_given_ones_too(tmp_path):
    case, first, _ = DEEPSEEK3
    original = Case(case).open(weights_only=True)
    weights = {label.partition("/")[2]: array for label, array in arrays_of(original).items()}
    write_safetensors(tmp_path / "w.safetensors", weights)
    config = dict(original.config)
    del config["dense_layers"], config["query_groups"]
    given = ucp.open(tmp_path / "w.safetensors").map(first, config=config)
    assert given.config == original.map(first).config


@pytest.mark.parametrize(("sides", "keys"), [
    ((7, 0), 8),
    ([0, 0], 1),
    ({"!tuple": [7, 0]}, 8),
    ([7, 1], None),
    ([-1, 0], None),
    (None, None),
])  # fmt: skip
def test_the_keys_of_a_window_are_those_before_the_query_and_its_own(sides, keys):
    assert given_config({"window_size": sides})["window_keys"] == keys


def test_layers_that_predict_further_tokens_are_left_with_a_reason(tmp_path):
    case, first, _ = DEEPSEEK3
    original = Case(case).open(weights_only=True)
    weights = {label.partition("/")[2]: array for label, array in arrays_of(original).items()}
    weights |= {"mtp.layers.0.enorm.weight": np.ones(16)}
    write_safetensors(tmp_path / "w.safetensors", weights)
    mapped = ucp.open(tmp_path / "w.safetensors").map(first, config=original.config)
    [left] = [item for item in mapped.inventory if item.status == "skipped"]
    assert "enorm" in left.where
    assert "predict further tokens" in left.reason


def test_weights_that_are_not_scaled_to_a_sum_of_one_are_refused_where_a_model_scales_them():
    mapped = chained(UNSCALED, "megatron-qwen3-moe-to-hf")
    assert mapped.config["norm_topk_prob"] is False
    with pytest.raises(LayoutError, match="norm_topk_prob"):
        mapped.map("hf-qwen3-moe-to-maxtext")


OTHERS = [
    ("normalization", "LayerNorm", "norm"), ("apply_layernorm_1p", True, "norm"),
    ("layernorm_zero_centered_gamma", True, "norm"),
    ("apply_residual_connection_post_layernorm", True, "norm"), ("qk_l2_norm", True, "norm"),
    ("position_embedding_type", "learned_absolute", "rope"), ("rotary_interleaved", True, "rope"),
    ("rotary_percent", 0.5, "rope"), ("rotary_seq_len_interpolation_factor", 2, "rope"),
    ("no_rope_freq", [0, 1], "rope"), ("rotary_base_per_layer", [10000.0, 5000.0], "rope"),
    ("window_size", [8, 0], "attention"), ("softmax_scale", 0.0625, "attention"),
    ("softmax_type", "off-by-one", "attention"), ("attention_output_gate", True, "attention"),
    ("multi_latent_attention", True, "attention"), ("use_mup", True, "attention"),
    ("experimental_attention_variant", "dsa", "attention"),
    ("linear_attention_freq", 4, "attention"), ("is_hybrid_model", True, "attention"),
    ("heterogeneous_layers_config_path", "a.json", "attention"),
    ("heterogeneous_layers_config_encoded_json", "{}", "attention"),
    ("swiglu", False, "activation"), ("squared_relu", True, "activation"),
    ("quick_geglu", True, "activation"), ("activation_func_clamp_value", 7.0, "activation"),
    ("glu_linear_offset", 1.0, "activation"), ("moe_mlp_glu_interleave_size", 32, "activation"),
    ("add_bias_linear", True, "bias"),
]  # fmt: skip
OF_EXPERTS = [
    ("moe_router_score_function", "sigmoid", "router"), ("moe_router_num_groups", 2, "router"),
    ("moe_router_topk_scaling_factor", 2.5, "router"), ("moe_latent_size", 8, "router"),
    ("moe_router_load_balancing_type", "sinkhorn", "router"),
    ("moe_router_enable_expert_bias", True, "router"), ("moe_router_force_biased", 1.0, "router"),
    ("moe_router_force_load_balancing", True, "router"),
    ("moe_router_topk_limited_devices", 2, "router"), ("moe_expert_capacity_factor", 1.0, "router"),
    ("moe_expert_rank_capacity_factor", 1.0, "router"), ("moe_n_hash_layers", 1, "router"),
    ("moe_apply_probs_on_input", True, "router"), ("moe_layer_freq", [0, 1], "layers"),
    ("moe_layer_freq", 2, "layers"), ("moe_shared_expert_intermediate_size", 16, "layers"),
]  # fmt: skip


OF_LATENTS = [
    *(other for other in OTHERS if other[0] != "multi_latent_attention"),
    ("multi_latent_attention", False, "attention"), ("qk_layernorm", False, "qk_norm"),
    ("q_lora_rank", None, "query"), ("layernorm_epsilon", 1e-5, "eps"), ("mscale", 0.5, None),
    ("mscale", 0.0, "yarn"), ("add_qkv_bias", True, "bias"), ("num_experts", None, "router"),
    ("moe_router_score_function", "softmax", "router"), ("moe_router_topk", 1, "router"),
    ("moe_router_enable_expert_bias", False, "router"), ("moe_router_topk", 4, "router"),
    ("moe_router_topk_scaling_factor", 0.0, "router"), ("moe_router_group_topk", None, None),
    ("moe_router_group_topk", 2, None), ("dense_layers", None, "layers"),
    ("moe_shared_expert_intermediate_size", None, "layers"),
    ("moe_shared_expert_gate", True, "layers"),
    ("moe_shared_expert_glu_interleave_size", 32, "layers"),
    ("moe_router_load_balancing_type", "quantile_balancing", "router"),
    *(
        other for other in OF_EXPERTS if other[2] == "router"
        and other[0] not in ("moe_router_score_function", "moe_router_num_groups",
                             "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias")
    ),
]  # fmt: skip


OF_GPT_OSS = [
    *(other for other in OTHERS if other[0] not in ("window_size", "swiglu", "quick_geglu",
      "activation_func_clamp_value", "glu_linear_offset", "add_bias_linear",
      "position_embedding_type")),
    ("position_embedding_type", "rope", "rope"), ("enable_gpt_oss", True, "rope"),
    ("mscale", 0.5, "yarn"), ("mscale_all_dim", 1.0, "yarn"), ("softmax_type", "vanilla", "attention"),
    ("window_keys", None, "window"), ("window_attn_skip_freq", None, "window"),
    ("window_attn_skip_freq", 3, "window"), ("window_attn_skip_freq", [0, 1, 0, 1], "window"),
    ("window_attn_skip_freq", [1, 0, 1, 0], None), ("swiglu", True, "activation"),
    ("quick_geglu", False, "activation"), ("activation_func_clamp_value", None, "activation"),
    ("activation_func_clamp_value", 5.0, None), ("glu_linear_offset", 0.0, "activation"),
    ("use_te_activation_func", True, "activation"),
    ("use_transformer_engine_op_fuser", True, "activation"), ("bias_gelu_fusion", True, "clamp"),
    ("moe_grouped_gemm", True, None), ("add_bias_linear", False, "bias"),
    ("qk_layernorm", True, "qk_norm"), ("moe_router_pre_softmax", True, "softmax"),
    ("num_experts", None, "router"), *OF_EXPERTS,
]  # fmt: skip


OF_DEEPSPEED = [
    ("normalization", "rmsnorm", "norm"), ("apply_layernorm_1p", True, "norm"),
    ("apply_residual_connection_post_layernorm", True, "norm"),
    ("add_position_embedding", False, "positions"),
    ("use_rotary_position_embeddings", True, "positions"), ("num_key_value_heads", 2, "heads"),
    ("ds_sequence_parallel_size", 2, "rows"), ("force_ds_sequence_parallel", True, "rows"),
    ("swiglu", True, "activation"), ("squared_relu", True, "activation"),
    ("openai_gelu", True, "activation"), ("onnx_safe", True, "activation"),
    ("add_bias_linear", False, "bias"), ("num_experts", [1, 4], "experts"),
    ("untie_embeddings_and_output_weights", True, "tied"),
]  # fmt: skip


OF_GPT2 = [
    *(other for other in OTHERS if other[2] == "attention"),
    ("normalization", "RMSNorm", "norm"), ("layernorm_zero_centered_gamma", True, "norm"),
    ("apply_layernorm_1p", True, "norm"), ("qk_l2_norm", True, "norm"), ("qk_layernorm", True, "norm"),
    ("apply_residual_connection_post_layernorm", True, "norm"),
    ("position_embedding_type", "rope", "positions"), ("query_groups", 2, "heads"),
    ("swiglu", True, "activation"), ("squared_relu", True, "activation"),
    ("quick_geglu", True, "activation"), ("openai_gelu", True, "activation"),
    ("use_te_activation_func", True, "activation"),
    ("use_transformer_engine_op_fuser", True, "activation"),
    ("add_bias_linear", False, "bias"), ("num_experts", 4, "experts"),
]  # fmt: skip


@pytest.mark.parametrize(("chain", "key", "value", "name"), [
    *((DEEPSEEK3, *other) for other in OF_LATENTS), *((GPT_OSS, *other) for other in OF_GPT_OSS),
    *((GPT2[0], *other) for other in OF_GPT2), *((DEEPSPEED[0], *other) for other in OF_DEEPSPEED),
])  # fmt: skip
def test_an_argument_by_which_megatron_computes_something_else_is_refused(chain, key, value, name):
    case, mapping, _ = chain
    config = {**Case(case).open().config, key: value}
    results = outcomes(ucp.Mapping.load(mapping), config)
    unmet = {one.requirement.name for one in results if one.state == "unmet"}
    assert unmet == ({name} if name else set())


@pytest.mark.parametrize(
    ("case", "mapping", "_"),
    {chain[1]: chain for chain in CHAINS if chain not in (DEEPSEEK3, GPT_OSS)}.values(),
)
def test_arguments_by_which_megatron_computes_something_else_are_refused(case, mapping, _):
    checkpoint, rules = Case(case).open(), ucp.Mapping.load(mapping)
    has_experts = "moe" in mapping or "mixtral" in mapping
    others = OTHERS + (OF_EXPERTS if has_experts else [("num_experts", 4, "experts")])
    others.append(("qk_layernorm", not checkpoint.config["qk_layernorm"], "qk_norm"))
    others.append(("add_qkv_bias", not checkpoint.config.get("add_qkv_bias"), "bias"))
    if mapping != "megatron-llama-to-hf":
        others.append(("use_rope_scaling", True, "rope_scaling"))
    elif checkpoint.config.get("use_rope_scaling"):
        others.append(("rope_scaling_factor", 32.0, "rope_factor"))
    if mapping == "megatron-mixtral-to-hf":
        others.append(("moe_router_pre_softmax", True, "softmax"))
    for key, value, name in others:
        config = {**checkpoint.config, key: value}
        unmet = {one.requirement.name for one in outcomes(rules, config) if one.state == "unmet"}
        assert name in unmet, key


def test_what_the_config_of_leaves_is_made_of_is_checked():
    mapping = ucp.Mapping.parse(SMALL, "small.yaml")
    assert ucp.Mapping.from_dict(mapping.to_dict()).config == mapping.config
    assert mapping.config_keys == {"width", "scaled"}
    assert mapping.inverse().config == {}
    for text, fault in [
        ("config: [1]", "should be a mapping of settings"),
        ("config: {a: 'x +'}", "'x \\+' is not a setting"),
        ("config: {a: f(x)}", "'f\\(x\\)' is not a setting: write a key"),
        ("config: {a: {1: x}}", "a config has names, not 1"),
        ("config: {...: 7}", "`...` is a key of the config, or `config` for all of it"),
    ]:
        with pytest.raises(SpecError, match=fault):
            ucp.Mapping.parse(f"leaves: [{{param: a, leaf: b}}]\n{text}", "small.yaml")


def test_a_config_that_is_not_known_is_refused_and_may_be_given(tmp_path):
    write_safetensors(tmp_path / "w.safetensors", {"a": np.arange(3.0)})
    checkpoint, mapping = ucp.open(tmp_path / "w.safetensors"), ucp.Mapping.parse(SMALL, "small")
    with pytest.raises(LayoutError, match="length: `width` is needed, and the config has no width"):
        checkpoint.map(mapping)
    given = {"width": 3, "scaled": False, "more": 1}
    mapped = checkpoint.map(mapping, config=given)
    deep = {"name": "y", "none": None}
    assert mapped.config == {"model_type": "small", "length": 3, "deep": deep}
    back = mapped.map(mapping.inverse())
    assert back.config == checkpoint.config == {}
    assert_same(arrays_of(back), arrays_of(checkpoint))


def test_the_other_settings_may_be_those_of_a_section_or_of_the_whole_config(tmp_path):
    write_safetensors(tmp_path / "w.safetensors", {"a": np.arange(3.0)})
    checkpoint = ucp.open(tmp_path / "w.safetensors")
    text = "leaves: [{param: a, leaf: b}]\nconfig:\n  ...: OTHERS\n  kind: '\"x\"'\n  b: gone\n"
    section = {"kind": "y", "a": None, "b": 2, "deep": {"c": [3]}}
    found = {"kind": "x", "a": None, "deep": {"c": [3]}}

    def mapped(others, **config):
        mapping = ucp.Mapping.parse(text.replace("OTHERS", others), "small")
        return checkpoint.map(mapping, config={"gone": None, **config}).config

    assert mapped("part", part=section) == found
    assert mapped("first(part, config)", part=section) == found
    assert mapped("first(part, config)", **section) == {"gone": None, **found}
    pairs = ("part", "3"), ("first(part.kind, 1)", "'y'"), ("first(more, null)", "None")
    for others, found in pairs:
        fault = re.escape(f"config: {others} is {found}, and not a config")
        with pytest.raises(LayoutError, match=fault):
            mapped(others, part={"kind": "y"} if "kind" in others else 3)
    with pytest.raises(LayoutError, match=r"config: \.\.\.: `part` is needed"):
        mapped("part")


def test_a_config_of_which_all_is_used_may_not_differ_in_any_key_from_the_given_one(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": np.arange(3.0)})
    (tmp_path / "config.json").write_text('{"b": 1}')
    whole = ucp.Mapping.parse("leaves: [{param: a, leaf: b}]\nconfig: {...: config}", "whole")
    with pytest.raises(LayoutError, match="the given config has b = 2, the checkpoint's own 1"):
        ucp.open(tmp_path).map(whole, config={"b": 2})
    assert ucp.open(tmp_path).map(whole, config={"c": 2}).config == {"b": 1, "c": 2}


def test_tokens_that_arguments_do_not_name_are_null_and_may_be_given(tmp_path):
    hf = Case("megatron_logits/llama31").open().map("megatron-llama-to-hf")
    hf.export(tmp_path / "null", "safetensors")
    hf.export(tmp_path / "given", "safetensors", config={"eos_token_id": 128001})
    configs = (tmp_path / name / "config.json" for name in ("null", "given"))
    null, given = (json.loads(path.read_text()) for path in configs)
    assert (null["bos_token_id"], null["eos_token_id"]) == (None, None)
    assert given == {**null, "eos_token_id": 128001}
