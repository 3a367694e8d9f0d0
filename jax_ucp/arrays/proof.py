"""Proofs that an array agrees with something else, made on elements that somebody reads anyway."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from jax_ucp.arrays.checks import CHECK_BYTES, Alarm, Check, Extent, Note
from jax_ucp.arrays.evaluate import elements_of, watch
from jax_ucp.arrays.value import Array
from jax_ucp.arrays.watched import Coverage
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box


class Proof(ABC):
    """Elements of an array that something else must agree with.

    `label` says what is looked at, and `key` names the array, the same in every process.
    """

    label: str
    key: str
    array: Array

    @abstractmethod
    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first fault in elements of boxes, one box after the other; None if there is none."""

    @abstractmethod
    def sample(self) -> Sequence[Box]:
        """The boxes that a check of extent "sample" reads: a few elements, spread so that they very
        likely differ if the files are of different saves.
        """

    @abstractmethod
    def nbytes(self, extent: Extent) -> int:
        """About how many bytes are read to prove it."""

    @property
    def name(self) -> str:
        """A name that no other proof of the checkpoint has, the same in every process."""
        return f"{type(self).__name__} of {self.key}, {self.label}"

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

    def check(self, leaves: Collection[str], extent: Extent) -> Check:
        """The work of proving it, of a sample or of all there is."""
        about = self.label, frozenset(leaves), self.nbytes(extent)
        if extent == "sample":

            def fault() -> str | None:
                boxes = self.sample()
                return self.fault_in(boxes, self.read(boxes))

            return Check(*about, fault)
        passing = _ProofWatcher(self)
        return Check(*about, passing.run, passing)


class _ProofWatcher:
    """A proof on elements as they pass, and in the end on those that did not."""

    def __init__(self, proof: Proof):
        self.name = proof.name
        self._proof = proof
        self._passed = Coverage()
        self._fault: str | None = None
        self._ended = False

    def watch(self, alarm: Alarm, note: Note) -> AbstractContextManager[None]:
        return watch(self._proof.array, partial(self._look, alarm, note))

    def add(self, seen: Iterable[Sequence[Box]]) -> None:
        self._passed.add(list(itertools.chain.from_iterable(seen)))

    def run(self) -> str | None:
        """The first fault in the order of the elements, or None. Without a fault so far, elements
        that were seen while others read them are not read again.
        """
        self._ended = True
        every = list(pieces(self._proof.area, self._proof.itemsize))
        if not self._fault:
            return self._first_fault(self._passed.missing(every))
        return self._first_fault(every) or self._fault

    def _first_fault(self, boxes: Sequence[Box]) -> str | None:
        proof = self._proof
        faults = (proof.fault_in([box], proof.read([box])) for box in boxes)
        return next(filter(None, faults), None)

    def _look(
        self, alarm: Alarm, note: Note, boxes: Sequence[Box], arrays: Sequence[np.ndarray]
    ) -> None:
        if self._ended or self._fault:
            return
        for group, passing in _groups(self._proof, boxes, arrays):
            if fault := self._proof.fault_in(group, passing):
                self._fault = fault
                alarm()
                return
            self._passed.add(group)
            note(group)


def pieces(area: Box, itemsize: int) -> Iterator[Box]:
    """Blocks of rows of a box, each of about as many bytes as are compared at once."""
    for box in row_boxes(area.shape, itemsize, CHECK_BYTES):
        yield box.shift(area.start)


def _groups(
    proof: Proof, boxes: Sequence[Box], arrays: Sequence[np.ndarray]
) -> Iterator[tuple[list[Box], np.ndarray]]:
    """The elements of a proof's area that were read, in groups small enough to compare at once."""
    group: list[Box] = []
    passing: list[np.ndarray] = []
    nbytes = 0
    for box, array in zip(boxes, arrays, strict=True):
        hit = box.intersect(proof.area)
        for piece in pieces(hit, proof.itemsize) if hit else ():
            if group and nbytes + piece.size * proof.itemsize > CHECK_BYTES:
                yield group, _joined(passing)
                group, passing, nbytes = [], [], 0
            group.append(piece)
            passing.append(array[piece.relative_to(box).index].reshape(-1))
            nbytes += piece.size * proof.itemsize
    if group:
        yield group, _joined(passing)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
