"""ZeRO's flat buffers: which parameters lie where in the partitions of one model-parallel rank.

ZeRO-1/2 and BF16_Optimizer: one buffer for each parameter group, cut into equal partitions. The
order is that of `param_shapes` in the model states; `param_slice_mappings` is not used, because
DeepSpeed 0.19.8 writes it wrong under `round_robin_gradients`. Where padding lies is computed from
lengths, because `group_paddings` is not the same thing in every optimizer wrapper. ZeRO-3: each
parameter is cut by itself, and a sub-group is one rank's pieces of several.

Facts: `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` and `runtime/bf16_optimizer.py` of
DeepSpeed 0.19.8.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.codecs.unpickle import known
from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed.codes import BESIDE_CODES, flattened
from jax_ucp.formats.deepspeed.files import Rank, StateFile
from jax_ucp.formats.nested import require_dict
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import flat_layouts, partitioned_layouts
from jax_ucp.states.pairing import has_two_first_moments


@dataclass(frozen=True)
class Whole:
    """A flat tensor of one rank that has whole parameters one after another, from `starts` on."""

    rank: Rank
    tensor: StoredTensor
    starts: Mapping[str, int]


@dataclass(frozen=True)
class PartitionGroup:
    """Parameters that lie in one set of partitions, held by `ranks`, in that order.

    The states by name: `flat` are tensors of the partition's length, or AdEMAMix's of two moments,
    `whole` those of whole parameters, `scalars` values for the whole group, and `aside` are not of
    elements of parameters, with the reason. `parts` say what codes mean. `layouts` say where each
    parameter lies in a flat tensor.
    """

    ranks: Sequence[Rank]
    shapes: Mapping[str, Shape]
    layouts: Mapping[str, ParamLayout]
    flat: Mapping[str, Sequence[StoredTensor]]
    whole: Mapping[str, Sequence[Whole]]
    scalars: Mapping[str, Sequence[Any]]
    aside: Mapping[str, tuple[Sequence[Any], str]]
    parts: Mapping[str, Sequence[StoredTensor]]


# States of torch's optimizers that have an element for each of the parameter: of another length
# they are wrong.
_ELEMENTWISE = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "grad_avg", "sum"),
)
_MOMENTUM = "momentum_buffer"


def param_shapes(model: StateFile, ranks: Sequence[Rank]) -> list[dict[str, Shape]]:
    """The parameters of each group, in the order of its buffer, from the model states."""
    shapes = known(model.state.get("param_shapes"))
    if not isinstance(shapes, list):
        raise FormatError(
            f"{model.file.path} has no param_shapes, so that nothing says which parameters the flat"
            " buffers hold"
        )
    groups = [
        {str(name): tuple(map(int, shape)) for name, shape in group.items()} for group in shapes
    ]
    for rank in ranks:
        if len(rank.masters) != len(groups):
            raise FormatError(
                f"{rank.file.path} has {len(rank.masters)} parameter groups, but {model.name}"
                f" describes {len(groups)}; one of the files is of another run, or of an earlier"
                " save with other groups"
            )
    return groups


def group(
    index: int,
    shapes: Mapping[str, Shape],
    ranks: Sequence[Rank],
    zero3: bool,
    model: str,
    weights_only: bool = False,
) -> PartitionGroup:
    """A group of parameters and its states on `ranks`. Raises FormatError for other lengths."""
    masters = [rank.masters[index] for rank in ranks]
    is_muon = any(rank.settings(index).get("use_muon") for rank in ranks)
    by_name = {} if weights_only else _states_by_name(index, ranks, is_muon)
    is_coded = any(name.startswith("qmap") for name in by_name)
    beside = filter(BESIDE_CODES.fullmatch, by_name) if is_coded else ()
    parts = {name: by_name[name] for name in beside}
    states = {name: by_name[name] for name in by_name if name not in parts}
    # Muon's momentum may be of whole parameters below ZeRO-3: it does not say how long a partition
    # is.
    momentum = states.get(_MOMENTUM) if is_muon and not zero3 else None
    if zero3:  # every rank has a part of the same length of each parameter
        length = sum(-(-math.prod(shape) // len(ranks)) for shape in shapes.values())
        layouts, lengths = partitioned_layouts(shapes, len(ranks)), [{length}] * len(ranks)
        if not _fit(masters, lengths):
            raise _misfit(index, ranks, "param", masters, lengths)
    else:
        others = [values for values in states.values() if values is not momentum]
        of_partitions = [masters, *filter(_are_flat, others)]
        layouts, lengths = _zero12(index, shapes, ranks, of_partitions, model)
    whole: dict[str, Sequence[Whole]] = {}
    if momentum is not None and not (_are_flat(momentum) and _fit(momentum, lengths)):
        del states[_MOMENTUM]
        whole[_MOMENTUM] = _momentum_of_wholes(index, shapes, ranks, layouts, momentum)
    # The rest are flat tensors of the partition, or numbers of the whole group, or left aside.
    flat: dict[str, Sequence[StoredTensor]] = {"param": masters}
    numbers: dict[str, Sequence[Any]] = {}
    aside: dict[str, tuple[Sequence[Any], str]] = {}
    for name, values in states.items():
        shapes_of = [v.shape if isinstance(v, StoredTensor) else () for v in values]
        if not any(shapes_of) and all(
            isinstance(v, StoredTensor | bool | int | float) for v in values
        ):
            numbers[name] = values
        elif name == "state1" and _have_two_first_moments(states) and _fit(values, lengths):
            flat[name] = values
        elif not _are_flat(values):
            aside[name] = values, "it is neither a flat tensor of the partition nor a number"
        elif _fit(values, lengths):
            flat[name] = values
        elif name in _ELEMENTWISE:
            raise _misfit(index, ranks, name, values, lengths)
        else:
            aside[name] = values, "its length is not that of the partition"
    return PartitionGroup(ranks, shapes, layouts, flat, whole, numbers, aside, parts)


def _momentum_of_wholes(
    index: int,
    shapes: Mapping[str, Shape],
    ranks: Sequence[Rank],
    layouts: Mapping[str, ParamLayout],
    momentum: Sequence[StoredTensor | None],
) -> list[Whole]:
    """Muon's momentum, of all of each parameter of which a rank's partition has an element.

    With CPU offload it is of the partition instead, which is as long only where both are the same:
    a partition is full before the last, so that a parameter that goes on into the next makes the
    first one's wholes longer. (`get_flat_partition` and `_apply_muon_updates_cpu_offload` in
    `runtime/zero/stage_1_and_2.py`.)
    """
    wholes: list[Whole] = []
    for place, (rank, tensor) in enumerate(zip(ranks, momentum, strict=True)):
        starts, end = dict[str, int](), 0
        for name, shape in shapes.items():
            if any(part.input == place for part in layouts[name].parts):
                starts[name] = end
                end += math.prod(shape)
        length = 0 if tensor is None else math.prod(tensor.shape)
        if length != end:
            raise FormatError(
                f"{rank.file.path}: Muon's momentum_buffer of group {index} has {length} elements,"
                f" where the parameters in the partition of rank {rank.dp} have {end}: the file is"
                " of another rank, run or world size, or was cut. weights_only opens the parameters"
                " alone"
            )
        if tensor is not None:
            wholes.append(Whole(rank, tensor, starts))
    return wholes


def _fit(tensors: Sequence[StoredTensor], lengths: Sequence[set[int]]) -> bool:
    return all(tensor.shape[-1] in fit for tensor, fit in zip(tensors, lengths, strict=True))


def _states_by_name(index: int, ranks: Sequence[Rank], is_muon: bool) -> dict[str, list[Any]]:
    states: list[dict[str, Any]] = []
    for rank in ranks:
        base = rank.base_optimizer
        if isinstance(base, list):  # an elastic checkpoint, which has a list of groups
            states.append(dict(base[index]))
            continue
        base = require_dict(base, f"{rank.file.path}: the base optimizer's state")
        states.append(flattened((base.get("state") or {}).get(index) or {}))
    names = list(dict.fromkeys(itertools.chain.from_iterable(states)))
    # A rank whose partition has none of Muon's parameters has no momentum of them.
    optional = {_MOMENTUM} if is_muon else set[str]()
    for rank, state in zip(ranks, states, strict=True):
        if (state.keys() ^ states[0].keys()) - optional:
            raise FormatError(
                f"{rank.file.path}: group {index} has the optimizer states {list(state)}, but"
                f" {ranks[0].name} has {list(states[0])}: one of the files was exchanged, is of"
                " another run, or was saved before the first step. weights_only opens the"
                " parameters alone"
            )
    return {name: [state.get(name) for state in states] for name in names}


def _are_flat(values: Sequence[Any]) -> bool:
    return all(isinstance(value, StoredTensor) and len(value.shape) == 1 for value in values)


def _have_two_first_moments(states: Mapping[str, Sequence[Any]]) -> bool:
    """Whether all ranks have AdEMAMix's two first moments of the partition in one tensor."""
    pairs = zip(states["state1"], states.get("state2", ()), strict=False)
    shapes = [{"state1": first.shape, "state2": second.shape} for first, second in pairs]
    return bool(shapes) and all(map(has_two_first_moments, shapes))


def _zero12(
    index: int,
    shapes: Mapping[str, Shape],
    ranks: Sequence[Rank],
    states: Sequence[Sequence[StoredTensor]],
    model: str,
) -> tuple[dict[str, ParamLayout], list[set[int]]]:
    """The layouts, and for each rank the lengths that a tensor of its partition may have.

    The first of the flat `states` are the masters. They, and in elastic checkpoints moments too,
    are stored without the padding at the end. A state that is no part of the partition may be
    longer.

    DeepSpeed 0.14.5 cuts all padding of the group from the last rank, whose partition may be
    shorter than that: `group[: len(group) - padding]` then counts from the end
    (`_get_groups_without_padding` and `_get_state_without_padding`). Other ranks keep theirs.
    0.16.9 cuts each rank's own.
    """
    masters, count = states[0], len(ranks)
    gaps = _gaps(index, shapes, ranks[0], model)
    total = sum(map(math.prod, shapes.values())) + sum(gaps.values())
    stored_lengths = {tensor.shape[0] for tensor in itertools.chain(*states)}
    for length in sorted(stored_lengths, reverse=True):
        real = [min(length, max(0, total - position * length)) for position in range(count)]
        lengths = [{n, length} for n in real]
        padding = length * count - total
        lengths[-1].add(len(range(length)[: length - padding]))
        # The buffer is padded to a multiple of 2 * ranks (nccl_start_alignment_factor,
        # stage_1_and_2.py).
        if total <= length * count < total + 2 * count and _fit(masters, lengths):
            return flat_layouts(shapes, [length] * count, gaps), lengths
    files = zip(ranks, masters, strict=True)
    sizes = ", ".join(f"{master.shape[0]} in {rank.name}" for rank, master in files)
    raise FormatError(
        f"{ranks[0].file.path.parent}: group {index} has {total} elements by {model}, but the"
        f" masters in the partitions of {count} ranks have {sizes}. A file of another rank, run,"
        " stage or world size is among them, or one was cut"
    )


def _misfit(
    index: int,
    ranks: Sequence[Rank],
    state: str,
    tensors: Sequence[StoredTensor],
    lengths: Sequence[set[int]],
) -> FormatError:
    parts = zip(ranks, tensors, lengths, strict=True)
    rank, tensor, fit = next(part for part in parts if part[1].shape[0] not in part[2])
    sizes = " or, with its padding, ".join(map(str, sorted(fit)))
    remedy = "" if state == "param" else ". weights_only opens the parameters alone"
    return FormatError(
        f"{rank.file.path}: {state} of group {index} has {tensor.shape[0]} elements, where by"
        f" param_shapes the partition of rank {rank.dp} of {len(ranks)} has {sizes}. The file is of"
        f" another rank, run or world size, or was cut{remedy}"
    )


def _gaps(index: int, shapes: Mapping[str, Shape], rank: Rank, model: str) -> dict[str, int]:
    """The elements of padding after each parameter, for `parameter_alignment`."""
    paddings = rank.state.get("param_alignment_paddings")
    if not paddings or not paddings[index]:
        return {}
    if len(paddings[index]) != len(shapes):
        raise FormatError(
            f"{rank.file.path} has param_alignment_paddings for {len(paddings[index])} parameters"
            f" of group {index}, which has {len(shapes)} by {model}: one of the files was renamed,"
            " or belongs to another run"
        )
    return dict(zip(shapes, map(int, paddings[index]), strict=True))


def touched(layout: ParamLayout) -> tuple[ParamLayout, list[int]]:
    """The layout without shards that hold no part, and the old numbers of those that are left,
    ascending. Of an empty parameter the first shard is left.
    """
    used = sorted({part.input for part in layout.parts}) or [0]
    if len(used) == len(layout.shards):
        return layout, used
    place = {shard: i for i, shard in enumerate(used)}
    parts = tuple([part._replace(input=place[part.input]) for part in layout.parts])
    shards = tuple([layout.shards[i] for i in used])
    return replace(layout, shards=shards, parts=parts), used
