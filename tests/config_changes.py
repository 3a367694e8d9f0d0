"""Changes of the configs of small models, which `generators/config_moves.py` tries on transformers
and the tests of mappings on what mappings require.
"""

from pathlib import Path
from typing import Any

Config = dict[str, Any]
DATA = Path(__file__).parent / "data"
# A folder with a model, and the mappings that fit it.
CASES = {
    "maxtext/llama2": ["hf-llama2-to-maxtext", "hf-llama-to-tunix"],
    "maxtext/llama31": ["hf-llama-to-maxtext"],
    "maxtext/mistral": ["hf-mistral-to-maxtext"],
    "maxtext/mixtral": ["hf-mixtral-to-maxtext"],
    "maxtext/qwen2": ["hf-qwen2-to-maxtext", "hf-qwen2-to-tunix"],
    "maxtext/seed_oss": ["hf-seed-oss-to-maxtext"],
    "maxtext/qwen3": ["hf-qwen3-to-maxtext", "hf-qwen3-to-tunix"],
    "maxtext/qwen3_moe": ["hf-qwen3-moe-to-maxtext", "hf-qwen3-moe-to-tunix"],
    "maxtext/qwen3_next": ["hf-qwen3-next-to-maxtext"],
    "maxtext/qwen35_moe": ["hf-qwen3.5-moe-to-maxtext"],
    "maxtext/olmo2": ["hf-olmo2-to-maxtext"],
    "maxtext/olmo3": ["hf-olmo3-to-maxtext"],
    "torch/hf_gemma": ["hf-gemma-to-tunix", "hf-gemma-to-maxtext"],
    "torch/hf_gemma_mha": ["hf-gemma-7b-to-tunix", "hf-gemma-to-maxtext"],
    "maxtext/gemma2": ["hf-gemma2-to-maxtext", "hf-gemma2-to-tunix"],
    "maxtext/gemma3": ["hf-gemma3-to-maxtext", "hf-gemma3-to-tunix"],
    "maxtext/llama4": ["hf-llama4-to-maxtext"],
    "maxtext/gemma4_apart": ["hf-gemma4-to-maxtext", "hf-gemma4-to-tunix"],
    "maxtext/gemma4_e2b": ["hf-gemma4-small-to-maxtext", "hf-gemma4-small-to-tunix"],
    "maxtext/deepseek2": ["hf-deepseek2-to-maxtext"],
    "maxtext/deepseek3": ["hf-deepseek3-to-maxtext"],
    "maxtext/deepseek32": ["hf-deepseek3-to-maxtext"],
    "maxtext/gpt_oss": ["hf-gpt-oss-to-maxtext"],
    "torch/hf_gpt2": ["hf-gpt2-to-flax"],
}
# Transformers 4 does not have these models, or has them since late and was not tried.
SINCE_5 = (
    "maxtext/qwen35_moe", "maxtext/gemma4_apart", "maxtext/gemma4_e2b",
    "maxtext/llama4", "maxtext/seed_oss", "maxtext/deepseek32",
)  # fmt: skip
# Of these transformers 5 too reads configs of its own style alone.
ONE_STYLE = ("maxtext/gemma4_apart", "maxtext/gemma4_e2b")
ABSENT = "absent"  # what a change has for a key that the config shall not have
_V5_ONLY = ("rope_parameters", "dtype", "_sliding_window_pattern")


def changed(config: Config, change: Config) -> Config:
    """The config with other values, and without those that are absent."""
    new = {**config, **change}
    return {key: value for key, value in new.items() if value != ABSENT}


def v4_style(config: Config) -> Config:
    """The config as transformers 4 writes it: the rotation's base beside `rope_scaling`."""
    rope = config.get("rope_parameters", {})
    if config["model_type"] == "qwen3_moe":
        config = {**config, "num_experts": config["num_local_experts"], "num_local_experts": ABSENT}
    new = {key: value for key, value in config.items() if key not in _V5_ONLY}
    if config["model_type"] == "gemma3_text":
        new["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        new["sliding_window_pattern"] = config["_sliding_window_pattern"]
        new.pop("layer_types")
    if "partial_rotary_factor" in rope:
        new["partial_rotary_factor"] = rope["partial_rotary_factor"]
    rope = rope.get("full_attention", rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if rope:
        new["rope_theta"] = rope["rope_theta"]
        new["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    new = changed(new, {})
    return {**new, "torch_dtype": config["dtype"], "transformers_version": "4.57.6"}
