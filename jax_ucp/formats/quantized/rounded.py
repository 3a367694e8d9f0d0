"""A weight that is stored as numbers beside its scales, and that the model rounds to codes whenever
it computes: what it computes with is made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jax_ucp.arrays.dequantized import WeightPart
from jax_ucp.formats.quantized.affine import Grid
from jax_ucp.layout.box import Box


@dataclass(frozen=True)
class Rounded:
    """A weight of which each element is (code - zero point) * scale, where the code is the number
    that is stored, divided by the scale, plus the zero point, clamped and rounded.

    `codes` are the numbers. With `bits` codes are integers of so many bits, else fp8. Quotients and
    sums are rounded to the dtype that numbers and scales have in common.
    """

    scheme: str
    shape: tuple[int, ...]
    parts: Mapping[str, WeightPart]
    grid: Grid
    bits: int = 0

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return {role: box if role == "codes" else self.grid.box(box) for role in self.parts}

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        stored, scale = parts["codes"].dtype, parts["scale"].astype(np.float32)
        common = stored if stored == parts["scale"].dtype else np.dtype(np.float32)
        zero = parts["zero"].astype(np.float32) if "zero" in parts else None
        values = parts["codes"].astype(np.float32)
        self.grid.apply(np.divide, values, scale, box)
        values = values.astype(common).astype(np.float32)
        if zero is not None:
            self.grid.apply(np.add, values, zero, box)
            values = values.astype(common).astype(np.float32)
        if self.bits:
            half = 1 << (self.bits - 1)
            values = np.rint(np.clip(values, -half, half - 1))
        else:
            most = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
            codes = np.clip(values, -most, most).astype(ml_dtypes.float8_e4m3fn)
            values = codes.astype(np.float32)
        if zero is not None:
            self.grid.apply(np.subtract, values, zero, box)
        self.grid.apply(np.multiply, values, scale, box)
        return values
