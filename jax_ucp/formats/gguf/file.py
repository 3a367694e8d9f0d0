"""A file of GGUF, as an array source of its tensors.

Their types by number: `ggml.h` of ggml 0.25, less Q8_1 and Q8_K.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jax_ucp.arrays.extents import ExtentTable, StoredArray, StoredFile, naming
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import FileRange
from jax_ucp.formats.gguf.header import GGUFTensor, aligned, read_head
from jax_ucp.formats.quantized.ggml import TYPES

# Types whose elements are numbers by themselves.
PLAIN: Mapping[int, type] = {
    0: np.float32, 1: np.float16, 24: np.int8, 25: np.int16, 26: np.int32, 27: np.int64,
    28: np.float64, 30: ml_dtypes.bfloat16,
}  # fmt: skip

_DEQUANTIZED = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 20: "IQ4_NL", 39: "MXFP4"}
_DEQUANTIZED |= {10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 23: "IQ4_XS"}
_DEQUANTIZED |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"}
_DEQUANTIZED |= {29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"}

# Types whose elements are in blocks: the name, the elements of a block, and its bytes.
IN_BLOCKS: Mapping[int, tuple[str, int, int]] = {
    **{n: (name, TYPES[name].elements, TYPES[name].nbytes) for n, name in _DEQUANTIZED.items()},
    41: ("Q1_0", 128, 18),
}

# How files are called by the type of most of their tensors: `llama_ftype` in `llama.h`.
FILE_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
    39: "NVFP4", 40: "Q1_0",
}  # fmt: skip


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
            # tensors, each at the next aligned byte, fill the file
            at, alignment = 0, self.head.alignment
            for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
                begin = aligned(at, alignment)
                if tensor.offset != begin:
                    raise FormatError(
                        f"{tensor.name!r:.80} should begin at byte {begin} of the tensors, the next"
                        f" one that is free and aligned to {alignment}, and begins at byte"
                        f" {tensor.offset}"
                    )
                at = begin + infos[tensor.name].nbytes
            end = self.head.data + at if at else min(self.head.data, data.size)
            if end > data.size:
                raise CorruptData(
                    f"the file has {data.size} bytes, but its head describes {end}: it is cut"
                    " short, its download has not ended"
                )
            if data.size > aligned(end, alignment):  # padding may follow
                raise FormatError(
                    f"behind its tensors, which end at byte {end}, the file has"
                    f" {data.size - end} bytes more"
                )
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
