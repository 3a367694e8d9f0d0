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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.megatron.files import Args
from jax_ucp.formats.megatron.legacy_optimizer import bucket_limit
from jax_ucp.formats.megatron.modules import expert_of, in_module_order
from jax_ucp.formats.megatron.stages import Chunk, stage_chunks
from jax_ucp.formats.megatron.walk import (
    EMBEDDING,
    MTP_COPY,
    TIED,
    Part,
    buffer_walk,
    is_expert,
    layer_of,
    tails_before,
)
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape


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
            f" are not equal parts of {ranks} tensor-parallel ranks:"
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


@dataclass(frozen=True, slots=True)
class Variant:
    """What args do not always say of the order of modules: see `modules` and `stages`."""

    fused_norm: bool
    norm_at_output: bool
    grouped: bool


def variants(args: Args) -> list[Variant]:
    """The orders that are possible, first the one that the args tell of.

    Releases up to 0.15 have the final norm before the output layer, also where multi-token
    prediction makes later ones keep it beside the last layer.
    """
    fused = args.get("transformer_impl", "transformer_engine") != "local"
    at_output = [False, True] if args.optional("mtp_num_layers") else [False]
    grouped = [bool(args.get("moe_grouped_gemm", False))]
    if args.optional("num_experts") and "moe_grouped_gemm" not in args.fields:
        grouped = [True, False]
    choices = itertools.product([fused, not fused], at_output, grouped)
    return list(itertools.starmap(Variant, choices))


def plan_buffers(
    args: Args,
    expert: bool | None,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    variant: Variant,
    recorded: Mapping[tuple[int, int, str], Sequence[int]],
) -> Plan:
    """The buffers of the optimizer of dense parameters (False), experts (True), all (None).

    `shapes` are those that one rank has of every parameter, with the copies of the embedding on
    later stages; `dtypes` name those of what is in buffers. `recorded` are the sizes of buckets by
    (group, model chunk, dtype), where args do not say after how many elements one ends. Raises
    FormatError where the order of modules is not known here.
    """
    dp = _data_ranks(args, bool(expert))
    multiple = math.lcm(
        dp, 128, 1 << 16 if args.optional("ddp_pad_buckets_for_high_nccl_busbw") else 1
    )
    ranks, shared = model_parallel_ranks(args, bool(expert)), shared_embeddings(args)
    groups = {(place.pp, place.ep): place.group for place in ranks}
    buffers: dict[tuple[int, int, int, str], Buffer] = {}
    for pp, ep in sorted(groups):
        names_by_chunk = _names_by_chunk(args, pp, ep, variant, shapes)
        numel = sum(math.prod(shapes[name]) for name in itertools.chain(*names_by_chunk))
        for c, names in enumerate(names_by_chunk):
            limit = bucket_limit(args, pp, c, dp, numel)
            for dtype, own in _by_dtype(names, expert, dtypes):
                modules = modules_of(args, {name: shapes[name] for name in own}, variant)
                sizes = recorded.get((groups[pp, ep], c, dtype), ())
                walk = _Walk(shared, dp, limit, multiple, sizes)
                buffers[pp, ep, c, dtype] = _buffer(modules, walk)
    return Plan(ranks, buffers)


def _names_by_chunk(
    args: Args, pp: int, ep: int, variant: Variant, names: Iterable[str]
) -> list[list[str]]:
    """The parameters in each model chunk of a rank."""
    experts = _experts_of(args, ep)
    chunks = [chunk for (_, stage), chunk in stage_chunks(args).items() if stage == pp]
    return [[name for name in names if _has(chunk, experts, variant, name)] for chunk in chunks]


def shared_embeddings(args: Args) -> frozenset[str]:
    """The word embedding and its copies, where several stages have it; each has its own bucket."""
    if args.degree("pipeline_model_parallel_size") == 1:
        return frozenset()
    if args.optional("mtp_num_layers"):
        return frozenset({EMBEDDING, EMBEDDING + MTP_COPY})
    return frozenset({EMBEDDING, TIED}) if args.copies_embedding else frozenset()


def may_have_buckets(args: Args) -> bool:
    """Whether a buffer may have several buckets, and so padding between them."""
    return bool(not args.fields or args.get("overlap_grad_reduce") or shared_embeddings(args))


def copies_of_embedding(args: Args, names: Iterable[str]) -> dict[str, str]:
    """What later stages have copies of, by the names that the copies have here."""
    several = args.degree("pipeline_model_parallel_size") > 1
    if several and args.optional("mtp_num_layers"):
        return {name + MTP_COPY: name for name in names if name.startswith("embedding.")}
    return {TIED: EMBEDDING} if args.copies_embedding else {}


def _experts_of(args: Args, ep: int) -> range:
    """The global numbers of the experts on an expert-parallel rank."""
    each, rest = divmod(args.get("num_experts") or 0, args.degree("expert_model_parallel_size"))
    if rest:
        raise FormatError(
            "args.num_experts does not divide over"
            f" {args.degree('expert_model_parallel_size')} expert-parallel ranks"
        )
    return range(ep * each, (ep + 1) * each)


def _has(chunk: Chunk, experts: range, variant: Variant, name: str) -> bool:
    """Whether a model chunk of a rank with these experts has a parameter."""
    expert, layer = expert_of(name), layer_of(name)
    if expert and expert.number not in experts:
        return False
    if layer is not None:
        return layer in chunk.layers
    if name.startswith("mtp."):
        return chunk.mtp
    if name.endswith(MTP_COPY):
        return chunk.mtp and not chunk.embedding
    if name.startswith("embedding."):
        return chunk.embedding
    at_layers = name.startswith("decoder.") and not variant.norm_at_output
    return chunk.final_norm if at_layers else chunk.output


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
    for name in filter(dtypes.__contains__, names):
        if expert is None or is_expert(name) == expert:
            by_dtype.setdefault(dtypes[name], []).append(name)
    return sorted(by_dtype.items())


@dataclass(frozen=True, slots=True)
class _Walk:
    """What places tensors in a buffer, besides their sizes."""

    shared: Collection[str]
    dp: int
    limit: int | None
    multiple: int
    recorded: Sequence[int]


def _buffer(modules: Sequence[tuple[Part, ...]], walk: _Walk) -> Buffer:
    sizes = [sum(math.prod(part.shape) for part in parts) for parts in modules]
    alone = [parts[0].name in walk.shared for parts in modules]
    starts, buckets = buffer_walk(sizes, alone, walk.dp, walk.limit, walk.recorded)
    units = tuple(Unit(start, parts) for start, parts in zip(starts, modules, strict=True))
    moved = zip(units, tails_before(starts, buckets, walk.multiple), strict=True)
    return Buffer(
        units,
        tuple(buckets),
        tuple((part.name, n) for unit, n in moved if n for part in unit.parts),
    )


def modules_of(args: Args, shapes: Mapping[str, Shape], variant: Variant) -> list[tuple[Part, ...]]:
    """A rank's tensors in module order: one for each parameter, but for grouped experts.

    Those of Megatron's own GroupedMLP are one tensor with all the rank's experts, each transposed.
    """
    local = args.get("transformer_impl", "transformer_engine") == "local"
    merged = variant.grouped and (local or bool(args.optional("moe_use_legacy_grouped_gemm")))
    names = in_module_order(shapes, variant.fused_norm, variant.grouped)
    if not merged:
        return [(Part(name, 0, shapes[name]),) for name in names]
    return [_merged(list(same), shapes) for _, same in itertools.groupby(names, _merged_into)]


def _merged_into(name: str) -> str | tuple[str, int]:
    """The module and linear of a GroupedMLP's parameter; else its own name."""
    expert = expert_of(name)
    if expert is None:
        return name
    if expert.kind != "weight":
        raise FormatError(f"{name}: grouped experts with biases are not known here")
    return expert.experts, expert.linear


def _merged(names: Sequence[str], shapes: Mapping[str, Shape]) -> tuple[Part, ...]:
    if expert_of(names[0]) is None:
        return (Part(names[0], 0, shapes[names[0]]),)
    parts: list[Part] = []
    start = 0
    for name in names:
        parts.append(Part(name, start, shapes[name][::-1], transposed=True))
        start += math.prod(shapes[name])
    return tuple(parts)
