"""The files of a universal folder: which must be there, and whether they belong together.

An atom is a dict with the whole tensor, or, from ZeRO-3 without tensor parallelism, the bare flat
tensor, whose shape the model states beside it have.

Facts: `checkpoint/ds_to_universal.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.codecs.torch_file import StoredTensor, TorchFile
from jax_ucp.errors import FormatError
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.path import FilePath
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import (
    StateFile,
    TagFiles,
    check_facts,
    mics_ranks,
    open_files,
    open_stored,
)
from jax_ucp.formats.deepspeed.zero import param_shapes
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.nested import as_dict, as_list, group_with
from jax_ucp.layout.fragments import Shape

OPTIMIZER = "zero/optimizer_state.pt"
_NOT_OF_ONE_RUN = "one of the files is of another run. Put the files of one conversion together"


@dataclass(frozen=True)
class Owned:
    """A parameter of the optimizer: its lowest pipeline stage, and its slices' shapes there."""

    stage: int
    shapes: list[Shape]


@dataclass(frozen=True)
class UniversalFiles:
    """The files of a universal folder: `files` are the model states, `atoms` those under zero/.

    Atoms are keyed by parameter, then state, where `fp32` is the parameter. `optimizer` is what the
    optimizer has beside them; with weights_only it is None, and `left` are the files not read.
    """

    files: TagFiles
    atoms: Mapping[str, Mapping[str, TorchFile]]
    optimizer: StateFile | None
    left: Sequence[FilePath]

    def states(self, name: str) -> Mapping[str, TorchFile]:
        return self.atoms.get(name, {})

    def atom(self, name: str, state: str) -> StateFile:
        return StateFile(self.atoms[name][state], {}, subfolder=f"zero/{name}/")

    def groups(self) -> Iterator[tuple[int, int, Mapping[str, Shape]]]:
        for mp, models in enumerate(self.files.models):
            for index, shapes in enumerate(param_shapes(models[0], ())):
                yield mp // self.files.tp, index, shapes

    def owned(self) -> dict[str, Owned]:
        """The parameters that the optimizer owns."""
        owned: dict[str, Owned] = {}
        for stage, _, shapes in self.groups():
            for name, shape in shapes.items():
                own = owned.setdefault(name, Owned(stage, []))
                if stage == own.stage:
                    own.shapes.append(shape)
        return owned

    def is_fused(self, name: str, stage: int) -> bool:
        return any(moe.is_fused(name, model) for model in self.files.models[stage])

    def optimizer_entry(self, key: str) -> Any:
        return self.optimizer.state.get(key) if self.optimizer else None

    def rank_0(self) -> Mapping[str, Any]:
        """The optimizer's own state, which ZeRO-3 leaves beside the atoms; else nothing."""
        return as_dict(self.optimizer_entry("optimizer_state_dict"))


def open_universal(folder: FilePath, weights_only: bool) -> UniversalFiles:
    """The files of a universal folder. Raises FormatError for missing or foreign ones."""
    files = open_files(folder, weights_only)
    if any(files.ranks):
        raise FormatError(
            f"{folder} has both atoms (zero/) and *_optim_states.pt: two checkpoints in one"
            " folder. Move zero/, or the optimizer files, to another one"
        )
    moe.check_expert_ranks(files)
    check_facts(files, weights_only)
    zero = folder / "zero"
    zero.folder().walk()  # one list for the folders of all parameters
    every = itertools.chain.from_iterable(named.matching(".pt") for named in zero.children())
    paths = [path for path in every if not path.name.startswith(".")]
    if weights_only:
        parameters = [path for path in paths if path.stem == "fp32"]
        states = [path for path in paths if path.stem != "fp32"]
        left = list(filter(FilePath.is_file, [*states, folder / OPTIMIZER]))
        return UniversalFiles(files, _open_atoms(parameters), None, left)
    path = folder / OPTIMIZER
    if not path.is_file():
        raise FormatError(
            f"{path} is missing: it holds what the optimizer has beside the atoms."
            " weights_only opens the parameters without it"
        )
    stored = open_stored(path)
    optimizer = StateFile(stored.file, stored.state, subfolder="zero/")
    universal = UniversalFiles(files, _open_atoms(paths), optimizer, [])
    if fault := next(_optimizer_faults(universal), None):
        raise FormatError(f"{path} {fault}: {_NOT_OF_ONE_RUN}")
    _check_states(universal)
    # parameters of a group step together
    facts = Facts(folder)
    for stage, index, shapes in universal.groups():
        for name in shapes:
            if file := universal.states(name).get("step"):
                what = f"step of group {index}"
                facts.state_all(file, f"zero/{name}/step.pt", what, file.tree, (stage, index))
    return universal


def _open_atoms(paths: Sequence[FilePath]) -> dict[str, dict[str, TorchFile]]:
    atoms: dict[str, dict[str, TorchFile]] = {}
    opened = each_file(paths[0].files, TorchFile, paths) if paths else []
    for path, file in zip(paths, opened, strict=True):
        atoms.setdefault(path.parent.name, {})[path.stem] = file
    for state, file in itertools.chain.from_iterable(states.items() for states in atoms.values()):
        if file.saved_as != state and file.saved_as in atoms[file.path.parent.name]:
            raise FormatError(
                f"{file.path} was written as {file.saved_as}.pt, by the name inside it: it was"
                " renamed, or exchanged for another state's. Give each file the name that it was"
                " written under"
            )
    return atoms


def _optimizer_faults(universal: UniversalFiles) -> Iterator[str]:
    """The entries of the optimizer's file, rank 0's, that are not those of the run."""
    model = universal.files.models[0][0]
    counts = [len(shapes) for shapes in param_shapes(model, ())]
    zero3 = bool(universal.rank_0())
    if zero3 != universal.files.zero3:
        one, other = ("ZeRO-3" if it else "ZeRO-1 or 2" for it in (zero3, universal.files.zero3))
        yield f"is of {one}, but {model.name} of {other}"
    # The groups that its settings, states and partitions are of.
    groups: dict[str, list[Any]] = {}
    partitions = universal.optimizer_entry("partition_count")
    if settings := as_list(universal.optimizer_entry("param_groups")):
        numbers = [as_list(as_dict(group).get("params")) for group in settings]
        groups["settings"] = list(itertools.chain.from_iterable(numbers))
    if states := as_dict(universal.rank_0().get("state")):  # without momentum there are none
        groups["states"] = list(states)
    if isinstance(partitions, list):
        groups["partition_count"] = list(range(len(partitions)))
    for what, of in groups.items():
        if len(of) != len(counts) or not {*range(len(counts))} <= {*of}:
            described = f"{model.name} describes {len(counts)} groups"
            yield f"has {what} of the groups {of!s:.80}, but {described}"
    # What it counts, and the model states too.
    paddings = as_list(universal.optimizer_entry("param_alignment_paddings"))
    padded = [len(as_list(group)) for group in paddings]
    if padded and counts and padded != counts:
        what = "parameters in its groups, by its param_alignment_paddings"
        yield f"is of {padded} {what}, but {model.name} of {counts}"
    every = partitions if isinstance(partitions, list) else [partitions]
    ranks = max((count for count in every if isinstance(count, int)), default=None)
    world = mics_ranks(model) or model.state.get("dp_world_size")
    if ranks and world and ranks != world:
        what = "data-parallel ranks, by its partition_count"
        yield f"is of {ranks} {what}, but {model.name} of {world}"


def _check_states(universal: UniversalFiles) -> None:
    """Raise FormatError where a parameter lacks a state that its group has, or that Adam has."""
    zero = universal.files.folder / "zero"
    stepped = universal.files.models[0][0].state.get("global_steps")
    settings = universal.optimizer_entry("param_groups") or ()
    for _, index, shapes in universal.groups():
        states = {state for name in shapes for state in universal.states(name)}
        # the moments that the settings of the whole group are about
        hyper = group_with(settings, index)
        moments = (
            [{"exp_avg"}] if stepped and "betas" in hyper and not hyper.get("use_muon") else []
        )
        if moments and "eps" in hyper:
            moments.append({"exp_avg_sq", "exp_inf"})
        for names in moments:
            if names.isdisjoint(states):
                raise FormatError(
                    f"{zero}: {' or '.join(sorted(names))}.pt is missing of all parameters of group"
                    f" {index}, of which {OPTIMIZER} has the betas. weights_only opens the"
                    " parameters without it"
                )
        for name in shapes:
            missing = states - universal.states(name).keys() - {"fp32"}
            if missing and "fp32" in universal.states(name):
                state = min(missing)
                other = next(other for other in shapes if state in universal.states(other))
                raise FormatError(
                    f"{zero / name / state}.pt is missing: other parameters of the group have that"
                    f" state, as {other}/{state}.pt, which may be too much if it is the only one."
                    " weights_only opens the parameters without it"
                )


def check_forms(universal: UniversalFiles, owned: Mapping[str, Owned]) -> None:
    """Raise FormatError where atoms are not all of one form, as one conversion writes them."""
    facts = Facts(universal.files.folder)
    for name, own in owned.items():
        among = universal.is_fused(name, own.stage)
        for state, file in universal.states(name).items():
            at = f"zero/{name}/{state}.pt"
            match file.tree:
                case dict():
                    cut = sorted(file.tree)
                    facts.state(at, f"what says how to cut {name}", cut, name)
                    facts.state(at, "the form of the atoms", "a dict", among)
                case StoredTensor(shape=shape) if shape:
                    facts.state(at, "the form of the atoms", "a bare tensor", among)
                case _:
                    pass


def ranks_of(universal: UniversalFiles, index: int) -> int:
    """How many ranks share the parameters of a group: fewer for experts than for the rest."""
    teams = universal.optimizer_entry("ds_zero_partition_groups") or ()
    counts = [team["partition_count"] for team in teams if team["sub_group"] == index]
    count = counts[0] if counts else universal.optimizer_entry("partition_count")
    if not isinstance(count, int) or count < 1:
        raise FormatError(
            f"{universal.files.folder / OPTIMIZER} has the partition_count {count!r:.80}, which is"
            " none"
        )
    return count
