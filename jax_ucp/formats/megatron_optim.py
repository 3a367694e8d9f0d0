"""The optimizer states of one rank of a legacy Megatron checkpoint, and which of its tensors each belongs to.

Neither ids nor flat buffers name parameters. Which is which is Megatron's own doing, not a training script's: it walks
the model's parameters, which are in the order of the model's keys in the file, and puts each into a group, or into a
buffer. Which parameters a group has follows from the shapes of its states, in one way only, or the states stay apart.

Facts: `megatron/core/optimizer/__init__.py` (groups), `optimizer.py` (the 16-bit wrapper) and `distrib_optimizer.py`
of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron_files import OPTIM_FILE, Args, Rank
from jax_ucp.formats.megatron_walk import EMBEDDING, TIED, Part, buffer_walk, is_expert
from jax_ucp.formats.pairing import Undecided, contradiction, only_division, tells_shape
from jax_ucp.formats.safe_pickle import what_is
from jax_ucp.formats.torch_file import StoredTensor

# What is no parameter, though the model keeps it beside them.
BUFFERS = ("mlp.router.expert_bias",)
_OTHER_FILE = "model and optimizer of the file are not of one run. weights_only leaves the optimizer aside"


@dataclass(frozen=True, slots=True)
class Module:
    """A tensor of a rank's model, and the parameters that are in it."""

    local: str
    chunk: int
    tensor: StoredTensor
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Held:
    """One state of a module: in the stored tensor `key`, from `start` on if that is a flat buffer, or a number."""

    state: str
    key: str = ""
    shape: tuple[int, ...] = ()
    start: int = 0
    flat: bool = False
    value: Any = None


def find_states(args: Args, rank: Rank, chunks: Sequence[Sequence[Module]]) -> Iterator[tuple[Module, Held]]:
    """Every state that the rank's files hold of its modules. With experts there can be a second optimizer for them.

    Raises FormatError, naming the file, where sizes do not fit, and Undecided where groups can be filled in no way,
    or in several.
    """
    optimizer = rank.tree["optimizer"]
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, dict) for part in parts):
        raise FormatError(f"{rank.model.path}: {len(parts)} optimizers; we know one, or one more for experts")
    for i, part in enumerate(parts):
        mine = [[m for m in chunk if len(parts) == 1 or is_expert(m.local) == bool(i)] for chunk in chunks]
        inner = part.get("optimizer", part)
        groups = inner.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise FormatError(f"{rank.model.path}: the optimizer has no param_groups")
        if len(parts) == 2 and any(group.get("is_expert_parallel", bool(i)) != bool(i) for group in groups):
            raise FormatError(f"{rank.model.path}: the two optimizers are not that of the rest and that of the experts")
        modules = [module for chunk in mine for module in chunk]
        if "state" in inner:
            yield from _numbered(rank, part, inner["state"], groups, modules)
        else:
            steps = _flat_steps(rank, groups)
            yield from ((module, Held("step", value=step)) for module in modules for step in steps)
            yield from _flat(args, rank, i, len(parts), mine)


def _flat_steps(rank: Rank, groups: Sequence[Mapping[str, Any]]) -> set[int]:
    """How often the optimizer stepped: one number or none. Which parameters a group has, flat buffers do not depend on.

    Raises FormatError where groups differ: then nothing says which parameters stepped how often.
    """
    steps = {group["step"] for group in groups if isinstance(group.get("step"), int)}
    if len(steps) > 1:
        raise FormatError(
            f"{rank.model.path}: the parameter groups of a distributed optimizer stepped {sorted(steps)} times, and "
            "which parameters they have is not stored; weights_only leaves the optimizer aside"
        )
    return steps


def _numbered(
    rank: Rank,
    part: Mapping[str, Any],
    state: Mapping[int, Any],
    groups: Sequence[Mapping[str, Any]],
    modules: Sequence[Module],
) -> Iterator[tuple[Module, Held]]:
    """States and masters of an optimizer that numbers its parameters."""
    if not state and "fp32_from_fp16_params" not in part:
        return  # never stepped
    members = _members(state, groups, part.get("fp32_from_fp16_params"), modules)
    if strays := set(state) - {number for group in groups for number in group.get("params") or ()}:
        raise FormatError(f"{rank.model.path}: the optimizer has states of {sorted(strays)[:5]}, which no group holds")
    for group, mine in zip(groups, members, strict=True):
        for number, module in zip(group.get("params") or (), mine, strict=True):
            if isinstance(group.get("step"), int):
                yield module, Held("step", value=group["step"])
            for name, value in (state.get(number) or {}).items():
                if not isinstance(value, StoredTensor):
                    if value is not None:
                        yield module, Held(name, value=value)
                elif value.shape == module.tensor.shape or (name == "step" and value.shape == ()):
                    yield module, Held(name, rank.key(value), value.shape)
                else:
                    raise FormatError(
                        f"{rank.model.path}: {name} of parameter {number} has shape {value.shape}, but {module.local}, "
                        f"which is that parameter, has {module.tensor.shape}; such a state is not read, weights_only "
                        "leaves the optimizer aside"
                    )
    if "fp32_from_fp16_params" in part:
        yield from _masters(rank, part["fp32_from_fp16_params"], members)


def _members(
    state: Mapping[int, Any], groups: Sequence[Mapping[str, Any]], masters: Any, modules: Sequence[Module]
) -> list[list[Module]]:
    """The modules of each group, each in the order of the model. Raises Undecided."""
    numbers = [list(group.get("params") or ()) for group in groups]
    held = {number: _shapes(state.get(number) or {}) for some in numbers for number in some}
    whole: dict[int, tuple[int, ...]] = {}
    if isinstance(masters, list) and [len(some) for some in masters] == [*map(len, numbers)]:  # every weight has one
        for some, tensors in zip(numbers, masters, strict=True):
            whole |= {number: tensor.shape for number, tensor in zip(some, tensors, strict=True)}
    if len(held) != len(modules):
        raise Undecided(f"{len(held)} parameters have numbers, but the model has {len(modules)}: some may be frozen")

    def fits(i: int, group: int, place: int) -> bool:
        number, shape = numbers[group][place], modules[i].tensor.shape
        known = tells_shape(held[number])
        return whole.get(number, shape) == shape and not (known and contradiction(held[number], shape))

    division = only_division(dict.fromkeys(range(len(modules)), 1), [*map(len, numbers)], fits)
    found: list[list[Module]] = [[] for _ in groups]
    for i in sorted(division):
        found[division[i][0]].append(modules[i])
    return found


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in state.items() if isinstance(value, StoredTensor)}


def _masters(rank: Rank, masters: Any, members: Sequence[Sequence[Module]]) -> Iterator[tuple[Module, Held]]:
    """The fp32 masters of 16-bit weights, by group; a weight that is fp32 in the model is its own master."""
    if not isinstance(masters, list) or len(masters) != len(members):
        raise FormatError(f"{rank.model.path}: fp32_from_fp16_params is not a list of {len(members)} groups")
    for modules, tensors in zip(members, masters, strict=True):
        rounded = [m for m in modules if m.tensor.dtype != np.float32]
        if len(rounded) != len(tensors):
            raise FormatError(
                f"{rank.model.path}: {len(tensors)} masters for {len(rounded)} 16-bit weights; {_OTHER_FILE}"
            )
        for module, tensor in zip(rounded, tensors, strict=True):
            if tensor.shape != module.tensor.shape:
                raise FormatError(
                    f"{rank.model.path}: the master at {tensor.key} has shape {tensor.shape}, but {module.local} "
                    f"has {module.tensor.shape}; {_OTHER_FILE}"
                )
            yield module, Held("param", rank.key(tensor), tensor.shape)


def _flat(
    args: Args, rank: Rank, index: int, count: int, chunks: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, Held]]:
    """States in the flat buffers of a distributed optimizer: one per chunk and dtype."""
    path = rank.folder / OPTIM_FILE
    if rank.optim is None:
        raise FormatError(f"{path} is missing: by {rank.name} it holds the state of a distributed optimizer")
    tree = rank.optim.tree
    parts = tree if isinstance(tree, list) else [tree]
    if len(parts) != count:
        raise FormatError(f"{path} has the state of {len(parts)} optimizers, {rank.name} of {count}")
    part = parts[index]
    if part is None and count == 2 and index == 0:
        return  # another expert-parallel rank's file has it: only dense data-parallel rank 0 writes it
    if not isinstance(part, dict) or part.get("buckets_coalesced") is not True:
        raise FormatError(
            f"{path}: the buffers are not coalesced, as before February 2024; load it with Megatron's "
            "--ckpt-convert-update-legacy-dist-opt-format and save it again"
        )
    if strays := [key for key in part if key != "buckets_coalesced" and key not in range(len(chunks))]:
        raise FormatError(f"{path}: buffers {strays} for {len(chunks)} model chunks")
    for c, modules in enumerate(chunks):
        buffers = part.get(c) or {}
        if not isinstance(buffers, dict):
            raise FormatError(f"{path}: buffer {c} should be a dict by dtype, but is {what_is(buffers)}")
        covered: set[str] = set()
        for (dtype, *_), buffer in buffers.items():
            mine = [m for m in modules if m.tensor.dtype == dtype]
            if covered & {m.local for m in mine}:
                raise FormatError(f"{path}: several buffers for weights of {dtype}")
            covered |= {m.local for m in mine}
            yield from _buffer(args, rank, c, chunks, mine, buffer)
        if lost := [m.local for m in modules if m.local not in covered]:
            raise FormatError(f"{path}: no buffer holds {lost[0]}")


def _buffer(
    args: Args,
    rank: Rank,
    c: int,
    chunks: Sequence[Sequence[Module]],
    modules: Sequence[Module],
    buffer: Mapping[str, Any],
) -> Iterator[tuple[Module, Held]]:
    path = rank.folder / OPTIM_FILE
    p = args.degree("pipeline_model_parallel_size")
    tied = p > 1 and not args.get("untie_embeddings_and_output_weights", False)
    shared = [tied and m.local in (EMBEDDING, TIED) for m in modules]
    dp = args.degree("data_parallel_size") * args.degree("context_parallel_size")
    numel = sum(math.prod(m.tensor.shape) for chunk in chunks for m in chunk)
    limit = bucket_size(args, dp, numel) if rank.pp == 0 and c == 0 and args.get("overlap_grad_reduce") else None
    starts, buckets = buffer_walk([math.prod(m.tensor.shape) for m in modules], shared, dp, limit)
    length = sum(buckets)
    states = {name: value for name, value in buffer.items() if isinstance(value, StoredTensor)}
    if "param" not in states:
        raise FormatError(f"{path}: the buffer of chunk {c} has no masters, only {list(states)}")
    lengths = {"numel_unpadded": (buffer.get("numel_unpadded"),), **{k: v.shape for k, v in states.items()}}
    for what, found in lengths.items():
        if found != (length,):
            raise FormatError(
                f"{path}: {what} of chunk {c} is {list(found)}, but {len(modules)} parameters in "
                f"{len(buckets)} buckets take {length}: some parameters were frozen, the buckets had another size than "
                "args say, or the file belongs to another run or rank. weights_only leaves the optimizer aside"
            )
    for state, tensor in states.items():
        for module, start in zip(modules, starts, strict=True):
            yield module, Held(state, rank.key(tensor, OPTIM_FILE), module.tensor.shape, start, flat=True)


def bucket_size(args: Args, dp: int, numel: int) -> int:
    """Elements after which a bucket is closed, on the first pipeline stage; `numel` are those of all its parameters."""
    if said := args.get("ddp_bucket_size"):
        return int(said)
    if buckets := args.get("ddp_num_buckets"):
        return numel // int(buckets)
    return max(40_000_000, 1_000_000 * dp)


def numbered_alone(optimizer: Any) -> bool:
    """Whether an optimizer has states by number, and no masters beside them."""
    parts = [part for part in (optimizer if isinstance(optimizer, list) else [optimizer]) if isinstance(part, dict)]
    return any(part.get("optimizer", part).get("state") and "fp32_from_fp16_params" not in part for part in parts)


def beside_tensors(optimizer: Any) -> list[tuple[str, Any]]:
    """What an optimizer's state has beside masters and moments: hyper-parameters and the loss scaler."""
    found: list[tuple[str, Any]] = []
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    for i, part in enumerate(parts):
        at = f"optimizer/{i}" if isinstance(optimizer, list) else "optimizer"
        inner = part.get("optimizer", part) if isinstance(part, dict) else {}
        found += [(f"{at}/{name}", value) for name, value in inner.items() if name != "state"]
        if inner is not part and isinstance(part, dict):
            skipped = ("optimizer", "fp32_from_fp16_params")
            found += [(f"{at}/{name}", value) for name, value in part.items() if name not in skipped]
    return found
