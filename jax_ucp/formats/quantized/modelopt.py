"""NVIDIA's Model Optimizer (`quant_method: modelopt`, or `hf_quant_config.json`): fp8 with a scale
for a weight or for each row, NVFP4, MXFP8.

Rule: code * scale in float32, rounded once; of NVFP4 fp4 * (scale * weight_scale_2). Source:
modelopt 0.47 `torch/quantization/qtensor/` (`FP8QTensor`, `NVFP4QTensor`, `MXFP8QTensor`), whose
fp8 rounds the scale to the dtype of the result first. A weight with `pre_quant_scale`, by which
activations are multiplied, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid
from jax_ucp.formats.quantized.bits import FP4, Packing
from jax_ucp.formats.quantized.stored import FP8, StoredWeight

_FLOAT32 = ("float32",)
# ModelOpt's table has no zero with a sign.
_FP4 = FP4 + np.float32(0)


def scaled(stored: StoredWeight) -> Dequantizer:
    algo = stored.settings.get("quant_algo")
    if not isinstance(algo, str) or algo not in ALGOS:
        stored.unknown(f"quant_algo={algo!r:.60} is not known here: {', '.join(ALGOS)} are")
    return ALGOS[algo](stored)


def _whole(stored: StoredWeight) -> Dequantizer:
    return _fp8(stored, Grid(tuple(n or 1 for n in stored.matrix())), _FLOAT32)


def _rows(stored: StoredWeight) -> Dequantizer:
    *rows, columns = stored.matrix()
    return _fp8(stored, Grid((*(1 for _ in rows), columns or 1)), _FLOAT32)


def _fp8(stored: StoredWeight, grid: Grid, scales: tuple[str, ...]) -> Dequantizer:
    stored.only("codes", "scale")
    shape = stored.matrix()
    parts = {
        "codes": stored.part("codes", shape, FP8),
        "scale": stored.scale("scale", grid.shape(shape), scales),
    }
    return Affine(_name(stored), shape, parts, Codes(), grid)


def _nvfp4(stored: StoredWeight) -> Dequantizer:
    stored.only("codes", "scale", "scale_2")
    words = stored.matrix()
    shape = (*words[:-1], 2 * words[-1])
    grid = _groups(stored, shape, 16)
    parts = {
        "codes": stored.part("codes", words, ("uint8",)),
        "scale": stored.scale("scale", grid.shape(shape), ("float8_e4m3fn",)),
        "factor": stored.scale("scale_2", (1,), _FLOAT32),
    }
    codes = Codes(Packing(4, 8, len(shape) - 1), table=_FP4)
    return Affine(_name(stored), shape, parts, codes, grid)


def _groups(stored: StoredWeight, shape: tuple[int, ...], usual: int) -> Grid:
    size = stored.settings.get("group_size", usual)
    if type(size) is not int or size < 1 or shape[-1] % size:
        stored.fault(f"group_size={size!r:.40} in the config does not divide {list(shape)}")
    return Grid((*(1 for _ in shape[:-1]), size))


def _name(stored: StoredWeight) -> str:
    return f"ModelOpt {stored.settings['quant_algo']}"


ALGOS: Mapping[str, Callable[[StoredWeight], Dequantizer]] = {
    "FP8": _whole,
    "FP8_PER_CHANNEL_PER_TOKEN": _rows,
    "MXFP8": lambda stored: _fp8(
        stored, _groups(stored, stored.matrix(), 32), ("uint8", "float8_e8m0fnu")
    ),
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
}
