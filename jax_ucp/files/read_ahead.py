"""Small ranges of one file, mostly one after the other, read over a network by few requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from jax_ucp.files.protocol import FileInfo, Files, RangeRead

# The bytes that are read for the first range; each following read is twice as long as the one
# before.
FIRST_BYTES, MOST_BYTES = 256 << 10, 8 << 20
RUNS_KEPT = 2


class ReadAhead:
    """A file whose last runs of bytes are kept in memory; it is read like `Files`."""

    is_remote = True

    def __init__(self, files: Files | ReadAhead, file: FileInfo):
        self._files, self._file = files, file
        self._runs: deque[tuple[int, np.ndarray]] = deque(maxlen=RUNS_KEPT)
        self._stop, self._length = 0, FIRST_BYTES
        self._lock = threading.Lock()

    def url(self, name: str) -> str:
        return self._files.url(name)

    def read_into(self, reads: Sequence[RangeRead]) -> None:
        for read in reads:
            out = read.out.reshape(-1).view(np.uint8)
            with self._lock:  # a thread that waits mostly finds its bytes in memory afterwards
                out[...] = self._bytes(read.start, read.start + out.size)

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        """The bytes of a range, from the runs in memory or by a new read."""
        for first, run in self._runs:
            if first <= start and stop <= first + run.size:
                return run[start - first : stop - first]
        # the second of two runs repeats the end of the first, for ranges that cross it
        tail = self._runs[-1][1][-FIRST_BYTES:] if self._runs else np.empty(0, np.uint8)
        follows = self._stop - tail.size <= start < self._stop + self._length
        self._length = min(2 * self._length, MOST_BYTES) if follows else FIRST_BYTES
        first = self._stop
        if not follows or stop > self._stop + self._length:
            first, tail = start, tail[:0]
        last = min(max(stop, first + self._length), max(stop, self._file.size))
        run = np.empty(tail.size + last - first, np.uint8)
        run[: tail.size] = tail
        self._files.read_into([RangeRead(self._file, first, run[tail.size :])])
        first -= tail.size
        self._runs.append((first, run))
        self._stop = last
        return run[start - first : stop - first]
