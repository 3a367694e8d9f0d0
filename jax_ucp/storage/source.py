"""The waist of the package: an array is whatever can be read one box at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_ucp.layout.box import Box


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """What is known of an array before any of its bytes are read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ArraySource(Protocol):
    """Named arrays, readable one box at a time."""

    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Name -> shape and dtype of every array. Costs no reading."""
        ...

    def read(self, key: str, box: Box) -> np.ndarray:
        """The elements of `box` of array `key`, in the shape of the box.

        The result may be a read-only view of a memory-mapped file: callers that keep or change it copy it.
        """
        ...
