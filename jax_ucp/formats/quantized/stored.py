"""The stored parts of one quantised weight, by role; a part that does not fit is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from jax_ucp.arrays.contents import QuantizedWeight
from jax_ucp.arrays.dequantized import WeightPart
from jax_ucp.arrays.evaluate import read
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.arrays.value import Array
from jax_ucp.errors import FormatError, QuantizedWeights
from jax_ucp.formats.quantized.names import ABOUT_ACTIVATIONS
from jax_ucp.layout.box import Box

Settings = Mapping[str, Any]

FP8 = ("float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "bfloat16", "float16")
# Small parts that are read when a checkpoint is opened, because a shape is in them.
MAX_READ = 1 << 16


@dataclass(frozen=True)
class StoredWeight:
    """The parts of a quantised weight by role, and what the config and the file record of it."""

    weight: QuantizedWeight
    arrays: Mapping[str, Array]
    settings: Settings
    said: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def module(self) -> str:
        """The name that configs use for the module that has the weight."""
        return self.name.rpartition("/")[2].removesuffix(".weight")

    def has(self, role: str) -> bool:
        return role in self.arrays

    def info(self, role: str) -> ArrayInfo:
        if role not in self.arrays:
            self.fault(f"has no {role} beside its codes {self.weight.parts['codes']}")
        return self.arrays[role].info

    def part(self, role: str, shape: Sequence[int], dtypes: Sequence[str]) -> WeightPart:
        """A part as an array of a shape, up to trailing axes of length 1. Raises FormatError."""
        info = self.info(role)
        label = self.weight.parts[role]
        if info.dtype.name not in dtypes:
            self.fault(f"{label} is {info.dtype.name}, and not {' or '.join(dtypes)}")
        if leading(info.shape) != leading(shape):
            self.fault(f"{label} has shape {list(info.shape)}, and not {list(shape)}")
        return WeightPart(label, self.arrays[role], tuple(shape))

    def scale(
        self, role: str, shape: Sequence[int], dtypes: Sequence[str] = (*FLOATS, "float64")
    ) -> WeightPart:
        """A part of numbers, none of which may be infinite or NaN."""
        part = self.part(role, shape, dtypes)
        if self.info(role).dtype.name in ("uint8", "float8_e8m0fnu"):
            return replace(part, valid=_is_exponent, why="an exponent below 255")
        return replace(part, valid=is_finite, why="a finite number")

    def divisor(self, role: str, shape: Sequence[int], dtypes: Sequence[str]) -> WeightPart:
        """A part whose numbers divide others: all are finite, and none is 0."""
        part = self.part(role, shape, dtypes)
        return replace(part, valid=_is_divisor, why="a finite number and not 0")

    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the codes, a matrix or a stack of them. Raises FormatError for others."""
        shape = self.info("codes").shape
        if len(shape) < 2:
            self.fault(f"{self.weight.parts['codes']} has shape {list(shape)}, and is not a matrix")
        return shape

    def rows_and_columns(self, role: str = "codes") -> tuple[int, int]:
        """The shape of a part. Raises FormatError unless it is one matrix with elements."""
        shape = self.info(role).shape
        if len(shape) != 2 or not all(shape):
            self.fault(f"{self.weight.parts[role]} has shape {list(shape)}, and is not a matrix")
        return shape[0], shape[1]

    def require_block(self, length: int, size: int, what: str) -> None:
        """Raise FormatError if the number of scales on an axis does not fit the length of blocks.

        Blocks, the last maybe cut short, are powers of two in what libraries write: one of them
        alone fits a number of scales.
        """
        count = -(-length // size)
        if count < 2:
            return  # one scale is for all of the axis, whatever the block
        least, most = -(-length // count), (length - 1) // (count - 1)
        power = 1 << (least - 1).bit_length()
        is_likeliest = size == power if power <= most else size * count == length
        if least < most and not is_likeliest:
            likely = f", and {power} is what libraries write" if power <= most else ""
            self.fault(
                f"{what} says blocks of {size}, and the {count} scales for an axis of {length} fit"
                f" blocks of {least} to {most}{likely}: the config was changed, or is of another"
                " model"
            )

    def read(self, role: str) -> np.ndarray:
        """The elements of a part. Raises FormatError for more than MAX_READ bytes."""
        info = self.info(role)
        if info.nbytes > MAX_READ:
            self.fault(f"{self.weight.parts[role]} has {info.nbytes} bytes, and should be small")
        return read(self.arrays[role], Box.whole(info.shape))

    def require_only(self, *roles: str) -> None:
        """Raise FormatError if there is a part of another role, unless it is about activations."""
        for role, label in self.weight.parts.items():
            if role not in roles and role not in ABOUT_ACTIVATIONS:
                self.fault(f"{label} has no place in this scheme")

    def fault(self, what: str) -> NoReturn:
        """Raise FormatError, with the name of the weight."""
        raise FormatError(f"{self.name} ({self.weight.scheme}): {what}")

    def unknown(self, what: str) -> NoReturn:
        """Raise QuantizedWeights: the weight may be sound, but its form is not known here."""
        raise QuantizedWeights(f"{self.name} ({self.weight.scheme}): {what}")


def leading(shape: Sequence[int]) -> list[int]:
    """The lengths of a shape without axes of length 1 at its end.

    >>> leading((64, 1)), leading((1, 64)), leading((1, 1))
    ([64], [1, 64], [])
    """
    lengths = list(shape)
    while lengths and lengths[-1] == 1:
        lengths.pop()
    return lengths


# What is valid is asked in other processes too: of functions that can be pickled.
def is_finite(elements: np.ndarray) -> np.ndarray:
    return np.isfinite(elements)


def _is_divisor(elements: np.ndarray) -> np.ndarray:
    return np.isfinite(elements) & (elements != 0)


def _is_exponent(elements: np.ndarray) -> np.ndarray:
    return elements.view(np.uint8) != 255


def _is_group(groups: int, most: int, elements: np.ndarray) -> np.ndarray:
    is_one = (elements >= 0) & (elements < groups)
    known = elements[is_one]
    is_one[is_one] = np.bincount(known, minlength=groups)[known] <= most
    return is_one


def as_groups(stored: StoredWeight, length: int, groups: int) -> WeightPart:
    """The part that gives the group of each index on an axis.

    All but one of the groups are of the same size, so that none is larger than `most`. Where all
    are zero, some programs take groups in order, and others the first.
    """
    part = stored.part("g_idx", (length,), ("int32", "int64"))
    most = (length - 1) // (groups - 1) if groups > 1 else length
    why = f"a group from 0 to {groups - 1}, of at most {most} elements"
    return replace(part, valid=partial(_is_group, groups, most), why=why)
