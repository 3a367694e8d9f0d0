"""Paths in any `Files`, as `pathlib.Path` is for the local disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from jax_ucp.arguments import URL
from jax_ucp.errors import FormatError, UnsupportedPath
from jax_ucp.files.local import check_name
from jax_ucp.files.locations import locate
from jax_ucp.files.protocol import (
    HEAD_BYTES,
    POINTER_BYTES,
    TEXT_BYTES,
    FileInfo,
    Files,
    read_bytes,
    require_small,
)
from jax_ucp.files.source_files import note


@dataclass(frozen=True, order=True)
class FilePath:
    """A file or folder at `key` of `files`, which need not exist. A name that was read from a file
    becomes a path by `/`, which raises FormatError for a name that does not lead down.

    >>> path = file_path("/runs/7/model.safetensors")
    >>> path.name, path.suffix, str(path.parent / "config.json")
    ('model.safetensors', '.safetensors', '/runs/7/config.json')
    """

    files: Files = field(compare=False, repr=False)
    key: str

    def __str__(self) -> str:
        return self.files.url(self.key)

    def __truediv__(self, name: str) -> FilePath:
        check_name(name)
        return FilePath(self.files, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> FilePath:
        return FilePath(self.files, self.key.rpartition("/")[0])

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1]

    @property
    def stem(self) -> str:
        return os.path.splitext(self.name)[0]

    def with_name(self, name: str) -> FilePath:
        return self.parent / name

    def below(self, folder: FilePath) -> str:
        return self.key[len(folder.key) :].lstrip("/")

    def info(self) -> FileInfo | None:
        return self.files.stat(self.key)

    def exists(self) -> bool:
        info = self.info()
        return info is not None and (info.kind != "other" or self.link() is None)

    def is_file(self) -> bool:
        return self.files.has_file(self.key)

    def is_dir(self) -> bool:
        info = self.info()
        return info is not None and info.kind == "folder"

    def link(self) -> str | None:
        return self.files.link(self.key)

    def size(self) -> int:
        """The number of bytes of the file; 0 for a folder, or if it does not exist."""
        info = self.info()
        return info.size if info else 0

    def file(self) -> FileInfo:
        """The file. Raises FileNotFoundError, IsADirectoryError, or FormatError for a device."""
        info = self.info()
        if info is not None and info.kind == "other" and self.link() is None:
            raise FormatError(f"{self} is a FIFO, a socket or a device, where a file should be")
        if info is None or info.kind == "other":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        if info.kind == "folder":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        return info

    def folder(self) -> Files:
        """The files below this folder, whose names cannot lead out of it."""
        return self.files.join(self.key)

    def children(self) -> Sequence[FilePath]:
        return [FilePath(self.files, info.name) for info in self.files.list(self.key)]

    def matching(self, suffix: str) -> Sequence[FilePath]:
        return [child for child in self.children() if child.name.endswith(suffix)]

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes of the file from `start` to `stop`, or to its end if that comes before."""
        file = self.file()
        note(self.files, file)
        return self._read(file, start, min(file.size, stop))

    def _read(self, file: FileInfo, start: int, stop: int) -> bytes:
        if not self.files.is_remote or stop > HEAD_BYTES:
            return read_bytes(self.files, file, start, stop)
        # all of the beginning, which a listing keeps for later reads
        return read_bytes(self.files, file, 0, min(file.size, HEAD_BYTES))[start:stop]

    def read_bytes(self, most: int = TEXT_BYTES) -> bytes:
        """All bytes of the file. Raises FormatError if they are more than `most`."""
        require_small(self.files, self.file(), most)
        return self.read_range(0, most)

    def read_pointer(self) -> str:
        """The text of a pointer file (`latest`), not noted as a source, because it may change."""
        file = self.file()
        require_small(self.files, file, POINTER_BYTES)
        return self.read_unnoted(file).decode(errors="replace")

    def read_unnoted(self, file: FileInfo) -> bytes:
        """All bytes of the file, which is not recorded as a source of the checkpoint."""
        return self._read(file, 0, file.size)

    def read_text(self, most: int = TEXT_BYTES) -> str:
        """The text of the file; bytes that are not UTF-8 are replaced."""
        return self.read_bytes(most).decode(errors="replace")


def file_path(path: str | os.PathLike[str] | FilePath) -> FilePath:
    """The path for a path or URL that a user gives. Raises UnsupportedPath for anything else."""
    return path if isinstance(path, FilePath) else FilePath(*locate(path))


def target_path(path: str | os.PathLike[str]) -> FilePath:
    """The path for a path or URL to be written to. Raises UnsupportedPath if it is read only."""
    from jax_ucp.files.remote import READ_ONLY

    text = str(os.fspath(path))
    scheme = text.partition(":")[0].lower()
    if scheme in READ_ONLY and URL.match(text):
        raise UnsupportedPath(f"{text}: {READ_ONLY[scheme]}")
    return file_path(path)
