"""The files of ranks in a folder: `{model,optim,extra_state}_world_size_N_rank_R.pt` of verl, or
`ITEM_R.pt` for items of any name.

Facts: `verl/utils/checkpoint/fsdp_checkpoint_manager.py` of verl 0.2 to 0.7,
`skyrl/backends/skyrl_train/distributed/fsdp_strategy.py` of SkyRL; `checkpoint_layout.py` and
`distributed_metadata.py` of torch_checkpointing 0.1.1, whose `metadata.pkl` says which rank wrote
which item, and in what file if not in its own; `checkpoint_writer.py` of
`torch.distributed.checkpoint._experimental` in torch 2.13, whose one item is `checkpoint`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_ucp.codecs.torch_file import has_dtensors
from jax_ucp.codecs.unpickle import load
from jax_ucp.errors import FormatError, naming
from jax_ucp.files.path import FilePath
from jax_ucp.formats.nested import as_dict
from jax_ucp.formats.weight_files import read_json
from jax_ucp.states.optimizer_dicts import Steps

FSDP_CONFIG = "fsdp_config.json"
METADATA = "metadata.pkl"
# Kinds of verl's, and of others by the same names.
MODEL, OPTIM = "model", "optim"
WHOLE = "checkpoint"  # the item that has all others
_ITEM = re.compile(r"([\w.-]+)_(0|[1-9]\d{0,6})\.pt")
_NAME = re.compile(r"(model|optim|extra_state)_world_size_([1-9]\d{0,6})_rank_(0|[1-9]\d{0,6})\.pt")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of a save by kind, in the order of ranks; `fsdp_config` is what its writer says.

    `states` are the kinds that the model and its optimizer are in; without them, those that have
    DTensors, or all of one rank. Of other kinds each rank's file is its own.
    """

    folder: FilePath
    world_size: int
    names: Mapping[str, Sequence[str]]
    writer: str
    states: Sequence[str] = ()
    fsdp_config: Mapping[str, Any] = field(default_factory=dict)

    def steps_of(self, kind: str) -> Steps:
        """Where the tree in the files of a kind is in that of the save."""
        return () if [*self.names] == [WHOLE] else (kind,)


def of_rank(name: str, rank: int) -> str:
    """The file of another rank that has what this one has.

    >>> of_rank("model_world_size_2_rank_0.pt", 1), of_rank("model_0.pt", 1)
    ('model_world_size_2_rank_1.pt', 'model_1.pt')
    """
    return f"{name[: name.rindex('_')]}_{rank}.pt"


def is_rank_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def has_rank_files(folder: FilePath) -> bool:
    """Whether a folder has files of ranks. `ITEM_R.pt` may be of epochs too: they are of ranks if
    `metadata.pkl` lies beside them, or one has DTensors.
    """
    names = [child.name for child in folder.children()] if folder.is_dir() else []
    if any(map(is_rank_file, names)):
        return True
    firsts = [
        name for found in _by_item(names).values() for rank, name in found.items() if not rank
    ]
    return bool(firsts) and (METADATA in names or any(has_dtensors(folder / n) for n in firsts))


def rank_files(folder: FilePath) -> RankFiles:
    """The files of the one save in a folder. Raises FormatError if not all are there."""
    names = [child.name for child in folder.children()]
    return _named(folder) if any(map(is_rank_file, names)) else _items(folder, names)


def _by_item(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """The files by item and rank."""
    items: dict[str, dict[int, str]] = defaultdict(dict)
    for match in filter(None, map(_ITEM.fullmatch, names)):
        items[match[1]][int(match[2])] = match[0]
    return items


def _items(folder: FilePath, names: Collection[str]) -> RankFiles:
    items = _by_item(names)
    world_size = 1 + max(rank for found in items.values() for rank in found)
    written = _written(folder / METADATA) if METADATA in names else {}
    world_size = max([world_size, *(1 + max(ranks) for ranks in written.values())])
    for item in [*written, *items]:
        for rank in range(world_size):
            if rank not in items.get(item, ()):
                raise FormatError(
                    f"{folder / f'{item}_{rank}.pt'} is missing: each of {world_size} ranks wrote"
                    " one"
                )
    writer = "torch_checkpointing"
    if not written and [*items] == [WHOLE]:
        writer = "torch.distributed.checkpoint._experimental"
    in_order = {item: [found[rank] for rank in range(world_size)] for item, found in items.items()}
    return RankFiles(folder, world_size, in_order, writer)


def _written(path: FilePath) -> dict[str, list[int]]:
    """The ranks that wrote each item, as the `metadata.pkl` at the path has it. Raises FormatError
    where it is another file, or a rank wrote an item to another file than `ITEM_R.pt`.
    """
    with naming(path):
        items = as_dict(load(path.read_bytes(), {})).get("metadata")
        if not isinstance(items, dict):
            raise FormatError("it does not say which rank wrote which item")
        ranks: dict[str, list[int]] = {}
        for item, about in items.items():
            layouts = as_dict(as_dict(about).get("rank_to_layout_info"))
            for rank, layout in layouts.items():
                if type(rank) is not int or rank < 0:
                    raise FormatError(f"{item!r:.60} is of a rank {rank!r:.20}")
                file = as_dict(layout).get("file_path") if layout else f"{item}_{rank}.pt"
                if file != f"{item}_{rank}.pt":
                    raise FormatError(
                        f"rank {rank} wrote {item} to {file!r:.80}, and only {item}_{rank}.pt is"
                        " read: save it without a layout of its own"
                    )
            if layouts:
                ranks[str(item)] = [*layouts]
    return ranks


def _named(folder: FilePath) -> RankFiles:
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
    writer = "SkyRL" if "fsdp_strategy" in config else "verl or SkyRL"
    writer = "verl" if "FSDP_version" in config else writer
    return RankFiles(folder, world_size, in_order, writer, (MODEL, OPTIM), config)
