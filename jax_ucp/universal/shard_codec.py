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
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import NamedTuple

import google_crc32c
import numpy as np

from jax_ucp.arrays.budget import batches
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData
from jax_ucp.files.copying import mid_page
from jax_ucp.files.protocol import FileInfo, Files, RangeRead
from jax_ucp.files.read_ahead import ReadAhead
from jax_ucp.layout.blocks import Chunks, grid_boxes, grid_shape
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape

CRC_BYTES = 4
CRC = np.dtype("<u4")
_ENTRY_BYTES = 16  # of an index: offset and length of an inner chunk
_NOT_STORED = (1 << 64) - 1
_OTHER_CRC = " does not have the crc32c that is stored with it"
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
LOCAL_BATCH_BYTES = (2 << 20) + (64 << 10)


def has_index(chunks: Chunks) -> bool:
    """Whether outer chunks are shards of several inner chunks."""
    return chunks.inner != chunks.outer


def shard_parts(
    data: Iterable[np.ndarray], shape: Shape, dtype: np.dtype, chunks: Chunks, crcs: bytearray
) -> Iterator[memoryview | bytes]:
    """The bytes of an outer chunk's file, in parts; each is valid until the next is asked for.

    `data` has the elements of the chunk, whose part inside the array is `shape`: blocks of whole
    rows in order, each of whole inner chunks; of a stack one block. The crc32c of each inner chunk,
    4 bytes, is added to `crcs`.
    """
    # for an inner chunk that has gaps, or is cut, with its checksum: they are one write
    both = np.empty(chunk_bytes(chunks, dtype), np.uint8)
    room = both[:-CRC_BYTES].view(dtype).reshape(chunks.inner)
    for rows in data:
        inner_chunks = _inner_chunks(rows.shape, chunks)
        every = [b""] * len(inner_chunks)
        for number, index in inner_chunks:
            inner = rows[index]
            if inner.shape != chunks.inner or not inner.flags.c_contiguous:
                if inner.shape != chunks.inner:
                    room[...] = 0
                room[tuple(map(slice, inner.shape))] = inner
                every[number] = crc = _crc(room)
                both[-CRC_BYTES:] = np.frombuffer(crc, np.uint8)
                yield both.data
            else:
                every[number] = crc = _crc(inner)
                yield inner.reshape(-1).view(np.uint8).data
                yield crc
        crcs += b"".join(every)
    if has_index(chunks):
        yield _index(shape, chunks, dtype.itemsize)


# Thousands of arrays have few shapes.
@functools.lru_cache(maxsize=64)
def _inner_chunks(
    shape: Shape, chunks: Chunks
) -> Sequence[tuple[int, tuple[slice | EllipsisType, ...]]]:
    """The number, in row-major order, and the index of each inner chunk in elements of `shape`, in
    the order of the file.
    """
    boxes = list(enumerate(grid_boxes(shape, chunks.inner)))
    boxes.sort(key=lambda numbered: chunks.file_order(numbered[1].start))
    return [(number, box.index) for number, box in boxes]


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
    size, begin = shard.file.size, shard.offset or 0
    if shard.offset is None and size != shard.nbytes:
        raise CorruptData(f"{url} has {size} bytes, but its chunk takes {shard.nbytes}")
    if begin + shard.nbytes > size:
        raise CorruptData(
            f"{url} is too short: it has {size} bytes, and a chunk in it ends at byte"
            f" {begin + shard.nbytes}"
        )
    if has_index(shard.chunks) and shard.nbytes <= WHOLE_BYTES:
        files = ReadAhead(files, shard.file)
        files.read_into([RangeRead(shard.file, begin, np.empty(shard.nbytes, np.uint8))])
    entries = _entries(files, shard, url)
    pieces: list[_Placed] = []
    nbytes = chunk_bytes(shard.chunks, shard.dtype)
    for place, takers in sorted(_wanted_chunks(shard).items(), key=operator.itemgetter(0)):
        at, length = entries[place].tolist()
        if length != nbytes:
            raise CorruptData(f"{url}: inner chunk {place} is not stored as {nbytes} bytes")
        if at + nbytes > shard.nbytes:
            raise CorruptData(f"{url} is too short for inner chunk {place}")
        pieces.append(_Placed(shard, place, begin + at, nbytes, takers))
    for _, fault in _delivered(files, pieces):
        if fault:
            raise CorruptData(f"{url}{fault}")


def _entries(files: Files | ReadAhead, shard: OuterChunk, url: str) -> np.ndarray:
    """Offset and length in the file of each inner chunk, on the last axis."""
    grid = _inner_grid(shard.chunks)
    if not has_index(shard.chunks):
        return np.array([0, shard.nbytes], np.uint64).reshape(*grid, 2)
    raw = np.empty(math.prod(grid) * _ENTRY_BYTES + CRC_BYTES, np.uint8)
    end = (shard.offset or 0) + shard.nbytes
    files.read_into([RangeRead(shard.file, end - raw.nbytes, raw)])
    index, crc = np.split(raw, [-CRC_BYTES])
    if _crc(index) != crc.tobytes():
        raise CorruptData(f"{url} is damaged: the index{_OTHER_CRC}")
    return index.view(np.uint64).reshape(*grid, 2)


def read_at_once(files: Files, shards: Sequence[OuterChunk]) -> list[OuterChunk]:
    """The outer chunks still to be read; others are copied from, by requests that go at once.

    Inner chunks are expected where our writer puts them, one after the other. An outer chunk is
    left if one is not there with its crc32c: it is damaged, in another order, or has an index
    alone. On a disk its index, which others need, is looked at too, but not that of a stack, which
    is long.
    """
    is_local = not files.is_remote
    left: dict[int, OuterChunk] = {}
    pieces: list[_Placed] = []
    for shard in shards:
        if not _is_placed(shard):
            left[id(shard)] = shard
            continue
        pieces += _placed(shard)
        has_own = shard.offset is None and has_index(shard.chunks) and not shard.chunks.is_stack
        if is_local and has_own:
            index = _index(shard.box.shape, shard.chunks, shard.dtype.itemsize)
            at = shard.nbytes - len(index)
            pieces.append(_Placed(shard, (), at, len(index), (), index))
    for piece, fault in _delivered(files, pieces):
        if fault:
            left[id(piece.shard)] = piece.shard
    return list(left.values())


class WholeChunk(NamedTuple):
    """An outer chunk without index at byte `offset` of a file, all of which is wanted in `out`;
    `crc` is its recorded crc32c, or empty.
    """

    offset: int
    out: np.ndarray
    crc: bytes

    @property
    def nbytes(self) -> int:
        return self.out.nbytes + CRC_BYTES


def read_whole(files: Files, file: FileInfo, chunks: Sequence[WholeChunk]) -> Iterator[bool]:
    """Whether each chunk has its crc32c, and was read."""
    most = REMOTE_BATCH_BYTES if files.is_remote else LOCAL_BATCH_BYTES
    for batch in batches(chunks, operator.attrgetter("nbytes"), most, len(chunks)):
        ends = list(itertools.accumulate(chunk.nbytes for chunk in batch))
        room = mid_page(ends[-1])
        rooms = [room[a:b] for a, b in itertools.pairwise([0, *ends])]
        reads = zip(batch, rooms, strict=True)
        files.read_into([RangeRead(file, chunk.offset, room) for chunk, room in reads])
        for chunk, room in zip(batch, rooms, strict=True):
            data, crc = room[:-CRC_BYTES], room[-CRC_BYTES:].tobytes()
            is_sound = _crc(data) == crc and chunk.crc in (b"", crc)
            if is_sound:
                chunk.out[...] = data.view(chunk.out.dtype).reshape(chunk.out.shape)
            yield is_sound


def _delivered(
    files: Files | ReadAhead, pieces: Sequence[_Placed]
) -> Iterator[tuple[_Placed, str]]:
    """Each piece with its fault, or with "". Its takers have its elements then, unless one of the
    neighbours that are copied with it has a fault.
    """
    most = REMOTE_BATCH_BYTES if files.is_remote else LOCAL_BATCH_BYTES
    for batch in batches(pieces, lambda piece: piece.nbytes, most, len(pieces)):
        runs: list[_Neighbours] = []
        for piece in batch:
            if not (runs and runs[-1].add(piece)):
                runs.append(_Neighbours(piece, in_place=not files.is_remote))
        files.read_into([read for run in runs for read in run.reads()])
        for run in runs:
            yield from run.deliver()


@dataclass(frozen=True, slots=True)
class _Placed:
    """An inner chunk with its crc32c, at byte `at` of the file of its outer chunk; or, without
    takers, the `index` that is expected there.
    """

    shard: OuterChunk
    place: Shape
    at: int
    nbytes: int
    takers: Sequence[tuple[Box, np.ndarray]]
    index: bytes = b""

    @property
    def box(self) -> Box:
        """Its block of the array, past whose edge it may extend."""
        inner = self.shard.chunks.inner
        offsets = map(operator.mul, self.place, inner)
        start = tuple(map(operator.add, self.shard.box.start, offsets))
        return Box(start, tuple(map(operator.add, start, inner)))

    def fault(self, data: np.ndarray, stored: np.ndarray) -> str:
        """The fault of its bytes, the last four of which are `stored`, or ""."""
        if self.index:
            is_expected = data.tobytes() + stored.tobytes() == self.index
            return "" if is_expected else " has another index"
        crc = _crc(data)
        if crc != stored.tobytes():
            return f" is damaged: inner chunk {self.place}{_OTHER_CRC}"
        if self.shard.crcs is not None and self.shard.crcs[self.place].tobytes() != crc:
            what = f"the data of inner chunk {self.place}"
            return f": {what} are not those that were saved: {_EXCHANGED}"
        return ""


class _Neighbours:
    """Pieces that are read and copied together: neighbours on an axis, all of which one taker
    wants; or a piece alone, which is read `in_place` where it belongs to one place without gaps.
    """

    def __init__(self, piece: _Placed, in_place: bool):
        self._pieces, self._box, self._takers = [piece], piece.box, piece.takers
        self._is_whole = len(piece.takers) == 1 and piece.box.within(piece.takers[0][0])
        self._in_place = in_place and self._is_whole and self._target().flags.c_contiguous

    def _target(self) -> np.ndarray:
        ((want, out),) = self._takers
        return out[self._box.relative_to(want).index]

    def add(self, piece: _Placed) -> bool:
        """Whether the piece goes on where this run ends, and is of it now."""
        if self._in_place or not self._is_whole or len(piece.takers) != 1:
            return False
        ((want, out),) = piece.takers
        if piece.shard is not self._pieces[0].shard or out is not self._takers[0][1]:
            return False
        around = Box.around((self._box, piece.box))
        has_gap = around.size != self._box.size + piece.box.size  # they do not overlap
        if has_gap or not piece.box.within(want):
            return False
        self._pieces.append(piece)
        self._box = around
        return True

    def reads(self) -> list[RangeRead]:
        first = self._pieces[0]
        file, length = first.shard.file, first.nbytes - CRC_BYTES
        if self._in_place:
            self._data = self._target().reshape(1, -1).view(np.uint8)
            self._stored = np.empty((1, CRC_BYTES), np.uint8)
            after = RangeRead(file, first.at + length, self._stored)
            return [RangeRead(file, first.at, self._data), after]
        rooms = mid_page(len(self._pieces) * first.nbytes).reshape(-1, first.nbytes)
        self._data, self._stored = rooms[:, :length], rooms[:, length:]
        return [
            RangeRead(file, piece.at, room) for piece, room in zip(self._pieces, rooms, strict=True)
        ]

    def deliver(self) -> list[tuple[_Placed, str]]:
        """Each piece with its fault, if it has one. If none has, the takers have the elements."""
        read = zip(self._pieces, self._data, self._stored, strict=True)
        faults = [(piece, piece.fault(data, stored)) for piece, data, stored in read]
        if self._takers and not self._in_place and not any(fault for _, fault in faults):
            self._copy()
        return faults

    def _copy(self) -> None:
        shard = self._pieces[0].shard
        elements = self._data.view(shard.dtype)
        if self._is_whole:
            tiles = _tiles(self._target(), shard.chunks.inner)
            tiles[...] = elements.reshape(tiles.shape)
            return
        elements = elements.reshape(shard.chunks.inner)
        for want, out in self._takers:
            hit = want.intersect(self._box)
            assert hit is not None  # a taker wants some of it
            out[hit.relative_to(want).index] = elements[hit.relative_to(self._box).index]


def _tiles(elements: np.ndarray, inner: Shape) -> np.ndarray:
    """A view of an array of whole tiles of the shape `inner`: the axes of a tile's place, then
    those of its elements.
    """
    grid, ndim = grid_shape(elements.shape, inner), len(inner)
    pairs = list(itertools.chain.from_iterable(zip(grid, inner, strict=True)))
    return elements.reshape(pairs).transpose([*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)])


def _is_placed(shard: OuterChunk) -> bool:
    """Whether the places of an outer chunk's inner chunks are known without its index."""
    is_sized = shard.offset is not None or shard.file.size == shard.nbytes
    is_ordered = shard.chunks.is_stack or not has_index(shard.chunks)
    return is_sized and (is_ordered or shard.crcs is not None)


def _placed(shard: OuterChunk) -> Iterator[_Placed]:
    """The inner chunks with a wanted element, in the order in which our writer puts them."""
    nbytes, order = chunk_bytes(shard.chunks, shard.dtype), shard.chunks.file_order
    grid = order(grid_shape(shard.box.shape, shard.chunks.inner))
    wanted = _wanted_chunks(shard)
    for place in sorted(wanted, key=order):
        number = 0
        for p, n in zip(order(place), grid, strict=True):
            number = number * n + p
        at = (shard.offset or 0) + number * nbytes
        yield _Placed(shard, place, at, nbytes, wanted[place])


def _wanted_chunks(shard: OuterChunk) -> dict[Shape, list[tuple[Box, np.ndarray]]]:
    """The inner chunks with wanted elements, by place, each with wanted boxes and arrays."""
    places: dict[Shape, list[tuple[Box, np.ndarray]]] = defaultdict(list)
    for want, out in shard.wanted:
        if (hit := want.intersect(shard.box)) is not None:
            edges = zip(hit.start, hit.stop, shard.box.start, shard.chunks.inner, strict=True)
            ranges = [range((a - o) // n, -((o - b) // n)) for a, b, o, n in edges]
            for place in itertools.product(*ranges):
                places[place].append((want, out))
    return places


@functools.lru_cache(maxsize=1024)
def with_read_unit(info: ArrayInfo, chunks: Chunks) -> ArrayInfo:
    """The info with the block that is read whole for any of it: an inner chunk, or a small file."""
    nbytes = math.prod(chunks.inner) * info.dtype.itemsize + CRC_BYTES + _ENTRY_BYTES
    is_small = math.prod(_inner_grid(chunks)) * nbytes + CRC_BYTES <= WHOLE_BYTES
    return replace(info, chunk=chunks.outer if is_small else chunks.inner)


def _inner_grid(chunks: Chunks) -> Shape:
    return tuple(o // i for o, i in zip(chunks.outer, chunks.inner, strict=True))


def _crc(data: np.ndarray) -> bytes:
    return google_crc32c.value(data).to_bytes(CRC_BYTES, "little")
