"""Comparison of arrays by their bits, and of dtypes by the numbers that they can hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def named_dtype(name: str) -> np.dtype:
    """The dtype of a name that numpy or ml_dtypes has. Raises TypeError for any other name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def holds_every(wide: np.dtype, narrow: np.dtype) -> bool:
    """Whether every number of the dtype `narrow` is one of the dtype `wide`.

    >>> bfloat16, float16, int16 = (np.dtype(name) for name in ("bfloat16", "float16", "int16"))
    >>> [holds_every(wide, bfloat16) for wide in (np.dtype("float32"), bfloat16, float16, int16)]
    [True, True, False, False]
    """
    if np.can_cast(narrow, wide, "safe"):
        return True
    try:  # numpy does not know of every pair of 8-bit and 16-bit floats
        a, b = ml_dtypes.finfo(narrow), ml_dtypes.finfo(wide)
    except ValueError:
        return False
    return bool(
        a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp - a.nmant >= b.minexp - b.nmant
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have one dtype, one shape and the same bytes; NaNs and signed zeros
    included.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unit = np.uint64 if a.nbytes % 8 == 0 else np.uint8
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).view(unit) for x in (a, b))
    return np.array_equal(first, second)
