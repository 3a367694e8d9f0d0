"""Arrays whose reading processes share: what a test saves and its processes compare with."""

from __future__ import annotations

import ml_dtypes
import numpy as np

KEYS = "keys"
# By name: shape, dtype, and the PartitionSpec to restore to, over the axes of a mesh of 2 by any
# number of devices.
ARRAYS = {
    "nothing cut": ((331, 257), np.float32, ()),
    "columns cut": ((509, 262), ml_dtypes.bfloat16, (None, "a")),
    "rows cut": ((662, 127), np.float16, ("a",)),
    "other axis": ((5, 4, 9973), np.int8, (None, "b")),
    "yes or no": ((170003,), np.bool_, ()),
    "both axes": ((8, 12, 997), np.float32, (("a", "b"),)),  # held once: not shared
    "small": ((24, 10), np.float32, ()),  # not shared
    KEYS: ((20011, 2), np.uint32, ()),
}


def bits_by_name() -> dict[str, np.ndarray]:
    """The arrays: any bits, among them negative zeros, infinities, and NaNs with a payload."""
    return {name: _bits(name) for name in ARRAYS}


def _bits(name: str) -> np.ndarray:
    shape, dtype, _ = ARRAYS[name]
    rng = np.random.default_rng(list(name.encode()))
    if dtype is np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    whole = *shape[:-1], shape[-1] * np.dtype(dtype).itemsize
    array = rng.integers(0, 256, whole, np.uint8).view(dtype)
    if dtype not in (np.int8, np.uint32):
        array[..., :4] = np.array([-0.0, np.inf, np.nan, -np.nan], dtype)
    return array
