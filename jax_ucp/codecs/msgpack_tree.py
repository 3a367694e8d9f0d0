"""The tree in a msgpack file of Flax, as leaves of a checkpoint; its arrays, read by ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.extents import ExtentTable, StoredArray, StoredFile
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource
from jax_ucp.arrays.value import joined
from jax_ucp.codecs.msgpack import ChunkedArray, PackedArray
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import FileRange
from jax_ucp.layout.patterns import flat_layouts
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


def packed_table(file: FilePath, values: Mapping[str, Packed]) -> ArraySource:
    """The arrays of a file by name: each in one piece, in chunks, or a number."""
    bytes_of = StoredFile(file, FileRange(file))
    chunked = {key: value for key, value in values.items() if isinstance(value, ChunkedArray)}
    pieces = {
        f"{key}, chunk {i}": chunk
        for key, value in chunked.items()
        for i, chunk in enumerate(value.chunks)
    }
    whole = {key: value for key, value in values.items() if key not in chunked} | pieces
    stored = {
        key: StoredArray(bytes_of, value.start)
        if isinstance(value, PackedArray)
        else np.asarray(value)
        for key, value in whole.items()
    }
    table = ExtentTable({key: array_info(value) for key, value in whole.items()}, stored, file.name)
    if not chunked:
        return table
    arrays = dict(expressions(table))
    for key, value in chunked.items():
        chunks = [arrays.pop(f"{key}, chunk {i}") for i in range(len(value.chunks))]
        lengths = [chunk.info.shape[0] for chunk in chunks]
        layout = flat_layouts({key: value.info.shape}, lengths)[key]
        arrays[key] = joined(key, layout, chunks)
    return Evaluated({key: arrays[key] for key in values})


def array_info(value: Packed) -> ArrayInfo:
    """Shape and dtype of the array; a number of the host program is of numpy's dtype for it."""
    if isinstance(value, PackedArray | ChunkedArray):
        return value.info
    return ArrayInfo((), np.asarray(value).dtype)


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
