"""What is proved of an array while somebody reads it, so that it is read once."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex
from jax_ucp.sources.checks import CHECK_BYTES, Alarm, Check, Extent, Note
from jax_ucp.sources.protocol import ArraySource

Look = Callable[[Sequence[Box], Sequence[np.ndarray]], None]


class Watched(ArraySource):
    """A source that shows what is read of its arrays, to whoever watches them."""

    def __init__(self) -> None:
        self._looks: dict[str, dict[Look, int]] = {}

    def watch(self, key: str, look: Look) -> AbstractContextManager[None]:
        """While this lasts, `look` is called with all boxes of an array that are read, and their
        elements; once for each read, also if it watches several times.
        """
        return Watching(self._looks, key, look)

    def _show(self, key: str, boxes: Sequence[Box], arrays: Sequence[np.ndarray]) -> None:
        for look in self._looks.get(key, ()):
            look(boxes, arrays)


class Watching(AbstractContextManager[None]):
    """A look that is one of `looks` while this lasts. Each array among a million has one, which a
    generator would make dearer.
    """

    __slots__ = ("_key", "_look", "_looks")

    def __init__(self, looks: dict[Any, dict[Look, int]], key: Hashable, look: Look):
        self._looks, self._key, self._look = looks, key, look

    def __enter__(self) -> None:
        looks = self._looks.get(self._key, {})
        self._looks[self._key] = looks | {self._look: looks.get(self._look, 0) + 1}

    def __exit__(self, *error: object) -> None:
        looks = self._looks.pop(self._key)
        left = {look: count - (look == self._look) for look, count in looks.items()}
        if left := {look: count for look, count in left.items() if count}:
            self._looks[self._key] = left


Source = TypeVar("Source", bound=Watched)


class Passed:
    """Boxes of an array that were read.

    >>> passed = Passed()
    >>> passed.add([Box((0,), (5,)), Box((5,), (9,))])
    >>> [str(box) for box in passed.rest([Box((1,), (7,)), Box((7,), (12,))])]
    ['[7:12]']
    """

    def __init__(self) -> None:
        self._boxes: list[Box] = []
        self._index: tuple[list[Box], BoxIndex] | None = None

    def add(self, boxes: Sequence[Box], arrays: Sequence[np.ndarray] = ()) -> None:
        self._boxes.extend(boxes)
        self._index = None

    def rest(self, boxes: Sequence[Box]) -> Sequence[Box]:
        """Those of the boxes of which an element was not read."""
        if not self._boxes:
            return boxes
        if self._index is None:
            distinct = list(dict.fromkeys(self._boxes))
            self._index = distinct, BoxIndex(distinct)
        read, index = self._index
        return [box for box in boxes if not _is_covered(box, [read[i] for i in index.meeting(box)])]


class Proof(ABC, Generic[Source]):
    """Elements of an array that something else must agree with: array `key` of `source`.

    `label` says what is looked at.
    """

    label: str
    source: Source
    key: str

    @abstractmethod
    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """What is wrong with the elements of boxes, given one box after the other."""

    @abstractmethod
    def sample(self) -> Sequence[Box]:
        """The boxes that are enough to show what is of another save."""

    @abstractmethod
    def nbytes(self, extent: Extent) -> int:
        """About how many bytes are read to prove it."""

    @property
    def name(self) -> str:
        """What tells it from every other proof of the checkpoint, the same in every process."""
        return f"{type(self).__name__} of {self.key}, {self.label}"

    @property
    def area(self) -> Box:
        """What of the array is compared."""
        return Box.whole(self.source.arrays()[self.key].shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element, where that says how many are compared at once."""
        return self.source.arrays()[self.key].dtype.itemsize

    def read(self, boxes: Sequence[Box]) -> np.ndarray:
        """The elements of boxes, one box after the other."""
        return elements_of(self.source, self.key, boxes)

    def check(self, leaves: Collection[str], extent: Extent) -> Check:
        """The work of proving it, of a sample or of all there is."""
        about = self.label, frozenset(leaves), self.nbytes(extent)
        if extent == "sample":
            return Check(*about, partial(_fault_of_sample, self))
        passing = _Passing(self)
        return Check(*about, passing.run, passing)


def _fault_of_sample(proof: Proof[Any]) -> str | None:
    boxes = proof.sample()
    return proof.fault_in(boxes, proof.read(boxes))


class _Passing:
    """A proof on elements as they pass, and in the end on those that did not."""

    def __init__(self, proof: Proof[Any]):
        self.name = proof.name
        self._proof = proof
        self._passed = Passed()
        self._fault: str | None = None
        self._ended = False

    def watch(self, alarm: Alarm, note: Note) -> AbstractContextManager[None]:
        return self._proof.source.watch(self._proof.key, partial(self._look, alarm, note))

    def add(self, seen: Iterable[Sequence[Box]]) -> None:
        self._passed.add(list(itertools.chain.from_iterable(seen)))

    def run(self) -> str | None:
        """The first fault in the order of the elements; of what passed without one nothing is
        read again.
        """
        self._ended = True
        every = list(pieces(self._proof.area, self._proof.itemsize))
        if not self._fault:
            return self._first_fault(self._passed.rest(every))
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


def _is_covered(box: Box, by: Sequence[Box]) -> bool:
    if any(box.within(other) for other in by):
        return True
    if sum(other.size for other in by) < box.size:
        return False
    met = np.zeros(box.shape, bool)
    for other in by:
        if hit := other.intersect(box):
            met[hit.relative_to(box).index] = True
    return bool(met.all())


def elements_of(source: ArraySource, key: str, boxes: Sequence[Box]) -> np.ndarray:
    """The elements of the boxes, one box after the other."""
    result = np.empty(sum(box.size for box in boxes), source.arrays()[key].dtype)
    source.read_into(key, boxes, split(result, boxes))
    return result


def split(elements: np.ndarray, boxes: Sequence[Box]) -> list[np.ndarray]:
    """The array of each box, where its elements are one box after the other."""
    arrays: list[np.ndarray] = []
    end = 0
    for box in boxes:
        arrays.append(elements[end : end + box.size].reshape(box.shape))
        end += box.size
    return arrays


def _groups(
    proof: Proof[Any], boxes: Sequence[Box], arrays: Sequence[np.ndarray]
) -> Iterator[tuple[list[Box], np.ndarray]]:
    """What passes of a proof's area, in groups that are small enough to be compared at once."""
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
