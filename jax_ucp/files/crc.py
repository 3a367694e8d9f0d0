"""The CRC-32 of a run of bytes that is read in parts, in any order.

Facts: of two runs one after the other it is `crc(a) * x**(8 * len(b)) + crc(b)`, in polynomials
over GF(2) modulo the one of CRC-32, whose bits zip files have reversed: bit 31 is the number 1.
Source: `crc32_combine` of zlib, whose Python module does not have it; ISO 3309 for the polynomial.
"""

from __future__ import annotations

import bisect
import functools
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jax_ucp.files.ranges import ByteRange

try:  # a tenth of zlib's time
    from isal import isal_zlib

    crc32 = isal_zlib.crc32
except ImportError:  # isal has no wheel for this machine
    crc32 = zlib.crc32

POLYNOMIAL = 0xEDB88320
ONE, X_TO_8 = 1 << 31, 1 << 23


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes, of which the second has `length`, from the CRC-32 of each.

    >>> combined(crc32(b"uni"), crc32(b"versal"), 6) == crc32(b"universal")
    True
    """
    return _product(first, _power(length)) ^ second


def _product(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32."""
    result = 0
    while a:
        if a & ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return result


# what is read in blocks has few lengths
@functools.lru_cache(maxsize=1024)
def _power(nbytes: int) -> int:
    """`x**(8 * nbytes)`."""
    result, square = ONE, X_TO_8
    while nbytes:
        if nbytes & 1:
            result = _product(result, square)
        square = _product(square, square)
        nbytes >>= 1
    return result


class Summed(ByteRange):
    """Bytes that are added to tallies when they are read."""

    def __init__(self, inner: ByteRange, tallies: Sequence[Tally]):
        self.size = inner.size
        self._inner, self._tallies = inner, tallies

    def read_into(self, reads: Sequence[tuple[int, np.ndarray]]) -> None:
        self._inner.read_into(reads)
        run: list[memoryview] = []
        start = stop = 0
        for at, out in reads:
            if at != stop or not out.flags.c_contiguous:  # of which no more than one copy is kept
                self._tally(start, run)
                start, run = at, []
            run.append(np.ascontiguousarray(out).reshape(-1).view(np.uint8).data)
            stop = at + out.nbytes
        self._tally(start, run)

    def _tally(self, start: int, run: Sequence[memoryview]) -> None:
        for tally in self._tallies:
            tally.add(start, *run)


class SummedBytes(NamedTuple):
    """Bytes from `start` to `stop`, and their CRC-32."""

    start: int
    stop: int
    crc: int


def crc_of(parts: Iterable[SummedBytes]) -> int:
    result = 0
    for part in parts:
        result = combined(result, part.crc, part.stop - part.start)
    return result


class Tally:
    """A check that bytes `start` to `stop` have the CRC-32 `crc`, added in any order by any thread.

    `note` is called with each part that is added; `alarm` once all are added, if the CRC-32
    differs.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        crc: int,
        alarm: Callable[[], None] = lambda: None,
        note: Callable[[SummedBytes], None] = lambda part: None,
    ):
        self.start, self.stop, self.crc = start, stop, crc
        self._alarm, self._note = alarm, note
        self._parts: list[SummedBytes] = []  # disjoint, in order
        self._left = stop - start
        self._lock = threading.Lock()

    def add(self, start: int, *run: memoryview) -> None:
        """Add the bytes of a run that begins at `start`, except those that were added before."""
        whole = start, start + sum(map(len, run))
        is_inside = self.start <= start and whole[1] <= self.stop
        if is_inside and self._next_gap(*whole) == whole:  # thousands of parameters by one sum
            crc = functools.reduce(lambda crc, data: crc32(data, crc), run, 0)
            if self._insert(SummedBytes(*whole, crc)):
                return
        for data in run:
            begin, end = max(start, self.start), min(start + len(data), self.stop)
            while gap := self._next_gap(begin, end):
                begin, stop = gap
                part = SummedBytes(begin, stop, crc32(data[begin - start : stop - start]))
                self._insert(part)
            start += len(data)

    def join(self, parts: Iterable[SummedBytes]) -> None:
        """Add parts that another tally of the same bytes has summed."""
        for part in parts:
            self._insert(part)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Runs of bytes that were not added yet, as (start, stop)."""
        begin = self.start
        while gap := self._next_gap(begin, self.stop):
            yield gap
            begin = gap[1]

    def agrees(self) -> bool:
        return not self._left and crc_of(self._parts) == self.crc

    def _insert(self, part: SummedBytes) -> bool:
        """Whether a part was added; it is not if another thread has added some of it meanwhile."""
        with self._lock:
            if self._first_gap(part.start, part.stop) != part[:2]:
                return False
            bisect.insort(self._parts, part)
            self._left -= part.stop - part.start
            is_last = not self._left
        self._note(part)
        if is_last and not self.agrees():
            self._alarm()
        return True

    def _next_gap(self, start: int, stop: int) -> tuple[int, int] | None:
        with self._lock:
            return self._first_gap(start, stop)

    def _first_gap(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first run of bytes between two positions that was not added yet."""
        parts = self._parts
        at = bisect.bisect_right(parts, start, key=lambda part: part.stop)
        while at < len(parts) and parts[at].start <= start:
            start = parts[at].stop
            at += 1
        after = parts[at].start if at < len(parts) else stop
        return (start, min(stop, after)) if start < stop else None
