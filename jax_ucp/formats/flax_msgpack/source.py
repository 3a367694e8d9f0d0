"""The arrays of a msgpack file, read by ranges, and the numbers beside them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jax_ucp.errors import CorruptData
from jax_ucp.files.ranges import ByteRange
from jax_ucp.files.strided import read_strided, row_major_strides
from jax_ucp.formats.flax_msgpack.decode import ChunkedArray, PackedArray
from jax_ucp.layout.box import Box
from jax_ucp.sources.protocol import ArrayInfo, ArraySource, Piece

Number = bool | int | float | complex
Packed = PackedArray | ChunkedArray | Number


class PackedSource(ArraySource):
    """Arrays of the file called `name`, by name: in one piece, in chunks, or a number."""

    def __init__(self, file: ByteRange, name: str, values: Mapping[str, Packed]):
        self._file, self._name, self._values = file, name, values
        self._arrays = {key: array_info(value) for key, value in values.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        match self._values[key]:
            case PackedArray(start, info):
                read_strided(self._file, start, row_major_strides(info.shape), boxes, outs)
            case ChunkedArray(info, chunks):
                joined = _Joined(self._file, chunks)
                read_strided(joined, 0, row_major_strides(info.shape), boxes, outs)
            case number:
                for out in outs:
                    out[...] = number

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        yield Piece(self._name, key, box, box)


def array_info(value: Packed) -> ArrayInfo:
    """What is known of the array; a number of the host program is of numpy's dtype for it."""
    if isinstance(value, PackedArray | ChunkedArray):
        return value.info
    return ArrayInfo((), np.asarray(value).dtype)


class _Joined(ByteRange):
    """The bytes of chunks, one after the other."""

    def __init__(self, file: ByteRange, chunks: Sequence[PackedArray]):
        self._file = file
        self._starts = [chunk.start for chunk in chunks]
        lengths = [chunk.info.nbytes for chunk in chunks]
        self._edges = list(itertools.accumulate(lengths, initial=0))
        self.size = self._edges[-1]

    def read_into(self, reads: Sequence[tuple[int, np.ndarray]]) -> None:
        for start, out in reads:
            if start < 0 or start + out.nbytes > self.size:
                raise CorruptData(f"bytes {start} to {start + out.nbytes} of {self.size}")
            flat = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
            self._file.read_into(list(self._runs(start, flat.reshape(-1).view(np.uint8))))
            if flat is not out:
                out[...] = flat

    def _runs(self, start: int, data: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        first = np.searchsorted(self._edges, start, side="right") - 1
        done = 0
        for i in range(int(first), len(self._starts)):
            if done == len(data):
                return
            skip = start + done - self._edges[i]
            length = min(len(data) - done, self._edges[i + 1] - start - done)
            yield self._starts[i] + skip, data[done : done + length]
            done += length
