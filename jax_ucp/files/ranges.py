"""A run of bytes, anywhere in a file or in memory, read by position."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import FileInfo, RangeRead
from jax_ucp.files.source_files import note

# So many positions are read together where few bytes of each are wanted.
_BATCH = 1 << 12

EDGE_BYTES = 2 << 10


class ByteRange(Protocol):
    """Bytes by position, from 0 to `size`."""

    size: int

    @abstractmethod
    def read_into(self, reads: Sequence[tuple[int, np.ndarray]]) -> None:
        """Fill each array, of any strides, with the bytes from its position on.

        Raises CorruptData where they end before.
        """
        ...

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, or to the end where that comes before."""
        out = np.empty(max(0, min(stop, self.size) - start), np.uint8)
        self.read_into([(start, out)])
        return out.tobytes()

    def read_heads(self, starts: Sequence[int], length: int) -> list[bytes]:
        """`length` bytes from each position, or as many as there are."""
        heads: list[bytes] = []
        for first in range(0, len(starts), _BATCH):
            batch = starts[first : first + _BATCH]
            outs = [np.empty(max(0, min(length, self.size - at)), np.uint8) for at in batch]
            self.read_into(list(zip(batch, outs, strict=True)))
            heads += [out.tobytes() for out in outs]
        return heads


class FileRange(ByteRange):
    """The bytes of a file, or `length` of them from `offset` on.

    Raises FormatError for what is no file, or an empty one, FileNotFoundError where nothing is.
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
        note(path.files, self.file)
        self._offset = min(offset, self.file.size)
        rest = self.file.size - self._offset
        self.size = rest if length is None else min(length, rest)

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
    """Bytes of which the first and the last have been read, in one go: a file of torch.save has its
    directory at the end, and how most of its members begin near either.
    """

    def __init__(self, inner: ByteRange):
        self._inner, self.size = inner, inner.size
        starts = [0] if self.size <= 2 * EDGE_BYTES else [0, self.size - EDGE_BYTES]
        length = self.size if len(starts) == 1 else EDGE_BYTES
        edges = [np.empty(length, np.uint8) for _ in starts]
        inner.read_into(list(zip(starts, edges, strict=True)))
        self._edges = list(zip(starts, edges, strict=True))

    def read_into(self, reads: Sequence[tuple[int, np.ndarray]]) -> None:
        """Only arrays of bytes."""
        outside = []
        for start, out in reads:
            edge = next((e for e in self._edges if self._holds(e, start, len(out))), None)
            if edge is None:
                outside.append((start, out))
            else:
                first = start - edge[0]
                out[...] = edge[1][first : first + len(out)]
        if outside:
            self._inner.read_into(outside)

    def _holds(self, edge: tuple[int, np.ndarray], start: int, length: int) -> bool:
        return edge[0] <= start and start + length <= edge[0] + len(edge[1])


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
    info = path.info()
    if info is not None and info.kind == "file":
        if not info.size:
            raise FormatError("the file is empty")
        return info
    if info is not None and (info.kind == "folder" or path.link() is None):
        raise FormatError("it is a folder or a device, where a file of torch.save should be")
    return path.file()
