"""A mapping is refused for a model whose arithmetic it does not fit, whatever names and shapes say.

Every model here has the names and shapes that the mapping asks for. What the config says differs,
as it does in models that people have: other rotations, activations, windows, routers, families.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from commands import run, run_json
from jax_ucp.errors import FormatError, LayoutError, SpecError
from jax_ucp.mapping.rules import shipped

DATA = Path(__file__).parent.parent / "data"
LLAMA31_V4 = {
    "rope_parameters": None,
    "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


# A case, a mapping, what the config has instead (None: it lacks the key), the requirement, and what
# the message says.
REFUSED = [
    ("torch/hf_llama", "hf-llama-to-maxtext", {}, "rope", 'rope_parameters.rope_type = "default"'),
    ("maxtext/llama31", "hf-llama2-to-maxtext", {}, "rope", 'rope_parameters.rope_type = "llama3"'),
    ("maxtext/gemma2", "hf-gemma2-to-tunix", {"query_pre_attn_scalar": 144}, "query_scale", "144"),
    ("maxtext/gemma2", "hf-gemma2-to-maxtext", {"layer_types": ["full_attention"] * 4}, "layers",
     "full_attention"),
    ("maxtext/gemma3", "hf-gemma3-to-maxtext", {"layer_types": ["sliding_attention"] * 8}, "layers",
     "sliding_attention"),
    ("maxtext/gemma3", "hf-gemma3-to-tunix", {"final_logit_softcapping": 30.0}, "softcap", "30.0"),
    ("tunix/gemma4", "hf-gemma4-to-tunix", {"enable_moe_block": True}, "experts", "true"),
    ("tunix/gemma4", "hf-gemma4-to-tunix", {"rms_norm_eps": 1e-5}, "eps", "1e-05"),
    ("tunix/gemma4", "hf-gemma4-to-tunix", {"num_kv_shared_layers": 6}, "kv_shared", "= 6"),
    ("maxtext/gemma4_moe", "hf-gemma4-to-tunix", {}, "experts", "enable_moe_block = true"),
    ("tunix/gemma4", "hf-gemma4-to-tunix", {"use_bidirectional_attention": "all"}, "causal", '"all"'),
    ("maxtext/gpt_oss", "hf-gpt-oss-to-maxtext", {"swiglu_limit": 5.0}, "activation", "5.0"),
    ("maxtext/gpt_oss", "hf-gpt-oss-to-maxtext", rope("linear", factor=4.0), "rope", "linear"),
    ("maxtext/deepseek3", "hf-deepseek3-to-maxtext", {"rope_parameters": {"mscale_all_dim": 0.5}}, "rope",
     "mscale_all_dim = 0.5"),
    ("maxtext/deepseek3", "hf-deepseek3-to-maxtext", {"norm_topk_prob": False}, "norm_topk_prob", "false"),
    ("maxtext/deepseek3", "hf-deepseek3-to-maxtext", {"rms_norm_eps": 1e-5}, "eps", "1e-05"),
    ("maxtext/deepseek2", "hf-deepseek2-to-maxtext", {"rms_norm_eps": 1e-5}, "eps", "1e-05"),
    ("maxtext/deepseek3", "hf-deepseek3-to-maxtext", {"layer_types": ["indexed_attention"] * 3},
     "sliding_window", "indexed_attention"),
    ("maxtext/deepseek32", "hf-deepseek3-to-maxtext",
     {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"]}, "sliding_window",
     "sliding_attention"),
    ("maxtext/llama31", "hf-llama-to-maxtext", {"rope_parameters": {"factor": 32.0}}, "rope",
     "factor = 32.0"),
    ("torch/hf_llama", "hf-llama2-to-maxtext", rope("linear", factor=4.0), "rope", 'rope_type = "linear"'),
    ("torch/hf_llama", "hf-llama2-to-maxtext", rope("yarn", factor=4.0), "rope", 'rope_type = "yarn"'),
    ("torch/hf_llama", "hf-llama2-to-maxtext",
     {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope",
     'rope_scaling.type = "linear"'),
    ("torch/hf_llama", "hf-llama-to-tunix", {}, "rope_theta", "rope_parameters.rope_theta = 10000.0"),
    ("torch/hf_llama", "hf-llama-to-tunix", rope("dynamic", factor=2.0), "rope", 'rope_type = "dynamic"'),
    ("torch/hf_llama", "hf-llama2-to-maxtext", {"hidden_act": "gelu"}, "activation", 'hidden_act = "gelu"'),
    ("torch/hf_llama", "hf-llama2-to-maxtext", {"model_type": "granite"}, "family", 'model_type = "granite"'),
    ("torch/hf_llama", "hf-llama2-to-maxtext", {"model_type": None}, "family", "no model_type"),
    ("torch/hf_gemma", "hf-llama-to-tunix", {}, "family", 'model_type = "gemma"'),
    ("torch/hf_gemma", "hf-llama2-to-maxtext", {}, "family", 'model_type = "gemma"'),
    ("torch/hf_gemma", "hf-gemma-to-tunix", {"hidden_act": "relu"}, "activation", 'hidden_act = "relu"'),
    ("torch/hf_gemma", "hf-gemma-to-tunix", {"hidden_activation": "gelu"}, "activation",
     'hidden_activation = "gelu"'),
    ("torch/hf_gemma", "hf-gemma-to-tunix", {"rms_norm_eps": 1e-5}, "eps", "rms_norm_eps = 1e-05"),
    ("torch/hf_gemma", "hf-gemma-to-tunix", {"tie_word_embeddings": False}, "tied",
     "tie_word_embeddings = false"),
    ("torch/hf_gemma", "hf-gemma-to-tunix", {"rope_theta": 1e6, "rope_parameters": None}, "rope_theta",
     "1000000.0"),
    ("torch/hf_gemma", "hf-gemma-to-tunix", {"use_bidirectional_attention": True}, "causal",
     "attention = true"),
    ("torch/hf_qwen2", "hf-qwen2-to-maxtext", rope("yarn", factor=4.0), "rope", 'rope_type = "yarn"'),
    ("torch/hf_qwen2", "hf-qwen2-to-tunix", {"use_sliding_window": True, "sliding_window": 8},
     "sliding_window", "= 8"),
    ("torch/hf_qwen3", "hf-qwen3-to-maxtext", {"attention_bias": True}, "bias", "attention_bias = true"),
    ("torch/hf_qwen3", "hf-qwen3-to-tunix", {"attention_bias": True}, "bias", "attention_bias = true"),
    ("torch/hf_qwen3_moe", "hf-qwen3-moe-to-maxtext", {}, "norm_topk_prob", "norm_topk_prob = false"),
    ("torch/hf_qwen3_moe", "hf-qwen3-moe-to-tunix", {"norm_topk_prob": None}, "norm_topk_prob",
     "no norm_topk_prob"),
    ("torch/hf_mixtral", "hf-mixtral-to-maxtext", {"sliding_window": 8}, "sliding_window",
     "sliding_window = 8"),
    ("maxtext/mistral", "hf-mistral-to-maxtext", {"sliding_window": 32}, "sliding_window",
     "sliding_window = 32"),
    ("maxtext/qwen35_moe", "hf-qwen3.5-moe-to-maxtext", {"model_type": "qwen3_next"}, "family", "qwen3_next"),
    ("maxtext/qwen35_moe", "hf-qwen3.5-moe-to-maxtext",
     {"layer_types": ["linear_attention", "full_attention"] * 4}, "layers", "full_attention"),
    ("maxtext/qwen35_moe", "hf-qwen3.5-moe-to-maxtext", {"shared_expert_intermediate_size": 8},
     "shared_expert", "= 8"),
    ("maxtext/qwen35_moe", "hf-qwen3.5-moe-to-maxtext", {"rope_parameters": {"partial_rotary_factor": 0.5}},
     "rope", "partial_rotary_factor = 0.5"),
    ("torch/hf_gpt2", "hf-gpt2-to-flax", {"scale_attn_weights": False}, "scaling",
     "scale_attn_weights = false"),
    ("torch/hf_gpt2", "hf-gpt2-to-flax", {"scale_attn_by_inverse_layer_idx": True}, "scaling",
     "layer_idx = true"),
]  # fmt: skip
# What is said in other words, or does not matter, is accepted.
ACCEPTED = [
    ("maxtext/llama31", "hf-llama-to-maxtext", LLAMA31_V4),
    ("torch/hf_llama", "hf-llama2-to-maxtext",
     {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None}),
    ("torch/hf_llama", "hf-llama2-to-maxtext",
     {"hidden_act": "swish", "attention_bias": None, "mlp_bias": None}),
    ("torch/hf_llama", "hf-llama-to-tunix", {"rope_parameters": None, "rope_theta": 1000000}),
    ("torch/hf_gemma", "hf-gemma-to-tunix", {"hidden_act": "gelu", "tie_word_embeddings": None}),
    ("torch/hf_qwen2", "hf-qwen2-to-tunix", {"use_sliding_window": False, "sliding_window": 8}),
    # as long as its positions
    ("torch/hf_mixtral", "hf-mixtral-to-maxtext", {"sliding_window": 64}),
    ("torch/hf_mixtral", "hf-mixtral-to-maxtext", {"sliding_window": None}),
    # which only says how tokens of images attend
    ("tunix/gemma4", "hf-gemma4-to-tunix", {"use_bidirectional_attention": "vision"}),
]  # fmt: skip


def model(folder, case, changes, without=()):
    """The checkpoint of a case with another config: None takes a key away, a dict changes it."""
    shutil.copytree(DATA / case / "ckpt", folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] |= value
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    for name in without:
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize(("case", "mapping", "changes", "name", "said"), REFUSED)
def test_a_mapping_is_refused_for_another_arithmetic(case, mapping, changes, name, said, tmp_path):
    checkpoint = ucp.open(model(tmp_path / "model", case, changes))
    with pytest.raises(LayoutError) as error:
        checkpoint.map(mapping)
    lines = str(error.value).split("\n  ")
    lines = [line for line in lines if line.startswith(f"requires {name}: ")]
    assert len(lines) == 1
    assert "` is needed, and the config has " in lines[0]
    assert said in lines[0]


@pytest.mark.parametrize(("case", "mapping", "changes"), ACCEPTED)
def test_a_config_that_says_the_same_otherwise_is_accepted(case, mapping, changes, tmp_path):
    assert ucp.open(model(tmp_path / "model", case, changes)).map(mapping).leaves


@pytest.mark.parametrize(("changes", "name"), [
    ({"rotary_interleaved": True}, "rope"),
    ({"rotary_percent": 0.5}, "rope"),
    ({"use_rope_scaling": True}, "rope"),
    ({"layernorm_zero_centered_gamma": True}, "norm"),
    ({"apply_residual_connection_post_layernorm": True}, "norm"),
    ({"window_size": [128, 0]}, "attention"),
    ({"squared_relu": True}, "activation"),
    ({"moe_router_score_function": "sigmoid"}, "router"),
])  # fmt: skip
def test_megatrons_arguments_say_what_the_reference_transformer_does_not_do(changes, name):
    path = DATA / "megatron" / "dist_tp2_gqa_swiglu_qknorm_fp32" / "ckpt"
    checkpoint = ucp.open(path, sizes={"vocab": 100})
    assert checkpoint.map("megatron-gpt-to-reference").leaves
    checkpoint.extras["common.pt"]["args"]["fields"].update(changes)
    with pytest.raises(LayoutError, match=f"requires {name}: .*{next(iter(changes))}"):
        checkpoint.map("megatron-gpt-to-reference")


@pytest.mark.parametrize(("case", "mapping", "fits"), [
    ("torch/hf_llama",     "hf-llama-to-maxtext",   "hf-llama2-to-maxtext"),
    ("maxtext/llama31",    "hf-llama2-to-maxtext",  "hf-llama-to-maxtext"),
    ("maxtext/mistral",    "hf-llama-to-maxtext",   "hf-mistral-to-maxtext"),
    ("maxtext/llama2",     "hf-mistral-to-maxtext", "hf-llama2-to-maxtext"),
    ("torch/hf_gemma",     "hf-llama-to-tunix",     "hf-gemma-to-tunix"),
    ("torch/hf_gemma",     "hf-gemma-7b-to-tunix",  "hf-gemma-to-tunix"),
    ("torch/hf_gemma_mha", "hf-gemma-to-tunix",     "hf-gemma-7b-to-tunix"),
    ("torch/hf_qwen2",     "hf-qwen3-to-tunix",     "hf-qwen2-to-tunix"),
])  # fmt: skip
def test_the_refusal_names_the_mapping_of_the_package_that_fits(case, mapping, fits):
    checkpoint = ucp.open(DATA / case / "ckpt")
    with pytest.raises(LayoutError, match=rf"; {fits} fits this model; to vouch"):
        checkpoint.map(mapping)
    back = checkpoint.map(fits)
    with pytest.raises(LayoutError, match=rf"; {fits} fits this model; to vouch"):
        back.map(ucp.Mapping.load(mapping).inverse())


def test_where_no_mapping_of_the_package_fits_the_refusal_names_none(tmp_path):
    checkpoint = ucp.open(model(tmp_path / "model", "torch/hf_llama", rope("yarn", factor=4.0)))
    with pytest.raises(LayoutError) as error:
        checkpoint.map("hf-llama2-to-maxtext")
    assert "fits this model" not in str(error.value)
    assert str(error.value).endswith("; to vouch for a requirement, name it in assume= (--assume)")


def test_every_mapping_of_a_hugging_face_model_asks_for_its_family_first():
    for name in shipped():
        requires = ucp.Mapping.load(name).requires
        assert name.startswith("deepspeed") or requires, name
        assert not name.startswith("hf-") or requires[0].name == "family", name


WITHOUT = ["config.json"]


def test_a_checkpoint_without_its_config_is_refused_until_that_is_given(tmp_path):
    checkpoint = ucp.open(model(tmp_path / "model", "torch/hf_llama", {}, WITHOUT))
    with pytest.raises(
        LayoutError,
        match=r"requires family, rope, one_rotation, .*, but the checkpoint does not have",
    ):
        checkpoint.map("hf-llama2-to-maxtext", sizes={"heads": 4, "kv_heads": 2})
    assert checkpoint.config == {}
    path = DATA / "torch" / "hf_llama" / "ckpt" / "config.json"
    want = ucp.open(path.parent).map("hf-llama2-to-maxtext")
    for config in (path, str(path), json.loads(path.read_text()), ucp.open(path.parent).config):
        got = checkpoint.map("hf-llama2-to-maxtext", config=config)
        shapes = [{leaf.label: leaf.shape for leaf in one.leaves} for one in (got, want)]
        assert shapes[0] == shapes[1]
    with pytest.raises(LayoutError, match="requires rope: "):
        checkpoint.map("hf-llama-to-maxtext", config=path)


def test_a_given_config_is_remembered_so_that_the_way_back_needs_none(tmp_path):
    checkpoint = ucp.open(model(tmp_path / "model", "torch/hf_llama", {}, WITHOUT))
    config = json.loads((DATA / "torch" / "hf_llama" / "ckpt" / "config.json").read_text())
    mapped = checkpoint.map("hf-llama-to-tunix", config=config, assume=["rope_theta"])
    saved = mapped.save(tmp_path / "out")
    about = saved.source["mapping"]
    assert about["assumed"] == ["rope_theta"]
    assert about["config"]["rope_parameters"] == config["rope_parameters"]
    assert "eos_token_id" not in about["config"]
    back = saved.map(ucp.Mapping.load("hf-llama-to-tunix").inverse())
    words = "on the user's word, against the requirement rope_theta: "
    assert any(note.startswith(words) for note in back.notes)
    for name, param in checkpoint.params.items():
        np.testing.assert_array_equal(back.params[name].read(), param.read())


def test_a_given_config_that_contradicts_the_stored_one_is_refused():
    checkpoint = ucp.open(DATA / "torch" / "hf_llama" / "ckpt")
    with pytest.raises(
        LayoutError, match=r"the given config has num_attention_heads = 8, the checkpoint's own 4"
    ):
        checkpoint.map("hf-llama2-to-maxtext", config={"num_attention_heads": 8})
    checkpoint.map("hf-llama2-to-maxtext", config={"num_attention_heads": 4, "eos_token_id": 7})


@pytest.mark.parametrize(("text", "said"), [
    (b"[1]",  "is not a model's config"),
    (b"{",    "cannot be read"),
    (b"\xff", "cannot be read"),
    (None,    "No such file"),
])  # fmt: skip
def test_what_is_no_config_is_refused(text, said, tmp_path):
    path = tmp_path / "my.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(FormatError, match=said):
        ucp.open(DATA / "torch" / "hf_llama" / "ckpt").map("hf-llama2-to-maxtext", config=path)


def test_what_the_user_vouches_for_is_noted_and_must_be_a_requirement():
    checkpoint = ucp.open(DATA / "torch" / "hf_llama" / "ckpt")
    mapped = checkpoint.map("hf-llama-to-tunix", assume=["rope_theta"])
    (note,) = [note for note in mapped.notes if note not in checkpoint.notes]
    assert note.startswith("on the user's word, against the requirement rope_theta: ")
    assert "rope_parameters.rope_theta = 10000.0" in note
    with pytest.raises(
        LayoutError,
        match=r"theta in assume: the requirements of .* are family, rope, one_rotation, ",
    ):
        checkpoint.map("hf-llama-to-tunix", assume=["theta"])
    with pytest.raises(TypeError, match="a list of names of requirements"):
        checkpoint.map("hf-llama-to-tunix", assume="rope_theta")


def test_an_untied_model_without_its_head_is_refused(tmp_path):
    untied = {"tie_word_embeddings": False}
    checkpoint = ucp.open(model(tmp_path / "model", "torch/hf_llama_bf16_tied", untied))
    with pytest.raises(LayoutError, match=r"the rule for lm_head\.weight finds no parameter"):
        checkpoint.map("hf-llama2-to-maxtext")


def test_a_head_that_is_stored_beside_its_tied_embedding_becomes_no_leaf_and_is_compared(tmp_path):
    path = model(tmp_path / "model", "torch/hf_llama", {"tie_word_embeddings": True})
    checkpoint = ucp.open(path)
    mapped = checkpoint.map("hf-llama2-to-maxtext")
    assert not [leaf.label for leaf in mapped.leaves if "logits_dense" in leaf.label]
    faults = [label for label, fault in mapped.verify() if fault]
    assert faults == ["param/params/token_embedder/embedding"]  # this head is another array


def test_the_command_line_shows_what_became_of_each_requirement(tmp_path):
    case = DATA / "torch" / "hf_llama" / "ckpt"
    found = run_json("map", case, "--mapping", "hf-llama-to-tunix", code=1)
    states = {one["name"]: one["state"] for one in found["requires"]}
    assert states == {
        "family": "met",
        "rope": "met",
        "one_rotation": "met",
        "rope_theta": "unmet",
        "activation": "met",
        "bias": "met",
        "sliding_window": "met",
        "causal": "met",
        "torchscript": "met",
        "layers_alike": "met",
    }
    assert len(found["faults"]) == 1
    text = run("map", case, "--mapping", "hf-llama-to-tunix", code=1)
    assert "requires rope_theta: unmet\n" in text
    assert 'requires activation: met, hidden_act = "silu"\n' in text
    assert "fault: requires rope_theta: `rope_parameters.rope_theta == 1000000`" in text
    text = run("map", case, "--mapping", "hf-llama-to-tunix", "--assume", "rope_theta")
    assert "requires rope_theta: assumed\n" in text
    assert "note: on the user's word, against the requirement rope_theta" in text


def test_every_command_with_a_mapping_takes_the_config_and_what_is_vouched_for(tmp_path):
    bare = model(tmp_path / "model", "torch/hf_llama", {}, WITHOUT)
    given = ("--mapping", "hf-llama-to-tunix", "--assume", "rope_theta", "--config")
    given = (*given, DATA / "torch" / "hf_llama" / "ckpt" / "config.json")
    for command in ("inspect", "plan", "verify", "map"):
        run(command, bare, *given)
        assert "rope_theta" in run(command, bare, *given[:2], code=1)
    run("convert", bare, tmp_path / "out", *given)
    run("export", tmp_path / "out", tmp_path / "back", "--format", "safetensors", *given)
    back = ucp.open(tmp_path / "back")
    for name, param in ucp.open(bare).params.items():
        np.testing.assert_array_equal(back.params[name].read(), param.read())


def test_config_and_assume_go_with_a_mapping(tmp_path):
    case = DATA / "torch" / "hf_llama" / "ckpt"
    for more in (("--assume", "rope"), ("--config", "config.json")):
        assert "go with --mapping" in run("inspect", case, *more, code=2)
        text = run("export", case, tmp_path / "x", "--format", "safetensors", *more, code=2)
        assert "go with --mapping" in text
    text = run("map", case, "--mapping", "hf-llama2-to-maxtext", "--assume", "none", code=1)
    names = "family, rope, one_rotation, activation, bias, sliding_window"
    assert f"none in assume: the requirements of hf-llama2-to-maxtext.yaml are {names}" in text
    options = "--mapping", "hf-llama2-to-maxtext", "--config", tmp_path / "no.json"
    missing = run("map", case, *options, code=1)
    assert "no.json cannot be read as a model's config" in missing


@pytest.mark.parametrize(("requires", "fault"), [
    ("{a: b}", "requires should be a list"),
    ("[{name: a, that: b == 1}]", "a requirement lacks reason"),
    ("[{name: a, that: b == 1, reason: r, why: s}]", "a requirement has no field 'why'"),
    ("[{name: '', that: b == 1, reason: r}]", "the name of a requirement is a text, not ''"),
    ("[{name: a, that: b == 1, reason: 3}]", "the reason of a requirement is a text, not 3"),
    ("[{name: a, that: true, reason: r}]", "a condition is a text, not True"),
    ("[{name: a, that: b = 1, reason: r}]", "'b = 1' is not a condition"),
    ("[{name: a, that: b, reason: r}, {name: a, that: c, reason: r}]", "two requirements are named 'a'"),
])  # fmt: skip
def test_requirements_that_are_none_are_refused_when_the_mapping_is_read(requires, fault):
    with pytest.raises(SpecError) as error:
        ucp.Mapping.parse(f"requires: {requires}\nleaves: [{{param: a, leaf: b}}]", "my.yaml")
    assert fault in str(error.value)


# By mapping, a digest of its requirements with those of `requirements.yaml` written out. Whoever
# changes a requirement that several mappings share sees here which mappings change with it.
REQUIREMENTS = {
    "deepspeed-gpt2-to-hf": "72fe6f3288b79873",
    "gguf-gemma-to-hf": "7f9a05fe382f9208", "gguf-gemma2-to-hf": "dc9ce2b4196026c3",
    "gguf-gemma3-to-hf": "a41508757850dce3", "gguf-llama-to-hf": "a4ab40d86f8a28b8",
    "gguf-mixtral-to-hf": "2de729ae755ede2a", "gguf-qwen2-to-hf": "a1adaf949ed3f238",
    "gguf-qwen3-moe-to-hf": "c1a047d54a1eb7a3", "gguf-qwen3-to-hf": "2e19c470f1478d32",
    "hf-deepseek2-to-maxtext": "fb44ca5c7fdb628b", "hf-deepseek3-to-maxtext": "fed9c3c6304590e1",
    "hf-gemma-7b-to-tunix": "c069d9f75aa4f6f6", "hf-gemma-to-maxtext": "c7015573154c2a22",
    "hf-gemma-to-tunix": "eea93f4d767766e3", "hf-gemma2-to-maxtext": "afda51f82a034160",
    "hf-gemma2-to-tunix": "7e068db903477c27", "hf-gemma3-to-maxtext": "9cbdee102082b86d",
    "hf-gemma3-to-tunix": "8b75487721044cad", "hf-gemma4-to-maxtext": "3d71b6539b64d85b",
    "hf-gemma4-small-to-maxtext": "e862c5cf8f3df568",
    "hf-gpt-oss-to-maxtext": "6b3d7c5205fc2a01",
    "hf-gpt2-to-flax": "1628ce7b71f89e4e", "hf-llama-to-maxtext": "47113e84c36f385d",
    "hf-llama-to-tunix": "7c97939be21d3f66", "hf-llama2-to-maxtext": "15b6351fae7a1413",
    "hf-llama4-to-maxtext": "53a5c4d55b7d282d", "hf-seed-oss-to-maxtext": "0ebbde1a5b1158ef",
    "hf-mistral-to-maxtext": "c2d1e57550edfde8", "hf-mixtral-to-maxtext": "f0526fde23b85910",
    "hf-olmo2-to-maxtext": "8e06d9f90df8342c", "hf-olmo3-to-maxtext": "9a6a6ef5c84fb023",
    "hf-qwen2-to-maxtext": "8ff51d8fc291efa6", "hf-qwen2-to-tunix": "212360a80fee2e59",
    "hf-qwen3-moe-to-maxtext": "a0556ebfed402dbb", "hf-qwen3-moe-to-tunix": "a1931ecb60b564c4",
    "hf-qwen3-next-to-maxtext": "3eefcddd26eaf73d", "hf-qwen3-to-maxtext": "d8634fd7da0596c8",
    "hf-qwen3-to-tunix": "6fd39447adb9a817", "hf-qwen3.5-moe-to-maxtext": "fd95c01152e3cef3",
    "megatron-deepseek3-to-hf": "ea2d9a9b7b88f76f", "megatron-gpt-oss-to-hf": "b82ad7870541e9f7",
    "megatron-gpt-to-reference": "0ae9c0ff19ca220d", "megatron-gpt2-to-hf": "018a2f917a9f1570",
    "megatron-llama-to-hf": "ba1fe37580c5d180", "megatron-mixtral-to-hf": "0da2901495279883",
    "megatron-qwen2-to-hf": "5b18b1bf3c7689e6", "megatron-qwen3-moe-to-hf": "b5a824be6da49f75",
    "megatron-qwen3-to-hf": "f1b034d09e7b889e", "vlm-qwen3-vl-to-hf": "a883d134db1e95e0",
    "vlm-gemma4-to-hf": "7eb898da8559497c", "vlm-llama4-to-hf": "71a33f57653d14ab",
    "vlm-qwen3-vl-moe-to-hf": "90286aa660f0a031",
    "vlm-qwen3.5-moe-to-hf": "223720f1cd91acca",
    "gguf-deepseek2-to-hf": "9b70e95b55a73f5d",
    "gguf-glm4-to-hf": "b2cd0b308dd07a8c",
    "gguf-gpt-oss-to-hf": "7997d3595f330e62",
    "gguf-llama4-to-hf": "0e3dfc1afd1cef10",
    "gguf-phi3-to-hf": "1987b10fc86ebc7f",
    "vlm-gemma3-to-hf": "8fca3364e9867ce6", "vlm-gemma3-to-tunix": "2dd7c39cee0cf1d6",
    "hf-gemma4-to-tunix": "e0bd896a64c92f81", "hf-gemma4-small-to-tunix": "2730dae5a3ee8d78",
    "vlm-qwen3-omni-moe-to-hf": "e31aef5115fbde3b", "vlm-kimi-k2.5-to-hf": "112aa4b46170a58e",
}  # fmt: skip


def test_shared_requirements_are_written_out_in_each_mapping_that_has_them():
    mappings = [ucp.Mapping.load(name) for name in shipped()]
    asking = [mapping for mapping in mappings if mapping.requires]
    digests = {}
    for mapping in asking:
        written_out = [[one.name, one.that, one.reason] for one in mapping.requires]
        digest = hashlib.sha256(json.dumps(written_out).encode()).hexdigest()
        digests[mapping.name.removesuffix(".yaml")] = digest[:16]
    assert digests == REQUIREMENTS


def requiring(item):
    rule = {"param": "w", "leaf": "w"}
    return ucp.Mapping.from_dict({"requires": [item], "leaves": [rule]}).requires[0]


def test_a_requirement_may_be_a_shared_one_or_like_one_with_fields_of_its_own():
    shared = requiring("torchscript")
    assert (shared.name, shared.that) == ("torchscript", "not first(torchscript, false)")
    mine = requiring({"like": "torchscript", "name": "script", "reason": "mine"})
    assert (mine.name, mine.that, mine.reason) == ("script", shared.that, "mine")
    for like in ("torchscrip", 7, []):
        with pytest.raises(SpecError, match="not a shared requirement: rope_default, "):
            requiring({"like": like})
    with pytest.raises(SpecError, match="a requirement lacks reason"):
        requiring("causal")
    with pytest.raises(SpecError, match="has no field 'when'"):
        requiring({"like": "torchscript", "when": "x"})
    of_text = requiring({"like": "torchscript", "of": "text_config"})
    assert of_text.that == "not first(text_config.torchscript, false)"
    with pytest.raises(SpecError, match="the of of a requirement is a text, not 7"):
        requiring({"like": "torchscript", "of": 7})
    with pytest.raises(SpecError, match="is not a condition"):
        requiring({"like": "torchscript", "of": "text config"})
