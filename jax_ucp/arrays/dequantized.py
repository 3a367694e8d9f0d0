"""Weights that are stored as codes and scales, as the numbers that they stand for.

A scheme is a `Dequantizer`: for a box of the weight it says with integers alone which box of which
part is needed, and it makes numbers of exactly those parts. The same for all are the check that
scales are numbers, here, and in the evaluator that parts are read once and results rounded once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.arrays.value import Array, Computed, Rule, cut
from jax_ucp.errors import CorruptData
from jax_ucp.layout.box import Box


@dataclass(frozen=True, slots=True)
class WeightPart:
    """An array that a weight is made of, and its name.

    `shape` is what it is read as: that of the array, or the rows in which a flat one is cut.
    `valid(elements)` says of each element whether it can be meant, and `why` what it should be.
    """

    name: str
    array: Array
    shape: tuple[int, ...]
    valid: Callable[[np.ndarray], np.ndarray] | None = None
    why: str = ""


class Dequantizer(Protocol):
    """How one weight is made of its parts.

    `shape` is that of the weight, and `scheme` is what the method is called. `parts` are by role,
    which `boxes` and `values` name them by.
    """

    @property
    def scheme(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def parts(self) -> Mapping[str, WeightPart]: ...

    @abstractmethod
    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of each part that a box of the weight needs. Of a box inside another the boxes
        are inside the other's.
        """
        ...

    @abstractmethod
    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The numbers in a box of the weight as float32 or float64, of just those boxes of the
        parts; the caller rounds them once.
        """
        ...


@dataclass(frozen=True, slots=True)
class Dequantized(Rule):
    """The numbers of the weight called `name`. A scale that cannot be one raises CorruptData."""

    name: str
    weight: Dequantizer

    @property
    def scheme(self) -> str:
        return self.weight.scheme

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return self.weight.boxes(box)

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        for role, elements in parts.items():
            part = self.weight.parts[role]
            if part.valid is None:
                continue
            with np.errstate(invalid="ignore"):  # a NaN of eight bits
                valid = part.valid(elements)
            if not valid.all():
                at = tuple(int(i) for i in np.argwhere(~valid)[0])
                start = self.weight.boxes(box)[role].start
                place = [int(i + first) for i, first in zip(at, start, strict=True)]
                raise CorruptData(
                    f"{self.name}: {part.name} has {elements[at]} at {place}, which should be"
                    f" {part.why}"
                )
        # A number beyond all of the dtype is infinite, as the libraries have it.
        with np.errstate(over="ignore", invalid="ignore"):
            return self.weight.values(box, parts)


def dequantized(name: str, weight: Dequantizer, dtype: np.dtype) -> Computed:
    """The numbers of a weight, each rounded once to `dtype`."""
    inputs = {
        role: cut(part.name, part.array, 0, part.shape) for role, part in weight.parts.items()
    }
    return Computed(Dequantized(name, weight), inputs, ArrayInfo(weight.shape, dtype))
