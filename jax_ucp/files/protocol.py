"""Bytes by name: the protocol of a local directory, a bucket, a web server and a hub."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from jax_ucp.errors import FormatError

# Limits for files that are read whole: a pointer to another file, the metadata of other writers,
# and the metadata that this package or stock Orbax writes.
POINTER_BYTES, TEXT_BYTES, OWN_BYTES = 1 << 16, 1 << 28, 1 << 30
# The beginning of a file is read several times: to recognise its format, and then for its header.
HEAD_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The size and the version of a file or a folder at the time when they were asked for.

    Attributes:
        name: Its name below the root: parts between slashes, none of them `..`.
        size: Bytes; 0 of a folder.
        version: Differs once the file is replaced or written to; empty for anything that is not a
            file.
        kind: `file`, `folder`, or `other` for sockets, devices and links that lead nowhere.
    """

    name: str
    size: int
    version: str
    kind: str = "file"


@dataclass(frozen=True, slots=True)
class RangeRead:
    """The bytes of `file` from `start` on, into `out`: row-major, of any strides."""

    file: FileInfo
    start: int
    out: np.ndarray


class Files(Protocol):
    """Files by name under one root. Raises FormatError for a name that is absolute, has `..` or
    leads through a link out of the root; StoreError for storage that does not answer.
    """

    # whether each question is a request over a network, so that few are asked, many at once
    is_remote: ClassVar[bool] = False

    @abstractmethod
    def url(self, name: str = "") -> str:
        """The URL or path of a file, for messages."""
        ...

    def __str__(self) -> str:
        return self.url()

    @abstractmethod
    def list(self, folder: str = "") -> Sequence[FileInfo]:
        """The entries directly in a folder, sorted by name; empty if there is no such folder."""
        ...

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        """Every file below a folder, except in folders to which links lead."""
        for entry in self.list(folder):
            if entry.kind != "folder":
                yield entry
            elif self.link(entry.name) is None:
                yield from self.walk(entry.name)

    @abstractmethod
    def stat(self, name: str) -> FileInfo | None:
        """The file or folder of that name, or None."""
        ...

    def find(self, name: str) -> FileInfo | None:
        """The file of that name, or None; a folder of that name is not a match."""
        info = self.stat(name)
        return info if info is not None and info.kind == "file" else None

    def has_file(self, name: str) -> bool:
        """Whether a file has that name; over a network one request."""
        return self.find(name) is not None

    @abstractmethod
    def link(self, name: str) -> str | None:
        """The target of a link; None for anything that is not a link."""
        ...

    def digest(self, file: FileInfo) -> str:
        """The hash that the storage states for a file: SHA-256 in 64 digits, or git's hash of a
        blob in 40; empty if it states none.
        """
        return ""

    @abstractmethod
    def read_into(self, reads: Sequence[RangeRead]) -> None:
        """Read ranges. Raises CorruptData where a file has changed, or ends too soon."""
        ...

    @abstractmethod
    def write(
        self, name: str, parts: Iterable[bytes | memoryview], *, durable: bool
    ) -> FileInfo | None:
        """Write a file, whole or not at all if `durable`, else after `sync`. Returns its info."""
        ...

    def write_large(
        self, name: str, parts: Iterable[bytes | memoryview], size: int, max_bytes: int
    ) -> None:
        """Write a durable file of `size` bytes, with about `max_bytes` in memory at once."""
        self.write(name, parts, durable=True)

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a whole and durable file. Raises FileExistsError where there is one already."""
        ...

    @abstractmethod
    def sync(self) -> None:
        """Make everything durable that was written here."""
        ...

    @abstractmethod
    def delete(self, name: str) -> None: ...

    @abstractmethod
    def spec(self, name: str = "") -> dict[str, Any]:
        """TensorStore's description of a folder; it follows links. Raises UnsupportedPath."""
        ...

    @abstractmethod
    def join(self, folder: str) -> Files:
        """The files below a folder, whose names cannot lead out of it."""
        ...


def file_size(files: Files, name: str) -> int | None:
    info = files.find(name)
    return info and info.size


def require_small(files: Files, file: FileInfo, most: int) -> None:
    """Raise FormatError for a file that would be read whole, and has more than `most` bytes."""
    if file.size > most:
        raise FormatError(
            f"{files.url(file.name)} has {file.size:,} bytes, and a file of its kind is read whole"
            f" only if it has at most {most:,}: it is damaged, or not what its name says. Restore"
            " it from where the checkpoint comes from"
        )


def read_file(files: Files, name: str) -> bytes | None:
    """All bytes of a file; None if it does not exist, or is deleted meanwhile."""
    info = files.find(name)
    try:
        return info and read_bytes(files, info)
    except FileNotFoundError:
        return None


def read_bytes(files: Files, file: FileInfo, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes of a file, by default all. Raises FormatError if all are more than OWN_BYTES."""
    if stop is None:
        require_small(files, file, OWN_BYTES)
    out = np.empty((file.size if stop is None else stop) - start, np.uint8)
    files.read_into([RangeRead(file, start, out)])
    return out.tobytes()
