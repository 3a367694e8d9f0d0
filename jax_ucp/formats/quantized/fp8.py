"""fp8 with a scale for each block of a weight, or for all of it, as DeepSeek-V3 is published
(`quant_method: fp8`), and with one for each row (`fbgemm_fp8`). AutoFP8 calls the scale of a whole
weight `weight_scale`, under `quant_method: fp8` too.

Rule: fp8 * scale in float32, rounded once. Sources: `weight_dequant` in DeepSeek-V3
`inference/kernel.py`; `Fp8Dequantize` in transformers 5.23 `integrations/finegrained_fp8.py`, which
refuses shapes that its grid of scales does not divide. Where a block does not divide the weight,
DeepSeek's rule holds: the last one is cut short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid
from jax_ucp.formats.quantized.stored import FLOATS, FP8, StoredWeight

_SCALES = (*FLOATS, "float8_e8m0fnu", "uint8")


def block_fp8(stored: StoredWeight) -> Dequantizer:
    size = stored.settings.get("weight_block_size")
    if stored.has("scale") and size is None:  # AutoFP8
        stored.only("codes", "scale")
        return _scaled(stored, "scale", Grid(_block(stored, stored.matrix(), size)))
    stored.only("codes", "scale_inv")
    shape = stored.matrix()
    block = _block(stored, shape, size)
    for length, side in zip(shape, block, strict=True):
        stored.require_block(length, side, f"weight_block_size={size} in the config")
    grid = Grid(block)
    return _scaled(stored, "scale_inv", grid)


def row_fp8(stored: StoredWeight) -> Dequantizer:
    """fp8 with a scale for each output; Llama 4's experts have inputs before outputs.

    The scales of their `down_proj` are (expert, output, 1). Source: `FbgemmFp8Quantize.convert` in
    transformers 5.23 `integrations/fbgemm_fp8.py`.
    """
    stored.only("codes", "scale")
    shape = stored.matrix()
    if len(shape) == 2:
        return _scaled(stored, "scale", Grid((1, shape[1] or 1)))
    grid = Grid((1, shape[1] or 1, 1))
    match stored.name.rpartition(".")[2]:
        case "gate_up_proj" if len(shape) == 3:
            return _scaled(stored, "scale", grid)
        case "down_proj" if len(shape) == 3:
            return _scaled(stored, "scale", grid, (shape[0], shape[2], 1))
    stored.unknown("of experts in one array gate_up_proj and down_proj of Llama 4 are known")


def _block(stored: StoredWeight, shape: Sequence[int], size: object) -> tuple[int, ...]:
    """The block of a scale. Of experts in one array each has its own blocks."""
    if size is None:
        return (*(1 for _ in shape[:-2]), *(n or 1 for n in shape[-2:]))
    match size:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return (*(1 for _ in shape[:-2]), rows, columns)
    stored.unknown(f"weight_block_size={size!r:.80} in the config is not a pair of lengths")


def _scaled(
    stored: StoredWeight, role: str, grid: Grid, stored_as: tuple[int, ...] | None = None
) -> Dequantizer:
    """The weight; `stored_as` is the shape of its scales, where it is not that of the grid."""
    shape = stored.info("codes").shape
    small = grid.shape(shape)
    scale = stored.scale(role, stored_as or small, _SCALES)
    parts = {"codes": stored.part("codes", shape, FP8), "scale": replace(scale, shape=small)}
    return Affine(stored.weight.scheme, shape, parts, Codes(), grid)
