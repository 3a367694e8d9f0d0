"""Claims, values of what a checkpoint's files state twice, and the checks of them: pieces of work,
on a sample or on all of it. Whoever reads an array, or bytes that are summed, shows them to the
watchers of checks.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jax_ucp.arrays.budget import in_threads
from jax_ucp.errors import CorruptData
from jax_ucp.garbage import gc_paused
from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex

# A sample is a few kilobytes of each thing that is stored twice. A checksum needs all that it sums,
# so a sample has only those of single numbers, such as steps.
Extent = Literal["sample", "full"]
SAMPLE_BYTES = 64

# What a check reads at once of each of two copies, where it reads more.
CHECK_BYTES = 2 << 20


@dataclass(frozen=True)
class Check:
    """A comparison of something that is stored twice, or has a checksum.

    `label` says what is compared, `leaves` name the leaves that rest on it, `nbytes` is about how
    much `run` reads. `run` returns the fault, or None; it does not read again the elements that a
    `watcher` has seen without a fault.
    """

    label: str
    leaves: frozenset[str]
    nbytes: int
    run: Callable[[], str | None]
    watcher: Watcher | None = None

    @property
    def memory(self) -> int:
        """About how many bytes a run holds at once: of two copies, and of one of them rounded."""
        return min(self.nbytes, 4 * CHECK_BYTES)


class Provable(Protocol):
    """A statement about a checkpoint that reading it proves: a value that travels with it."""

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterable[Check]:
        """The work of proving it, of a sample or of all there is; `leaves` rest on it."""
        ...


class LeafClaim(NamedTuple):
    """A statement, and the leaves that rest on it."""

    statement: Provable
    leaves: frozenset[str]


class Claims:
    """Claims that are made when somebody asks for them: at the latest when they are pickled."""

    def __init__(self, make: Callable[[], Iterable[LeafClaim]]):
        self._make = make

    def __iter__(self) -> Iterator[LeafClaim]:
        return iter(self._make())

    def __reduce__(self) -> tuple[type, tuple[list[LeafClaim]]]:
        return list, (list(self),)


def checks_of(claims: Iterable[LeafClaim], extent: Extent) -> Iterator[Check]:
    """The work of proving claims, of a sample or of all there is."""
    for statement, leaves in claims:
        yield from statement.checks(leaves, extent)


def passed_on(claims: Iterable[LeafClaim], users: Mapping[str, Collection[str]]) -> Claims:
    """The claims of a source as those of what is made of it; `users` are by array the leaves."""

    def make() -> Iterator[LeafClaim]:
        for statement, leaves in claims:
            using = frozenset(leaf for name in leaves for leaf in users.get(name, ()))
            yield LeafClaim(statement, using)

    return Claims(make)


def require(check: Check) -> None:
    """Raises CorruptData if the check finds a fault."""
    if fault := check.run():
        raise CorruptData(
            f"{fault.removesuffix('.')}. `verify` (jax-ucp verify) lists every such place"
        )


def verdicts(checks: Iterable[Check], remote: bool = False) -> Iterator[tuple[str, str | None]]:
    """The label of each check with its fault, or None; several run at once, and each sees the
    elements that the others read.
    """
    with gc_paused():
        checks = list(checks)
    with watching(filter(None, (check.watcher for check in checks))):
        faults = faults_of(checks, remote)
    yield from zip((check.label for check in checks), faults, strict=True)


def faults_of(checks: Sequence[Check], remote: bool = False) -> Sequence[str | None]:
    """The fault of each check, or None. Checksums of files come first in a list of checks and run
    last: by then they have seen the bytes that the others read.
    """
    return list(in_threads([check.run for check in reversed(checks)], remote))[::-1]


# Watchers.

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
    with gc_paused(), _lock:
        for watcher in distinct.values():
            for key in watcher.keys:
                added[key].append(watcher)
        for key, some in added.items():
            _watching[key] = *watchers(key), *some
    try:
        yield
    finally:
        with _lock:
            for key in added:
                left = tuple([each for each in _watching[key] if id(each) not in distinct])
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
        self._boxes: dict[Box, None] = {}  # in the order in which they were seen
        self._index: tuple[list[Box], BoxIndex] | None = None

    def see(self, boxes: Sequence[Box], arrays: Sequence[np.ndarray]) -> None:
        """Take note of boxes that were read, with their elements."""
        self.add([boxes])
        self.note(boxes)

    def add(self, seen: Iterable[Sequence[Box]]) -> None:
        self._boxes |= dict.fromkeys(itertools.chain.from_iterable(seen))
        self._index = None

    def missing(self, boxes: Sequence[Box]) -> Sequence[Box]:
        """The boxes with an element that was not read."""
        boxes = [box for box in boxes if box not in self._boxes]
        if not self._boxes or not boxes:
            return boxes
        if self._index is None:
            read = list(self._boxes)
            self._index = read, BoxIndex(read)
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
