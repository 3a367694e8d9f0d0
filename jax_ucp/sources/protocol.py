"""The waist of the package: an array is whatever can be read one box at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.layout.box import Box
from jax_ucp.tree import MAX_ARRAY_BYTES, MAX_AXES


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """What is known of an array before any of its bytes are read.

    `chunk` is the shape of the blocks in which it is stored, where a part of a block costs as much
    to read as all of it; None where any box costs about its own bytes. Raises FormatError for what
    no array can be.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # numpy has no array without elements either whose other axes are beyond any array.
        nbytes = math.prod(n or 1 for n in self.shape) * self.dtype.itemsize
        if len(self.shape) > MAX_AXES or min(self.shape, default=0) < 0 or nbytes > MAX_ARRAY_BYTES:
            raise FormatError(
                f"no array is {self.dtype} {self.shape!s:.200}: what says so is damaged"
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ArraySource(Protocol):
    """Named arrays, readable one box at a time.

    A source may also have `read_into(key, boxes, outs)`, which reads several boxes straight into
    arrays of their shapes, and what is stored once for all of them. Callers use `gather.read_into`,
    which does without it too.
    """

    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Name -> shape and dtype of every array. Costs no reading."""
        ...

    def read(self, key: str, box: Box) -> np.ndarray:
        """The elements of `box` of array `key`, in the shape of the box.

        A writeable result is the caller's own. A read-only one may be a view of a memory-mapped
        file, or of something else that lives on: callers that keep it, or hand it to a device, copy
        it.
        """
        ...
