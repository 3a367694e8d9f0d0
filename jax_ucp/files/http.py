"""HTTP requests to servers that are not trusted: answers have a limit of bytes and of time, and
redirects are followed only to allowed hosts.

Otherwise a server could answer a request for 8 KB with any number of bytes, for any time, and
redirect to any address, such as one inside the network of the machine that asks.
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import itertools
import os
import re
import socket
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from fnmatch import fnmatch

from jax_ucp.errors import StoreError
from jax_ucp.files.remote import Unanswered, bounded

# An environment variable with the hosts to which redirects are followed, beside the one that was
# asked: names, or patterns such as `*.example.org`, separated by commas.
ALLOWED_HOSTS = "JAX_UCP_REDIRECT_HOSTS"
REDIRECTS, MOST_REDIRECTS = frozenset({301, 302, 303, 307, 308}), 5

CONNECT_S, ANSWER_S = 10, 30
_READ_BYTES, ERROR_BYTES = 1 << 18, 1 << 16
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int | None]


def redirected(url: str, location: str | None, known: Sequence[str] = ()) -> str:
    """The address that a server redirects to. Raises StoreError for an address that is not allowed,
    private, or less safe than the one that was asked.
    """
    try:
        target = urllib.parse.urljoin(url, location or "")
        before, after = _origin(url), _origin(target)
    except ValueError:
        raise StoreError(f"{url} redirects to {location!r:.200}, which is not an address") from None
    shown = f"{after[0]}://{after[1]}"
    if after[0] not in _PORTS or (before[0], after[0]) == ("https", "http"):
        raise StoreError(
            f"{url} redirects to {shown}, which is not followed: redirects lead to https, or from"
            " http to http"
        )
    if before == after or (
        before[1] == after[1] and (before[::2], after[::2]) == (("http", 80), ("https", 443))
    ):
        return target
    allowed = [*known, *os.environ.get(ALLOWED_HOSTS, "").replace(" ", "").split(",")]
    if not any(fnmatch(after[1], pattern) for pattern in allowed):
        raise StoreError(
            f"{url} redirects to another host, {shown}: that is followed only where it is allowed."
            f" If you trust it, set {ALLOWED_HOSTS}={after[1]}, or open that address itself"
        )
    if _is_private(after[1]) and not _is_private(before[1]):
        raise StoreError(
            f"{url} redirects to {shown}, an address of a private network, which is not followed"
        )
    return target


def size_by_range(content_range: str | None, start: int, stop: int) -> int:
    """The size of a file by Content-Range. Raises Unanswered if that is of another range."""
    match = _RANGE.fullmatch(content_range or "")
    if match is None or (int(match[1]), int(match[2])) != (start, stop - 1):
        raise Unanswered(f"{content_range!s:.100} came, of {start} to {stop}")
    return int(match[3])


def _origin(url: str) -> Origin:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme)


def _is_private(host: str) -> bool:
    """Whether a host has an address outside of the public internet; an unknown name has none."""
    try:
        infos = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    addresses = [str(info[4][0]).partition("%")[0] for info in infos]
    return any(not ipaddress.ip_address(address).is_global for address in addresses)


@dataclass(frozen=True)
class Answer:
    """The answer of a server. The body of an error is cut off after ERROR_BYTES."""

    status: int
    headers: Message
    body: memoryview


class Client:
    """A sender of requests to web servers, which keeps connections open for the next request."""

    def __init__(self) -> None:
        self._idle: dict[Origin, list[http.client.HTTPConnection]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            for connection in itertools.chain.from_iterable(self._idle.values()):
                connection.close()
            self._idle.clear()

    def ask(self, method: str, url: str, headers: Mapping[str, str], most: int) -> Answer:
        """The answer to a request, of at most `most` bytes, after redirects. Raises Unanswered if
        there is none or it is longer, StoreError for a redirect that is not followed.
        """
        for _ in range(MOST_REDIRECTS + 1):
            answer = self._answer(method, url, headers, most)
            if answer.status not in REDIRECTS:
                return answer
            url = redirected(url, answer.headers.get("Location"))
        raise StoreError(f"{url} redirects more than {MOST_REDIRECTS} times")

    def _answer(self, method: str, url: str, headers: Mapping[str, str], most: int) -> Answer:
        origin = _origin(url)
        with self._lock:
            idle = self._idle.get(origin, [])
            connection = idle.pop() if idle else None
        if connection is not None:
            try:
                return self._over(connection, method, url, headers, most)
            except ConnectionError:
                pass  # the server has closed it meanwhile
        connection = _connection(origin)
        try:
            return self._over(connection, method, url, headers, most)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise Unanswered(str(error) or type(error).__name__) from error

    def _over(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        url: str,
        headers: Mapping[str, str],
        most: int,
    ) -> Answer:
        """The answer over a connection, which is kept for reuse if the server allows it."""
        parts = urllib.parse.urlsplit(url)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        is_proxied = isinstance(connection, _Proxied)
        # a limit for the whole answer: a server could send one byte at a time for ever
        timer = threading.Timer(ANSWER_S, _stop, [connection])
        timer.start()
        kept = False
        try:
            connection.request(method, url if is_proxied else target, headers=dict(headers))
            response = connection.getresponse()
            is_error = response.status >= 300
            chunks = iter(functools.partial(response.read1, _READ_BYTES), b"")
            body = memoryview(response.read(ERROR_BYTES)) if is_error else bounded(chunks, most)
            is_whole = response.isclosed() or response.length == 0
            response.close()
            kept = is_whole and not response.will_close
            return Answer(response.status, response.headers, body)
        finally:
            timer.cancel()
            if kept:
                with self._lock:
                    self._idle.setdefault(_origin(url), []).append(connection)
            else:
                connection.close()


class _Proxied(http.client.HTTPConnection):
    """A connection to a proxy, whose requests have whole addresses."""


def _connection(origin: Origin) -> http.client.HTTPConnection:
    """A connection to a server, through the proxy that the environment names for it."""
    scheme, host, port = origin
    proxy = "" if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme, "")
    _, proxy_host, proxy_port = _origin(proxy if "://" in proxy else f"http://{proxy}")
    if scheme == "http":
        if proxy:
            return _Proxied(proxy_host, proxy_port, timeout=CONNECT_S)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_S)
    context = ssl.create_default_context()
    if not proxy:
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
    connection = http.client.HTTPSConnection(
        proxy_host, proxy_port, timeout=CONNECT_S, context=context
    )
    connection.set_tunnel(host, port)
    return connection


def _stop(connection: http.client.HTTPConnection) -> None:
    try:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended
