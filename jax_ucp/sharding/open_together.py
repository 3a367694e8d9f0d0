"""A checkpoint opened by all processes: process 0 reads its metadata for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ucp.files.listing import ListedFiles, Listing
from jax_ucp.files.path import FilePath
from jax_ucp.sharding.share import allgathered, raise_together, require_alike
from jax_ucp.universal.metadata import digest

T = TypeVar("T")

# So much at a time is in the memory of a device of each process.
PART_BYTES = 16 << 20

FAILED = "could not open the checkpoint, and no process has it"


def open_together(at: FilePath, open_at: Callable[[FilePath], T]) -> T:
    """The result of `open_at` for the path; behind a network process 0 asks the store, and sends
    the answers to the others.

    Every process must call this. Where one fails all raise: it its own error, the others that
    error's class of ours, or else CorruptData, with its words. Raises TreeMismatch where the
    processes do not open the same path.
    """
    if jax.process_count() == 1:
        return open_at(at)
    require_alike(
        digest(str(at).encode()),
        f"open another checkpoint than this one, {at}: with share_reads=True all processes must"
        " open the same path",
    )
    if not at.files.is_remote:
        return _told(lambda: open_at(at))
    listing = Listing(is_shared=True)

    def open_listed() -> T:
        return open_at(FilePath(ListedFiles(at.files, listing), at.key))

    if jax.process_index() == 0:
        opened = _told(open_listed)
        _broadcast(listing.encode())
        _told(lambda: None)
    else:
        _told(lambda: None)
        listing = Listing.decode(_broadcast(b""))
        opened = _told(open_listed)
    listing.close()
    return opened


def _told(do: Callable[[], T]) -> T:
    """The result of `do`, which all processes do at once. Raises in all where one fails."""
    results: list[T] = []
    fault = None
    try:
        results.append(do())
    except Exception as error:
        fault = error
    raise_together(fault, FAILED)
    return results[0]


def _broadcast(data: bytes) -> bytes:
    size = int(allgathered(str(len(data)).encode())[0])
    out = np.zeros(size, np.uint8)
    out[: len(data)] = np.frombuffer(data, np.uint8)
    for start in range(0, size, PART_BYTES):
        part = out[start : start + PART_BYTES]
        part[...] = multihost_utils.broadcast_one_to_all(part)
    return out.tobytes()
