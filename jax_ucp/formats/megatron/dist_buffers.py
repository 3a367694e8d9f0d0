"""Which parameters a distributed optimizer's flat buffers hold, and where. Integers only.

`dp_reshardable` and `dp_zero_gather_scatter` store, for each model-parallel rank, what its
data-parallel ranks had in their flat buffers. Nothing there names a parameter: the order is that of
the rank's modules, which follows from the model's own tensors, the args and `buffer_walk`; recorded
sizes must agree. How tensor parallelism cut a parameter is seen from the chunks in which the
model's tensor was written.

Facts: `megatron/core/optimizer/distrib_optimizer.py`, `megatron/core/parallel_state.py` (order of
ranks) and `megatron/core/models/gpt/gpt_layer_specs.py` (order of modules) of Megatron-LM
core_v0.16.1.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.megatron.files import Args
from jax_ucp.formats.megatron.legacy_optimizer import bucket_limit
from jax_ucp.formats.megatron.walk import (
    EMBEDDING,
    TIED,
    Part,
    buffer_walk,
    in_layer,
    is_expert,
    layer_of,
    tails_before,
)
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape

_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.(\d+)\.linear_fc([12])\.(weight|bias)")
_KINDS = ("weight", "bias")
_MODULES = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm"),
    *("mlp.router", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.experts"),
    *("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
# TransformerEngine has the first norm inside linear_qkv, before its weight.
_TE_MODULES = (_MODULES[1], _MODULES[0], *_MODULES[2:])
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
# The places of modules in a model: what is outside of its layers, and the layers.
_OUTER = {
    "embedding.word_embeddings": 0,
    "embedding.position_embeddings": 1,
    "decoder.final_layernorm": 3,
    "output_layer": 4,
}
_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """A tensor in a coalesced buffer: its elements begin at `start`, and hold `parts`."""

    start: int
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A chunk's parameters of one dtype on one rank; `buckets` are sizes without tails.

    `moved` are the parameters that a writer moves which takes padded for coalesced offsets, each
    with how far.
    """

    units: tuple[Unit, ...]
    buckets: tuple[int, ...]
    moved: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A model-parallel rank: `group` numbers its buffers, `rank` is tensor parallelism's."""

    group: int
    pp: int
    rank: int
    ep: int = 0


@dataclass(frozen=True)
class Plan:
    """The buffers of an optimizer, by (pp, ep, model chunk, dtype), and the ranks with them."""

    places: Sequence[Place]
    buffers: Mapping[tuple[int, int, int, str], Buffer]


def cut_of(shape: Shape, boxes: Sequence[Box], ranks: int) -> ParamLayout:
    """How `ranks` tensor-parallel ranks held a parameter of which they wrote `boxes`.

    One box is a tensor that every rank had whole. Otherwise all boxes are equal, side by side on
    one axis, one for each rank in order; or several parts, each cut by itself: of a gated MLP all
    gates, then all ups.

    >>> layout = cut_of((8, 3), [Box((i, 0), (i + 2, 3)) for i in (0, 2, 4, 6)], ranks=2)
    >>> layout.shards, [str(f.target) for f in layout.fragments if f.shard == 0]
    (((4, 3), (4, 3)), ['[0:2, 0:3]', '[4:6, 0:3]'])
    """
    boxes = sorted(set(boxes))
    whole = Box.whole(shape)
    if boxes == [whole]:
        fragments = [Fragment(rank, whole, whole) for rank in range(ranks)]
        return ParamLayout(shape, (shape,) * ranks, tuple(fragments))
    axis = _cut_axis(shape, boxes, ranks)
    size = boxes[0].shape[axis]
    local = (*shape[:axis], len(boxes) // ranks * size, *shape[axis + 1 :])
    first = Box.whole(boxes[0].shape)
    fragments = []
    for i, box in enumerate(boxes):
        part, rank = divmod(i, ranks)
        by = [0] * len(shape)
        by[axis] = part * size
        fragments.append(Fragment(rank, first.shift(by), box))
    return ParamLayout(shape, (local,) * ranks, tuple(fragments))


def _cut_axis(shape: Shape, boxes: Sequence[Box], ranks: int) -> int:
    """The axis on which boxes lie side by side. Raises LayoutError unless equal parts."""
    cut_axes = {axis for box in boxes for axis, n in enumerate(box.shape) if n != shape[axis]}
    sizes = {box.shape for box in boxes}
    if len(cut_axes) != 1 or len(sizes) != 1 or len(boxes) % ranks:
        raise LayoutError(
            f"the model's tensor of shape {list(shape)} was written in {len(boxes)} chunks, which"
            f" are no equal parts of {ranks} tensor-parallel ranks:"
            f" {', '.join(map(str, boxes[:4]))}"
        )
    return min(cut_axes)


def range_in(shape: Shape, transposed: bool, first: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Elements `first` to `stop` of a tensor's memory as (start, block of the parameter).

    The memory has `shape`, in row-major order; with `transposed` the parameter has its axes the
    other way round.

    >>> [(at, str(box)) for at, box in range_in((2, 3), True, 2, 6)]
    [(2, '[2:3, 0:1]'), (3, '[0:3, 1:2]')]
    """
    at = first
    for box in range_boxes(shape, first, stop):
        if not transposed:
            yield at, box
            at += box.size
            continue
        for row in range(box.start[0], box.stop[0]):
            yield at, Box((box.start[1], row), (box.stop[1], row + 1))
            at += box.shape[1]


def slice_of(
    part: Part, start: int, pieces: Sequence[tuple[int, int]]
) -> tuple[ParamLayout, list[int]]:
    """The layout of a part over the buffer's stored pieces, and which of them it needs.

    `pieces` are (start, stop) in the buffer, ascending and without holes; the part begins at
    `start` + `part.start`.
    """
    first, numel = start + part.start, math.prod(part.shape)
    at = bisect.bisect_right([stop for _, stop in pieces], first)
    used: list[int] = []
    fragments: list[Fragment] = []
    while at < len(pieces) and pieces[at][0] < first + numel:
        begin, end = max(pieces[at][0], first), min(pieces[at][1], first + numel)
        for offset, box in range_in(part.shape, part.transposed, begin - first, end - first):
            source = offset + first - pieces[at][0]
            fragments.append(Fragment(len(used), Box((source,), (source + box.size,)), box))
        used.append(at)
        at += 1
    shape = part.shape[::-1] if part.transposed else part.shape
    shards = tuple((pieces[i][1] - pieces[i][0],) for i in used)
    return ParamLayout(shape, shards, tuple(fragments)), used


def stage_layers(args: Args) -> dict[tuple[int, int], range]:
    """The layers of each (chunk, pipeline stage), in the order of chunks, then stages."""
    p = args.degree("pipeline_model_parallel_size")
    v = args.degree("virtual_pipeline_model_parallel_size")
    layers = args.get("num_layers")
    if p > 1:
        _refuse_uneven(args)
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
    counts = _chunk_layers(args, layers, p, v)
    by_chunk: dict[tuple[int, int], range] = {}
    first = 0
    for c in range(v):
        for stage, count in enumerate(counts):
            by_chunk[c, stage] = range(first, first + count)
            first += count
    return by_chunk


def _refuse_uneven(args: Args) -> None:
    for name in _UNEVEN:
        if args.optional(name):
            raise FormatError(
                f"args.{name} is {args.fields[name]!r:.80}: how layers lie on stages then is not"
                " known here, nor what lies in their buffers"
            )


def _chunk_layers(args: Args, layers: int, p: int, v: int) -> list[int]:
    """The layers in a chunk of each stage: equal numbers, unless args fix the ends'."""
    first, last = (args.optional(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    ends = {0: first, p - 1: last} if p > 1 else {}
    fixed = {stage: n for stage, n in ends.items() if isinstance(n, int)}
    free = p - len(fixed)
    rest = layers - sum(fixed.values())
    each, left = divmod(rest, free * v) if free else (0, rest)
    if left or any(n % v for n in fixed.values()):
        raise FormatError(
            f"{layers} layers do not divide over {p} pipeline stages of {v} model chunks"
        )
    counts = [each] * p
    for stage, n in fixed.items():
        counts[stage] = n // v
    return counts


def model_parallel_ranks(args: Args, expert: bool) -> list[Place]:
    """The model-parallel ranks in the order of groups: tp, then ep for experts, then pp."""
    p = args.degree("pipeline_model_parallel_size")
    t = args.degree("tensor_model_parallel_size")
    if not expert:
        return [Place(rank + t * pp, pp, rank) for pp in range(p) for rank in range(t)]
    e = args.degree("expert_model_parallel_size")
    etp = args.expert_ranks
    return [
        Place(r + etp * (ep + e * pp), pp, r, ep)
        for pp in range(p)
        for ep in range(e)
        for r in range(etp)
    ]


def stage_of(args: Args, expert: bool, group: int) -> int | None:
    """The pipeline stage of a group; None where the args have no such rank."""
    return next(
        (place.pp for place in model_parallel_ranks(args, expert) if place.group == group), None
    )


def plan_buffers(
    args: Args, expert: bool | None, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]
) -> Plan:
    """The buffers of the optimizer of dense parameters (False), experts (True), all (None).

    `shapes` are those that one rank has of every parameter, with the last stage's copy of a tied
    embedding; `dtypes` name those of the model's tensors. Raises FormatError where the order of
    modules is not known here.
    """
    stages = stage_layers(args)
    tied, dp = args.copies_embedding, _data_ranks(args, bool(expert))
    multiple = math.lcm(
        dp, 128, 1 << 16 if args.optional("ddp_pad_buckets_for_high_nccl_busbw") else 1
    )
    ranks = model_parallel_ranks(args, bool(expert))
    buffers: dict[tuple[int, int, int, str], Buffer] = {}
    for pp, ep in sorted({(place.pp, place.ep) for place in ranks}):
        chunks = _chunks_of(args, stages, pp, ep)
        names_by_chunk = [list(filter(chunk.has, shapes)) for chunk in chunks]
        numel = sum(math.prod(shapes[name]) for name in itertools.chain(*names_by_chunk))
        for c, names in enumerate(names_by_chunk):
            limit = bucket_limit(args, pp, c, dp, numel)
            for dtype, own in _by_dtype(names, expert, dtypes):
                modules = modules_of(args, {name: shapes[name] for name in own})
                buffers[pp, ep, c, dtype] = _buffer(modules, tied, dp, limit, multiple)
    return Plan(ranks, buffers)


def _chunks_of(
    args: Args, stages: Mapping[tuple[int, int], range], pp: int, ep: int
) -> list[_Chunk]:
    """The model chunks of a rank, of which `stages` says the layers."""
    e = args.degree("expert_model_parallel_size")
    each, rest = divmod(args.get("num_experts") or 0, e)
    if rest:
        raise FormatError(f"args.num_experts does not divide over {e} expert-parallel ranks")
    experts = range(ep * each, (ep + 1) * each)
    last_c, last_stage = max(stages)
    return [
        _Chunk(stages[c, pp], experts, pp == c == 0, (c, pp) == (last_c, last_stage))
        for c in range(last_c + 1)
    ]


def _data_ranks(args: Args, expert: bool) -> int:
    """The ranks among which the optimizer's buffers are divided."""
    if not expert:
        return args.degree("data_parallel_size") * args.degree("context_parallel_size")
    world = args.degree("world_size")
    degrees = (args.degree(f"{kind}_model_parallel_size") for kind in ("pipeline", "expert"))
    return max(1, world // (math.prod(degrees) * args.expert_ranks))


def _by_dtype(
    names: Iterable[str], expert: bool | None, dtypes: Mapping[str, str]
) -> list[tuple[str, list[str]]]:
    """The parameters that one optimizer has, by their dtypes, which each have a buffer."""
    by_dtype: dict[str, list[str]] = {}
    for name in names:
        if expert is None or is_expert(name) == expert:
            by_dtype.setdefault(dtypes[name], []).append(name)
    return sorted(by_dtype.items())


def _buffer(
    modules: Sequence[tuple[Part, ...]], tied: bool, dp: int, limit: int | None, multiple: int
) -> Buffer:
    sizes = [sum(math.prod(part.shape) for part in parts) for parts in modules]
    shared = [tied and parts[0].name in (EMBEDDING, TIED) for parts in modules]
    starts, buckets = buffer_walk(sizes, shared, dp, limit)
    units = tuple(Unit(start, parts) for start, parts in zip(starts, modules, strict=True))
    moved = zip(units, tails_before(starts, buckets, multiple), strict=True)
    return Buffer(
        units,
        tuple(buckets),
        tuple((part.name, n) for unit, n in moved if n for part in unit.parts),
    )


def modules_of(args: Args, shapes: Mapping[str, Shape]) -> list[tuple[Part, ...]]:
    """A rank's tensors in module order: one for each parameter, but for grouped experts.

    Those of Megatron's own GroupedMLP are one tensor with all the rank's experts, each transposed.
    """
    te = args.get("transformer_impl", "transformer_engine") != "local"
    grouped = bool(args.get("moe_grouped_gemm", False))
    merged = grouped and (not te or bool(args.optional("moe_use_legacy_grouped_gemm")))
    names = sorted(
        shapes, key=lambda name: _module_order(name, _TE_MODULES if te else _MODULES, grouped)
    )
    if not merged:
        return [(Part(name, 0, shapes[name]),) for name in names]
    return [_merged(list(same), shapes) for _, same in itertools.groupby(names, _merged_into)]


def _merged_into(name: str) -> str | tuple[int, int]:
    """The (layer, linear module) of a GroupedMLP's parameter; else its own name."""
    expert = _expert_of(name)
    if expert is None:
        return name
    if expert.kind != "weight":
        raise FormatError(f"{name}: grouped experts with biases are not known here")
    return expert.layer, expert.linear


def _merged(names: Sequence[str], shapes: Mapping[str, Shape]) -> tuple[Part, ...]:
    if _expert_of(names[0]) is None:
        return (Part(names[0], 0, shapes[names[0]]),)
    parts: list[Part] = []
    start = 0
    for name in names:
        parts.append(Part(name, start, shapes[name][::-1], transposed=True))
        start += math.prod(shapes[name])
    return tuple(parts)


def _module_order(name: str, modules: Sequence[str], grouped: bool) -> tuple[int, ...]:
    if expert := _expert_of(name):
        kind = _KINDS.index(expert.kind)
        within = (
            (expert.linear, kind, expert.number)
            if grouped
            else (expert.number, expert.linear, kind)
        )
        return _LAYERS, expert.layer, modules.index("mlp.experts"), *within
    module, _, kind = name.rpartition(".")
    layer = in_layer(module)
    if kind in _KINDS and module in _OUTER:
        return _OUTER[module], _KINDS.index(kind)
    if kind in _KINDS and layer and layer[1] in modules:
        return _LAYERS, layer[0], modules.index(layer[1]), _KINDS.index(kind)
    raise FormatError(
        f"where {name} lies in a flat buffer is not known here; save the optimizer with "
        "--dist-ckpt-optim-fully-reshardable, or open the weights alone (weights_only)"
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of a rank: layers, experts in them, and whether it is the first or last."""

    layers: range
    experts: range
    first: bool
    last: bool

    def has(self, name: str) -> bool:
        if expert := _expert_of(name):
            return expert.layer in self.layers and expert.number in self.experts
        if (layer := layer_of(name)) is not None:
            return layer in self.layers
        return self.first if name.startswith("embedding.") else self.last


@dataclass(frozen=True, slots=True)
class _Expert:
    """A parameter of an expert, by its name."""

    layer: int
    number: int
    linear: int
    kind: str


def _expert_of(name: str) -> _Expert | None:
    match = _EXPERT.fullmatch(name)
    return _Expert(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None
