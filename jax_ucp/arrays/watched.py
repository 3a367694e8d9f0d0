"""Functions that see what is read of an array, and the boxes of it that were read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jax_ucp.arrays.protocol import ArraySource
from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex

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
    """A context in which `look` is one of `looks`. It is a class, because there may be one for each
    of a million arrays, and a generator costs more.
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
