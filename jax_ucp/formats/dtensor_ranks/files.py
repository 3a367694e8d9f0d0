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
from collections.abc import Iterable, Mapping, Sequence
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
_ITEM = re.compile(r"(?P<item>[\w.-]+)_(?P<rank>0|[1-9]\d{0,6})\.pt")
_NAME = re.compile(
    r"(?P<item>model|optim|extra_state)_world_size_(?P<world_size>[1-9]\d{0,6})"
    r"_rank_(?P<rank>0|[1-9]\d{0,6})\.pt"
)
_ByRank = dict[str, dict[int, str]]  # the files of each item by rank


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of a save by item, in the order of ranks.

    `states` are the items that the model and its optimizer are in. If it is empty, they are the
    items that have DTensors, or all items if one rank wrote the save. Any other item is a file of
    each rank's own. `fsdp_config` is the content of `fsdp_config.json`.
    """

    folder: FilePath
    world_size: int
    names: Mapping[str, Sequence[str]]
    writer: str
    states: Sequence[str] = ()
    fsdp_config: Mapping[str, Any] = field(default_factory=dict)

    def steps_of(self, kind: str) -> Steps:
        """The path in the tree of the whole save at which the trees in an item's files belong."""
        return () if [*self.names] == [WHOLE] else (kind,)


def of_rank(name: str, rank: int) -> str:
    """The name of the file in which another rank has the same item.

    >>> of_rank("model_world_size_2_rank_0.pt", 1), of_rank("model_0.pt", 1)
    ('model_world_size_2_rank_1.pt', 'model_1.pt')
    """
    return f"{name[: name.rindex('_')]}_{rank}.pt"


def is_rank_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def has_rank_files(folder: FilePath) -> bool:
    """Whether a folder has files of ranks. `ITEM_R.pt` may also count epochs: such files are of
    ranks if `metadata.pkl` lies beside them, or one of them has DTensors.
    """
    names = [child.name for child in folder.children()] if folder.is_dir() else []
    if any(map(is_rank_file, names)):
        return True
    firsts = [files[0] for files in _by_rank(names, _ITEM).values() if 0 in files]
    return bool(firsts) and (METADATA in names or any(has_dtensors(folder / n) for n in firsts))


def rank_files(folder: FilePath) -> RankFiles:
    """The files of the one save in a folder. Raises FormatError if not all are there."""
    names = [child.name for child in folder.children()]
    if any(map(is_rank_file, names)):
        return _of_verl(folder, names)
    items = _by_rank(names, _ITEM)
    written = _written(folder / METADATA) if METADATA in names else {}
    world_size = 1 + max(rank for ranks in (*items.values(), *written.values()) for rank in ranks)
    every = {item: items.get(item, {}) for item in (*items, *written)}
    writer = "torch_checkpointing"
    if not written and [*items] == [WHOLE]:
        writer = "torch.distributed.checkpoint._experimental"
    return RankFiles(folder, world_size, _in_order(folder, every, world_size), writer)


def _by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> _ByRank:
    files: _ByRank = defaultdict(dict)
    for match in filter(None, map(pattern.fullmatch, names)):
        files[match["item"]][int(match["rank"])] = match[0]
    return files


def _in_order(folder: FilePath, items: _ByRank, world_size: int) -> dict[str, Sequence[str]]:
    """The files of each item in the order of ranks. Raises FormatError unless there is one of each
    rank.
    """
    for item, files in items.items():
        if missing := [rank for rank in range(world_size) if rank not in files]:
            name = of_rank(next(iter(files.values()), f"{item}_0.pt"), missing[0])
            raise FormatError(
                f"{folder / name} is missing: each of {world_size} ranks wrote one, and"
                f" {len(missing)} are not there"
            )
        if (last := max(files)) >= world_size:
            raise FormatError(
                f"{folder / files[last]} is of rank {last}, but the ranks are 0 to {world_size - 1}"
            )
    return {item: [files[rank] for rank in range(world_size)] for item, files in items.items()}


def _written(path: FilePath) -> dict[str, list[int]]:
    """The ranks that wrote each item, by the `metadata.pkl` at the path. Raises FormatError if this
    is another file, or if a rank wrote an item to another file than `ITEM_R.pt`.
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


def _of_verl(folder: FilePath, names: Sequence[str]) -> RankFiles:
    """The files of verl or SkyRL, whose names have the number of ranks."""
    matches = filter(None, map(_NAME.fullmatch, names))
    first_of_size = {int(match["world_size"]): match[0] for match in matches}
    if len(first_of_size) > 1:
        sizes = sorted(first_of_size)
        raise FormatError(
            f"{folder} has files of {' and of '.join(map(str, sizes))} ranks, such as"
            f" {first_of_size[sizes[0]]} and {first_of_size[sizes[-1]]}: two saves lie in it. Put"
            " those that are not meant into another folder"
        )
    (world_size,) = first_of_size
    in_order = _in_order(folder, _by_rank(names, _NAME), world_size)
    if MODEL not in in_order:
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
