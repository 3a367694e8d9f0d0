"""A folder that is there whole, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jax_ucp.files.local import remove, sync_file_system


def check_free(target: Path) -> None:
    """Raises FileExistsError where something other than an empty folder is at `target`."""
    is_empty_folder = target.is_dir() and not any(target.iterdir())
    if target.is_symlink() or (target.exists() and not is_empty_folder):
        raise FileExistsError(f"{target} is in use; give another path")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` at the end, and is deleted on an error.

    It is on disk by then. What a killed process left there is deleted by the next one.

    Raises FileExistsError if `target` is in use, or another process is writing it, OSError for what
    the disk did not take.
    """
    check_free(target)
    partial = target.parent / f".{target.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        _take(lock, partial, target)
        for path in partial.iterdir():
            remove(path)
        try:
            yield partial
            for folder, _, _ in os.walk(partial):
                _sync(Path(folder))
            sync_file_system(lock, str(partial))
            os.rename(partial, target)  # onto an empty folder too, and onto nothing else
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(target.parent)
    finally:
        os.close(lock)


def _take(lock: int, partial: Path, target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
        if not partial.exists() or not os.path.samestat(partial.stat(), os.fstat(lock)):
            raise BlockingIOError
    except BlockingIOError:
        raise FileExistsError(f"another export is writing to {target}; give another path") from None


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
