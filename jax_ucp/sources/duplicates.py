"""What a checkpoint stores twice, compared: masters with 16-bit copies, replicas with one
another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import RUN_ELEMENTS, RUNS, sample_boxes
from jax_ucp.sources.checks import Check, Extent
from jax_ucp.sources.consolidated import same_bits
from jax_ucp.sources.evaluate import Evaluated
from jax_ucp.sources.protocol import ArraySource
from jax_ucp.sources.watched import Proof, Watched, elements_of, split

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
class Duplicate(Proof[Watched]):
    """Array `copy` of `copies` holds what array `key` of `source` has at the leading indices `at`,
    rounded to its dtype.

    `copy_stored` says where the copy is stored, `cause` what is likely where it differs. With
    `near` the whole was rounded too, to 16 bits: then both may differ in the last digit of the
    copy.
    """

    label: str
    source: Watched
    key: str
    copies: ArraySource
    copy: str
    at: tuple[int, ...]
    copy_stored: str
    cause: str = ""
    near: bool = False

    @property
    def name(self) -> str:
        return f"{super().name}, {self.at} is {self.copy} at {self.copy_stored}"

    @property
    def area(self) -> Box:
        depth, shape = len(self.at), self.source.arrays()[self.key].shape
        return Box((*self.at, *(0,) * (len(shape) - depth)), (*self._after, *shape[depth:]))

    @property
    def itemsize(self) -> int:
        return self.copies.arrays()[self.copy].dtype.itemsize

    @property
    def _after(self) -> tuple[int, ...]:
        return tuple(i + 1 for i in self.at)

    def nbytes(self, extent: Extent) -> int:
        whole, copy = self.source.arrays()[self.key], self.copies.arrays()[self.copy]
        most = RUNS * RUN_ELEMENTS * (whole.dtype.itemsize + copy.dtype.itemsize)
        every = copy.nbytes + copy.nbytes // copy.dtype.itemsize * whole.dtype.itemsize
        return every if extent == "full" else min(most, every)

    def check(self, leaves: Collection[str], extent: Extent) -> Check:
        whole, copy = self.source.arrays()[self.key], self.copies.arrays()[self.copy]
        if whole.shape[len(self.at) :] == copy.shape:
            return super().check(leaves, extent)
        fault = (
            f"{self.label} has shape {whole.shape}, but the copy at {self.copy_stored} has"
            f" {copy.shape}"
        )
        return Check(self.label, frozenset(leaves), 0, lambda: fault)

    def sample(self) -> Sequence[Box]:
        boxes = sample_boxes(self._tiles_of_whole(), tiles(self.copies, self.copy))
        return [Box((*self.at, *box.start), (*self._after, *box.stop)) for box in boxes]

    def _tiles_of_whole(self) -> Sequence[Box]:
        """The blocks in which the whole is stored, of what it has at the leading indices."""
        depth = len(self.at)
        here = Box(self.at, self._after)
        return [
            Box(tile.start[depth:], tile.stop[depth:])
            for tile in tiles(self.source, self.key)
            if not depth or Box(tile.start[:depth], tile.stop[:depth]).intersect(here)
        ]

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first element that differs, with where both are stored."""
        depth = len(self.at)
        copy = elements_of(
            self.copies, self.copy, [Box(box.start[depth:], box.stop[depth:]) for box in boxes]
        )
        with np.errstate(all="ignore"):  # what overflows is not the copy
            rounded = elements.astype(copy.dtype)
        if same_bits(rounded, copy):
            return None
        if self.near:
            rounded = np.where(_are_near(elements, rounded, copy), copy, rounded)
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
        return next(self.source.locate(self.key, here)).name


@dataclass(frozen=True)
class Mean(Proof[Watched]):
    """Array `key` of `source` is the mean of what the arrays `copies` of `shards` are, rounded to
    their dtype.

    Rounding keeps the order of numbers, so that the mean, rounded too, lies between the least copy
    and the largest.
    """

    label: str
    source: Watched
    key: str
    shards: ArraySource
    copies: Sequence[str]
    stored: str  # where the mean is stored

    @property
    def name(self) -> str:
        return f"{super().name}, {self.copies}"

    def nbytes(self, extent: Extent) -> int:
        infos = [
            self.source.arrays()[self.key],
            *(self.shards.arrays()[copy] for copy in self.copies),
        ]
        most = RUNS * RUN_ELEMENTS
        return sum(
            info.nbytes if extent == "full" else min(info.nbytes, most * info.dtype.itemsize)
            for info in infos
        )

    def sample(self) -> Sequence[Box]:
        return sample_boxes(tiles(self.source, self.key), tiles(self.shards, self.copies[0]))

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first element that is not between its copies."""
        mean = elements.astype(np.float64)
        copies = [elements_of(self.shards, copy, boxes) for copy in self.copies]
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
class Replicas(Proof[Evaluated]):
    """A parameter of a view, of which every copy is the same."""

    label: str
    source: Evaluated
    key: str

    def nbytes(self, extent: Extent) -> int:
        return 2 * self.source.arrays()[self.key].nbytes

    def sample(self) -> Sequence[Box]:
        return sample_boxes(tiles(self.source, self.key))

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first box of which two copies differ, with where they are stored."""
        for box, data in zip(boxes, split(elements, boxes), strict=True):
            if hit := self.source.unequal_replicas(self.key, box, data):
                pieces = self.source.locate(self.key, hit)
                items = " and ".join(dict.fromkeys(piece.name for piece in pieces))
                return (
                    f"{self.label}: {hit} differs between {items}, which should be replicas;"
                    f" {_CAUSE}"
                )
        return None


def _are_near(elements: np.ndarray, rounded: np.ndarray, copy: np.ndarray) -> np.ndarray:
    """Where a copy is a number of its dtype next to the whole, or both are next to nothing."""
    bits = [x.view(np.int16).astype(np.int32) for x in (rounded, copy)]
    ordered = [np.where(x < 0, -(x & 0x7FFF), x) for x in bits]
    with np.errstate(all="ignore"):
        apart = np.abs(elements.astype(np.float64) - copy.astype(np.float64))
    return (np.abs(ordered[0] - ordered[1]) <= 1) | (apart < _NOTHING)


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


def tiles(source: ArraySource, key: str) -> Sequence[Box]:
    """The blocks of an array that are each stored in one place."""
    if isinstance(source, Evaluated):
        return source.tiles(key)
    return [Box.whole(source.arrays()[key].shape)]


def _whole_numbers(values: np.ndarray) -> bool:
    """Whether they are such as a 16-bit integer can be, and not all zero."""
    wide = values.astype(np.float64)
    return bool(np.all(np.abs(wide) <= 1 << 15) and np.all(wide == np.round(wide)) and np.any(wide))
