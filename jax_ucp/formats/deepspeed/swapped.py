"""Masters and optimizer states that ZeRO-3 keeps on NVMe: files of raw elements beside the rest.

The optimizer file of a rank has empty tensors for them; `ds_id`, pickled with each, is the name of
its file in `offloaded_tensors/rank<N>/`, which ends with the padding that aligned writes need.
Gradients are not saved, sub-groups that are too small to swap are in the optimizer file.

Facts: `save_checkpoint` in `runtime/engine.py`, `runtime/swap_tensor/optimizer_utils.py` of
DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import FileRange
from jax_ucp.formats.deepspeed.files import Files, Rank, SwappedTensor
from jax_ucp.formats.deepspeed.zero import param_shapes
from jax_ucp.formats.nested import as_dict
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.layout.box import Box
from jax_ucp.sources.protocol import ArrayInfo, ArraySource

_FOLDER = "offloaded_tensors"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_ELEMENTS = "elements"


class SwapFile(ArraySource):
    """The elements in a swap file, as its one array."""

    def __init__(self, path: FilePath, info: ArrayInfo):
        self._bytes, self._info = FileRange(path), info
        if self._bytes.size < info.nbytes:
            raise FormatError(
                f"{path} has {self._bytes.size} bytes, where the partition that was swapped out to"
                f" it has {info.nbytes}: it was cut, or is of another run"
            )

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {_ELEMENTS: self._info}

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        itemsize = self._info.dtype.itemsize
        starts = [box.start[0] * itemsize for box in boxes]
        self._bytes.read_into(list(zip(starts, outs, strict=True)))


@dataclass(frozen=True)
class Swapped:
    """The files with swapped tensors in the place of empty ones, and what these are."""

    files: Files
    sources: Mapping[str, SwapFile]
    emptied: Sequence[str]


def with_swapped(files: Files) -> Swapped:
    """Raises FormatError, naming the file, where one that an empty tensor needs is missing."""
    if not files.zero3 or not any(_is_empty(tensor) for _, tensor in _tensors(files)):
        return Swapped(files, {}, [])
    if files.tp > 1 or any(rank.state.get("ds_zero_partition_groups") for rank in files.all_ranks):
        raise FormatError(
            f"{files.folder} has tensors that were swapped out to NVMe by a run of several tensor-"
            " or expert-parallel ranks, of which nothing says whose folder is whose: not read"
        )
    sources: dict[str, SwapFile] = {}
    emptied: list[str] = []
    groups = param_shapes(files.models[0][0], ())
    ranks = files.ranks[0]
    lengths = [
        sum(-(-math.prod(shape) // len(ranks)) for shape in shapes.values()) for shapes in groups
    ]

    def filled(rank: Rank, index: int, tensor: Any) -> Any:
        if not _is_empty(tensor) or not lengths[index]:
            return tensor
        name = f"{_FOLDER}/rank{rank.dp:02d}/{tensor.attributes['ds_id']}.tensor.swp"
        info = ArrayInfo((lengths[index],), tensor.dtype)
        sources[name] = SwapFile(_existing(files.folder, name, rank), info)
        emptied.append(rank.key(tensor))
        return SwappedTensor(
            _ELEMENTS, info.shape, info.dtype, tensor.storage, 0, (1,), tensor.attributes, name
        )

    new_ranks = [_filled(rank, filled) for rank in ranks]
    return Swapped(replace(files, ranks=[new_ranks]), sources, emptied)


def _filled(rank: Rank, filled: Any) -> Rank:
    """A rank whose masters and states are filled, by a function of sub-group and tensor."""
    optimizer = as_dict(rank.state["optimizer_state_dict"])
    states = {
        index: {name: filled(rank, index, value) for name, value in as_dict(state).items()}
        for index, state in as_dict(optimizer.get("state")).items()
    }
    masters = [filled(rank, index, tensor) for index, tensor in enumerate(rank.masters)]
    changed = {"fp32_flat_groups": masters, "optimizer_state_dict": {**optimizer, "state": states}}
    return replace(rank, state={**rank.state, **changed})


def _tensors(files: Files) -> Iterator[tuple[Rank, Any]]:
    for rank in files.all_ranks:
        yield from ((rank, tensor) for tensor in rank.masters)


def _is_empty(tensor: Any) -> bool:
    if not isinstance(tensor, StoredTensor) or tensor.shape != (0,):
        return False
    name = tensor.attributes.get("ds_id")
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


def _existing(folder: FilePath, name: str, rank: Rank) -> FilePath:
    path = folder
    for part in name.split("/"):
        path = path / part
    if not path.is_file():
        raise FormatError(
            f"{path} is missing: {rank.name} has an empty tensor where it was swapped out to NVMe."
            f" DeepSpeed copies these files to {_FOLDER} when it saves"
        )
    return path
