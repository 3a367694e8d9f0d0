"""A checkpoint's directory: files written whole and read whole, and none outside it.

Names of files come out of files: leaves in `ucp.json` and in Orbax's `_METADATA`, spans in DCP's
`.metadata`. Here is decided which of them are names of something inside; everything that opens such
a name asks `Directory.file`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jax_ucp.arguments import local_path
from jax_ucp.errors import FormatError
from jax_ucp.files.source_files import look, noted

# More than this no file system has for a part of a name (NAME_MAX), or for a whole path (PATH_MAX),
# in bytes.
MAX_PART_BYTES, MAX_NAME_BYTES = 255, 4096

# A file being written has this at the end of its name, as TensorStore's own have: no leaf is called
# so.
UNFINISHED = ".__lock"

# From so many bytes on, a file that need not be durable at once is on its way to the disk when it
# is written, while the next ones are: a save then waits at its end for little. Below, the request
# costs more than it hides.
EARLY_BYTES = 128 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: begin to write what is dirty, and wait for nothing


def check_name(name: str) -> None:
    """Raise FormatError unless `name` is parts between slashes that lead down from a directory, and
    nowhere else.

    >>> check_name("params.layers.0/c.0.0")
    >>> check_name("/a")
    Traceback (most recent call last):
    jax_ucp.errors.FormatError: '/a' is no name of a file inside a checkpoint: it is absolute
    """
    fault = name_fault(name)
    if fault:
        raise FormatError(f"{name!r:.200} is no name of a file inside a checkpoint: {fault}")


def name_fault(name: str) -> str | None:
    """Why a name is none of a file inside a directory; None if it is one."""
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        return "it cannot be encoded in UTF-8"
    parts = name.split("/")
    if name.startswith("/"):
        return "it is absolute"
    for part in ("", ".", ".."):
        if part in parts:
            return f"it has the part {part!r}"
    if "\0" in name or "\\" in name:
        return "it has a NUL or a backslash"
    if len(raw) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return (
            f"it is longer than {MAX_PART_BYTES} bytes between slashes, or {MAX_NAME_BYTES} in all"
        )
    return None


class Directory:
    """The local directory at `path`.

    A file that is durable is there whole. Nothing is created before the first write. A name that
    leads outside, by its parts or through a link, is refused with a FormatError, whatever is asked
    of it; links into the store of blobs of a Hugging Face cache are followed, because all its files
    are such links. The links are those found when a name is first used: who can change the
    directory meanwhile is not kept out.

    Raises UnsupportedPath for a URL: object stores are not read or written yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.abspath(local_path(path))
        # folders inside, to which no link leads, or one that may be followed
        self._known: set[str] = set()
        self._handle: int | None = None
        self._lock = threading.Lock()

    def spec(self, name: str = "") -> dict[str, Any]:
        """TensorStore's description of this directory, or of the one called `name` inside it.

        TensorStore follows every link: of a directory that others wrote, `check_links` first.
        """
        path = self.file(name) if name else self.path.rstrip("/")
        return {"driver": "file", "path": f"{path}/"}

    def file(self, name: str) -> str:
        """The path of a file, which lies inside. Raises FormatError for a name that leads
        outside.
        """
        check_name(name)
        folder, _, _ = name.rpartition("/")
        if folder not in self._known:
            self._check_folders(folder)
        path = f"{self.path}/{name}"
        if os.path.islink(path):
            self._check_link(path)
        return path

    def check_links(self) -> None:
        """Raise FormatError if any link in the directory leads out of it."""
        for entry in _entries(self.path):
            if entry.is_symlink():
                self._check_link(entry.path)

    def _check_folders(self, folder: str) -> None:
        """Look at each folder on the way; one that is not there yet may be made later, and is
        looked at again.
        """
        path = self.path
        for part in folder.split("/") if folder else ():
            path = f"{path}/{part}"
            if os.path.islink(path):
                self._check_link(path)
            elif not os.path.isdir(path):
                return
        self._known.add(folder)

    def _check_link(self, path: str) -> None:
        real = os.path.realpath(path)
        if not any(os.path.commonpath((root, real)) == root for root in _roots(self.path)):
            raise FormatError(
                f"{path} is a link to {real}, outside the checkpoint, in which all its files have"
                " to lie. If that file belongs to it, copy the checkpoint with the files"
                " themselves (cp -L)"
            )

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

        If it need not be durable now, it is so after `sync`; until then a kill may leave a part of
        it.
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
        """Make everything durable that was put here: once for many files, not a wait for the disk
        with each.

        Raises OSError for whatever the disk did not take since the first file was put, also if
        another process's sync heard of it before.
        """
        sync_file_system(self._held_open(), self.path)

    def _held_open(self) -> int:
        """A handle of the directory, from before the first file is put until nobody holds this
        object.
        """
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
        return sorted(
            os.path.relpath(entry.path, self.path)
            for entry in _entries(self.path)
            if not entry.is_dir()
        )

    def nbytes(self) -> int:
        """How many bytes all files have together."""
        return sum(entry.stat().st_size for entry in _entries(self.path) if entry.is_file())

    def __str__(self) -> str:
        return self.path


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    """Everything below a directory, if there is one; of a link only itself."""
    folders = [path] if os.path.isdir(path) else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _roots(path: str) -> Iterator[str]:
    """Where links in a directory may lead: into it, and from a snapshot in a Hugging Face cache to
    the blobs beside.

    Source: `huggingface_hub`, "Understand caching": `models--org--name/snapshots/<commit>/<file>`
    is a link into `models--org--name/blobs`.
    """
    root = os.path.realpath(path)
    yield root
    cache, _, snapshot = root.rpartition("/snapshots/")
    blobs = f"{cache}/blobs"
    if snapshot and os.path.isdir(blobs) and not os.path.islink(blobs):
        yield blobs


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that it has."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_file_system(handle: int, path: str) -> None:
    """Make all that was written to the file system of an open directory durable.

    Raises OSError for an error of the disk since the handle was opened. The system writes behind
    our back, and tells an error to each handle that was open then, once; to one that is opened
    later only if nobody was told yet. So the handle is opened before anything is written. Source:
    Linux, `Documentation/core-api/errseq.rst`; syncfs(2) has it since 5.8.
    """
    if not hasattr(_libc, "syncfs"):
        os.sync()
    elif _libc.syncfs(handle):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _create(path: str) -> int:
    return os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
    )


def _begin_write_back(handle: int) -> None:
    """Ask the kernel to begin writing the file to the disk. Advice: where there is no such call,
    `sync` does it all.
    """
    if hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(handle, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
