"""Counts the bytes of arrays that the process asks of files by position, as restores do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jax_ucp.universal.store import METADATA_FILE


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
        if not os.readlink(f"/proc/self/fd/{handle}").endswith(METADATA_FILE):
            total += length
        return length

    os.pread, os.preadv = counted_pread, counted_preadv
    try:
        yield lambda: total
    finally:
        os.pread, os.preadv = pread, preadv
