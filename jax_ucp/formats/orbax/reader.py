"""PyTree checkpoints of stock Orbax 0.5 and later: v0 (OCDBT or plain, zarr v2), v1 (zarr v3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jax_ucp.arrays.beside import MARKERS, items_beside
from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.codecs.msgpack_tree import packed_table
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files, require_small
from jax_ucp.files.source_files import note
from jax_ucp.formats.orbax.arrays import (
    ZarrArrays,
    ZarrFolder,
    check_size,
    databases,
    joined,
    names_beside,
)
from jax_ucp.formats.orbax.tree import AGGREGATE_FILE, OrbaxTree, read_orbax_tree
from jax_ucp.options import Options
from jax_ucp.tree import Leaf
from jax_ucp.universal.orbax_tree import SHARDING_FILE, STRINGS_FILE, TREE_FILE
from jax_ucp.universal.validation import leaf_fault

# TensorStore reads these whole; of the largest arrays they have some kilobytes.
_READ_WHOLE, _MOST_BYTES = (".zarray", "zarr.json", "manifest.ocdbt"), 1 << 20

NO_CHECKSUMS = "stock Orbax keeps no checksums of array data: what it holds cannot be verified"
UNMERGED = (
    "each process has a database of its own here, and none was made of them: Orbax itself does not"
    " read this, and whether the save was finished is not known"
)


def parse(path: FilePath, options: Options) -> Contents:
    """The PyTree checkpoint of stock Orbax at `path`. Raises FormatError."""
    directory = path.folder()
    note_files(directory)
    tree = read_orbax_tree(directory)
    in_databases = databases(directory, tree.ocdbt)
    storage = ZarrFolder(directory, TREE_FILE, in_databases, tree.zarr3, tree.all_chunks_stored)
    zarr = ZarrArrays(storage, tree.stored)
    arrays = zarr
    if tree.packed:
        arrays = joined(zarr, packed_table(path / AGGREGATE_FILE, tree.packed))
    leaves = [_leaf(directory, tree, leaf, arrays.arrays()) for leaf in tree.leaves]
    check_size(storage, zarr.arrays())
    inventory = [
        Item(f"{TREE_FILE}:{leaf.label}", leaf.kind, "mapped", leaf.label) for leaf in leaves
    ]
    known = {TREE_FILE, SHARDING_FILE, STRINGS_FILE, "array_metadatas", *MARKERS}
    known |= {AGGREGATE_FILE} if tree.has_aggregate else set()
    known |= names_beside(storage, tree.stored)
    inventory += items_beside(path, known)
    notes = [NO_CHECKSUMS, *([UNMERGED] if storage.is_unmerged else [])]
    return Contents("orbax", str(path), leaves, arrays, inventory, notes=notes)


def note_files(directory: Files) -> None:
    """Note every file, since TensorStore does not say which it reads. Raises FormatError.

    TensorStore follows every link, and waits for ever for a FIFO: links that lead out of the folder
    or to nothing, what is no file, and metadata that are too large are refused here.
    """
    files = directory.walk()
    if not directory.is_remote:  # where there are links
        files = filter(None, [directory.stat(file.name) for file in files])
    for file in files:
        if file.kind == "other":
            raise FormatError(
                f"{directory.url(file.name)} is a link that leads nowhere, a FIFO, a socket or a"
                " device: stock Orbax writes files only. Remove it, or copy the file that it was"
            )
        if file.name.rpartition("/")[2] in _READ_WHOLE:
            require_small(directory, file, _MOST_BYTES)
        note(directory, file)


def _leaf(directory: Files, tree: OrbaxTree, leaf: Leaf, arrays: Mapping[str, ArrayInfo]) -> Leaf:
    if leaf.has_array:
        info = arrays[leaf.name]
        leaf = replace(leaf, shape=info.shape, dtype=info.dtype.name)
        # what a device wrote a part of, in such chunks
        written, chunk = tree.written.get(leaf.name), info.chunk or info.shape
        if written is not None:
            is_part = len(written) == len(info.shape) and all(
                w <= n and w % max(1, c) == 0
                for w, n, c in zip(written, info.shape, chunk, strict=True)
            )
            if not is_part:
                raise FormatError(
                    f"{directory}/{tree.stored[leaf.name]} has shape {leaf.shape} in chunks of"
                    f" {chunk}, but by {TREE_FILE} a device wrote {written} of it: the array is"
                    " that of another leaf, or of another save"
                )
        like_a_key = leaf.dtype == "uint32" and leaf.shape[-1:] in ((2,), (4,))
        if like_a_key and leaf.name in tree.undescribed:
            raise FormatError(
                f"{directory}/array_metadatas has nothing of {tree.stored[leaf.name]}, and had when"
                f" {TREE_FILE} was written: it tells which arrays are keys of jax.random. Copy the"
                " folder array_metadatas from where the checkpoint was saved"
            )
    if fault := leaf_fault(leaf):
        raise FormatError(f"{directory}/{TREE_FILE} says of {leaf.label!r:.200} that it is {fault}")
    return leaf
