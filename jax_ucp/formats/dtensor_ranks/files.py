"""The files of ranks in a folder: `{model,optim,extra_state}_world_size_N_rank_R.pt`.

Facts: `verl/utils/checkpoint/fsdp_checkpoint_manager.py` of verl 0.2 to 0.7, and
`skyrl/backends/skyrl_train/distributed/fsdp_strategy.py` of SkyRL.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.weight_files import read_json

FSDP_CONFIG = "fsdp_config.json"
_NAME = re.compile(r"(model|optim|extra_state)_world_size_([1-9]\d{0,6})_rank_(0|[1-9]\d{0,6})\.pt")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of a save by kind, in the order of ranks; `fsdp_config` is what its writer says."""

    folder: FilePath
    world_size: int
    names: Mapping[str, Sequence[str]]
    fsdp_config: Mapping[str, Any]

    @property
    def writer(self) -> str:
        if "FSDP_version" in self.fsdp_config:
            return "verl"
        return "SkyRL" if "fsdp_strategy" in self.fsdp_config else "verl or SkyRL"


def is_rank_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def has_rank_files(folder: FilePath) -> bool:
    return folder.is_dir() and any(is_rank_file(child.name) for child in folder.children())


def rank_files(folder: FilePath) -> RankFiles:
    """The files of the one save in a folder. Raises FormatError if not all are there."""
    ranks: dict[int, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for child in folder.children():
        if match := _NAME.fullmatch(child.name):
            kind, world_size, rank = match[1], int(match[2]), int(match[3])
            ranks[world_size][kind][rank] = child.name
    if len(ranks) > 1:
        sizes = " and of ".join(map(str, sorted(ranks)))
        names = [name for kinds in ranks.values() for name in next(iter(kinds.values())).values()]
        raise FormatError(
            f"{folder} has files of {sizes} ranks, such as {names[0]} and {names[-1]}: two saves"
            " lie in it. Put those that are not meant into another folder"
        )
    ((world_size, of_kind),) = ranks.items()
    in_order: dict[str, Sequence[str]] = {}
    for kind, found in of_kind.items():
        if missing := [rank for rank in range(world_size) if rank not in found]:
            name = f"{kind}_world_size_{world_size}_rank_{missing[0]}.pt"
            raise FormatError(
                f"{folder / name} is missing: each of {world_size} ranks wrote one, and"
                f" {len(missing)} are not there"
            )
        if extra := sorted(found.keys() - set(range(world_size))):
            raise FormatError(
                f"{folder / found[extra[0]]} is of rank {extra[0]}, but the ranks are 0 to"
                f" {world_size - 1}"
            )
        in_order[kind] = [found[rank] for rank in range(world_size)]
    if "model" not in in_order:
        raise FormatError(
            f"{folder} has no model_world_size_{world_size}_rank_0.pt: the weights of the model"
            " were not saved, or not copied"
        )
    path = folder / FSDP_CONFIG
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config, dict):
        raise FormatError(f"{path} should be a JSON object")
    if config.get("world_size", world_size) != world_size:
        raise FormatError(
            f"{path} says that {config['world_size']!r:.20} ranks saved, but the files are of"
            f" {world_size}: they are of two saves"
        )
    return RankFiles(folder, world_size, in_order, config)
