"""The optimizer's files: masters and states of groups of parameters become slices.

`zero` says where parameters lie in the partitions of a group, `moe` which ranks share one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import touched
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.codes import (
    DECODED,
    PART_OF_CODES,
    keep_apart,
    note_codes,
    plain_name,
)
from jax_ucp.formats.deepspeed.files import Files, Rank, Stored
from jax_ucp.formats.deepspeed.parameters import read_value
from jax_ucp.formats.deepspeed.slices import ASIDE, Slices
from jax_ucp.formats.deepspeed.zero import Group, group, param_group, param_shapes
from jax_ucp.formats.listing import listed
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.formats.torch_save.unpickle import Opaque
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.consolidated import Consolidated, same_bits

_LION = "Lion has one moment; CPULion writes a second one and never reads it"
_OTHER_MOMENTUM = (
    "DeepSpeed before 0.19.3 gives each rank its own momentum of a matrix that lies in two"
    " partitions, unless reduce_scatter is off; on_conflict='master' takes that of the first rank"
)
_OF_ANOTHER_RANK_TOO = "of parameters that an earlier rank has whole too, compared by verify"
_NO_MOMENTS = (
    "the optimizer files have no state of any parameter, though the run made {} steps:"
    " SuperOffload, and ZenFlow with overlap_step, keep moments in a process of their own, which"
    " DeepSpeed does not save"
)
_STEP_OF_MUON = (
    "the step of parameters that Muon updates is that of the optimizer's other parameters: it"
    " stores none for its own, and updates both at once"
)
_EACH_ITS_OWN = "each rank has its own, so that it is of its partition"

# Of each parameter in a rank's partition the first element, and how many there are.
Addresses = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Team:
    """A group of parameters on the ranks that share it: of one model- and expert-parallel rank."""

    mp: int
    ep: int | None
    index: int
    group: Group

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return param_group(self.group.ranks[0], self.index)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """By the parameters' names on the ranks, those in the whole model."""
        shapes = self.group.shapes
        return {name: moe.global_name(name, self.ep, shapes) for name in shapes}


def teams(files: Files, weights_only: bool) -> Iterator[Team]:
    """The groups of every model-parallel rank. Raises FormatError where files do not fit."""
    for mp, (models, ranks) in enumerate(zip(files.models, files.ranks, strict=True)):
        for index, shapes in enumerate(_group_shapes(models, ranks) if ranks else ()):
            for ep, team in moe.teams(index, ranks, models):
                own = group(index, shapes, team, files.zero3, models[0].name, weights_only)
                yield Team(mp, ep, index, own)


def _group_shapes(models: Sequence[Stored], ranks: Sequence[Rank]) -> list[dict[str, Shape]]:
    groups = param_shapes(models[0], ranks)
    table = models[0].state["param_shapes"]
    for model in models[1:]:
        is_same = model.state.get("param_shapes") is table  # of files with equal pickles
        if not is_same and param_shapes(model, ()) != groups:
            raise FormatError(
                f"{model.file.path} has another param_shapes than {models[0].name}; the files"
                " are not of one run"
            )
    return groups


def add_partitions(slices: Slices) -> None:
    """Add masters and states. Raises FormatError for files of another run."""
    addresses: dict[str, Addresses] = {rank.name: {} for rank in slices.files.all_ranks}
    parts: dict[str, tuple[Rank, StoredTensor]] = {}
    if slices.options.weights_only:
        _leave(slices)
    all_teams = list(teams(slices.files, slices.options.weights_only))
    for team in all_teams:
        _add_settings(slices, team)
        _add_flat_states(slices, team)
        _add_wholes(slices, team)
        parts |= _parts_of_codes(slices, team)
        _add_values(slices, team)
        if not slices.files.zero3:  # which records none
            _add_addresses(addresses, team.group)
    _add_muon_steps(slices, all_teams)
    _note_missing_moments(slices)
    for rank, tensor in parts.values():  # groups share their tables
        keep_apart(slices.importer, rank, tensor, PART_OF_CODES)
    _check_mappings(slices, addresses)


def _add_muon_steps(slices: Slices, all_teams: Sequence[Team]) -> None:
    """Add the step of parameters that Muon updates, where the optimizer's others agree on theirs.

    Muon stores none, and one call of it updates both kinds (`runtime/zero/muon/muon_optimizer.py`).
    """
    muon = [team for team in all_teams if team.settings.get("use_muon")]
    if not muon:
        return
    step = _agreed_step(slices, all_teams)
    if step is None:
        return
    for team in muon:
        stage, _, _ = slices.place(team.mp)
        for name in _without_step(slices, team):
            slices.states["step", name].values[stage].append(step)
    slices.importer.notes.append(_STEP_OF_MUON)


def _agreed_step(slices: Slices, all_teams: Sequence[Team]) -> tuple[Rank, Any] | None:
    """A rank and its step, if groups have one and all ranks agree on it."""
    groups = [team.group for team in all_teams if "step" in team.group.scalars]
    ranks = list(itertools.chain.from_iterable(own.ranks for own in groups))
    values = list(itertools.chain.from_iterable(own.scalars["step"] for own in groups))
    if not groups or _differ(slices, ranks, values):
        return None
    return ranks[0], values[0]


def _without_step(slices: Slices, team: Team) -> list[str]:
    return [name for name in team.names.values() if ("step", name) not in slices.states]


def _note_missing_moments(slices: Slices) -> None:
    """Say where an optimizer has moments by its settings, and none are stored after steps."""
    steps = slices.files.models[0][0].state.get("global_steps")
    settings = [param_group(rank, 0) for rank in slices.files.all_ranks[:1]]
    adam = any("betas" in group and not group.get("use_muon") for group in settings)
    stored = {state for state, _ in slices.states} - {"param"}
    if adam and steps and not stored and not slices.options.weights_only:
        slices.importer.notes.append(_NO_MOMENTS.format(steps))


def _leave(slices: Slices) -> None:
    """Say of all tensors that they are left aside; those of the masters are mapped later."""
    for rank in slices.files.all_ranks:
        for key in rank.file.arrays():
            slices.importer.leave(f"{rank.name}:{key}", "state", ASIDE)


def _add_settings(slices: Slices, team: Team) -> None:
    if slices.options.weights_only:
        return
    for local in team.group.layouts:
        slices.importer.hyperparameters(team.names[local], team.settings)


def _add_flat_states(slices: Slices, team: Team) -> None:
    # States whose partitions have the same lengths share layouts, which are checked once then.
    layouts: dict[tuple[Shape, ...], dict[str, tuple[ParamLayout, list[int]]]] = {}
    ranks = team.group.ranks
    # No Adam divides by a second moment without an eps.
    lion = "betas" in team.settings and "eps" not in team.settings
    for state, tensors in team.group.flat.items():
        keys = [rank.key(tensor) for rank, tensor in zip(ranks, tensors, strict=True)]
        if lion and state == "exp_avg_sq":
            slices.skip(keys, "state", _LION)
            continue
        slices.skip(keys, "padding", "padding alone: the group is shorter than its ranks")
        state, keys = _decoded(slices, team, state, keys)
        stored = tuple(tensor.shape for tensor in tensors)
        if stored not in layouts:
            layouts[stored] = _touched_layouts(team.group, stored)
        reason = f"{state} of {len(team.names)} parameters"
        for local, (layout, used) in layouts[stored].items():
            tensor = Consolidated(layout, [keys[i] for i in used])
            slices.add(team.mp, team.ep, state, team.names[local], tensor, reason)


def _add_wholes(slices: Slices, team: Team) -> None:
    """Add states that ranks hold of whole parameters: what a later rank has again is a copy."""
    place = slices.place(team.mp, team.ep)
    for state, wholes in team.group.whole.items():
        reason = f"{state} of whole parameters"
        for whole in wholes:
            key = whole.rank.key(whole.tensor)
            slices.skip([key], "copy", _OF_ANOTHER_RANK_TOO)
            for local, start in whole.starts.items():
                shape, name = team.group.shapes[local], team.names[local]
                part = f"{key} from {start}"
                slices.importer.cut(part, key, start, shape)
                if first := slices.states[state, name].keys.get(place):
                    slices.importer.slice_duplicate(first, part, "", cause=_OTHER_MOMENTUM)
                else:
                    tensor = Consolidated(Unique().join([shape]), [part])
                    slices.add(team.mp, team.ep, state, name, tensor, reason)


def _decoded(slices: Slices, team: Team, state: str, keys: list[str]) -> tuple[str, list[str]]:
    """What a state is called, and its tensors: those that codes mean, if that is asked for."""
    if slices.options.dequantize != DECODED:
        return state, keys
    codes = team.group.codes.get(state, ())
    for at, (rank, one) in enumerate(zip(team.group.ranks, codes, strict=False)):
        parts = keys[at], rank.key(one.table), rank.key(one.scales)
        keys[at] = f"{keys[at]} decoded"
        reason = f"what the codes of {state} mean"
        slices.importer.decoded(keys[at], *parts, one.block, reason)
    return plain_name(state, team.settings), keys


def _parts_of_codes(slices: Slices, team: Team) -> dict[str, tuple[Rank, StoredTensor]]:
    """What an 8-bit optimizer has beside codes, by key, unless these are decoded."""
    decoded = slices.options.dequantize == DECODED
    if team.group.codes:
        note_codes(slices.importer, decoded)
    parts: dict[str, tuple[Rank, StoredTensor]] = {}
    for state, tensors in team.group.parts.items():
        if not (decoded and f"state{state[-1]}" in team.group.codes):
            owned = zip(team.group.ranks, tensors, strict=True)
            parts |= {rank.key(tensor): (rank, tensor) for rank, tensor in owned}
    return parts


def _touched_layouts(
    own: Group, stored: tuple[Shape, ...]
) -> dict[str, tuple[ParamLayout, list[int]]]:
    """How each parameter of a group lies in partitions of these shapes, and in which of them."""
    layouts = own.layouts.items()
    return {local: touched(replace(layout, shards=stored)) for local, layout in layouts}


def _add_values(slices: Slices, team: Team) -> None:
    """Add values that a group has once, such as its step, to all its parameters, if ranks agree."""
    ranks = team.group.ranks
    for state, (values, why) in team.group.aside.items():
        _keep_aside(slices, team, state, values, why)
    for state, values in team.group.scalars.items():
        if state != "step" and _differ(slices, ranks, values):
            _keep_aside(slices, team, state, values, _EACH_ITS_OWN)
            continue
        stage, _, _ = slices.place(team.mp)
        told = list(zip(ranks, values, strict=True))
        for name in team.names.values():
            slices.states[state, name].values[stage] += told


def _differ(slices: Slices, ranks: Sequence[Rank], values: Sequence[Any]) -> bool:
    first, *others = [
        read_value(slices.importer, rank, value) for rank, value in zip(ranks, values, strict=True)
    ]
    return not all(same_bits(first, other) for other in others)


def _keep_aside(slices: Slices, team: Team, state: str, values: Sequence[Any], why: str) -> None:
    """Keep what an optimizer has of a group, but not of its parameters, as each rank has it."""
    for rank, value in zip(team.group.ranks, values, strict=True):
        slices.importer.extra(rank.name, f"{state} of group {team.index}", value)
    slices.importer.notes.append(
        f"the optimizer's {state} of group {team.index} ({listed([*team.names], 1)}) is not a"
        f" state of a parameter here, but an extra of each rank's file: {why}"
    )


def _add_addresses(addresses: Mapping[str, Addresses], own: Group) -> None:
    """Add where the parameters of a group lie in each file's partition."""
    for name, layout in own.layouts.items():
        for fragment in layout.fragments:
            in_file = addresses[own.ranks[fragment.shard].name]
            start, numel = in_file.get(name, (fragment.source.start[0], 0))
            in_file[name] = start, numel + fragment.source.size


def _check_mappings(slices: Slices, addresses: Mapping[str, Addresses]) -> None:
    """Compare each file's `param_slice_mappings` with `param_shapes`, and note where they differ.

    Raises FormatError where a file's mappings are those of another rank: it was renamed.
    """
    differ: list[str] = []
    notes = slices.importer.notes
    for rank in slices.files.all_ranks:
        recorded = _recorded_addresses(rank)
        if recorded is None:
            notes.append(
                f"param_slice_mappings of {rank.name} were not compared: they are of a class that"
                " is not known here"
            )
        elif recorded and recorded != addresses[rank.name]:
            _check_not_renamed(rank, recorded, addresses)
            differ.append(rank.name)
    if differ:
        notes.append(
            f"param_slice_mappings of {', '.join(differ)} describe another order than the flat"
            " buffers have (DeepSpeed writes them so under round_robin_gradients); the order of"
            " param_shapes was used"
        )


def _recorded_addresses(rank: Rank) -> Addresses | None:
    """The addresses that a rank's file records; None where their class is not known here."""
    mappings = rank.state.get("param_slice_mappings") or []
    records = {str(name): at for mapping in mappings for name, at in mapping.items()}
    if any(isinstance(at, Opaque) for at in records.values()):
        return None
    return {name: (at.fields["start"], at.fields["numel"]) for name, at in records.items()}


def _check_not_renamed(rank: Rank, recorded: Addresses, addresses: Mapping[str, Addresses]) -> None:
    """Raise FormatError where the addresses that a file records are those of another rank."""
    for other, others_addresses in addresses.items():
        if others_addresses == recorded:
            number = re.sub(r".*zero_pp_rank_(\d+)_mp_rank_(\d+)_.*", r"\1", other)
            raise FormatError(
                f"{rank.file.path} holds what rank {number} should hold ({other}), by its own "
                "param_slice_mappings: the file was renamed, or belongs to another run"
            )
