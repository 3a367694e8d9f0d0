"""What stock Orbax writes: v0 (OCDBT or plain, zarr v2) and v1 (OCDBT, zarr v3) PyTree checkpoints.

Facts: `_src/serialization/tensorstore_utils.py` and `v1/_src/layout` of orbax-checkpoint 0.12.8.
Nothing of Orbax is imported.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorstore as ts

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files, walk
from jax_ucp.files.source_files import note
from jax_ucp.formats.options import Options
from jax_ucp.layout.blocks import whole_chunks
from jax_ucp.layout.box import Box
from jax_ucp.sources.beside import MARKERS, items_beside
from jax_ucp.sources.budget import HELD_BYTES
from jax_ucp.sources.contents import Contents, Item, Piece
from jax_ucp.sources.protocol import ArrayInfo, MakesArrays
from jax_ucp.tree import Leaf
from jax_ucp.universal.checked import is_dtype, leaf_fault
from jax_ucp.universal.orbax_tree import (
    SHARDING_FILE,
    STRINGS_FILE,
    TREE_FILE,
    OrbaxTree,
    read_orbax_tree,
)

STEP_FILE = "_CHECKPOINT_METADATA"

# No codec of zarr makes more of a byte: a block of zstd has 4 bytes at least, and inflates to 128
# KiB at most.
MAX_RATIO = 1 << 15

# Chunks of nothing but zeros, which older versions of Orbax left out, may make so much of no bytes
# at all.
FREE_BYTES = 1 << 30

# What TensorStore raises for a checkpoint that is damaged, depending on where.
_TENSORSTORE_ERRORS = (ValueError, IndexError, OverflowError, NotImplementedError)


def recognise(path: FilePath) -> bool:
    return (path / TREE_FILE).is_file()


def open_orbax(path: FilePath, options: Options) -> Contents:
    """The PyTree checkpoint of stock Orbax at `path`: the directory with its `_METADATA`.

    Raises FormatError where an array is none that stock writes, or says that it is larger than its
    files can make it.
    """
    directory = path.folder()
    for name in (file.name for file in walk(directory)):
        # TensorStore reads most of them, does not say which, and follows every link: a name that
        # leads out is refused here.
        if (file := directory.stat(name)) is not None:
            note(directory, file)
    tree = read_orbax_tree(directory)
    arrays = _Arrays(directory, tree)
    leaves = []
    for leaf in tree.leaves:
        if leaf.has_array:
            info = arrays.arrays()[leaf.name]
            leaf = replace(leaf, shape=info.shape, dtype=info.dtype.name)
            _check_written(directory, tree, leaf, info)
        if fault := leaf_fault(leaf):
            raise FormatError(
                f"{directory}/{TREE_FILE} says of {leaf.label!r:.200} that it is {fault}"
            )
        leaves.append(leaf)
    _check_size(directory, arrays.arrays())
    inventory = [Item(TREE_FILE, leaf.label, "mapped", leaf.label) for leaf in leaves]
    inventory += items_beside(path, _names(directory, tree))

    notes = ["stock Orbax keeps no checksums of array data: what it holds cannot be verified"]
    return Contents("orbax", str(path), leaves, arrays, inventory, notes=notes)


def _check_written(directory: Files, tree: OrbaxTree, leaf: Leaf, info: ArrayInfo) -> None:
    """Raise FormatError where an array is not what a device wrote a part of: smaller, of other
    axes, or in chunks that do not divide that part, as Orbax's do.
    """
    written = tree.written.get(leaf.name)
    if written is None:
        return
    chunk = info.chunk or info.shape
    same_axes = len(written) == len(info.shape)
    lengths = zip(written, info.shape, chunk, strict=True) if same_axes else ()
    if same_axes and all(w <= n and w % max(1, c) == 0 for w, n, c in lengths):
        return
    raise FormatError(
        f"{directory}/{tree.stored[leaf.name]} has shape {leaf.shape} in chunks of {chunk}, but by"
        f" {TREE_FILE} a device wrote {written} of it: the array is that of another leaf, or of"
        " another save"
    )


def _names(directory: Files, tree: OrbaxTree) -> set[str]:
    """What stock Orbax has in the folder of a tree. Raises FormatError where an array is there
    twice.
    """
    found = {TREE_FILE, SHARDING_FILE, STRINGS_FILE, "array_metadatas", *MARKERS}
    if tree.ocdbt:
        processes = {
            name.partition("/")[0]
            for name in (file.name for file in walk(directory))
            if name.startswith("ocdbt.process_")
        }
        return found | processes | {"d", "manifest.ocdbt"}
    both = (".zarray", "zarr.json")
    for stored in tree.stored.values():
        if all(directory.stat(f"{stored}/{name}") for name in both):
            raise FormatError(
                f"{directory}/{stored} has {both[0]} and {both[1]}: an array of zarr v2 and one of"
                f" v3, of two saves, lie in one folder. By {TREE_FILE} it is the one of"
                f" v{3 if tree.zarr3 else 2}; move the other away"
            )
    return found | {stored.partition("/")[0] for stored in tree.stored.values()}


def _check_size(directory: Files, arrays: Mapping[str, ArrayInfo]) -> None:
    """Raise FormatError where arrays are larger than the bytes that are stored could make them."""
    claimed = sum(info.nbytes for info in arrays.values())
    stored = sum(file.size for file in walk(directory))
    if claimed > FREE_BYTES + MAX_RATIO * stored:
        raise FormatError(
            f"{directory} says that its arrays have {claimed} bytes, but its files have {stored},"
            f" of which no codec makes more than {MAX_RATIO} each: the shape of an array is"
            " damaged, or files are missing"
        )


def items_of_step(path: FilePath) -> list[FilePath]:
    """The PyTree items in the directory of one step, as CheckpointManager and v1 lay them out."""
    return sorted(child for child in path.children() if recognise(child)) if path.is_dir() else []


def is_step(path: FilePath) -> bool:
    return (path / STEP_FILE).is_file() and not (path / TREE_FILE).is_file()


class _Arrays(MakesArrays):
    """The arrays of a stock checkpoint, by the names of their leaves.

    Stock's chunks are as large as what a device held. One that is read in several blocks stays
    decoded until another is wanted: to decode it costs more than to copy it, and takes its bytes in
    memory for each block anew.
    """

    def __init__(self, directory: Files, tree: OrbaxTree):
        self._directory, self._tree = directory, tree
        self._specs = {name: _spec(directory, tree, stored) for name, stored in tree.stored.items()}
        self._handles: dict[str, Any] = {}
        self._infos: dict[str, ArrayInfo] = {}
        self._held: tuple[str, Box, Any] | None = None
        self._lock = threading.Lock()
        opening = {name: ts.open(spec, open=True) for name, spec in self._specs.items()}
        for name, future in opening.items():
            where = f"{directory}: {TREE_FILE} has {tree.stored[name]}, whose array is unreadable"
            try:
                array = self._handles[name] = future.result()
            except _TENSORSTORE_ERRORS as error:
                raise FormatError(f"{where}: {error}") from None
            if fault := _array_fault(array):
                raise FormatError(f"{where}: it {fault}")
            chunk = tuple(int(n or 1) for n in array.chunk_layout.read_chunk.shape or ())
            self._infos[name] = ArrayInfo(tuple(array.shape), array.dtype.numpy_dtype, chunk)

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._infos

    def read(self, key: str, box: Box) -> np.ndarray:
        try:
            return np.asarray(self._handle(key, box)[box.index].read().result())
        except _TENSORSTORE_ERRORS as error:
            raise CorruptData(f"{self._directory}/{key}: {error}") from None

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        stored = self._tree.stored[key]
        yield Piece("manifest.ocdbt" if self._tree.ocdbt else stored, stored, box, box)

    def _handle(self, key: str, box: Box) -> Any:
        """The array, as it is opened for a read of `box`: with a cache for the chunks of which
        that is a part.
        """
        info = self._infos[key]
        around = whole_chunks(box, info.chunk or box.shape)
        nbytes = around.size * info.dtype.itemsize
        if nbytes < HELD_BYTES or around.intersect(Box.whole(info.shape)) == box:
            return self._handles[key]
        with self._lock:
            if self._held is None or self._held[:2] != (key, around):
                # the memory of the last ones goes before that of the next is taken
                self._held = None
                context = ts.Context({"cache_pool": {"total_bytes_limit": 2 * nbytes}})
                self._held = (
                    key,
                    around,
                    ts.open(self._specs[key], open=True, context=context).result(),
                )
            return self._held[2]


def _array_fault(array: Any) -> str | None:
    """What of an array stock Orbax never writes, and could take any memory to read."""
    if not is_dtype(array.dtype.name):
        return f"has the dtype {array.dtype.name}"
    for chunks in (array.chunk_layout.read_chunk, array.chunk_layout.write_chunk):
        if any(c > max(1, n) for c, n in zip(chunks.shape or (), array.shape, strict=False)):
            return (
                f"has chunks of {tuple(chunks.shape)}, which are larger than its shape"
                f" {tuple(array.shape)}"
            )
    # A blosc chunk is inflated whole before its size is looked at; the other codecs stop at that of
    # the chunk.
    if '"blosc"' in json.dumps(array.codec.to_json()):
        return "is compressed with blosc, which Orbax does not write"
    return None


def _spec(directory: Files, tree: OrbaxTree, stored: str) -> dict[str, Any]:
    if tree.ocdbt:
        kvstore = {"driver": "ocdbt", "base": directory.spec(), "path": f"{stored}/"}
    else:
        kvstore = directory.spec(stored)
    fill = {"fill_missing_data_reads": not tree.all_chunks_stored}
    return {
        "driver": "zarr3" if tree.zarr3 else "zarr",
        "kvstore": kvstore,
        "recheck_cached_data": "open",
        **fill,
    }
