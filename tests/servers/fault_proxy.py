"""A proxy in front of a store, which is slow, and fails as stores fail: `python fault_proxy.py PORT
ENDPOINT '{"latency_s": 0.02}'`, or `FaultProxy` in a test's own process.

What becomes of a request follows from the seed, the request, and how often it came: a run with the
same seed meets the same faults, in whichever order its threads ask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import json
import math
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

PIECE = 256 << 10
_PER_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}
_LIST = re.compile(r"[?&](list-type=|prefix=|comp=list)")
_UPLOAD = re.compile(r"(uploadId|upload_id)=[^&]*")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)$")


@dataclass(frozen=True)
class Faults:
    """How a store is slow, and how often it fails.

    Attributes:
        seed: Another one, other faults.
        latency_s: Of each request.
        total_rate, connection_rate: Bytes a second, of all connections and of each; 0 if unbounded.
        rates: The share of the requests that meet a fault, by its name in `KINDS`.
        at_most: So often at most the same request meets one.
        slow_s: How long a slow answer takes.
    """

    seed: int = 0
    latency_s: float = 0
    total_rate: float = 0
    connection_rate: float = 0
    rates: Mapping[str, float] = field(default_factory=dict)
    at_most: int = 2
    slow_s: float = 2

    def of(self, request: str, turn: int) -> str | None:
        """What is wrong when a request comes for the `turn`th time, if anything is."""
        dice = random.Random(f"{self.seed} {request} {turn}")
        if turn >= self.at_most:
            return None
        at = dice.random()
        for kind, rate in self.rates.items():
            if at < rate:
                return kind
            at -= rate
        return None


class Seen(NamedTuple):
    """A request, and when it came and was answered."""

    begun: float
    ended: float
    method: str
    path: str


def depth(seen: Sequence[Seen]) -> int:
    """How many requests waited for one another: the most of which each came after the answer to the
    one before. Where each takes a while, those that need not wait overlap.

    >>> depth([Seen(0, 2, "PUT", "a"), Seen(1, 3, "PUT", "b"), Seen(4, 5, "PUT", "c")])
    2
    """
    count, last = 0, -math.inf
    for request in sorted(seen, key=lambda request: request.ended):
        if request.begun >= last:
            count, last = count + 1, request.ended
    return count


class _Pace:
    """Lets so many bytes a second pass."""

    def __init__(self, rate: float):
        self._rate, self._free = rate, 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(now, self._free) + nbytes / self._rate
            rest = self._free - now
        time.sleep(rest)


class FaultProxy:
    """Serves a store at `endpoint` while it is entered. `faults` may be exchanged meanwhile.

    `met` counts requests by method, faults by kind, the bytes of bodies that were `sent`, and
    `bytes` that were read, without lists; `seen` are the requests in the order of their ends.
    """

    def __init__(self, backend: str, faults: Faults = Faults(), port: int = 0):
        self.backend = backend
        self._server = _Server(("127.0.0.1", port), functools.partial(_Handler, self))
        self.endpoint = f"127.0.0.1:{self._server.server_port}"
        self.lists: dict[str, _Answer] = {}
        self.set(faults)

    def set(self, faults: Faults) -> None:
        """Be another store from now on, of which nothing was asked yet."""
        self.faults = faults
        self.pace = _Pace(faults.total_rate)
        self.met: Counter[str] = Counter()
        self.seen: list[Seen] = []
        self._turns: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def fault(self, handler: BaseHTTPRequestHandler) -> str | None:
        method, target = handler.command, _UPLOAD.sub("", handler.path)
        request = f"{method} {target} {handler.headers.get('Range', '')}"
        with self._lock:
            turn = self._turns[request]
            self._turns[request] += 1
            kind = self.faults.of(request, turn)
            self.met[method] += 1
            if kind:
                self.met[kind] += 1
        return kind

    def count(self, what: str, number: int) -> None:
        with self._lock:
            self.met[what] += number

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self) -> None:
        self._server.serve_forever()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no concern of ours."""


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    length: int


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120

    def __init__(self, proxy: FaultProxy, *args: Any):
        self._proxy = proxy
        self._pace = _Pace(proxy.faults.connection_rate)
        self._backend: http.client.HTTPConnection | None = None
        super().__init__(*args)

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def finish(self) -> None:
        with contextlib.suppress(OSError):  # what a reset left
            super().finish()
        if self._backend is not None:
            self._backend.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody listens."""

    def _handle(self) -> None:
        begun = time.monotonic()
        body = self._read_body()
        kind = self._proxy.fault(self)
        time.sleep(self._proxy.faults.latency_s)
        KINDS.get(kind or "", _Handler._pass_on)(self, body)
        self._proxy.seen.append(Seen(begun, time.monotonic(), self.command, self.path))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _handle

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return b"".join(iter(self._read_chunk, b""))
        rest = int(self.headers.get("Content-Length") or 0)
        parts = []
        while rest:
            part = self.rfile.read(min(rest, PIECE))
            if not part:
                raise ConnectionError("the client went away")
            self._wait(len(part))
            parts.append(part)
            rest -= len(part)
        return b"".join(parts)

    def _read_chunk(self) -> bytes:
        size = int(self.rfile.readline().partition(b";")[0], 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _wait(self, nbytes: int) -> None:
        self._proxy.pace.wait(nbytes)
        self._pace.wait(nbytes)

    def _ask(self, body: bytes, changed: Mapping[str, str] | None = None) -> _Answer:
        """What the store says, all of it."""
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _PER_CONNECTION}
        headers |= {"Content-Length": str(len(body))} if body or self.command != "GET" else {}
        headers |= changed or {}
        for attempt in range(3):
            backend = self._proxy.backend
            self._backend = self._backend or http.client.HTTPConnection(backend, timeout=60)
            try:
                self._backend.request(self.command, self.path, body or None, headers)
                answer = self._backend.getresponse()
                data = answer.read()
                break
            except (OSError, http.client.HTTPException):
                self._backend.close()
                self._backend = None
                if attempt == 2:
                    raise
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in _PER_CONNECTION]
        length = int(answer.getheader("Content-Length") or len(data))
        return _Answer(answer.status, kept, data, length)

    def _send(self, answer: _Answer, stop: int | None = None) -> None:
        """Send an answer, or so many bytes of its body."""
        self.send_response_only(answer.status)
        for key, value in answer.headers:
            self.send_header(key, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(answer.length))
        self.end_headers()
        body = memoryview(answer.body)[:stop]
        self._proxy.count("sent", len(body))
        for start in range(0, len(body), PIECE):
            piece = body[start : start + PIECE]
            self._wait(len(piece))
            self.wfile.write(piece)

    def _pass_on(self, body: bytes) -> None:
        answer = self._ask(body)
        is_list = _LIST.search(self.path)
        if self.command == "GET" and is_list and answer.status == 200:
            self._proxy.lists.setdefault(self.path, answer)
        if self.command == "GET" and not is_list and answer.status in (200, 206):
            self._proxy.count("bytes", len(answer.body))
        self._send(answer)

    def _refuse(self, body: bytes, status: int = 503) -> None:
        self._send(_error(status))

    def _lose(self, body: bytes) -> None:
        """Do it, and say that it failed."""
        self._ask(body)
        self._send(_error(500))

    def _cut(self, body: bytes, reset: bool) -> None:
        """End in the middle of the body, or before it where there is none."""
        answer = self._ask(body)
        if answer.body:
            self._send(answer, len(answer.body) // 2)
        self._end(reset)

    def _end(self, reset: bool) -> None:
        self.wfile.flush()
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR) if not reset else self.connection.close()

    def _shift(self, body: bytes) -> None:
        """Another range than the one that was asked for."""
        asked = _RANGE.match(self.headers.get("Range", ""))
        if not asked:
            self._pass_on(body)
            return
        step = -1 if int(asked[1]) else 1
        start, stop = int(asked[1]) + step, int(asked[2]) + step
        self._send(self._ask(body, {"Range": f"bytes={start}-{stop}"}))

    def _lie(self, body: bytes) -> None:
        """Other bytes than are there, as if they were."""
        answer = self._ask(body)
        if self.command == "GET" and answer.status in (200, 206) and not _LIST.search(self.path):
            answer = dataclasses.replace(answer, body=answer.body[1:] + answer.body[:1])
        self._send(answer)

    def _stale(self, body: bytes) -> None:
        """A list as it was when it was first asked for."""
        old = self._proxy.lists.get(self.path)
        self._send(old) if old and self.command == "GET" else self._pass_on(body)

    def _slow(self, body: bytes) -> None:
        """An answer that comes byte by byte."""
        answer = self._ask(body)
        self._send(answer, 0)
        head, rest = answer.body[:8], answer.body[8:]
        for at in range(len(head)):
            time.sleep(self._proxy.faults.slow_s / 8)
            self.wfile.write(head[at : at + 1])
            self.wfile.flush()
        self.wfile.write(rest)


def _error(status: int) -> _Answer:
    body = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>fault</Message></Error>"
    return _Answer(status, [("Content-Type", "application/xml")], body, len(body))


Fault = Callable[[_Handler, bytes], None]
KINDS: Mapping[str, Fault] = {
    "429": functools.partial(_Handler._refuse, status=429),
    "500": functools.partial(_Handler._refuse, status=500),
    "503": functools.partial(_Handler._refuse, status=503),
    "reset": functools.partial(_Handler._cut, reset=True),
    "truncated": functools.partial(_Handler._cut, reset=False),
    "wrong range": _Handler._shift,
    "lie": _Handler._lie,
    "lost answer": _Handler._lose,
    "stale list": _Handler._stale,
    "slow": _Handler._slow,
}


if __name__ == "__main__":
    FaultProxy(sys.argv[2], Faults(**json.loads(sys.argv[3])), int(sys.argv[1])).serve()
