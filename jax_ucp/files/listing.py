"""A cache of what is known about files behind a network, while a checkpoint is opened.

Readers often ask whether files exist, and over a network each question is a request. One list of a
folder answers for everything in it. If thousands of processes open one checkpoint, one of them asks
the store, and the others use its listing.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import msgspec
import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.files.local import check_name
from jax_ucp.files.protocol import HEAD_BYTES, FileInfo, Files, RangeRead

T = TypeVar("T")


@dataclass
class Asked:
    """The number of requests that were made, and of bytes of files that came."""

    requests: int = 0
    nbytes: int = 0


@dataclass
class Listing:
    """The answers of a store, kept by URL, because one file may be asked for through several roots.

    Attributes:
        folders: The entries directly in a folder, by the last part of their names.
        below: Every file below a folder.
        infos: Files and folders that lie in no folder that was listed.
        found: Files that were asked for by `find`: a list may be older than the last write.
        ranges: Bytes, by URL and version of the file, start, and length.
        is_shared: Whether all bytes that are read are kept for other processes, or only the first
            ones of files.
        is_closed: Whether nothing is kept any more, so that the files themselves are asked.
    """

    folders: dict[str, dict[str, FileInfo]] = field(default_factory=dict)
    below: dict[str, list[FileInfo]] = field(default_factory=dict)
    infos: dict[str, FileInfo | None] = field(default_factory=dict)
    found: dict[str, FileInfo | None] = field(default_factory=dict)
    ranges: dict[tuple[str, str, int, int], bytes] = field(default_factory=dict)
    is_shared: bool = False
    is_closed: bool = False

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Listing:
        """The listing in a message. Raises FormatError for anything else, and for bad names."""
        try:
            listing = msgspec.msgpack.decode(data, type=Listing)
        except msgspec.DecodeError as error:
            raise FormatError(f"it is not a listing of files: {error}") from None
        listing.is_closed = False
        infos = [*filter(None, listing.infos.values()), *filter(None, listing.found.values())]
        for folder, entries in listing.folders.items():
            infos += entries.values()
            for name in entries:
                check_name(name)
                if "/" in name:
                    raise FormatError(f"{name!r:.200} does not lie directly in {folder!r:.200}")
        for below in listing.below.values():
            infos += below
            for info in below:
                check_name(info.name)
        for info in infos:
            if info.size < 0 or info.kind not in ("file", "folder", "other"):
                raise FormatError(f"{info!s:.200} is not a file or a folder")
        for (url, _, start, nbytes), answer in listing.ranges.items():
            if start < 0 or nbytes != len(answer):
                raise FormatError(f"it has {len(answer)} bytes where {nbytes} of {url!r:.200} were")
        return listing

    def close(self) -> None:
        """Forget everything: from now on the files themselves are asked."""
        self.is_closed = True
        for answers in (self.folders, self.below, self.infos, self.found, self.ranges):
            answers.clear()


class ListedFiles:
    """Files behind a network whose listing is asked first. Writes go to the files themselves."""

    is_remote: ClassVar[bool] = True

    def __init__(self, files: Files, listing: Listing):
        self.files, self.listing = files, listing
        self.url, self.link, self.spec = files.url, files.link, files.spec
        self.write, self.write_large, self.create = files.write, files.write_large, files.create
        self.sync, self.delete, self.digest = files.sync, files.delete, files.digest

    def __str__(self) -> str:
        return self.url()

    def __reduce__(self) -> tuple[Callable[[Files], Files], tuple[Files]]:
        return _itself, (self.files,)

    def join(self, folder: str) -> Files:
        return ListedFiles(self.files.join(folder), self.listing)

    def find(self, name: str) -> FileInfo | None:
        return self._answer(self.listing.found, name, lambda: self.files.find(name))

    def has_file(self, name: str) -> bool:
        """Whether a file has that name, by the listing of its folder."""
        if self.listing.is_closed:
            return self.files.has_file(name)
        info = self.stat(name)
        return info is not None and info.kind == "file"

    def stat(self, name: str) -> FileInfo | None:
        if self.listing.is_closed:
            return self.files.stat(name)
        if self._is_inside(name):
            folder, _, last = name.rpartition("/")
            entry = self._entries(folder).get(last)
            return entry and replace(entry, name=name)

        def ask() -> FileInfo | None:
            is_folder = bool(self._entries(name))
            return FileInfo(name, 0, "", "folder") if is_folder else self.files.stat(name)

        return self._answer(self.listing.infos, name, ask)

    def list(self, folder: str = "") -> Sequence[FileInfo]:
        if self.listing.is_closed:
            return self.files.list(folder)
        prefix = f"{folder}/" if folder else ""
        entries = self._entries(folder).items()
        return [replace(entry, name=prefix + name) for name, entry in entries]

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        if self.listing.is_closed or folder:
            return self.files.walk(folder)
        url = self.url()
        if url not in self.listing.below:
            self.listing.below[url] = list(self.files.walk())
            # the entries of each folder below
            folders: dict[str, dict[str, FileInfo]] = defaultdict(dict)
            for entry in self.listing.below[url]:
                while entry.name:
                    folder, _, last = entry.name.rpartition("/")
                    if last in folders[folder]:
                        break
                    folders[folder][last] = entry
                    entry = FileInfo(folder, 0, "", "folder")
            for folder, entries in folders.items():
                listed = dict(sorted(entries.items()))
                self.listing.folders.setdefault(self.url(folder), listed)
        return iter(self.listing.below[url])

    def _entries(self, folder: str) -> Mapping[str, FileInfo]:
        """The entries of a folder by the last part of their names, listed only once."""
        folders, url = self.listing.folders, self.url(folder)
        if url not in folders:
            entries: Sequence[FileInfo] = ()
            info = self.stat(folder) if self._is_inside(folder) else None
            # the store is not asked for the list of a name that is known not to be a folder
            if not self._is_inside(folder) or (info is not None and info.kind == "folder"):
                entries = self.files.list(folder)
            folders[url] = {entry.name.rpartition("/")[2]: entry for entry in entries}
        return folders[url]

    def _is_inside(self, name: str) -> bool:
        """Whether a folder above the name was listed, so that the listing would have the name."""
        while name:
            name = name.rpartition("/")[0]
            if self.listing.folders.get(self.url(name)):
                return True
        return False

    def _answer(
        self, answers: dict[str, FileInfo | None], name: str, ask: Callable[[], FileInfo | None]
    ) -> FileInfo | None:
        """The answer for a name, which is asked for only once."""
        if self.listing.is_closed:
            return ask()
        url = self.url(name)
        if url not in answers:
            answers[url] = ask()
        info = answers[url]
        return info and replace(info, name=name)

    def read_into(self, reads: Sequence[RangeRead]) -> None:
        listing = self.listing
        known: list[tuple[RangeRead, bytes]] = []
        unknown: list[RangeRead] = []
        for read in reads:
            data = listing.ranges.get(self._range(read))
            if data is None:
                unknown.append(read)
            else:
                known.append((read, data))
        self.files.read_into(unknown)
        for read in unknown if not listing.is_closed else ():
            if listing.is_shared or (read.start == 0 and read.out.nbytes <= HEAD_BYTES):
                listing.ranges[self._range(read)] = read.out.tobytes()
        for read, data in known:
            read.out[...] = np.frombuffer(data, read.out.dtype).reshape(read.out.shape)

    def _range(self, read: RangeRead) -> tuple[str, str, int, int]:
        return self.url(read.file.name), read.file.version, read.start, read.out.nbytes


def _itself(files: Files) -> Files:
    return files


@contextmanager
def listed(files: Files) -> Iterator[Files]:
    """Context with files that answer each question once, if they are behind a network."""
    if not files.is_remote or isinstance(files, ListedFiles):
        yield files
        return
    listing = Listing()
    try:
        yield ListedFiles(files, listing)
    finally:
        listing.close()


@contextmanager
def outermost(variable: ContextVar[T | None], make: Callable[[], T]) -> Iterator[T]:
    """Context with a new value of a variable; inside another such context, with the outer value."""
    if (outer := variable.get()) is not None:
        yield outer
        return
    value = make()
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def counting() -> AbstractContextManager[Asked]:
    """Context in which requests and the bytes that they bring are counted."""
    return outermost(_asked, Asked)


def count_request(nbytes: int = 0) -> None:
    """Count a request, or if it is done, the bytes that it brought."""
    if (asked := _asked.get()) is not None:
        with _counting:
            asked.requests += not nbytes
            asked.nbytes += nbytes


_counting = threading.Lock()
_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)
