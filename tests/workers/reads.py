"""Counts the bytes that the process asks of files by position, as restores do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bytes_read() -> Iterator[Callable[[], int]]:
    """A function that says how many bytes have been read since the context began."""
    total = 0
    pread, preadv = os.pread, os.preadv

    def counted_pread(handle: int, length: int, at: int) -> bytes:
        nonlocal total
        data = pread(handle, length, at)
        total += len(data)
        return data

    def counted_preadv(handle: int, buffers: list[memoryview], at: int) -> int:
        nonlocal total
        length = preadv(handle, buffers, at)
        total += length
        return length

    os.pread, os.preadv = counted_pread, counted_preadv
    try:
        yield lambda: total
    finally:
        os.pread, os.preadv = pread, preadv
