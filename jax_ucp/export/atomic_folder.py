"""A folder that appears whole, or not at all; in a bucket the last object is the commit."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jax_ucp.errors import StoreError
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.local import remove, sync_file_system
from jax_ucp.files.path import FilePath
from jax_ucp.jobs.ledger import LEDGER_FILE, WRITER_FILE, claimed


def check_free(target: FilePath) -> None:
    """Raise FileExistsError unless `target` is free or empty but for `ucp.writer.json`."""
    is_empty = not any(child.name != WRITER_FILE for child in target.children())
    if target.link() is not None or (target.exists() and not (target.is_dir() and is_empty)):
        raise FileExistsError(f"{target} is in use; give another path")


@contextmanager
def new_objects(target: FilePath, names: Sequence[str]) -> Iterator[None]:
    """Context that reserves a folder of a bucket for one writer, and on an error deletes the
    objects with these names; not after FileExistsError, because another writer may have written
    them.

    The caller creates the last of them when all others exist, on the condition that it does not
    exist. A killed writer leaves its objects, and `ucp.writer.json`, which names it.

    Raises FileExistsError if `target` is in use, or reserved by another writer.
    """
    check_free(target)
    files = target.folder()
    with claimed(files):
        check_free(target)
        try:
            yield
        except FileExistsError:
            raise FileExistsError(
                f"{target} was written by another meanwhile: its files may be of both. Delete it,"
                " and export again, one writer to each path"
            ) from None
        except BaseException:
            with suppress(StoreError):
                files.delete(names[-1])
                each_file(files, files.delete, names[:-1])
            raise


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` at the end, durably; deleted on an error.

    Files that a killed process left in it are deleted by the next one.

    Raises FileExistsError if `target` or the folder is in use by another process or by shares,
    OSError if the disk refuses a write.
    """
    partial = partial_folder(target)
    with being_written(partial, target, fcntl.LOCK_EX) as handle:
        if (shared_folder(target) / LEDGER_FILE).exists():
            raise FileExistsError(
                f"{partial} has what shares of an export to {target} have written: run all of them,"
                " or delete that folder"
            )
        for path in partial.iterdir():
            remove(path)
        try:
            yield partial
            put_in_place(handle, partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def partial_folder(target: Path) -> Path:
    """The hidden folder in which `target` is written."""
    return target.parent / f".{target.name}.partial"


def shared_folder(target: Path) -> Path:
    """The folder in which shares write `target`, with their ledgers."""
    return partial_folder(target) / "files"


@contextmanager
def being_written(partial: Path, target: Path, lock: int) -> Iterator[int]:
    """A handle of the folder `partial` under a `lock` (flock). Raises FileExistsError if taken."""
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        _take(handle, lock, partial, target)
        yield handle
    finally:
        os.close(handle)


def put_in_place(handle: int, partial: Path, target: Path) -> None:
    """Rename `partial` to `target`, durably. `handle` of it was opened before it was written."""
    for folder, _, _ in os.walk(partial):
        _sync(Path(folder))
    sync_file_system(handle, str(partial))
    os.rename(partial, target)  # onto an empty folder too, and onto nothing else
    _sync(target.parent)


def _take(handle: int, lock: int, partial: Path, target: Path) -> None:
    try:
        fcntl.flock(handle, lock | fcntl.LOCK_NB)  # released when the process ends, however it ends
        if not partial.exists() or not os.path.samestat(partial.stat(), os.fstat(handle)):
            raise BlockingIOError
    except BlockingIOError:
        raise FileExistsError(f"another export is writing to {target}; give another path") from None


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
