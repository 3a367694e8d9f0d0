"""The codec of an outer chunk as a file: zarr v3's `sharding_indexed`, its index at the end.

Each inner chunk has a crc32c; one alone has no index. The file is byte for byte the one that
TensorStore writes. It is encoded and decoded here because a chunk is then copied once from the file
to its output, and is checked on the way. Facts: zarr-specs, `docs/v3/codecs/sharding-indexed` and
`docs/v3/codecs/crc32c`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import numpy as np

from jax_ucp.arrays.budget import batches
from jax_ucp.errors import CorruptData
from jax_ucp.files.protocol import FileInfo, Files, RangeRead
from jax_ucp.files.read_ahead import ReadAhead
from jax_ucp.layout.blocks import Chunks, grid_boxes, grid_place, grid_shape
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape

CRC_BYTES = 4
CRC = np.dtype("<u4")
_ENTRY_BYTES = 16  # of an index: offset and length of an inner chunk
_NOT_STORED = (1 << 64) - 1
_EXCHANGED = (
    "they are whole, but do not have the crc32c that ucp.json records for this place. They, or"
    " ucp.json, are of another array, step or run, or were written over since the checkpoint was"
    " opened"
)

# A file of at most this many bytes is read whole, with its index.
WHOLE_BYTES = 128 << 10
# Bytes of inner chunks that are requested together over a network.
REMOTE_BATCH_BYTES = 32 << 20
# And from a disk, so that what is copied is still in a core's cache.
LOCAL_BATCH_BYTES = 1 << 20


def has_index(chunks: Chunks) -> bool:
    """Whether outer chunks are shards of several inner chunks."""
    return chunks.inner != chunks.outer


def shard_parts(data: np.ndarray, chunks: Chunks, crcs: bytearray) -> Iterator[memoryview | bytes]:
    """The bytes of an outer chunk's file, in parts; each is valid until the next is asked for.

    `data` has the chunk's elements. The crc32c of each inner chunk, 4 bytes, is added to `crcs`.
    """
    room = np.empty(chunks.inner, data.dtype)  # for an inner chunk that has gaps, or is cut
    every = np.zeros(grid_shape(data.shape, chunks.inner), CRC)
    boxes = grid_boxes(data.shape, chunks.inner)
    if chunks.is_stack:
        boxes = sorted(boxes, key=lambda box: chunks.file_order(box.start))
    for box in boxes:
        inner = data[box.index]
        if inner.shape != chunks.inner or not inner.flags.c_contiguous:
            if inner.shape != chunks.inner:
                room[...] = 0
            room[tuple(map(slice, box.shape))] = inner
            inner = room
        crc = _crc(inner)
        every[grid_place(box, chunks.inner)] = int.from_bytes(crc, "little")
        yield inner.reshape(-1).view(np.uint8).data
        yield crc
    crcs += every.tobytes()
    if has_index(chunks):
        yield _index(data.shape, chunks, data.dtype.itemsize)


@functools.lru_cache(maxsize=1024)
def _index(shape: Shape, chunks: Chunks, itemsize: int) -> bytes:
    """The index, with its crc32c, of an outer chunk of which `shape` is inside the array: inner
    chunks lie one after the other.
    """
    index = np.full((*_inner_grid(chunks), 2), _NOT_STORED, np.uint64)
    nbytes = math.prod(chunks.inner) * itemsize + CRC_BYTES
    places = itertools.product(*map(range, grid_shape(shape, chunks.inner)))
    for number, place in enumerate(sorted(places, key=chunks.file_order)):
        index[place] = (number * nbytes, nbytes)
    return index.tobytes() + _crc(index)


def chunk_bytes(chunks: Chunks, dtype: np.dtype) -> int:
    return math.prod(chunks.inner) * dtype.itemsize + CRC_BYTES


def shard_bytes(box: Box, chunks: Chunks, dtype: np.dtype) -> int:
    """The number of bytes of the file of an outer chunk, whose part inside the array is `box`.

    >>> shard_bytes(Box((0,), (5,)), Chunks((8,), (2,)),
    ...     np.dtype("u1"))  # 3 of 4 inner chunks, and the index
    86
    """
    stored = math.prod(grid_shape(box.shape, chunks.inner))
    index = math.prod(_inner_grid(chunks)) * _ENTRY_BYTES + CRC_BYTES if has_index(chunks) else 0
    return stored * chunk_bytes(chunks, dtype) + index


@dataclass(frozen=True, slots=True)
class OuterChunk:
    """An outer chunk with wanted elements, and its place in a file.

    `box` is its part inside the array; wanted boxes may extend beyond it. One without index may lie
    in a larger file, from byte `offset` on. `crcs` has the recorded crc32c of each inner chunk in
    `box`, by its place, as `CRC`; or is None.
    """

    file: FileInfo
    box: Box
    chunks: Chunks
    dtype: np.dtype
    wanted: Sequence[tuple[Box, np.ndarray]]
    crcs: np.ndarray | None
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        return shard_bytes(self.box, self.chunks, self.dtype)


def read_shard(files: Files | ReadAhead, shard: OuterChunk) -> None:
    """Copy wanted elements of an outer chunk. Raises CorruptData by checksums or size."""
    # Checked before anything is allocated for the inner chunks: if all of them are in the file,
    # there are no more of them than bytes.
    url = files.url(shard.file.name)
    size, offset = shard.file.size, shard.offset or 0
    if shard.offset is None and size != shard.nbytes:
        raise CorruptData(f"{url} has {size} bytes, but its chunk takes {shard.nbytes}")
    if offset + shard.nbytes > size:
        raise CorruptData(
            f"{url} is too short: it has {size} bytes, and a chunk in it ends at byte"
            f" {offset + shard.nbytes}"
        )
    _decode(_ShardReader(files, shard.file, url, offset, shard.nbytes), shard)


def read_at_once(files: Files, shards: Sequence[OuterChunk]) -> list[OuterChunk]:
    """The outer chunks still to be read; others are copied from, by requests that go at once.

    Inner chunks are expected where our writer puts them, one after the other. An outer chunk is
    left if one is not there with its crc32c: it is damaged, in another order, or has an index
    alone. On a disk its index, which others need, is looked at too, but not that of a stack, which
    is long.
    """
    is_local = not files.is_remote
    left: dict[int, OuterChunk] = {}
    pieces: list[_Placed | _PlacedIndex] = []
    for shard in shards:
        if not _is_placed(shard):
            left[id(shard)] = shard
            continue
        pieces += _placed(shard)
        has_own = shard.offset is None and has_index(shard.chunks) and not shard.chunks.is_stack
        if is_local and has_own:
            pieces.append(_PlacedIndex(shard))
    most = LOCAL_BATCH_BYTES if is_local else REMOTE_BATCH_BYTES
    for batch in batches(pieces, lambda piece: piece.nbytes, most, len(pieces)):
        read = [(piece, piece.buffers(in_place=is_local)) for piece in batch]
        files.read_into([one for piece, buffers in read for one in piece.reads(buffers)])
        for piece, buffers in read:
            if not piece.deliver(buffers):
                left[id(piece.shard)] = piece.shard
    return list(left.values())


@dataclass(frozen=True, slots=True)
class _Placed:
    """An inner chunk with its crc32c, expected at byte `at` of the file of its outer chunk."""

    shard: OuterChunk
    place: Shape
    at: int
    nbytes: int
    takers: Sequence[tuple[Box, np.ndarray]]

    def buffers(self, in_place: bool) -> list[np.ndarray]:
        """Memory for all of it; or, if it may be read in place, that of one taker who wants it all
        and has no gaps, and memory for the crc32c.
        """
        (want, out), *others = self.takers
        start, inner = _first_element(self.shard, self.place), self.shard.chunks.inner
        box = Box(start, tuple(a + n for a, n in zip(start, inner, strict=True)))
        if in_place and not others and box.within(want):
            part = out[box.relative_to(want).index]
            if part.flags.c_contiguous:
                return [part, np.empty(CRC_BYTES, np.uint8)]
        return [np.empty(self.nbytes, np.uint8)]

    def reads(self, buffers: Sequence[np.ndarray]) -> Iterator[RangeRead]:
        at = self.at
        for buffer in buffers:
            yield RangeRead(self.shard.file, at, buffer)
            at += buffer.nbytes

    def deliver(self, buffers: Sequence[np.ndarray]) -> bool:
        """Whether the inner chunk was read, by its crc32c; if so takers' elements are copied."""
        shard, is_in_place = self.shard, len(buffers) > 1
        if is_in_place:
            data, stored = buffers
        else:
            data, stored = np.split(buffers[0], [-CRC_BYTES])
        crc = _crc(data)
        recorded = crc if shard.crcs is None else shard.crcs[self.place].tobytes()
        if not crc == stored.tobytes() == recorded:
            return False
        if not is_in_place:
            inner = data.view(shard.dtype).reshape(shard.chunks.inner)
            _hand_out(inner, _first_element(shard, self.place), self.takers)
        return True


@dataclass(frozen=True, slots=True)
class _PlacedIndex:
    """The index of an outer chunk, expected to be as our writer makes it."""

    shard: OuterChunk

    @property
    def data(self) -> bytes:
        return _index(self.shard.box.shape, self.shard.chunks, self.shard.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def buffers(self, in_place: bool) -> list[np.ndarray]:
        return [np.empty(self.nbytes, np.uint8)]

    def reads(self, buffers: Sequence[np.ndarray]) -> Iterator[RangeRead]:
        end = (self.shard.offset or 0) + self.shard.nbytes
        yield RangeRead(self.shard.file, end - self.nbytes, buffers[0])

    def deliver(self, buffers: Sequence[np.ndarray]) -> bool:
        return buffers[0].tobytes() == self.data


def _is_placed(shard: OuterChunk) -> bool:
    """Whether the places of an outer chunk's inner chunks are known without its index."""
    is_sized = shard.offset is not None or shard.file.size == shard.nbytes
    is_ordered = shard.chunks.is_stack or not has_index(shard.chunks)
    return is_sized and (is_ordered or shard.crcs is not None)


def _placed(shard: OuterChunk) -> Iterator[_Placed]:
    """The inner chunks with a wanted element, in the order in which our writer puts them."""
    nbytes, order = chunk_bytes(shard.chunks, shard.dtype), shard.chunks.file_order
    grid = order(grid_shape(shard.box.shape, shard.chunks.inner))
    wanted = _wanted_chunks(shard.box, shard.chunks, shard.wanted)
    for place in sorted(wanted, key=order):
        number = 0
        for p, n in zip(order(place), grid, strict=True):
            number = number * n + p
        at = (shard.offset or 0) + number * nbytes
        yield _Placed(shard, place, at, nbytes, wanted[place])


def _first_element(shard: OuterChunk, place: Shape) -> Shape:
    """The position in the array of the first element of an inner chunk."""
    return tuple(
        o + p * n for o, p, n in zip(shard.box.start, place, shard.chunks.inner, strict=True)
    )


def _wanted_chunks(
    box: Box, chunks: Chunks, wanted: Sequence[tuple[Box, np.ndarray]]
) -> dict[Shape, list[tuple[Box, np.ndarray]]]:
    """The inner chunks with wanted elements, by place, each with wanted boxes and arrays."""
    places: dict[Shape, list[tuple[Box, np.ndarray]]] = defaultdict(list)
    for want, out in wanted:
        hit = want.intersect(box)
        if hit is not None:
            first = [
                (a - o) // n for a, o, n in zip(hit.start, box.start, chunks.inner, strict=True)
            ]
            last = [
                (b - o - 1) // n for b, o, n in zip(hit.stop, box.start, chunks.inner, strict=True)
            ]
            for place in itertools.product(
                *(range(a, b + 1) for a, b in zip(first, last, strict=True))
            ):
                places[place].append((want, out))
    return places


def _decode(reader: _ShardReader, shard: OuterChunk) -> None:
    nbytes = chunk_bytes(shard.chunks, shard.dtype)
    entries = _entries(reader, shard.chunks)
    wanted = _wanted_chunks(shard.box, shard.chunks, shard.wanted)
    pieces: list[_Piece] = []
    for place in sorted(wanted):
        offset, length = entries[place].tolist()
        if length != nbytes:
            raise CorruptData(f"{reader.url}: inner chunk {place} is not stored as {nbytes} bytes")
        saved_with = None if shard.crcs is None else shard.crcs[place].tobytes()
        pieces.append(_Piece(offset, offset + nbytes, f"inner chunk {place}", saved_with))
    for place, raw in zip(sorted(wanted), reader.checked(pieces), strict=True):
        inner = raw.view(shard.dtype).reshape(shard.chunks.inner)
        _hand_out(inner, _first_element(shard, place), wanted[place])


def _hand_out(inner: np.ndarray, start: Shape, takers: Sequence[tuple[Box, np.ndarray]]) -> None:
    """Copy the elements of wanted boxes from an inner chunk, whose first element is at `start`."""
    stop = tuple(a + n for a, n in zip(start, inner.shape, strict=True))
    for want, out in takers:
        here = [
            slice(max(a, w), min(b, v))
            for a, b, w, v in zip(start, stop, want.start, want.stop, strict=True)
        ]
        source = inner[
            tuple(slice(s.start - a, s.stop - a) for s, a in zip(here, start, strict=True))
        ]
        out[
            tuple(slice(s.start - w, s.stop - w) for s, w in zip(here, want.start, strict=True))
        ] = source


def _entries(reader: _ShardReader, chunks: Chunks) -> np.ndarray:
    """Offset and length in the file of each inner chunk, on the last axis."""
    grid = _inner_grid(chunks)
    if not has_index(chunks):
        return np.array([0, reader.size], np.uint64).reshape(*grid, 2)
    begin = reader.size - math.prod(grid) * _ENTRY_BYTES - CRC_BYTES
    (index,) = reader.checked([_Piece(begin, reader.size, "the index")])
    # the next range may be read into the same memory
    return index.view(np.uint64).reshape(*grid, 2).copy()


class _Piece(NamedTuple):
    """A range of a part of a file, with its crc32c at its end, and the one recorded, if any."""

    begin: int
    end: int
    what: str
    saved_with: bytes | None = None


class _ShardReader:
    """A reader of ranges with a crc32c behind each; later ones overwrite earlier memory."""

    def __init__(self, files: Files | ReadAhead, file: FileInfo, url: str, offset: int, size: int):
        self.url = url
        self.size = size
        self._files, self._file, self._offset = files, file, offset
        self._room = np.empty(0, np.uint8)
        self._whole = self._read([(0, size)]) if size <= WHOLE_BYTES else None
        # over a network many are read at once; from a disk each is copied while a core's cache
        # has it
        self._batch_bytes = REMOTE_BATCH_BYTES if files.is_remote else 0

    def checked(self, pieces: Sequence[_Piece]) -> Iterator[np.ndarray]:
        """The bytes of each range, valid until the next. Raises CorruptData for another crc32c."""
        for piece in pieces:
            if not 0 <= piece.begin < piece.end - CRC_BYTES or piece.end > self.size:
                raise CorruptData(f"{self.url} is too short for {piece.what}")
        if self._whole is not None:
            for piece in pieces:
                yield self._proved(piece, self._whole[piece.begin : piece.end])
            return
        for batch in batches(
            pieces, lambda piece: piece.end - piece.begin, self._batch_bytes, len(pieces)
        ):
            data, at = self._read([piece[:2] for piece in batch]), 0
            for piece in batch:
                yield self._proved(piece, data[at : at + piece.end - piece.begin])
                at += piece.end - piece.begin

    def _read(self, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        """The bytes of ranges, one after the other."""
        nbytes = sum(end - begin for begin, end in ranges)
        if len(self._room) < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        room, reads, at = self._room[:nbytes], [], 0
        for begin, end in ranges:
            out = room[at : at + end - begin]
            reads.append(RangeRead(self._file, self._offset + begin, out))
            at += end - begin
        self._files.read_into(reads)
        return room

    def _proved(self, piece: _Piece, data: np.ndarray) -> np.ndarray:
        crc = _crc(data[:-CRC_BYTES])
        if crc != data[-CRC_BYTES:].tobytes():
            raise CorruptData(
                f"{self.url} is damaged: {piece.what} does not have the crc32c that is stored with"
                " it"
            )
        if piece.saved_with not in (None, crc):
            raise CorruptData(
                f"{self.url}: the data of {piece.what} are not those that were saved: {_EXCHANGED}"
            )
        return data[:-CRC_BYTES]


def read_unit(chunks: Chunks, itemsize: int) -> Shape:
    """The block that is read whole if any of it is wanted: an inner chunk, or a small file."""
    count = math.prod(_inner_grid(chunks))
    nbytes = count * (math.prod(chunks.inner) * itemsize + CRC_BYTES + _ENTRY_BYTES) + CRC_BYTES
    return chunks.outer if nbytes <= WHOLE_BYTES else chunks.inner


def _inner_grid(chunks: Chunks) -> Shape:
    return tuple(o // i for o, i in zip(chunks.outer, chunks.inner, strict=True))


def _crc(data: np.ndarray) -> bytes:
    return google_crc32c.value(data).to_bytes(CRC_BYTES, "little")
