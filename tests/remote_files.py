"""Files of this disk as if they were behind a network, without one: every question is counted."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases import OF_TESTS
from jax_ucp.files import locations
from jax_ucp.files.local import WholeDisk
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import FileInfo, read_bytes
from jax_ucp.files.remote import RemoteFiles, Unanswered
from servers.fault_proxy import Seen

SCHEME = "counted"


class CountedFiles(RemoteFiles):
    """The whole disk at `counted:///`. `asked` counts questions by kind, `seen` has each of them,
    `nbytes` counts what was read; an answer takes `latency` seconds, and every `fault_every`th does
    not come.
    """

    def __init__(self, root: str = "", latency: float = 0, fault_every: int = 0, parent=None):
        self.root, self.latency, self.fault_every = root, latency, fault_every
        self._disk = WholeDisk("/")
        self._parent = parent
        self.asked: Counter[str] = Counter()
        self.seen: list[Seen] = []
        self.nbytes = 0
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def url(self, name: str = "") -> str:
        return f"{SCHEME}:///{self._key(name)}"

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self.root, name)))

    def count(self, kind: str) -> None:
        if self._parent:
            self._parent.count(kind)
            return
        begun = time.monotonic()
        with self._lock:
            self.asked[kind] += 1
            self._now += 1
            self.most = max(self.most, self._now)
            is_fault = self.fault_every and sum(self.asked.values()) % self.fault_every == 0
        time.sleep(self.latency)
        with self._lock:
            self._now -= 1
            self.seen.append(Seen(begun, time.monotonic(), kind, self.root))
        if is_fault:
            raise Unanswered("a fault")

    def _ask(self, kind: str, name: str, answer: Any) -> Any:
        def ask() -> Any:
            self.count(kind)
            return answer()

        return self.persist(name, ask)

    def list(self, folder: str = "") -> Sequence[FileInfo]:
        at = self._key(folder)
        cut = len(f"{self.root}/") if self.root else 0
        infos = self._ask("list", folder, lambda: self._disk.list(at))
        return [FileInfo(i.name[cut:], i.size, i.version, i.kind) for i in infos]

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        cut = len(f"{self.root}/") if self.root else 0
        for number, info in enumerate(self._disk.walk(self._key(folder))):
            if number % 1000 == 0:
                self._ask("list", folder, lambda: None)
            yield FileInfo(info.name[cut:], info.size, info.version, info.kind)

    def stat(self, name: str) -> FileInfo | None:
        info = self._ask("stat", name, lambda: self._disk.stat(self._key(name)))
        return info and FileInfo(name, info.size, info.version, info.kind)

    def fetch(self, file: FileInfo, start: int, stop: int) -> memoryview:
        self.count("fetch")
        at = self._key(file.name)
        data = read_bytes(self._disk, FileInfo(at, file.size, file.version), start, stop)
        top = self._parent or self
        with self._lock:
            top.nbytes += len(data)
        return memoryview(data)

    def write(self, name: str, parts: Iterable[bytes | memoryview], *, durable: bool) -> None:
        self._disk.write(self._key(name), parts, durable=durable)

    def create(self, name: str, data: bytes) -> None:
        self._disk.create(self._key(name), data)

    def delete(self, name: str) -> None:
        self._disk.delete(self._key(name))

    def spec(self, name: str = "") -> dict[str, Any]:
        return self._disk.spec(self._key(name))

    def join(self, folder: str) -> "CountedFiles":
        return CountedFiles(self._key(folder), parent=self._parent or self)


@contextmanager
def counted(**options: Any) -> Iterator[CountedFiles]:
    """While this lasts, `counted:///path` is a path of this disk, asked through the files given."""
    files = CountedFiles(**options)
    locations._SCHEMES[SCHEME] = lambda text, rest: (files, rest.strip("/"))
    try:
        yield files
    finally:
        del locations._SCHEMES[SCHEME]


def uploaded(source: Path, url: str) -> str:
    """The URL of a checkpoint, of which the files are put into a bucket's folder."""
    folder, root = source if source.is_dir() else source.parent, file_path(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in OF_TESTS:
            at = root / path.relative_to(folder).as_posix()
            at.files.write(at.key, [path.read_bytes()], durable=True)
    return url if source.is_dir() else f"{url}/{source.name}"
