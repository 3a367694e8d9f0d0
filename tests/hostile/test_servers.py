"""Servers that answer with more than was asked for, or send who asks elsewhere."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest

import jax_ucp as ucp
from jax_ucp.errors import StoreError, UCPError, UnsupportedPath
from jax_ucp.files import remote
from jax_ucp.files.http import ALLOWED_HOSTS, redirected
from jax_ucp.files.path import file_path
from servers import web

SIZE, LIMIT = 1 << 20, 64 << 20
Say = Callable[["Server"], None]


class Server(BaseHTTPRequestHandler):
    """One file of zeros, of which `ranges` answers ranges; the API of a hub that has it."""

    protocol_version = "HTTP/1.1"
    ranges: Say
    sent: list[int]
    paths: list[str]

    def do_HEAD(self) -> None:
        self.say(200, {"Content-Length": SIZE})

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if self.path.startswith("/api/"):
            file = {"rfilename": "file", "size": SIZE, "blobId": "b" * 40}
            body = json.dumps({"id": "o/n", "sha": "a" * 40, "siblings": [file]}).encode()
            self.say(200, {"Content-Type": "application/json", "Content-Length": len(body)})
            self.wfile.write(body)
        else:
            type(self).ranges(self)

    def say(self, status: int, headers: dict[str, object]) -> None:
        self.send_response(status)
        for name, value in {"ETag": '"e"', **headers}.items():
            self.send_header(name, str(value))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()

    def partial(self, **headers: object) -> tuple[int, int]:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.say(206, {"Content-Range": f"bytes {first}-{last}/{SIZE}", **named})
        return first, last

    def pour(self, data: bytes) -> None:
        """Send until nobody listens, or it is too much."""
        try:
            while sum(self.sent) < LIMIT:
                self.wfile.write(data)
                self.sent.append(len(data))
        except OSError:
            pass
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


def long_body(server: Server) -> None:
    server.partial(Content_Length=1 << 40)
    server.pour(bytes(1 << 16))


def endless_chunks(server: Server) -> None:
    server.partial(Transfer_Encoding="chunked")
    server.pour(b"10000\r\n" + bytes(1 << 16) + b"\r\n")


@contextmanager
def served(ranges: Say) -> Iterator[tuple[str, type[Server]]]:
    handler = type("Handler", (Server,), {"ranges": ranges, "sent": [], "paths": []})
    with web._serving(handler) as address:
        yield address, handler


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    monkeypatch.delenv(ALLOWED_HOSTS, raising=False)


def at(kind: str, address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the file, and where servers of that kind are."""
    if kind == "s3":
        pytest.importorskip("obstore")
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
            monkeypatch.setenv(f"AWS_{name}", "k")
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        return "s3://bucket/file"
    if kind == "hub":
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        return "hf://o/n/file"
    return f"{address}/file"


@pytest.mark.parametrize("answer", [long_body, endless_chunks])
@pytest.mark.parametrize("kind", ["web", "hub", "s3"])
def test_an_answer_is_read_no_further_than_what_was_asked_for(kind, answer, monkeypatch):
    with served(answer) as (address, server):
        path = file_path(at(kind, address, monkeypatch))
        with pytest.raises(StoreError, match=r"than the 8192 bytes|Content-Length"):
            path.read_range(0, 8192)
    assert sum(server.sent) < LIMIT  # the kernel's buffers took the rest


@pytest.mark.parametrize("kind", ["web", "hub"])
def test_a_range_of_a_file_of_more_bytes_than_there_can_be_is_no_answer(kind, monkeypatch):
    def huge(server: Server) -> None:
        server.say(206, {"Content-Range": f"bytes 0-8191/{'9' * 5000}", "Content-Length": 0})

    with served(huge) as (address, _):
        path = file_path(at(kind, address, monkeypatch))
        with pytest.raises(StoreError, match=r"bytes 0-8191/9{80,90} came, of 0 to 8192"):
            path.read_range(0, 8192)


def test_a_size_of_more_digits_than_python_reads_is_none(monkeypatch):
    def do_head(server: Server) -> None:
        server.say(200, {"Content-Length": "9" * 5000})

    monkeypatch.setattr(Server, "do_HEAD", do_head)
    with (
        served(long_body) as (address, _),
        pytest.raises(StoreError, match="does not say how many bytes it has"),
    ):
        file_path(f"{address}/file").info()


@pytest.mark.parametrize("host", ["h:99999", "h:port", "[::1"])
def test_what_is_no_address_of_a_server_is_refused(host):
    with pytest.raises(UnsupportedPath, match="is not an address"):
        file_path(f"https://{host}/file")


def to(location: str) -> Say:
    return lambda server: server.say(302, {"Location": location, "Content-Length": 0})


@pytest.mark.parametrize("kind", ["web", "hub"])
def test_a_redirect_to_another_host_is_followed_where_it_is_allowed(kind, monkeypatch):
    def good(server: Server) -> None:
        tokens.append(server.headers.get("Authorization"))
        first, last = server.partial(Content_Length=8192)
        server.wfile.write(np.arange(first, last + 1).astype(np.uint8).tobytes())

    tokens: list[str | None] = []
    with served(good) as (other, asked), served(to(f"{other}/elsewhere")) as (address, _):
        path = file_path(at(kind, address, monkeypatch))
        with pytest.raises(StoreError, match=rf"redirects to another host.*{ALLOWED_HOSTS}=127"):
            path.read_range(0, 8192)
        assert asked.paths == []
        monkeypatch.setenv(ALLOWED_HOSTS, "example.org, 127.0.0.*")
        assert path.read_range(0, 8192) == bytes(range(256)) * 32
        assert tokens == [None]


@pytest.mark.parametrize("kind", ["web", "hub"])
@pytest.mark.parametrize(
    "location", ["http://169.254.169.254/latest", "file:///etc/passwd", "http://[", "/round"]
)
def test_a_redirect_that_leads_elsewhere_or_nowhere_is_one_error(kind, location, monkeypatch):
    with served(to(location)) as (address, _):
        path = file_path(at(kind, address, monkeypatch))
        with pytest.raises(StoreError, match="redirects"):
            path.read_range(0, 8192)


HUB = ("huggingface.co", "*.hf.co")


@pytest.mark.parametrize(("url", "location", "found"), [
    ("https://a.org/x",     "/y", "https://a.org/y"),
    ("https://a.org/x",     "https://a.org:443/y", "https://a.org:443/y"),
    ("http://a.org/x",      "https://a.org/y", "https://a.org/y"),
    ("https://a.org/x",     "http://a.org/y", "redirects lead to https"),
    ("https://a.org/x",     "https://a.org:8443/y", "another host"),
    ("https://a.org/x",     "https://b.a.org/y", "another host"),
    ("https://a.org/x",     "https://A.org/y", "https://A.org/y"),
    ("https://a.org/x",     "https://a.org@b.org/y", "another host"),
    ("https://a.org/x",     "//cas-bridge.xethub.hf.co/y", "https://cas-bridge.xethub.hf.co/y"),
    ("https://a.org/x",     "https://evilhf.co/y", "another host"),
    ("https://a.org/x",     "https://huggingface.co.evil.org/y", "another host"),
    ("https://1.1.1.1/x",   "https://127.0.0.1/y", "a private network"),
    ("https://1.1.1.1/x",   "https://169.254.169.254/y", "a private network"),
    ("https://1.1.1.1/x",   "https://[fe80::1]/y", "a private network"),
    ("https://1.1.1.1/x",   "https://10.1.2.3/y", "a private network"),
    ("https://127.0.0.1/x", "https://10.1.2.3/y", "https://10.1.2.3/y"),
    ("https://a.org/x",     None, "https://a.org/x"),
    ("https://a.org/x",     "https://a.org:port/", "not an address"),
])  # fmt: skip
def test_where_redirects_may_lead(url, location, found, monkeypatch):
    monkeypatch.setenv(ALLOWED_HOSTS, "127.0.0.1,169.254.169.254,fe80::1,10.*")

    def offline(host: str, port: object) -> list[tuple]:
        if host.strip("[]0123456789.fe:") == "":
            return [(socket.AF_INET, 0, 0, "", (host, 0))]
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    if found.startswith("https://"):
        assert redirected(url, location, HUB) == found
    else:
        with pytest.raises(StoreError, match=found):
            redirected(url, location, HUB)


def test_a_page_of_a_folder_is_read_no_further_than_pages_are_long(monkeypatch):
    def page(server: Server) -> None:
        server.send_response(200)
        server.send_header("Content-Type", "text/html")
        server.send_header("Transfer-Encoding", "chunked")
        server.end_headers()
        if server.command == "GET":
            server.pour(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")

    before = threading.active_count()
    with served(page) as (address, server):
        monkeypatch.setattr(server, "do_HEAD", page)
        with pytest.raises(UCPError):
            ucp.open(f"{address}/folder")
    assert threading.active_count() < before + 100


def test_one_connection_is_kept_for_requests_that_follow_one_another(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(100))
    with web.web(tmp_path) as (address, counts):
        path = file_path(f"{address}/file")
        connects: list[object] = []
        connect = socket.create_connection

        def noted(*args):
            connects.append(args)
            return connect(*args)

        monkeypatch.setattr(socket, "create_connection", noted)
        for _ in range(5):
            assert path.read_range(0, 100) == bytes(100)
        assert (len(connects), counts["GET"]) == (1, 5)
