"""Reads of an opened checkpoint that are proved: by a sample before a leaf is first read, or
in full while everything is read.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jax_ucp.arrays.checks import Check, faults_of, require, watching
from jax_ucp.arrays.contents import Contents
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.garbage import gc_paused
from jax_ucp.layout.box import Box
from jax_ucp.tree import Leaf


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
        self._seen: dict[int, list[Any]] = defaultdict(list)  # by the place of a check
        with gc_paused():
            self.checks: Sequence[Check] = list(filter(ours, contents.checks("full")))
        self._failed = threading.Event()
        self._early: dict[int, Future[str | None]] = {}

    def require_sound_so_far(self) -> None:
        """Raises CorruptData where what was read already has a fault: no more of it need be read,
        and `proved` says what is wrong.
        """
        if self._failed.is_set():
            raise CorruptData(f"{self.contents.path} contradicts itself")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the checks look at what is read. Those that read nothing of arrays, and
        only wait for a network, run meanwhile.
        """
        with gc_paused():
            watchers = {i: c.watcher for i, c in enumerate(self.checks) if c.watcher is not None}
            for i, watcher in watchers.items():
                watcher.alarm = self._failed.set
                if self._taking_notes:
                    watcher.note = partial(self._note, i)
        with ThreadPoolExecutor(1) as pool, watching(watchers.values()):
            if self.contents.files.is_remote and not self._taking_notes:
                self._early = {
                    i: pool.submit(check.run)
                    for i, check in enumerate(self.checks)
                    if not check.nbytes and check.watcher is None
                }
            yield

    def _note(self, i: int, seen: Any) -> None:
        self._seen[i].append(seen)

    def take(self) -> dict[int, list[Any]]:
        """The notes of watchers since the last call, by the places of their checks."""
        seen, self._seen = self._seen, defaultdict(list)
        return seen

    def add(self, seen: Mapping[int, Iterable[Any]]) -> None:
        """Add the notes of a process that was sent the checkpoint."""
        for i, notes in seen.items():
            if watcher := self.checks[i].watcher:
                watcher.add(notes)

    def contradiction(self) -> CorruptData | None:
        """The error that names all faults, or None. Reads the elements that were not read yet."""
        checks = list(self.checks)
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
