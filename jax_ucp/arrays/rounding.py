"""Numbers rounded once, to the nearest and of two as near to the even one, in either order of two
axes.
"""

from __future__ import annotations

import numpy as np

from jax_ucp.files.copying import copy_into

# From here on float16 has infinity.
_TOO_LARGE = 65520


def round_into(out: np.ndarray, values: np.ndarray) -> None:
    """Write numbers into an array of another floating dtype, each rounded once."""
    if values.dtype == np.float64 and out.dtype.itemsize < 4:
        # float64 as float32, those that do not fit to the odd one of the two around them: rounded
        # again, to fewer digits, they are as if they had been rounded once
        near = values.astype(np.float32)
        wide = near.astype(np.float64)
        bits = near.view(np.uint32)
        bits -= (np.abs(wide) > np.abs(values)).view(np.uint8)  # towards zero
        bits |= (wide != values).view(np.uint8)
        unordered = np.isnan(values)
        near[unordered] = np.nan
        values = near
    if _is_turned(values):
        values, out = values.swapaxes(-1, -2), out.swapaxes(-1, -2)
    if out.dtype == np.float16 and values.dtype == np.float32:
        values = _halves(values)
    if _is_turned(out):
        copy_into(out, values.astype(out.dtype, order="C", copy=False))
    else:
        out[...] = values


def _halves(values: np.ndarray) -> np.ndarray:
    """float32 as float16, as numpy has it, which takes longer.

    Four times a number is added to a power of two that lets the sum keep as many bits as float16
    has, so that the addition rounds: ten behind the first, or down to 2**-24.
    """
    sums = np.abs(values)
    if not np.max(sums, initial=0) < _TOO_LARGE:
        return values.astype(np.float16)
    sums *= np.float32(4)
    bits = values.view(np.uint32)
    steps = bits & np.uint32(0xFF << 23)
    np.maximum(steps, np.uint32((127 - 14) << 23), out=steps)
    steps += np.uint32(15 << 23)
    sums += steps.view(np.float32)
    halves = sums.view(np.uint32)
    np.right_shift(halves, np.uint32(13), out=steps)
    steps &= np.uint32(31 << 10)
    halves &= np.uint32(0xFFF)
    halves += steps
    np.right_shift(bits, np.uint32(16), out=steps)
    steps &= np.uint32(1 << 15)
    halves |= steps
    return halves.astype(np.uint16).view(np.float16)


def _is_turned(array: np.ndarray) -> bool:
    """Whether neighbours in memory are neighbours on the last axis but one."""
    return array.ndim > 1 and abs(array.strides[-1]) > abs(array.strides[-2])
