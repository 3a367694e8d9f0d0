"""The files of a DeepSpeed checkpoint: which must be there, and whether they belong together.

Facts: file names in `runtime/engine.py` (`_get_zero_ckpt_name`, `_get_ckpt_name`,
`_get_expert_ckpt_name`) and `runtime/pipe/module.py` (`ckpt_layer_path`) of DeepSpeed 0.19.8.
Model-parallel ranks are numbered stage by stage: `mp_rank = stage * tp + tp_rank`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs.torch_file import StoredTensor, TorchFile, TreeContents
from jax_ucp.codecs.unpickle import known
from jax_ucp.errors import FormatError
from jax_ucp.files.in_flight import opened_files
from jax_ucp.files.path import FilePath
from jax_ucp.formats.deepspeed.marks import KINDS, is_own
from jax_ucp.formats.facts import COUNTS, RATES, Facts
from jax_ucp.formats.nested import as_dict, group_with, require_dict

# Entries that every file of one save has alike.
_SAME = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")

# The masters, and the state of the optimizer that ZeRO wraps: those of ZeRO-1 and 2, and of ZeRO-3.
_WRAPPERS = (
    frozenset({"single_partition_of_fp32_groups", "base_optimizer_state"}),
    frozenset({"fp32_flat_groups", "optimizer_state_dict"}),
)


# The numbers in a file's name, and the names by kind and numbers.
_Numbers = tuple[Any, ...]
_Names = Mapping[str, Mapping[_Numbers, str]]


@dataclass(frozen=True, slots=True)
class SwappedTensor(StoredTensor):
    """A tensor whose elements are in another file; `file` is its path below the folder."""

    file: str = ""


@dataclass(frozen=True)
class StateFile:
    """A file of the checkpoint, and the dict in it that is read.

    `subfolder` is the path of its folder below the checkpoint's, with a slash at the end.
    """

    file: TorchFile
    state: Mapping[str, Any]
    subfolder: str = field(default="", kw_only=True)

    @cached_property
    def name(self) -> str:
        return self.subfolder + self.file.path.name

    def key(self, tensor: StoredTensor) -> str:
        file = tensor.file if isinstance(tensor, SwappedTensor) else self.name
        return sys.intern(f"{file}:{tensor.key}")


@dataclass(frozen=True)
class Rank(StateFile):
    """The optimizer file of one data-parallel rank."""

    dp: int

    @property
    def masters(self) -> Sequence[StoredTensor]:
        """The flat partitions of the parameters, by group, or under ZeRO-3 sub-group."""
        keys = ("single_partition_of_fp32_groups", "fp32_flat_groups")
        return next(self.state[key] for key in keys if key in self.state)

    @property
    def base_optimizer(self) -> Any:
        """The state of the optimizer that ZeRO wraps: a dict, or a list of groups in an elastic
        checkpoint.
        """
        return self.state.get("base_optimizer_state", self.state.get("optimizer_state_dict"))

    def settings(self, index: int) -> Mapping[str, Any]:
        """Hyper-parameters of a group or ZeRO-3 sub-group; elastic checkpoints have none."""
        return group_with(as_dict(self.base_optimizer).get("param_groups") or (), index)


@dataclass(frozen=True)
class TagFiles:
    """The files of one tag, by position.

    `models[mp_rank]` has one file of model states, or under ZeRO-3 one for each data-parallel rank;
    `ranks[mp_rank]` the optimizer files of its data-parallel ranks, or none (ZeRO-0). `layers` is
    keyed (layer, tp_rank), `experts` (layer, expert, mp_rank), `expert_optimizers` (ep_rank,
    mp_rank). `unusable` says why optimizer files are missing, if only weights were asked for.
    """

    folder: FilePath
    pp: int
    tp: int
    zero3: bool
    models: Sequence[Sequence[StateFile]]
    ranks: Sequence[Sequence[Rank]]
    layers: Mapping[tuple[int, int], StateFile]
    experts: Mapping[tuple[int, int, int], StateFile]
    expert_optimizers: Mapping[tuple[int, int], StateFile]
    unusable: str = ""

    @property
    def all_models(self) -> list[StateFile]:
        return list(itertools.chain(*self.models))

    @property
    def all_ranks(self) -> list[Rank]:
        return list(itertools.chain(*self.ranks))

    def all(self) -> list[StateFile]:
        by_number = (self.layers, self.experts, self.expert_optimizers)
        return [
            *self.all_models,
            *self.all_ranks,
            *itertools.chain(*(files.values() for files in by_number)),
        ]


def _file_names(folder: FilePath) -> _Names:
    """The names of a tag's files by kind and by the numbers in them, in ascending order. A number
    that is missing in a name is 0, but for the data-parallel rank of model states: below ZeRO-3 it
    is None. Raises FormatError for two names of one rank.
    """
    names: dict[str, dict[_Numbers, str]] = {kind: {} for kind in KINDS}
    seen: dict[str, str] = {}
    for name in sorted(path.name for path in folder.children() if path.is_file()):
        for kind, pattern in KINDS.items():
            if (match := pattern.fullmatch(name)) is None:
                continue
            first = seen.setdefault(_unpadded(name), name)
            if first != name:
                raise FormatError(
                    f"{folder} has {first} and {name}, which are one rank's: remove the wrong one"
                )
            absent = None if kind == "model states" else "0"
            numbers = (absent if n is None else n for n in match.groups())
            names[kind][tuple(n if n is None else int(n) for n in numbers)] = name
    return {
        kind: dict(sorted(of_kind.items(), key=lambda item: [n or 0 for n in item[0]]))
        for kind, of_kind in names.items()
    }


def _unpadded(name: str) -> str:
    return re.sub(r"\d+", lambda digits: str(int(digits[0])), name)


@dataclass(frozen=True)
class _RunDegrees:
    """The degrees of parallelism of a run, from the model states in the file `model`."""

    model: str
    pp: int
    tp: int
    world: int
    zero3: bool

    @property
    def mp_world(self) -> int:
        return self.pp * self.tp

    @property
    def model_ranks(self) -> Sequence[int | None]:
        """The data-parallel ranks that have model states of their own; None if all share one."""
        return range(self.world) if self.zero3 else (None,)


def open_files(folder: FilePath, weights_only: bool = False) -> TagFiles:
    """The opened files of one tag. With `weights_only`, the optimizer's files are opened only if
    they hold masters.

    Raises FormatError, naming the file, if one is missing, or belongs to another run or step. With
    `weights_only` a fault in the optimizer's files is recorded as `unusable` instead, except under
    ZeRO-3, where only they hold the weights.
    """
    names = _file_names(folder)
    model_names, optimizer_names = names["model states"], names["optimizers"]
    first = (0 if _is_zero3(folder, names) else None), 0
    if first not in model_names:
        raise FormatError(
            f"{folder}/{_model_name(*first)} is missing; without it nothing says what the buffers"
            " hold"
        )
    models = _open_all(folder, model_names)
    run = _parse_run(names, models[first], zero3=first[0] is not None)
    _check_models(folder, models, run)
    optimizer = next((m for m in models.values() if as_dict(m.state.get("optimizer"))), None)
    if optimizer_names and optimizer:
        raise FormatError(
            f"{folder / optimizer.name} has an optimizer's states, as a run without ZeRO writes"
            f" it, but {min(optimizer_names.values())} lies beside it: files of two runs are in one"
            " folder. Remove those of the other run"
        )
    expert_names = {} if weights_only else names["experts' optimizers"]
    for ep, mp in expert_names:
        if ep and (ep - 1, mp) not in expert_names:
            raise FormatError(
                f"{folder}/expp_rank_{ep - 1}_mp_rank_{mp:02d}_optim_states.pt is missing, but"
                f" {expert_names[ep, mp]} is there"
            )
    ranks: list[list[Rank]] = [[] for _ in range(run.mp_world)]
    unusable = ""
    try:
        if optimizer_names:
            ranks = _optimizers(folder, optimizer_names, run, weights_only)
    except (FormatError, OSError) as error:
        if run.zero3 or not weights_only:
            if isinstance(error, FormatError) and not (run.zero3 or names["layers"]):
                error.at(way_out="weights_only")
            raise
        unusable = str(error)
    layers, experts = (_open_all(folder, names[kind]) for kind in ("layers", "experts"))
    expert_optimizers = _open_all(folder, expert_names)
    _check_saved_as([*models.values(), *layers.values(), *expert_optimizers.values()])
    by_rank = [[models[dp, mp] for dp in run.model_ranks] for mp in range(run.mp_world)]
    return TagFiles(
        *(folder, run.pp, run.tp, run.zero3, by_rank, ranks),
        *(layers, experts, expert_optimizers, unusable),
    )


def _open_all(folder: FilePath, names: Mapping[_Numbers, str]) -> dict[Any, StateFile]:
    opened = opened_files(folder, names.values(), partial(open_stored, equal={}))
    return {numbers: opened[name] for numbers, name in names.items()}


def _is_zero3(folder: FilePath, names: _Names) -> bool:
    """Whether ZeRO-3 wrote the files. Raises FormatError for model states of several stages."""
    if not (models := names["model states"]):
        states = (open_stored(folder / name).state for name in names["optimizers"].values())
        return any("fp32_flat_groups" in s.get("optimizer_state_dict", ()) for s in states)
    of_zero3 = [name for (dp, _), name in models.items() if dp is not None]
    others = [name for (dp, _), name in models.items() if dp is None]
    if of_zero3 and others:
        raise FormatError(
            f"{folder} has model states of ZeRO-3 ({min(of_zero3)}) and of another"
            f" stage ({min(others)}): two saves with different settings are in one"
            " folder. Remove the files of the older one"
        )
    return bool(of_zero3)


def _parse_run(names: _Names, model: StateFile, zero3: bool) -> _RunDegrees:
    """The degrees (pp, tp, data-parallel): from the model states, or else from names of files."""
    state = model.state
    data_ranks = {dp for dp, _ in names["optimizers"]}
    world = _count(state, "dp_world_size", max(len(data_ranks), 1))
    if zero3:
        world = mics_ranks(model) or world
    degrees = known(state.get("checkpoint_parallel_dimensions"))
    if isinstance(degrees, dict):
        return _RunDegrees(
            model.name, int(degrees["pp_degree"]), int(degrees["tp_degree"]), world, zero3
        )
    model_ranks = {mp for _, mp in names["model states"]}
    mp_world = _count(state, "mp_world_size", len(model_ranks))
    layer_ranks = {tp for _, tp in names["layers"]}
    tp = len(layer_ranks) or mp_world
    return _RunDegrees(model.name, max(1, mp_world // tp), tp, world, zero3)


def mics_ranks(model: StateFile) -> int:
    """The number of ranks over which MiCS shards a parameter, or 0 without MiCS. Only the ranks of
    the first copy save.

    Source: `runtime/zero/mics.py`, up to DeepSpeed 0.19.5.
    """
    return max(0, _count(zero_config(model), "mics_shard_size", 0))


def zero_config(model: StateFile) -> Mapping[str, Any]:
    """The run's configuration of ZeRO, without the entries that are off."""
    config = as_dict(known(model.state.get("ds_config")))
    return {key: value for key, value in as_dict(config.get("zero_optimization")).items() if value}


def _count(state: Mapping[str, Any], key: str, default: int) -> int:
    value = known(state.get(key))
    return value if type(value) is int else default


def _check_models(
    folder: FilePath, models: Mapping[tuple[int | None, int], StateFile], run: _RunDegrees
) -> None:
    """Raise FormatError if a rank's model states are missing, or of another run or step."""
    data_ranks = f"{run.world} data-parallel ranks, " if run.zero3 else ""
    for mp, dp in itertools.product(range(run.mp_world), run.model_ranks):
        if (dp, mp) not in models:
            raise FormatError(
                f"{folder}/{_model_name(dp, mp)} is missing: the run had {data_ranks}{run.pp}"
                f" pipeline stages and {run.tp} tensor-parallel ranks, by {run.model}"
            )
    facts = Facts(folder)
    for (dp, mp), model in models.items():
        if mp >= run.mp_world or (dp or 0) >= run.world:
            raise FormatError(
                f"{folder} has {model.name}, but {run.model} was written by a run of {run.world}"
                f" data-parallel times {run.mp_world} model-parallel ranks; it belongs to another"
                " run, or to an earlier save on more ranks"
            )
        for key in _SAME:
            facts.state(model.name, key, model.state.get(key))
    if run.zero3:  # the model states of a rank have its part of each frozen parameter
        fragments = (as_dict(known(m.state.get("frozen_param_fragments"))) for m in models.values())
        tensors = [[t for t in of.values() if isinstance(t, StoredTensor)] for of in fragments]
        what = "fragments of frozen parameters"
        _refuse_copies(zip(models.values(), tensors, strict=True), what)


def _optimizers(
    folder: FilePath, names: Mapping[_Numbers, str], run: _RunDegrees, weights_only: bool
) -> list[list[Rank]]:
    """The optimizer's files by model-parallel rank. Raises FormatError for unexpected ranks."""
    prefixes = {name.partition("zero_pp_rank")[0] for name in names.values()}
    if len(prefixes) > 1:
        raise FormatError(
            f"{folder} has optimizer files with and without the prefix bf16_: two saves with"
            " different settings are in one folder. Remove the files of the older one"
        )
    (prefix,) = prefixes
    places = [(dp, mp) for mp in range(run.mp_world) for dp in range(run.world)]
    for dp, mp in places:
        if (dp, mp) not in names:
            raise FormatError(
                f"{folder}/{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt is"
                f" missing: the run had {run.world} data-parallel ranks, and each holds a part of"
                " every parameter group"
            )
    for (dp, mp), name in names.items() if not weights_only else ():
        if dp >= run.world or mp >= run.mp_world:
            data_ranks = {rank for rank, _ in names}
            raise FormatError(
                f"{folder} has optimizer files of {len(data_ranks)} ranks, but {run.model}"
                f" was written by {run.world}; {name} belongs to another run, or to an earlier save"
                " on more ranks"
            )
    opened = _open_all(folder, {place: names[place] for place in places})
    ranks: list[list[Rank]] = [[] for _ in range(run.mp_world)]
    for (dp, mp), stored in opened.items():
        ranks[mp].append(_as_rank(dp, stored, run))
    every = list(itertools.chain(*ranks))
    _refuse_copies(((rank, rank.masters) for rank in every), "masters")
    if run.zero3:
        _check_saved_as(every)
    return ranks


def _refuse_copies(parts: Iterable[tuple[StateFile, Sequence[StoredTensor]]], what: str) -> None:
    """Raise FormatError if the files of two ranks have the same tensors: one is a copy.

    `parts` are the files with the tensors that differ from rank to rank, which messages call
    `what`. Only files with equal checksums are read and compared. Parts that are padding alone are
    zeros in several files.
    """
    first_with: dict[tuple[tuple[int, int], ...], tuple[StateFile, Sequence[StoredTensor]]] = {}
    for stored, tensors in parts:
        checksums = stored.file.checksums()
        other, others = first_with.setdefault(checksums, (stored, tensors))
        if not checksums or other is stored or len(tensors) != len(others):
            continue
        mine, theirs = list(map(stored.file.tensor, tensors)), list(map(other.file.tensor, others))
        # tensors of one value are those that ranks may share
        varied = any(np.any(array != array.flat[0]) for array in mine if array.size)
        if varied and all(map(same_bits, mine, theirs)):
            raise FormatError(
                f"{stored.file.path} holds the same {what} as {other.name}, bit for bit, though"
                " each rank has a part of its own: one is a copy under the wrong name. Put that"
                " rank's own file in its place"
            )


def open_stored(path: FilePath, equal: dict[Hashable, TreeContents] | None = None) -> StateFile:
    """A file of the checkpoint, opened. Files with equal pickles share the objects in `equal`."""
    file = TorchFile(path, equal=equal)
    state = require_dict(file.tree, f"{path}: the file")
    module = state.get("module")
    if isinstance(module, dict):
        named = [*_named(module)]
        state = {**state, "module": dict(named)}
        if len(state["module"]) < len(named):
            raise FormatError(f"{path}: two entries of 'module' have one name")
    return StateFile(file, state)


def _named(module: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a module by full name. Megatron-DeepSpeed without pipelines saves dicts of
    modules in dicts (`state_dict_for_save_checkpoint` in its `megatron/model/gpt_model.py`).

    >>> dict(_named({"a": {"b": {"w": 1}, "_extra_state": {"c": 2}}}))
    {'a.b.w': 1, 'a._extra_state': {'c': 2}}
    """
    for key, value in module.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and not name.endswith("_extra_state"):
            yield from _named(value, f"{name}.")
        else:
            yield name, value


def _as_rank(dp: int, stored: StateFile, run: _RunDegrees) -> Rank:
    """The optimizer file of a data-parallel rank. Raises FormatError if it is of another stage or
    world size.
    """
    path = stored.file.path
    what = f"{path}: optimizer_state_dict"
    state = require_dict(stored.state.get("optimizer_state_dict"), what)
    if not any(state.keys() >= wrapper for wrapper in _WRAPPERS):
        raise FormatError(
            f"{path} has neither the masters and base_optimizer_state of ZeRO-1 and 2 nor the"
            f" fp32_flat_groups of ZeRO-3, but {', '.join(map(str, state)) or 'nothing'}: another"
            " optimizer wrapper wrote it, which is not read, or it is not an optimizer file"
        )
    zero12, zero3 = _WRAPPERS
    own, other, stages = (zero3, zero12, "3") if run.zero3 else (zero12, zero3, "1 or 2")
    if not state.keys() >= own:
        raise FormatError(
            f"{path} has {', '.join(sorted(other))}, as another ZeRO stage writes it, but"
            f" {run.model} is of ZeRO-{stages}: the file is of another run, or of a save with other"
            " settings. Put the run's own file in its place"
        )
    world = run.world
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list) else [counts or world]
    divide_world = all(count and world % count == 0 for count in counts)
    if not divide_world or max(counts) != world:
        raise FormatError(
            f"{path} is of {counts} ranks, by its partition_count for each group, but there are"
            f" files of {world}: it is of another run or world size, or of a sharding over some of"
            " the ranks, which is not read"
        )
    return Rank(stored.file, state, dp)


def _check_saved_as(files: Iterable[StateFile]) -> None:
    """Raise FormatError if torch.save wrote a file under the name of another rank.

    The name is the only record of which rank ZeRO-3's partitions and frozen fragments belong to,
    which tensor-parallel rank wrote files without ZeRO, and whose experts have the moments.
    """
    for stored in files:
        written, name = f"{stored.file.saved_as}.pt", stored.file.path.name
        # The numbers count, not how they are padded, nor the prefix of a dtype.
        ranks = [_unpadded(text.removeprefix("bf16_")) for text in (written, name)]
        if is_own(written) and ranks[0] != ranks[1]:
            raise FormatError(
                f"{stored.file.path} was written as {written}, by the name inside it: it was"
                " renamed, or exchanged for another rank's. Give each file the name that it was"
                " written under"
            )


def _model_name(dp: int | None, mp: int) -> str:
    return f"{'' if dp is None else f'zero_pp_rank_{dp}_'}mp_rank_{mp:02d}_model_states.pt"


def check_facts(files: TagFiles, weights_only: bool = False) -> None:
    """Raise FormatError unless all files (with `weights_only`, those of weights) are of one step.

    Counters, loss scaler and overflow are reduced over all ranks; groups of parameters are alike in
    a pipeline stage (`state_dict` in `runtime/zero/stage_1_and_2.py`, `stage3.py` and
    `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8).
    """
    facts = Facts(files.folder)
    for mp, models in enumerate(files.models):
        stage = mp // files.tp
        for model in models:
            # The rest of a scheduler's state may be of each rank's own losses.
            file, name, state = model.file, model.name, model.state
            scheduler = state.get("lr_scheduler")
            facts.state_all(file, name, "lr_scheduler", scheduler, only=COUNTS)
            facts.state_all(file, name, "lr_scheduler", scheduler, stage, only=RATES)
            facts.state_all(file, name, "iteration", state.get("iteration"))
            if not weights_only:
                facts.state_all(file, name, "optimizer", _rates(state.get("optimizer")), stage)
    for mp, ranks in enumerate(files.ranks):
        for rank in ranks:
            stage, file, name = mp // files.tp, rank.file, rank.name
            for what in ("loss_scaler", "overflow"):
                facts.state_all(file, name, what, rank.state.get(what))
            base = rank.base_optimizer
            if isinstance(base, list):  # an elastic checkpoint, which has no groups
                states = dict(enumerate(base))
            else:
                facts.state_all(file, name, "optimizer", _rates(base), stage)
                states = as_dict(as_dict(base).get("state"))
            for index, state in states.items():
                if isinstance(state, dict):
                    facts.state_all(file, name, f"step of group {index}", state.get("step"), stage)
    for (_, mp), stored in files.expert_optimizers.items() if not weights_only else ():
        rates = _rates(stored.state.get("optimizer"))
        facts.state_all(stored.file, stored.name, "optimizer", rates, mp // files.tp)


def _rates(optimizer: Any) -> Mapping[str, Any]:
    """The param groups of an optimizer of torch, or of one that DeepSpeed wraps."""
    if not isinstance(optimizer, dict):
        return {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    return {"param_groups": inner.get("param_groups")} if isinstance(inner, dict) else {}
