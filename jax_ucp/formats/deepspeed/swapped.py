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
from dataclasses import replace
from typing import Any

from jax_ucp.arrays.extents import ExtentTable, StoredArray, StoredFile
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.errors import FormatError
from jax_ucp.files.ranges import FileRange
from jax_ucp.formats.deepspeed.files import Rank, SwappedTensor, TagFiles
from jax_ucp.formats.deepspeed.zero import param_shapes
from jax_ucp.formats.nested import as_dict

_FOLDER = "offloaded_tensors"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_ELEMENTS = "elements"
_ALIGNED = 1024  # AIO_ALIGNED_BYTES, `runtime/swap_tensor/utils.py`


def with_swapped(
    files: TagFiles, weights_only: bool
) -> tuple[TagFiles, dict[str, ExtentTable], list[str]]:
    """The files with swapped tensors in the place of empty ones, the swap files, and the keys of
    empty tensors. Raises FormatError, naming the file, where one that an empty tensor needs is
    missing.
    """
    masters = itertools.chain.from_iterable(rank.masters for rank in files.all_ranks)
    if not files.zero3 or not any(map(_is_empty, masters)):
        return files, {}, []
    if files.tp > 1 or any(rank.state.get("ds_zero_partition_groups") for rank in files.all_ranks):
        raise FormatError(
            f"{files.folder} has tensors that were swapped out to NVMe by a run of several tensor-"
            " or expert-parallel ranks, of which nothing says whose folder is whose: not read"
        )
    # how many elements a rank has of each sub-group
    count = len(files.ranks[0])
    groups = param_shapes(files.models[0][0], ())
    lengths = [sum(-(-math.prod(n) // count) for n in shapes.values()) for shapes in groups]
    sources: dict[str, ExtentTable] = {}
    emptied: list[str] = []

    def filled(rank: Rank, index: int, tensor: Any) -> Any:
        if not _is_empty(tensor) or not lengths[index]:
            return tensor
        name = f"{_FOLDER}/rank{rank.dp:02d}/{tensor.attributes['ds_id']}.tensor.swp"
        info = ArrayInfo((lengths[index],), tensor.dtype)
        path = files.folder / name
        if not path.is_file():
            raise FormatError(
                f"{path} is missing: {rank.name} has an empty tensor where it was swapped out to"
                f" NVMe. DeepSpeed copies these files to {_FOLDER} when it saves"
            )
        size = path.size()
        if size < info.nbytes or size % _ALIGNED not in (0, info.nbytes % _ALIGNED):
            raise FormatError(
                f"{path} has {size} bytes, where the partition that was swapped out to it has"
                f" {info.nbytes}, or up to a multiple of {_ALIGNED}: it was cut or changed, or is"
                " of another run"
            )
        elements = StoredArray(StoredFile(path, FileRange(path)), 0)
        sources[name] = ExtentTable({_ELEMENTS: info}, {_ELEMENTS: elements})
        emptied.append(rank.key(tensor))
        return SwappedTensor(
            _ELEMENTS, info.shape, info.dtype, tensor.storage, 0, (1,), tensor.attributes, name
        )

    ranks: list[Rank] = []
    for rank in files.ranks[0]:
        masters = [filled(rank, index, value) for index, value in enumerate(rank.masters)]
        state = {**rank.state, "fp32_flat_groups": masters}
        if not weights_only:
            optimizer = as_dict(rank.state["optimizer_state_dict"])
            states = {
                index: {name: filled(rank, index, value) for name, value in as_dict(group).items()}
                for index, group in as_dict(optimizer.get("state")).items()
            }
            state["optimizer_state_dict"] = {**optimizer, "state": states}
        ranks.append(replace(rank, state=state))
    return replace(files, ranks=[ranks]), sources, emptied


def _is_empty(tensor: Any) -> bool:
    if not isinstance(tensor, StoredTensor) or tensor.shape != (0,):
        return False
    name = tensor.attributes.get("ds_id")
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None
