"""A web server on loopback that answers with ranges, and shows folders; and one like the hub's."""

from __future__ import annotations

import email.utils
import hashlib
import json
import re
import sys
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class _Handler(BaseHTTPRequestHandler):
    """Files of `root`. Of a folder it shows a page, or answers with another `pages`."""

    protocol_version = "HTTP/1.1"
    # head and body in one packet: in two, the second waits 40 ms for the first to be acknowledged
    wbufsize = -1
    root: Path
    counts: Counter[str]
    pages: int = 200

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.counts[self.command] += 1
        self.answer(urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/"))

    def answer(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            self._folder(path)
        elif path.is_file():
            self.file(path)
        else:
            self.say(404, b"")

    def _folder(self, path: Path) -> None:
        if self.pages != 200:
            self.say(self.pages, b"")
            return
        if not self.path.endswith("/"):
            self.say(301, b"", {"Location": f"{self.path}/"})
            return
        names = [f"{child.name}/" if child.is_dir() else child.name for child in path.iterdir()]
        links = "".join(f'<a href="{urllib.parse.quote(name)}">{name}</a>' for name in names)
        page = f'<a href="../">up</a><a href="?C=N">sort</a>{links}'
        self.say(200, page.encode(), {"Content-Type": "text/html; charset=utf-8"})

    def file(self, path: Path) -> None:
        status = path.stat()
        headers = {
            "ETag": f'"{status.st_mtime_ns:x}-{status.st_size:x}"',
            "Last-Modified": email.utils.formatdate(status.st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        wanted = RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None:
            self.say(200, path.read_bytes(), headers)
            return
        first, last = int(wanted[1]), min(int(wanted[2]), status.st_size - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{status.st_size}"
        with path.open("rb") as file:
            file.seek(first)
            self.say(206, file.read(last + 1 - first), headers)

    def say(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


class _HubHandler(_Handler):
    """One model, `org/name`, whose files are those of `root`. A file is sent for to `/cdn/`, by
    links that are good `uses` times; `busy` first answers are 429.
    """

    uses: int
    busy: int
    token: str
    links: Counter[str]

    def answer(self, name: str) -> None:
        if name.startswith("cdn/"):
            self._linked(name)
            return
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            self.say(401, b"{}", {"X-Error-Message": "no token"})
            return
        if self.busy:
            type(self).busy -= 1
            self.say(429, b"")
            return
        about = re.fullmatch(r"api/models/org/name(?:/revision/(.+))?", name)
        tree = re.fullmatch(r"api/models/org/name/tree/(.+)", name)
        file = re.fullmatch(rf"org/name/resolve/{commit(self.root)}/(.+)", name)
        if about:
            self._about(about[1] or "main")
        elif tree:
            entries = [
                {"type": "file", "path": f["rfilename"], "size": f["size"], "oid": f["blobId"]}
                for f in self._siblings()
            ]
            self.say(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        elif file:
            link = f"/cdn/{file[1]}"
            self.links[f"cdn/{file[1]}"] = 0
            self.say(302, b"", {"Location": f"http://{self.headers['Host']}{link}?signed"})
        else:
            self.say(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def say(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """`huggingface_hub` wants to know of which commit a file is."""
        super().say(status, body, {"X-Repo-Commit": commit(self.root), **(headers or {})})

    def _about(self, revision: str) -> None:
        if revision not in ("main", commit(self.root)):
            self.say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        model = {"id": "org/name", "modelId": "org/name", "sha": commit(self.root)}
        body = json.dumps(model | {"siblings": self._siblings()}).encode()
        self.say(200, body, {"Content-Type": "application/json"})

    def _siblings(self) -> list[dict[str, Any]]:
        files = [path for path in sorted(self.root.rglob("*")) if path.is_file()]
        return [{"rfilename": p.relative_to(self.root).as_posix(), **stored(p)} for p in files]

    def _linked(self, name: str) -> None:
        self.links[name] += 1
        if self.links[name] > self.uses:
            self.say(403, b"expired")
            return
        self.file(self.root / name.removeprefix("cdn/"))


def stored(path: Path) -> dict[str, Any]:
    """How the hub describes a file: those of some KiB are large here."""
    data = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    about = {"size": len(data), "blobId": blob}
    if len(data) < 4096:
        return about
    digest = hashlib.sha256(data).hexdigest()
    return about | {"lfs": {"size": len(data), "sha256": digest, "pointerSize": 134}}


def commit(root: Path) -> str:
    """The commit that the model is at: another where any of its files is written to."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    states = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    return hashlib.sha1(repr(states).encode()).hexdigest()


@contextmanager
def web(root: Path, pages: int = 200) -> Iterator[tuple[str, Counter[str]]]:
    """A server of the files below a folder: its address, and how often it was asked, by method."""
    counts: Counter[str] = Counter()
    handler = type("Handler", (_Handler,), {"root": root, "counts": counts, "pages": pages})
    with _serving(handler) as address:
        yield address, counts


@contextmanager
def hub(root: Path, uses: int = 1 << 30, busy: int = 0, token: str = "hf_t") -> Iterator[str]:
    """A hub whose model `org/name` has the files below a folder: its address."""
    attributes = {"uses": uses, "busy": busy, "token": token}
    with _serving(_hub_handler(root, **attributes)) as address:
        yield address


def _hub_handler(root: Path, **attributes: object) -> type[_HubHandler]:
    about = {"root": root, "counts": Counter(), "links": Counter(), **attributes}
    return type("Handler", (_HubHandler,), about)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # of fewer, connections are asked for again after a second


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":  # a hub: python web.py PORT FOLDER
    hub_handler = _hub_handler(Path(sys.argv[2]), uses=1 << 30, busy=0, token="hf_t")
    _Server(("127.0.0.1", int(sys.argv[1])), hub_handler).serve_forever()
