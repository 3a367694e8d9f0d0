"""The order in which the modules of a model have their parameters. Names only.

torch lists a module's own parameters first, then those of its children as they were registered;
flat buffers are filled in that order. A name that no module here has is refused, never placed.

Facts: the `__init__` of `GPTModel`, `TransformerLayer`, `SelfAttention`, `MLASelfAttention`, `MLP`,
`MoELayer`, `SharedExpertMLP` and `MultiTokenPredictionLayer` in `megatron/core` of Megatron-LM
core_v0.13.0 to core_v0.19.0; `LayerNormLinear` and `GroupedLinear` in
`transformer_engine/pytorch/module` of TransformerEngine v2.4 to v2.18.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.walk import MTP_COPY, local_norm

_IN_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.+)")
_EXPERT = re.compile(r"((?:.+\.)?mlp\.experts)\.(\d+)\.linear_fc([12])\.(weight|bias)")
_ROUTED = "mlp.experts"
_FIRST_NORM, _QKV = "input_layernorm", "self_attention.linear_qkv"
# A module's own parameters, in their order.
_KINDS = (
    *("softmax_offset", "gate_weight", "layer_norm_weight", "layer_norm_bias"),
    *("weight", "bias"),
)
_OUTER = (
    *("embedding.word_embeddings", "embedding.position_embeddings", "decoder.layers"),
    *("decoder.final_layernorm", "mtp.layers", "output_layer"),
)
_OF_MTP = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
_OF_LAYER = (
    _FIRST_NORM,
    *("self_attention.core_attention", "self_attention.linear_proj"),
    *("self_attention.linear_q_proj", "self_attention.linear_q_down_proj"),
    *("self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj"),
    *("self_attention.linear_kv_up_proj", _QKV),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "self_attention.kv_layernorm"),
    *("pre_mlp_layernorm", "mlp.router", "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
    *("mlp.linear_fc1", "mlp.linear_fc2", _ROUTED, "mlp.shared_experts"),
    *("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
# TransformerEngine has the first norm inside linear_qkv, before its weight.
_FUSED = tuple(
    module for name in _OF_LAYER[1:] for module in ([_FIRST_NORM, name] if name == _QKV else [name])
)


@dataclass(frozen=True, slots=True)
class Expert:
    """A parameter of a routed expert: `experts` is the name of the module of all of them."""

    experts: str
    number: int
    linear: int
    kind: str


def expert_of(name: str) -> Expert | None:
    """The expert that a parameter is of, or None.

    >>> expert_of("decoder.layers.1.mlp.experts.3.linear_fc2.weight").number
    3
    """
    match = _EXPERT.fullmatch(name)
    return Expert(match[1], int(match[2]), int(match[3]), match[4]) if match else None


def in_module_order(names: Iterable[str], fused_norm: bool, grouped: bool) -> list[str]:
    """Parameters in the order of the modules that have them.

    `fused_norm` is whether a layer's first norm is inside its linear_qkv, where it has one;
    `grouped` whether all experts are one module, so that fc1 of all comes before fc2 of any.

    >>> names = [f"decoder.layers.0.{module}.weight" for module in ("self_attention.linear_qkv",
    ...     "self_attention.linear_proj", "input_layernorm")]
    >>> [name.split(".")[-2] for name in in_module_order(names, True, False)]
    ['linear_proj', 'input_layernorm', 'linear_qkv']
    """
    names = list(names)
    has_qkv = any(f".{_QKV}." in name for name in names)
    modules = _FUSED if fused_norm and has_qkv else _OF_LAYER
    return sorted(names, key=lambda name: _order(name, modules, grouped))


def _order(name: str, modules: tuple[str, ...], grouped: bool) -> tuple[int, ...]:
    """The place of a parameter in the model. Raises FormatError where no module is known to have
    it.
    """
    try:
        layer = _IN_LAYER.fullmatch(name)
        if layer is None:
            module, _, kind = name.removesuffix(MTP_COPY).rpartition(".")
            return _OUTER.index(module), _KINDS.index(kind)
        outer = _OUTER.index(f"{layer[1]}.layers"), int(layer[2])
        if layer[1] == "decoder":
            return *outer, *_order_in_layer(layer[3], modules, grouped)
        if inner := _MTP_LAYER.fullmatch(layer[3]):
            place = _OF_MTP.index("transformer_layer")
            return *outer, place, *_order_in_layer(inner[1], modules, grouped)
        module, _, kind = layer[3].rpartition(".")
        return *outer, _OF_MTP.index(module), _KINDS.index(kind)
    except ValueError:
        raise FormatError(
            f"where {name} lies in a flat buffer is not known here; save the optimizer with"
            " --dist-ckpt-optim-fully-reshardable, or open the weights alone (weights_only)"
        ) from None


def _order_in_layer(inner: str, modules: tuple[str, ...], grouped: bool) -> tuple[int, ...]:
    """The place of a parameter in its layer. Raises ValueError where it has none."""
    inner = local_norm(inner)
    if expert := expert_of(inner):
        kind = _KINDS.index(expert.kind)
        # TransformerEngine registers weight0, bias0, weight1, ... of a grouped linear.
        numbers = (expert.linear, expert.number) if grouped else (expert.number, expert.linear)
        return modules.index(_ROUTED), *numbers, kind
    module, _, kind = inner.rpartition(".")
    return modules.index(module), _KINDS.index(kind)
