"""The physical limit: the same bytes copied once, with all cores, from the page cache or to the
disk.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

PART = 16 << 20


def write_flat(file: Path, nbytes: int) -> Path:
    """A file of `nbytes` of noise."""
    rng = np.random.default_rng(0)
    with file.open("wb") as out:
        for begin in range(0, nbytes, PART):
            out.write(rng.bytes(min(PART, nbytes - begin)))
    return file


def copy_in(file: Path) -> np.ndarray:
    """The file's bytes in fresh memory, each core reading its parts."""
    out = np.empty(file.stat().st_size, np.uint8)
    with file.open("rb", buffering=0) as source, ThreadPoolExecutor(os.cpu_count()) as pool:
        handle = source.fileno()
        starts = range(0, len(out), PART)
        for _ in pool.map(
            lambda at: os.preadv(handle, [memoryview(out)[at : at + PART]], at), starts
        ):
            pass
    return out


def copy_out(data: np.ndarray, file: Path) -> None:
    """Write and sync the bytes to a new file, each core its parts."""
    view = memoryview(data)
    with file.open("wb", buffering=0) as target, ThreadPoolExecutor(os.cpu_count()) as pool:
        handle = target.fileno()
        for _ in pool.map(
            lambda at: os.pwrite(handle, view[at : at + PART], at), range(0, len(data), PART)
        ):
            pass
        os.fsync(handle)
