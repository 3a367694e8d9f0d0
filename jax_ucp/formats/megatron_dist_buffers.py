"""Flat buffers of a distributed optimizer: which parameters they hold, and where. Integers and names only.

`dp_reshardable` and `dp_zero_gather_scatter` store, for each model-parallel rank, what its data-parallel ranks had in
their flat buffers. Nothing there names a parameter: the order is that of the rank's modules, which follows from the
model's own tensors, the args and `buffer_walk`; recorded sizes must agree. How tensor parallelism cut a parameter is
seen from the chunks in which the model's tensor was written.

Facts: `megatron/core/optimizer/distrib_optimizer.py`, `megatron/core/parallel_state.py` (order of ranks) and
`megatron/core/models/gpt/gpt_layer_specs.py` (order of modules) of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.megatron_files import Args
from jax_ucp.formats.megatron_optim import bucket_size
from jax_ucp.formats.megatron_walk import EMBEDDING, TIED, Part, buffer_walk, is_expert, tails_before
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
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
    """What one model chunk of one model-parallel rank has of one dtype, and the sizes of its buckets without tails.

    `moved` are the parameters that a writer moves which takes padded for coalesced offsets, each with how far.
    """

    units: tuple[Unit, ...]
    buckets: tuple[int, ...]
    moved: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A model-parallel rank. Its buffers are stored under the number `group`; `rank` is that of tensor parallelism."""

    group: int
    pp: int
    rank: int
    ep: int = 0


@dataclass(frozen=True)
class Plan:
    """All buffers of an optimizer, by (pp, ep, model chunk, dtype), and the ranks that have them."""

    places: Sequence[Place]
    buffers: Mapping[tuple[int, int, int, str], Buffer]


def cut_of(shape: Shape, boxes: Sequence[Box], ranks: int) -> ParamLayout:
    """How `ranks` tensor-parallel ranks held a parameter of which they wrote `boxes`.

    One box is a tensor that every rank had whole. Otherwise all boxes are equal, side by side on one axis, one for
    each rank in order; or several parts, each cut by itself: of a gated MLP all gates, then all ups.

    >>> layout = cut_of((8, 3), [Box((i, 0), (i + 2, 3)) for i in (0, 2, 4, 6)], ranks=2)
    >>> layout.shards, [str(f.target) for f in layout.fragments if f.shard == 0]
    (((4, 3), (4, 3)), ['[0:2, 0:3]', '[4:6, 0:3]'])
    """
    boxes = sorted(set(boxes))
    if len(boxes) == 1 and boxes[0] == Box.whole(shape):
        return ParamLayout(shape, (shape,) * ranks, tuple(Fragment(r, boxes[0], boxes[0]) for r in range(ranks)))
    axes = [axis for axis in range(len(shape)) if any(box.shape[axis] != shape[axis] for box in boxes)]
    parts, rest = divmod(len(boxes), ranks)
    if len(axes) != 1 or rest or len({box.shape for box in boxes}) != 1:
        raise LayoutError(
            f"the model's tensor of shape {list(shape)} was written in {len(boxes)} chunks, which are no equal parts "
            f"of {ranks} tensor-parallel ranks: {', '.join(map(str, boxes[:4]))}"
        )
    axis, size = axes[0], boxes[0].shape[axes[0]]
    local = (*shape[:axis], parts * size, *shape[axis + 1 :])
    fragments: list[Fragment] = []
    for i, box in enumerate(boxes):
        part, rank = divmod(i, ranks)
        start = [0] * len(shape)
        start[axis] = part * size
        source = Box(tuple(start), tuple(a + n for a, n in zip(start, box.shape, strict=True)))
        fragments.append(Fragment(rank, source, box))
    return ParamLayout(shape, (local,) * ranks, tuple(fragments))


def range_in(shape: Shape, transposed: bool, first: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Elements `first` to `stop` of a tensor's memory, as blocks of the parameter; each with where it begins.

    The memory has `shape`, in row-major order; with `transposed` the parameter has its axes the other way round.

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


def slice_of(part: Part, start: int, pieces: Sequence[tuple[int, int]]) -> tuple[ParamLayout, list[int]]:
    """The layout of a part over the stored pieces of the buffer it is in, and which of them it needs.

    `pieces` are (start, stop) in the buffer, ascending and without holes; the part begins at `start` + `part.start`.
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
    """The global numbers of the layers of each (chunk, pipeline stage), in the order of chunks, then stages."""
    p = args.degree("pipeline_model_parallel_size")
    v = args.degree("virtual_pipeline_model_parallel_size")
    layers = args.get("num_layers")
    if odd := [name for name in _UNEVEN if p > 1 and args.optional(name)]:
        raise FormatError(
            f"args.{odd[0]} is {args.fields[odd[0]]!r:.80}: how layers lie on stages then is not known here, nor what "
            "lies in their buffers"
        )
    if not isinstance(layers, int):
        lost = "args.num_layers is missing" if args.fields else "common.pt has no args (other trainers write none)"
        raise FormatError(f"{lost}: which layers each pipeline stage has is not known, nor what lies in its buffers")
    first, last = (args.optional(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    ends = {0: first, p - 1: last} if p > 1 else {}
    fixed = {stage: n for stage, n in ends.items() if isinstance(n, int)}
    free = [stage for stage in range(p) if stage not in fixed]
    rest = layers - sum(fixed.values())
    if any(n % v for n in fixed.values()) or (rest % (len(free) * v) if free else rest):
        raise FormatError(f"{layers} layers do not divide over {p} pipeline stages of {v} model chunks")
    counts = [fixed[stage] // v if stage in fixed else rest // (len(free) * v) for stage in range(p)]
    found, total = dict[tuple[int, int], range](), 0
    for c in range(v):
        for stage in range(p):
            found[c, stage] = range(total, total + counts[stage])
            total += counts[stage]
    return found


def places(args: Args, expert: bool) -> list[Place]:
    """The model-parallel ranks, by the numbers of their groups: tp, then ep for experts, then pp."""
    p = args.degree("pipeline_model_parallel_size")
    t = args.degree("tensor_model_parallel_size")
    if not expert:
        return [Place(rank + t * pp, pp, rank) for pp in range(p) for rank in range(t)]
    e = args.degree("expert_model_parallel_size")
    etp = expert_ranks(args)
    return [Place(r + etp * (ep + e * pp), pp, r, ep) for pp in range(p) for ep in range(e) for r in range(etp)]


def stage_of(args: Args, expert: bool, group: int) -> int | None:
    """The pipeline stage of the model-parallel rank with this number; None where the args know no such rank."""
    return next((place.pp for place in places(args, expert) if place.group == group), None)


def expert_ranks(args: Args) -> int:
    """The tensor-parallel ranks of an expert, which are those of the rest unless said otherwise."""
    said = args.get("expert_tensor_parallel_size")
    return args.degree("expert_tensor_parallel_size" if said is not None else "tensor_model_parallel_size")


def plan_buffers(args: Args, expert: bool | None, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> Plan:
    """The buffers of the optimizer of the dense parameters (False), of experts (True), or of all (None).

    `shapes` are those that one rank has of every parameter, with the last stage's copy of a tied embedding;
    `dtypes` name those of the model's tensors. Raises FormatError where the order of modules is not known here.
    """
    stages = stage_layers(args)
    p, v, e = (args.degree(f"{kind}_model_parallel_size") for kind in ("pipeline", "virtual_pipeline", "expert"))
    tied = p > 1 and not args.get("untie_embeddings_and_output_weights", False)
    dp = args.degree("data_parallel_size") * args.degree("context_parallel_size")
    if expert:
        dp = max(1, args.degree("world_size") // (e * expert_ranks(args) * p))
    multiple = math.lcm(dp, 128, 1 << 16 if args.optional("ddp_pad_buckets_for_high_nccl_busbw") else 1)
    each, rest = divmod(args.get("num_experts") or 0, e)
    if rest:
        raise FormatError(f"args.num_experts does not divide over {e} expert-parallel ranks")
    buffers: dict[tuple[int, int, int, str], Buffer] = {}
    ranks = places(args, bool(expert))
    for pp, ep in sorted({(place.pp, place.ep) for place in ranks}):
        own = range(ep * each, (ep + 1) * each)
        held = [
            [name for name in names if (number := _expert_of(name)) is None or number in own]
            for names in (
                _names_on(shapes, stages[c, pp], (pp, c) == (0, 0), (pp, c) == (p - 1, v - 1)) for c in range(v)
            )
        ]
        numel = sum(math.prod(shapes[name]) for names in held for name in names)
        for c, names in enumerate(held):
            limit = bucket_size(args, dp, numel) if pp == c == 0 and args.get("overlap_grad_reduce") else None
            mine = [name for name in names if expert is None or is_expert(name) == expert]
            for dtype in sorted({dtypes[name] for name in mine}):
                modules = modules_of(args, {n: shapes[n] for n in mine if dtypes[n] == dtype})
                buffers[pp, ep, c, dtype] = _buffer(modules, tied, dp, limit, multiple)
    return Plan(ranks, buffers)


def _buffer(modules: Sequence[tuple[Part, ...]], tied: bool, dp: int, limit: int | None, multiple: int) -> Buffer:
    sizes = [sum(math.prod(part.shape) for part in parts) for parts in modules]
    shared = [tied and parts[0].name in (EMBEDDING, TIED) for parts in modules]
    starts, buckets = buffer_walk(sizes, shared, dp, limit)
    units = tuple(Unit(start, parts) for start, parts in zip(starts, modules, strict=True))
    moved = zip(units, tails_before(starts, buckets, multiple), strict=True)
    return Buffer(units, tuple(buckets), tuple((part.name, n) for unit, n in moved if n for part in unit.parts))


def modules_of(args: Args, shapes: Mapping[str, Shape]) -> list[tuple[Part, ...]]:
    """The tensors that a rank has of these parameters, in module order: one of each, but for grouped experts.

    Those of Megatron's own GroupedMLP are one tensor with all the rank's experts, each transposed.
    """
    te = args.get("transformer_impl", "transformer_engine") != "local"
    grouped = bool(args.get("moe_grouped_gemm", False))
    merged = grouped and (not te or bool(args.optional("moe_use_legacy_grouped_gemm")))
    names = sorted(shapes, key=lambda name: _module_order(name, _TE_MODULES if te else _MODULES, grouped))
    modules: list[tuple[Part, ...]] = []
    last = None
    for name in names:
        layer = _LAYER.fullmatch(name)
        expert = _EXPERT.fullmatch(layer[2]) if layer and merged else None
        if layer is None or expert is None:
            modules.append((Part(name, 0, shapes[name]),))
            continue
        if expert[3] != "weight":
            raise FormatError(f"{name}: grouped experts with biases are not known here")
        if last == (layer[1], expert[2]):
            start = modules[-1][-1].start + math.prod(shapes[name])
            modules[-1] = (*modules[-1], Part(name, start, shapes[name][::-1], transposed=True))
        else:
            modules.append((Part(name, 0, shapes[name][::-1], transposed=True),))
        last = layer[1], expert[2]
    return modules


def _module_order(name: str, modules: Sequence[str], grouped: bool) -> tuple[int, ...]:
    module, _, kind = name.rpartition(".")
    outer = (
        "embedding.word_embeddings",
        "embedding.position_embeddings",
        "",
        "decoder.final_layernorm",
        "output_layer",
    )
    if kind in _KINDS and module in outer:
        return outer.index(module), _KINDS.index(kind)
    layer = _LAYER.fullmatch(name)
    if layer is not None and (expert := _EXPERT.fullmatch(layer[2])):
        number, linear, part = int(expert[1]), int(expert[2][-1]), _KINDS.index(expert[3])
        within = (linear, part, number) if grouped else (number, linear, part)
        return 2, int(layer[1]), modules.index("mlp.experts"), *within
    inner = layer[2].rpartition(".")[0] if layer is not None else ""
    if layer is None or inner not in modules or kind not in _KINDS:
        raise FormatError(
            f"where {name} lies in a flat buffer is not known here; save the optimizer with "
            "--dist-ckpt-optim-fully-reshardable, or open the weights alone (weights_only)"
        )
    return 2, int(layer[1]), modules.index(inner), _KINDS.index(kind)


def _names_on(names: Iterable[str], layers: range, first: bool, last: bool) -> list[str]:
    """The parameters of one model chunk: its layers, what is before them in the first, and behind them in the last."""
    found: list[str] = []
    for name in names:
        layer = _LAYER.fullmatch(name)
        if int(layer[1]) in layers if layer else (first if name.startswith("embedding.") else last):
            found.append(name)
    return found


def _expert_of(name: str) -> int | None:
    layer = _LAYER.fullmatch(name)
    expert = _EXPERT.fullmatch(layer[2]) if layer else None
    return int(expert[1]) if expert else None
