"""ZeRO-0: the optimizer in each file, with its states by number.

In fp32 it is torch's own. In fp16 and bf16 DeepSpeed wraps it: the unfused wrapper keeps a list of
masters for each group, the fused one a flat buffer of them, and of each state
(`runtime/fp16/unfused_optimizer.py`, `fused_optimizer.py`, 0.19.8).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.errors import FormatError
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.codes import flattened
from jax_ucp.formats.deepspeed.files import StateFile
from jax_ucp.formats.deepspeed.slices import Slices
from jax_ucp.layout.fragments import Shape

_OTHER_RUN = (
    "it is of another run, or was saved before the first step. Put that rank's own file in its"
    " place; weights_only opens the module's weights"
)


@dataclass(frozen=True)
class StageZero:
    """The optimizer in one file, and its possible parameters; `masters` by number, maybe `flat`."""

    stored: StateFile
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

    def kinds(self) -> list[tuple[list[int], dict[str, Shape]]]:
        """The indices of dense groups, and of experts', each with the parameters they may have.

        Masters are all in one kind, because experts have none.
        """
        if self.masters:
            return [([*range(len(self.groups))], dict(self.shapes))]
        ranks = max(1, self.ranks)
        kinds: list[tuple[list[int], dict[str, Shape]]] = []
        for owner in (None, self.ep):
            experts = owner is not None
            groups = [i for i, group in enumerate(self.groups) if bool(group.get("moe")) == experts]
            owned = {
                name: shape
                for name, shape in self.shapes.items()
                if moe.expert_rank(name, self.shapes, ranks) == owner
            }
            kinds.append((groups, owned))
        return kinds

    def state_shapes(self, number: int) -> dict[str, Shape]:
        """The shapes of a number's states that are tensors."""
        states = self.states.get(number, {}).items()
        shapes = {str(name): t.shape for name, t in states if isinstance(t, StoredTensor)}
        # Of bitsandbytes the second moment, or the only one, has the parameter's shape.
        if moment := shapes.get("state2", shapes.get("state1")):
            shapes["exp_avg"] = moment
        return shapes


def optimizers_of(slices: Slices, mp: int) -> list[StageZero]:
    """The optimizers that model-parallel rank `mp` saved: of experts, then of its model states,
    if those have one. Raises FormatError for an expert file without one, and if they differ.
    """
    by_experts = slices.files.expert_optimizers.items()
    files = sorted((ep, stored) for (ep, rank), stored in by_experts if rank == mp)
    ranks = len(files)
    for _, stored in files:
        if not isinstance(stored.state.get("optimizer"), dict):
            raise FormatError(
                f"{stored.file.path} has no optimizer, which expert-parallel ranks save in such a"
                f" file without ZeRO: {_OTHER_RUN}"
            )
    files.append((0, slices.files.models[mp][0]))
    optimizers = [
        _optimizer(slices, stored, mp, ep, ranks)
        for ep, stored in files
        if stored.state.get("optimizer") is not None
    ]
    forms = [
        (
            [list(group["params"]) for group in one.groups],
            {number: one.state_shapes(number) for number in one.states},
        )
        for one in optimizers
    ]
    for one, form in zip(optimizers, forms, strict=True):
        if form != forms[0]:
            raise FormatError(
                f"{one.stored.file.path} has an optimizer with {len(one.states)} states in"
                f" {sizes_of(one)}, which in their shapes are not those of"
                f" {optimizers[0].stored.name}: {_OTHER_RUN}"
            )
    return optimizers


def _optimizer(slices: Slices, stored: StateFile, mp: int, ep: int, ranks: int) -> StageZero:
    """The optimizer of a file. Raises FormatError for no torch's, or missing experts' ranks."""
    optimizer = stored.state["optimizer"]
    inner, masters = unwrapped(optimizer)
    match inner:
        case {"state": stored_states, "param_groups": list(groups)}:
            states = {number: flattened(state) for number, state in stored_states.items()}
        case _:
            raise FormatError(
                f"{stored.file.path} has no optimizer state of torch's form, so that its parts"
                " cannot be told apart; open with weights_only to leave the optimizer aside"
            )
    shapes = slices.shapes_on(mp)
    experts = list(filter(moe.expert_number, shapes))
    local = sum(len(group["params"]) for group in groups if group.get("moe"))
    if local and len(experts) > ranks * local:
        lost = f"expp_rank_{ranks}_mp_rank_{mp:02d}_optim_states.pt"
        raise FormatError(
            f"{slices.files.folder}/{lost} is missing: {ranks} ranks have {local} of {len(experts)}"
            " experts' states"
        )
    flat = masters == "fp32_groups_flat"
    tensors = optimizer[masters] if masters else []
    if masters and not flat:
        tensors = itertools.chain.from_iterable(tensors)
    numbers = [number for group in groups for number in group["params"]] if masters else []
    by_number = dict(zip(numbers, tensors, strict=True))
    return StageZero(stored, mp, ep, ranks, states, groups, shapes, by_number, flat)


def sizes_of(one: StageZero) -> str:
    """The size of each group, in elements or parameters, for messages."""
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
