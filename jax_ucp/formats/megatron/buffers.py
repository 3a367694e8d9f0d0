"""Where the parameters of a model lie in a distributed optimizer's flat buffers. Integers only.

`dp_reshardable` and `dp_zero_gather_scatter` store, for each model-parallel rank, what its
data-parallel ranks had in their flat buffers; the legacy format does so too. Nothing there names a
parameter: the order is that of the rank's modules, which follows from the model's own tensors and
the args; recorded sizes must agree. How tensor parallelism cut a parameter is seen from the chunks
in which the model's tensor was written.

Facts: `megatron/core/optimizer/distrib_optimizer.py`, `megatron/core/parallel_state.py` (order of
ranks), `megatron/core/models/gpt/gpt_layer_specs.py` (order of modules),
`megatron/core/distributed/param_and_grad_buffer.py` (buffers) and `distributed_data_parallel.py`
(bucket size) of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.megatron.model import (
    EMBEDDING,
    MTP_COPY,
    TIED,
    ModelChunk,
    ParamPart,
    expert_of,
    in_module_order,
    is_expert,
    layer_of,
    stage_chunks,
    unsplit,
)
from jax_ucp.formats.megatron.run import Args
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, block_layout
from jax_ucp.layout.parts import Part, Shape, box_part


@dataclass(frozen=True, slots=True)
class BufferTensor:
    """A tensor in a coalesced buffer: its elements begin at `start`, and hold `parts`."""

    start: int
    parts: tuple[ParamPart, ...]

    @property
    def numel(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A chunk's parameters of one dtype on one rank; `buckets` are sizes without tails.

    `moved` are parameters that a writer of padded offsets moves, each with how far.
    """

    tensors: tuple[BufferTensor, ...]
    buckets: tuple[int, ...]
    moved: tuple[tuple[str, int], ...]

    @property
    def parts(self) -> Iterator[tuple[int, ParamPart]]:
        """The parts of all tensors, each with the start of its tensor."""
        return ((tensor.start, part) for tensor in self.tensors for part in tensor.parts)


@dataclass(frozen=True, slots=True)
class ModelRank:
    """A model-parallel rank: `group` numbers its buffers, `rank` is tensor parallelism's."""

    group: int
    pp: int
    rank: int
    ep: int = 0


@dataclass(frozen=True, slots=True)
class ModuleOrder:
    """Choices in the order of modules that args do not always record: see `model`."""

    fused_norm: bool
    norm_at_output: bool
    grouped: bool
    conv_first: bool


# The buffers of an optimizer, each with its rank, by (group, model chunk, dtype).
Plan = dict[tuple[int, int, str], tuple[ModelRank, FlatBuffer]]


def model_parallel_ranks(args: Args, expert: bool) -> list[ModelRank]:
    """The model-parallel ranks in the order of groups: tp, then ep for experts, then pp."""
    p = args.degree("pipeline_model_parallel_size")
    e = args.degree("expert_model_parallel_size") if expert else 1
    places = itertools.product(range(p), range(e), range(args.tensor_ranks(expert)))
    return [ModelRank(group, pp, rank, ep) for group, (pp, ep, rank) in enumerate(places)]


def module_orders(args: Args) -> list[ModuleOrder]:
    """The orders of modules that are possible, first the one that args record.

    Releases up to 0.15 have the final norm before the output layer, also where multi-token
    prediction makes later ones keep it beside the last layer. Since 0.19 the convolution of Mamba's
    mixer comes first in it.
    """
    fused = args.get("transformer_impl", "transformer_engine") != "local"
    at_output = [False, True] if args.optional("mtp_num_layers") else [False]
    grouped = [bool(args.get("moe_grouped_gemm", False))]
    if args.optional("num_experts") and "moe_grouped_gemm" not in args.fields:
        grouped = [True, False]
    hybrid = any(map(args.optional, ("hybrid_layer_pattern", "hybrid_override_pattern")))
    conv_first = [True, False] if hybrid else [False]
    choices = itertools.product([fused, not fused], at_output, grouped, conv_first)
    return list(itertools.starmap(ModuleOrder, choices))


def plan_buffers(
    args: Args,
    expert: bool | None,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    order: ModuleOrder,
    recorded: Mapping[tuple[int, int, str], Sequence[int]],
) -> Plan:
    """The buffers of the optimizer of dense parameters (False), experts (True), all (None).

    `shapes` are one rank's of every parameter, with later stages' copies of the embedding; `dtypes`
    those of parameters in buffers; `recorded` the sizes of buckets, where args do not say them.
    Raises FormatError where the order of modules is not known here.
    """
    if expert:
        world = args.degree("world_size")
        kinds = (args.degree(f"{kind}_model_parallel_size") for kind in ("pipeline", "expert"))
        dp = max(1, world // (math.prod(kinds) * args.tensor_ranks(True)))
    else:
        dp = args.degree("data_parallel_size") * args.degree("context_parallel_size")
    alignment = math.lcm(
        dp, 128, 1 << 16 if args.optional("ddp_pad_buckets_for_high_nccl_busbw") else 1
    )
    stages: dict[tuple[int, int], list[ModelRank]] = defaultdict(list)
    for rank in model_parallel_ranks(args, bool(expert)):
        stages[rank.pp, rank.ep].append(rank)
    shared, count = shared_embeddings(args), args.get("num_experts") or 0
    e = args.degree("expert_model_parallel_size")
    each, rest = divmod(count, e)
    if rest:
        raise FormatError(f"args.num_experts does not divide over {e} expert-parallel ranks")
    chunks = stage_chunks(args)
    plan: Plan = {}
    for (pp, ep), ranks in stages.items():
        experts = range(ep * each, (ep + 1) * each)
        own_chunks = [chunk for (_, stage), chunk in chunks.items() if stage == pp]
        names_by_chunk = [
            [name for name in shapes if _has(chunk, experts, order, name)] for chunk in own_chunks
        ]
        numel = sum(math.prod(shapes[name]) for name in itertools.chain(*names_by_chunk))
        for c, names in enumerate(names_by_chunk):
            limit = bucket_limit(args, pp, c, dp, numel)
            by_dtype: dict[str, dict[str, Shape]] = defaultdict(dict)
            for name in filter(dtypes.__contains__, names):
                if expert is None or is_expert(name) == expert:
                    by_dtype[dtypes[name]][name] = shapes[name]
            for dtype, own in by_dtype.items():
                tensors = _tensors(args, own, order)
                sizes = [sum(math.prod(part.shape) for part in parts) for parts in tensors]
                alone = [parts[0].name in shared for parts in tensors]
                ends = recorded.get((ranks[-1].group, c, dtype), ())
                starts, buckets = buffer_walk(sizes, alone, dp, limit, ends)
                tails = tails_before(starts, buckets, alignment)
                tails_of = zip(tails, tensors, strict=True)
                moved = [(part.name, n) for n, parts in tails_of if n for part in parts]
                buffer = FlatBuffer(
                    tuple(map(BufferTensor, starts, tensors)), tuple(buckets), tuple(moved)
                )
                plan |= {(rank.group, c, dtype): (rank, buffer) for rank in ranks}
    return dict(sorted(plan.items()))


def _has(chunk: ModelChunk, experts: range, order: ModuleOrder, name: str) -> bool:
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
    at_layers = name.startswith("decoder.") and not order.norm_at_output
    return chunk.final_norm if at_layers else chunk.output


def _tensors(
    args: Args, shapes: Mapping[str, Shape], order: ModuleOrder
) -> list[tuple[ParamPart, ...]]:
    """A rank's tensors in module order: one for each parameter, but for those stored in parts.

    Megatron's own GroupedMLP has one tensor with all the rank's experts, each transposed.
    """
    local = args.get("transformer_impl", "transformer_engine") == "local"
    is_one = order.grouped and (local or args.optional("moe_use_legacy_grouped_gemm"))
    tensors: dict[tuple[str, str], list[ParamPart]] = defaultdict(list)
    for name in in_module_order(shapes, order.fused_norm, order.grouped, order.conv_first):
        expert = expert_of(name) if is_one else None
        if expert and not expert.inner.endswith(".weight"):
            raise FormatError(f"{name}: grouped experts with biases are not known here")
        parts = tensors[(expert.experts, expert.inner) if expert else (unsplit(name)[0], "")]
        start = parts[-1].start + math.prod(parts[-1].shape) if parts else 0
        shape = shapes[name][::-1] if expert else shapes[name]
        parts.append(ParamPart(name, start, shape, transposed=expert is not None))
    return list(map(tuple, tensors.values()))


def shared_embeddings(args: Args) -> frozenset[str]:
    """The word embedding and its copies, where several stages have it; each has its own bucket."""
    if args.degree("pipeline_model_parallel_size") == 1:
        return frozenset()
    if args.optional("mtp_num_layers"):
        return frozenset({EMBEDDING, EMBEDDING + MTP_COPY})
    return frozenset({EMBEDDING, TIED}) if args.copies_embedding else frozenset()


def bucket_limit(args: Args, pp: int, chunk: int, dp: int, numel: int) -> int | None:
    """Elements after which a bucket is closed; None where a buffer has one bucket.

    Only the first chunk of the first stage has several, if gradients are reduced meanwhile.
    """
    if pp or chunk or not args.get("overlap_grad_reduce"):
        return None
    if size := args.get("ddp_bucket_size"):
        return int(size)
    if buckets := args.get("ddp_num_buckets"):
        return numel // int(buckets)
    return max(40_000_000, 1_000_000 * dp)


def buffer_walk(
    sizes: Sequence[int],
    shared: Sequence[bool],
    dp: int,
    bucket_size: int | None,
    recorded: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """Offsets of tensors in a coalesced buffer, and the sizes of its buckets without their tails.

    `sizes` are elements in module order, `shared` marks a tied embedding with several pipeline
    stages, which has a bucket to itself. The buffer is filled from the last tensor to the first,
    each at a multiple of 64. Where `bucket_size` is not known, buckets end where those `recorded`
    do, if a tensor ends there.

    >>> buffer_walk([100, 32], [False, False], dp=2, bucket_size=None)
    ([64, 0], [164])
    >>> buffer_walk([100, 32], [False, False], dp=2, bucket_size=32)
    ([32, 0], [32, 100])
    >>> buffer_walk([100, 32], [False, False], dp=2, bucket_size=None, recorded=[32, 100])
    ([32, 0], [32, 100])
    """
    offsets, buckets = [0] * len(sizes), list[int]()
    start = bucket_start = 0
    multiple = math.lcm(dp, 128)

    def is_full(elements: int) -> bool:
        if recorded:
            return recorded[min(len(buckets), len(recorded) - 1)] == elements
        return bucket_size is not None and elements >= bucket_size

    def close(end: int) -> int:
        buckets.append(end - bucket_start)
        return _round_up(end, multiple)

    empty = True
    for i in reversed(range(len(sizes))):
        start = _round_up(start, 64)
        if shared[i] and not empty:
            start = bucket_start = close(start)
            empty = True
        offsets[i] = sum(buckets) + start - bucket_start
        start, empty = start + sizes[i], False
        if shared[i] or is_full(start - bucket_start):
            start = bucket_start = close(start)
            empty = True
    if not empty:
        close(start)
    return offsets, buckets


def tails_before(offsets: Sequence[int], buckets: Sequence[int], multiple: int) -> list[int]:
    """For tensors at `offsets` of a coalesced buffer, the padding before their buckets.

    In memory every bucket is padded to a `multiple`; a coalesced buffer leaves that out. A writer
    that takes one for the other moves a tensor by this many elements.

    >>> tails_before([0, 100], [100, 32], multiple=128)
    [0, 28]
    """
    ends = list(itertools.accumulate(buckets))
    padding = [0, *itertools.accumulate(_round_up(n, multiple) - n for n in buckets)]
    return [padding[bisect.bisect_right(ends, offset)] for offset in offsets]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def cut_of(shape: Shape, boxes: Sequence[Box], ranks: int) -> ParamLayout:
    """How `ranks` tensor-parallel ranks held a parameter of which they wrote `boxes`.

    One box is a tensor that every rank had whole. Otherwise all boxes are equal, side by side on
    one axis, one for each rank in order; or several parts, each cut by itself: of a gated MLP all
    gates, then all ups. Raises LayoutError for other boxes.

    >>> layout = cut_of((8, 3), [Box((i, 0), (i + 2, 3)) for i in (0, 2, 4, 6)], ranks=2)
    >>> layout.shards, [str(f.target_box) for f in layout.parts if f.input == 0]
    (((4, 3), (4, 3)), ['[0:2, 0:3]', '[4:6, 0:3]'])
    """
    boxes = sorted(set(boxes))
    if boxes == [Box.whole(shape)]:
        return block_layout(shape, boxes * ranks)
    cut_axes = {axis for box in boxes for axis, n in enumerate(box.shape) if n != shape[axis]}
    sizes = {box.shape for box in boxes}
    if len(cut_axes) != 1 or len(sizes) != 1 or len(boxes) % ranks:
        raise LayoutError(
            f"the model's tensor of shape {list(shape)} was written in {len(boxes)} chunks, which"
            f" are not equal parts of {ranks} tensor-parallel ranks:"
            f" {', '.join(map(str, boxes[:4]))}"
        )
    axis = min(cut_axes)
    size = boxes[0].shape[axis]
    local = (*shape[:axis], len(boxes) // ranks * size, *shape[axis + 1 :])
    first = Box.whole(boxes[0].shape)
    parts: list[Part] = []
    for i, box in enumerate(boxes):
        part, rank = divmod(i, ranks)
        by = [0] * len(shape)
        by[axis] = part * size
        parts.append(box_part(rank, first.shift(by), box))
    return ParamLayout(shape, (local,) * ranks, tuple(parts))
