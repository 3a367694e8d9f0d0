"""What files and folders were when they were first looked at, while a checkpoint is opened.

Readers ask often what is there: on a disk that costs nothing, and over a network each question is a
request. One list of a folder answers for all that lies in it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from jax_ucp.files.protocol import FileInfo, Files, read_bytes

# How files begin is asked for several times: what they are, and then their headers.
HEAD_BYTES = 8 << 10


@dataclass
class Asked:
    """How many requests were made, and how many bytes of files came."""

    requests: int = 0
    nbytes: int = 0


class Looked:
    """Lists of folders, and files outside of them, by URL: files are asked through several roots.
    What is not looked at by `files.stat` itself may be older than the last write.
    """

    def __init__(self) -> None:
        self._folders: dict[str, Mapping[str, FileInfo]] = {}  # what lies in each, by its last name
        self._below: dict[str, Sequence[FileInfo]] = {}
        self._files: dict[str, FileInfo | None] = {}
        self._found: dict[str, FileInfo | None] = {}
        self._heads: dict[tuple[str, FileInfo], bytes] = {}
        self.asked = Asked()

    def children(self, files: Files, folder: str) -> Sequence[FileInfo]:
        prefix = f"{folder}/" if folder else ""
        entries = self._entries(files, folder).items()
        return [replace(entry, name=prefix + name) for name, entry in entries]

    def walk(self, files: Files) -> Sequence[FileInfo]:
        url = files.url()
        if url not in self._below:
            self._below[url] = list(files.walk())
            self._note_folders(files, self._below[url])
        return self._below[url]

    def _note_folders(self, files: Files, below: Sequence[FileInfo]) -> None:
        """What lies in each folder, by all files that are below one."""
        folders: dict[str, dict[str, FileInfo]] = defaultdict(dict)
        for entry in below:
            while entry.name:
                folder, _, last = entry.name.rpartition("/")
                if last in folders[folder]:
                    break
                folders[folder][last] = entry
                entry = FileInfo(folder, 0, "", "folder")
        for folder, entries in folders.items():
            self._folders.setdefault(files.url(folder), dict(sorted(entries.items())))

    def info(self, files: Files, name: str) -> FileInfo | None:
        if self._is_inside(files, name):
            folder, _, last = name.rpartition("/")
            entry = self._entries(files, folder).get(last)
            return entry and replace(entry, name=name)
        url = files.url(name)
        if url not in self._files:
            is_folder = bool(self._entries(files, name))
            self._files[url] = FileInfo(name, 0, "", "folder") if is_folder else files.stat(name)
        found = self._files[url]
        return found and replace(found, name=name)

    def head(self, files: Files, file: FileInfo) -> bytes:
        """How a file begins."""
        key = files.url(file.name), file
        if key not in self._heads:
            self._heads[key] = read_bytes(files, file, 0, min(file.size, HEAD_BYTES))
        return self._heads[key]

    def find(self, files: Files, name: str) -> FileInfo | None:
        url = files.url(name)
        if url not in self._found:
            self._found[url] = files.find(name)
        found = self._found[url]
        return found and replace(found, name=name)

    def _entries(self, files: Files, folder: str) -> Mapping[str, FileInfo]:
        url = files.url(folder)
        if url not in self._folders:
            inside = self._is_inside(files, folder)
            # what is known to be no folder has no list
            absent = inside and not _is_folder(self.info(files, folder))
            entries = [] if absent else files.list(folder)
            self._folders[url] = {entry.name.rpartition("/")[2]: entry for entry in entries}
        return self._folders[url]

    def _is_inside(self, files: Files, name: str) -> bool:
        """Whether a folder was listed in which it would lie, at any depth."""
        while name:
            name = name.rpartition("/")[0]
            if self._folders.get(files.url(name)):
                return True
        return False


def _is_folder(info: FileInfo | None) -> bool:
    return info is not None and info.kind == "folder"


@contextmanager
def looking_once() -> Iterator[Asked]:
    """While a checkpoint is opened, whatever of it is remote is looked at once. What is asked in
    that time is counted.
    """
    if (outer := _looked.get()) is not None:
        yield outer.asked
        return
    looked = Looked()
    token = _looked.set(looked)
    try:
        yield looked.asked
    finally:
        _looked.reset(token)


def count_request(nbytes: int = 0) -> None:
    """Count a request, or the bytes that one brought, for the checkpoint that is opened."""
    if (looked := _looked.get()) is not None:
        with _counting:
            looked.asked.requests += not nbytes
            looked.asked.nbytes += nbytes


def look(files: Files, name: str) -> FileInfo | None:
    """What has a name, now or when it was first looked at for the checkpoint that is opened."""
    looked = _looked.get()
    return looked.info(files, name) if looked and files.is_remote else files.stat(name)


def look_for_file(files: Files, name: str) -> FileInfo | None:
    """The file that has a name, as `look` has it."""
    if _looked.get() is None:
        return files.find(name)
    info = look(files, name)
    return info if info is not None and info.kind == "file" else None


def find(files: Files, name: str) -> FileInfo | None:
    """The file that has a name, asked for itself: a list of the folder may be older."""
    looked = _looked.get()
    return looked.find(files, name) if looked and files.is_remote else files.find(name)


def read_once(files: Files, file: FileInfo, start: int, stop: int) -> bytes:
    """Bytes of a file; how it begins is read once for the checkpoint that is opened."""
    looked = _looked.get()
    if looked is None or not files.is_remote or stop > HEAD_BYTES:
        return read_bytes(files, file, start, stop)
    return looked.head(files, file)[start:stop]


def look_inside(files: Files, folder: str) -> Sequence[FileInfo]:
    """What lies directly in a folder, as `look` has it."""
    looked = _looked.get()
    return looked.children(files, folder) if looked and files.is_remote else files.list(folder)


def walk(files: Files) -> Iterable[FileInfo]:
    """Every file, at any depth, as `look` has it."""
    looked = _looked.get()
    return looked.walk(files) if looked and files.is_remote else files.walk()


_counting = threading.Lock()
_looked: ContextVar[Looked | None] = ContextVar("looked", default=None)
