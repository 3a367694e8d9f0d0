"""MLX, as `mlx_lm.convert` writes it: codes of 2 to 8 bits in words of 32, with a scale and a bias
for each group of a row, or fp4 and fp8 with a scale of 8 bits for each.

Rule: code * scale + bias in float32, rounded once. Source: mlx 0.32 `ops.cpp` (`affine_dequantize`,
`fp_dequantize`), which computes in the dtype of the scales: in 16 bits it rounds the product, and
then the sum. Modules may have settings of their own beside those for all (mlx-lm 0.32 `utils.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid
from jax_ucp.formats.quantized.bits import FP4, FP8_E4M3, Packing
from jax_ucp.formats.quantized.stored import FLOATS, StoredWeight

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
# Floats: the numbers of codes and of scales (None: exponents), bits, and the length of groups.
_FLOATS: Mapping[str, tuple[np.ndarray, np.ndarray | None, int, int]] = {
    "mxfp4": (FP4, None, 4, 32),
    "mxfp8": (FP8_E4M3, None, 8, 32),
    "nvfp4": (FP4, FP8_E4M3, 4, 16),
}


def weight(stored: StoredWeight) -> Dequantizer:
    mode, bits, size = _settings(stored)
    table, scales = _FLOATS[mode][:2] if mode in _FLOATS else (None, None)
    words, groups = stored.matrix_shape(), stored.info("scales").shape
    if len(groups) != len(words):
        stored.fault(f"its codes have shape {list(words)}, and its scales {list(groups)}")
    columns = groups[-1] * size
    shape = (*words[:-1], columns)
    packing = Packing(bits, 32, len(shape) - 1)
    if columns * bits != 32 * words[-1]:  # of groups that MLX has, no word is filled in part
        stored.fault(
            f"{stored.weight.parts['codes']} has rows of {words[-1]} words, and its scales are for"
            f" {columns} codes of {bits} bits in groups of {size}"
        )
    grid = Grid((*(1 for _ in shape[:-1]), size))
    parts = {"codes": stored.part("codes", words, ("uint32",))}
    small = grid.shape(shape)
    if table is None:
        stored.require_only("codes", "scales", "biases")
        parts["scale"] = stored.scale("scales", small, FLOATS)
        parts["bias"] = stored.scale("biases", small, FLOATS)
    else:
        stored.require_only("codes", "scales")
        parts["scale"] = stored.scale("scales", small, ("uint8",))
    if scales is not None:
        why = "a number of 8 bits (E4M3)"
        parts["scale"] = replace(parts["scale"], valid=partial(_is_in, scales), why=why)
    scheme = f"MLX {mode}, {bits} bits"
    return Affine(scheme, shape, parts, Codes(packing, table), grid, scale_table=scales)


def _is_in(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return np.isfinite(np.take(table, codes))


def _settings(stored: StoredWeight) -> tuple[str, int, int]:
    """The mode, bits and length of groups: the module's own, if the config has them."""
    said = stored.settings.get(stored.module, True)
    if said is True:
        said = stored.settings
    if not isinstance(said, Mapping):
        stored.fault(f"the config says {said!r:.40} of {stored.module}: it is not quantised")
    match said.get("mode", "affine"), said.get("bits"), said.get("group_size"):
        case "affine", int(bits), int(size) if bits in _AFFINE_BITS and size > 0:
            return "affine", bits, size
        case str(mode), int(bits), int(size) if _FLOATS.get(mode, ())[2:] == (bits, size):
            return mode, bits, size
        case meant:
            stored.unknown(
                f"(mode, bits, group_size) = {meant!r:.80} in the config is not known here"
            )
