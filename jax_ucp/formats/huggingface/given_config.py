"""A config that somebody gives for weights that have none: what of it the weights can disprove; and
the configs beside exported weights, by which the folder loads as a model.

A loader makes what a file lacks of random numbers, and leaves out what the config lacks, with no
more than a warning. Fact: `from_pretrained` of transformers 4 and 5; with `tie_word_embeddings`
version 4 takes the embedding for the head, whatever is stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jax_ucp.arrays.checks import CHECK_BYTES
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import LayoutError
from jax_ucp.export.parameters import Parameters, is_floating
from jax_ucp.formats.peft.config import PREFIX
from jax_ucp.formats.safetensors.writer import ADAPTER, CONFIG, CONFIGS
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.tree import Leaf

Config = Mapping[str, Any]

# What a config calls the dtype that the model is loaded in: of transformers 5, and before.
_DTYPES = ("dtype", "torch_dtype")

# How the names of a decoder's layers begin, and what a config calls their number.
_LAYERS = {
    "num_hidden_layers": re.compile(r"model\.layers\.(\d{1,6})\."),
    "n_layer": re.compile(r"transformer\.h\.(\d{1,6})\."),
}
_MORE_LAYERS = "num_nextn_predict_layers"  # DeepSeek's, stored after the others or not at all
_HEAD, _EMBEDDINGS = "lm_head.weight", ("model.embed_tokens.weight", "transformer.wte.weight")


def described(contents: Contents, config: Mapping[str, Any]) -> Contents:
    """The weights with a config that the user gives. Raises LayoutError if it has other layers."""
    params = _parameters(contents)
    for key, pattern in _LAYERS.items():
        said, more = config.get(key), config.get(_MORE_LAYERS)
        names = filter(None, map(pattern.match, params))
        count = max((int(name[1]) + 1 for name in names), default=0)
        if not count or type(said) is not int:
            continue
        most = said + more if type(more) is int else said
        if not said <= count <= most:
            raise LayoutError(
                f"the given config has {key} = {said}, and {contents.path} has weights of {count}"
                " layers: it is of another model"
            )
    return replace(contents, extras={**contents.extras, "config.json": {"config": config}})


def require_tied(contents: Contents, config: Mapping[str, Any]) -> None:
    """Raise LayoutError if the stored head differs from the tied embedding. Reads both."""
    params = _parameters(contents)
    embedding = next(filter(None, map(params.get, _EMBEDDINGS)), None)
    head = params.get(_HEAD)
    if not config.get("tie_word_embeddings") or head is None or embedding is None:
        return
    boxes = row_boxes(head.shape, np.dtype(head.dtype).itemsize, CHECK_BYTES)
    read = contents.arrays.read
    is_same = head.shape == embedding.shape and all(
        same_bits(read(head.name, box), read(embedding.name, box)) for box in boxes
    )
    if not is_same:
        raise LayoutError(
            f"{contents.path}: {head.label} differs from {embedding.label}, and the given config"
            " has tie_word_embeddings: a loader may take one for the other. Give a config in which"
            " it is false"
        )


def _parameters(contents: Contents) -> dict[str, Leaf]:
    leaves = [leaf for leaf in contents.leaves if len(leaf.path) == 2 and leaf.has_array]
    return {str(leaf.path[1].name): leaf for leaf in leaves if leaf.path[0].name == "param"}


def model_configs(
    extras: Mapping[str, Mapping[str, Any]], params: Parameters
) -> tuple[dict[str, Config], list[str]]:
    """The configs that are still true, with the dtype of the weights; and what was changed."""
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
