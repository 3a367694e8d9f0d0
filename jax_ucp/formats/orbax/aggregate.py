"""The msgpack file `checkpoint`, in which Orbax up to 0.5 has the tree with its small values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jax_ucp.codecs.msgpack import decode
from jax_ucp.codecs.msgpack_tree import leaf_values
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files
from jax_ucp.files.ranges import FileRange
from jax_ucp.tree import Path as TreePath

AGGREGATE_FILE = "checkpoint"

_PLACEHOLDER = "PLACEHOLDER://"


def placeholder(value: Any) -> str | None:
    """The name of the array that a value stands for; None of any other value.

    Source: `leaf_placeholder`, `utils.py` of orbax-checkpoint 0.5.20.
    """
    if isinstance(value, str) and value.startswith(_PLACEHOLDER):
        return value.removeprefix(_PLACEHOLDER)
    return None


def read_aggregate(directory: Files, paths: Collection[TreePath]) -> Mapping[TreePath, Any]:
    """The values in the file by leaf of the tree; Raises FormatError for another tree."""
    path = FilePath(directory, AGGREGATE_FILE)
    # the files of others that are called so are texts, which begin below 0x80
    if not path.is_file() or path.read_range(0, 1) < b"\x80":
        return {}
    tree = decode(FileRange(path), str(path))
    by_name = {_names(at): value for at, value in leaf_values(tree, lambda value: False)}
    if by_name.keys() != {_names(at) for at in paths}:
        raise FormatError(
            f"{path} has another tree than the _METADATA beside it: they are of two saves"
        )
    return {at: by_name[_names(at)] for at in paths}


def _names(path: TreePath) -> tuple[str, ...]:
    """Keys as text: the file has dicts where the tree has lists."""
    return tuple(map(str, path))
