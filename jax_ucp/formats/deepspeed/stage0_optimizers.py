"""ZeRO-0: the optimizer in each file, with its states by number.

In fp32 it is torch's own. In fp16 and bf16 DeepSpeed wraps it: the unfused wrapper keeps a list of
masters for each group, the fused one a flat buffer of them, and of each state
(`runtime/fp16/unfused_optimizer.py`, `fused_optimizer.py`, 0.19.8).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.codes import flattened
from jax_ucp.formats.deepspeed.files import Stored
from jax_ucp.formats.deepspeed.slices import Slices
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.layout.fragments import Shape

_OTHER_RUN = (
    "it is of another run, or was saved before the first step. Put that rank's own file in its"
    " place; weights_only opens the module's weights"
)


# Groups, and the parameters that may be in them.
_Kind = tuple[list[Mapping[str, Any]], dict[str, Shape]]


@dataclass(frozen=True)
class StageZero:
    """The optimizer in one file, and the parameters it may have; `masters` by number."""

    stored: Stored
    mp: int
    ep: int
    ranks: int
    states: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    shapes: Mapping[str, Shape]
    masters: Mapping[int, StoredTensor]
    flat: bool

    @property
    def named(self) -> bool:
        return all("param_names" in group for group in self.groups)

    def kinds(self) -> list[_Kind]:
        """The groups of dense parameters and those of experts, and parameters that fit each."""
        return [self._kind(experts=False), self._kind(experts=True)]

    def _kind(self, experts: bool) -> _Kind:
        owner = self.ep if experts else None
        ranks = max(1, self.ranks)
        owners = {name: moe.expert_rank(name, self.shapes, ranks) for name in self.shapes}
        shapes = {name: shape for name, shape in self.shapes.items() if owners[name] == owner}
        return [group for group in self.groups if is_of_experts(group) == experts], shapes


def optimizers_of(slices: Slices, mp: int) -> list[StageZero]:
    """The optimizers of a model-parallel rank: those of experts, then of the model states."""
    by_experts = slices.files.expert_optimizers.items()
    files = sorted((ep, stored) for (ep, rank), stored in by_experts if rank == mp)
    shapes, ranks = slices.shapes_on(mp), len(files)
    _require_optimizers([stored for _, stored in files])
    files.append((0, slices.files.models[mp][0]))
    optimizers = [
        _optimizer(slices, stored, mp, ep, ranks, shapes)
        for ep, stored in files
        if stored.state.get("optimizer") is not None
    ]
    _check_alike(optimizers)
    return optimizers


def _require_optimizers(files: Sequence[Stored]) -> None:
    for stored in files:
        if not isinstance(stored.state.get("optimizer"), dict):
            raise FormatError(
                f"{stored.file.path} has no optimizer, which expert-parallel ranks save in such a"
                f" file without ZeRO: {_OTHER_RUN}"
            )


def _check_alike(optimizers: Sequence[StageZero]) -> None:
    """Raise FormatError where expert-parallel ranks have other states than the first: each has all
    of the dense parameters, and as many experts.
    """
    for one in optimizers[1:]:
        first = optimizers[0]
        if _form(one) != _form(first):
            raise FormatError(
                f"{one.stored.file.path} has an optimizer with {len(one.states)} states in"
                f" {sizes_of(one)}, which in their shapes are not those of {first.stored.name}:"
                f" {_OTHER_RUN}"
            )


def _form(one: StageZero) -> tuple[object, ...]:
    groups = [list(group["params"]) for group in one.groups]
    return groups, {number: shapes_of_states(state) for number, state in one.states.items()}


def _optimizer(
    slices: Slices, stored: Stored, mp: int, ep: int, ranks: int, shapes: Mapping[str, Shape]
) -> StageZero:
    optimizer = stored.state["optimizer"]
    inner, masters = unwrapped(optimizer)
    states, groups = _numbered(inner, str(stored.file.path))
    experts = list(filter(moe.is_native, shapes))
    local = len(numbers_in(filter(is_of_experts, groups)))
    if local and len(experts) > ranks * local:
        lost = f"expp_rank_{ranks}_mp_rank_{mp:02d}_optim_states.pt"
        raise FormatError(
            f"{slices.files.folder}/{lost} is missing: {ranks} ranks have {local} of {len(experts)}"
            " experts' states"
        )
    by_number: dict[int, StoredTensor] = {}
    if masters:
        parts = optimizer[masters]
        tensors = itertools.chain.from_iterable(parts) if masters == "fp32_groups" else parts
        by_number = dict(zip(numbers_in(groups), tensors, strict=True))
    flat = masters == "fp32_groups_flat"
    return StageZero(stored, mp, ep, ranks, states, groups, shapes, by_number, flat)


def is_of_experts(group: Mapping[str, Any]) -> bool:
    return bool(group.get("moe"))


def numbers_in(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [number for group in groups for number in group["params"]]


def shapes_of_states(state: Mapping[str, Any]) -> dict[str, Shape]:
    shapes = {
        str(name): value.shape for name, value in state.items() if isinstance(value, StoredTensor)
    }
    # Of bitsandbytes the second moment, or the only one, has the parameter's shape.
    if moment := shapes.get("state2", shapes.get("state1")):
        shapes["exp_avg"] = moment
    return shapes


def sizes_of(one: StageZero) -> str:
    if one.flat:
        elements = [str(math.prod(master.shape)) for master in one.masters.values()]
        return f"groups of {' + '.join(elements)} elements"
    experts = (
        ", those of experts on each rank, with all ranks' experts in one list" if one.ranks else ""
    )
    counts = [str(len(group["params"])) for group in one.groups]
    return f"groups of {' + '.join(counts)} parameters{experts}"


def unwrapped(optimizer: Any) -> tuple[Any, str]:
    """Torch's own optimizer, and the name of the masters that DeepSpeed keeps, if any."""
    if isinstance(optimizer, dict):
        for masters in ("fp32_groups", "fp32_groups_flat"):
            if masters in optimizer:
                return optimizer.get("optimizer_state_dict"), masters
    return optimizer, ""


def _numbered(
    optimizer: Any, file: str
) -> tuple[Mapping[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """States by number, and groups. Raises FormatError where the optimizer is not torch's own."""
    match optimizer:
        case {"state": states, "param_groups": list(groups)}:
            return {number: flattened(state) for number, state in states.items()}, groups
    raise FormatError(
        f"{file} has no optimizer state of torch's form, so that its parts cannot be told apart; "
        "open with weights_only to leave the optimizer aside"
    )
