"""Reads of an opened checkpoint, leaf by leaf, each proved by a sample before it is first read."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.sources.checks import Check, require
from jax_ucp.sources.contents import Contents
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
            self._prove(leaf.name)
        return self._contents.arrays.read(leaf.name, box or Box.whole(leaf.shape))

    def _prove(self, leaf: str) -> None:
        if self._checks is None:
            self._checks = defaultdict(list)
            for check in self._contents.checks("sample"):
                for name in check.leaves:
                    self._checks[name].append(check)
        for check in self._checks.get(leaf, ()):
            if id(check) not in self._passed:
                require(check)
                self._passed.add(id(check))
