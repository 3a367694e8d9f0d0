"""What stock Orbax writes: v0 (OCDBT or plain, zarr v2) and v1 (OCDBT, zarr v3) PyTree checkpoints.

Facts: `_src/serialization/tensorstore_utils.py` and `v1/_src/layout` of orbax-checkpoint 0.12.8. Nothing of
Orbax is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.formats.options import Options
from jax_ucp.layout.box import Box
from jax_ucp.metadata import Leaf
from jax_ucp.storage.contents import Contents, Item, Piece
from jax_ucp.storage.directory import Directory
from jax_ucp.storage.orbax_tree import TREE_FILE, OrbaxTree, read_orbax_tree
from jax_ucp.storage.source import ArrayInfo
from jax_ucp.storage.source_files import noted

STEP_FILE = "_CHECKPOINT_METADATA"


def recognise(path: Path) -> bool:
    return (path / TREE_FILE).is_file()


def open_orbax(path: Path, options: Options) -> Contents:
    """The PyTree checkpoint of stock Orbax at `path`: the directory with its `_METADATA`."""
    directory = Directory(path)
    for name in directory.files():  # TensorStore reads most of them, and does not say which
        noted(directory.file(name))
    tree = read_orbax_tree(directory)
    arrays = _Arrays(directory, tree)
    leaves = []
    for leaf in tree.leaves:
        if leaf.has_array:
            info = arrays.arrays()[leaf.name]
            leaf = replace(leaf, shape=info.shape, dtype=info.dtype.name)
        leaves.append(leaf)
    account = [Item(TREE_FILE, leaf.label, "mapped", leaf.label) for leaf in leaves]

    def where(leaf: Leaf) -> list[Piece]:
        whole = Box.whole(leaf.shape)
        return [Piece("manifest.ocdbt" if tree.ocdbt else leaf.name, leaf.name, whole, whole)] * leaf.has_array

    notes = ["stock Orbax keeps no checksums of array data: what it holds cannot be verified"]
    return Contents("orbax", str(path), leaves, arrays, account, notes=notes, where=where)


def items_of_step(path: Path) -> list[Path]:
    """The PyTree items in the directory of one step, as CheckpointManager and v1 lay them out."""
    return sorted(child for child in path.iterdir() if recognise(child)) if path.is_dir() else []


def is_step(path: Path) -> bool:
    return (path / STEP_FILE).is_file() and not (path / TREE_FILE).is_file()


class _Arrays:
    """The arrays of a stock checkpoint."""

    def __init__(self, directory: Directory, tree: OrbaxTree):
        self._directory = directory
        names = [leaf.name for leaf in tree.leaves if leaf.has_array]
        opening = {name: ts.open(_spec(directory, tree, name), open=True) for name in names}
        self._handles: dict[str, Any] = {}
        self._infos: dict[str, ArrayInfo] = {}
        for name, future in opening.items():
            try:
                array = self._handles[name] = future.result()
            except ValueError as error:
                raise FormatError(f"{directory}: {TREE_FILE} has {name}, whose array is unreadable: {error}") from None
            chunk = tuple(int(n or 1) for n in array.chunk_layout.read_chunk.shape or ())
            self._infos[name] = ArrayInfo(tuple(array.shape), array.dtype.numpy_dtype, chunk)

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._infos

    def read(self, key: str, box: Box) -> np.ndarray:
        try:
            return np.asarray(self._handles[key][box.index].read().result())
        except ValueError as error:
            raise CorruptData(f"{self._directory}/{key}: {error}") from None


def _spec(directory: Directory, tree: OrbaxTree, name: str) -> dict[str, Any]:
    kvstore: dict[str, Any] = directory.spec(name)
    if tree.ocdbt:
        kvstore = {"driver": "ocdbt", "base": directory.spec(), "path": f"{name}/"}
    fill = {"fill_missing_data_reads": not tree.all_chunks_stored}
    return {"driver": "zarr3" if tree.zarr3 else "zarr", "kvstore": kvstore, "recheck_cached_data": "open", **fill}
