"""Files of web servers, read by HTTP ranges; folders are listed by the servers' pages of them."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import re
import urllib.parse
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

from jax_ucp.errors import CorruptData, StoreError
from jax_ucp.files.http import Answer, Client, size_by_range
from jax_ucp.files.in_flight import request_all
from jax_ucp.files.protocol import FileInfo
from jax_ucp.files.remote import PASSING, ReadOnlyFiles, Refused, Unanswered

# The page of a folder with 100,000 files has some 10 MB.
_PAGE_BYTES = 16 << 20


class Web(ReadOnlyFiles):
    """Files of a web server below `prefix`, read only."""

    def __init__(self, scheme: str, host: str, prefix: str = ""):
        self._scheme, self._host, self._prefix = scheme, host, prefix

    def url(self, name: str = "") -> str:
        return urllib.parse.quote(self._address(name), safe=":/@[]")

    def _address(self, name: str) -> str:
        return f"{self._scheme}://{self._host}/{self._key(name)}".removesuffix("/")

    def join(self, folder: str) -> Web:
        return Web(self._scheme, self._host, self.key(folder))

    def stat(self, name: str) -> FileInfo | None:
        try:
            answer = self._ask("HEAD", name)
        except FileNotFoundError:
            return None
        # a page that the server generates for a folder has neither header; a file has one of them
        is_html = answer.headers.get("Content-Type", "").startswith("text/html")
        if is_html and "ETag" not in answer.headers and "Last-Modified" not in answer.headers:
            return FileInfo(name, 0, "", "folder")
        size = answer.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,18}", size):
            raise StoreError(f"{self.url(name)}: the server does not say how many bytes it has")
        return FileInfo(name, int(size), _version(answer))

    def list(self, folder: str = "") -> Sequence[FileInfo]:
        """The entries of a folder; empty if the server shows no page of it."""
        try:
            info = self.stat(folder)
        except Refused:
            return []
        if info is None or info.kind != "folder":
            return []
        links = _Links(f"{self._address(folder)}/")
        links.feed(bytes(self._ask("GET", folder).body).decode(errors="replace"))
        names = sorted("/".join(filter(None, (folder, name))) for name in links.names)
        return [info for info in request_all(self.stat, names) if info is not None]

    def fetch(self, file: FileInfo, start: int, stop: int) -> memoryview:
        name = file.name
        answer = self._asked("GET", name, {"Range": f"bytes={start}-{stop - 1}"}, stop - start)
        if answer.status != 206:
            raise StoreError(f"{self.url(name)}: the server does not answer with ranges")
        size = size_by_range(answer.headers.get("Content-Range"), start, stop)
        if FileInfo(name, size, _version(answer)) != file:
            raise CorruptData(f"{self.url(name)} has changed since it was opened; open it again")
        return answer.body

    def spec(self, name: str = "") -> dict[str, Any]:
        path = f"{key}/" if (key := self.key(name)) else ""
        return {"driver": "http", "base_url": f"{self._scheme}://{self._host}", "path": path}

    def _ask(self, method: str, name: str) -> Answer:
        return self.persist(name, lambda: self._asked(method, name, {}, _PAGE_BYTES))

    def _asked(self, method: str, name: str, headers: dict[str, str], most: int) -> Answer:
        """The answer of the server, if it is not an error."""
        self.key(name)
        url = self.url(name)
        headers = {"Accept-Encoding": "identity", **headers}
        answer = _client(os.getpid()).ask(method, url, headers, most)
        status = answer.status
        if status in (404, 410):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
        if status in (401, 403):
            raise Refused(f"{url}: the server refused, with status {status}")
        if status in PASSING:
            raise Unanswered(f"status {status}")
        if status >= 300:
            raise StoreError(f"{url}: the server answered with status {status}")
        return answer


@functools.lru_cache(maxsize=1)
def _client(process: int) -> Client:
    """The HTTP connections of a process, closed at its end; a forked child has its own."""
    client = Client()
    atexit.register(client.close)
    return client


def _version(answer: Answer) -> str:
    """The etag of a file, or if the server gives none, the time of its last change."""
    if etag := answer.headers.get("ETag"):
        return etag.strip('"')
    return f"changed {answer.headers.get('Last-Modified')}"


class _Links(HTMLParser):
    """The files and folders directly below the address of a page that it links to."""

    def __init__(self, base: str):
        super().__init__()
        self._base = base
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        link = dict(attrs).get("href")
        if tag != "a" or not link:
            return
        page = urllib.parse.quote(self._base, safe=":/@[]")
        target = urllib.parse.urlsplit(urllib.parse.urljoin(page, link))
        address = urllib.parse.unquote(f"{target.scheme}://{target.netloc}{target.path}")
        name = address.removeprefix(self._base).removesuffix("/")
        is_below = address.startswith(self._base) and name and "/" not in name
        if is_below and not target.query:
            self.names.add(name)
