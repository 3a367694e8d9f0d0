"""The universal store: one zarr v3 array per leaf, `ucp.json`, and `_METADATA`, written last.

Each outer chunk has one writer and is one file, or a part of a pack. Inner chunks carry a crc32c,
so that a flipped bit is an error for every reader. `docs/format.md` states the format.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from jax_ucp.arrays.checks import BoxWatcher, Check, Extent, watchers
from jax_ucp.arrays.optimizer_groups import Group
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, Piece, Want
from jax_ucp.errors import CorruptData, NotACheckpoint, UnsupportedLeaf
from jax_ucp.files.in_flight import each_file, stat_all
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.protocol import FileInfo, Files, read_bytes, read_file
from jax_ucp.files.read_ahead import ReadAhead
from jax_ucp.files.source_files import note
from jax_ucp.garbage import gc_paused
from jax_ucp.jobs.ledger import Blocks, Place, Written
from jax_ucp.layout.blocks import (
    Chunks,
    grid_boxes,
    grid_place,
    grid_shape,
    outer_boxes,
    rows_of_chunks,
)
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.tree import Leaf
from jax_ucp.universal.linked import NOT_LINKED, Linked
from jax_ucp.universal.metadata import ArrayRecord, Metadata, decode, digest, encode
from jax_ucp.universal.ocdbt import MANIFEST_FILE, Value, ValueRange, index_parts
from jax_ucp.universal.orbax_tree import TREE_FILE
from jax_ucp.universal.packs import INDEX_FILE, is_indexed, pack_name
from jax_ucp.universal.shard_codec import (
    CRC,
    OuterChunk,
    WholeChunk,
    chunk_bytes,
    read_at_once,
    read_shard,
    read_whole,
    shard_bytes,
    shard_parts,
    with_read_unit,
)
from jax_ucp.universal.stacks import (
    Stacks,
    as_leaves,
    homes_of,
    is_recorded,
    member_chunks,
    member_info,
    member_places,
    stack_info,
)
from jax_ucp.universal.validation import check_metadata, storable
from jax_ucp.universal.zarr_files import chunk_name, zarr_json

METADATA_FILE = "ucp.json"
COMPANIONS = "ucp.companions"  # a folder of the files that go with a model
VERIFY_BYTES = 16 << 20
PACKS_READ = 8  # at once, over a network


class Beside(NamedTuple):
    """A written file beside the arrays: its digest, and its info, if storage returned it."""

    digest: str
    file: FileInfo | None


class ZarrStore(ArraySource):
    """Arrays of known shape, dtype and chunks in a directory, written one outer chunk at a time.

    Every chunk must exist to be read: a missing file is an error, not zeros. `places` has for each
    outer chunk of a packed array the number of the pack and the offset in it, or None if it has no
    place yet. `crcs` has the recorded crc32c of each array's inner chunks, with which every read
    compares. `written` has the records of written chunks by array and box, and `beside` the other
    files that this process wrote.
    """

    def __init__(
        self,
        directory: Files,
        arrays: Mapping[str, ArrayInfo],
        chunks: Mapping[str, Chunks],
        places: Mapping[str, list[Place | None]] | None = None,
        crcs: Mapping[str, bytes] | None = None,
    ):
        self.directory = directory
        self.chunks = chunks
        self.places = dict(places or {})
        self.seen: dict[str, FileInfo] = {}
        self.beside: dict[str, Beside] = {}
        self.written: dict[str, dict[str, Written]] = {key: {} for key in arrays}
        self._crcs = crcs or {}
        self._outer: dict[str, Mapping[str, OuterBox]] = {}
        self._packs: dict[FileInfo, ReadAhead] = {}
        self._arrays = {key: with_read_unit(info, chunks[key]) for key, info in arrays.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def create(self, key: str) -> None:
        """Write the array's `zarr.json`, durable after `directory.sync`; one process calls this."""
        text = zarr_json(self._arrays[key], self.chunks[key])
        self.write_beside(f"{key}/zarr.json", text, durable=False)

    def write_beside(self, name: str, *parts: bytes, durable: bool = True) -> None:
        """Write a file beside the arrays from its parts, and record its digest."""
        file = self.directory.write(name, parts, durable=durable)
        hasher = xxhash.xxh3_64()
        for part in parts:
            hasher.update(part)
        self.beside[name] = Beside(hasher.hexdigest(), file)

    def write(self, key: str, box: Box, data: Iterable[np.ndarray], durable: bool = True) -> None:
        """Write one outer chunk, whose elements are given in blocks as `row_blocks` has them, or as
        one, and record it; durable at once, or after `directory.sync`.
        """
        if box.size:
            parts = self._chunk_parts(key, box, data)
            name, _ = self.find(key, self._chunk(key, box))
            self.directory.write(name, parts, durable=durable)

    def row_blocks(self, key: str, box: Box, max_bytes: int) -> Iterator[Box]:
        """The blocks of whole rows of an outer chunk, each of few inner chunks, in order."""
        info = self._arrays[key]
        step = rows_of_chunks(box.shape, self.chunks[key].inner, info.dtype.itemsize, max_bytes)
        step = (*step[:1], *map(max, zip(box.shape[1:], step[1:], strict=True)))
        return (block.shift(box.start) for block in grid_boxes(box.shape, step))

    def _chunk_parts(
        self, key: str, box: Box, data: Iterable[np.ndarray], place: Place | None = None
    ) -> Iterator[memoryview | bytes]:
        """The bytes of an outer chunk, which is recorded when all of them are taken."""
        info, chunks = self._arrays[key], self.chunks[key]
        hasher, crcs = xxhash.xxh3_64(), bytearray()

        def hashed() -> Iterator[np.ndarray]:
            for block in data:
                elements = np.asarray(block, dtype=info.dtype)
                _update(hasher, elements)
                yield elements

        yield from shard_parts(hashed(), box.shape, info.dtype, chunks, crcs)
        recorded = bytes(crcs) if is_recorded(info.shape, chunks) else b""
        self.written[key][str(box)] = Written(hasher.hexdigest(), recorded, place)

    def place_pack(self, number: int, blocks: Iterable[tuple[str, Box]]) -> Sequence[Place]:
        """The places of these outer chunks without index in a pack, one after the other; they are
        recorded.
        """
        places, end = [], 0
        for key, box in blocks:
            chunk = self._chunk(key, box)
            places.append((number, end))
            self._place(key, chunk, places[-1])
            end += chunk.nbytes
        return places

    def _place(self, key: str, chunk: OuterBox, place: Place) -> None:
        """Record where an outer chunk is in a pack, beside the places of the array's others."""
        of_array = self.places.setdefault(key, [None] * len(self.outer_chunks(key)))
        of_array[chunk.number] = place

    def write_pack(
        self, number: int, blocks: Sequence[tuple[str, Box]], arrays: Iterable[np.ndarray]
    ) -> None:
        """Write whole outer chunks without index to a file, durable after `directory.sync`."""
        parts = self.pack_parts(number, blocks, arrays)
        self.directory.write(pack_name(number), parts, durable=False)

    def pack_parts(
        self, number: int, blocks: Sequence[tuple[str, Box]], arrays: Iterable[np.ndarray]
    ) -> Iterator[memoryview | bytes]:
        """The bytes that `write_pack` writes; a chunk is recorded when its parts are taken."""
        places = self.place_pack(number, blocks)
        for (key, box), place, block in zip(blocks, places, arrays, strict=True):
            yield from self._chunk_parts(key, box, [block], place)

    def add(self, written: Blocks) -> None:
        """Add the records of chunks that other processes wrote, and the places of packed ones."""
        for key, blocks in written.items():
            self.written[key].update(blocks)
            if any(block.place for block in blocks.values()):
                for text, chunk in self.outer_chunks(key).items():
                    if (block := blocks.get(text)) and block.place:
                        self._place(key, chunk, block.place)

    def packs(self) -> set[int]:
        """The numbers of the packs that have chunks."""
        return {place[0] for places in self.places.values() for place in places if place}

    def outer_chunks(self, key: str) -> Mapping[str, OuterBox]:
        """Each outer chunk of an array by its box as text, in row-major order."""
        if key not in self._outer:
            self._outer[key] = _outer_chunks(self._arrays[key], self.chunks[key])
        return self._outer[key]

    def _chunk(self, key: str, box: Box) -> OuterBox:
        """The outer chunk with this box. Raises ValueError if there is none."""
        if chunk := self.outer_chunks(key).get(str(box)):
            return chunk
        outer, shape = self.chunks[key].outer, self._arrays[key].shape
        raise ValueError(
            f"{key}: {box} is not a chunk of {outer} in {shape}; a part of a chunk has no one"
            " writer"
        )

    def find(self, key: str, chunk: OuterBox) -> tuple[str, int | None]:
        """The file of an outer chunk, and the offset in it if that is a pack, else None."""
        if key not in self.places or (place := self.places[key][chunk.number]) is None:
            return f"{key}/{chunk.name}", None
        number, offset = place
        return pack_name(number), offset

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read several boxes, each into its array, and every inner chunk of them once."""
        with self._naming_damaged(key):
            shards = self._shards(key, boxes, outs)
            # of a pack many arrays are read, one after the other
            is_packed = bool(shards) and shards[0].offset is not None
            if not is_packed or self.chunks[key].is_stack:
                shards = read_at_once(self.directory, shards)
            for shard in shards:
                self._read_shard(shard)
        self._show(key, boxes, outs)

    def _show(self, key: str, boxes: Sequence[Box], arrays: Sequence[np.ndarray]) -> None:
        for watcher in watchers((id(self), key)):
            watcher.see(boxes, arrays)

    def lies_in(self, key: str) -> str:
        """The pack that has the first chunk of an array, or the key of the array without one."""
        first = self.places[key][0] if key in self.places else None
        return key if first is None else pack_name(first[0])

    def read_each(self, wants: Sequence[Want]) -> None:
        """Read boxes of several arrays; all those in one pack are requested at once."""
        groups: dict[str, list[Want]] = defaultdict(list)
        for want in wants:
            groups[self.lies_in(want[0])].append(want)
        for name, group in groups.items():
            if len(group) == 1:
                self.read_into(*group[0])
            else:
                self._read_together(name, group)

    def _read_together(self, name: str, wants: Sequence[Want]) -> None:
        """Read boxes of several arrays in the pack called `name`, each into its own of `wants`, in
        large batches; then one by one the chunks that could not be read so.
        """
        look = functools.cache(self._file)
        whole = {i: chunk for i, want in enumerate(wants) if (chunk := self._whole(*want))}
        read: set[int] = set()
        if whole:
            file = look(name)
            with self._naming_damaged(name):
                are_read = read_whole(self.directory, file, [*whole.values()])
                read.update(itertools.compress(whole, are_read))
        others = (want for i, want in enumerate(wants) if i not in read)
        shards = [(want[0], shard) for want in others for shard in self._shards(*want, look)]
        with self._naming_damaged(name):
            left = read_at_once(self.directory, [shard for _, shard in shards])
        faulty = set(map(id, left))
        for key, shard in shards:
            if id(shard) in faulty:
                with self._naming_damaged(key):
                    self._read_shard(shard)
        for want in wants:
            self._show(*want)

    def _shards(
        self,
        key: str,
        boxes: Sequence[Box],
        outs: Sequence[np.ndarray],
        look: Callable[[str], FileInfo] | None = None,
    ) -> list[OuterChunk]:
        """The outer chunks with wanted boxes; `look` gives files' infos. Raises IndexError."""
        shape, outer = self._arrays[key].shape, self.chunks[key].outer
        for box in boxes:
            if not box.within(Box.whole(shape)):
                raise IndexError(f"{key}: {box} is not in an array of shape {shape}")
        wanted = [(box, out) for box, out in zip(boxes, outs, strict=True) if box.size]
        return [
            self._shard(key, chunk, wanted, self.recorded(key, chunk), look or self._file)
            for chunk in outer_boxes(shape, outer, [box for box, _ in wanted])
        ]

    def _whole(
        self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]
    ) -> WholeChunk | None:
        """The one chunk of a packed array, if all of it is wanted once; else None."""
        place, *others = self.places.get(key, (None,))
        if place is None or others or len(boxes) != 1 or any(boxes[0].start):
            return None
        if not self._arrays[key].shape == self.chunks[key].inner == boxes[0].stop:
            return None  # it is cut, or has no elements
        return WholeChunk(place[1], outs[0], self._crcs.get(key, b""))

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        """The outer chunks that a box meets, each whole."""
        outer = self.chunks[key].outer
        for part in outer_boxes(self._arrays[key].shape, outer, [box]):
            chunk = self._chunk(key, part)
            file, offset = self.find(key, chunk)
            item = "" if offset is None else f"{key}/{chunk.name}"
            yield Piece(file, item, part.relative_to(Box(part.start, part.start)), part)

    def _shard(
        self,
        key: str,
        box: Box,
        wanted: Sequence[tuple[Box, np.ndarray]],
        crcs: bytes,
        look: Callable[[str], FileInfo],
    ) -> OuterChunk:
        """An outer chunk with its wanted boxes and arrays, and recorded crc32c, if any."""
        chunks = self.chunks[key]
        file, offset = self.find(key, self._chunk(key, box))
        grid = (
            np.frombuffer(crcs, CRC).reshape(grid_shape(box.shape, chunks.inner)) if crcs else None
        )
        dtype = self._arrays[key].dtype
        return OuterChunk(look(file), box, chunks, dtype, wanted, grid, offset)

    def _read_shard(self, shard: OuterChunk) -> None:
        if shard.offset is None:
            return read_shard(self.directory, shard)
        # most chunks of a pack are wanted, each of a few bytes
        if shard.file not in self._packs and len(self._packs) == PACKS_READ:
            self._packs.clear()
        pack = self._packs.setdefault(shard.file, ReadAhead(self.directory, shard.file))
        return read_shard(pack, shard)

    @contextmanager
    def _naming_damaged(self, name: str) -> Iterator[None]:
        """Context that adds the path of an array or a pack, and the remedy, to CorruptData."""
        try:
            yield
        except CorruptData as error:
            raise CorruptData(
                f"{self.directory}/{name}: {error}. Restore this file from a copy, or use another"
                " checkpoint."
            ) from None

    def digest_now(self, name: str) -> str | None:
        """The digest of a file beside the arrays, as it is; None if it does not exist."""
        file = self.seen.get(name) if self.directory.is_remote else None
        data = read_bytes(self.directory, file) if file else read_file(self.directory, name)
        return None if data is None else digest(data)

    def has_kept(self, name: str) -> bool:
        """Whether a file still has the version that was written here."""
        written = self.beside.get(name)
        return bool(written and written.file and written.file == self.seen.get(name))

    def _file(self, name: str) -> FileInfo:
        """A file's info, over a network as first seen. Raises CorruptData if it is missing."""
        info = self.seen.get(name) if self.directory.is_remote else None
        info = info or self.directory.stat(name)
        if info is None or info.kind != "file":
            raise CorruptData(f"{self.directory}/{name} is missing")
        return info

    def recorded(self, key: str, box: Box) -> bytes:
        """The crc32c of each inner chunk of an outer one; empty if they were not recorded."""
        crcs, shape, chunks = self._crcs.get(key, b""), self._arrays[key].shape, self.chunks[key]
        if not crcs or box.shape == shape:
            return crcs
        return (
            np.frombuffer(crcs, CRC)
            .reshape(grid_shape(shape, chunks.inner))[_inner_places(box, chunks)]
            .tobytes()
        )

    def holds(self, key: str, box: Box, written: Written) -> bool:
        """Whether an outer chunk is on disk as it was recorded. Reads it."""
        is_whole = _is_whole(written, box, self._arrays[key].shape, self.chunks[key])
        return is_whole and self.digest_fault(key, box, written) is None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packs": {}, "_outer": {}}  # which are of this process

    def digest_fault(self, key: str, box: Box, want: Written) -> str | None:
        """The fault of the data of an outer chunk by its record; None if there is none."""
        try:
            now = _digest(self._parts(key, box, want.crcs))
        except CorruptData as error:
            return str(error)
        if now == want.digest:
            return None
        return (
            f"{self.directory}/{key}: the data of {box} are not those that were saved (digest"
            f" {now})"
        )

    def _parts(self, key: str, box: Box, crcs: bytes) -> Iterator[np.ndarray]:
        """The elements of an outer chunk, in blocks of whole rows."""
        for block in self.row_blocks(key, box, VERIFY_BYTES):
            out = np.empty(block.shape, self._arrays[key].dtype)
            with self._naming_damaged(key):
                self._read_shard(self._shard(key, box, [(block, out)], crcs, self._file))
            yield out


@dataclass(frozen=True, slots=True)
class ChunkDigests:
    """The recorded digests of the outer chunks of an array.

    A read compares every inner chunk with its recorded crc32c, if there is one; a sample proves
    nothing more. If all of an outer chunk was read so, its digest is not computed.
    """

    store: ZarrStore
    key: str
    label: str
    record: ArrayRecord

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterator[Check]:
        if extent == "sample":
            return
        store, key, record = self.store, self.key, self.record
        itemsize = store.arrays()[key].dtype.itemsize
        # the boxes that were read, and so compared with the recorded crc32c of inner chunks
        passed = BoxWatcher((id(store), key))

        def run(box: Box, want: str) -> str | None:
            written = Written(want, store.recorded(key, box))
            return store.digest_fault(key, box, written) if passed.missing([box]) else None

        watcher = passed if record.crcs else None
        outer = store.outer_chunks(key).items()
        for (text, chunk), want in zip(outer, record.digests, strict=True):
            about = f"{self.label} {text}", leaves, chunk.box.size * itemsize
            yield Check(*about, partial(run, chunk.box, want), watcher)


# Thousands of arrays have few shapes: what follows from the shape alone is made once for them.
@functools.lru_cache(maxsize=1024)
def array_info(shape: Shape, dtype: str) -> ArrayInfo:
    """The info of a leaf's array; one object for all that are alike."""
    return ArrayInfo(shape, np.dtype(dtype))


@functools.lru_cache(maxsize=1024)
def _chunks(outer: Shape, inner: Shape) -> Chunks:
    return Chunks(outer, inner)


def require_storable(label: str, dtype: np.dtype) -> None:
    if not storable(dtype):
        raise UnsupportedLeaf(
            f"{label} has dtype {dtype}, which zarr v3 as TensorStore writes it does not have"
        )


@dataclass(frozen=True)
class Commit:
    """The files that make a directory of arrays a checkpoint; one process writes them last."""

    leaves: Sequence[Leaf]
    packed: frozenset[str]
    files: Mapping[str, bytes]
    source: Mapping[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    stacks: Stacks = field(default_factory=dict)
    linked: Linked = NOT_LINKED

    def prepare(self, store: ZarrStore) -> None:
        """Write the files beside the arrays but the last. Packed chunks must have places."""
        early = {name: [data] for name, data in self.files.items() if name != TREE_FILE}
        beside = _index(store, self.stacks, self.linked) | early
        each_file(store.directory, lambda name: store.write_beside(name, *beside[name]), beside)

    @gc_paused()
    def write(self, store: ZarrStore, is_shared: bool) -> Metadata:
        """Write the files that were not prepared, then `ucp.json`, then the file without which
        neither stock Orbax nor this package takes the directory for a checkpoint.

        The store has the records of all chunks; if `is_shared`, several processes wrote them.
        Raises CorruptData if a file is missing or changed, FileExistsError if another writer has
        made the directory a checkpoint meanwhile. Then neither of the two is written.
        """
        directory = store.directory
        arrays = {key: _stored_array(store, key) for key in store.arrays()}
        if not self.files.keys() - {TREE_FILE} <= store.beside.keys():
            self.prepare(store)
        digests = {
            f"{key}/zarr.json": digest(zarr_json(info, store.chunks[key]))
            for key, info in store.arrays().items()
            if key not in self.packed
        }
        metadata = Metadata(
            tuple(self.leaves),
            arrays,
            digests | {name: store.beside[name].digest for name in sorted(store.beside)},
            dict(self.source),
            dict(self.extras),
            tuple(self.groups),
            {stack: tuple(names) for stack, names in self.stacks.items()},
            dict(self.linked.arrays),
            tuple(self.linked.sources),
        )
        if faults := verify_files(metadata, store):
            shared = f" {SHARED_STORAGE}" if is_shared else ""
            title = f"{directory} has lost what was just written to it, and is not a checkpoint:"
            raise CorruptData(title, faults, remedy=f"{WHO_ELSE}{shared}")
        last = self.files[TREE_FILE]
        metadata = replace(metadata, files=metadata.files | {TREE_FILE: digest(last)})
        data = encode(metadata)
        try:
            directory.create(METADATA_FILE, data)
        except FileExistsError:
            # there may be the same, of a copy that was stopped after its commit
            if read_file(directory, METADATA_FILE) != data:
                raise FileExistsError(
                    f"{directory} was made a checkpoint by another writer while this one wrote to"
                    " it; save to another path, one writer to each"
                ) from None
        directory.write(TREE_FILE, [last], durable=True)
        return metadata


def is_committed(directory: Files) -> bool:
    """Whether a directory has both files that a commit writes last."""
    found = each_file(directory, directory.stat, (METADATA_FILE, TREE_FILE))
    return None not in found


def _index(store: ZarrStore, stacks: Stacks, linked: Linked) -> dict[str, list[bytes]]:
    """The index by which stock Orbax finds arrays, in parts; empty if it cannot be so large."""
    if not linked.arrays and not is_indexed(*as_leaves(store.arrays(), store.chunks, stacks)):
        return {}
    parts, manifest = index_parts(INDEX_FILE, _index_entries(store, stacks, linked))
    return {INDEX_FILE: parts, MANIFEST_FILE: [manifest]}


def _index_entries(
    store: ZarrStore, stacks: Stacks, linked: Linked
) -> Iterator[tuple[bytes, Value]]:
    """The keys of the index in order, with values: `zarr.json`s, and outer chunks' ranges."""
    homes = homes_of(stacks)
    keys = [key for key in store.arrays() if key not in stacks]
    # an array's keys begin with its name and a slash: no key of another sorts between them
    for key in sorted([*keys, *homes, *linked.arrays], key="{}/".format):
        if key in linked.arrays:
            values = linked.values(key)
        else:
            values = _values_of_member(store, *homes[key]) if key in homes else _values(store, key)
        entries = [(f"{key}/{name}".encode(), value) for name, value in values]
        yield from sorted(entries, key=operator.itemgetter(0))


def _values(store: ZarrStore, key: str) -> Iterator[tuple[str, Value]]:
    """The index entries of an array, by keys below its name."""
    yield "zarr.json", zarr_json(store.arrays()[key], store.chunks[key])
    for chunk in store.outer_chunks(key).values():
        file, offset = store.find(key, chunk)
        yield chunk.name, ValueRange(file, offset or 0, chunk.nbytes)


def _values_of_member(store: ZarrStore, stack: str, i: int) -> Iterator[tuple[str, Value]]:
    """The index entries of the i-th array of a stack, by keys below its name."""
    info, chunks = store.arrays()[stack], store.chunks[stack]
    nbytes = chunk_bytes(chunks, info.dtype)
    yield "zarr.json", zarr_json(member_info(info), member_chunks(chunks))
    for place, outer, offset in member_places(info, chunks, i):
        yield chunk_name(place), ValueRange(f"{stack}/{chunk_name(outer)}", offset, nbytes)


def _stored_array(store: ZarrStore, key: str) -> ArrayRecord:
    """The entry of an array in `ucp.json`. Raises CorruptData if a chunk of it was not written."""
    written = store.written[key]
    shape, chunks = store.arrays()[key].shape, store.chunks[key]
    outer = store.outer_chunks(key)
    if missing := [
        text
        for text, chunk in outer.items()
        if not _is_whole(written.get(text), chunk.box, shape, chunks)
    ]:
        raise CorruptData(
            f"{store.directory}/{key}: {missing[:4]} and others of {len(outer)} chunks were not"
            " written"
        )
    return ArrayRecord(
        chunks.outer,
        chunks.inner,
        tuple([written[text].digest for text in outer]),
        tuple(filter(None, store.places.get(key, ()))),
        _joined_crcs(
            shape, chunks, [(chunk.box, written[text].crcs) for text, chunk in outer.items()]
        )
        if is_recorded(shape, chunks)
        else b"",
    )


def open_store(path: str | os.PathLike[str] | FilePath) -> tuple[Metadata, ZarrStore]:
    """The metadata and the arrays of the universal checkpoint at `path`; reads no array data.

    Raises NotACheckpoint, CorruptData by the digest, or FormatError for no writer's content.
    """
    directory = file_path(path).folder()
    file = directory.find(METADATA_FILE)
    if file is None:
        raise NotACheckpoint(
            f"{directory} has no {METADATA_FILE}: it is not a universal checkpoint, or was never"
            " finished"
        )
    note(directory, file)
    metadata = decode(read_bytes(directory, file), f"{directory}/{METADATA_FILE}")
    check_metadata(metadata, f"{directory}/{METADATA_FILE}")
    arrays, chunks, places, crcs = {}, {}, {}, {}
    for leaf in metadata.leaves:
        if leaf.name in metadata.arrays:
            stored = metadata.arrays[leaf.name]
            arrays[leaf.name] = array_info(leaf.shape, leaf.dtype)
            chunks[leaf.name] = _chunks(stored.outer, stored.inner)
            crcs[leaf.name] = stored.crcs
            if stored.places:
                places[leaf.name] = list(stored.places)
    leaf_of = {leaf.name: leaf for leaf in metadata.leaves} if metadata.stacks else {}
    for stack, names in metadata.stacks.items():
        stored, leaf = metadata.arrays[stack], leaf_of[names[0]]
        arrays[stack] = stack_info(array_info(leaf.shape, leaf.dtype), len(names))
        chunks[stack], crcs[stack] = Chunks(stored.outer, stored.inner, is_stack=True), stored.crcs
    return metadata, ZarrStore(directory, arrays, chunks, places, crcs)


def missing_files(metadata: Metadata, store: ZarrStore) -> list[str]:
    """A line for each file that is missing, or has another size than its chunk takes."""
    directory = store.directory
    packs = map(pack_name, sorted(store.packs()))
    expected: dict[str, int | None] = dict.fromkeys([*metadata.files, *packs])
    for key, stored in metadata.arrays.items():
        if not stored.places:
            outer = store.outer_chunks(key).values()
            expected |= {f"{key}/{chunk.name}": chunk.nbytes for chunk in outer}
    found = stat_all(directory, list(expected))
    faults: list[str] = []
    for (name, nbytes), file in zip(expected.items(), found, strict=True):
        if file is None or file.kind != "file":
            faults.append(f"{directory}/{name} is missing")
            continue
        note(directory, file)
        store.seen[name] = file
        if nbytes not in (None, file.size):
            key, _, chunk = name.rpartition("/")
            faults.append(
                f"{directory}/{key}: {chunk} has {file.size} bytes, but its chunk takes {nbytes}"
            )
    return faults


class OuterBox(NamedTuple):
    """An outer chunk: its number in row-major order, its box inside the array, its file and its
    bytes.
    """

    number: int
    box: Box
    name: str
    nbytes: int


@functools.lru_cache(maxsize=64)
def _outer_chunks(info: ArrayInfo, chunks: Chunks) -> Mapping[str, OuterBox]:
    return {
        str(box): OuterBox(
            number,
            box,
            chunk_name(grid_place(box, chunks.outer)),
            shard_bytes(box, chunks, info.dtype),
        )
        for number, box in enumerate(grid_boxes(info.shape, chunks.outer))
    }


def verify_files(metadata: Metadata, store: ZarrStore) -> list[str]:
    """A line for each fault of the files beside the array data, or of the set of files."""
    faults = missing_files(metadata, store)
    unknown = [name for name in metadata.files if not store.has_kept(name)]
    found = each_file(store.directory, store.digest_now, unknown)
    for name, now in zip(unknown, found, strict=True):
        if now not in (None, metadata.files[name]):
            faults.append(
                f"{store.directory}/{name} is damaged: its content does not have the digest"
                " recorded"
            )
    # the stored shape, dtype and chunks are those of `ucp.json`
    for key, info in store.arrays().items():
        recorded = metadata.files.get(f"{key}/zarr.json")  # none of an array that is packed
        if recorded not in (None, digest(zarr_json(info, store.chunks[key]))):
            faults.append(
                f"{store.directory}/{key} was not stored as the {info.dtype} array of shape"
                f" {list(info.shape)} that {METADATA_FILE} says: its zarr.json had another digest"
            )
    # A pack is exactly its chunks, one after the other.
    ranges: dict[int, array[int]] = defaultdict(partial(array, "q"))  # 16 bytes a chunk
    for key, places in store.places.items():
        nbytes = chunk_bytes(store.chunks[key], store.arrays()[key].dtype)
        for number, offset in filter(None, places):
            ranges[number].extend((offset, offset + nbytes))
    for number, of_pack in ranges.items():
        faults += _row_faults(store, number, of_pack)
    return faults


def _is_whole(written: Written | None, box: Box, shape: Shape, chunks: Chunks) -> bool:
    """Whether an outer chunk has a record, with each inner one's crc32c if these are recorded."""
    inner = math.prod(grid_shape(box.shape, chunks.inner)) if is_recorded(shape, chunks) else 0
    return written is not None and len(written.crcs) == inner * CRC.itemsize


def _inner_places(box: Box, chunks: Chunks) -> tuple[slice, ...]:
    """The slices of an array's grid of inner chunks that an outer chunk covers."""
    return tuple(
        slice(a // c, -(-b // c)) for a, b, c in zip(box.start, box.stop, chunks.inner, strict=True)
    )


def _joined_crcs(shape: Shape, chunks: Chunks, parts: Sequence[tuple[Box, bytes]]) -> bytes:
    """The crc32c of each inner chunk of an array, from those of each outer one."""
    if len(parts) == 1:
        return parts[0][1]
    grid = np.zeros(grid_shape(shape, chunks.inner), CRC)
    for box, crcs in parts:
        grid[_inner_places(box, chunks)] = np.frombuffer(crcs, CRC).reshape(
            grid_shape(box.shape, chunks.inner)
        )
    return grid.tobytes()


def _row_faults(store: ZarrStore, number: int, ranges: array[int]) -> Iterator[str]:
    """The faults of a pack that is not exactly these ranges, one after the other."""
    name = pack_name(number)
    begins, ends = np.sort(np.frombuffer(ranges, np.int64).reshape(-1, 2), axis=0).T
    if begins[0] or (begins[1:] != ends[:-1]).any():
        yield f"{METADATA_FILE} has two arrays at one place of {store.directory}/{name}, or a gap"
    if (file := store.seen.get(name)) is not None and file.size != ends[-1]:
        yield (
            f"{store.directory}/{name} is damaged: it has {file.size} bytes, its chunks end at"
            f" {ends[-1]}"
        )


def _digest(parts: Iterable[np.ndarray]) -> str:
    """The xxh3_64 of elements in row-major order, little-endian, given in parts."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        _update(hasher, part)
    return hasher.hexdigest()


def _update(hasher: xxhash.xxh3_64, elements: np.ndarray) -> None:
    elements = np.asarray(elements, order="C")
    if elements.dtype.byteorder == ">":
        elements = elements.astype(elements.dtype.newbyteorder("<"))
    hasher.update(elements.reshape(-1).view(np.uint8).data)


WHO_ELSE = (
    "Something else deletes or writes files there, such as the clean-up of another"
    " CheckpointManager on the same directory: keep it away while a save is running, and save"
    " again."
)
SHARED_STORAGE = "Or the directory is not on storage that all processes share."
