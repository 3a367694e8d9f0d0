"""Functions that see what is read of an array, and the boxes of it that were read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex

Look = Callable[[Sequence[Box], Sequence[np.ndarray]], None]


class Watching(AbstractContextManager[None]):
    """A context in which `look` is one of the `looks` at each of the keys; once, also if it watches
    several times. It is a class, because there may be one for each of a million arrays, and a
    generator costs more.
    """

    __slots__ = ("_keys", "_look", "_looks")

    def __init__(self, looks: dict[Any, dict[Any, int]], look: Hashable, *keys: Hashable):
        self._looks, self._look, self._keys = looks, look, keys

    def __enter__(self) -> None:
        for key in self._keys:
            looks = self._looks.get(key, {})
            self._looks[key] = looks | {self._look: looks.get(self._look, 0) + 1}

    def __exit__(self, *error: object) -> None:
        for key in self._keys:
            looks = self._looks.pop(key)
            left = {look: count - (look == self._look) for look, count in looks.items()}
            if left := {look: count for look, count in left.items() if count}:
                self._looks[key] = left


class Coverage:
    """Boxes of an array that were read.

    >>> coverage = Coverage()
    >>> coverage.add([Box((0,), (5,)), Box((5,), (9,))])
    >>> [str(box) for box in coverage.missing([Box((1,), (7,)), Box((7,), (12,))])]
    ['[7:12]']
    """

    def __init__(self) -> None:
        self._boxes: list[Box] = []
        self._index: tuple[list[Box], BoxIndex] | None = None

    def add(self, boxes: Sequence[Box], arrays: Sequence[np.ndarray] = ()) -> None:
        self._boxes.extend(boxes)
        self._index = None

    def missing(self, boxes: Sequence[Box]) -> Sequence[Box]:
        """The boxes with an element that was not read."""
        if not self._boxes:
            return boxes
        if self._index is None:
            distinct = list(dict.fromkeys(self._boxes))
            self._index = distinct, BoxIndex(distinct)
        read, index = self._index
        return [box for box in boxes if not _is_covered(box, [read[i] for i in index.meeting(box)])]


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
