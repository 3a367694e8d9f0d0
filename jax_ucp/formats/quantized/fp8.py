"""fp8 with a scale for each block of a weight, or for all of it, as DeepSeek-V3 is published
(`quant_method: fp8`), and with one for each row (`fbgemm_fp8`). AutoFP8 calls the scale of a whole
weight `weight_scale`, under `quant_method: fp8` too, as DeepSeek-V4 is, whose experts may be fp4.

Rule: fp8 * scale in float32, rounded once. Sources: `weight_dequant` in DeepSeek-V3
`inference/kernel.py`; `Fp8Dequantize` in transformers 5.23 `integrations/finegrained_fp8.py`, which
refuses shapes that its grid of scales does not divide. Where a block does not divide the weight,
DeepSeek's rule holds: the last one is cut short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid, in_bytes, of_rows
from jax_ucp.formats.quantized.bits import FP4
from jax_ucp.formats.quantized.stored import FLOATS, FP8, StoredWeight

_FP4_GROUP = 32
_SCALES = (*FLOATS, "float8_e8m0fnu", "uint8")


def block_fp8(stored: StoredWeight) -> Dequantizer:
    """The weight of fp8 in blocks, whose scale has other names in AutoFP8 and DeepSeek-V4."""
    role = "scale_inv" if stored.has("scale_inv") or not stored.has("scale") else "scale"
    stored.require_only("codes", role)
    shape = stored.matrix_shape()
    is_fp4, is_expert = stored.info("codes").dtype == np.int8, ".experts." in stored.name
    expert_dtype = stored.settings.get("expert_dtype")
    if is_expert and expert_dtype is not None and (expert_dtype == "fp4") != is_fp4:
        stored.fault(f"the config says expert_dtype={expert_dtype!r:.40}, and its codes do not")
    if is_fp4:
        # Experts of DeepSeek-V4: two fp4 in a byte, the first in the low half, and an exponent for
        # each 32 of a row. Source: `_unpack_fp4` in transformers 5.23.
        if not is_expert:
            stored.unknown("two fp4 to a byte are known of experts alone")
        shape, part, codes = in_bytes(stored, FP4, dtype="int8")
        grid = of_rows(stored, shape, _FP4_GROUP, f"a group of {_FP4_GROUP}")
        scale = stored.scale(role, grid.shape(shape), ("float8_e8m0fnu", "uint8"))
        return Affine(stored.weight.scheme, shape, {"codes": part, "scale": scale}, codes, grid)
    size = stored.settings.get("weight_block_size")
    block = _block(stored, shape, size)
    for length, side in zip(shape, block, strict=True):
        stored.require_block(length, side, f"weight_block_size={size} in the config")
    return scaled(stored, role, Grid(block), _SCALES)


def row_fp8(stored: StoredWeight) -> Dequantizer:
    """The weight of fp8 with a scale for each output. Llama 4's experts have inputs before outputs.

    The scales of their `down_proj` are (expert, output, 1). Source: `FbgemmFp8Quantize.convert` in
    transformers 5.23 `integrations/fbgemm_fp8.py`.
    """
    stored.require_only("codes", "scale")
    shape = stored.matrix_shape()
    if len(shape) == 2:
        return scaled(stored, "scale", Grid((1, shape[1] or 1)), _SCALES)
    grid = Grid((1, shape[1] or 1, 1))
    match stored.name.rpartition(".")[2]:
        case "gate_up_proj" if len(shape) == 3:
            return scaled(stored, "scale", grid, _SCALES)
        case "down_proj" if len(shape) == 3:
            return scaled(stored, "scale", grid, _SCALES, (shape[0], shape[2], 1))
    stored.unknown("of experts in one array gate_up_proj and down_proj of Llama 4 are known")


def _block(stored: StoredWeight, shape: Sequence[int], size: object) -> tuple[int, ...]:
    """The block of elements that share a scale. Experts in one array each have their own blocks."""
    if size is None:
        return (*(1 for _ in shape[:-2]), *(n or 1 for n in shape[-2:]))
    match size:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return (*(1 for _ in shape[:-2]), rows, columns)
    stored.unknown(f"weight_block_size={size!r:.80} in the config is not a pair of lengths")


def scaled(
    stored: StoredWeight,
    role: str,
    grid: Grid,
    dtypes: Sequence[str],
    stored_as: tuple[int, ...] | None = None,
) -> Affine:
    """The weight of codes times scales, which are stored as `stored_as` or as the grid."""
    shape = stored.info("codes").shape
    small = grid.shape(shape)
    scale = stored.scale(role, stored_as or small, dtypes)
    parts = {"codes": stored.part("codes", shape, FP8), "scale": replace(scale, shape=small)}
    return Affine(stored.weight.scheme, shape, parts, Codes(), grid)
