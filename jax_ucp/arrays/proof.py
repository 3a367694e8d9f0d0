"""Proofs that an array agrees with something else, made on elements that somebody reads anyway."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.arrays.budget import batches
from jax_ucp.arrays.checks import CHECK_BYTES, Check, Extent
from jax_ucp.arrays.evaluate import elements_of, split, tiles
from jax_ucp.arrays.protocol import TOGETHER, ArrayInfo
from jax_ucp.arrays.value import Array
from jax_ucp.arrays.watched import BoxWatcher
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import RUN_ELEMENTS, RUNS, sample_boxes


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
        """The first box that is not all zeros."""
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
        passing = _passing(self._proof, boxes, arrays)
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
