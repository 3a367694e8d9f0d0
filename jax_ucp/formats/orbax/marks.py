"""Marks of a tree of Orbax, and of folders of arrays without one."""

from __future__ import annotations

from jax_ucp.files.path import FilePath
from jax_ucp.universal.orbax_tree import STRINGS_FILE, TREE_FILE

ARRAY_FILE = ".zarray"
# Beside one of these, arrays belong to something else: to a hierarchy of zarr, or to a save of
# Orbax that has lost its tree.
_OTHERS = (".zgroup", ".zmetadata", "zarr.json", ARRAY_FILE, STRINGS_FILE, "metadata.json")


def is_tree(path: FilePath) -> bool:
    return (path / TREE_FILE).is_file()


def are_arrays(path: FilePath) -> bool:
    if not path.is_dir() or any((path / name).exists() for name in _OTHERS):
        return False
    return any((child / ARRAY_FILE).is_file() for child in path.children() if child.is_dir())
