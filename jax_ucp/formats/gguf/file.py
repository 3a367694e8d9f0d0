"""A file of GGUF, as an array source of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jax_ucp.arrays.extents import ExtentTable, StoredArray, StoredFile, naming
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import FileRange
from jax_ucp.formats.gguf.header import GGUFTensor, Head, read_head
from jax_ucp.formats.gguf.types import IN_BLOCKS, PLAIN


class GGUFFile(ExtentTable):
    """The table of a file's tensors, row-major: with the axes of GGUF turned round.

    Tensors in blocks are arrays of bytes; `in_blocks` has their types by name. Raises FormatError,
    naming the file, or CorruptData where it is cut short.
    """

    def __init__(self, path: FilePath):
        self.path = path
        data = FileRange(path, file=path.file())
        with naming(path):
            self.head = read_head(data)
            tensors = self.head.tensors
            infos = {tensor.name: _info(tensor) for tensor in tensors}
            _require_tiled(self.head, infos, data.size)
        file = StoredFile(path, data)
        begin = self.head.data
        super().__init__(infos, {t.name: StoredArray(file, begin + t.offset) for t in tensors})
        types = {tensor.name: tensor.type for tensor in tensors}
        self.in_blocks = {n: IN_BLOCKS[type][0] for n, type in types.items() if type in IN_BLOCKS}


def _info(entry: GGUFTensor) -> ArrayInfo:
    """The array of a tensor; of one in blocks, that of the bytes of its rows."""
    shape = tuple(reversed(entry.lengths))
    label = f"{entry.name!r:.80}"
    if entry.type not in PLAIN and entry.type not in IN_BLOCKS:
        raise FormatError(f"{label} has the type {entry.type}, which no file of GGUF has")
    if any(n < 1 for n in shape):
        raise FormatError(f"{label} has the shape {list(shape)}")
    if entry.type in PLAIN:
        return ArrayInfo(shape, np.dtype(PLAIN[entry.type]))
    type, elements, nbytes = IN_BLOCKS[entry.type]
    if not shape or shape[-1] % elements:
        raise FormatError(
            f"{label} of {type} has the shape {list(shape)}, and its rows are not whole blocks of"
            f" {elements}"
        )
    rows = (*shape[:-1], shape[-1] // elements * nbytes)
    return ArrayInfo(rows, np.dtype(np.uint8))


def _require_tiled(head: Head, infos: Mapping[str, ArrayInfo], size: int) -> None:
    """Raise unless tensors, each at the next aligned byte, fill a file of so many bytes."""
    at = 0
    for tensor in sorted(head.tensors, key=lambda tensor: tensor.offset):
        begin = _aligned(at, head.alignment)
        if tensor.offset != begin:
            raise FormatError(
                f"{tensor.name!r:.80} should begin at byte {begin} of the tensors, the next one"
                f" that is free and aligned to {head.alignment}, and begins at byte {tensor.offset}"
            )
        at = begin + infos[tensor.name].nbytes
    end = head.data + at if at else min(head.data, size)
    if end > size:
        raise CorruptData(
            f"the file has {size} bytes, but its head describes {end}: it is cut short, its"
            " download has not ended"
        )
    if size > _aligned(end, head.alignment):  # padding may follow
        raise FormatError(
            f"behind its tensors, which end at byte {end}, the file has {size - end} bytes more"
        )


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
