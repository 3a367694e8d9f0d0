"""The optimizer's files: masters and states of groups of parameters become slices.

`zero` says where parameters lie in the partitions of a group, `moe` which ranks share one.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.value import Array, cut, items_of
from jax_ucp.codecs.unpickle import Opaque
from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.codes import PART_OF_CODES, keep_apart
from jax_ucp.formats.deepspeed.files import Rank, TagFiles
from jax_ucp.formats.deepspeed.parameters import read_value
from jax_ucp.formats.deepspeed.slices import ASIDE, Slices
from jax_ucp.formats.deepspeed.zero import PartitionGroup, group, param_shapes, touched
from jax_ucp.formats.moments import moments_of
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.options import DECODED
from jax_ucp.text import listed

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
    """A group of parameters on the ranks that share it, all of one mp and one ep rank."""

    mp: int
    ep: int | None
    index: int
    group: PartitionGroup

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return self.group.ranks[0].settings(self.index)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The parameters' names in the whole model, by their names on the ranks."""
        shapes = self.group.shapes
        return {name: moe.global_name(name, self.ep, shapes) for name in shapes}


def teams(files: TagFiles, weights_only: bool) -> Iterator[Team]:
    """The groups of every model-parallel rank. Raises FormatError if files do not fit together."""
    for mp, (models, ranks) in enumerate(zip(files.models, files.ranks, strict=True)):
        if not ranks:
            continue
        groups = param_shapes(models[0], ranks)
        table = models[0].state["param_shapes"]
        for model in models[1:]:
            is_same = model.state.get("param_shapes") is table  # of files with equal pickles
            if not is_same and param_shapes(model, ()) != groups:
                raise FormatError(
                    f"{model.file.path} has another param_shapes than {models[0].name}; the files"
                    " are not of one run"
                )
        for index, shapes in enumerate(groups):
            for ep, team in moe.teams(index, ranks, models):
                own = group(index, shapes, team, files.zero3, models[0].name, weights_only)
                yield Team(mp, ep, index, own)


def add_partitions(slices: Slices) -> None:
    """Add masters and states of the optimizer. Raises FormatError for files of another run."""
    weights_only, builder = slices.options.weights_only, slices.builder
    for rank in slices.files.all_ranks if weights_only else ():
        for key in rank.file.arrays():  # those of masters are mapped later
            builder.leave(f"{rank.name}:{key}", "state", ASIDE)
    apart: dict[str, None] = {}  # the keys of codes that are not decoded, and of what they mean
    all_teams = list(teams(slices.files, weights_only))
    for team in all_teams:
        for name in team.names.values() if not weights_only else ():
            builder.hyperparameters(name, team.settings)
        apart |= dict.fromkeys(_add_flat_states(slices, team))
        _add_wholes(slices, team)
        _add_values(slices, team)
    _add_muon_steps(slices, all_teams)
    # Adam has moments by its settings: none may be stored after steps.
    steps = slices.files.models[0][0].state.get("global_steps")
    settings = [rank.settings(0) for rank in slices.files.all_ranks[:1]]
    adam = any("betas" in group and not group.get("use_muon") for group in settings)
    stored = {state for state, _ in slices.states} - {"param"}
    if adam and steps and not stored and not weights_only:
        builder.notes.append(_NO_MOMENTS.format(steps))
    for key in apart:  # groups share their tables
        keep_apart(builder, key, PART_OF_CODES)
    _check_mappings(slices, all_teams)


def _add_flat_states(slices: Slices, team: Team) -> list[str]:
    """Add the states that each rank keeps as a flat partition; the keys of those left apart."""
    builder, settings = slices.builder, team.settings
    decode = slices.options.dequantize == DECODED
    flat, apart = _moments(builder, team, decode)
    # States whose partitions have the same lengths share layouts, which are checked once then.
    layouts: dict[tuple[Shape, ...], dict[str, tuple[ParamLayout, list[int]]]] = {}
    # No Adam divides by a second moment without an eps.
    lion = "betas" in settings and "eps" not in settings
    place = slices.place(team.mp, team.ep)
    for state, arrays in flat.items():
        keys = list(itertools.chain.from_iterable(map(items_of, arrays)))
        if lion and state == "exp_avg_sq":
            slices.skip(keys, "state", _LION)
            continue
        slices.skip(keys, "padding", "padding alone: the group is shorter than its ranks")
        stored = tuple(array.info.shape for array in arrays)
        if stored not in layouts:
            layouts[stored] = {
                local: touched(replace(layout, shards=stored))
                for local, layout in team.group.layouts.items()
            }
        for local, (layout, used) in layouts[stored].items():
            slices.add(place, state, team.names[local], layout, [arrays[i] for i in used])
        numbers = set(itertools.chain.from_iterable(used for _, used in layouts[stored].values()))
        reason = f"{state} of {len(team.names)} parameters"
        builder.mapped([arrays[i] for i in numbers], reason)
    return apart


def _moments(
    builder: ContentsBuilder, team: Team, decode: bool
) -> tuple[dict[str, list[Array]], list[str]]:
    """Each rank's array of a state, with moments in the place of what holds them; and the keys of
    what is of no state: of what codes mean, and of codes of two moments.
    """
    group = team.group
    flat: dict[str, list[Array]] = defaultdict(list)
    apart: list[str] = []
    for at, rank in enumerate(group.ranks):
        keys = {
            state: rank.key(tensors[at]) for state, tensors in {**group.flat, **group.parts}.items()
        }
        arrays = {state: builder.array(key) for state, key in keys.items()}
        moments, used = moments_of(builder, arrays, team.settings, decode)
        for state, array in arrays.items():
            if state in used:
                continue
            if state in group.flat and len(array.info.shape) == 1:
                flat[state].append(array)
            else:
                apart.append(keys[state])
        for state, array in moments.items():
            flat[state].append(array)
    if len({*map(len, flat.values())}) > 1:
        raise FormatError(
            f"{group.ranks[0].file.path.parent}: the codes of an 8-bit optimizer in group"
            f" {team.index} are understood on some ranks only: files are of different runs, or cut."
            " Without dequantize='float32' they open as codes"
        )
    return flat, apart


def _add_wholes(slices: Slices, team: Team) -> None:
    """Add the states of parameters that are not partitioned, and compare the ranks' copies."""
    place = slices.place(team.mp, team.ep)
    for state, wholes in team.group.whole.items():
        for whole in wholes:
            key = whole.rank.key(whole.tensor)
            slices.skip([key], "copy", _OF_ANOTHER_RANK_TOO)
            for local, start in whole.starts.items():
                name = team.names[local]
                array, shape = slices.builder.array(key), team.group.shapes[local]
                part = cut(f"{key} from {start}", array, start, shape)
                if slices.array_on(place, state, name):
                    slices.compare(place, state, name, part, cause=_OTHER_MOMENTUM)
                else:
                    slices.add(place, state, name, None, [part])
                    slices.builder.mapped([part], f"{state} of whole parameters")


def _add_values(slices: Slices, team: Team) -> None:
    """Add values that a group has once, such as its step, to all its parameters if the ranks agree
    on them.

    Other values of a group that are not of its parameters are kept for each rank.
    """
    ranks, builder = team.group.ranks, slices.builder
    aside = dict(team.group.aside)
    stage, _, _ = slices.place(team.mp)
    for state, values in team.group.scalars.items():
        if state != "step" and _differ(slices, ranks, values):
            aside[state] = values, _EACH_ITS_OWN
            continue
        of_ranks = list(zip(ranks, values, strict=True))
        for name in team.names.values():
            slices.states[state, name].values[stage] += of_ranks
    for state, (values, why) in aside.items():
        for rank, value in zip(ranks, values, strict=True):
            builder.extra(rank.name, f"{state} of group {team.index}", value)
        builder.notes.append(
            f"the optimizer's {state} of group {team.index} ({listed([*team.names], 1)}) is not a"
            f" state of a parameter here, but an extra of each rank's file: {why}"
        )


def _differ(slices: Slices, ranks: Sequence[Rank], values: Sequence[Any]) -> bool:
    first, *others = [
        read_value(slices.builder, rank, value) for rank, value in zip(ranks, values, strict=True)
    ]
    return not all(same_bits(first, other) for other in others)


def _add_muon_steps(slices: Slices, all_teams: Sequence[Team]) -> None:
    """Add the step of the parameters that Muon updates, if the optimizer's other parameters agree
    on theirs.

    Muon stores none, and one call of it updates both kinds (`runtime/zero/muon/muon_optimizer.py`).
    """
    muon = [team for team in all_teams if team.settings.get("use_muon")]
    groups = [team.group for team in all_teams if "step" in team.group.scalars]
    if not muon or not groups:
        return
    ranks = list(itertools.chain.from_iterable(own.ranks for own in groups))
    values = list(itertools.chain.from_iterable(own.scalars["step"] for own in groups))
    if _differ(slices, ranks, values):
        return
    for team in muon:
        stage, _, _ = slices.place(team.mp)
        for name in team.names.values():
            if ("step", name) not in slices.states:
                slices.states["step", name].values[stage].append((ranks[0], values[0]))
    slices.builder.notes.append(_STEP_OF_MUON)


def _check_mappings(slices: Slices, all_teams: Sequence[Team]) -> None:
    """Compare each file's `param_slice_mappings` with `param_shapes`, and note where they differ.

    Raises FormatError where a file's mappings are those of another rank: it was renamed.
    """
    # Where the parameters lie in each file's partition, by param_shapes; ZeRO-3 records nothing.
    addresses: dict[str, Addresses] = {rank.name: {} for rank in slices.files.all_ranks}
    for own in [team.group for team in all_teams if not slices.files.zero3]:
        for name, layout in own.layouts.items():
            for part in layout.parts:
                in_file = addresses[own.ranks[part.input].name]
                start, numel = in_file.get(name, (part.source.offset[0], 0))
                in_file[name] = start, numel + part.size
    notes = slices.builder.notes
    differ: list[str] = []
    for rank in slices.files.all_ranks:
        mappings = rank.state.get("param_slice_mappings") or []
        records = {str(name): at for mapping in mappings for name, at in mapping.items()}
        if any(isinstance(at, Opaque) for at in records.values()):
            notes.append(
                f"param_slice_mappings of {rank.name} were not compared: they are of a class that"
                " is not known here"
            )
            continue
        recorded = {name: (at.fields["start"], at.fields["numel"]) for name, at in records.items()}
        if not recorded or recorded == addresses[rank.name]:
            continue
        if other := next((name for name, own in addresses.items() if own == recorded), None):
            number = re.sub(r".*zero_pp_rank_(\d+)_mp_rank_(\d+)_.*", r"\1", other)
            raise FormatError(
                f"{rank.file.path} holds what rank {number} should hold ({other}), by its own "
                "param_slice_mappings: the file was renamed, or belongs to another run"
            )
        differ.append(rank.name)
    if differ:
        notes.append(
            f"param_slice_mappings of {', '.join(differ)} describe another order than the flat"
            " buffers have (DeepSpeed writes them so under round_robin_gradients); the order of"
            " param_shapes was used"
        )
