"""A folder that is there whole, or not at all; or in a bucket, objects of which the last is
there when all are.
"""

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
from jax_ucp.universal.ledger import LEDGER_FILE
from jax_ucp.universal.store import WRITER_FILE, claimed


def check_free(target: FilePath) -> None:
    """Raises FileExistsError where something other than an empty folder is at `target`."""
    is_empty = not any(child.name != WRITER_FILE for child in target.children())
    if target.link() is not None or (target.exists() and not (target.is_dir() and is_empty)):
        raise FileExistsError(f"{target} is in use; give another path")


@contextmanager
def new_objects(target: FilePath, names: Sequence[str]) -> Iterator[None]:
    """While this lasts, a folder of a bucket is kept for one writer. On an error the objects of
    these names are deleted.

    The caller creates the last of them when all others are there, on the condition that it is not.
    One that is killed leaves what it wrote, and `ucp.writer.json`, which names it.

    Raises FileExistsError if `target` is in use, or kept by another.
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
    """A folder to write into, which becomes `target` at the end, and is deleted on an error.

    It is on disk by then. What a killed process left there is deleted by the next one.

    Raises FileExistsError if another process is writing it, OSError for what the disk did not take,
    or if `target` is in use.
    """
    partial = partial_folder(target)
    with being_written(partial, target, fcntl.LOCK_EX) as handle:
        if (partial / LEDGER_FILE).exists():
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
    """Where it is written before it is there."""
    return target.parent / f".{target.name}.partial"


@contextmanager
def being_written(partial: Path, target: Path, lock: int) -> Iterator[int]:
    """A handle of the folder, which is made if need be, and is locked in that way meanwhile.

    Raises FileExistsError if another process is writing there.
    """
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        _take(handle, lock, partial, target)
        yield handle
    finally:
        os.close(handle)


def put_in_place(handle: int, partial: Path, target: Path) -> None:
    """Make a folder durable, of which `handle` was opened before it was written, and then the
    target.
    """
    for folder, _, _ in os.walk(partial):
        _sync(Path(folder))
    sync_file_system(handle, str(partial))
    os.rename(partial, target)  # onto an empty folder too, and onto nothing else
    _sync(target.parent)


def _take(handle: int, lock: int, partial: Path, target: Path) -> None:
    try:
        fcntl.flock(handle, lock | fcntl.LOCK_NB)  # gone with the process, however it ends
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
