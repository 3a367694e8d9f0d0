"""The tree in a msgpack file of Flax, as leaves of a checkpoint; its arrays, read by ranges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ucp.arrays.extents import ExtentTable, StoredArray, StoredFile
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.codecs.msgpack import ChunkedArray, PackedArray
from jax_ucp.errors import CorruptData
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import ByteRange, FileRange
from jax_ucp.tree import Key, KeyKind, Leaf, LeafKind
from jax_ucp.tree import Path as TreePath

Number = bool | int | float | complex
Packed = PackedArray | ChunkedArray | Number
_KINDS: dict[type, LeafKind] = {
    ChunkedArray: "array",
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
}


def packed_table(file: FilePath, values: Mapping[str, Packed]) -> ExtentTable:
    """The arrays of a file by name: each in one piece, in chunks, or a number."""
    data = FileRange(file)
    stored: dict[str, StoredArray | np.ndarray] = {}
    for key, value in values.items():
        match value:
            case PackedArray(start):
                stored[key] = StoredArray(StoredFile(file, data), start)
            case ChunkedArray(chunks=chunks):
                stored[key] = StoredArray(StoredFile(file, _JoinedBytes(data, chunks)), 0)
            case number:
                stored[key] = np.asarray(number)
    infos = {key: array_info(value) for key, value in values.items()}
    return ExtentTable(infos, stored, file.name)


def array_info(value: Packed) -> ArrayInfo:
    """Shape and dtype of the array; a number of the host program is of numpy's dtype for it."""
    if isinstance(value, PackedArray | ChunkedArray):
        return value.info
    return ArrayInfo((), np.asarray(value).dtype)


class _JoinedBytes(ByteRange):
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


def leaf_values(
    value: Any, is_leaf: Callable[[Any], bool], path: TreePath = ()
) -> Iterator[tuple[TreePath, Any]]:
    """Every leaf below a value with its path: empty containers too, and wherever `is_leaf`."""
    if is_leaf(value) or not value or not isinstance(value, dict | list | tuple):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from leaf_values(item, is_leaf, (*path, Key("dict", name)))
    else:
        kind: KeyKind = "list" if isinstance(value, list) else "tuple"
        for i, item in enumerate(value):
            yield from leaf_values(item, is_leaf, (*path, Key(kind, i)))


def is_packed(value: Any) -> bool:
    return isinstance(value, PackedArray | ChunkedArray | Number)


def packed_leaf(path: TreePath, name: str, value: Packed) -> Leaf:
    """The leaf of an array or a number."""
    info = array_info(value)
    if isinstance(value, PackedArray):
        kind: LeafKind = "numpy_scalar" if value.is_scalar else "array"
    else:
        kind = _KINDS[type(value)]
    return Leaf(path, name, kind, info.shape, info.dtype.name)


def plain_leaf(path: TreePath, name: str, value: Any) -> Leaf:
    """The leaf of a text, of None, or of an empty dict, list or tuple."""
    match value:
        case str():
            return Leaf(path, name, "str", value=value)
        case None:
            return Leaf(path, name, "none")
        case _:
            return Leaf(path, name, "empty", value=type(value).__name__)
