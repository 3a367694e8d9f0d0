"""Proofs that an array agrees with something else, made on elements that somebody reads anyway: of
arrays that are stored twice, masters with 16-bit copies, replicas, means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.arrays.budget import batches
from jax_ucp.arrays.checks import CHECK_BYTES, BoxWatcher, Check, Extent
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.evaluate import elements_of, locate, split, tiles, unequal_replicas
from jax_ucp.arrays.protocol import TOGETHER, ArrayInfo
from jax_ucp.arrays.value import Array
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import RUN_ELEMENTS, RUNS, sample_boxes

# What a sum of some numbers in fp32, divided by how many they are, may differ from their mean, as a
# part of it.
_MEAN_ERROR = 1e-6
_ROUNDED = 1 << 15  # elements that are rounded at once
# Where fp16 with a scale ends, weights are no more than that.
_NOTHING = 2.0**-30
_CAUSE = "one of the files is damaged, or of another rank, step or run"
_REMAINDER = (
    "these are whole numbers, as the low 16 bits are that TransformerEngine's precision-aware"
    " optimizer keeps in place of masters (store_param_remainders); open with weights_only"
)


class Proof(ABC):
    """Elements of an array that something else must agree with.

    `label` says what is looked at.
    """

    label: str
    array: Array

    @abstractmethod
    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first fault in elements of boxes, one box after the other; None if there is none."""

    def sample(self) -> Sequence[Box]:
        """The boxes that a check of extent "sample" reads: a few elements, spread so that they very
        likely differ if the files are of different saves.
        """
        return sample_boxes(tiles(self.array))

    @property
    def infos(self) -> Sequence[ArrayInfo]:
        """The shape and dtype of each array that is read to prove it."""
        return [self.array.info]

    def nbytes(self, extent: Extent) -> int:
        """About how many bytes are read to prove it."""
        most = RUNS * RUN_ELEMENTS
        return sum(
            info.nbytes if extent == "full" else min(info.nbytes, most * info.dtype.itemsize)
            for info in self.infos
        )

    @property
    def area(self) -> Box:
        """The block of the array that is compared."""
        return Box.whole(self.array.info.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element, where that says how many are compared at once."""
        return self.array.info.dtype.itemsize

    def read(self, boxes: Sequence[Box]) -> np.ndarray:
        """The elements of boxes, one box after the other."""
        return elements_of(self.array, boxes)

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterable[Check]:
        """The work of proving it, of a sample or of all there is."""
        about = self.label, leaves, self.nbytes(extent)
        if extent == "sample":
            return [Check(*about, self._sample_fault)]
        passing = _ProofWatcher(self)
        return [Check(*about, passing.run, passing)]

    def _sample_fault(self) -> str | None:
        boxes = self.sample()
        return self.fault_in(boxes, self.read(boxes))


@dataclass(frozen=True)
class SampleOnly:
    """A proof of which a sample is compared, also where all is to be proved."""

    proof: Proof

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterable[Check]:
        return self.proof.checks(leaves, "sample")


@dataclass(frozen=True)
class Zeros(Proof):
    """An array without an element that is not zero; `fault` says what one would be."""

    label: str
    array: Array
    fault: str

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """A message on the first box that is not all zeros, or None."""
        found = (box for box, part in zip(boxes, split(elements, boxes), strict=True) if part.any())
        return next((f"{self.label}: {box} {self.fault}" for box in found), None)


class _ProofWatcher(BoxWatcher):
    """A proof on elements as they pass, and in the end on those that did not."""

    def __init__(self, proof: Proof):
        super().__init__(id(proof.array))
        self._proof = proof
        self._fault: str | None = None
        self._ended = False

    def run(self) -> str | None:
        """The first fault in the order of the elements, or None. Without a fault so far, elements
        that were seen while others read them are not read again.
        """
        self._ended = True
        every = list(pieces(self._proof.area, self._proof.itemsize))
        if not self._fault:
            return self._first_fault(self.missing(every))
        return self._first_fault(every) or self._fault

    def _first_fault(self, boxes: Sequence[Box]) -> str | None:
        proof = self._proof
        faults = (proof.fault_in([box], proof.read([box])) for box in boxes)
        return next(filter(None, faults), None)

    def see(self, boxes: Sequence[Box], arrays: Sequence[np.ndarray]) -> None:
        if self._ended or self._fault:
            return
        size = self._proof.itemsize
        # the steps of thousands of parameters are one array
        passing = (
            (box, elements)
            for box, elements in _passing(self._proof, boxes, arrays)
            if box not in self._boxes
        )
        for group in batches(passing, lambda each: each[0].size * size, CHECK_BYTES, TOGETHER):
            seen, parts = zip(*group, strict=True)
            elements = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if fault := self._proof.fault_in(seen, elements):
                self._fault = fault
                self.alarm()
                return
            super().see(seen, [elements])


def pieces(area: Box, itemsize: int) -> Iterator[Box]:
    """Blocks of rows of a box, each of about as many bytes as are compared at once."""
    for box in row_boxes(area.shape, itemsize, CHECK_BYTES):
        yield box.shift(area.start)


def _passing(
    proof: Proof, boxes: Sequence[Box], arrays: Sequence[np.ndarray]
) -> Iterator[tuple[Box, np.ndarray]]:
    """The elements of a proof's area that were read, in pieces small enough to compare at once."""
    for box, array in zip(boxes, arrays, strict=True):
        hit = box.intersect(proof.area)
        for piece in pieces(hit, proof.itemsize) if hit else ():
            yield piece, array[piece.relative_to(box).index].reshape(-1)


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
        """A message on the first element whose rounded value is not the copy's, or None."""
        depth = len(self.at)
        inside = [Box(box.start[depth:], box.stop[depth:]) for box in boxes]
        copy = elements_of(self.copy, inside)
        with np.errstate(all="ignore"):  # what overflows is not the copy
            # of so few at once that no memory is touched for the first time
            slices = [slice(at, at + _ROUNDED) for at in range(0, len(copy), _ROUNDED)]
            if all(same_bits(elements[some].astype(copy.dtype), copy[some]) for some in slices):
                return None
            rounded = elements.astype(copy.dtype)
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
        """A message on the first element that is not between its copies, or None."""
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
        """A message on the first block whose copies differ, or None."""
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
