"""A checkpoint's directory: files written whole, and read whole."""

from __future__ import annotations

import ctypes
import os
import stat
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from jax_ucp.arguments import local_path
from jax_ucp.storage.source_files import look, noted

# A file being written has this at the end of its name, as TensorStore's own have: no leaf is called so.
UNFINISHED = ".__lock"

# From so many bytes on, a file that need not be durable at once is on its way to the disk when it is written, while the
# next ones are: a save then waits at its end for little. Below, the request costs more than it hides.
EARLY_BYTES = 128 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: begin to write what is dirty, and wait for nothing


class Directory:
    """The local directory at `path`.

    A file that is durable is there whole. Nothing is created before the first write. Raises UnsupportedPath for
    a URL: object stores are not read or written yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.abspath(local_path(path))
        self._handle: int | None = None
        self._lock = threading.Lock()

    def spec(self, name: str = "") -> dict[str, Any]:
        """TensorStore's description of this directory, or of the one called `name` inside it."""
        below = f"{name}/" if name else ""
        return {"driver": "file", "path": f"{self.path.rstrip('/')}/{below}"}

    def file(self, name: str) -> str:
        """The path of a file."""
        return f"{self.path}/{name}"

    def has(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        """How many bytes a file has; None if there is none."""
        found = look(self.file(name))
        return found.st_size if found and stat.S_ISREG(found.st_mode) else None

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None if there is none."""
        try:
            with open(noted(self.file(name)), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file, durably: when this returns, it survives the machine."""
        self.put(name, [data], durable=True)

    def put(self, name: str, parts: Iterable[bytes | memoryview], durable: bool) -> None:
        """Write a file from its parts.

        If it need not be durable now, it is so after `sync`; until then a kill may leave a part of it.
        """
        if not durable:
            self._held_open()
        path = self.file(name)
        first = path + UNFINISHED if durable else path
        try:
            handle = _create(first)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            handle = _create(first)
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            if durable:
                os.fsync(handle)
            elif file.tell() >= EARLY_BYTES:
                _begin_write_back(handle)
        if durable:
            os.replace(first, path)
            self._on_handle(os.path.dirname(path), os.fsync)

    def sync(self) -> None:
        """Make everything durable that was put here: once for many files, not a wait for the disk with each.

        Raises OSError for whatever the disk did not take since the first file was put, also if another process's sync
        heard of it before.
        """
        sync_file_system(self._held_open(), self.path)

    def _held_open(self) -> int:
        """A handle of the directory, from before the first file is put until nobody holds this object."""
        with self._lock:
            if self._handle is None:
                os.makedirs(self.path, exist_ok=True)
                self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._handle)
            return self._handle

    def _on_handle(self, path: str, do: Any) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            do(handle)
        finally:
            os.close(handle)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        if self.has(name):
            os.remove(self.file(name))

    def files(self) -> list[str]:
        """The names of all files, those in directories below included, sorted."""
        found = [
            os.path.relpath(os.path.join(parent, name), self.path)
            for parent, _, names in os.walk(self.path)
            for name in names
        ]
        return sorted(found)

    def __str__(self) -> str:
        return self.path


def sync_file_system(handle: int, path: str) -> None:
    """Make all that was written to the file system of an open directory durable.

    Raises OSError for an error of the disk since the handle was opened. The system writes behind our back, and tells
    an error to each handle that was open then, once; to one that is opened later only if nobody was told yet. So the
    handle is opened before anything is written. Source: Linux, `Documentation/core-api/errseq.rst`; syncfs(2) has it
    since 5.8.
    """
    if not hasattr(_libc, "syncfs"):
        os.sync()
    elif _libc.syncfs(handle):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


def _begin_write_back(handle: int) -> None:
    """Ask the kernel to begin writing the file to the disk. Advice: where there is no such call, `sync` does it all."""
    if hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(handle, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
