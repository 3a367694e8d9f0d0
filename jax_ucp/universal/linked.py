"""Arrays of a checkpoint that lie in other files, as they are: what a link has of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jax_ucp.arrays.extents import ExtentTable, Region, StoredArray, StoredFile, SummedArrays
from jax_ucp.arrays.protocol import ArrayInfo, Piece
from jax_ucp.arrays.value import Array, Stored, joined
from jax_ucp.errors import CorruptData
from jax_ucp.files.in_flight import each_file
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.protocol import FileInfo, Files
from jax_ucp.files.ranges import FileRange
from jax_ucp.layout.blocks import grid_boxes, grid_place
from jax_ucp.layout.box import Box, row_major_strides
from jax_ucp.layout.fragments import block_layout
from jax_ucp.universal.metadata import LinkedArray, Metadata, SourceFile
from jax_ucp.universal.ocdbt import Value, ValueRange
from jax_ucp.universal.zarr_files import chunk_name, linked_json

# Before the number of a symbolic link to a folder in which source files lie.
LINK_FOLDER = "ucp.linked_"
CRC = np.dtype("<u4")


@dataclass(frozen=True)
class Linked:
    """The linked arrays of a checkpoint by name, the shape and dtype of each, and their files."""

    arrays: Mapping[str, LinkedArray] = field(default_factory=dict)
    infos: Mapping[str, ArrayInfo] = field(default_factory=dict)
    sources: Sequence[SourceFile] = ()

    def values(self, name: str) -> Iterator[tuple[str, Value]]:
        """The index entries of a linked array, by keys below its name: its `zarr.json`, and where
        each chunk lies in its file.
        """
        array, info = self.arrays[name], self.infos[name]
        nbytes = math.prod(array.chunk) * info.dtype.itemsize
        yield "zarr.json", linked_json(info, array.chunk, array.order)
        boxes = grid_boxes(info.shape, array.chunk)
        for box, (file, offset) in zip(boxes, array.places, strict=True):
            key = chunk_name(grid_place(box, array.chunk))
            yield key, ValueRange(self.sources[file].name, offset, nbytes)


NOT_LINKED = Linked()


class LinkedChunks(ExtentTable):
    """The chunks `array/chunk` of linked arrays, in their files. Raises CorruptData."""

    def __init__(self, metadata: Metadata, folder: Files):
        self._linked = metadata.linked
        self._sources = metadata.sources
        leaves = {leaf.name: leaf for leaf in metadata.leaves if leaf.name in metadata.linked}
        self.infos = {
            name: ArrayInfo(leaf.shape, np.dtype(leaf.dtype)) for name, leaf in leaves.items()
        }
        arrays: dict[str, ArrayInfo] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for name, linked in metadata.linked.items():
            info = ArrayInfo(linked.chunk, self.infos[name].dtype)
            for i in range(len(linked.places)):
                arrays[_key(name, i)] = info
                self._places[_key(name, i)] = name, i
        super().__init__(arrays)
        find = partial(_source, folder)
        found = each_file(folder, find, metadata.sources) if metadata.sources else []
        self._files = [StoredFile(path, FileRange(path, file=info)) for path, info in found]

    def values(self) -> dict[str, Array]:
        """The linked arrays, made of their chunks."""
        return {name: self._value(name, linked) for name, linked in self._linked.items()}

    def _value(self, name: str, linked: LinkedArray) -> Array:
        shape = self.infos[name].shape
        boxes = list(grid_boxes(shape, linked.chunk))
        layout = block_layout(shape, boxes)
        keys = [_key(name, i) for i in range(len(boxes))]
        return joined(name, layout, [Stored(self, key, self._arrays[key]) for key in keys])

    def stored(self, key: str) -> StoredArray:
        name, i = self._places[key]
        linked = self._linked[name]
        file, offset = linked.places[i]
        dense = row_major_strides([linked.chunk[axis] for axis in linked.order])
        by_axis = dict(zip(linked.order, dense, strict=True))
        strides = tuple(by_axis[axis] for axis in range(len(linked.chunk)))
        regions = self.regions(key)
        region = regions[0][1] if regions else None
        return StoredArray(self._files[file], offset, strides, region, key)

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        name, i = self._places[key]
        file, offset = self._linked[name].places[i]
        yield Piece(self._sources[file].name, str(offset), box, box)

    def sums(self) -> Iterator[SummedArrays]:
        for name, linked in self._linked.items():
            if linked.crcs:
                keys = [_key(name, i) for i in range(len(linked.places))]
                yield SummedArrays(name, self.infos[name].nbytes, [name], keys)

    def regions(self, place: str) -> Sequence[tuple[StoredFile, Region]]:
        name, i = self._places[place]
        linked = self._linked[name]
        if not linked.crcs:
            return []
        file, offset = linked.places[i]
        crc = int(np.frombuffer(linked.crcs, CRC)[i])
        stop = offset + self._arrays[place].nbytes
        return [(self._files[file], Region(f"{name}, chunk {i}", offset, stop, crc))]


def _key(name: str, i: int) -> str:
    return f"{name}/{i}"


def _source(folder: Files, source: SourceFile) -> tuple[FilePath, FileInfo]:
    """The file that was linked. Raises CorruptData where it is gone, or another."""
    # below the folder of the link, or where a symbolic link of its own leads
    first, _, rest = source.name.partition("/")
    target = folder.link(first) if first.startswith(LINK_FOLDER) and rest else None
    path = FilePath(folder, source.name)
    if target is not None and os.path.isabs(target):
        path = file_path(target) / rest
    info = path.info()
    again = (
        "The checkpoint has no copy of it. Bring back the file as it was, or link or convert its"
        " source again"
    )
    if info is None or info.kind != "file":
        raise CorruptData(
            f"{folder} is a link, whose file {path} is gone: it was deleted or moved. {again}"
        )
    if (info.size, info.version) != (source.size, source.version):
        raise CorruptData(
            f"{folder} is a link, whose file {path} was replaced or written to since: it has"
            f" {info.size} bytes and the version {info.version}, and had {source.size} bytes and"
            f" the version {source.version}. {again}"
        )
    return path, info


def linked_fault(metadata: Metadata) -> str | None:
    """The fault of linked arrays that no writer makes; None if there is none."""
    names = [source.name for source in metadata.sources]
    if len(set(names)) < len(names):
        return "has a source file twice"
    leaves = {leaf.name: leaf for leaf in metadata.leaves}
    for name, linked in metadata.linked.items():
        shape, dtype = leaves[name].shape, np.dtype(leaves[name].dtype)
        if len(linked.chunk) != len(shape) or sorted(linked.order) != list(range(len(shape))):
            return f"has {name!r:.200} of shape {shape} in chunks of {linked.chunk}"
        if any(c < 1 or n % c for n, c in zip(shape, linked.chunk, strict=True)):
            return f"has {name!r:.200} of shape {shape} in chunks of {linked.chunk}"
        count = math.prod(n // c for n, c in zip(shape, linked.chunk, strict=True))
        crcs = len(linked.crcs) // CRC.itemsize
        if len(linked.places) != count or (linked.crcs and crcs != count):
            return (
                f"has {name!r:.200} in {count} chunks, with {len(linked.places)} places and"
                f" {crcs} checksums"
            )
        nbytes = math.prod(linked.chunk) * dtype.itemsize
        for file, offset in linked.places:
            if file >= len(names) or offset + nbytes > metadata.sources[file].size:
                return f"has a chunk of {name!r:.200} outside the files that it names"
    return None


def source_folders(sources: Iterable[SourceFile]) -> set[str]:
    """The names in the folder of a link that lead to its files."""
    return {source.name.partition("/")[0] for source in sources}
