"""Ranges of bytes in a file or in memory, which are read by position."""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import FileInfo, RangeRead
from jax_ucp.files.source_files import note

# The number of positions from which a few bytes each are read together.
_BATCH = 1 << 12

EDGE_BYTES, AFTER_HEAD_BYTES = 2 << 10, 256


class ByteRange(Protocol):
    """Bytes by position, from 0 to `size`."""

    size: int
    is_remote: bool = False

    @property
    def place(self) -> tuple[FilePath, FileInfo, int] | None:
        """The file that has the bytes in this order, and the offset of the first; else None."""
        return None

    @abstractmethod
    def read_into(self, reads: Sequence[tuple[int, np.ndarray]]) -> None:
        """Fill arrays, of any strides, from their positions on. Raises CorruptData if too short."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, or to the end if that comes first."""
        out = np.empty(max(0, min(stop, self.size) - start), np.uint8)
        self.read_into([(start, out)])
        return out.tobytes()

    def read_heads(self, starts: Sequence[int], length: int) -> list[bytes]:
        """`length` bytes from each position, or as many as there are; near ones share a read."""
        heads: list[bytes] = []
        for first in range(0, len(starts), _BATCH):
            runs = list(_runs(starts[first : first + _BATCH], length))
            stops = [min(self.size, run[-1] + length) for run in runs]
            outs = [
                np.empty(max(0, stop - run[0]), np.uint8)
                for run, stop in zip(runs, stops, strict=True)
            ]
            self.read_into([(run[0], out) for run, out in zip(runs, outs, strict=True)])
            for run, out in zip(runs, outs, strict=True):
                data = out.tobytes()
                heads += [data[at - run[0] : at - run[0] + length] for at in run]
        return heads


def _runs(starts: Sequence[int], length: int) -> Iterator[list[int]]:
    """Groups of consecutive positions, each at most `2 * length` bytes after the one before."""
    run: list[int] = []
    for start in starts:
        if run and not 0 <= start - run[-1] <= 2 * length:
            yield run
            run = []
        run.append(start)
    if run:
        yield run


class FileRange(ByteRange):
    """The bytes of a file, or `length` of them from `offset` on.

    Raises FormatError for an empty file and anything that is not a file, FileNotFoundError if
    nothing is there.
    """

    def __init__(
        self,
        path: FilePath,
        offset: int = 0,
        length: int | None = None,
        file: FileInfo | None = None,
    ):
        self._path = path
        self.file = file or _file(path)
        self.is_remote = path.files.is_remote
        note(path.files, self.file)
        self._offset = min(offset, self.file.size)
        rest = self.file.size - self._offset
        self.size = rest if length is None else min(length, rest)

    @property
    def place(self) -> tuple[FilePath, FileInfo, int]:
        return self._path, self.file, self._offset

    def read_into(self, reads: Sequence[tuple[int, np.ndarray]]) -> None:
        for start, out in reads:
            if start < 0 or start + out.nbytes > self.size:
                raise CorruptData(
                    f"bytes {start} to {start + out.nbytes} are wanted, of {self.size}"
                )
        self._path.files.read_into(
            [RangeRead(self.file, self._offset + start, out) for start, out in reads if out.size]
        )


class EdgesInMemory(ByteRange):
    """Bytes of which the first and the last are in memory, read by one call.

    A file of torch.save has its directory at the end. Over a network, the results of `read_heads`
    are kept too, each with a few more bytes, so that a member with one number needs no request.
    """

    def __init__(self, inner: ByteRange):
        self._inner, self.size, self.is_remote = inner, inner.size, inner.is_remote
        starts = [0] if self.size <= 2 * EDGE_BYTES else [0, self.size - EDGE_BYTES]
        length = self.size if len(starts) == 1 else EDGE_BYTES
        self._kept: dict[int, np.ndarray] = {at: np.empty(length, np.uint8) for at in starts}
        inner.read_into(list(self._kept.items()))
        self._starts = sorted(self._kept)

    def __reduce__(self) -> tuple[Callable[[ByteRange], ByteRange], tuple[ByteRange]]:
        return _itself, (self._inner,)  # the bytes in memory are not sent

    @property
    def place(self) -> tuple[FilePath, FileInfo, int] | None:
        return self._inner.place

    def read_heads(self, starts: Sequence[int], length: int) -> list[bytes]:
        if not self.is_remote:
            return super().read_heads(starts, length)
        heads = super().read_heads(starts, length + AFTER_HEAD_BYTES)
        for start, head in zip(starts, heads, strict=True):
            self._kept.setdefault(start, np.frombuffer(head, np.uint8))
        self._starts = sorted(self._kept)
        return [head[:length] for head in heads]

    def read_into(self, reads: Sequence[tuple[int, np.ndarray]]) -> None:
        outside = [(start, out) for start, out in reads if not self._answer(start, out)]
        if outside:
            self._inner.read_into(outside)

    def _answer(self, start: int, out: np.ndarray) -> bool:
        """Whether all bytes of an array are in memory, in which case it is filled."""
        at = bisect.bisect_right(self._starts, start) - 1
        if at < 0:
            return False
        first = start - self._starts[at]
        data = self._kept[self._starts[at]][first : first + out.nbytes]
        if len(data) < out.nbytes:
            return False
        out[...] = data.view(out.dtype).reshape(out.shape)
        return True


def _itself(data: ByteRange) -> ByteRange:
    return data


class MemoryRange(ByteRange):
    """Bytes in memory."""

    def __init__(self, data: bytes):
        self._data = np.frombuffer(data, np.uint8)
        self.size = len(data)

    def read_into(self, reads: Sequence[tuple[int, np.ndarray]]) -> None:
        for start, out in reads:
            data = self._data[start : start + out.nbytes]
            if len(data) < out.nbytes:
                raise CorruptData(f"bytes {start} to {start + out.nbytes} of {self.size}")
            out[...] = data.view(out.dtype).reshape(out.shape)


def _file(path: FilePath) -> FileInfo:
    """The file at a path, which is not empty. Raises FormatError, FileNotFoundError."""
    info = path.info()
    if info is not None and info.kind == "file":
        if not info.size:
            raise FormatError("the file is empty")
        return info
    if info is not None and (info.kind == "folder" or path.link() is None):
        raise FormatError("it is a folder or a device, where a file of torch.save should be")
    return path.file()
