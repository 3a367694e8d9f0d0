"""The universal store: one zarr v3 array per leaf, and two files without which they are no
checkpoint: `ucp.json`, and `_METADATA`, which is written last.

Each outer chunk has one writer, and is one file; or of a small array among thousands, a part of
one. Inner chunks carry a crc32c, so that a flipped bit is an error to every reader.
`docs/format.md` states the format; this file writes, reads and proves it.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import uuid
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from jax_ucp.errors import CorruptData, NotACheckpoint, StoreError, UnsupportedLeaf
from jax_ucp.files.in_flight import each_file, stat_all
from jax_ucp.files.looked import find
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.protocol import FileInfo, Files, file_size, read_bytes, read_file
from jax_ucp.files.read_ahead import ReadAhead
from jax_ucp.files.source_files import note
from jax_ucp.garbage import uncollected
from jax_ucp.layout.blocks import Chunks, grid_boxes, grid_place, outer_boxes, rows_of_chunks
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape
from jax_ucp.sources.checks import Alarm, Check, Note
from jax_ucp.sources.optimizer_groups import Group
from jax_ucp.sources.protocol import ArrayInfo, Piece, Want
from jax_ucp.sources.watched import Passed, Watched
from jax_ucp.tree import Leaf
from jax_ucp.universal.checked import check_metadata, storable
from jax_ucp.universal.metadata import Metadata, StoredArray, decode, digest, encode
from jax_ucp.universal.ocdbt import MANIFEST_FILE, Range, Value, index_parts
from jax_ucp.universal.orbax_tree import TREE_FILE
from jax_ucp.universal.packs import INDEX_FILE, is_indexed, pack_name
from jax_ucp.universal.shard_codec import (
    CRC,
    Shard,
    chunk_bytes,
    has_index,
    read_at_once,
    read_shard,
    read_unit,
    shard_bytes,
    shard_parts,
)
from jax_ucp.universal.stacks import (
    Stacks,
    as_leaves,
    is_recorded,
    member_chunks,
    member_info,
    member_places,
    stack_info,
)

METADATA_FILE, WRITER_FILE = "ucp.json", "ucp.writer.json"
# Beside a checkpoint that was made in shares: of which copy it is the result.
CONVERSION_FILE = "ucp.conversion.json"
COMPANIONS = "ucp.companions"  # a folder of the files that go with a model
VERIFY_BYTES = 16 << 20
FAULTS_SHOWN = 8
PACKS_READ = 8  # at once, over a network

Place = tuple[int, int]  # number of a pack, offset in it


class Written(msgspec.Struct, frozen=True, gc=False):
    """An outer chunk on disk: the digest of its elements, and the crc32c of each inner chunk, if
    they are recorded.
    """

    digest: str
    crcs: bytes


class Beside(NamedTuple):
    """A file beside the arrays that was written: its digest, and what it was then, where the store
    said so.
    """

    digest: str
    file: FileInfo | None


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


class ZarrStore(Watched):
    """Arrays of known shape, dtype and chunks in a directory, written one outer chunk at a time.

    Every chunk must be there to be read: a missing file is an error, not zeros. `places` says where
    packed chunks are, by their keys: the number of the pack, and the offset in it. `crcs` are those
    recorded of an array's inner chunks, with which every read compares; `written` is what this
    process wrote, by array and box, and `beside` are the other files that it wrote.
    """

    def __init__(
        self,
        directory: Files,
        arrays: Mapping[str, ArrayInfo],
        chunks: Mapping[str, Chunks],
        places: Mapping[str, Place] | None = None,
        crcs: Mapping[str, bytes] | None = None,
    ):
        super().__init__()
        self.directory = directory
        self.chunks = chunks
        self.places = dict(places or {})
        self.seen: dict[str, FileInfo] = {}
        self.beside: dict[str, Beside] = {}
        self.written: dict[str, dict[str, Written]] = {key: {} for key in arrays}
        self._crcs = crcs or {}
        self._packs: dict[FileInfo, ReadAhead] = {}
        self._arrays = {key: _with_read_unit(info, chunks[key]) for key, info in arrays.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def create(self, key: str) -> None:
        """Write the array's `zarr.json`. One process does this, once; it is durable after
        `directory.sync`.
        """
        text = zarr_json(self._arrays[key], self.chunks[key])
        self.write_beside(f"{key}/zarr.json", text, durable=False)

    def write_beside(self, name: str, *parts: bytes, durable: bool = True) -> None:
        """Write a file beside the arrays from its parts, and note what it is."""
        file = self.directory.write(name, parts, durable=durable)
        self.beside[name] = Beside(_digest_of(parts), file)

    def write(self, key: str, box: Box, data: np.ndarray, durable: bool = True) -> None:
        """Write one outer chunk, whole, and note what it is. If not durable now, it is after
        `directory.sync`.
        """
        if box.size:
            name = self._chunk_key(key, box)
            data = np.asarray(data, dtype=self._arrays[key].dtype)
            crcs = bytearray()
            self.directory.write(name, shard_parts(data, self.chunks[key], crcs), durable=durable)
            recorded = bytes(crcs) if self._is_recorded(key) else b""
            self.written[key][str(box)] = Written(_digest([data]), recorded)

    def _is_recorded(self, key: str) -> bool:
        return is_recorded(self._arrays[key].shape, self.chunks[key])

    def place_pack(self, number: int, blocks: Iterable[tuple[str, Box]]) -> None:
        """Say where a pack has these outer chunks without index: one after the other."""
        end = 0
        for key, box in blocks:
            self.places[self._chunk_key(key, box)] = number, end
            end += chunk_bytes(self.chunks[key], self._arrays[key].dtype)

    def write_pack(
        self, number: int, blocks: Sequence[tuple[str, Box]], arrays: Iterable[np.ndarray]
    ) -> None:
        """Write outer chunks without index, each whole, to one file. It is durable after
        `directory.sync`.
        """
        parts = self.pack_parts(number, blocks, arrays)
        self.directory.write(pack_name(number), parts, durable=False)

    def pack_parts(
        self, number: int, blocks: Sequence[tuple[str, Box]], arrays: Iterable[np.ndarray]
    ) -> Iterator[memoryview | bytes]:
        """What `write_pack` writes. What each chunk is, is noted when it is taken."""
        self.place_pack(number, blocks)
        for (key, box), block in zip(blocks, arrays, strict=True):
            data = np.asarray(block, dtype=self._arrays[key].dtype)
            crcs = bytearray()
            yield from shard_parts(data, self.chunks[key], crcs)
            self.written[key][str(box)] = Written(_digest([data]), bytes(crcs))

    def _chunk_key(self, key: str, box: Box) -> str:
        """The key of the outer chunk that a box is. Raises ValueError where it is none."""
        outer, shape = self.chunks[key].outer, self._arrays[key].shape
        if name := _chunk_name(box, outer, shape):
            return f"{key}/{name}"
        raise ValueError(
            f"{key}: {box} is not a chunk of {outer} in {shape}; a part of a chunk has no one"
            " writer"
        )

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read several boxes, each into its array. Every inner chunk that they meet is read once
        for all of them.
        """
        with self._telling(key):
            for shard in self._read_at_once(key, self._shards(key, boxes, outs)):
                self._read_shard(shard)
        self._show(key, boxes, outs)

    def lies_in(self, key: str) -> str:
        """The pack that has the first chunk of an array, if one has."""
        file, offset = self.find(f"{key}/{_first_chunk(len(self._arrays[key].shape))}")
        return key if offset is None else file

    def read_each(self, wants: Sequence[Want]) -> None:
        """Of arrays that lie in one pack, all is asked for at once."""
        groups: dict[str, list[Want]] = defaultdict(list)
        for want in wants:
            groups[self.lies_in(want[0])].append(want)
        for name, group in groups.items():
            if len(group) == 1:
                self.read_into(*group[0])
            else:
                self._read_together(name, group)

    def _read_together(self, name: str, wants: Sequence[Want]) -> None:
        """Read what lies in the pack with that name by requests of which none waits for another."""
        look = functools.cache(self._file)
        shards = [(want[0], shard) for want in wants for shard in self._shards(*want, look)]
        with self._telling(name):
            left = read_at_once(self.directory, [shard for _, shard in shards])
        faulty = set(map(id, left))
        for key, shard in shards:
            if id(shard) in faulty:
                with self._telling(key):
                    self._read_shard(shard)
        for want in wants:
            self._show(*want)

    def _shards(
        self,
        key: str,
        boxes: Sequence[Box],
        outs: Sequence[np.ndarray],
        look: Callable[[str], FileInfo] | None = None,
    ) -> list[Shard]:
        """The outer chunks that boxes meet, each with what is wanted of it, in files as `look` has
        them.
        """
        shape, outer = self._arrays[key].shape, self.chunks[key].outer
        for box in boxes:
            if not box.within(Box.whole(shape)):
                raise IndexError(f"{key}: {box} is not in an array of shape {shape}")
        wanted = [(box, out) for box, out in zip(boxes, outs, strict=True) if box.size]
        return [
            self._shard(key, chunk, wanted, self._recorded(key, chunk), look or self._file)
            for chunk in outer_boxes(shape, outer, [box for box, _ in wanted])
        ]

    def _read_at_once(self, key: str, shards: Sequence[Shard]) -> Sequence[Shard]:
        """Read what is best read without the index, and return the rest."""
        # of a pack many arrays are read, one after the other
        is_packed = bool(shards) and shards[0].offset is not None
        is_far = self.directory.is_remote and not is_packed
        if is_far or self.chunks[key].is_stack:  # whose index is long
            return read_at_once(self.directory, shards)
        return shards

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        """The outer chunks that a box meets, each whole."""
        outer = self.chunks[key].outer
        for chunk in outer_boxes(self._arrays[key].shape, outer, [box]):
            name = self._chunk_key(key, chunk)
            file, offset = self.find(name)
            item = "" if offset is None else name
            yield Piece(file, item, chunk.relative_to(Box(chunk.start, chunk.start)), chunk)

    def _shard(
        self,
        key: str,
        box: Box,
        wanted: Sequence[tuple[Box, np.ndarray]],
        crcs: bytes,
        look: Callable[[str], FileInfo],
    ) -> Shard:
        """An outer chunk from which to copy into each wanted array, comparing with the crc32c of
        its inner chunks, if any.
        """
        chunks = self.chunks[key]
        file, offset = self.find(self._chunk_key(key, box))
        grid = np.frombuffer(crcs, CRC).reshape(_inner_grid(box.shape, chunks)) if crcs else None
        dtype = self._arrays[key].dtype
        return Shard(look(file), box, chunks, dtype, wanted, grid, offset)

    def _read_shard(self, shard: Shard) -> None:
        read_shard(self.directory if shard.offset is None else self._of_pack(shard.file), shard)

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Say of damage which array has it, or which pack."""
        try:
            yield
        except CorruptData as error:
            raise CorruptData(
                f"{self.directory}/{name}: {error}. Restore this file from a copy, or use another"
                " checkpoint."
            ) from None

    def _of_pack(self, file: FileInfo) -> ReadAhead:
        """What reads a pack, of which most chunks are wanted, each a few bytes."""
        if file not in self._packs and len(self._packs) == PACKS_READ:
            self._packs.clear()
        return self._packs.setdefault(file, ReadAhead(self.directory, file))

    def content(self, name: str) -> bytes | None:
        """A file beside the arrays; None if there is none."""
        if file := self.seen.get(name) if self.directory.is_remote else None:
            return read_bytes(self.directory, file)
        return read_file(self.directory, name)

    def has_kept(self, name: str) -> bool:
        """Whether a file is by its version the one that was written here."""
        written = self.beside.get(name)
        return bool(written and written.file and written.file == self.seen.get(name))

    def _file(self, name: str) -> FileInfo:
        """A file as it is now; one behind a network as it was when the checkpoint was opened."""
        info = self.seen.get(name) if self.directory.is_remote else None
        info = info or self.directory.stat(name)
        if info is None or info.kind != "file":
            raise CorruptData(f"{self.directory}/{name} is missing")
        return info

    def _recorded(self, key: str, box: Box) -> bytes:
        """The crc32c of each inner chunk of an outer one; nothing if they were not recorded."""
        crcs, shape, chunks = self._crcs.get(key, b""), self._arrays[key].shape, self.chunks[key]
        if not crcs or box.shape == shape:
            return crcs
        return (
            np.frombuffer(crcs, CRC)
            .reshape(_inner_grid(shape, chunks))[_inner_places(box, chunks)]
            .tobytes()
        )

    def find(self, name: str) -> tuple[str, int | None]:
        """The file of the outer chunk with a key, and where in it, if it has others too."""
        if name not in self.places:
            return name, None
        number, offset = self.places[name]
        return pack_name(number), offset

    def holds(self, key: str, box: Box, written: Written) -> bool:
        """Whether an outer chunk is on disk as it was written. Reads it."""
        is_whole = _is_whole(written, box, self._arrays[key].shape, self.chunks[key])
        return is_whole and self._fault(key, box, written) is None

    def digest_checks(
        self, key: str, label: str, stored: StoredArray, leaves: Iterable[str]
    ) -> Iterator[Check]:
        """For each outer chunk of an array, whether its elements have the digest recorded. `leaves`
        are the arrays of leaves that it has something of.

        A read compares every inner chunk with the crc32c that is recorded of it, if one is: of an
        outer chunk of which all was read so, the digest says nothing more, and is not asked.
        """
        itemsize = self._arrays[key].dtype.itemsize
        passing = _Passing(self, key)

        def run(box: Box, want: Written) -> str | None:
            return self._fault(key, box, want) if passing.passed.rest([box]) else None

        watcher = passing if self._crcs.get(key) else None
        outer = _outer_chunks(self._arrays[key], self.chunks[key])
        for (box, text, *_), want in zip(outer, stored.digests, strict=True):
            work = partial(run, box, Written(want, self._recorded(key, box)))
            yield Check(f"{label} {text}", frozenset(leaves), box.size * itemsize, work, watcher)

    def _fault(self, key: str, box: Box, want: Written) -> str | None:
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
        """The elements of an outer chunk, in blocks of whole rows, each of few inner chunks."""
        info = self._arrays[key]
        step = rows_of_chunks(box.shape, self.chunks[key].inner, info.dtype.itemsize, VERIFY_BYTES)
        for part in grid_boxes(
            box.shape, (*step[:1], *map(max, zip(box.shape[1:], step[1:], strict=True)))
        ):
            out = np.empty(part.shape, info.dtype)
            with self._telling(key):
                wanted = [(part.shift(box.start), out)]
                self._read_shard(self._shard(key, box, wanted, crcs, self._file))
            yield out


class _Passing:
    """What was read of an array whose inner chunks have recorded crc32c, by whoever read it."""

    def __init__(self, store: ZarrStore, key: str):
        self.name = f"chunks of {key}"
        self.passed = Passed()
        self._store, self._key = store, key
        self._note: Note = lambda seen: None

    def watch(self, alarm: Alarm, note: Note) -> AbstractContextManager[None]:
        self._note = note
        return self._store.watch(self._key, self._look)

    def add(self, seen: Iterable[Sequence[Box]]) -> None:
        for boxes in seen:
            self.passed.add(boxes)

    def _look(self, boxes: Sequence[Box], arrays: Sequence[np.ndarray]) -> None:
        self.passed.add(boxes)
        self._note(boxes)


# Thousands of arrays have few shapes: what follows from the shape alone is made once for them.
@functools.lru_cache(maxsize=1024)
def array_info(shape: Shape, dtype: str) -> ArrayInfo:
    """What is known of a leaf's array; one value for all that are alike."""
    return ArrayInfo(shape, np.dtype(dtype))


@functools.lru_cache(maxsize=1024)
def _chunks(outer: Shape, inner: Shape) -> Chunks:
    return Chunks(outer, inner)


@functools.lru_cache(maxsize=1024)
def _with_read_unit(info: ArrayInfo, chunks: Chunks) -> ArrayInfo:
    return replace(info, chunk=read_unit(chunks, info.dtype.itemsize))


def zarr_metadata(info: ArrayInfo, chunks: Chunks) -> dict[str, Any]:
    """The zarr v3 metadata of an array in a universal checkpoint."""
    data_bytes = _BYTES if info.dtype.itemsize > 1 else {"name": "bytes"}  # one byte has no order
    codecs = [data_bytes, {"name": "crc32c"}]
    if has_index(chunks):
        index = {"index_codecs": [_BYTES, {"name": "crc32c"}]}  # at the end, the default
        inner = {"chunk_shape": chunks.inner, "codecs": codecs}
        codecs = [{"name": "sharding_indexed", "configuration": inner | index}]
    return {
        "shape": info.shape,
        "data_type": info.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks.outer}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": codecs,
    }


@functools.lru_cache(maxsize=1024)
def zarr_json(info: ArrayInfo, chunks: Chunks) -> bytes:
    """The content of the `zarr.json` of an array."""
    fill = {"b": False, "c": [0.0, 0.0]}.get(info.dtype.kind, 0)
    about = {"zarr_format": 3, "node_type": "array", "fill_value": fill}
    return msgspec.json.encode(zarr_metadata(info, chunks) | about)


def require_storable(label: str, dtype: np.dtype) -> None:
    if not storable(dtype):
        raise UnsupportedLeaf(
            f"{label} has dtype {dtype}, which zarr v3 as TensorStore writes it does not have"
        )


@contextmanager
def claimed(directory: Files) -> Iterator[None]:
    """Keep a folder of a bucket for one writer while this lasts: two would write over each other's
    chunks, whichever of them commits.

    Raises FileExistsError where another writer has it, or had it and was killed. On a disk nothing
    is kept: who saves there makes the folder.
    """
    if not directory.is_remote:
        yield
        return
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    writer = {"writer": uuid.uuid4().hex, "host": socket.gethostname(), "begun": begun}
    try:
        directory.create(WRITER_FILE, msgspec.json.encode(writer))
    except FileExistsError:
        other = (read_file(directory, WRITER_FILE) or b"").decode(errors="replace")
        raise FileExistsError(
            f"{directory} is being written by another save or export, or was left by one that was"
            f" killed: {WRITER_FILE} there says {other:.200}. Give another path, or delete the"
            " folder"
        ) from None
    try:
        yield
    finally:
        with suppress(StoreError):  # what was saved is saved
            directory.delete(WRITER_FILE)


def write_part(store: ZarrStore, process: int) -> None:
    """Make durable what this process wrote, and leave word of it for another, which commits."""
    store.directory.sync()
    written = {key: chunks for key, chunks in store.written.items() if chunks}
    part = msgspec.json.encode(_Part(written, store.places))
    store.directory.write(_part_name(process), [part], durable=True)


def part_is_written(directory: Files, process: int) -> bool:
    """Whether a process has left word of what it wrote."""
    return file_size(directory, _part_name(process)) is not None


def delete_part(directory: Files, process: int) -> None:
    directory.delete(_part_name(process))


@dataclass(frozen=True)
class Commit:
    """What makes a directory of arrays a checkpoint: written by one process when all have
    written their parts. `parts` are the processes that left word of theirs, beside this one.
    """

    leaves: Sequence[Leaf]
    parts: Sequence[int]
    packed: frozenset[str]
    files: Mapping[str, bytes]
    source: Mapping[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    stacks: Stacks = field(default_factory=dict)

    def prepare(self, store: ZarrStore) -> None:
        """Write what lies beside the arrays, but for the last file. The store has the places of
        all packed chunks; what is in the chunks need not be written yet.
        """
        early = {name: [data] for name, data in self.files.items() if name != TREE_FILE}
        beside = _index(store, self.stacks) | early
        each_file(store.directory, lambda name: store.write_beside(name, *beside[name]), beside)

    @uncollected()
    def write(self, store: ZarrStore) -> Metadata:
        """Write what was not prepared, then `ucp.json`, then the file without which stock Orbax
        does not take the directory for a checkpoint, and we do not either.

        Raises CorruptData if a chunk was written by nobody, or any file is no longer as it was
        written: something else deletes or writes here too. Then neither of the two is written.
        """
        directory = store.directory
        _gather(store, self.parts)
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
        )
        if faults := verify_files(metadata, store):
            raise CorruptData(_not_kept(directory, faults, bool(self.parts)))
        last = self.files[TREE_FILE]
        metadata = replace(metadata, files=metadata.files | {TREE_FILE: digest(last)})
        _commit(directory, encode(metadata))
        directory.write(TREE_FILE, [last], durable=True)
        each_file(directory, partial(delete_part, directory), self.parts)
        return metadata


def is_committed(directory: Files) -> bool:
    """Whether a directory has both files that a commit writes last."""
    found = each_file(directory, directory.stat, (METADATA_FILE, TREE_FILE))
    return None not in found


def _commit(directory: Files, data: bytes) -> None:
    """Create `ucp.json`, unless it is there and the same: a copy was stopped after its commit.

    Raises FileExistsError where another writer has made the directory a checkpoint meanwhile.
    """
    try:
        directory.create(METADATA_FILE, data)
    except FileExistsError:
        if read_file(directory, METADATA_FILE) != data:
            raise FileExistsError(
                f"{directory} was made a checkpoint by another writer while this one wrote to it;"
                " save to another path, one writer to each"
            ) from None


def _gather(store: ZarrStore, processes: Sequence[int]) -> None:
    """Note in the store what those processes wrote."""
    parts = each_file(store.directory, partial(_read_part, store.directory), processes)
    for part in parts:
        store.places.update(part.places)
        for key, chunks in part.written.items():
            store.written[key] |= chunks


def _index(store: ZarrStore, stacks: Stacks) -> dict[str, list[bytes]]:
    """The files by which stock Orbax finds every array, in parts; none where an index cannot have
    them.
    """
    if not is_indexed(*as_leaves(store.arrays(), store.chunks, stacks)):
        return {}
    parts, manifest = index_parts(INDEX_FILE, _index_entries(store, stacks))
    return {INDEX_FILE: parts, MANIFEST_FILE: [manifest]}


def _index_entries(store: ZarrStore, stacks: Stacks) -> Iterator[tuple[bytes, Value]]:
    """Each key of the index with its value: a `zarr.json`, or where an outer chunk is. Of a stack
    there are the arrays, each by itself.
    """
    homes = {name: (stack, i) for stack, names in stacks.items() for i, name in enumerate(names)}
    keys = [key for key in store.arrays() if key not in stacks]
    # what an array has is below its name and a slash: no key of another lies between
    for key in sorted([*keys, *homes], key="{}/".format):
        values = _values_of_member(store, *homes[key]) if key in homes else _values(store, key)
        found = {f"{key}/{name}".encode(): value for name, value in values}
        yield from ((name, found[name]) for name in sorted(found))


def _values(store: ZarrStore, key: str) -> Iterator[tuple[str, Value]]:
    info, chunks = store.arrays()[key], store.chunks[key]
    yield "zarr.json", zarr_json(info, chunks)
    for _, _, name, nbytes in _outer_chunks(info, chunks):
        file, offset = store.find(f"{key}/{name}")
        yield name, Range(file, offset or 0, nbytes)


def _values_of_member(store: ZarrStore, stack: str, i: int) -> Iterator[tuple[str, Value]]:
    info, chunks = store.arrays()[stack], store.chunks[stack]
    nbytes = chunk_bytes(chunks, info.dtype)
    yield "zarr.json", zarr_json(member_info(info), member_chunks(chunks))
    for place, outer, offset in member_places(info, chunks, i):
        yield chunk_name(place), Range(f"{stack}/{chunk_name(outer)}", offset, nbytes)


def _stored_array(store: ZarrStore, key: str) -> StoredArray:
    """What there is to say of an array. Raises CorruptData if a chunk of it was not written."""
    written = store.written[key]
    shape, chunks = store.arrays()[key].shape, store.chunks[key]
    outer = _outer_chunks(store.arrays()[key], chunks)
    if missing := [
        chunk.text
        for chunk in outer
        if not _is_whole(written.get(chunk.text), chunk.box, shape, chunks)
    ]:
        raise CorruptData(
            f"{store.directory}/{key}: {missing[:4]} and others of {len(outer)} chunks were not"
            " written"
        )
    places = [store.places.get(f"{key}/{chunk.name}") for chunk in outer]
    return StoredArray(
        chunks.outer,
        chunks.inner,
        tuple([written[chunk.text].digest for chunk in outer]),
        tuple(filter(None, places)),
        _joined_crcs(shape, chunks, [(chunk.box, written[chunk.text].crcs) for chunk in outer])
        if is_recorded(shape, chunks)
        else b"",
    )


def open_store(path: str | os.PathLike[str] | FilePath) -> tuple[Metadata, ZarrStore]:
    """The metadata and the arrays of the universal checkpoint at `path`.

    Raises NotACheckpoint if it was never committed, CorruptData if `ucp.json` is damaged,
    FormatError if it says what no writer does. Reads no array data.
    """
    directory = file_path(path).folder()
    file = find(directory, METADATA_FILE)
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
                outer = _outer_chunks(arrays[leaf.name], chunks[leaf.name])
                keys = [f"{leaf.name}/{chunk.name}" for chunk in outer]
                places.update(zip(keys, stored.places, strict=True))
    leaf_of = {leaf.name: leaf for leaf in metadata.leaves} if metadata.stacks else {}
    for stack, names in metadata.stacks.items():
        stored, leaf = metadata.arrays[stack], leaf_of[names[0]]
        arrays[stack] = stack_info(array_info(leaf.shape, leaf.dtype), len(names))
        chunks[stack], crcs[stack] = Chunks(stored.outer, stored.inner, is_stack=True), stored.crcs
    return metadata, ZarrStore(directory, arrays, chunks, places, crcs)


def missing_files(metadata: Metadata, store: ZarrStore) -> list[str]:
    """What files of a checkpoint are missing, or have another number of bytes than their chunk
    takes.
    """
    directory = store.directory
    beside = [
        *metadata.files,
        *(pack_name(number) for number in sorted({n for n, _ in store.places.values()})),
    ]
    expected: dict[str, int | None] = dict.fromkeys(beside)
    for key, stored in metadata.arrays.items():
        if not stored.places:
            outer = _outer_chunks(store.arrays()[key], store.chunks[key])
            expected |= {f"{key}/{chunk.name}": chunk.nbytes for chunk in outer}
    found = stat_all(directory, list(expected))
    faults = [
        _file_fault(store, name, nbytes, file)
        for (name, nbytes), file in zip(expected.items(), found, strict=True)
    ]
    return [fault for fault in faults if fault]


def _file_fault(
    store: ZarrStore, name: str, nbytes: int | None, file: FileInfo | None
) -> str | None:
    """What is wrong with a file that should have so many bytes, if that is known. It is noted."""
    directory = store.directory
    if file is None or file.kind != "file":
        return f"{directory}/{name} is missing"
    note(directory, file)
    store.seen[name] = file
    if nbytes in (None, file.size):
        return None
    key, _, chunk = name.rpartition("/")
    return f"{directory}/{key}: {chunk} has {file.size} bytes, but its chunk takes {nbytes}"


class _OuterChunk(NamedTuple):
    """An outer chunk: what of it lies in the array, and that as text; its file in the array's
    directory, and how many bytes that has.
    """

    box: Box
    text: str
    name: str
    nbytes: int


@functools.lru_cache(maxsize=64)
def _outer_chunks(info: ArrayInfo, chunks: Chunks) -> Sequence[_OuterChunk]:
    """Each outer chunk of an array, in row-major order."""
    return [
        _OuterChunk(
            box,
            str(box),
            chunk_name(grid_place(box, chunks.outer)),
            shard_bytes(box, chunks, info.dtype),
        )
        for box in grid_boxes(info.shape, chunks.outer)
    ]


@functools.lru_cache(maxsize=1024)
def _chunk_name(box: Box, outer: Shape, shape: Shape) -> str | None:
    """The file of the outer chunk that a box is; None where it is none."""
    place = grid_place(box, outer)
    start = tuple(p * c for p, c in zip(place, outer, strict=True))
    stop = tuple(min(a + c, n) for a, c, n in zip(start, outer, shape, strict=True))
    return chunk_name(place) if box == Box(start, stop) else None


def verify_files(metadata: Metadata, store: ZarrStore) -> list[str]:
    """What is wrong with the files beside the array data, or with the set of files, by their
    digests.
    """
    faults = missing_files(metadata, store)
    unknown = [name for name in metadata.files if not store.has_kept(name)]

    def digest_now(name: str) -> str | None:
        data = store.content(name)
        return None if data is None else digest(data)

    found = each_file(store.directory, digest_now, unknown)
    for name, now in zip(unknown, found, strict=True):
        if now not in (None, metadata.files[name]):
            faults.append(
                f"{store.directory}/{name} is damaged: its content does not have the digest"
                " recorded"
            )
    return [*faults, *_description_faults(metadata, store), *_pack_faults(store)]


def _description_faults(metadata: Metadata, store: ZarrStore) -> Iterator[str]:
    """Which arrays were stored with another shape, dtype or chunks than `ucp.json` says: bytes and
    their checksums are the same for float32 and int32.
    """
    for key, info in store.arrays().items():
        recorded = metadata.files.get(f"{key}/zarr.json")  # none of an array that is packed
        if recorded not in (None, digest(zarr_json(info, store.chunks[key]))):
            yield (
                f"{store.directory}/{key} was not stored as the {info.dtype} array of shape"
                f" {list(info.shape)} that {METADATA_FILE} says: its zarr.json had another digest"
            )


def chunk_name(place: Sequence[int]) -> str:
    """The file of an outer chunk inside its array's directory: zarr v3's default key encoding,
    separator `.`.
    """
    return ".".join(["c", *map(str, place)])


@functools.lru_cache(maxsize=64)
def _first_chunk(axes: int) -> str:
    """The file of the first outer chunk of an array of so many axes."""
    return chunk_name((0,) * axes)


def _inner_grid(shape: Shape, chunks: Chunks) -> Shape:
    """How many inner chunks there are along each axis of an array, or of an outer chunk as far
    as it lies in it.
    """
    return tuple(-(-n // c) for n, c in zip(shape, chunks.inner, strict=True))


def _is_whole(written: Written | None, box: Box, shape: Shape, chunks: Chunks) -> bool:
    """Whether it is known of an outer chunk what was written, with the crc32c of each inner one if
    these are recorded.
    """
    inner = math.prod(_inner_grid(box.shape, chunks)) if is_recorded(shape, chunks) else 0
    return written is not None and len(written.crcs) == inner * CRC.itemsize


def _inner_places(box: Box, chunks: Chunks) -> tuple[slice, ...]:
    """Where in the grid of an array's inner chunks those of an outer one are."""
    return tuple(
        slice(a // c, -(-b // c)) for a, b, c in zip(box.start, box.stop, chunks.inner, strict=True)
    )


def _joined_crcs(shape: Shape, chunks: Chunks, parts: Sequence[tuple[Box, bytes]]) -> bytes:
    """The crc32c of each inner chunk of an array, from those of each outer one."""
    if len(parts) == 1:
        return parts[0][1]
    grid = np.zeros(_inner_grid(shape, chunks), CRC)
    for box, crcs in parts:
        grid[_inner_places(box, chunks)] = np.frombuffer(crcs, CRC).reshape(
            _inner_grid(box.shape, chunks)
        )
    return grid.tobytes()


def _pack_faults(store: ZarrStore) -> list[str]:
    """What packs are not their chunks, one after the other."""
    ranges: dict[int, array[int]] = defaultdict(partial(array, "q"))  # 16 bytes a chunk
    for key, info in store.arrays().items() if store.places else []:
        nbytes = chunk_bytes(store.chunks[key], info.dtype)
        for chunk in _outer_chunks(info, store.chunks[key]):
            if place := store.places.get(f"{key}/{chunk.name}"):
                number, offset = place
                ranges[number].extend((offset, offset + nbytes))
    return [fault for pack in ranges.items() for fault in _row_faults(store, *pack)]


def _row_faults(store: ZarrStore, number: int, ranges: array[int]) -> Iterator[str]:
    """Whether these ranges, begin and end of each, are all of a pack, and each byte is of one."""
    name = pack_name(number)
    begins, ends = np.sort(np.frombuffer(ranges, np.int64).reshape(-1, 2), axis=0).T
    if begins[0] or (begins[1:] != ends[:-1]).any():
        yield f"{METADATA_FILE} has two arrays at one place of {store.directory}/{name}, or a gap"
    if (file := store.seen.get(name)) is not None and file.size != ends[-1]:
        yield (
            f"{store.directory}/{name} is damaged: it has {file.size} bytes, its chunks end at"
            f" {ends[-1]}"
        )


def _digest_of(parts: Iterable[bytes]) -> str:
    """The xxh3_64 of the bytes of a file, given in parts."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _digest(parts: Iterable[np.ndarray]) -> str:
    """The xxh3_64 of elements in row-major order, little-endian, given in parts."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        part = np.asarray(part, order="C")
        if part.dtype.byteorder == ">":
            part = part.astype(part.dtype.newbyteorder("<"))
        hasher.update(part.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _part_name(process: int | str) -> str:
    return f"ucp.process_{process}.json"


class _Part(msgspec.Struct):
    """What a process wrote: of each array its chunks by box, and the places of packed chunks by
    key.
    """

    written: dict[str, dict[str, Written]]
    places: dict[str, Place]


def _read_part(directory: Files, process: int) -> _Part:
    data = read_file(directory, _part_name(process))
    if data is None:
        raise CorruptData(
            f"{directory}/{_part_name(process)} is missing, which process {process} wrote last."
            f" {_WHO_ELSE}" + (f" {_SHARED_STORAGE}" if process else "")
        )
    try:
        return msgspec.json.decode(data, type=_Part)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptData(
            f"{directory}/{_part_name(process)}, which process {process} wrote last, is damaged"
            f" ({error}). {_WHO_ELSE}"
        ) from None


_WHO_ELSE = (
    "Something else deletes or writes files there, such as the clean-up of another"
    " CheckpointManager on the same directory: keep it away while a save is running, and save"
    " again."
)
_SHARED_STORAGE = "Or the directory is not on storage that all processes share."


def _not_kept(directory: Files, faults: Sequence[str], is_shared: bool) -> str:
    """What to say of files that were written, and are not as they were written."""
    more = [f"... and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
    lines = "\n  ".join([*faults[:FAULTS_SHOWN], *more])
    shared = f" {_SHARED_STORAGE}" if is_shared else ""
    return (
        f"{directory} has lost what was just written to it, and is not a checkpoint:\n "
        f" {lines}\n{_WHO_ELSE}{shared}"
    )
