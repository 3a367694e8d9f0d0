"""The model of a Megatron run: names of its parameters, experts, the order of its modules, and the
pipeline stages that have them. Names and integers only.

Parameters have the names of Megatron's local layer spec, with the global numbers of layers and
experts, whatever a file calls them.

Facts: `megatron/core/transformer/moe/experts.py` (grouped experts) of Megatron-LM core_v0.16.1; the
`__init__` of `GPTModel`, `TransformerLayer`, `SelfAttention`, `MLASelfAttention`, `MLP`,
`MoELayer`, `SharedExpertMLP` and `MultiTokenPredictionLayer` in `megatron/core` of Megatron-LM
core_v0.13.0 to core_v0.19.0 (order of modules); `LayerNormLinear` and `GroupedLinear` in
`transformer_engine/pytorch/module` of TransformerEngine v2.4 to v2.18; `get_num_layers_to_build` in
`megatron/core/transformer/transformer_block.py`, `get_transformer_layer_offset` in
`transformer_layer.py`, `pipeline_parallel_layer_layout.py`, and
`megatron/core/models/gpt/gpt_model.py` of Megatron-LM core_v0.13.0 to core_v0.19.0 (stages);
`megatron/core/ssm`, `HybridStack` and `DSAIndexer` of core_v0.19.2 and of main of August 2026.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.codecs.unpickle import Record
from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.run import MAX_RANKS, Args
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape

TIED, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
# A stage with multi-token prediction, and not the first, has copies of the embedding's parameters.
MTP_COPY = " of multi-token prediction"
# Arrays that the model keeps beside its parameters.
BUFFERS = ("mlp.router.expert_bias",)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"((?:.+\.)?mlp\.experts)\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(.+)")
# TransformerEngine's grouped experts
_NUMBERED_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_GROUPED = re.compile(r"(.+\.mlp\.experts)\.weight([12])")
_GATED = re.compile(r"(.*\.(?:weight|bias)\d*)_([wv])")
# TransformerEngine fuses a norm with the linear layer that follows it; these are the names of the
# local spec.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


# -- names


@dataclass(frozen=True, slots=True)
class ParamPart:
    """A parameter in a rank's tensor from element `start` on; `transposed` swaps its axes."""

    name: str
    start: int
    shape: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ExpertParam:
    """A parameter of a routed expert: `experts` is the name of the module of all of them."""

    experts: str
    number: int
    inner: str


def layer_of(name: str) -> int | None:
    """The number of the decoder layer, or None; in a rank's file it counts within the chunk.

    >>> layer_of("decoder.layers.3.mlp.linear_fc1.weight")
    3
    """
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def is_expert(name: str) -> bool:
    return ".experts." in name


def expert_of(name: str) -> ExpertParam | None:
    """The expert that a parameter is of, or None.

    >>> expert_of("decoder.layers.1.mlp.experts.3.linear_fc2.weight")
    ExpertParam(experts='decoder.layers.1.mlp.experts', number=3, inner='linear_fc2.weight')
    """
    match = _EXPERT.fullmatch(name)
    return ExpertParam(match[1], int(match[2]), match[3]) if match else None


def local_norm(inner: str) -> str:
    """The name of a layer's tensor in the local spec, which has norms of their own.

    >>> local_norm("mlp.linear_fc1.layer_norm_bias")
    'pre_mlp_layernorm.bias'
    """
    for fused, norm in FUSED_NORMS.items():
        if inner.startswith(fused):
            return norm + inner.removeprefix(fused)
    return inner


def parts_of(
    local: str, shape: tuple[int, ...], first_layer: int, experts: range, hidden: int
) -> list[ParamPart]:
    """The parameters in a tensor of a rank's model: one, but for grouped experts.

    `experts` are the global numbers of the rank's experts, and `first_layer` that of its first
    layer. Grouped experts lie in memory as (experts, hidden, rows) and (experts, columns, hidden),
    whatever the recorded shape; as parameters they are (rows, hidden) and (hidden, columns), as
    those of separate experts.

    >>> parts_of("decoder.layers.1.mlp.router.weight", (4, 8), first_layer=2, experts=range(0),
    ...     hidden=8)
    [ParamPart(name='decoder.layers.3.mlp.router.weight', start=0, shape=(4, 8), transposed=False)]
    >>> for weight in ("linear_fc1.weight1", "local_experts.1.linear_fc1.weight", "weight2"):
    ...     parts = parts_of("decoder.layers.0.mlp.experts." + weight, (24, 8), 0, range(2, 4), 8)
    ...     [part.name.removeprefix("decoder.layers.0.mlp.experts.") for part in parts]
    ['3.linear_fc1.weight']
    ['3.linear_fc1.weight']
    ['2.linear_fc2.weight', '3.linear_fc2.weight']
    """
    name = local
    if layer := _LAYER.fullmatch(local):
        name = f"decoder.layers.{first_layer + int(layer[1])}.{local_norm(layer[2])}"
    if match := _LOCAL_EXPERT.fullmatch(name):
        module, number, inner = match.groups()
    elif match := _NUMBERED_EXPERT.fullmatch(name):
        module, inner, number = match.groups()
    elif match := _GROUPED.fullmatch(name):
        numel, count = math.prod(shape), len(experts)
        if not count or numel % (count * hidden):
            raise FormatError(
                f"{local} of shape {shape} does not divide into {count} experts of hidden size"
                f" {hidden}"
            )
        each = numel // count
        memory = (hidden, each // hidden) if match[2] == "1" else (each // hidden, hidden)
        names = [f"{match[1]}.{expert}.linear_fc{match[2]}.weight" for expert in experts]
        return [ParamPart(own, i * each, memory, transposed=True) for i, own in enumerate(names)]
    else:
        return [ParamPart(name, 0, shape)]
    if int(number) >= len(experts):
        raise FormatError(f"{local}: the rank should have {len(experts)} experts")
    return [ParamPart(f"{module}.{experts[int(number)]}.{inner}", 0, shape)]


# -- gated layers


def gate_and_up(keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Parameters stored as two halves, such as by singleton_local_shards: keys of gate and up.

    >>> gate_and_up(["mlp.linear_fc1.weight_w", "mlp.linear_fc1.weight_v"])
    {'mlp.linear_fc1.weight': ('mlp.linear_fc1.weight_w', 'mlp.linear_fc1.weight_v')}
    """
    halves: dict[str, dict[str, str]] = {}
    for key in keys:
        if match := _GATED.fullmatch(key):
            halves.setdefault(match[1], {})[match[2]] = key
    for name, keys_by_half in halves.items():
        if len(keys_by_half) != 2:
            raise FormatError(
                f"{', '.join(keys_by_half.values())} is half of {name}, of which the other half is"
                " missing"
            )
    return {name: (half["w"], half["v"]) for name, half in halves.items()}


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Block `target` of a tensor: elements of the array `key` from `start` on, row-major."""

    key: str
    start: int
    target: Box


# By parameter its shape, and the runs that it is made of.
Blocks = dict[str, tuple[Shape, Sequence[StoredRun]]]


def join_gated(params: Mapping[str, tuple[Shape, Sequence[StoredRun]]]) -> Blocks:
    """The parameters; those stored as gate and up are one, with the rows of the gate first."""
    joined = dict(params)
    for name, halves in gate_and_up(params).items():
        (shape, gate), (other, up) = (joined.pop(half) for half in halves)
        if shape != other:
            raise FormatError(f"gate has shape {shape}, but up {other}")
        rows, *rest = shape
        by = (rows, *(0 for _ in rest))
        below = [StoredRun(run.key, run.start, run.target.shift(by)) for run in up]
        joined[name] = (2 * rows, *rest), [*gate, *below]
    return joined


# -- the order of modules
#
# torch lists a module's own parameters first, then those of its children as they were registered;
# flat buffers are filled in that order. A name that no module here has is refused, never placed.

_IN_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.+)")
# Gated delta nets and Mamba: torch_dist stores each of these parts of a tensor by itself.
_SPLIT = re.compile(r"(.+\.(?:in_proj|conv1d)\.(?:weight|bias))\.(\w+)")
_SPLIT_PARTS = (
    *("query", "key", "value", "z", "beta", "alpha", "f", "b", "w"),
    *("x", "B", "C", "dt"),
)
_ROUTED, _LINEARS = "mlp.experts", ("linear_fc1", "linear_fc2")
_FIRST_NORM, _QKV = "input_layernorm", "self_attention.linear_qkv"
# A module's own parameters, in their order.
_KINDS = (
    *("softmax_offset", "gate_weight", "dt_bias", "A_log", "D", "layer_norm_weight"),
    "layer_norm_bias",
    *("weight", "bias"),
)
_OUTER = (
    *("embedding.word_embeddings", "embedding.position_embeddings", "decoder.layers"),
    *("decoder.final_norm", "decoder.final_layernorm", "mtp.layers", "output_layer"),
)
_OF_MTP = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
_OF_INDEXER = ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj")
_CONV = "mixer.conv1d"
_OF_LINEAR = ("", ".in_proj", ".conv1d", ".norm", ".out_norm", ".out_proj")
_OF_LAYER = (
    _FIRST_NORM,
    *(layer + inner for layer in ("mixer", "self_attention") for inner in _OF_LINEAR),
    "self_attention.core_attention",
    *(f"self_attention.core_attention.indexer.{name}" for name in _OF_INDEXER),
    "self_attention.linear_proj",
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


def unsplit(name: str) -> tuple[str, int]:
    """The tensor that a model has of a parameter, and the parameter's place among its parts.

    >>> unsplit("decoder.layers.0.self_attention.in_proj.weight.key")
    ('decoder.layers.0.self_attention.in_proj.weight', 1)
    """
    match = _SPLIT.fullmatch(name)
    return (match[1], _SPLIT_PARTS.index(match[2])) if match else (name, 0)


def in_module_order(
    names: Iterable[str], fused_norm: bool, grouped: bool, conv_first: bool = False
) -> list[str]:
    """Parameters in the order of the modules that have them.

    `fused_norm` is whether a layer's first norm is inside its linear_qkv, where it has one;
    `grouped` whether all experts are one module, so that fc1 of all comes before fc2 of any;
    `conv_first` whether Mamba's convolution is the mixer's own and no module in it. Raises
    FormatError for a parameter that no module is known to have.

    >>> names = [f"decoder.layers.0.{module}.weight" for module in ("self_attention.linear_qkv",
    ...     "self_attention.linear_proj", "input_layernorm")]
    >>> [name.split(".")[-2] for name in in_module_order(names, True, False)]
    ['linear_proj', 'input_layernorm', 'linear_qkv']
    """
    names = list(names)
    has_qkv = any(f".{_QKV}." in name for name in names)
    modules = _FUSED if fused_norm and has_qkv else _OF_LAYER
    if conv_first:
        modules = (_CONV, *(module for module in modules if module != _CONV))

    def order(name: str) -> tuple[int, ...]:
        try:
            whole, part = unsplit(name)
            return *_module_order(whole, modules, grouped), part
        except ValueError:
            raise FormatError(
                f"where {name} lies in a flat buffer is not known here; save the optimizer with"
                " --dist-ckpt-optim-fully-reshardable"
            ) from None

    return sorted(names, key=order)


def _module_order(name: str, modules: tuple[str, ...], grouped: bool) -> tuple[int, ...]:
    """The place of a parameter in the model. Raises ValueError where it has none."""
    layer = _IN_LAYER.fullmatch(name)
    if layer is None:
        module, _, kind = name.removesuffix(MTP_COPY).rpartition(".")
        return _OUTER.index(module), _KINDS.index(kind)
    place, inner = (_OUTER.index(f"{layer[1]}.layers"), int(layer[2])), layer[3]
    if layer[1] == "mtp":
        own = _MTP_LAYER.fullmatch(inner)
        if own is None:
            module, _, kind = inner.rpartition(".")
            return *place, _OF_MTP.index(module), _KINDS.index(kind)
        place, inner = (*place, _OF_MTP.index("transformer_layer")), own[1]
    inner = local_norm(inner)
    expert = expert_of(inner)
    if expert is None:
        module, _, kind = inner.rpartition(".")
        return *place, modules.index(module), _KINDS.index(kind)
    linear, _, kind = expert.inner.partition(".")
    # TransformerEngine registers weight0, bias0, weight1, ... of a grouped linear.
    numbers = (_LINEARS.index(linear), expert.number)
    numbers = numbers if grouped else numbers[::-1]
    return *place, modules.index(_ROUTED), *numbers, _KINDS.index(kind)


# -- pipeline stages
#
# Layers are in order of model chunk (virtual pipeline), then stage, however many each chunk has.

LAYOUT = "pipeline_model_parallel_layout"
# One letter for each part of a chunk: the embedding, a layer, a layer of multi-token prediction,
# the output layer with the loss.
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,6})|([^()])\*(\d{1,6})")


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """The decoder layers and other parts of the model that one chunk of a stage has."""

    layers: range
    embedding: bool
    final_norm: bool
    mtp: bool
    output: bool


def stage_chunks(args: Args) -> dict[tuple[int, int], ModelChunk]:
    """The parts of each (chunk, stage), by chunk, then stage. Raises FormatError if unknown."""
    letters = stage_letters(args)
    layers = sum(part.count("t") for part in letters)
    p = args.degree("pipeline_model_parallel_size")
    if len(letters) % p:
        raise FormatError(
            f"args.{LAYOUT} has {len(letters)} parts, which {p} pipeline stages do not divide"
        )
    mtp = bool(args.optional("mtp_num_layers"))
    chunks: dict[tuple[int, int], ModelChunk] = {}
    first = 0
    for i, part in enumerate(letters):
        own = range(first, first := first + part.count("t"))
        # With multi-token prediction the norm is where the last layer is, else before the output.
        norm = layers - 1 in own if mtp else "L" in part
        chunks[divmod(i, p)] = ModelChunk(own, "E" in part, norm, "m" in part, "L" in part)
    return chunks


def stage_letters(args: Args) -> list[str]:
    """The parts of each chunk of each stage, a letter each: `E`, `t` for a layer, `m`, `L`.

    Without a layout one `m` stands for all layers of multi-token prediction.

    >>> stage_letters(Args({"num_layers": 4, "pipeline_model_parallel_size": 2}))
    ['Ett', 'ttL']
    >>> stage_letters(Args({"pipeline_model_parallel_layout": "Et*2|(t|)*2mL"}))
    ['Ett', 't', 't', 'mL']
    >>> stage_letters(Args({"num_layers": 4, "hybrid_layer_pattern": "M|M*-"}))
    ['Et', 'tttL']
    """
    if layout := args.optional(LAYOUT):
        return _letters_of_layout(args, layout)
    layers = args.get("num_layers")
    if not isinstance(layers, int):
        lost = (
            "args.num_layers is missing"
            if args.fields
            else "common.pt has no args (other trainers write none)"
        )
        raise FormatError(
            f"{lost}: which layers each pipeline stage has is not known, nor what lies in its"
            " buffers"
        )
    if not 0 <= layers <= MAX_RANKS:
        raise FormatError(f"args.num_layers is {layers}: they are damaged")
    # a hybrid model's pattern may say where chunks end
    pattern = str(args.optional("hybrid_layer_pattern") or "").partition("/")[0].split("|")
    counts = [*map(len, pattern)] if len(pattern) > 1 else _chunk_layers(args, layers)
    letters = ["t" * count for count in counts]
    letters[0] = "E" + letters[0]
    letters[-1] += "mL" if args.optional("mtp_num_layers") else "L"
    return letters


def _letters_of_layout(args: Args, layout: Any) -> list[str]:
    if isinstance(layout, Record):  # `PipelineParallelLayerLayout`, which keeps its argument
        layout = layout.fields.get("input_data")
    rows = layout
    if isinstance(layout, str):
        # without commas and repetitions, first those of groups, then of letters
        layout = layout.replace(",", "").replace(" ", "")
        for _ in range(2):
            repeats = [int(match[2] or match[4]) for match in _REPEATED.finditer(layout)]
            if sum(repeats) * len(layout) > MAX_RANKS:
                raise FormatError(f"args.{LAYOUT} has {sum(repeats)} repetitions: they are damaged")
            layout = _REPEATED.sub(lambda m: (m[1] or m[3] or "") * int(m[2] or m[4]), layout)
        rows = layout.split("|")
    letters: list[list[str]] = []
    for row in rows if isinstance(rows, list) else ():
        # a list of names or letters, or a text of letters
        names = row if isinstance(row, list) else list(row) if isinstance(row, str) else [row]
        letters.append([_LETTERS.get(str(name).strip().lower(), str(name)) for name in names])
    counts = Counter(itertools.chain(*letters))
    layers = args.optional("num_layers")
    is_known = counts.keys() <= {*_LETTERS.values()} and counts["E"] == counts["L"] == 1
    if not is_known or layers not in (None, counts["t"]):
        raise FormatError(
            f"args.{LAYOUT} is {args.fields[LAYOUT]!r:.80}: how layers lie on stages by that is not"
            " known here, nor what lies in their buffers"
        )
    return list(map("".join, letters))


def _chunk_layers(args: Args, layers: int) -> list[int]:
    """The layers of each chunk, in order of chunk, then stage.

    As many in each, unless args fix the number of the first or last stage, or count the embedding
    or the loss as a layer.
    """
    p = args.degree("pipeline_model_parallel_size")
    v = args.degree("virtual_pipeline_model_parallel_size")
    fixed: dict[int, int] = {}
    embedding = loss = False
    if p > 1:
        embedding, loss = (
            bool(args.optional(f"account_for_{part}_in_pipeline_split"))
            for part in ("embedding", "loss")
        )
        for stage, end in ((0, "first"), (p - 1, "last")):
            # the model's config has another name for it
            names = f"num_layers_in_{end}_pipeline_stage", f"decoder_{end}_pipeline_num_layers"
            for number in map(args.optional, names):
                if isinstance(number, int):
                    fixed[stage] = number
    rest = layers + embedding + loss - sum(fixed.values())
    each, left = divmod(rest, max(1, (p - len(fixed)) * v))
    counts = [fixed.get(stage, each * v) // v for stage in range(p)] * v
    counts[0] -= embedding
    counts[-1] -= loss
    uneven = any(n % v for n in fixed.values())
    if left or uneven or sum(counts) != layers or min(counts) < 0:
        raise FormatError(
            f"{layers} layers do not divide over {p} pipeline stages of {v} model chunks"
        )
    return counts
