"""What the built-in rules (`shard_spec/specs/megatron.yaml`) call the lengths of a run's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import re2

from jax_ucp.formats.megatron.files import Args
from jax_ucp.layout.fragments import Shape
from jax_ucp.shard_spec.notation import built_in
from jax_ucp.shard_spec.rules import Shard, Spec, layouts, regex_of


def sizes_of(args: Args) -> dict[str, Any]:
    """The numbers that rules may name: those of args, also by the built-in spec's names."""
    get, optional = args.get, args.optional
    heads, grouped = get("num_attention_heads"), get("group_query_attention", False)
    head_dim = get("kv_channels") or (get("hidden_size", 0) // heads if heads else None)
    return {
        **args.fields,
        "heads": heads,
        # 1 without meaning where there are no groups.
        "query_groups": get("num_query_groups") if grouped else heads,
        "head_dim": head_dim,
        "value_dim": optional("v_head_dim") if optional("multi_latent_attention") else head_dim,
        "ffn": get("ffn_hidden_size"),
        "expert_ffn": get("moe_ffn_hidden_size") or get("ffn_hidden_size"),
        "shared_ffn": optional("moe_shared_expert_intermediate_size"),
        "down_is_cut": False,
        "padded_vocab": get("padded_vocab_size"),
        "swiglu": get("swiglu", False),
        "vocab": get("padded_vocab_size"),
    }


def check_whole(args: Args, shapes: Mapping[str, Shape]) -> None:
    """Raise LayoutError, naming the parameter, where one has another shape than the whole has by
    args. What no rule knows is not looked at.
    """
    spec = Spec(extends=built_in("megatron"))
    known = _claimed(spec, shapes)
    sizes = {name: int(n) for name, n in sizes_of(args).items() if isinstance(n, int)}
    layouts(spec, {name: [Shard(shapes[name], name)] for name in known}, sizes)


def _claimed(spec: Spec, names: Iterable[str]) -> list[str]:
    rules = {sentence.param for layer in spec.layers for sentence in layer.own}
    claims = re2.compile("|".join(f"(?:{regex_of(rule)})" for rule in sorted(rules)))
    return [name for name in names if claims.fullmatch(name)]
