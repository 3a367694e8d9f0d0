"""The rule of nearly every scheme: (code - zero point) * scale, by blocks of elements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import ml_dtypes
import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer, WeightPart
from jax_ucp.formats.quantized.bits import Packing, exponents
from jax_ucp.formats.quantized.stored import StoredWeight
from jax_ucp.layout.box import Box

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class Codes:
    """The rule by which stored codes are numbers: by their own dtype, or packed.

    `table` has the number of each code; without it, the number is the code less `offset`. With
    `row`, the last axis of words is stored as two axes, the second of that length.
    """

    packing: Packing | None = None
    table: np.ndarray | None = None
    offset: int = 0
    row: int = 0

    def box(self, box: Box, shape: Sequence[int]) -> Box:
        words = self.packing.box(box, shape) if self.packing else box
        if not self.row:
            return words
        spans = list(zip(words.start, words.stop, strict=True))
        first, last = spans.pop()
        return Box.spanning([*spans, (first // self.row, -(-last // self.row)), (0, self.row)])

    def numbers(self, stored: np.ndarray, box: Box) -> np.ndarray:
        """The numbers in a box as float32, in memory of their own."""
        if self.packing is None:
            return _by_table(stored, self.table)
        table = self.table
        if self.offset:
            table = np.arange(1 << self.packing.bits, dtype=np.float32) - np.float32(self.offset)
        if self.row:  # the words that the box needs, whose last axis is stored as two
            wanted = self.packing.box(box, box.stop)
            first = wanted.start[-1] % self.row
            words = stored.reshape(*stored.shape[:-2], -1)
            stored = words[..., first : first + wanted.shape[-1]]
        return self.packing.numbers(stored, box, table)


def _by_table(codes: np.ndarray, table: np.ndarray | None) -> np.ndarray:
    """The numbers of codes of one byte each, by a table or by their own dtype."""
    if table is None and codes.dtype.name.startswith("float8_"):
        table = _numbers_of_bytes(codes.dtype)
    return codes.astype(np.float32) if table is None else np.take(table, codes.view(np.uint8))


@cache
def _numbers_of_bytes(dtype: np.dtype) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Grid:
    """The place of each element in a small array: `index // block[axis]`; a last block may be
    short.
    """

    block: tuple[int, ...]

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the small array.

        >>> Grid((128, 128)).shape((576, 7168))
        (5, 56)
        """
        return tuple([-(-n // b) for n, b in zip(shape, self.block, strict=True)])

    def box(self, box: Box) -> Box:
        starts = [a // b for a, b in zip(box.start, self.block, strict=True)]
        stops = [-(-a // b) for a, b in zip(box.stop, self.block, strict=True)]
        return Box(tuple(starts), tuple(stops))

    def apply(self, change: np.ufunc, values: np.ndarray, small: np.ndarray, box: Box) -> None:
        """Change the values of a box in their place, each with the element that belongs to it."""
        axes = [axis for axis, n in enumerate(small.shape) if n > 1 and self.block[axis] > 1]
        for axis in axes[:-1]:
            counts = _counts(box.start[axis], box.stop[axis], self.block[axis])
            small = np.repeat(small, counts, axis)
        if not axes:
            change(values, small, out=values)
            return
        # on the last axis whole blocks are changed at once, without a copy of `small` that has
        # their shape; the first and the last block may be cut short
        axis, block = axes[-1], self.block[axes[-1]]
        length = values.shape[axis]
        head = min(-box.start[axis] % block, length)
        blocks = (length - head) // block
        tail = head + blocks * block
        used = int(head > 0)
        if head:
            part, one = _cut(values, axis, 0, head), _cut(small, axis, 0, 1)
            change(part, one, out=part)
        if blocks:
            whole = _cut(values, axis, head, tail)
            shape = (*whole.shape[:axis], blocks, block, *whole.shape[axis + 1 :])
            split = np.reshape(whole, shape, copy=False)
            each = np.expand_dims(_cut(small, axis, used, used + blocks), axis + 1)
            change(split, each, out=split)
        if tail < length:
            part = _cut(values, axis, tail, length)
            change(part, _cut(small, axis, used + blocks, used + blocks + 1), out=part)


def _cut(array: np.ndarray, axis: int, start: int, stop: int) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _counts(start: int, stop: int, block: int) -> np.ndarray:
    """The number of elements of a range in each block.

    >>> _counts(3, 9, 4).tolist()
    [1, 4, 1]
    """
    edges = np.arange(start // block, -(-stop // block) + 1) * block
    return np.diff(np.clip(edges, start, stop))


@dataclass(frozen=True, slots=True)
class Gathered:
    """The place of each element in a small array: on one axis an array of groups has it."""

    axis: int
    groups: int

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[: self.axis], self.groups, *shape[self.axis + 1 :])

    def box(self, box: Box) -> Box:
        """The box of all groups, since only reading the groups shows which are needed."""
        spans = list(zip(box.start, box.stop, strict=True))
        spans[self.axis] = 0, self.groups
        return Box.spanning(spans)

    def apply(
        self, change: np.ufunc, values: np.ndarray, small: np.ndarray, group: np.ndarray
    ) -> None:
        """Change the values in place, runs of elements of one group at once."""
        values, small = np.moveaxis(values, self.axis, 0), np.moveaxis(small, self.axis, 0)
        edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
        if len(edges) > _MOST_RUNS:
            change(values, small[group], out=values)
            return
        for first, last in itertools.pairwise(edges):
            part = values[first:last]
            change(part, small[group[first]], out=part)


def of_rows(stored: StoredWeight, shape: Sequence[int], size: object, what: str) -> Grid:
    """The groups of `size` elements of a row, as `what` says. Raises FormatError where they do not
    divide the weight.
    """
    if type(size) is not int or size < 1 or not shape or shape[-1] % size:
        stored.fault(f"{what} does not divide {list(shape)}")
    return Grid((*(1 for _ in shape[:-1]), size))


def in_bytes(
    stored: StoredWeight, table: np.ndarray, bits: int = 4, dtype: str = "uint8"
) -> tuple[tuple[int, ...], WeightPart, Codes]:
    """The shape of a weight, its stored part, and the `Codes` that unpack it by `table`, of `bits`
    each. Raises FormatError for another dtype, or where a row is no whole number of codes.
    """
    words = stored.info("codes").shape
    if not words or words[-1] * 8 % bits:
        label = stored.weight.parts["codes"]
        stored.fault(f"{label} has shape {list(words)}, which is no whole codes of {bits} bits")
    shape = (*words[:-1], words[-1] * 8 // bits)
    packing = Packing(bits, 8, len(shape) - 1)
    return shape, stored.part("codes", words, (dtype,)), Codes(packing, table=table)


# Beyond these, to change runs of one group one by one takes longer than to copy what they need.
_MOST_RUNS = 64


def numbers(scale: np.ndarray) -> np.ndarray:
    """Scales as float32; bytes are exponents."""
    if scale.dtype in (np.uint8, _E8M0):
        return exponents(scale)
    return scale.astype(np.float32)


@dataclass(frozen=True)
class Affine:
    """A weight of which each element is (code - zero point) * scale + bias, in float32.

    Its parts are `codes`, and where there are: `scale`; `bias`, of the shape of the scales; `zero`,
    packed as `zero_codes` says; `group`, for each index on an axis its group; and `factor`, one
    number by which every scale is multiplied first, or divided with `divides`. Scales are codes in
    `scale_table`, if any. `constant` is a factor that is stored nowhere, and is applied last.
    """

    scheme: str
    shape: tuple[int, ...]
    parts: Mapping[str, WeightPart]
    codes: Codes
    grid: Grid | Gathered
    zero_codes: Codes = field(default_factory=Codes)
    divides: bool = False
    constant: float | None = None
    scale_table: np.ndarray | None = None

    def boxes(self, box: Box) -> Mapping[str, Box]:
        small = self.grid.box(box)
        boxes = {"codes": self.codes.box(box, self.shape)}
        boxes |= {role: small for role in ("scale", "bias") if role in self.parts}
        if "zero" in self.parts:
            boxes["zero"] = self.zero_codes.box(small, self.grid.shape(self.shape))
        if "factor" in self.parts:
            boxes["factor"] = Box.whole(self.parts["factor"].shape)
        if isinstance(self.grid, Gathered):  # only all of them show whether they are groups
            boxes["group"] = Box.whole(self.parts["group"].shape)
        return boxes

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        values = self.codes.numbers(parts["codes"], box)
        if "zero" in parts:
            zero = self.zero_codes.numbers(parts["zero"], self.grid.box(box))
            self._apply(np.subtract, values, zero, box, parts)
        if "scale" in parts:
            table, stored = self.scale_table, parts["scale"]
            scale = numbers(stored) if table is None else np.take(table, stored)
            if "factor" in parts:  # one number for all of the scales
                factor = parts["factor"].astype(np.float32).reshape(())
                scale = scale / factor if self.divides else scale * factor
            self._apply(np.multiply, values, scale, box, parts)
        if "bias" in parts:
            self._apply(np.add, values, parts["bias"].astype(np.float32), box, parts)
        if self.constant is not None:
            values *= np.float32(self.constant)
        return values

    def _apply(
        self,
        change: np.ufunc,
        values: np.ndarray,
        small: np.ndarray,
        box: Box,
        parts: Mapping[str, np.ndarray],
    ) -> None:
        if isinstance(self.grid, Gathered):
            axis = self.grid.axis
            group = parts["group"][box.start[axis] : box.stop[axis]]
            self.grid.apply(change, values, small, group)
        else:
            self.grid.apply(change, values, small, box)


@dataclass(frozen=True)
class Wrapping(Dequantizer):
    """A weight with the parts of another one, `inner`, in other places."""

    inner: Dequantizer

    @property
    def scheme(self) -> str:
        return self.inner.scheme

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def parts(self) -> Mapping[str, WeightPart]:
        return self.inner.parts


@dataclass(frozen=True)
class TurnedParts(Wrapping):
    """A weight whose parts have exchanged axes, which are put right before `inner` reads them."""

    def boxes(self, box: Box) -> Mapping[str, Box]:
        boxes = self.inner.boxes(box).items()
        return {role: Box(_exchanged(b.start), _exchanged(b.stop)) for role, b in boxes}

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        turned = {r: p if p.ndim < 2 else p.swapaxes(-1, -2) for r, p in parts.items()}
        return self.inner.values(box, turned)


@dataclass(frozen=True)
class Transposed(Wrapping):
    """A weight whose parts hold it with its last two axes exchanged."""

    @property
    def shape(self) -> tuple[int, ...]:
        return _exchanged(self.inner.shape)

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return self.inner.boxes(Box(_exchanged(box.start), _exchanged(box.stop)))

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        values = self.inner.values(Box(_exchanged(box.start), _exchanged(box.stop)), parts)
        return np.swapaxes(values, -1, -2)


def _exchanged(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return lengths if len(lengths) < 2 else (*lengths[:-2], lengths[-1], lengths[-2])
