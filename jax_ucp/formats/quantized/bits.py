"""Codes of a few bits, packed into words, and the numbers that the narrow floats stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jax_ucp.layout.box import Box

# Sign, exponent, mantissa: what a code of four or six bits is worth (OCP Microscaling Formats v1.0,
# 5.3). The codes are the low bits of a byte.
FP4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
FP8_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FP6_E2M3 = np.arange(64, dtype=np.uint8).view(ml_dtypes.float6_e2m3fn).astype(np.float32)
FP6_E3M2 = np.arange(64, dtype=np.uint8).view(ml_dtypes.float6_e3m2fn).astype(np.float32)

_CODES = np.arange(16, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Packing:
    """Codes of `bits` bits along one axis, the first in the lowest bits of the first word.

    A code may lie in two words. `order[i]` is the place of the i-th element among the codes of a
    word; `is_high_first` has the first of two elements in the high half of a byte.
    """

    bits: int
    word_bits: int
    axis: int
    order: tuple[int, ...] = ()
    is_high_first: bool = False

    @property
    def codes(self) -> int:
        return math.lcm(self.bits, self.word_bits) // self.bits

    @property
    def words(self) -> int:
        return math.lcm(self.bits, self.word_bits) // self.word_bits

    def length(self, n: int) -> int:
        """The number of words that hold so many codes.

        >>> Packing(bits=3, word_bits=32, axis=1).length(33)
        4
        """
        return -(-n * self.bits // self.word_bits)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the words of an array of codes."""
        words = list(shape)
        words[self.axis] = self.length(shape[self.axis])
        return tuple(words)

    def box(self, box: Box, shape: Sequence[int]) -> Box:
        """The words that hold a box of an array of so many codes: from whole groups of words on.

        >>> str(Packing(bits=3, word_bits=32, axis=1).box(Box((0, 33), (4, 70)), (4, 70)))
        '[0:4, 3:7]'
        """
        spans = list(zip(box.start, box.stop, strict=True))
        start, stop = spans[self.axis]
        first = start // self.codes * self.words
        last = min(-(-stop // self.codes) * self.words, self.length(shape[self.axis]))
        spans[self.axis] = first, max(first, last)
        return Box.spanning(spans)

    def unpack(self, words: np.ndarray, box: Box) -> np.ndarray:
        """The codes in a box as uint8, from exactly the words that `box` gives."""
        # first all codes of whole groups of words
        words, unit_bits = _padded(words, self.axis, self.words), self.word_bits
        if self.axis == words.ndim - 1 and 8 % self.bits == 0 and not self.order:
            units, unit_bits = np.ascontiguousarray(words).view(np.uint8), 8
        else:
            units = words.view(f"u{words.dtype.itemsize}")
        shape = list(units.shape)
        shape[self.axis] = units.shape[self.axis] * unit_bits // self.bits
        codes = np.empty(shape, np.uint8)
        source, target = np.moveaxis(units, self.axis, 0), np.moveaxis(codes, self.axis, 0)
        group = math.lcm(self.bits, unit_bits)
        mask = units.dtype.type((1 << self.bits) - 1)
        for place in range(group // self.bits):
            bit = (self.order[place] if self.order else place) * self.bits
            unit, shift = divmod(bit, unit_bits)
            step = group // unit_bits
            value = source[unit::step] >> source.dtype.type(shift)
            if shift + self.bits > unit_bits:  # the upper bits are in the next unit
                value = value | source[unit + 1 :: step] << source.dtype.type(unit_bits - shift)
            if self.is_high_first:
                place ^= 1
            target[place :: group // self.bits] = value & mask
        start = box.start[self.axis] % self.codes
        index = [slice(None)] * codes.ndim
        index[self.axis] = slice(start, start + box.shape[self.axis])
        return codes[tuple(index)]

    def numbers(self, words: np.ndarray, box: Box, table: np.ndarray | None) -> np.ndarray:
        """The codes in a box, or their numbers by a table, from exactly the words of `box`."""
        if self.bits != 4 or self.order or self.axis != words.ndim - 1:
            codes = self.unpack(words, box)
            return codes.astype(np.float32) if table is None else np.take(table, codes)
        # each byte has two neighbours on the last axis: both at once, by its high and low half
        table = _CODES if table is None else table
        pairs = np.empty((16, 16, 2), np.float32)
        pairs[..., int(self.is_high_first)] = table
        pairs[..., int(not self.is_high_first)] = table[:, None]
        codes = np.ascontiguousarray(words).view(np.uint8)
        numbers = np.take(pairs.view(np.uint64).reshape(-1), codes).view(np.float32)
        start = box.start[self.axis] % self.codes
        return numbers[..., start : start + box.shape[self.axis]]


def _padded(words: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    """The words, with zeros at the end that complete the last group."""
    missing = -words.shape[axis] % multiple
    if not missing:
        return words
    widths = [(0, 0)] * words.ndim
    widths[axis] = 0, missing
    return np.pad(words, widths)


def exponents(codes: np.ndarray) -> np.ndarray:
    """Powers of two by their biased exponents, E8M0: code 127 is 1. Code 255 is no number.

    >>> exponents(np.array([0, 126, 127, 130], np.uint8)).tolist() == [2.0**-127, 0.5, 1.0, 8.0]
    True
    """
    # The smallest is below the normal numbers of float32, and exact all the same.
    return np.ldexp(np.float32(1), codes.view(np.uint8).astype(np.int32) - 127)
