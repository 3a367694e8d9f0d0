"""Which tensors of a model the states of Megatron's numbered optimizers belong to.

Ids name no parameters. Which is which is Megatron's own doing, not a training script's: it walks
the model's parameters, which are in the order of the model's keys in the file, and puts each into a
group of an optimizer. Which parameters a group has follows from the shapes of its states and from
what Megatron puts where, in one way only, or the states stay apart.

Facts: `megatron/core/optimizer/__init__.py` (groups), `optimizer.py` (the 16-bit wrapper),
`muon.py` and `emerging_optimizers.py` (what Muon has) of Megatron-LM core_v0.13.1 to core_v0.19.0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.walk import EMBEDDING, TIED, Part, is_expert
from jax_ucp.formats.pairing import Undecided, contradiction, only_division, tells_shape
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.layout.fragments import Shape

_OTHER_FILE = (
    "model and optimizer of the file are not of one run. weights_only leaves the optimizer aside"
)
_MASTERS = "fp32_from_fp16_params"


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
    shape: Shape = ()
    start: int = 0
    flat: bool = False
    value: Any = None


@dataclass(frozen=True)
class Group:
    """A parameter group: its settings, and of each number the states and the master, if any."""

    settings: Mapping[str, Any]
    states: Mapping[int, Mapping[str, Any]]
    masters: Sequence[StoredTensor] | None
    experts: bool | None

    @cached_property
    def numbers(self) -> list[int]:
        return list(self.states)

    @cached_property
    def shapes(self) -> list[Mapping[str, Shape]]:
        return [shapes_of(states) for states in self.states.values()]

    @property
    def orthogonalised(self) -> bool | None:
        """Whether its states are Muon's, and not Adam's; None where there are none."""
        names = {name for states in self.states.values() for name in states} - {"step"}
        return "momentum_buffer" in names if names else None

    @property
    def has_tensors(self) -> bool:
        return self.masters is not None or any(self.shapes)


def numbered_states(
    where: FilePath, optimizers: Sequence[Mapping[str, Any]], modules: Sequence[Module], muon: bool
) -> Iterator[tuple[Module, ModuleState]]:
    """States and masters of optimizers that number their parameters; keys are those of tensors.

    `modules` are in the order of the model; `muon` is whether the run's optimizer is Muon, with
    another beside it for what is no matrix.

    Raises FormatError, naming the file, for what belongs to no parameter, and Undecided where
    groups can be filled in no way, or in several.
    """
    # of two that do not say so, the second is that of experts
    defaults = [False, True] if len(optimizers) == 2 and not muon else [None] * len(optimizers)
    of_each = zip(optimizers, defaults, strict=True)
    groups = list(itertools.chain(*(_groups(where, *each) for each in of_each)))
    if not any(group.has_tensors for group in groups):
        return  # never stepped
    for group, own in zip(groups, _members(groups, modules, muon), strict=True):
        yield from _group_states(where, group, own)


def param_groups(where: FilePath, inner: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{where}: the optimizer has no param_groups")
    return groups


def _groups(where: FilePath, optimizer: Mapping[str, Any], default: bool | None) -> list[Group]:
    """The groups of one optimizer. Raises FormatError for states that no group holds."""
    inner = optimizer.get("optimizer", optimizer)
    settings = param_groups(where, inner)
    state = inner.get("state") or {}
    masters = _masters_by_group(where, optimizer, len(settings))
    groups: list[Group] = []
    for own, own_masters in zip(settings, masters, strict=True):
        states = {number: state.get(number) or {} for number in own.get("params") or ()}
        experts = own.get("is_expert_parallel", default)
        groups.append(Group(own, states, own_masters, experts))
    if strays := set(state).difference(*(group.states for group in groups)):
        raise FormatError(
            f"{where}: the optimizer has states of {sorted(strays)[:5]}, which no group holds"
        )
    return groups


def _masters_by_group(
    where: FilePath, optimizer: Mapping[str, Any], count: int
) -> Sequence[Sequence[StoredTensor] | None]:
    """The masters of each of an optimizer's groups; None of each if it keeps none."""
    if _MASTERS not in optimizer:
        return [None] * count
    masters = optimizer[_MASTERS]
    if not isinstance(masters, list) or len(masters) != count:
        raise FormatError(f"{where}: {_MASTERS} is not a list of {count} groups")
    return masters


def _members(groups: Sequence[Group], modules: Sequence[Module], muon: bool) -> list[list[Module]]:
    """The modules of each group, in the order of the model. Raises Undecided."""
    lengths = [len(group.states) for group in groups]
    count = sum(lengths)
    if count != len(modules):
        raise Undecided(
            f"{count} parameters have numbers, but the model has {len(modules)}: some may be frozen"
        )
    kinds = _kinds(groups, muon)

    def fits(i: int, group: int, place: int) -> bool:
        module = modules[i]
        experts, matrices = kinds[group]
        return (
            experts in (None, is_expert(module.local))
            and matrices in (None, _is_matrix(module))
            and _has_shapes(groups[group], place, module.tensor.shape)
        )

    division = only_division(dict.fromkeys(range(len(modules)), 1), lengths, fits)
    members: list[list[Module]] = [[] for _ in groups]
    for i in sorted(division):
        group, _ = division[i]
        members[group].append(modules[i])
    return members


def _kinds(groups: Sequence[Group], muon: bool) -> list[tuple[bool | None, bool | None]]:
    """Whether each group's modules are those of experts, and matrices; None where either may be."""
    apart = any(group.experts for group in groups)
    experts = [group.experts if apart else None for group in groups]
    matrices = [group.orthogonalised if muon else None for group in groups]
    return list(zip(experts, matrices, strict=True))


def _is_matrix(module: Module) -> bool:
    """Whether Muon has the module: a matrix that is neither embedding nor output layer."""
    return len(module.tensor.shape) == 2 and module.local not in (EMBEDDING, TIED)


def _has_shapes(group: Group, place: int, shape: Shape) -> bool:
    masters, states = group.masters, group.shapes[place]
    # fp32 weights have no masters beside them
    if masters and len(masters) == len(group.states) and masters[place].shape != shape:
        return False
    return not (tells_shape(states) and contradiction(states, shape))


def _group_states(
    where: FilePath, group: Group, modules: Sequence[Module]
) -> Iterator[tuple[Module, ModuleState]]:
    """What a group has of its modules: its step, the states, and the masters."""
    if isinstance(group.settings.get("step"), int):
        step = ModuleState("step", value=group.settings["step"])
        yield from itertools.product(modules, [step])
    for (number, states), module in zip(group.states.items(), modules, strict=True):
        yield from _states(where, module, number, states)
    if group.masters is not None:
        yield from _masters(where, group.masters, modules)


def _states(
    where: FilePath, module: Module, number: int, states: Mapping[str, Any]
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
                f"{where}: {name} of parameter {number} has shape {value.shape}, but"
                f" {module.local}, which is that parameter, has {shape}; such a state is not read,"
                " weights_only leaves the optimizer aside"
            )
        yield module, ModuleState(name, value.key, value.shape)


def _masters(
    where: FilePath, tensors: Sequence[StoredTensor], modules: Sequence[Module]
) -> Iterator[tuple[Module, ModuleState]]:
    """The masters of 16-bit weights, in a group's order; fp32 weights are their own."""
    rounded = [module for module in modules if module.tensor.dtype != np.float32]
    if len(rounded) != len(tensors):
        raise FormatError(
            f"{where}: {len(tensors)} masters for {len(rounded)} 16-bit weights; {_OTHER_FILE}"
        )
    for module, tensor in zip(rounded, tensors, strict=True):
        if tensor.shape != module.tensor.shape:
            raise FormatError(
                f"{where}: the master at {tensor.key} has shape {tensor.shape}, but {module.local}"
                f" has {module.tensor.shape}; {_OTHER_FILE}"
            )
        yield module, ModuleState("param", tensor.key, tensor.shape)


def stored_tensors(tree: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {name: value for name, value in tree.items() if isinstance(value, StoredTensor)}


def shapes_of(tree: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in stored_tensors(tree).items()}
