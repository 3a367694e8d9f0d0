"""The tensors of a model to which the states of Megatron's numbered optimizers belong.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.model import EMBEDDING, TIED, ParamPart, is_expert
from jax_ucp.layout.fragments import Shape
from jax_ucp.options import MODULE_ORDER
from jax_ucp.states.assign import Slot, SlotGroup, assign
from jax_ucp.states.pairing import Undecided, tells_shape

_OTHER_FILE = (
    "model and optimizer of the file are not of one run. weights_only leaves the optimizer aside"
)
_MASTERS = "fp32_from_fp16_params"


@dataclass(frozen=True, slots=True)
class Module:
    """A tensor of a rank's model, and the parameters that are in it."""

    local: str
    tensor: StoredTensor
    parts: Sequence[ParamPart]

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
class _NumberedGroup:
    """A parameter group: its settings, the states of each number, and the masters, if there are
    any.
    """

    settings: Mapping[str, Any]
    states: Mapping[int, Mapping[str, Any]]
    masters: Sequence[StoredTensor] | None
    experts: bool | None


def numbered_states(
    path: FilePath, optimizers: Sequence[Mapping[str, Any]], modules: Sequence[Module], muon: bool
) -> Iterator[tuple[Module, ModuleState]]:
    """The states and masters of optimizers that number their parameters; keys are those of tensors.

    `modules` are in the order of the model. With `muon`, matrices are Muon's, and the other
    parameters are another optimizer's. Raises FormatError, naming the file, for a state of no
    parameter, and Undecided if the groups can be filled in no way, or in several.
    """
    # of two that do not say so, the second is that of experts
    defaults = [False, True] if len(optimizers) == 2 and not muon else [None] * len(optimizers)
    of_each = zip(optimizers, defaults, strict=True)
    groups = list(itertools.chain(*(_groups(path, *each) for each in of_each)))
    if not any(g.masters is not None or any(map(shapes_of, g.states.values())) for g in groups):
        return  # never stepped
    for group, own in zip(groups, _members(groups, modules, muon), strict=True):
        step = group.settings.get("step")
        if isinstance(step, int):
            yield from itertools.product(own, [ModuleState("step", value=step)])
        for (number, states), module in zip(group.states.items(), own, strict=True):
            shape = module.tensor.shape
            for name, value in states.items():
                if not isinstance(value, StoredTensor):
                    if value is not None:
                        yield module, ModuleState(name, value=value)
                    continue
                # the number of steps has no shape
                if value.shape != shape and (name, value.shape) != ("step", ()):
                    raise FormatError(
                        f"{path}: {name} of parameter {number} has shape {value.shape}, but"
                        f" {module.local}, which is that parameter, has {shape}; such a state is"
                        " not read, weights_only leaves the optimizer aside"
                    )
                yield module, ModuleState(name, value.key, value.shape)
        if group.masters is None:
            continue
        # masters of 16-bit weights are in the group's order; fp32 weights are their own
        rounded = [module for module in own if module.tensor.dtype != np.float32]
        if len(rounded) != len(group.masters):
            raise FormatError(
                f"{path}: {len(group.masters)} masters for {len(rounded)} 16-bit weights;"
                f" {_OTHER_FILE}"
            )
        for module, tensor in zip(rounded, group.masters, strict=True):
            if tensor.shape != module.tensor.shape:
                raise FormatError(
                    f"{path}: the master at {tensor.key} has shape {tensor.shape}, but"
                    f" {module.local} has {module.tensor.shape}; {_OTHER_FILE}"
                )
            yield module, ModuleState("param", tensor.key, tensor.shape)


def param_groups(path: FilePath, inner: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{path}: the optimizer has no param_groups")
    return groups


def _groups(
    path: FilePath, optimizer: Mapping[str, Any], default: bool | None
) -> list[_NumberedGroup]:
    inner = optimizer.get("optimizer", optimizer)
    settings = param_groups(path, inner)
    state = inner.get("state") or {}
    masters: Sequence[Any] = [None] * len(settings)
    if _MASTERS in optimizer:
        masters = optimizer[_MASTERS]
        if not isinstance(masters, list) or len(masters) != len(settings):
            raise FormatError(f"{path}: {_MASTERS} is not a list of {len(settings)} groups")
    groups: list[_NumberedGroup] = []
    for own, own_masters in zip(settings, masters, strict=True):
        states = {number: state.get(number) or {} for number in own.get("params") or ()}
        experts = own.get("is_expert_parallel", default)
        groups.append(_NumberedGroup(own, states, own_masters, experts))
    if strays := set(state).difference(*(group.states for group in groups)):
        raise FormatError(
            f"{path}: the optimizer has states of {sorted(strays)[:5]}, which no group holds"
        )
    return groups


def _members(
    groups: Sequence[_NumberedGroup], modules: Sequence[Module], muon: bool
) -> list[list[Module]]:
    """The modules of each group in model order; Muon has matrices. Raises Undecided."""
    count = sum(len(group.states) for group in groups)
    if count != len(modules):
        raise Undecided(
            f"{count} parameters have numbers, but the model has {len(modules)}: some may be frozen"
        )
    apart = any(group.experts for group in groups)
    matrices: list[bool | None] = []  # whether a group's states are Muon's; None if it has none
    masters: dict[tuple[int, int], Shape] = {}  # by group and number
    slot_groups: list[SlotGroup[tuple[int, int]]] = []
    for i, group in enumerate(groups):
        kinds = {name for states in group.states.values() for name in states} - {"step"}
        matrices.append("momentum_buffer" in kinds if muon and kinds else None)
        slots: list[Slot[tuple[int, int]]] = []
        for number, states in group.states.items():
            shapes = shapes_of(states)
            known = shapes if tells_shape(shapes) else {}
            slots.append(Slot((i, number), known, f"number {number}"))
        slot_groups.append(SlotGroup(f"group {i}", slots))
        # fp32 weights have no masters beside them
        if group.masters and len(group.masters) == len(slots):
            masters |= {s.key: m.shape for s, m in zip(slots, group.masters, strict=True)}

    def unfit(slot: Slot[tuple[int, int]], place: int) -> str:
        group, local, shape = slot.key[0], modules[place].local, modules[place].tensor.shape
        if apart and groups[group].experts not in (None, is_expert(local)):
            return f"{local} is not of the experts, or the rest, that {slot.label} is of"
        is_matrix = len(shape) == 2 and local not in (EMBEDDING, TIED)
        if matrices[group] not in (None, is_matrix):
            return f"{local} is not what Muon, or the optimizer beside it, has"
        if masters.get(slot.key, shape) != shape:
            return f"the master of {slot.label} has another shape than {local}"
        return ""

    shapes = {place: module.tensor.shape for place, module in enumerate(modules)}
    names = assign(slot_groups, shapes, MODULE_ORDER, unfit=unfit).names
    return [[modules[names[slot.key]] for slot in group.slots] for group in slot_groups]


def stored_tensors(tree: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {name: value for name, value in tree.items() if isinstance(value, StoredTensor)}


def shapes_of(tree: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in stored_tensors(tree).items()}


def numbered_alone(optimizers: Iterable[Any]) -> bool:
    """Whether optimizers have states by number, and no masters beside them."""
    unmastered = [part for part in optimizers if isinstance(part, dict) and _MASTERS not in part]
    return any(part.get("optimizer", part).get("state") for part in unmastered)


def beside_tensors(optimizer: Any) -> dict[str, Any]:
    """The hyper-parameters and loss scalers of one optimizer, or of a list of them, by name."""
    beside: dict[str, Any] = {}
    for i, part in enumerate(optimizer if isinstance(optimizer, list) else [optimizer]):
        if isinstance(part, dict):
            label = f"optimizer/{i}" if isinstance(optimizer, list) else "optimizer"
            inner = part.get("optimizer", part)
            outer = part if inner is not part else {}
            own = {name: value for name, value in inner.items() if name != "state"}
            own |= {n: value for n, value in outer.items() if n not in ("optimizer", _MASTERS)}
            beside |= {f"{label}/{name}": value for name, value in own.items()}
    return beside
