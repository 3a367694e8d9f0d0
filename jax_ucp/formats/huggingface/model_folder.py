"""Files beside exported weights, by which the folder loads as a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_ucp.export.parameters import Parameters, is_floating
from jax_ucp.formats.peft.config import PREFIX
from jax_ucp.formats.safetensors.writer import ADAPTER, CONFIG, CONFIGS

Config = Mapping[str, Any]

# What a config calls the dtype that the model is loaded in: of transformers 5, and before.
_DTYPES = ("dtype", "torch_dtype")


def model_configs(
    extras: Mapping[str, Mapping[str, Any]], params: Parameters
) -> tuple[dict[str, Config], list[str]]:
    """The configs that are still true, with the weights' dtype; and what was changed."""
    is_adapter = all(name.startswith(PREFIX) for name in params.model)
    kept: dict[str, Config] = {}
    for name in CONFIGS:
        config = extras.get(name, {}).get("config")
        if isinstance(config, dict):
            kept[name] = config
    if not is_adapter:
        kept.pop(ADAPTER, None)
    elif ADAPTER not in kept:
        return kept, [f"peft loads it with an {ADAPTER}: give it (adapter_config=)"]
    floating = list(filter(is_floating, {tensor.dtype for tensor in params.model.values()}))
    if len(floating) != 1:
        return kept, []
    (dtype,) = floating
    config = kept.get(CONFIG, {})
    named = [key for key in _DTYPES if config.get(key) is not None]
    changed = {**config, **dict.fromkeys(named, dtype.name)}
    if changed == config:
        return kept, []
    kept[CONFIG] = changed
    return kept, [f"{CONFIG} says {dtype.name}, the dtype of the weights, in place of another"]
