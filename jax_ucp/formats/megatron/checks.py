"""Whether the args of a run are those of the model that is stored.

Generalized tensor parallelism (GTP) cuts the rows of each tensor-parallel rank's weight once more,
into equal shards of ranks. They are stored side by side, so that the whole is the weight, but for
two things: rows of zeros fill up what each tensor-parallel rank has, which lie *between* those of
ranks, and in a gated layer each shard's first half is stored as gate and its second as up, whatever
its rows are.

Facts: `gtp_remat_shard_dim0` and `configure_gtp_remat_from_recipe` in
`megatron/core/tensor_parallel/generalized_tensor_parallelism.py` (padding),
`make_tp_sharded_tensor_for_checkpoint` in `megatron/core/utils.py` (places),
`apply_swiglu_sharded_factory` in `megatron/core/transformer/mlp.py` (gate and up),
`get_checkpoint_name` in `megatron/training/checkpointing.py` (legacy files, which have no number of
a shard) of Megatron-LM core_v0.19.0 and of its main branch of August 2026. By source, not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import re2

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.model import EMBEDDING, TIED, expert_of, is_expert, layer_of
from jax_ucp.formats.megatron.run import Args
from jax_ucp.layout.fragments import Shape
from jax_ucp.shard_spec.notation import built_in
from jax_ucp.shard_spec.rules import Spec, SpecShard, layouts, regex_of

_SHARDS = "tensor_parallel_num_weight_shards"
_GATED = ("swiglu", "quick_geglu", "gated_linear_unit")
# GTP cuts linear layers and embeddings, not these.
_WHOLE = re.compile(r".*(\.router|position_embeddings)\.weight")
_LINEAR = re.compile(r".*\.(linear_\w+)\.weight")

# What is compared: its name, its value in args, and the value that is stored.
Comparison = tuple[str, Any, Any]


def refuse_difference(path: FilePath, comparisons: Iterable[Comparison]) -> None:
    """Raise FormatError at the first difference from what the file `path` declares."""
    for what, declared, stored in comparisons:
        if declared is not None and declared != stored:
            raise FormatError(
                f"{path} tells of {what} {declared}, but what is stored has {stored}: that file or"
                " the others are of another run, or it was changed"
            )


def of_model(args: Args, shapes: Mapping[str, Shape]) -> Iterator[Comparison]:
    experts = [expert.number for expert in map(expert_of, shapes) if expert]
    yield "num_layers", args.get("num_layers"), _count(map(layer_of, shapes))
    yield "num_experts", args.get("num_experts") or 0, _count(experts)
    if EMBEDDING in shapes:
        rows, columns = shapes[EMBEDDING][:2]
        yield "padded_vocab_size", args.get("padded_vocab_size"), rows
        yield "hidden_size", args.get("hidden_size"), columns


def _count(numbered: Iterable[int | None]) -> int | str:
    """The count of distinct numbers, or their list, if they are not 0 to one less than that."""
    numbers = sorted({number for number in numbered if number is not None})
    if numbers == list(range(len(numbers))):
        return len(numbers)
    return f"only {numbers}"


def sizes_of(args: Args) -> dict[str, Any]:
    """Values by the names that rules such as those of `shard_spec/specs/megatron.yaml` use: all
    args, and lengths made of them, None where args do not tell one.

    Raises FormatError for a needed arg that could not be read.
    """
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


def model_spec(args: Args) -> Spec:
    """The rules of Megatron's models. With a gated query, each row of the query has one of the
    gate.
    """
    is_gated = args.optional("attention_output_gate")
    sizes = {"qkv_rows": "2 * (heads + query_groups) * head_dim"} if is_gated else {}
    return Spec(extends=built_in("megatron"), sizes=sizes)


def check_whole(args: Args, shapes: Mapping[str, Shape]) -> None:
    """Raise LayoutError if a parameter that a rule knows has another shape than by args."""
    spec = model_spec(args)
    rules = {sentence.param for layer in spec.layers for sentence in layer.own}
    claims = re2.compile("|".join(f"(?:{regex_of(rule)})" for rule in sorted(rules)))
    known = [name for name in shapes if claims.fullmatch(name)]
    sizes = {name: int(n) for name, n in sizes_of(args).items() if isinstance(n, int)}
    layouts(spec, {name: [SpecShard(shapes[name], name)] for name in known}, sizes)


def shards_of(args: Args, expert: bool) -> int:
    """The number of GTP shards into which each tensor-parallel rank's weights were cut; 1 without
    GTP.
    """
    ranks = args.tensor_ranks(expert)
    shards = args.optional(f"expert_{_SHARDS}" if expert else _SHARDS)
    return -(-shards // ranks) if isinstance(shards, int) else 1


def uses_gtp(args: Args) -> bool:
    return shards_of(args, False) > 1 or shards_of(args, True) > 1


def check_gtp(args: Args, path: FilePath, shapes: Mapping[str, Shape]) -> None:
    """Raise FormatError unless every weight is stored as it would be without GTP; `path` is the
    file of the args.
    """
    if not uses_gtp(args):
        return
    for name, shape in shapes.items():
        shards = shards_of(args, is_expert(name))
        is_cut = len(shape) == 2 and name.endswith(".weight") and not _WHOLE.fullmatch(name)
        if shards > 1 and is_cut and (why := _fault(args, name, shape[0], shards)):
            key = f"expert_{_SHARDS}" if is_expert(name) else _SHARDS
            raise FormatError(
                f"{path} tells of generalized tensor parallelism (GTP): {shards} shards on each"
                f" tensor-parallel rank ({key}). {name} {why}. Such a checkpoint is not read"
            )


def _fault(args: Args, name: str, stored: int, shards: int) -> str | None:
    """The reason why a weight of `stored` rows may differ from the one without GTP, or None."""
    if name.endswith(".linear_fc1.weight") and any(map(args.optional, _GATED)):
        return (
            "is of a gated layer, of which Megatron stores the first half of each shard as gate and"
            " the second as up, so that rows of both are mixed"
        )
    length, ranks = _rows(args, name)
    if length is None:
        return "has rows of padding that are not known here, because args do not say its length"
    # the default, and that of FP8 and NVFP4; MXFP8's is another
    alignment = shards * (32 if args.optional("fp8_recipe") == "mxfp8" else 16)
    if length % (ranks * alignment) or stored != length:
        return (
            f"has {length} rows by args and {stored} as stored: on each of {ranks} ranks they are"
            f" filled up to a multiple of {alignment}, so that padding lies between them"
        )
    return None


def _rows(args: Args, name: str) -> tuple[int | None, int]:
    """The number of rows of a weight by args, or None, and the number of ranks that share them."""
    layer = _LINEAR.fullmatch(name)
    length, ranks = None, args.tensor_ranks(is_expert(name))
    match layer[1] if layer else name:
        case n if n in (EMBEDDING, TIED):
            length = args.optional("padded_vocab_size")
        case "linear_proj" | "linear_fc2":
            length, ranks = args.optional("hidden_size"), 1
        case "linear_qkv":
            heads, width = args.optional("num_attention_heads"), args.optional("kv_channels")
            is_grouped = args.optional("group_query_attention") is not False
            groups = args.optional("num_query_groups") if is_grouped else heads
            if all(isinstance(n, int) for n in (heads, width, groups)):
                length = (heads + 2 * groups) * width
        case "linear_fc1" if is_expert(name):
            length = args.optional("moe_ffn_hidden_size")
        case "linear_fc1" if ".shared_experts." in name:
            length = args.optional("moe_shared_expert_intermediate_size")
        case "linear_fc1":
            length = args.optional("ffn_hidden_size")
    return length if isinstance(length, int) else None, ranks
