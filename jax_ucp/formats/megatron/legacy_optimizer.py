"""Which tensors the optimizer states of a legacy checkpoint's rank belong to.

Neither ids nor flat buffers name parameters. Which is which is Megatron's own doing, not a training
script's: it walks the model's parameters, which are in the order of the model's keys in the file,
and puts each into a group, or into a buffer. Which parameters a group has follows from the shapes
of its states, in one way only, or the states stay apart.

Facts: `megatron/core/optimizer/__init__.py` (groups), `optimizer.py` (the 16-bit wrapper) and
`distrib_optimizer.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.files import OPTIM_FILE, Args, Rank, optimizer_parts
from jax_ucp.formats.megatron.walk import EMBEDDING, TIED, Part, buffer_walk, is_expert
from jax_ucp.formats.pairing import Undecided, contradiction, only_division, tells_shape
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.formats.torch_save.unpickle import what_is

# What is no parameter, though the model keeps it beside them.
BUFFERS = ("mlp.router.expert_bias",)
_OTHER_FILE = (
    "model and optimizer of the file are not of one run. weights_only leaves the optimizer aside"
)


@dataclass(frozen=True, slots=True)
class Module:
    """A tensor of a rank's model, and the parameters that are in it."""

    local: str
    chunk: int
    tensor: StoredTensor
    parts: Sequence[Part]

    @property
    def numel(self) -> int:
        return math.prod(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A state of a module: in the tensor `key`, if `flat` from `start` on, or a number."""

    state: str
    key: str = ""
    shape: tuple[int, ...] = ()
    start: int = 0
    flat: bool = False
    value: Any = None


def find_states(
    args: Args, rank: Rank, chunks: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, ModuleState]]:
    """Every state in the rank's files of its modules. With experts there can be two optimizers.

    Raises FormatError, naming the file, where sizes do not fit, and Undecided where groups can be
    filled in no way, or in several.
    """
    parts = optimizer_parts(rank.tree["optimizer"])
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, dict) for part in parts):
        raise FormatError(
            f"{rank.model.path}: {len(parts)} optimizers; we know one, or one more for experts"
        )
    for i, part in enumerate(parts):
        inner = part.get("optimizer", part)
        groups = _param_groups(rank, inner)
        own = _half(rank, groups, chunks, experts=bool(i)) if len(parts) == 2 else chunks
        modules = list(itertools.chain(*own))
        if "state" in inner:
            yield from _numbered(rank, part, inner["state"], groups, modules)
        else:
            yield from _flat_steps(rank, groups, modules)
            yield from _flat(args, rank, _flat_part(rank, i, len(parts)), own)


def _param_groups(rank: Rank, inner: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{rank.model.path}: the optimizer has no param_groups")
    return groups


def _half(
    rank: Rank,
    groups: Sequence[Mapping[str, Any]],
    chunks: Sequence[Sequence[Module]],
    experts: bool,
) -> list[list[Module]]:
    """The modules of one of two optimizers, by chunk: those of experts, or the rest."""
    if any(group.get("is_expert_parallel", experts) != experts for group in groups):
        raise FormatError(
            f"{rank.model.path}: the two optimizers are not that of the rest and that of the"
            " experts"
        )
    return [[m for m in chunk if is_expert(m.local) == experts] for chunk in chunks]


def _flat_steps(
    rank: Rank, groups: Sequence[Mapping[str, Any]], modules: Iterable[Module]
) -> Iterator[tuple[Module, ModuleState]]:
    """How often the optimizer stepped: one number or none, as flat buffers have no groups.

    Raises FormatError where groups differ: then nothing says which parameters stepped how often.
    """
    steps = {group["step"] for group in groups if isinstance(group.get("step"), int)}
    if len(steps) > 1:
        raise FormatError(
            f"{rank.model.path}: the parameter groups of a distributed optimizer stepped"
            f" {sorted(steps)} times, and which parameters they have is not stored; weights_only"
            " leaves the optimizer aside"
        )
    for module, step in itertools.product(modules, steps):
        yield module, ModuleState("step", value=step)


def _numbered(
    rank: Rank,
    part: Mapping[str, Any],
    state: Mapping[int, Any],
    groups: Sequence[Mapping[str, Any]],
    modules: Sequence[Module],
) -> Iterator[tuple[Module, ModuleState]]:
    """States and masters of an optimizer that numbers its parameters."""
    masters = part.get("fp32_from_fp16_params")
    if not state and "fp32_from_fp16_params" not in part:
        return  # never stepped
    numbers = _numbers(groups)
    members = _members(state, numbers, masters, modules)
    if strays := set(state).difference(*numbers):
        raise FormatError(
            f"{rank.model.path}: the optimizer has states of {sorted(strays)[:5]}, which no group"
            " holds"
        )
    for group, own_numbers, own in zip(groups, numbers, members, strict=True):
        if isinstance(group.get("step"), int):
            yield from itertools.product(own, [ModuleState("step", value=group["step"])])
        for number, module in zip(own_numbers, own, strict=True):
            yield from _numbered_states(rank, module, number, state.get(number) or {})
    if "fp32_from_fp16_params" in part:
        yield from _masters(rank, masters, members)


def _numbers(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The numbers of the parameters of each group."""
    return [list(group.get("params") or ()) for group in groups]


def _numbered_states(
    rank: Rank, module: Module, number: int, states: Mapping[str, Any]
) -> Iterator[tuple[Module, ModuleState]]:
    shape = module.tensor.shape
    for name, value in states.items():
        if value is None:
            continue
        if not isinstance(value, StoredTensor):
            yield module, ModuleState(name, value=value)
            continue
        one_step = name == "step" and value.shape == ()
        if value.shape != shape and not one_step:
            raise FormatError(
                f"{rank.model.path}: {name} of parameter {number} has shape {value.shape}, but"
                f" {module.local}, which is that parameter, has {shape}; such a state is not read,"
                " weights_only leaves the optimizer aside"
            )
        yield module, ModuleState(name, rank.key(value), value.shape)


def _members(
    state: Mapping[int, Any],
    numbers: Sequence[Sequence[int]],
    masters: Any,
    modules: Sequence[Module],
) -> list[list[Module]]:
    """The modules of each group of `numbers`, in the order of the model. Raises Undecided."""
    every = list(itertools.chain(*numbers))
    state_shapes = {number: _shapes(state.get(number) or {}) for number in every}
    master_shapes = _master_shapes(numbers, masters)
    if len(state_shapes) != len(modules):
        raise Undecided(
            f"{len(state_shapes)} parameters have numbers, but the model has {len(modules)}: some"
            " may be frozen"
        )

    def fits(i: int, group: int, place: int) -> bool:
        number, shape = numbers[group][place], modules[i].tensor.shape
        states = state_shapes[number]
        if master_shapes.get(number, shape) != shape:
            return False
        return not (tells_shape(states) and contradiction(states, shape))

    division = only_division(dict.fromkeys(range(len(modules)), 1), [*map(len, numbers)], fits)
    members: list[list[Module]] = [[] for _ in numbers]
    for i in sorted(division):
        group, _ = division[i]
        members[group].append(modules[i])
    return members


def _master_shapes(numbers: Sequence[Sequence[int]], masters: Any) -> dict[int, tuple[int, ...]]:
    """The shapes of masters by number, if every parameter has a master, else none."""
    if not isinstance(masters, list) or [*map(len, masters)] != [*map(len, numbers)]:
        return {}
    shapes = [tensor.shape for tensor in itertools.chain(*masters)]
    return dict(zip(itertools.chain(*numbers), shapes, strict=True))


def stored_tensors(tree: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {name: value for name, value in tree.items() if isinstance(value, StoredTensor)}


def _shapes(tree: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in stored_tensors(tree).items()}


def _masters(
    rank: Rank, masters: Any, members: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, ModuleState]]:
    """The fp32 masters of 16-bit weights, by group; fp32 weights are their own masters."""
    if not isinstance(masters, list) or len(masters) != len(members):
        raise FormatError(
            f"{rank.model.path}: fp32_from_fp16_params is not a list of {len(members)} groups"
        )
    for modules, tensors in zip(members, masters, strict=True):
        rounded = [m for m in modules if m.tensor.dtype != np.float32]
        if len(rounded) != len(tensors):
            raise FormatError(
                f"{rank.model.path}: {len(tensors)} masters for {len(rounded)} 16-bit weights;"
                f" {_OTHER_FILE}"
            )
        for module, tensor in zip(rounded, tensors, strict=True):
            if tensor.shape != module.tensor.shape:
                raise FormatError(
                    f"{rank.model.path}: the master at {tensor.key} has shape {tensor.shape}, but"
                    f" {module.local} has {module.tensor.shape}; {_OTHER_FILE}"
                )
            yield module, ModuleState("param", rank.key(tensor), tensor.shape)


def _flat_part(rank: Rank, index: int, count: int) -> Mapping[Any, Any] | None:
    """The flat buffers of one of a rank's optimizers, by model chunk, then dtypes."""
    path = rank.folder / OPTIM_FILE
    if rank.optim is None:
        raise FormatError(
            f"{path} is missing: by {rank.name} it holds the state of a distributed optimizer"
        )
    parts = optimizer_parts(rank.optim.tree)
    if len(parts) != count:
        raise FormatError(
            f"{path} has the state of {len(parts)} optimizers, {rank.name} of {count}: one of them"
            " is of another run or model. weights_only leaves the optimizer aside"
        )
    part = parts[index]
    if part is None and (index, count) == (0, 2):
        # another expert-parallel rank's file has it: only dense data-parallel rank 0 writes it
        return None
    if not isinstance(part, dict) or part.get("buckets_coalesced") is not True:
        raise FormatError(
            f"{path}: the buffers are not coalesced, as before February 2024; load it with"
            " Megatron's --ckpt-convert-update-legacy-dist-opt-format and save it again"
        )
    return {chunk: buffers for chunk, buffers in part.items() if chunk != "buckets_coalesced"}


def _flat(
    args: Args, rank: Rank, part: Mapping[Any, Any] | None, chunks: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, ModuleState]]:
    """States in the flat buffers of a distributed optimizer: one per chunk and dtype."""
    if part is None:
        return
    path = rank.folder / OPTIM_FILE
    if strays := [key for key in part if key not in range(len(chunks))]:
        raise FormatError(f"{path}: buffers {strays} for {len(chunks)} model chunks")
    numel = sum(module.numel for module in itertools.chain(*chunks))
    for c, modules in enumerate(chunks):
        buffers = part.get(c) or {}
        if not isinstance(buffers, dict):
            raise FormatError(
                f"{path}: buffer {c} should be a dict by dtype, but is {what_is(buffers)}"
            )
        for buffer, own in _owners(path, buffers, modules):
            yield from _buffer(args, rank, c, numel, own, buffer)


def _owners(
    path: FilePath, buffers: Mapping[Any, Any], modules: Sequence[Module]
) -> Iterator[tuple[Mapping[str, Any], list[Module]]]:
    """The buffers of a model chunk, each with the modules that are in it: those of its dtype."""
    missing = dict.fromkeys(module.local for module in modules)
    for (dtype, *_), buffer in buffers.items():
        own = [module for module in modules if module.tensor.dtype == dtype]
        if any(module.local not in missing for module in own):
            raise FormatError(f"{path}: several buffers for weights of {dtype}")
        for module in own:
            del missing[module.local]
        yield buffer, own
    if missing:
        raise FormatError(f"{path}: no buffer holds {next(iter(missing))}")


def _buffer(
    args: Args, rank: Rank, c: int, numel: int, modules: Sequence[Module], buffer: Mapping[str, Any]
) -> Iterator[tuple[Module, ModuleState]]:
    path = rank.folder / OPTIM_FILE
    tied = args.copies_embedding
    shared = [tied and m.local in (EMBEDDING, TIED) for m in modules]
    dp = args.degree("data_parallel_size") * args.degree("context_parallel_size")
    limit = bucket_limit(args, rank.pp, c, dp, numel)
    starts, buckets = buffer_walk([m.numel for m in modules], shared, dp, limit)
    states = stored_tensors(buffer)
    if "param" not in states:
        raise FormatError(f"{path}: the buffer of chunk {c} has no masters, only {list(states)}")
    lengths = {"numel_unpadded": (buffer.get("numel_unpadded"),), **_shapes(buffer)}
    for what, length in lengths.items():
        if length != (sum(buckets),):
            raise FormatError(
                f"{path}: {what} of chunk {c} is {list(length)}, but {len(modules)} parameters in"
                f" {len(buckets)} buckets take {sum(buckets)}: some parameters were frozen, the"
                " buckets had another size than args say, or the file belongs to another run or"
                " rank. weights_only leaves the optimizer aside"
            )
    for state, tensor in states.items():
        key = rank.key(tensor, OPTIM_FILE)
        for module, start in zip(modules, starts, strict=True):
            yield module, ModuleState(state, key, module.tensor.shape, start, flat=True)


def bucket_limit(args: Args, pp: int, chunk: int, dp: int, numel: int) -> int | None:
    """Elements after which a bucket is closed; None where a buffer has one bucket.

    Only the first chunk of the first pipeline stage has several, and only where gradients are
    reduced meanwhile. `numel` are the elements of all parameters of the stage.
    """
    if pp or chunk or not args.get("overlap_grad_reduce"):
        return None
    if size := args.get("ddp_bucket_size"):
        return int(size)
    if buckets := args.get("ddp_num_buckets"):
        return numel // int(buckets)
    return max(40_000_000, 1_000_000 * dp)


def numbered_alone(optimizer: Any) -> bool:
    """Whether an optimizer has states by number, and no masters beside them."""
    parts = [part for part in optimizer_parts(optimizer) if isinstance(part, dict)]
    unmastered = [part for part in parts if "fp32_from_fp16_params" not in part]
    return any(part.get("optimizer", part).get("state") for part in unmastered)


def beside_tensors(optimizer: Any) -> dict[str, Any]:
    """An optimizer's hyper-parameters and loss scaler: what is not a tensor."""
    beside: dict[str, Any] = {}
    for i, part in enumerate(optimizer_parts(optimizer)):
        if not isinstance(part, dict):
            continue
        label = f"optimizer/{i}" if isinstance(optimizer, list) else "optimizer"
        inner = part.get("optimizer", part)
        beside |= _labelled(label, inner, without=("state",))
        if inner is not part:
            beside |= _labelled(label, part, without=("optimizer", "fp32_from_fp16_params"))
    return beside


def _labelled(label: str, tree: Mapping[str, Any], without: Sequence[str]) -> dict[str, Any]:
    return {f"{label}/{name}": value for name, value in tree.items() if name not in without}
