"""Proofs of arrays that are stored twice: masters with 16-bit copies, replicas, means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.arrays.checks import Check, Extent
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.evaluate import elements_of, locate, split, tiles, unequal_replicas
from jax_ucp.arrays.proof import Proof
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.arrays.value import Array
from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import sample_boxes

# What a sum of some numbers in fp32, divided by how many they are, may differ from their mean, as a
# part of it.
_MEAN_ERROR = 1e-6
# Where fp16 with a scale ends, weights are no more than that.
_NOTHING = 2.0**-30
_CAUSE = "one of the files is damaged, or of another rank, step or run"
_REMAINDER = (
    "these are whole numbers, as the low 16 bits are that TransformerEngine's precision-aware"
    " optimizer keeps in place of masters (store_param_remainders); open with weights_only"
)


@dataclass(frozen=True)
class Duplicate(Proof):
    """A second copy: `copy` holds what `array` has at the leading indices `at`, rounded to its
    dtype.

    `copy_stored` says where the copy is stored, `cause` what is likely where it differs. With
    `near` the whole was rounded too, to 16 bits: then both may differ in the last digit of the
    copy.
    """

    label: str
    array: Array
    copy: Array
    at: tuple[int, ...]
    copy_stored: str
    cause: str = ""
    near: bool = False

    @property
    def area(self) -> Box:
        depth, shape = len(self.at), self.array.info.shape
        return Box((*self.at, *(0,) * (len(shape) - depth)), (*self._after, *shape[depth:]))

    @property
    def itemsize(self) -> int:
        return self.copy.info.dtype.itemsize

    @property
    def _after(self) -> tuple[int, ...]:
        return tuple(i + 1 for i in self.at)

    @property
    def infos(self) -> Sequence[ArrayInfo]:
        return [ArrayInfo(self.copy.info.shape, self.array.info.dtype), self.copy.info]

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterable[Check]:
        whole, copy = self.array.info, self.copy.info
        if whole.shape[len(self.at) :] == copy.shape:
            return super().checks(leaves, extent)
        fault = (
            f"{self.label} has shape {whole.shape}, but the copy at {self.copy_stored} has"
            f" {copy.shape}"
        )
        return [Check(self.label, leaves, 0, lambda: fault)]

    def sample(self) -> Sequence[Box]:
        # the blocks in which the whole is stored, of what it has at the leading indices
        depth, here = len(self.at), Box(self.at, self._after)
        of_whole = [
            Box(tile.start[depth:], tile.stop[depth:])
            for tile in tiles(self.array)
            if not depth or Box(tile.start[:depth], tile.stop[:depth]).intersect(here)
        ]
        boxes = sample_boxes(of_whole, tiles(self.copy))
        return [Box((*self.at, *box.start), (*self._after, *box.stop)) for box in boxes]

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first element that differs, with where both are stored."""
        depth = len(self.at)
        inside = [Box(box.start[depth:], box.stop[depth:]) for box in boxes]
        copy = elements_of(self.copy, inside)
        with np.errstate(all="ignore"):  # what overflows is not the copy
            rounded = elements.astype(copy.dtype)
        if same_bits(rounded, copy):
            return None
        if self.near:
            # where a copy is a number of its dtype next to the whole, or both are next to nothing
            bits = [x.view(np.int16).astype(np.int32) for x in (rounded, copy)]
            ordered = [np.where(x < 0, -(x & 0x7FFF), x) for x in bits]
            with np.errstate(all="ignore"):
                apart = np.abs(elements.astype(np.float64) - copy.astype(np.float64))
            rounded = np.where(
                (np.abs(ordered[0] - ordered[1]) <= 1) | (apart < _NOTHING), copy, rounded
            )
            if same_bits(rounded, copy):
                return None
        raw = [np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8) for x in (rounded, copy)]
        first = int(np.argmax((raw[0] != raw[1]).any(axis=1)))
        index = _place_of(first, boxes)
        is_remainder = _whole_numbers(elements) and not _whole_numbers(copy)
        cause = self.cause or (_REMAINDER if is_remainder else _CAUSE)
        return (
            f"{self.label}: the master at {self._where(index)} is {elements[first]} in"
            f" {list(index)}, rounded to {copy.dtype} not what the copy at {self.copy_stored} has,"
            f" {copy[first]}; {cause}"
        )

    def _where(self, index: tuple[int, ...]) -> str:
        """Where an element of the whole is stored."""
        here = Box(index, tuple(i + 1 for i in index))
        return next(locate(self.array, here)).name


@dataclass(frozen=True)
class Mean(Proof):
    """A mean: `array` is that of the numbers of `copies`, by name, before these were rounded.

    Rounding keeps the order of numbers, so that the mean, rounded too, lies between the least copy
    and the largest.
    """

    label: str
    array: Array
    copies: Mapping[str, Array]
    stored: str  # where the mean is stored

    @property
    def infos(self) -> Sequence[ArrayInfo]:
        return [array.info for array in (self.array, *self.copies.values())]

    def sample(self) -> Sequence[Box]:
        return sample_boxes(tiles(self.array), tiles(next(iter(self.copies.values()))))

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first element that is not between its copies."""
        mean = elements.astype(np.float64)
        copies = [elements_of(copy, boxes) for copy in self.copies.values()]
        dtype, wide = copies[0].dtype, [copy.astype(np.float64) for copy in copies]
        least, largest = np.minimum.reduce(wide), np.maximum.reduce(wide)
        slack = np.abs(mean) * _MEAN_ERROR
        with np.errstate(all="ignore"):  # what overflows is not between
            over = (mean + slack).astype(dtype).astype(np.float64) < least
            under = (mean - slack).astype(dtype).astype(np.float64) > largest
        if not np.any(over | under):
            return None
        first = int(np.argmax(over | under))
        index = _place_of(first, boxes)
        return (
            f"{self.label} at {self.stored} is {mean[first]} in {list(index)}, not between"
            f" {least[first]} and {largest[first]}, of which it should be the mean, at"
            f" {', '.join(self.copies)}; {_CAUSE}"
        )


@dataclass(frozen=True)
class Replicas(Proof):
    """An array of which every replica is the same."""

    label: str
    array: Array

    @property
    def infos(self) -> Sequence[ArrayInfo]:
        return [self.array.info] * 2

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first box of which two copies differ, with where they are stored."""
        for box, data in zip(boxes, split(elements, boxes), strict=True):
            if hit := unequal_replicas(self.array, box, data):
                pieces = locate(self.array, hit)
                items = " and ".join(dict.fromkeys(piece.name for piece in pieces))
                return (
                    f"{self.label}: {hit} differs between {items}, which should be replicas;"
                    f" {_CAUSE}"
                )
        return None


def _place_of(position: int, boxes: Sequence[Box]) -> tuple[int, ...]:
    """The index of the element at a position among those of the boxes, one box after the other."""
    for box in boxes:
        if position < box.size:
            return tuple(
                a + int(b)
                for a, b in zip(box.start, np.unravel_index(position, box.shape), strict=True)
            )
        position -= box.size
    raise IndexError(position)


def _whole_numbers(values: np.ndarray) -> bool:
    """Whether they are such as a 16-bit integer can be, and not all zero."""
    wide = values.astype(np.float64)
    return bool(np.all(np.abs(wide) <= 1 << 15) and np.all(wide == np.round(wide)) and np.any(wide))
