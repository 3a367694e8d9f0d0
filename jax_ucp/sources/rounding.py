"""Wider numbers rounded once, to the nearest and of two as near to the even one."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def round_into(out: np.ndarray, values: np.ndarray) -> None:
    """Write float32 or float64 numbers into an array of another floating dtype, each rounded
    once.
    """
    if values.dtype == np.float64 and out.dtype.itemsize < 4:
        values = _to_odd(values)
    if out.dtype == _BFLOAT16 and values.dtype == np.float32:
        out.view(np.uint16)[...] = _upper_halves(values)
    else:
        out[...] = values


def _upper_halves(values: np.ndarray) -> np.ndarray:
    """The bits of float32 as bfloat16: their upper halves, rounded by the lower ones.

    A NaN stays one: its payload could carry into the exponent, so that it gets the quiet bit.
    """
    # in the order that the numbers have in memory
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    odd >>= np.uint32(16)
    halves = odd.astype(np.uint16)
    if np.isnan(np.min(values, initial=0)):
        unordered = np.isnan(values)
        halves[unordered] = values[unordered].astype(_BFLOAT16).view(np.uint16)
    return halves


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float64 as float32, those that do not fit to the odd one of the two around them: rounded
    again, to fewer digits, they are as if they had been rounded once.
    """
    near = values.astype(np.float32)
    wide = near.astype(np.float64)
    bits = near.view(np.uint32)
    bits -= (np.abs(wide) > np.abs(values)).view(np.uint8)  # towards zero
    bits |= (wide != values).view(np.uint8)
    unordered = np.isnan(values)
    near[unordered] = np.nan
    return near
