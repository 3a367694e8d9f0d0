"""Parameters as importers name them: a layout, and the names of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.layout.fragments import ParamLayout


@dataclass(frozen=True)
class Consolidated:
    """A parameter made of shards: `keys[i]` names, in the source, the array that is shard i of
    `layout`.
    """

    layout: ParamLayout
    keys: Sequence[str]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have one dtype, one shape and the same bytes; NaNs and signed zeros
    included.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unit = np.uint64 if a.nbytes % 8 == 0 else np.uint8
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).view(unit) for x in (a, b))
    return np.array_equal(first, second)
