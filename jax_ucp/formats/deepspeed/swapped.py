"""Masters and optimizer states that ZeRO-3 keeps on NVMe: files of raw elements beside the rest.

The optimizer file of a rank has empty tensors for them; `ds_id`, pickled with each, is the name of
its file in `offloaded_tensors/rank<N>/`, which ends with the padding that aligned writes need.
Gradients are not saved, sub-groups that are too small to swap are in the optimizer file.

Facts: `save_checkpoint` in `runtime/engine.py`, `runtime/swap_tensor/optimizer_utils.py` of
DeepSpeed 0.19.8.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
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
_ALIGNED = 1024  # AIO_ALIGNED_BYTES, `runtime/swap_tensor/utils.py`


class SwapFile(ArraySource):
    """The elements in a swap file, as its one array."""

    def __init__(self, path: FilePath, info: ArrayInfo):
        size = path.size()
        if size < info.nbytes or size % _ALIGNED not in (0, info.nbytes % _ALIGNED):
            raise FormatError(
                f"{path} has {size} bytes, where the partition that was swapped out to it has"
                f" {info.nbytes}, or up to a multiple of {_ALIGNED}: it was cut or changed, or is"
                " of another run"
            )
        self._bytes, self._info = FileRange(path), info

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


def with_swapped(files: Files, weights_only: bool) -> Swapped:
    """Raises FormatError, naming the file, where one that an empty tensor needs is missing."""
    if not files.zero3 or not any(map(_has_empty, files.all_ranks)):
        return Swapped(files, {}, [])
    if files.tp > 1 or any(rank.state.get("ds_zero_partition_groups") for rank in files.all_ranks):
        raise FormatError(
            f"{files.folder} has tensors that were swapped out to NVMe by a run of several tensor-"
            " or expert-parallel ranks, of which nothing says whose folder is whose: not read"
        )
    lengths = _partition_lengths(files)
    filled = [_Filling(files.folder, rank, lengths) for rank in files.ranks[0]]
    ranks = [filling.rank_filled(weights_only) for filling in filled]
    sources = dict(itertools.chain.from_iterable(filling.sources.items() for filling in filled))
    emptied = itertools.chain.from_iterable(filling.emptied for filling in filled)
    return Swapped(replace(files, ranks=[ranks]), sources, list(emptied))


def _partition_lengths(files: Files) -> list[int]:
    """How many elements a rank has of each sub-group."""
    count = len(files.ranks[0])
    groups = param_shapes(files.models[0][0], ())
    return [sum(-(-math.prod(n) // count) for n in shapes.values()) for shapes in groups]


class _Filling:
    """Fills the empty tensors of one rank; `lengths` are those of its sub-groups' partitions."""

    def __init__(self, folder: FilePath, rank: Rank, lengths: Sequence[int]):
        self._folder, self._rank, self._lengths = folder, rank, lengths
        self.sources: dict[str, SwapFile] = {}
        self.emptied: list[str] = []

    def rank_filled(self, weights_only: bool) -> Rank:
        state = self._rank.state
        masters = [self._filled(index, value) for index, value in enumerate(self._rank.masters)]
        if weights_only:
            return replace(self._rank, state={**state, "fp32_flat_groups": masters})
        optimizer = as_dict(state["optimizer_state_dict"])
        states = {
            index: {name: self._filled(index, value) for name, value in as_dict(group).items()}
            for index, group in as_dict(optimizer.get("state")).items()
        }
        optimizer = {**optimizer, "state": states}
        state = {**state, "fp32_flat_groups": masters, "optimizer_state_dict": optimizer}
        return replace(self._rank, state=state)

    def _filled(self, index: int, tensor: Any) -> Any:
        if not _is_empty(tensor) or not self._lengths[index]:
            return tensor
        name = f"{_FOLDER}/rank{self._rank.dp:02d}/{tensor.attributes['ds_id']}.tensor.swp"
        info = ArrayInfo((self._lengths[index],), tensor.dtype)
        self.sources[name] = SwapFile(_existing(self._folder, name, self._rank), info)
        self.emptied.append(self._rank.key(tensor))
        return SwappedTensor(
            _ELEMENTS, info.shape, info.dtype, tensor.storage, 0, (1,), tensor.attributes, name
        )


def _has_empty(rank: Rank) -> bool:
    return any(map(_is_empty, rank.masters))


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
