"""Weights of `Conv1D` modules that a method of quantisation stores as those of a `Linear`.

A `Conv1D` has inputs before outputs. bitsandbytes and GPTQ store it as a Linear, outputs first
(`replace_with_bnb_linear` and `Bnb4bitQuantize.convert` in transformers 5.23
`integrations/bitsandbytes.py`, `Linear.pack` in AutoGPTQ 0.7 `qlinear_cuda.py`), under a config
whose model has them the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.formats.nested import config_in

MARK = "outputs_first"  # in the source of a checkpoint: the first of such weights

_METHODS = ("awq", "bitsandbytes", "gptq")
# The models of transformers 5.23 with such modules, by `model_type`, and the modules' names.
_MODELS = ("clvp", "clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")
_WEIGHT = re.compile(r".*\b(c_attn|q_attn|c_proj|c_fc)\.weight")


def turned(method: str, extras: Mapping[str, Any], weights: Iterable[str]) -> str:
    """The first dequantised weight that the model's class has transposed (Conv1D); empty if there
    is none.
    """
    if method not in _METHODS or config_in(extras).get("model_type") not in _MODELS:
        return ""
    return next(filter(_WEIGHT.fullmatch, weights), "")


def note(first: str, method: str) -> str:
    return (
        f"{first} and others like it have outputs before inputs, as {method} stores them: the model"
        " that config.json names has Conv1D modules, with inputs before outputs"
    )


def require_own_layout(contents: Contents) -> None:
    """Raise UnsupportedLeaf for weights that a loader would take for those of a Conv1D."""
    first = contents.source.get(MARK)
    if first and "mapping" not in contents.source:
        raise UnsupportedLeaf(
            f"{contents.path}: {str(first)!r:.200} and others like it have outputs before inputs,"
            " and a folder of safetensors would say by its config.json that they have inputs before"
            " outputs (Conv1D); where they are square no loader would see it. Map them first, with"
            " a mapping that exchanges their axes"
        )
