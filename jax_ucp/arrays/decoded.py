"""Numbers stored as codes of eight bits: an entry of a table, times the scale of its block.

That is how bitsandbytes' optimizers keep their states, and the product in float32 is what they
compute with (`csrc/kernels.cu`, `kOptimizerStatic8bit2StateBlockwise`, and
`dequantize_blockwise` in `csrc/cpu_ops.cpp`, of 0.50).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.arrays.value import Array, Computed, Rule
from jax_ucp.layout.box import Box


@dataclass(frozen=True, slots=True)
class TableCodes(Rule):
    """Element i of `shape`, in row-major order, is `table[codes[i]] * scales[i // block]`."""

    shape: tuple[int, ...]
    entries: int
    block: int

    @property
    def elementwise(self) -> Sequence[str]:
        return ["codes"]

    def boxes(self, box: Box) -> Mapping[str, Box]:
        first, last = (
            sum(i * math.prod(self.shape[axis + 1 :]) for axis, i in enumerate(corner))
            // self.block
            for corner in (box.start, [stop - 1 for stop in box.stop])
        )
        scales = Box((first,), (last + 1,))
        return {"codes": box, "table": Box((0,), (self.entries,)), "scales": scales}

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        blocks = _positions(self.shape, box) // self.block
        scales = parts["scales"][blocks - blocks.min()]
        return parts["table"][parts["codes"]] * scales


def decoded(codes: Array, table: Array, scales: Array, block: int) -> Computed:
    """The float32 numbers that codes stand for, of which each `block` in a row share a scale."""
    shape = codes.info.shape
    rule = TableCodes(shape, table.info.shape[0], block)
    inputs = {"codes": codes, "table": table, "scales": scales}
    return Computed(rule, inputs, ArrayInfo(shape, np.dtype(np.float32)))


def _positions(shape: Sequence[int], box: Box) -> np.ndarray:
    """The position of each element of a box in the row-major order of the whole array.

    >>> _positions((4, 3), Box((1, 1), (3, 3)))
    array([[4, 5],
           [7, 8]])
    """
    positions = np.zeros((1,) * len(shape), np.int64)
    for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        step = math.prod(shape[axis + 1 :])
        along = np.arange(start, stop, dtype=np.int64) * step
        positions = positions + along.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return positions


def block_of(count: int, scales: int) -> int | None:
    """How many of `count` codes share one of so many scales: 256, or 2048 in old versions."""
    return next((block for block in (256, 2048) if -(-count // block) == scales), None)
