"""What a checkpoint stores twice, compared: masters with 16-bit copies, replicas with one
another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.errors import CorruptData
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import RUN_ELEMENTS, RUNS, SMALL_BLOCK, sample_boxes
from jax_ucp.sources.checks import CHECK_BYTES, Extent
from jax_ucp.sources.consolidated import ConsolidatedView, same_bits
from jax_ucp.sources.protocol import ArraySource

# What a sum of some numbers in fp32, divided by how many they are, may differ from their mean, as a
# part of it.
_MEAN_ERROR = 1e-6
_CAUSE = "one of the files is damaged, or of another rank, step or run"
_REMAINDER = (
    "these are whole numbers, as the low 16 bits are that TransformerEngine's precision-aware"
    " optimizer keeps in place of masters (store_param_remainders); open with weights_only"
)


@dataclass(frozen=True)
class Duplicate:
    """Array `copy` of `copies` holds what `whole` of `wholes` has at the leading indices `at`,
    rounded to its dtype.

    `stored` says where a shard of `wholes` is stored, `copy_stored` where the copy is.
    """

    label: str
    wholes: ArraySource
    whole: str
    copies: ArraySource
    copy: str
    at: tuple[int, ...]
    stored: Callable[[str], str]
    copy_stored: str

    def nbytes(self, extent: Extent) -> int:
        """About how many bytes `fault` reads."""
        whole, copy = self.wholes.arrays()[self.whole], self.copies.arrays()[self.copy]
        most = RUNS * RUN_ELEMENTS * (whole.dtype.itemsize + copy.dtype.itemsize)
        every = copy.nbytes + copy.nbytes // copy.dtype.itemsize * whole.dtype.itemsize
        return every if extent == "full" else min(most, every)

    def fault(self, extent: Extent) -> str | None:
        """The first element that differs, with where both are stored; None where none does."""
        info = self.copies.arrays()[self.copy]
        shape = self.wholes.arrays()[self.whole].shape
        if shape[len(self.at) :] != info.shape:
            return (
                f"{self.label} has shape {shape}, but the copy at {self.copy_stored} has"
                f" {info.shape}"
            )
        if extent == "sample":
            return self._fault_in(
                sample_boxes(self._tiles_of_whole(), tiles(self.copies, self.copy))
            )
        every = row_boxes(info.shape, info.dtype.itemsize, CHECK_BYTES)
        return next((fault for box in every if (fault := self._fault_in([box]))), None)

    def _tiles_of_whole(self) -> Sequence[Box]:
        """The blocks in which the whole is stored, of what it has at the leading indices."""
        if not self.at:
            return tiles(self.wholes, self.whole)
        depth = len(self.at)
        here = Box(self.at, tuple(i + 1 for i in self.at))
        return [
            Box(tile.start[depth:], tile.stop[depth:])
            for tile in tiles(self.wholes, self.whole)
            if Box(tile.start[:depth], tile.stop[:depth]).intersect(here)
        ]

    def _fault_in(self, boxes: Sequence[Box]) -> str | None:
        inside = boxes
        if self.at:
            inside = [
                Box((*self.at, *box.start), (*(i + 1 for i in self.at), *box.stop)) for box in boxes
            ]
        copy, master = (
            _elements(self.copies, self.copy, boxes),
            _elements(self.wholes, self.whole, inside),
        )
        with np.errstate(all="ignore"):  # what overflows is not the copy
            rounded = master.astype(copy.dtype)
        if same_bits(rounded, copy):
            return None
        raw = [np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8) for x in (rounded, copy)]
        first = int(np.argmax((raw[0] != raw[1]).any(axis=1)))
        index = _place_of(first, inside)
        cause = _REMAINDER if _whole_numbers(master) and not _whole_numbers(copy) else _CAUSE
        return (
            f"{self.label}: the master at {self._where(index)} is {master[first]} in {list(index)},"
            f" rounded to {copy.dtype} not what the copy at {self.copy_stored} has, {copy[first]};"
            f" {cause}"
        )

    def _where(self, index: tuple[int, ...]) -> str:
        """Where an element of the whole is stored."""
        here = Box(index, tuple(i + 1 for i in index))
        parts = self.wholes.where(self.whole) if isinstance(self.wholes, ConsolidatedView) else []
        return self.stored(
            next((key for key, part in parts if part.target.intersect(here)), self.whole)
        )


@dataclass(frozen=True)
class Mean:
    """Array `whole` of `wholes` is the mean of what the arrays `copies` of `source` are, rounded to
    their dtype.

    Rounding keeps the order of numbers, so that the mean, rounded too, lies between the least copy
    and the largest.
    """

    label: str
    wholes: ArraySource
    whole: str
    source: ArraySource
    copies: Sequence[str]
    stored: str  # where the mean is stored

    def nbytes(self, extent: Extent) -> int:
        """About how many bytes `fault` reads."""
        infos = [
            self.wholes.arrays()[self.whole],
            *(self.source.arrays()[copy] for copy in self.copies),
        ]
        most = RUNS * RUN_ELEMENTS
        return sum(
            info.nbytes if extent == "full" else min(info.nbytes, most * info.dtype.itemsize)
            for info in infos
        )

    def fault(self, extent: Extent) -> str | None:
        """The first block with an element that is not between its copies; None where there is
        none.
        """
        info = self.wholes.arrays()[self.whole]
        if extent == "sample":
            return self._fault_in(
                sample_boxes(tiles(self.wholes, self.whole), tiles(self.source, self.copies[0]))
            )
        every = row_boxes(info.shape, info.dtype.itemsize, CHECK_BYTES)
        return next((fault for box in every if (fault := self._fault_in([box]))), None)

    def _fault_in(self, boxes: Sequence[Box]) -> str | None:
        mean = _elements(self.wholes, self.whole, boxes).astype(np.float64)
        copies = [_elements(self.source, copy, boxes) for copy in self.copies]
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


def _elements(source: ArraySource, key: str, boxes: Sequence[Box]) -> np.ndarray:
    """The elements of the boxes, one box after the other."""
    # a view of the file takes no copy, but time to be made
    if len(boxes) == 1 and boxes[0].size > SMALL_BLOCK:
        return np.asarray(source.read(key, boxes[0])).reshape(-1)
    ends = [0, *itertools.accumulate(box.size for box in boxes)]
    found = np.empty(ends[-1], source.arrays()[key].dtype)
    outs = [
        found[a:b].reshape(box.shape)
        for box, (a, b) in zip(boxes, itertools.pairwise(ends), strict=True)
    ]
    source.read_into(key, boxes, outs)
    return found


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


def replicas_fault(
    view: ConsolidatedView, name: str, stored: Callable[[str], str], extent: Extent
) -> str | None:
    """The first block of a parameter of which two copies differ, with where they are stored."""
    info = view.arrays()[name]
    if extent == "full":
        boxes: Iterable[Box] = row_boxes(info.shape, info.dtype.itemsize, CHECK_BYTES)
    else:
        boxes = sample_boxes(tiles(view, name))
    for box in boxes:
        try:
            view.compare_replicas(name, box)
        except CorruptData as error:
            held = {
                stored(key): None for key, part in view.where(name) if part.target.intersect(box)
            }
            return f"{error} (stored in {', '.join(held)}); {_CAUSE}"
    return None


def tiles(source: ArraySource, key: str) -> Sequence[Box]:
    """The blocks of an array that are each stored in one place."""
    if isinstance(source, ConsolidatedView):
        return list(dict.fromkeys(fragment.target for _, fragment in source.where(key)))
    return [Box.whole(source.arrays()[key].shape)]


def _whole_numbers(values: np.ndarray) -> bool:
    """Whether they are such as a 16-bit integer can be, and not all zero."""
    wide = values.astype(np.float64)
    return bool(np.all(np.abs(wide) <= 1 << 15) and np.all(wide == np.round(wide)) and np.any(wide))
