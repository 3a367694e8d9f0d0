"""Watchers: whoever reads an array, or bytes that are summed, shows them to its watchers."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex

# By what is read: the identity of an array expression, an array of a store, a region of a table.
_watching: dict[Hashable, tuple[Watcher, ...]] = {}
_lock = threading.Lock()  # of changes to it; who reads sees one tuple or the next


class Watcher(ABC):
    """A record of what was seen at `keys` while others read it, here and in other processes.

    `alarm` is called when a fault shows. `note` is called with what was seen without a fault, a
    small value that can be pickled.
    """

    def __init__(self, *keys: Hashable):
        self.keys = keys
        self.alarm: Callable[[], None] = lambda: None
        self.note: Callable[[Any], None] = lambda seen: None

    @abstractmethod
    def add(self, seen: Iterable[Any]) -> None:
        """Add the notes of the watcher of the same check in another process."""


@contextmanager
def watching(several: Iterable[Watcher]) -> Iterator[None]:
    """Context in which the watchers see what is read."""
    distinct = {id(watcher): watcher for watcher in several}
    added: dict[Hashable, list[Watcher]] = defaultdict(list)
    for watcher in distinct.values():
        for key in watcher.keys:
            added[key].append(watcher)
    with _lock:
        for key, some in added.items():
            _watching[key] = *watchers(key), *some
    try:
        yield
    finally:
        with _lock:
            for key in added:
                left = tuple(each for each in _watching[key] if id(each) not in distinct)
                if left:
                    _watching[key] = left
                else:
                    del _watching[key]


def watchers(key: Hashable) -> Sequence[Any]:
    """The watchers of what is read at a key, whose kind follows from that of the key."""
    return _watching.get(key, ())


class BoxWatcher(Watcher):
    """The boxes of an array that were read.

    >>> watcher = BoxWatcher()
    >>> watcher.see([Box((0,), (5,)), Box((5,), (9,))], [])
    >>> [str(box) for box in watcher.missing([Box((1,), (7,)), Box((7,), (12,))])]
    ['[7:12]']
    """

    def __init__(self, *keys: Hashable):
        super().__init__(*keys)
        self._boxes: list[Box] = []
        self._index: tuple[list[Box], BoxIndex] | None = None

    def see(self, boxes: Sequence[Box], arrays: Sequence[np.ndarray]) -> None:
        """Take note of boxes that were read, with their elements."""
        self.add([boxes])
        self.note(boxes)

    def add(self, seen: Iterable[Sequence[Box]]) -> None:
        self._boxes.extend(itertools.chain.from_iterable(seen))
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
