"""The common part of all files behind a network: names, ranges planned as requests, retries."""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn, TypeVar

import numpy as np

from jax_ucp.errors import CorruptData, StoreError, UnsupportedPath
from jax_ucp.files.copying import copy_into
from jax_ucp.files.in_flight import request_all
from jax_ucp.files.listing import count_request
from jax_ucp.files.local import check_name
from jax_ucp.files.protocol import FileInfo, Files, RangeRead
from jax_ucp.layout.blocks import run_boxes

# The most bytes of one request: enough that transferring them takes longer than a round trip, and
# few enough that all requests in flight take little memory.
REQUEST_BYTES = 4 << 20
# Ranges with smaller gaps between them are read by one request, gaps included.
GAP_BYTES = 16 << 10

ATTEMPTS = 6
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0

R = TypeVar("R")

# Statuses of HTTP after which the same request may succeed.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Unanswered(Exception):
    """A request failed in a way that may pass, so that it is sent again."""


class Refused(StoreError):
    """The store denied access."""


def bounded(chunks: Iterable[bytes], most: int) -> memoryview:
    """The bytes of an answer. Raises Unanswered as soon as there are more than `most`."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > most:
            raise Unanswered(f"more than the {most} bytes came that were asked for")
        parts.append(chunk)
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


@dataclass
class Request:
    """A range of a file to ask for, and the arrays for its parts, with their file positions."""

    file: FileInfo
    start: int
    stop: int
    parts: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def deliver(self, data: np.ndarray) -> None:
        """Copy the bytes that came to the arrays."""
        for start, out in self.parts:
            first = start - self.start
            elements = data[first : first + out.nbytes].view(out.dtype)
            copy_into(out, elements.reshape(out.shape))


def plan_requests(reads: Sequence[RangeRead]) -> list[Request]:
    """The requests for ranges of files: ranges near each other are joined, long ones are cut.

    >>> file = FileInfo("a", 1 << 30, "1")
    >>> outs = np.empty((3, 4), np.uint8)
    >>> reads = [RangeRead(file, start, out) for start, out in zip((100_000, 0, 8), outs)]
    >>> [(request.start, request.stop) for request in plan_requests(reads)]
    [(0, 12), (100000, 100004)]
    """
    pieces = [piece for read in reads for piece in _pieces(read)]
    pieces.sort(key=lambda piece: (piece.file.name, piece.start))
    requests: list[Request] = []
    for piece in pieces:
        if requests:
            last = requests[-1]
            is_near = last.file == piece.file and piece.start - last.stop <= GAP_BYTES
            if is_near and max(last.stop, piece.stop) - last.start <= REQUEST_BYTES:
                last.stop = max(last.stop, piece.stop)
                last.parts += piece.parts
                continue
        requests.append(piece)
    return requests


def _pieces(read: RangeRead) -> Iterator[Request]:
    """A read in pieces of at most REQUEST_BYTES, each a run of its elements in row-major order."""
    if not read.out.size:
        return
    out = read.out.reshape(-1).view(np.uint8) if read.out.flags.c_contiguous else read.out
    start = read.start
    for block in run_boxes(out.shape, out.itemsize, REQUEST_BYTES):
        part = out[block.index]
        yield Request(read.file, start, start + part.nbytes, [(start, part)])
        start += part.nbytes


class RemoteFiles(Files):
    """Files behind a network: this class plans requests and repeats them, a subclass sends them."""

    is_remote: ClassVar[bool] = True
    _prefix: str = ""  # what the keys of all files here begin with

    def key(self, name: str) -> str:
        """The key of a file in the store. Raises FormatError for a name that leads outside."""
        if name:
            check_name(name)
        return self._key(name)

    @property
    def _inside(self) -> int:
        """The position in a key at which the name of a file begins."""
        return len(f"{self._prefix}/") if self._prefix else 0

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))

    @abstractmethod
    def fetch(self, file: FileInfo, start: int, stop: int) -> memoryview:
        """Bytes of a file. Raises CorruptData, FileNotFoundError if it is gone, Unanswered."""
        ...

    def link(self, name: str) -> str | None:
        return None

    def read_into(self, reads: Sequence[RangeRead]) -> None:
        for name in {read.file.name for read in reads}:
            check_name(name)
        for read in reads:
            stop = read.start + read.out.nbytes
            if stop > read.file.size:
                raise CorruptData(
                    f"{self.url(read.file.name)} ends at byte {read.file.size}, and bytes"
                    f" {read.start} to {stop} are wanted"
                )
        request_all(self._answer, plan_requests(reads))

    def _answer(self, request: Request) -> None:
        data = self.persist(request.file.name, lambda: self._whole(request))
        request.deliver(np.frombuffer(data, np.uint8))

    def _whole(self, request: Request) -> memoryview:
        """All bytes that a request asks for. Raises Unanswered if fewer come."""
        data = self.fetch(request.file, request.start, request.stop)
        wanted = request.stop - request.start
        if len(data) != wanted:
            raise Unanswered(f"{len(data)} bytes came of {wanted}")
        count_request(wanted)
        return data

    def persist(self, name: str, ask: Callable[[], R]) -> R:
        """The answer to a request, repeated while Unanswered. Raises StoreError in the end."""
        for attempt in range(1, ATTEMPTS):
            count_request()
            try:
                return ask()
            except Unanswered:
                longest = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
                time.sleep(longest * random.uniform(0.5, 1))
        count_request()
        try:
            return ask()
        except Unanswered as error:
            raise StoreError(
                f"{self.url(name)} was asked for {ATTEMPTS} times, and not answered: {error}"
            ) from error

    def sync(self) -> None:
        """Do nothing: every file is durable once it is written."""


class ReadOnlyFiles(RemoteFiles):
    """Files behind a network to which nothing is written."""

    def _refuse(self, name: str, *_: object, **__: object) -> NoReturn:
        raise UnsupportedPath(f"{self.url(name)}: {READ_ONLY[self.url().partition(':')[0]]}")

    write = write_large = create = delete = _refuse


_WEB = "a web server is read from, and not written to"
# By scheme, the message when something is to be written there.
READ_ONLY = {
    "hf": "the hub is read from. Export to a local folder, and upload it: hf upload",
    "http": _WEB,
    "https": _WEB,
}
