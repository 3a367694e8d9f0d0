"""MXFP4 as gpt-oss is published: `_blocks` of 16 bytes, each with 32 codes, and `_scales`, an
exponent for each block.

Rule: fp4 * 2 ** (scale - 127), which is exact in bfloat16. Source: `convert_moe_packed_tensors` in
transformers 5.23 `integrations/mxfp4.py`, whose layout the result has: inputs before outputs, the
other way round than the blocks. An exponent of 255 is NaN by the OCP's specification, and a number
beyond all others there; here it is refused.

F4 of safetensors has the same elements, as numbers without a scale: two E2M1 codes are in a byte,
the first in its low half, as in torch's `float4_e2m1fn_x2`, which safetensors writes as F4. No
library writes F6, and nothing says in which order its bits are: it is refused.
"""

from __future__ import annotations

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid, Transposed, in_bytes
from jax_ucp.formats.quantized.bits import FP4, Packing
from jax_ucp.formats.quantized.stored import StoredWeight

_BYTES = 16


def blocks(stored: StoredWeight) -> Dequantizer:
    stored.require_only("codes", "scales")
    shape = stored.info("codes").shape
    if len(shape) < 3 or shape[-1] != _BYTES:
        label = stored.weight.parts["codes"]
        stored.fault(f"{label} has shape {list(shape)}, and should have rows of blocks of 16 bytes")
    grid = Grid((*(1 for _ in shape[:-2]), 2 * _BYTES))
    weight = (*shape[:-2], shape[-2] * 2 * _BYTES)
    parts = {
        "codes": stored.part("codes", shape, ("uint8",)),
        "scale": stored.scale("scales", shape[:-1], ("uint8", "float8_e8m0fnu")),
    }
    codes = Codes(Packing(4, 8, len(weight) - 1), table=FP4, row=_BYTES)
    return Transposed(Affine(stored.weight.scheme, weight, parts, codes, grid))


def fp4(stored: StoredWeight) -> Dequantizer:
    stored.require_only("codes")
    shape, part, codes = in_bytes(stored, FP4)
    return Affine("F4", shape, {"codes": part}, codes, Grid((1,) * len(shape)))
