"""Files of the local disk: written whole, read by range, and none outside the root.

Names are read from files (`ucp.json`, Orbax's `_METADATA`, DCP's `.metadata`), and a file may be a
link. Only this module decides which names are inside (`check_name`), and where links may lead
(`Boundary`).
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import shutil
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_ucp.arguments import local_path
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.pread import pread_into
from jax_ucp.files.protocol import FileInfo, Files, RangeRead

# Where files of a snapshot in a Hugging Face cache are links to: blobs named by their hashes.
_BLOB = re.compile(r"(\.\./)+blobs/(?P<digest>[0-9a-f]{40}|[0-9a-f]{64})")

# The most bytes that file systems allow for a part of a name (NAME_MAX) and a whole path
# (PATH_MAX).
MAX_PART_BYTES, MAX_NAME_BYTES = 255, 4096

# The end of the name of a file that is being written, as TensorStore has it; no leaf is called so.
UNFINISHED = ".__lock"

# For a file of at least so many bytes that need not be durable at once, the kernel is asked to
# begin writing it to the disk while the next files are written, so that a save waits less at its
# end. For smaller files the request costs more than it saves.
EARLY_BYTES = 128 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: begin to write what is dirty, and wait for nothing


def check_name(name: str) -> None:
    """Raise FormatError unless `name` consists of parts between slashes that lead down only.

    >>> check_name("params.layers.0/c.0.0")
    >>> check_name("/a")
    Traceback (most recent call last):
    jax_ucp.errors.FormatError: '/a' is not a name of a file inside a checkpoint: it is absolute
    """
    fault = name_fault(name)
    if fault:
        raise FormatError(f"{name!r:.200} is not a name of a file inside a checkpoint: {fault}")


def name_fault(name: str) -> str | None:
    """The reason why a name cannot be of a file inside a directory; None if it can."""
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


@dataclass(frozen=True)
class Boundary:
    """The folder out of which no link below it may lead: `named`, or the folder of a named file.

    `named` itself and the folders above it may be links. For paths outside it, such as a file
    beside a named folder, the boundary is the folder in which they lie.
    """

    named: str
    folder: str

    @classmethod
    def of(cls, named: str) -> Boundary:
        return cls(named, os.path.dirname(named) if os.path.isfile(named) else named)

    def require_inside(self, path: str, real: str) -> None:
        """Raise FormatError if `real` is outside the boundary and Hugging Face's blobs."""
        if f"{self.named}/".startswith(f"{path.rstrip('/')}/"):
            return
        folder = self.folder if _is_below(path, self.folder) else os.path.dirname(path)
        if _is_below(real, folder) or any(_is_below(real, root) for root in _roots(folder)):
            return
        raise FormatError(
            f"{path} is a link to {real}, outside the checkpoint: all its files have to lie in"
            f" {folder}. If that file belongs to it, copy the checkpoint with the files themselves"
            " (cp -rL; cp -rlL makes hard links, which take no space on the same disk); if not,"
            " remove the link"
        )


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


class LocalFiles(Files):
    """The local directory at `root`.

    A name that leads out of the boundary through a link is refused. An opened file is checked once
    more, because a folder may be replaced by a link after it was checked. Nothing is created before
    the first write. Raises UnsupportedPath for a URL of another kind than `file://`.
    """

    def __init__(self, root: str | os.PathLike[str], boundary: Boundary | None = None):
        self.root = os.path.abspath(local_path(root))
        self._boundary = boundary or Boundary(self.root, self.root)
        # folders that were checked: no link leads to them, or one that may be followed
        self._known: set[str] = set()
        self._handle: int | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "_boundary": self._boundary}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _known=set(), _handle=None, _lock=threading.Lock())

    def path(self, name: str) -> str:
        """The path of a file. Raises FormatError for a name that leads outside."""
        path = self._below(name)
        self._look(path)
        return path

    def _below(self, name: str) -> str:
        """The path of a name, no folder above which leads outside through a link."""
        self._check_name(name)
        folder, _, _ = name.rpartition("/")
        if folder not in self._known:
            # A folder that does not exist yet is not recorded: it may be made later.
            parts = folder.split("/") if folder else []
            for outer in itertools.accumulate(parts, "{}/{}".format, initial=""):
                outer = outer.lstrip("/")
                if outer in self._known:
                    continue
                status = self._look(self.url(outer))
                if status is not None and stat.S_ISDIR(status.st_mode):
                    self._known.add(outer)
        return self.url(name)

    def _check_name(self, name: str) -> None:
        check_name(name)

    def spec(self, name: str = "") -> dict[str, Any]:
        path = self.path(name) if name else self.root.rstrip("/")
        return {"driver": "file", "path": f"{path}/"}

    def _look(self, path: str) -> os.stat_result | None:
        """The status of a path, links followed; None if nothing is there. Raises FormatError for a
        link that leads outside.
        """
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISLNK(status.st_mode):
            return status
        self._boundary.require_inside(path, os.path.realpath(path))
        return _stat(path)

    def url(self, name: str = "") -> str:
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def list(self, folder: str = "") -> Sequence[FileInfo]:
        """The entries of a folder; of a link that leads outside, only its name."""
        path = self.path(folder) if folder else self.root
        prefix = f"{folder}/" if folder else ""
        if not os.path.isdir(path):
            return []
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries)
        infos: list[FileInfo] = []
        for name in names:
            status = None
            with suppress(FormatError):
                status = self._look(f"{path}/{name}")
            infos.append(_info(prefix + name, status))
        return infos

    def stat(self, name: str) -> FileInfo | None:
        path = self._below(name) if name else self.root
        if _stat(path) is None:  # a link that leads nowhere, wherever that would be
            return _info(name, None) if os.path.islink(path) else None
        return _info(name, self._look(path))

    def link(self, name: str) -> str | None:
        path = self._below(name) if name else self.root
        return os.readlink(path) if os.path.islink(path) else None

    def digest(self, file: FileInfo) -> str:
        """The name of the blob in a Hugging Face cache to which a file of a snapshot is a link."""
        blob = _BLOB.fullmatch(self.link(file.name) or "")
        return blob["digest"] if blob else ""

    def read_into(self, reads: Sequence[RangeRead]) -> None:
        for file, ranges in itertools.groupby(reads, key=lambda read: read.file):
            with self._opened(file) as handle:
                pread_into(handle, ranges)

    @contextmanager
    def _opened(self, file: FileInfo) -> Iterator[int]:
        """A descriptor of the file. Raises CorruptData if it is no longer the same file."""
        path = self.path(file.name)
        # does not wait for a FIFO that has replaced the file
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if _info(file.name, os.fstat(handle)) != file:
                raise CorruptData("the file has changed since it was opened; open it again")
            with suppress(FileNotFoundError):  # a system without /proc
                self._boundary.require_inside(path, os.readlink(f"/proc/self/fd/{handle}"))
            yield handle
        finally:
            os.close(handle)

    def write(self, name: str, parts: Iterable[bytes | memoryview], *, durable: bool) -> None:
        if not durable:
            self._open_root()
        path = self.path(name)
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
            elif file.tell() >= EARLY_BYTES and hasattr(_libc, "sync_file_range"):
                # advice to the kernel: where there is no such call, `sync` does it all
                whole = ctypes.c_int64(0), ctypes.c_int64(0)
                _libc.sync_file_range(handle, *whole, _SYNC_FILE_RANGE_WRITE)
        if durable:
            os.replace(first, path)
            sync_folder(os.path.dirname(path))

    def create(self, name: str, data: bytes) -> None:
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # of several writers of this file, the one whose link is first has created it
        first = f"{path}.{os.getpid()}-{threading.get_ident()}{UNFINISHED}"
        try:
            with os.fdopen(_create(first), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _link(first, path)
        finally:
            os.unlink(first)
        sync_folder(os.path.dirname(path))

    def sync(self) -> None:
        """Make everything durable that was written here, with one wait for the disk.

        Raises OSError for whatever the disk did not take since the first file was written.
        """
        sync_file_system(self._open_root(), self.root)

    def _open_root(self) -> int:
        """A handle of the directory, opened before the first write and closed with this object."""
        with self._lock:
            if self._handle is None:
                os.makedirs(self.root, exist_ok=True)
                self._handle = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._handle)
            return self._handle

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):  # another process may have done it
            os.remove(self.path(name))

    def join(self, folder: str) -> LocalFiles:
        return LocalFiles(self.path(folder) if folder else self.root, self._boundary)


def _link(first: str, path: str) -> None:
    """Give a file another name. Raises FileExistsError where it is taken.

    A file system without hard links (some of FUSE, SMB) cannot do that in one step: there one of
    two writers may replace what the other has just created.
    """
    try:
        os.link(first, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        shutil.copyfile(first, path + UNFINISHED)
        os.replace(path + UNFINISHED, path)


class WholeDisk(LocalFiles):
    """All files of this machine, by absolute paths without the leading slash."""

    def __init__(self, named: str) -> None:
        super().__init__("/", Boundary.of(named))

    def _check_name(self, name: str) -> None:
        """Accept any name that a user gives; `FilePath` checks names that were read from files."""


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _info(name: str, status: os.stat_result | None) -> FileInfo:
    if status is not None and stat.S_ISREG(status.st_mode):
        version = f"{status.st_mtime_ns}-{status.st_ino}"
        return FileInfo(name, status.st_size, version)
    is_folder = status is not None and stat.S_ISDIR(status.st_mode)
    return FileInfo(name, 0, "", "folder" if is_folder else "other")


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _roots(path: str) -> Iterator[str]:
    """The folders into which links may lead: the directory itself, and the blobs of a Hugging Face
    snapshot.

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
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_file_system(handle: int, path: str) -> None:
    """Make everything durable that was written to the file system of an open directory.

    Raises OSError for an error of the disk since the handle was opened, before anything is written:
    the system reports an error once to each handle that was open then. Source: Linux,
    `Documentation/core-api/errseq.rst`; syncfs(2) has it since 5.8.
    """
    if not hasattr(_libc, "syncfs"):
        os.sync()
    elif _libc.syncfs(handle):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _create(path: str) -> int:
    return os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
    )
