"""The config that Hugging Face's model would have, as far as a GGUF file decides it.

The name of an architecture stands for the model that llama.cpp computes by it, such as `llama` for
Llama's with silu, attention to all positions and no scales of its own. What a model has beyond it
is in keys. So a config is made where every key of the architecture is known here; what no key says
has the value that llama.cpp computes with, or is left out.

Facts: `src/models/*.cpp` and `llama-model.cpp` of llama.cpp at 0c1e570; `conversion/` there says
how Hugging Face's settings became keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_ucp.arrays.protocol import ArraySource
from jax_ucp.layout.box import Box

# Of each architecture what its name says. Experts of `llama` are Mixtral's.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "hidden_act": "silu"},
    "qwen2": {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "hidden_act": "silu", "use_sliding_window": False},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma": {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3": {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"},
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}

# What a key of the architecture is called in a config.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OF_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_OF_GEMMA = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_MORE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "llama": _OF_EXPERTS,
    "qwen3moe": {
        **_OF_EXPERTS,
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "gemma2": _OF_GEMMA,
    "gemma3": _OF_GEMMA,
}
# Without them llama.cpp has values of its own, or other layers.
_NEEDED = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"),
    "gemma3": ("attention.sliding_window",),
}
# Of Gemma's largest models, which have so many layers, queries are scaled by another number.
_LARGEST = {"gemma2": 46, "gemma3_text": 62}
_WITH_BIASES = ("llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
_LENGTHS = ("block_count", "embedding_length", "attention.head_count")
# Keys that change no weight, or say what others say too.
_NO_FIELD = {"vocab_size", "attention.value_length", "rope.scaling.finetuned"}
_THETA, _LOCAL_THETA = "rope.freq_base", "rope.freq_base_swa"
_ROPE = {_THETA, _LOCAL_THETA, "rope.dimension_count"}
_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_ext_factor": "extrapolation_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# `rope.scaling.attn_factor` is not one of them: llama.cpp multiplies yarn's own factor by it, and
# some writers store Hugging Face's `attention_factor`, which stands for both.
_SCALING_TYPE = "rope.scaling.type"
# The order of rows in the query and the key of Llama: that of Meta, which `llama` always has.
_LAYOUT = "tensor_data_layout", "Meta AI original pth"

ROPE_FACTORS = "rope_freqs.weight"
_MOST_FACTORS = 1 << 12
# The factors are computed in float32, with a power in it.
_TOLERANCE = 1e-5


def model_config(
    values: Mapping[str, Any], tensors: Mapping[str, ArraySource]
) -> tuple[dict[str, Any], str]:
    """The config that keys, tensors and stored factors decide, by source; and a note."""
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        return {}, f"the architecture {architecture!r:.40} says nothing here of a model's config"
    metadata = {
        key.removeprefix(f"{architecture}."): value
        for key, value in values.items()
        if key.startswith(f"{architecture}.")
    }
    if why := _unknown(architecture, metadata):
        return {}, f"no config is made of the keys of {architecture}: {why}"
    config = dict(_FAMILIES[architecture])
    fields = {**_FIELDS, **_MORE_FIELDS.get(architecture, {})}
    config |= {fields[key]: _plain(value) for key, value in metadata.items() if key in fields}
    # add what follows from other fields, and from which tensors there are
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", config["hidden_size"] // heads)
    if config.get("num_local_experts"):
        config["model_type"] = "mixtral"
    config["tie_word_embeddings"] = "output.weight" not in tensors
    model = config["model_type"]
    if model in _WITH_BIASES:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if model == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    if model in _LARGEST:
        is_largest = config["num_hidden_layers"] == _LARGEST[model]
        scale = config["hidden_size"] // heads if is_largest else config["head_dim"]
        config["query_pre_attn_scalar"] = scale
    if embedding := tensors.get("token_embd.weight"):
        config["vocab_size"] = embedding.arrays()["token_embd.weight"].shape[0]
    # how positions are rotated. A type that is not Hugging Face's is one that no mapping takes
    theta = _plain(metadata.get(_THETA, 10000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    dimensions = metadata.get("rope.dimension_count", config["head_dim"])
    if dimensions != config["head_dim"] > 0:
        rope["partial_rotary_factor"] = dimensions / config["head_dim"]
    scaling = {_SCALING[key]: _plain(value) for key, value in metadata.items() if key in _SCALING}
    type = metadata.get(_SCALING_TYPE, "unsaid" if scaling else "none")
    if type != "none":
        rope |= {"rope_type": type, **scaling}
    if source := tensors.get(ROPE_FACTORS):
        rope |= _llama3(rope, dimensions, source)
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": _plain(metadata.get(_LOCAL_THETA, 10000.0))}
        rope = {"full_attention": rope, "sliding_attention": local}
    config["rope_parameters"] = rope
    config["architectures"] = [_CLASSES[config["model_type"]]]
    note = f"config.json is made of the keys of the architecture {architecture}"
    if architecture == "llama":
        note += ", which models of Mistral have too; a window of theirs is stored nowhere"
    return config, note


def _unknown(architecture: str, metadata: Mapping[str, Any]) -> str:
    """Why the keys of an architecture do not decide a config; empty if they do."""
    known = {*_FIELDS, *_MORE_FIELDS.get(architecture, ()), *_NO_FIELD, *_ROPE, *_SCALING}
    others = sorted(metadata.keys() - known - {_SCALING_TYPE, _LAYOUT[0]})
    if others:
        return f"{', '.join(others[:4])!r:.200} is not known here"
    for key, value in metadata.items():
        is_finite = isinstance(value, float) and math.isfinite(value)
        if not is_finite and not isinstance(value, int | str):
            return f"{key} is not a number that holds for all layers"
    if missing := [key for key in _NEEDED.get(architecture, ()) if key not in metadata]:
        return f"{missing[0]} is missing"
    if _LOCAL_THETA in metadata and architecture != "gemma3":
        return f"{_LOCAL_THETA} is not known here"
    for key in _LENGTHS:
        length = metadata.get(key)
        if type(length) is not int or length < 1:
            return f"{key} is not a length"
    if metadata.get(_LAYOUT[0], _LAYOUT[1]) != _LAYOUT[1]:
        return f"{_LAYOUT[0]} is {metadata[_LAYOUT[0]]!r:.80}, and not {_LAYOUT[1]!r}"
    if metadata.get("attention.value_length") != metadata.get("attention.key_length"):
        return "heads of keys and of values differ in length"
    return ""


def _plain(value: float | int | str) -> float | int | str:
    """A number as people write it: of a float32 the shortest that is the same one.

    >>> _plain(9.999999747378752e-06)
    1e-05
    """
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def _llama3(rope: Mapping[str, Any], dimensions: int, source: ArraySource) -> dict[str, Any]:
    """Llama 3.1's rotation, if it gives the stored factors; else a type no mapping takes."""
    info, other = source.arrays()[ROPE_FACTORS], {"rope_type": ROPE_FACTORS}
    is_theirs = info.dtype == np.float32 and info.shape == (dimensions // 2,)
    if not is_theirs or info.shape[0] > _MOST_FACTORS or rope["rope_type"] != "default":
        return other
    stored = source.read(ROPE_FACTORS, Box.whole(info.shape)).astype(np.float64)
    if not np.all(stored >= 1):
        return other
    settings = {
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with np.errstate(all="ignore"):
        powers = rope["rope_theta"] ** (2 * np.arange(len(stored)) / dimensions)
        smooth = np.clip((8192 / (2 * np.pi * powers) - 1) / 3, 0, 1)
    factors = 1 / ((1 - smooth) / settings["factor"] + smooth)
    is_seen = smooth.min() == 0 and smooth.max() == 1
    if not is_seen or not np.allclose(stored, factors, rtol=_TOLERANCE, atol=0):
        return other
    return {"rope_type": "llama3", **settings}
