"""F4 of safetensors: a dtype of less than a byte, whose elements are numbers without a scale.

Two E2M1 codes are in a byte, the first in its low half, as in torch's `float4_e2m1fn_x2`, which
safetensors writes as F4. No library writes F6, and nothing says in which order its bits are: it is
refused.
"""

from __future__ import annotations

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid
from jax_ucp.formats.quantized.bits import FP4, Packing
from jax_ucp.formats.quantized.stored import StoredWeight


def fp4(stored: StoredWeight) -> Dequantizer:
    stored.only("codes")
    words = stored.info("codes").shape
    shape = (*words[:-1], 2 * words[-1])
    parts = {"codes": stored.part("codes", words, ("uint8",))}
    codes = Codes(Packing(4, 8, len(shape) - 1), table=FP4)
    return Affine("F4", shape, parts, codes, Grid((1,) * len(shape)))
