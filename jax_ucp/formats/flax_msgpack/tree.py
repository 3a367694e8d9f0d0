"""The tree in a msgpack file, as leaves of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax_ucp.formats.flax_msgpack.decode import ChunkedArray, PackedArray
from jax_ucp.formats.flax_msgpack.source import Number, Packed, array_info
from jax_ucp.tree import Key, KeyKind, Leaf, LeafKind
from jax_ucp.tree import Path as TreePath

_KINDS: dict[type, LeafKind] = {
    ChunkedArray: "array",
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
}


def leaf_values(
    value: Any, is_leaf: Callable[[Any], bool], path: TreePath = ()
) -> Iterator[tuple[TreePath, Any]]:
    """Every leaf below a value with its path: what `is_leaf` says, what is no dict, list or tuple,
    and those of them that are empty.
    """
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
    """Whether it is an array in the file, or a number."""
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
