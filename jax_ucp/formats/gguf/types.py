"""The types of GGUF's tensors by number: `ggml.h` of ggml 0.25, less Q8_1 and Q8_K."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

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
