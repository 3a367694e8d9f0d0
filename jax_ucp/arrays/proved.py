"""Reads of an opened checkpoint that are proved: by a sample before a leaf is first read, or
in full while everything is read.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from jax_ucp.arrays.checks import Check, Watcher, faults_of, require
from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.garbage import gc_paused
from jax_ucp.layout.box import Box
from jax_ucp.tree import Leaf

T = TypeVar("T")


class ProvedReads:
    """Before the first read of a leaf a sample of what is stored twice of it is compared; once,
    whoever reads.

    A leaf whose sample differs is refused every time.
    """

    def __init__(self, contents: Contents):
        self._contents = contents
        self._checks: dict[str, list[Check]] | None = None
        self._passed: set[int] = set()
        self._lock = threading.Lock()

    def read(self, leaf: Leaf, box: Box | None = None) -> np.ndarray:
        """The array of a leaf, or one box of it. Raises CorruptData where what is stored twice
        differs.
        """
        with self._lock:
            if self._checks is None:
                self._checks = defaultdict(list)
                for check in self._contents.checks("sample"):
                    for name in check.leaves:
                        self._checks[name].append(check)
            for check in self._checks.get(leaf.name, ()):
                if id(check) not in self._passed:
                    require(check)
                    self._passed.add(id(check))
        return self._contents.arrays.read(leaf.name, box or Box.whole(leaf.shape))


def only_ones(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Values by name, without those that share theirs with another."""
    values: dict[str, T] = {}
    shared: set[str] = set()
    for name, value in named:
        if values.setdefault(name, value) is not value:
            shared.add(name)
    return {name: value for name, value in values.items() if name not in shared}


def _forget(seen: object) -> None:
    """A sink that drops notes."""


class Proofs:
    """All that can be proved of a checkpoint, while somebody reads it; or those of its checks that
    are `ours`, where other processes run the rest.

    With `taking_notes`, what is seen is kept for another process that asks for it.
    """

    def __init__(
        self,
        contents: Contents,
        taking_notes: bool = False,
        ours: Callable[[Check], bool] = lambda check: True,
    ):
        self.contents = contents
        self._taking_notes = taking_notes
        self._seen: dict[str, list[Any]] = defaultdict(list)
        with gc_paused():
            self._checks = list(filter(ours, contents.checks("full")))
        self._failed = threading.Event()
        self._early: dict[int, Future[str | None]] = {}  # by the place of a check

    def require_sound_so_far(self) -> None:
        """Raises CorruptData where what was read already has a fault: no more of it need be read,
        and `proved` says what is wrong.
        """
        if self._failed.is_set():
            raise CorruptData(f"{self.contents.path} contradicts itself")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, the checks look at what is read. Those that read nothing of arrays, and
        only wait for a network, run meanwhile.
        """
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            with gc_paused():
                for watcher in filter(None, (check.watcher for check in self._checks)):
                    note = partial(self._note, watcher.name) if self._taking_notes else _forget
                    stack.enter_context(watcher.watch(self._failed.set, note))
            if self.contents.files.is_remote and not self._taking_notes:
                self._early = {
                    i: pool.submit(check.run)
                    for i, check in enumerate(self._checks)
                    if not check.nbytes and check.watcher is None
                }
            yield

    def _note(self, name: str, seen: Any) -> None:
        self._seen[name].append(seen)

    def take(self) -> dict[str, list[Any]]:
        """The notes of watchers since the last call, by their names."""
        seen, self._seen = self._seen, defaultdict(list)
        return seen

    def add(self, seen: Mapping[str, Iterable[Any]]) -> None:
        """Add the notes of another process that reads the same checkpoint.

        Notes for a name that two watchers share are dropped: their checks read again.
        """
        for name in seen.keys() & self._named.keys():
            self._named[name].add(seen[name])

    @cached_property
    def _named(self) -> Mapping[str, Watcher]:
        watchers = (check.watcher for check in self._checks if check.watcher)
        return only_ones((watcher.name, watcher) for watcher in watchers)

    def contradiction(self) -> CorruptData | None:
        """The error that names all faults, or None. Reads the elements that were not read yet."""
        checks = list(self._checks)
        for i, fault in self._early.items():
            checks[i] = replace(checks[i], run=fault.result)
        found = faults_of(checks, self.contents.files.is_remote)
        if not (faults := list(filter(None, found))):
            return None
        title = f"{self.contents.path} contradicts itself in {len(faults)} places:"
        return CorruptData(title, faults)


@contextmanager
def proved(proofs: Proofs, undo: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """A context in which every read is compared with second copies and checksums; the elements that
    nobody read are compared too at its end, or when the given function is called, which is when all
    that is to be written has been read.

    Raises CorruptData where something differs: when it has called `undo`, or for what changed since
    the checkpoint was opened.
    """
    is_proved = False

    def require_proved(failed: FormatError | None = None) -> None:
        nonlocal is_proved
        contradiction = None if is_proved else proofs.contradiction()
        is_proved = True
        if contradiction is not None:
            proofs.contents.files.require_unchanged()
            undo()
            raise contradiction from failed

    with proofs.watching():
        try:
            yield require_proved
        except FormatError as error:
            require_proved(error)
            raise
        require_proved()
