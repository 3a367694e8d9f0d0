"""The files that a checkpoint is read from, and whether they are still those that were opened.

Metadata are read when a checkpoint is opened, and bytes when they are wanted. A file that is
replaced in between belongs to another save: what is then read is of two. So every file is looked at
before it is first read, and again at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from jax_ucp.errors import CorruptData

FAULTS_SHOWN = 8

AnyPath = TypeVar("AnyPath", str, Path)
Identity = tuple[int, int, int]  # size, mtime in nanoseconds, inode


class SourceFiles:
    """Files as they were before anything of them was read: size, time of the last change, inode."""

    def __init__(self) -> None:
        self._seen: dict[str, Identity] = {}

    def note(self, path: str | Path, found: os.stat_result | None = None) -> None:
        """Look at a file, if this is the first time; `found` is what was just seen of it."""
        name = os.fspath(path)
        name = name if os.path.isabs(name) else os.path.abspath(name)
        if name in self._seen:
            return
        with suppress(OSError, ValueError):  # one that is not there is for its reader to miss
            self._seen[name] = _identity(found or os.stat(name))

    def identities(self) -> list[tuple[str, Identity]]:
        """Each file by its path, sorted, as it was."""
        return sorted(self._seen.items())

    def changes(self) -> Iterator[str]:
        """What has become of each file that is not as it was."""
        for name, before in self._seen.items():
            try:
                now = _identity(os.stat(name))
            except (FileNotFoundError, NotADirectoryError):
                yield f"{name} is gone"
                continue
            if now != before:
                yield f"{name} is not the file that was opened: {_difference(before, now)}"

    def require_unchanged(self) -> None:
        """Raises CorruptData, naming files, where one is not as it was when it was opened."""
        changes = list(self.changes())
        if not changes:
            return
        more = (
            [f"... and {len(changes) - FAULTS_SHOWN} more"] if len(changes) > FAULTS_SHOWN else []
        )
        title = (
            "the checkpoint changed while it was read, so that what was read may be of two:"
            f" {len(changes)} files"
        )
        lines = "\n  ".join([title, *changes[:FAULTS_SHOWN], *more])
        raise CorruptData(f"{lines}\nOpen it again when nothing writes to it.")


@contextmanager
def opening() -> Iterator[SourceFiles]:
    """While a checkpoint is opened: what readers note goes into the files given, also where one
    opens another.
    """
    if (outer := _opening.get()) is not None:
        yield outer
        return
    files = SourceFiles()
    token = _opening.set(files)
    try:
        yield files
    finally:
        _opening.reset(token)


def noted(path: AnyPath) -> AnyPath:
    """The path of a file that is about to be read, noted for the checkpoint that is being
    opened, if one is.
    """
    files = _opening.get()
    if files is not None:
        files.note(path)
    return path


def look(path: str) -> os.stat_result | None:
    """What the system says of a file, noted like `noted`; None where nothing is."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    files = _opening.get()
    if files is not None:
        files.note(path, found)
    return found


_opening: ContextVar[SourceFiles | None] = ContextVar("opening", default=None)


def _identity(found: os.stat_result) -> Identity:
    return found.st_size, found.st_mtime_ns, found.st_ino


def _difference(before: Identity, now: Identity) -> str:
    (size, changed, inode), (size_now, changed_now, inode_now) = before, now
    found = []
    if size_now != size:
        found.append(f"it has {size_now} bytes, and had {size}")
    if changed_now != changed:
        found.append(
            f"it was written {abs(changed_now - changed) / 1e9:.9g} s"
            f" {_order(changed, changed_now)}"
        )
    if inode_now != inode:
        found.append(f"it has inode {inode_now}, and had {inode}")
    return ", ".join(found)


def _order(before: int, now: int) -> str:
    return "later" if now > before else "earlier"
