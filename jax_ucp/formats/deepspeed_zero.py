"""ZeRO's flat buffers: which parameters lie where in the partitions of one model-parallel rank.

ZeRO-1/2 and BF16_Optimizer: one buffer for each parameter group, cut into equal partitions. The order is that of
`param_shapes` in the model states; `param_slice_mappings` is not used, because DeepSpeed 0.19.8 writes it wrong under
`round_robin_gradients`. Where padding lies is computed from lengths, because `group_paddings` is not the same thing in
every optimizer wrapper. ZeRO-3: each parameter is cut by itself, and a sub-group is one rank's pieces of several.

Facts: `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` and `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed_files import Rank, Stored, expect_dict
from jax_ucp.formats.torch_file import StoredTensor
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import flat_layouts, partitioned_layouts


@dataclass(frozen=True)
class Group:
    """Parameters that lie in one set of partitions, held by `ranks`, in that order.

    `states` has what the ranks hold for the group, by name: flat tensors of the partition's length in `flat`, values
    for the whole group in `scalars`. `layouts` say where each parameter lies in a flat tensor.
    """

    ranks: Sequence[Rank]
    shapes: Mapping[str, Shape]
    layouts: Mapping[str, ParamLayout]
    flat: Mapping[str, Sequence[StoredTensor]]
    scalars: Mapping[str, Sequence[Any]]


def param_shapes(model: Stored, ranks: Sequence[Rank]) -> list[dict[str, Shape]]:
    """The parameters of each group, in the order in which they lie in its buffer, as the model states say."""
    said = model.state.get("param_shapes")
    if not isinstance(said, list):
        raise FormatError(
            f"{model.file.path} has no param_shapes, so that nothing says which parameters the flat buffers hold"
        )
    groups = [{str(name): tuple(map(int, shape)) for name, shape in group.items()} for group in said]
    for rank in ranks:
        if len(rank.masters) != len(groups):
            raise FormatError(
                f"{rank.file.path} has {len(rank.masters)} parameter groups, but {model.name} describes "
                f"{len(groups)}; one of the files belongs to another run"
            )
    return groups


def group(index: int, shapes: Mapping[str, Shape], ranks: Sequence[Rank], zero3: bool, model: str) -> Group:
    """One group of parameters, and where `ranks`, which share it, hold its states.

    Raises FormatError, naming the file, where lengths are not those that `shapes` and the number of ranks give.
    """
    states = [_group_state(rank, index) for rank in ranks]
    names = list(states[0])
    for rank, state in zip(ranks, states, strict=True):
        if list(state) != names:
            raise FormatError(
                f"{rank.file.path}: group {index} has the states {list(state)}, but {ranks[0].name} has {names}"
            )
        _refuse_whole_states(index, rank, state)
    flat = {"param": [rank.masters[index] for rank in ranks]}
    scalars: dict[str, list[Any]] = {}
    for name in names:
        values = [state[name] for state in states]
        if all(isinstance(v, StoredTensor) and len(v.shape) == 1 for v in values):
            flat[name] = values
        else:
            scalars[name] = values
    layouts = _zero3(index, shapes, ranks, flat) if zero3 else _zero12(index, shapes, ranks, flat, model)
    return Group(ranks, shapes, layouts, flat, scalars)


def _zero12(
    index: int,
    shapes: Mapping[str, Shape],
    ranks: Sequence[Rank],
    flat: Mapping[str, Sequence[StoredTensor]],
    model: str,
) -> dict[str, ParamLayout]:
    """Masters, and in elastic checkpoints moments too, are stored without the padding at the end."""
    gaps = _gaps(index, shapes, ranks[0], model)
    total = sum(map(math.prod, shapes.values())) + sum(gaps.values())
    length = max(tensor.shape[0] for tensors in flat.values() for tensor in tensors)
    # The buffer is padded to a multiple of 2 * ranks (nccl_start_alignment_factor, stage_1_and_2.py).
    if not total <= length * len(ranks) < total + 2 * len(ranks):
        raise FormatError(
            f"{ranks[0].file.path.parent}: group {index} has {total} elements by {model}, but {len(ranks)} partitions "
            f"of {length} hold {length * len(ranks)} ({', '.join(rank.name for rank in ranks)}); files of another run, "
            "stage or world size are among them"
        )
    for state, tensors in flat.items():
        for position, (rank, tensor) in enumerate(zip(ranks, tensors, strict=True)):
            real = min(length, max(0, total - position * length))
            if tensor.shape[0] not in (real, length):
                raise FormatError(
                    f"{rank.file.path}: {state} of group {index} has {tensor.shape[0]} elements, where the "
                    f"partition of rank {rank.dp} has {real}, or {length} with its padding"
                )
    return flat_layouts(shapes, [length] * len(ranks), gaps)


def _zero3(
    index: int, shapes: Mapping[str, Shape], ranks: Sequence[Rank], flat: Mapping[str, Sequence[StoredTensor]]
) -> dict[str, ParamLayout]:
    layouts = partitioned_layouts(shapes, len(ranks))
    length = sum(-(-math.prod(shape) // len(ranks)) for shape in shapes.values())
    for state, tensors in flat.items():
        for rank, tensor in zip(ranks, tensors, strict=True):
            if tensor.shape[0] != length:
                raise FormatError(
                    f"{rank.file.path}: {state} of sub-group {index} has {tensor.shape[0]} elements, where "
                    f"param_shapes and {len(ranks)} ranks give {length}; the file belongs to another run"
                )
    return layouts


def _gaps(index: int, shapes: Mapping[str, Shape], rank: Rank, model: str) -> dict[str, int]:
    """Elements of padding after each parameter, under `parameter_alignment`."""
    paddings = rank.state.get("param_alignment_paddings")
    if not paddings or not paddings[index]:
        return {}
    if len(paddings[index]) != len(shapes):
        raise FormatError(
            f"{rank.file.path} has param_alignment_paddings for {len(paddings[index])} parameters of group {index}, "
            f"which has {len(shapes)} by {model}: one of the files was renamed, or belongs to another run"
        )
    return dict(zip(shapes, map(int, paddings[index]), strict=True))


def base_optimizer(rank: Rank) -> Any:
    """The state of the optimizer that ZeRO wraps."""
    return rank.state.get("base_optimizer_state", rank.state.get("optimizer_state_dict"))


def param_group(rank: Rank, index: int) -> Mapping[str, Any]:
    """Hyper-parameters of the group, or of that of a ZeRO-3 sub-group; elastic checkpoints have none."""
    base = base_optimizer(rank)
    found = base.get("param_groups") if isinstance(base, dict) else None
    return next((g for g in found or () if index in g.get("params", ())), {})


def _group_state(rank: Rank, index: int) -> dict[str, Any]:
    """The optimizer's state of one group, by name; elastic checkpoints have a list where others have a dict."""
    base = base_optimizer(rank)
    if isinstance(base, list):
        return dict(base[index])
    state = expect_dict(base, rank.file.path, "the base optimizer's state").get("state") or {}
    return dict(state.get(index) or {})


def _refuse_whole_states(index: int, rank: Rank, state: Mapping[str, Any]) -> None:
    """Muon under ZeRO-1/2 keeps momentum of whole parameters, of which the partition says nothing."""
    whole = rank.state.get("whole_param_optimizer_states")
    whole = list(whole[index]) if whole else []
    whole += [name for name, v in state.items() if isinstance(v, StoredTensor) and len(v.shape) > 1]
    if not whole and "single_partition_of_fp32_groups" in rank.state and param_group(rank, index).get("use_muon"):
        whole = list(state)
    if whole:
        raise FormatError(
            f"{rank.file.path}: group {index} keeps {', '.join(whole)} for whole parameters, not for its partition "
            "(Muon does); that layout is not read. Open with weights_only to leave the optimizer aside."
        )
