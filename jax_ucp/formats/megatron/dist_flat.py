"""The flat buffers of dp_reshardable and dp_zero_gather_scatter as states of parameters, and why
masters of a torch_dist checkpoint may not be those of its weights.

Megatron reads flat buffers only with the tensor and pipeline parallelism that wrote them. Here
sizes are compared with those recorded, and masters with weights.

Two kinds of state lie in their places by assumption. Flat buffers name no parameters, so a wrong
order of modules would give each parameter another's elements. And releases of megatron-core up to
0.19 that write `fully_reshardable` from several buckets take padded offsets for those of a vector
without padding: what lies behind a bucket's padding is moved by it, and its end is lost
(`megatron/core/optimizer/distrib_optimizer.py` of core_v0.16.1; corrected by Megatron-LM pull
request 5077). In both cases every element of a parameter is in another place, so that the sample
that a restore compares of each stored chunk shows it, at its end at the latest: there a moved
parameter has elements of the next one, or zeros. Of masters of which only the low bits are stored
the zeros alone tell: where such a release would have left them, at the end of the word embedding,
there are none if a later one wrote the checkpoint.

Facts: `megatron/core/optimizer/distrib_optimizer.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_ucp.arrays.evaluate import read
from jax_ucp.arrays.value import Array, cut, joined
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.codecs.unpickle import what_is
from jax_ucp.errors import FormatError, LayoutError, naming
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.megatron.buffers import (
    FlatBuffer,
    ModelRank,
    ModuleOrder,
    Plan,
    cut_of,
    module_orders,
    plan_buffers,
    shared_embeddings,
)
from jax_ucp.formats.megatron.checks import uses_gtp
from jax_ucp.formats.megatron.dist_files import DistFiles
from jax_ucp.formats.megatron.dist_names import group_key, is_flat, is_fully_reshardable
from jax_ucp.formats.megatron.dist_tensors import TensorStates
from jax_ucp.formats.megatron.model import (
    BUFFERS,
    EMBEDDING,
    MTP_COPY,
    TIED,
    ParamPart,
    is_expert,
)
from jax_ucp.formats.megatron.numbered import stored_tensors
from jax_ucp.formats.megatron.parameters import BF16, are_remainders
from jax_ucp.formats.nested import as_dict
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.patterns import flat_layout

_BUCKET = re.compile(
    r"gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)\.([^.]+)"
)
_OTHER = (
    "some parameters were frozen, buckets had another size than args say, the buffers belong to"
    " another run, or the modules lie in another order than the one known here"
)
_REMEDY = "weights_only opens the weights alone"
_NOT_OF_WEIGHTS = (
    "the flat buffers belong to another run or step, hold something else than masters under"
    " that name, or have the modules in another order than the one known here."
    f" {_REMEDY}"
)


# Of a buffer: optimizer, group, model chunk, dtype.
Address = tuple[int, int, int, str]


@dataclass(frozen=True)
class StoredBuffer:
    """A rank's buffer: the sizes of its buckets, and the pieces (start, stop, key) of each
    state.
    """

    name: str
    coalesced: bool
    buckets: Sequence[int]
    pieces: Mapping[str, Sequence[tuple[int, int, str]]]


@dataclass(frozen=True)
class BufferStates:
    """The states in flat buffers, by parameter, then state.

    `gaps` are the keys of pieces between tensors. `copies` maps the embeddings of later stages to
    the parameters that they are copies of. `causes` has the reason why the masters of a parameter
    may be those of another one, by parameter.
    """

    states: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    gaps: Sequence[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)


def has_flat_buffers(files: DistFiles) -> bool:
    return any(map(is_flat, (*files.tensors, *files.objects)))


def buffer_states(
    builder: ContentsBuilder,
    files: DistFiles,
    tensors: TensorStates,
    inside: Mapping[str, TorchFile],
) -> BufferStates:
    """The states in flat buffers of `inside`. Raises FormatError or LayoutError."""
    with naming(way_out="weights_only"):
        if not has_flat_buffers(files):
            is_joined = any(map(is_fully_reshardable, files.tensors))
            return BufferStates(causes=_moved(files, tensors) if is_joined else {})
        if uses_gtp(files.args):
            raise FormatError(
                f"{files.folder}: flat buffers of ranks that each have a shard of a weight"
                " (generalized tensor parallelism) are not read"
            )
        stored = _stored_buffers(files, inside)
        ranks = _rank_tensors(files, tensors)
        buffers = _in_proved_order(files, ranks, stored)
        shards: dict[str, dict[str, dict[int, Array]]] = {}  # by parameter, state and rank
        for placed in buffers:
            for state, pieces in placed.stored.pieces.items():
                arrays = [(start, builder.array(key)) for start, _, key in pieces]
                for start, part in placed.buffer.parts:
                    label = f"{state} of {part.name} in {placed.stored.name}"
                    by_rank = shards.setdefault(part.name, {}).setdefault(state, {})
                    by_rank[placed.rank.rank] = part_of(label, part, start, arrays)
        states: dict[str, dict[str, Array]] = {}
        for name, by_state in shards.items():
            states[name] = {
                state: joined(
                    f"{state}.{name}", ranks.cuts[name], [own[i] for i in range(len(own))]
                )
                for state, own in by_state.items()
            }
        gaps = [gap for placed in buffers for gap in placed.gaps]
        return BufferStates(states, gaps, ranks.copies, dict.fromkeys(states, _NOT_OF_WEIGHTS))


def part_of(label: str, part: ParamPart, start: int, pieces: Sequence[tuple[int, Array]]) -> Array:
    """The array `label`: a part, which begins at `start` + `part.start` of a buffer.

    `pieces` are the buffer's flat arrays by start, ascending and without holes.
    """
    first, stop = start + part.start, start + part.start + math.prod(part.shape)
    at = max(0, bisect.bisect_right(pieces, first, key=lambda piece: piece[0]) - 1)
    inside = itertools.islice(pieces, at, None)
    used = list(itertools.takewhile(lambda piece: piece[0] < stop, inside))
    ranges = [range(begin, begin + array.info.shape[0]) for begin, array in used]
    layout = flat_layout(part.shape, first, ranges)
    whole = joined(label, layout, [array for _, array in used])
    return cut(label, whole, 0, part.shape, transposed=True) if part.transposed else whole


# -- the buffers that are stored


def _stored_buffers(
    files: DistFiles, inside: Mapping[str, TorchFile]
) -> dict[Address, StoredBuffer]:
    buffers: dict[Address, StoredBuffer] = {}
    for key, file in inside.items():
        buffers |= _coalesced(key, f"{files.objects[key].file}:{key}:", _only(file.tree, key))
    # keys of tensors by address, then state, then number of the bucket
    keys: dict[Address, dict[str, dict[int, str]]] = {}
    for key in files.tensors:
        if (group := group_key(key)) is None:
            continue
        bucket = _BUCKET.fullmatch(group.inner)
        if bucket is None:
            raise FormatError(f"{files.folder}: the buffer {key} is of a kind not known here")
        address = group.chain, group.group, int(bucket[1]), bucket[2]
        by_state = keys.setdefault(address, {})
        by_state.setdefault(bucket[4], {})[int(bucket[3])] = key
    buffers |= {address: _joined(files, by_state) for address, by_state in keys.items()}

    # `per_bucket_numel_unpadded` of each model-parallel rank
    for key, stored in files.objects.items():
        group = group_key(key)
        if group is None or group.what != "per_bucket_numel_unpadded":
            continue
        recorded = _only(stored.load().tree, key)
        if not isinstance(recorded, list):
            raise FormatError(f"{files.folder}: {key} should be a list, but is {what_is(recorded)}")
        for c, by_dtype in enumerate(recorded):
            for dtypes, sizes in by_dtype.items():
                buffer = buffers.get((group.chain, group.group, c, dtypes[0].name))
                buckets = list(buffer.buckets) if buffer else []
                if buckets != sizes:
                    raise FormatError(
                        f"{files.folder}: {key} says {sizes} elements, but the buckets have"
                        f" {buckets}"
                    )
    return buffers


def _joined(files: DistFiles, keys: Mapping[str, Mapping[int, str]]) -> StoredBuffer:
    """Buckets, each a tensor, as one buffer; `keys` by state, then number of the bucket."""
    every = itertools.chain(*(by_bucket.values() for by_bucket in keys.values()))
    name, buckets = min(every).rpartition(".bucket_idx_")[0], dict[int, int]()
    for by_bucket in keys.values():
        for k, key in by_bucket.items():
            shape = files.tensors[key].shape
            if len(shape) != 1 or buckets.setdefault(k, shape[0]) != shape[0]:
                raise FormatError(
                    f"{files.folder}: {key} has shape {list(shape)}, another state"
                    f" {buckets[k]} elements"
                )
    if sorted(buckets) != list(range(len(buckets))):
        raise FormatError(f"{files.folder}: of {name} there are only the buckets {sorted(buckets)}")
    sizes = [buckets[k] for k in range(len(buckets))]
    starts = list(itertools.accumulate(sizes, initial=0))
    pieces: dict[str, list[tuple[int, int, str]]] = {}
    for state, by_bucket in keys.items():
        if lost := sorted(buckets.keys() - by_bucket.keys()):
            raise FormatError(f"{files.folder}: {name}.bucket_idx_{lost[0]}.{state} is in no file")
        pieces[state] = sorted(
            (starts[k] + run.target.start[0], starts[k] + run.target.stop[0], run.key)
            for k, key in by_bucket.items()
            for run in files.tensors[key].runs
            if run.target.size
        )
    return StoredBuffer(name, False, sizes, pieces)


def _coalesced(key: str, prefix: str, state: Any) -> dict[Address, StoredBuffer]:
    """The buffers in one `param_state` object, which is like a legacy `distrib_optim.pt`."""
    group = group_key(key)
    if group is None or not isinstance(state, dict) or state.get("buckets_coalesced") is not True:
        raise FormatError(
            f"{key} has no coalesced buffers; those of before February 2024 are not read"
        )
    by_address: dict[Address, StoredBuffer] = {}
    for c, by_dtypes in state.items():
        for dtypes, buffer in as_dict(by_dtypes).items():
            tensors = stored_tensors(buffer)
            lengths = {(buffer.get("numel_unpadded"),), *(t.shape for t in tensors.values())}
            length, *others = lengths
            if others or len(length) != 1:
                raise FormatError(
                    f"{key}: the states and numel_unpadded of chunk {c} differ in size:"
                    f" {sorted(lengths, key=str)}"
                )
            pieces = {name: [(0, *length, prefix + t.key)] for name, t in tensors.items()}
            by_address[group.chain, group.group, c, dtypes[0].name] = StoredBuffer(
                f"{key}, chunk {c}", True, length if tensors else (), pieces
            )
    return by_address


def _only(tree: Any, key: str) -> Any:
    if not isinstance(tree, list) or len(tree) != 1:
        raise FormatError(f"{key} should be a list of one item, but is {what_is(tree)}")
    return tree[0]


# -- the parameters in them


@dataclass(frozen=True)
class _RankTensors:
    """The layout of each parameter over the tensor-parallel ranks, and the copies of an embedding.

    `dtypes` are those of the parameters that can be in flat buffers: those without states by name.
    """

    cuts: Mapping[str, ParamLayout]
    dtypes: Mapping[str, str]
    copies: Mapping[str, str]


@dataclass(frozen=True)
class PlacedBuffer:
    """A buffer of the plan, its rank, and the stored one; `gaps` are the pieces between tensors.

    Tensors begin at multiples of 64 elements, and what was between them is stored too.
    """

    rank: ModelRank
    buffer: FlatBuffer
    stored: StoredBuffer
    gaps: Sequence[str]


def _rank_tensors(files: DistFiles, tensors: TensorStates) -> _RankTensors:
    cuts: dict[str, ParamLayout] = {}
    for name, states in tensors.states.items():
        if name.endswith(BUFFERS):
            continue
        ranks = files.args.tensor_ranks(is_expert(name))
        with naming(item=name):
            cuts[name] = cut_of(states["weight"].info.shape, tensors.boxes[name], ranks)
    # later stages' copies of the embedding, by the names that they have here, with their parameters
    stages = files.args.degree("pipeline_model_parallel_size")
    if stages > 1 and files.args.optional("mtp_num_layers"):
        copies = {name + MTP_COPY: name for name in cuts if name.startswith("embedding.")}
    else:
        copies = {TIED: EMBEDDING} if files.args.copies_embedding else {}
    dtypes = dict(tensors.dtypes)
    if files.args.is_layer_wise:
        dtypes = {name: dtypes[name] for name in cuts if tensors.states[name].keys() == {"weight"}}
    return _RankTensors(
        cuts | {copy: cuts[name] for copy, name in copies.items()},
        dtypes | {copy: dtypes[name] for copy, name in copies.items() if name in dtypes},
        copies,
    )


def _in_proved_order(
    files: DistFiles, ranks: _RankTensors, stored: Mapping[Address, StoredBuffer]
) -> list[PlacedBuffer]:
    """The buffers by the first order of modules that fits the stored sizes; masters are compared
    with weights later, which proves it.

    Low 16 bits of masters prove nothing: then all orders that fit must be the same.
    """
    dtypes = {tensor.dtype for key, tensor in files.tensors.items() if is_flat(key)}
    every = any(are_remainders(files.args, dtype, BF16) for dtype in (*dtypes, np.dtype("f4")))
    several = any(chain for chain, *_ in stored)
    fits: list[list[PlacedBuffer]] = []
    errors: list[FormatError] = []
    for order in module_orders(files.args):
        if fits and not every:
            break
        try:
            plans = _plans(files, ranks, order, several, stored)
            fits.append(placed_buffers(files, plans, stored))
        except FormatError as error:
            errors.append(error)
    if not fits:
        raise errors[0]
    first, *others = [[placed.buffer for placed in fit] for fit in fits]
    if any(order != first for order in others):
        raise FormatError(
            f"{files.folder}: the modules may lie in several orders in its flat buffers, which all"
            " fit the sizes that are stored, and of the low 16 bits of masters, which the"
            " precision-aware optimizer keeps, none can be proved"
        )
    return fits[0]


def _plans(
    files: DistFiles,
    ranks: _RankTensors,
    order: ModuleOrder,
    several: bool,
    stored: Mapping[Address, StoredBuffer],
) -> dict[int, Plan]:
    """The planned buffers by optimizer: of `several`, the second one is that of experts, or has
    what a layer-wise optimizer leaves.
    """
    shapes = {name: layout.shards[0] for name, layout in ranks.cuts.items()}
    experts: dict[int, bool | None] = {0: False, 1: True} if several else {0: None}
    if files.args.is_layer_wise:
        experts = {1: None}
    recorded: dict[int, dict[tuple[int, int, str], Sequence[int]]] = defaultdict(dict)
    if "data_parallel_size" not in files.args.fields:
        for (chain, group, c, dtype), buffer in stored.items():
            if not buffer.coalesced:
                recorded[chain][group, c, dtype] = buffer.buckets
    return {
        chain: plan_buffers(files.args, expert, shapes, ranks.dtypes, order, recorded[chain])
        for chain, expert in experts.items()
    }


def placed_buffers(
    files: DistFiles, plans: Mapping[int, Plan], stored: Mapping[Address, StoredBuffer]
) -> list[PlacedBuffer]:
    """The buffers of all optimizers as they are stored. Raises FormatError unless they fit."""
    planned = {(chain, *place): own for chain, plan in plans.items() for place, own in plan.items()}
    for _, group, c, dtype in planned.keys() - stored.keys():
        raise FormatError(
            f"{files.folder}: by the args there is a model-parallel rank {group}, but no"
            f" buffer of its {dtype} parameters in model chunk {c}"
        )
    result: list[PlacedBuffer] = []
    for address, (rank, buffer) in planned.items():
        own = stored[address]
        want = [sum(buffer.buckets)] if own.coalesced else list(buffer.buckets)
        if list(own.buckets) != want:
            raise FormatError(
                f"{files.folder}: {own.name} has buckets of {list(own.buckets)} elements, but"
                f" {len(buffer.tensors)} tensors of the model take {want}; {_OTHER}"
            )
        if "param" not in own.pieces:
            raise FormatError(
                f"{files.folder}: {own.name} has no masters, only {sorted(own.pieces)}"
            )
        result.append(PlacedBuffer(rank, buffer, own, _gaps(files, own, buffer)))
    for chain, group, c, dtype in stored.keys() - planned.keys():
        raise FormatError(
            f"{files.folder}: {stored[chain, group, c, dtype].name} (optimizer {chain}, group"
            f" {group}, chunk {c}, {dtype}) belongs to no rank that the args know"
        )
    return result


def _gaps(files: DistFiles, stored: StoredBuffer, buffer: FlatBuffer) -> list[str]:
    """The keys of the pieces between tensors. Raises FormatError for a piece in two tensors,
    because ranks wrote each tensor's pieces by themselves.
    """
    if stored.coalesced:
        return []
    gaps: list[str] = []
    ends = sorted((t.start, t.start + t.numel, t.parts[0].name) for t in buffer.tensors)
    for start, stop, key in itertools.chain(*stored.pieces.values()):
        at = bisect.bisect_right(ends, stop - 1, key=lambda tensor: tensor[0]) - 1
        first, end, name = ends[at] if at >= 0 else (0, 0, "")
        if end <= start:
            gaps.append(key)
        elif not first <= start < stop <= end:
            raise FormatError(
                f"{files.folder}: {key} is the elements {start} to {stop} of {stored.name}, where"
                f" {name} should be {first} to {end}; {_OTHER}"
            )
    return gaps


# -- what a writer of fully_reshardable moved


def _moved(files: DistFiles, tensors: TensorStates) -> dict[str, str]:
    """The reasons of `BufferStates.causes` for parameters that `fully_reshardable` may have
    moved.
    """
    args = files.args
    try:
        if args.is_layer_wise:
            raise FormatError("the parameters of both optimizers have states by their names")
        ranks = _rank_tensors(files, tensors)
        several = args.degree("expert_model_parallel_size") > 1
        recorded, *_ = orders = module_orders(args)
        causes: dict[str, str] = {}
        ends: list[int] = []
        # nothing names the release that wrote the checkpoint, and so which order it used
        for order in [order for order in orders if order.fused_norm == recorded.fused_norm]:
            plans = _plans(files, ranks, order, several, {})
            buffers = [buffer for plan in plans.values() for _, buffer in plan.values()]
            moved = dict(itertools.chain.from_iterable(buffer.moved for buffer in buffers))
            causes |= {name: _moved_by(n) for name, n in moved.items()}
            ends.append(moved.get(EMBEDDING, 0))
        fixed = min(ends) > 0 and _has_its_end(tensors.states[EMBEDDING], ranks.cuts[EMBEDDING])
        return {} if fixed else causes
    # modules of an order not known here: any of them may have been moved, if there is padding
    except (FormatError, LayoutError):
        if args.fields and not (args.get("overlap_grad_reduce") or shared_embeddings(args)):
            return {}
        return dict.fromkeys(tensors.states, _moved_by("some"))


def _has_its_end(states: Mapping[str, Array], cut: ParamLayout) -> bool:
    """Whether a state of the word embedding, the last tensor of its buffer in every order, has
    something else than zero where it ends on a rank.
    """
    lasts = [tuple(n - 1 for n in part.target_box.stop) for part in cut.parts]
    ends = [Box(last, tuple(n + 1 for n in last)) for last in lasts]
    arrays = [array for state, array in states.items() if state != "weight"]
    return any(read(array, end).any() for array in arrays for end in ends)


def _moved_by(elements: int | str) -> str:
    return (
        f"its optimizer state lies behind {elements} elements of padding between gradient"
        " buckets, by which megatron-core up to 0.19 moves what it saves as fully_reshardable"
        " (Megatron-LM pull request 5077), so that its master and moments are lost."
        f" {_REMEDY}"
    )
