"""Files of web servers, by HTTP with ranges; folders where the server has a page of their files."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

from jax_ucp.files.in_flight import request_all
from jax_ucp.files.object_store import Bucket, Refused, obstore, version_of
from jax_ucp.files.protocol import FileInfo, Files
from jax_ucp.files.remote import ReadOnlyFiles


class Web(ReadOnlyFiles, Bucket):
    """What a web server has below `prefix`. It is read only."""

    def url(self, name: str = "") -> str:
        return urllib.parse.quote(super().url(name), safe=":/@[]")

    def join(self, folder: str) -> Web:
        return Web(self._scheme, self._bucket, self.key(folder), self._store)

    def stat(self, name: str) -> FileInfo | None:
        try:
            answer = self._page(name, head=True)
        except FileNotFoundError:
            return None
        if _is_list(answer):
            return FileInfo(name, 0, "", "folder")
        return FileInfo(name, answer.meta["size"], version_of(answer.meta))

    def list(self, folder: str = "") -> Sequence[FileInfo]:
        """Nothing where the server shows no page of the folder."""
        try:
            info = self.stat(folder)
        except Refused:
            return []
        if info is None or info.kind != "folder":
            return []
        links = _Links(f"{super().url(folder)}/")
        links.feed(bytes(self._page(folder, head=False).bytes()).decode(errors="replace"))
        names = sorted("/".join(filter(None, (folder, name))) for name in links.names)
        return [info for info in request_all(self.stat, names) if info is not None]

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        return Files.walk(self, folder)

    def find(self, name: str) -> FileInfo | None:
        return Files.find(self, name)

    def _page(self, name: str, head: bool) -> Any:
        key = self.key(name)
        return self._ask(name, lambda: obstore().get(self._store, key, options={"head": head}))


def _is_list(answer: Any) -> bool:
    """Whether the server made this page of a folder: it is none of its files, which have a time."""
    is_html = str(answer.attributes.get("Content-Type", "")).startswith("text/html")
    return is_html and not answer.meta["e_tag"] and answer.meta["last_modified"].timestamp() == 0


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
        full = urllib.parse.unquote(f"{target.scheme}://{target.netloc}{target.path}")
        name = full.removeprefix(self._base).removesuffix("/")
        is_below = full.startswith(self._base) and name and "/" not in name
        if is_below and not target.query:
            self.names.add(name)
