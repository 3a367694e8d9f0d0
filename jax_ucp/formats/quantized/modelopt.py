"""NVIDIA's Model Optimizer (`quant_method: modelopt`, or `hf_quant_config.json`): fp8 with a scale
for a weight, for each row or for each block, NVFP4, MXFP8; of `MIXED_PRECISION` each module in
`quantized_layers` has its own.

Rule: code * scale in float32, rounded once; of NVFP4 fp4 * (scale * weight_scale_2). Source:
modelopt 0.47 `torch/quantization/qtensor/` (`FP8QTensor`, `NVFP4QTensor`, `MXFP8QTensor`), whose
fp8 rounds the scale to the dtype of the result first. A weight with `pre_quant_scale`, by which
activations are multiplied, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized import fp8
from jax_ucp.formats.quantized.affine import Affine, Grid, in_bytes, of_rows
from jax_ucp.formats.quantized.bits import FP4
from jax_ucp.formats.quantized.stored import StoredWeight

MIXED = "MIXED_PRECISION"
_SIDE = 128  # of a block of fp8
_FLOAT32 = ("float32",)
# ModelOpt's table has no zero with a sign.
_FP4 = FP4 + np.float32(0)


def weight(stored: StoredWeight) -> Dequantizer:
    algo = stored.settings.get("quant_algo")
    if algo == MIXED:
        # Without the table, the name is that of W4AFP8 to some and of anything to others.
        layers = stored.settings.get("quantized_layers")
        if not isinstance(layers, Mapping):
            stored.unknown(f"quant_algo={MIXED} is not known without quantized_layers")
        own = layers.get(stored.module)
        if not isinstance(own, Mapping):
            stored.fault(f"quantized_layers in the config has no {stored.module}")
        stored = replace(stored, settings=own)
        algo = own.get("quant_algo")
    if not isinstance(algo, str) or algo not in ALGOS:
        stored.unknown(f"quant_algo={algo!r:.60} is not known here: {', '.join(ALGOS)} are")
    return ALGOS[algo](stored)


def _whole(stored: StoredWeight) -> Dequantizer:
    return _fp8(stored, Grid(tuple(n or 1 for n in stored.matrix_shape())), _FLOAT32)


def _rows(stored: StoredWeight) -> Dequantizer:
    *rows, columns = stored.matrix_shape()
    return _fp8(stored, Grid((*(1 for _ in rows), columns or 1)), _FLOAT32)


def _blocks(stored: StoredWeight) -> Dequantizer:
    """The weight of fp8 with a scale for each block of 128 by 128, a size that no config has.

    ModelOpt stores scales of (rows, 1, columns, 1). TensorRT-LLM has DeepSeek's names and shapes.
    """
    shape = stored.matrix_shape()
    for length in shape[-2:]:
        stored.require_block(length, _SIDE, f"quant_algo={stored.settings['quant_algo']}")
    grid = Grid((*(1 for _ in shape[:-2]), _SIDE, _SIDE))
    role = "scale" if stored.has("scale") else "scale_inv"
    if len(shape) == 2 and len(stored.info(role).shape) == 4:
        rows, columns = grid.shape(shape)
        return _fp8(stored, grid, _FLOAT32, role, (rows, 1, columns, 1))
    return _fp8(stored, grid, _FLOAT32, role)


def _fp8(
    stored: StoredWeight,
    grid: Grid,
    scales: tuple[str, ...],
    role: str = "scale",
    stored_as: tuple[int, ...] | None = None,
) -> Dequantizer:
    stored.require_only("codes", role)
    return replace(fp8.scaled(stored, role, grid, scales, stored_as), scheme=_name(stored))


def _nvfp4(stored: StoredWeight) -> Dequantizer:
    stored.require_only("codes", "scale", "scale_2")
    stored.matrix_shape()
    shape, part, codes = in_bytes(stored, _FP4)
    grid = _groups(stored, shape, 16)
    parts = {
        "codes": part,
        "scale": stored.scale("scale", grid.shape(shape), ("float8_e4m3fn",)),
        "factor": stored.scale("scale_2", (1,), _FLOAT32),
    }
    return Affine(_name(stored), shape, parts, codes, grid)


def _groups(stored: StoredWeight, shape: tuple[int, ...], usual: int) -> Grid:
    size = stored.settings.get("group_size", usual)
    return of_rows(stored, shape, size, f"group_size={size!r:.40} in the config")


def _name(stored: StoredWeight) -> str:
    return f"ModelOpt {stored.settings['quant_algo']}"


ALGOS: Mapping[str, Callable[[StoredWeight], Dequantizer]] = {
    "FP8": _whole,
    "FP8_BLOCK_SCALES": _blocks,
    "FP8_PER_CHANNEL_PER_TOKEN": _rows,
    "MXFP8": lambda stored: _fp8(
        stored, _groups(stored, stored.matrix_shape(), 32), ("uint8", "float8_e8m0fnu")
    ),
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
    "fp8_pb_wo": _blocks,
}
