"""The files of a DeepSpeed checkpoint: which must be there, and whether they belong together.

Facts: file names in `runtime/engine.py` (`_get_zero_ckpt_name`, `_get_ckpt_name`, `_get_expert_ckpt_name`) and
`runtime/pipe/module.py` (`ckpt_layer_path`) of DeepSpeed 0.19.8. Model-parallel ranks are numbered stage by stage:
`mp_rank = stage * tp + tp_rank`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.facts import Facts
from jax_ucp.formats.safe_pickle import known, what_is
from jax_ucp.formats.torch_file import StoredTensor, TorchFile
from jax_ucp.layout.box import Box
from jax_ucp.storage.consolidated import same_bits

_OPTIM = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_MODEL = re.compile(r"(zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)-(model_(?P<tp>\d+)-)?model_states\.pt")
_EXPERT = re.compile(r"(layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_EXPP = re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")

# What every file of one save says alike.
_SAME = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")


@dataclass(frozen=True)
class Stored:
    """A file of the checkpoint, and the dict in it that matters."""

    file: TorchFile
    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.file.path.name

    def key(self, tensor: StoredTensor) -> str:
        return f"{self.name}:{tensor.key}"


@dataclass(frozen=True)
class Rank(Stored):
    """The optimizer file of one data-parallel rank."""

    dp: int

    @property
    def masters(self) -> Sequence[StoredTensor]:
        """The flat partitions of the parameters, one for each group, or under ZeRO-3 for each sub-group."""
        return self.state.get("single_partition_of_fp32_groups", self.state.get("fp32_flat_groups"))  # type: ignore


@dataclass(frozen=True)
class Files:
    """The files of one tag, by position.

    `models[mp_rank]` has one file of model states, or under ZeRO-3 one for each data-parallel rank; `ranks[mp_rank]`
    one optimizer file for each data-parallel rank, or none (ZeRO-0). `layers` is keyed (layer, tp_rank), `experts`
    (layer, expert, mp_rank), `expert_optimizers` (ep_rank, mp_rank). `unusable` says why optimizer files that should be
    there are not, where only weights were asked for.
    """

    folder: Path
    pp: int
    tp: int
    zero3: bool
    models: Sequence[Sequence[Stored]]
    ranks: Sequence[Sequence[Rank]]
    layers: Mapping[tuple[int, int], Stored]
    experts: Mapping[tuple[int, int, int], Stored]
    expert_optimizers: Mapping[tuple[int, int], Stored]
    unusable: str = ""

    def all(self) -> list[Stored]:
        many = [*self.models, *self.ranks, self.layers.values(), self.experts.values(), self.expert_optimizers.values()]
        return [file for files in many for file in files]


def tag_folder(path: Path, marker: str = "latest") -> Path | None:
    """The folder that `latest` names, if `path` is a save directory."""
    latest = path / marker
    if not latest.is_file():
        return None
    tag = latest.read_text(errors="replace").strip()
    if not tag or "/" in tag or "\0" in tag or tag in (".", "..") or len(os.fsencode(tag)) > 255:
        raise FormatError(f"{latest} should name a folder beside it, but says {tag!r:.80}")
    return path / tag


def is_checkpoint(path: Path) -> bool:
    """Whether the directory is DeepSpeed's: it has `latest`, or files named as DeepSpeed names them."""
    if tag_folder(path) is not None:
        return True
    return any(p.fullmatch(file.name) for file in path.iterdir() for p in (_OPTIM, _MODEL, _LAYER, _EXPERT, _EXPP))


def _no_doubles(folder: Path, names: Sequence[str]) -> None:
    """Raise FormatError where two names say the same, such as mp_rank_0 and mp_rank_00."""
    seen: dict[str, str] = {}
    for name in names:
        if any(pattern.fullmatch(name) for pattern in (_OPTIM, _MODEL, _LAYER, _EXPERT, _EXPP)):
            plain = re.sub(r"\d+", lambda digits: str(int(digits[0])), name)
            if plain in seen:
                raise FormatError(f"{folder} has {seen[plain]} and {name}, which are one rank's: remove the wrong one")
            seen[plain] = name


def open_files(folder: Path, weights_only: bool = False) -> Files:
    """The files of one tag; with `weights_only` those of the optimizer only for the masters in them.

    Raises FormatError, naming the file, where one is missing, or is of another run or step. With `weights_only` that of
    an optimizer file is not raised, unless it is ZeRO-3's, which keeps the weights nowhere else.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    _no_doubles(folder, names)
    model = {(_int(m["dp"]), int(m["mp"])): name for name in names if (m := _MODEL.fullmatch(name))}
    optim = {(int(m["dp"]), int(m["mp"])): name for name in names if (m := _OPTIM.fullmatch(name))}
    _one_family(folder, model)
    zero3 = any(dp is not None for dp, _ in model)
    first = (0 if zero3 or (not model and _zero3(folder, optim)) else None), 0
    if first not in model:
        raise FormatError(f"{folder}/{_model_name(*first)} is missing; without it nothing says what the buffers hold")
    models = {at: open_stored(folder / name) for at, name in model.items()}
    said = models[first].state
    layers = {(int(m["layer"]), int(m["tp"] or 0)): name for name in names if (m := _LAYER.fullmatch(name))}
    pp, tp = _degrees(said, len({mp for _, mp in model}), len({tp for _, tp in layers}) if layers else None)
    world = _world(said, len({dp for dp, _ in optim}))
    for mp in range(pp * tp):
        for dp in range(world) if zero3 else (None,):
            if (dp, mp) not in models:
                ranks_said = f"{world} data-parallel ranks, " if zero3 else ""
                raise FormatError(
                    f"{folder}/{_model_name(dp, mp)} is missing: the run had {ranks_said}{pp} pipeline stages and "
                    f"{tp} tensor-parallel ranks, by {models[first].name}"
                )
    facts = Facts(folder)
    for (dp, mp), found in models.items():
        if mp >= pp * tp or (dp or 0) >= world:
            raise FormatError(
                f"{folder} has {found.name}, but {models[first].name} was written by a run of {world} data-parallel "
                f"times {pp * tp} model-parallel ranks; it belongs to another run, or to an earlier save on more ranks"
            )
        for key in _SAME:
            facts.state(found.name, key, found.state.get(key))
    experts = {(int(m["layer"] or 0), int(m["expert"]), int(m["mp"])): n for n in names if (m := _EXPERT.fullmatch(n))}
    expp = {(int(m["ep"]), int(m["mp"])): name for name in names if (m := _EXPP.fullmatch(name))}
    for ep, mp in sorted(expp) if not weights_only else ():
        if ep and (ep - 1, mp) not in expp:
            raise FormatError(
                f"{folder}/expp_rank_{ep - 1}_mp_rank_{mp:02d}_optim_states.pt is missing, but {expp[ep, mp]} is there"
            )
    unusable = ""
    try:
        _one_save(folder, names)
        ranks = _optimizers(folder, optim, world, pp * tp, models[first].name)
    except (FormatError, OSError) as error:
        if not zero3 and not weights_only and isinstance(error, FormatError):
            raise type(error)(f"{error}. weights_only opens the module's weights, without the optimizer") from error
        if zero3 or not weights_only:
            raise
        ranks, unusable = [[] for _ in range(pp * tp)], str(error)
    return Files(
        folder,
        pp,
        tp,
        zero3,
        [[models[dp, mp] for dp in (range(world) if zero3 else (None,))] for mp in range(pp * tp)],
        ranks,
        {at: open_stored(folder / layers[at]) for at in sorted(layers)},
        {at: open_stored(folder / experts[at]) for at in sorted(experts)},
        {at: open_stored(folder / expp[at]) for at in sorted(expp)} if not weights_only else {},
        unusable,
    )


def _one_save(folder: Path, names: Sequence[str]) -> None:
    if len({bool(m["bf16"]) for name in names if (m := _OPTIM.fullmatch(name))}) > 1:
        raise FormatError(
            f"{folder} has optimizer files with and without the prefix bf16_: two saves with different settings are in "
            "one folder. Remove the files of the older one"
        )


def _one_family(folder: Path, model: Mapping[tuple[int | None, int], str]) -> None:
    if len({dp is None for dp, _ in model}) > 1:
        raise FormatError(
            f"{folder} has model states of ZeRO-3 ({_model_name(0, 0)}) and of another stage ({_model_name(None, 0)}): "
            "two saves with different settings are in one folder. Remove the files of the older one"
        )


def _zero3(folder: Path, optim: Mapping[tuple[int, int], str]) -> bool:
    """Whether the optimizer files are ZeRO-3's, which says how the model states that are missing were called."""
    return any(
        "fp32_flat_groups" in open_stored(folder / name).state.get("optimizer_state_dict", ())
        for name in optim.values()
    )


def _degrees(said: Mapping[str, Any], found: int, layers_tp: int | None) -> tuple[int, int]:
    """Pipeline stages and tensor-parallel ranks, as the file says, or older ones let it be seen from their number."""
    degrees = known(said.get("checkpoint_parallel_dimensions"))
    if isinstance(degrees, dict):
        return int(degrees["pp_degree"]), int(degrees["tp_degree"])
    ranks = known(said.get("mp_world_size"))
    ranks = ranks if isinstance(ranks, int) and not isinstance(ranks, bool) else found
    tp = layers_tp or ranks
    return max(1, ranks // tp), tp


def _optimizers(
    folder: Path, optim: Mapping[tuple[int, int], str], world: int, mp_world: int, model: str
) -> list[list[Rank]]:
    if not optim:
        return [[] for _ in range(mp_world)]
    prefix = "bf16_" if next(iter(optim.values())).startswith("bf16_") else ""
    for mp in range(mp_world):
        for dp in range(world):
            if (dp, mp) not in optim:
                raise FormatError(
                    f"{folder}/{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt is missing: the run had "
                    f"{world} data-parallel ranks, and each holds a part of every parameter group"
                )
    for dp, mp in sorted(optim):
        if dp >= world or mp >= mp_world:
            raise FormatError(
                f"{folder} has optimizer files of {len({d for d, _ in optim})} ranks, but {model} was written by "
                f"{world}; {optim[dp, mp]} belongs to another run, or to an earlier save on more ranks"
            )
    ranks = [[_open_rank(dp, folder / optim[dp, mp], world) for dp in range(world)] for mp in range(mp_world)]
    _refuse_copies(ranks)
    return ranks


def _refuse_copies(ranks: Iterable[Sequence[Rank]]) -> None:
    """Raise FormatError where a rank's file is a copy of another's: no two ranks have the same part of the masters.

    Checksums tell which two to compare. Parts of padding alone are zeros in several files.
    """
    first_with: dict[tuple[tuple[int, int], ...], Rank] = {}
    for rank in itertools.chain(*ranks):
        checksums = rank.file.checksums()
        other = first_with.setdefault(checksums, rank)
        if checksums and other is not rank and _same_masters(rank, other):
            raise FormatError(
                f"{rank.file.path} holds the same masters as {other.name}, bit for bit, though each rank has a part of "
                "its own: one is a copy under the wrong name. Put that rank's own file in its place"
            )


def _same_masters(rank: Rank, other: Rank) -> bool:
    """Whether two files have equal masters, which are not all zero."""
    mine, others = ([file.file.read(m.key, Box.whole(m.shape)) for m in file.masters] for file in (rank, other))
    equal = len(mine) == len(others) and all(map(same_bits, mine, others))
    return equal and any(np.any(array) for array in mine)


def _world(said: Mapping[str, Any], found: int) -> int:
    world = known(said.get("dp_world_size"))
    return world if isinstance(world, int) and not isinstance(world, bool) else max(found, 1)


def open_stored(path: Path) -> Stored:
    file = TorchFile(path)
    return Stored(file, expect_dict(file.tree, path, "the file"))


def _open_rank(dp: int, path: Path, world: int) -> Rank:
    stored = open_stored(path)
    state = expect_dict(stored.state.get("optimizer_state_dict"), path, "optimizer_state_dict")
    for masters, base in (
        ("single_partition_of_fp32_groups", "base_optimizer_state"),
        ("fp32_flat_groups", "optimizer_state_dict"),
    ):
        if masters in state and base in state:
            break
    else:
        raise FormatError(
            f"{path} has neither the masters and base_optimizer_state of ZeRO-1 and 2 nor the fp32_flat_groups of "
            f"ZeRO-3, but {', '.join(map(str, state)) or 'nothing'}: another optimizer wrapper wrote it, which is not "
            "read, or it is no optimizer file"
        )
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list) else [counts or world]
    if any(not count or world % count for count in counts) or max(counts) != world:
        raise FormatError(
            f"{path} is of {counts} ranks, by its partition_count for each group, but there are files of {world}: it "
            "is of another run or world size, or of a sharding over some of the ranks, which is not read"
        )
    return Rank(stored.file, state, dp)


def _model_name(dp: int | None, mp: int) -> str:
    return f"{'' if dp is None else f'zero_pp_rank_{dp}_'}mp_rank_{mp:02d}_model_states.pt"


def _int(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def expect_dict(value: Any, path: Path, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{path}: {what} should be a dict, but is {what_is(value)}")
    return value
