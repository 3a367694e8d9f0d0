"""The shapes of chunks on disk and of blocks that are read and written at once."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape

SMALL_BYTES = 64 << 10
STACK_BYTES = 16 << 10
INNER_BYTES = 1 << 20
OUTER_BYTES = 64 << 20
CHUNKS_PER_ARRAY = 64

# A stack's inner chunks are a quarter of a cell on each axis, so that a mesh of four times as many
# devices on it reads only the bytes that it needs.
PARTS_OF_CELL = 4

# An axis of at least this length may be cut into halves that do not divide it: the chunks then have
# less than 1 % more elements than the array.
RAGGED_LENGTH = 128

# Larger prime divisors are not searched for, because that would take longer than copying.
LARGEST_DIVISOR = 1 << 16

# The most parts into which a length is cut at once, unless a chunk would be too large otherwise:
# more parts make chunks far too small.
MOST_PARTS = 7


@dataclass(frozen=True, slots=True)
class Chunks:
    """The two levels of chunks of a stored array.

    `outer` is what one writer writes at once, a file; `inner`, which divides it, is what a reader
    fetches and decodes. Outer chunks at the high edge of the array may reach past it.

    In a file inner chunks lie in row-major order. Of a stack, whose first axis numbers arrays of
    one shape, that axis is the last in this order: of all arrays what lies at one place is
    together.
    """

    outer: Shape
    inner: Shape
    is_stack: bool = field(default=False, repr=False)

    def file_order(self, place: Sequence[int]) -> Shape:
        """A place in the grid of inner chunks, or its shape, with axes in the file's order."""
        return (*place[1:], *place[:1]) if self.is_stack else tuple(place)


def chunk_shapes(
    shape: Sequence[int],
    itemsize: int,
    cell: Sequence[int] | None = None,
    max_inner_bytes: int = INNER_BYTES,
    max_outer_bytes: int = OUTER_BYTES,
) -> Chunks:
    """Chunks for an array of `shape`: inner ones cut every axis alike, outer ones are of rows.

    A later mesh may cut any axis, into some power of two parts. So inner chunks halve the axis that
    has the fewest parts so far, until they have about 1/64 of the array, but at least 64 KiB and at
    most `max_inner_bytes`; a length that only a large prime divides is the last to be cut. Outer
    chunks hold whole rows, because neighbours on disk are then neighbours in the flat partitions
    that imports read from. No chunk crosses an edge between `cell`s, the equal blocks that
    different writers hold; `cell` divides `shape`, and is all of it where there is one writer.

    The limits hold unless a cell has a length without a small enough divisor.

    >>> chunk_shapes((4096, 1024), itemsize=4)
    Chunks(outer=(4096, 1024), inner=(512, 128))
    >>> chunk_shapes((50257, 768), itemsize=4)
    Chunks(outer=(18852, 768), inner=(3142, 48))
    >>> chunk_shapes((4096, 1024), itemsize=4, cell=(512, 1024))
    Chunks(outer=(512, 1024), inner=(512, 128))
    """
    cell = tuple(shape) if cell is None else tuple(cell)
    free = [c == n for c, n in zip(cell, shape, strict=True)]
    # The shape of inner chunks; an axis that is `free` may have parts that do not divide it.
    total = math.prod(max(1, n) for n in shape) * itemsize
    target = min(max_inner_bytes, max(SMALL_BYTES, total // CHUNKS_PER_ARRAY))
    inner = [max(1, n) for n in cell]
    while math.prod(inner) * itemsize > target and math.prod(inner) > 1:
        axis, length = _next_cut(shape, inner, free)
        too_many = inner[axis] / length > MOST_PARTS
        if too_many and math.prod(inner) * itemsize <= max_inner_bytes:
            break
        inner[axis] = length
    outer = list(inner)
    for axis in reversed(range(len(inner))):
        steps = -(-max(1, cell[axis]) // inner[axis])
        most = max(1, max_outer_bytes // (math.prod(outer) * itemsize))
        outer[axis] = inner[axis] * (
            _even_share(steps, most)
            if free[axis]
            else max(d for d in range(1, min(steps, most) + 1) if steps % d == 0)
        )
    return Chunks(tuple(outer), tuple(inner))


def stack_chunks(count: int, shape: Sequence[int], itemsize: int, cell: Sequence[int]) -> Chunks:
    """Chunks for a stack of `count` arrays of `shape`, of which each writer holds the same `cell`.

    An outer chunk has one cell of as many arrays as OUTER_BYTES hold. An inner chunk is of one
    array: a part of its cell, of at least STACK_BYTES, cut first along the axes that the mesh has
    cut, which a larger mesh will cut again.

    >>> stack_chunks(100_000, (6144, 1536), 4, (12, 1536))
    Chunks(outer=(910, 12, 1536), inner=(1, 3, 1536))
    """
    inner = [max(1, n) for n in cell]
    while axis := _next_cut_of_cell(shape, cell, inner, itemsize):
        inner[axis - 1] //= _smallest_prime(inner[axis - 1])
    most = max(1, OUTER_BYTES // (math.prod(cell) * itemsize))
    return Chunks((_even_share(count, most), *cell), (1, *inner), is_stack=True)


def _next_cut_of_cell(
    shape: Sequence[int], cell: Sequence[int], inner: Sequence[int], itemsize: int
) -> int:
    """The number of the axis, from 1, on which parts of a cell are cut next; 0 if there is none."""
    nbytes, best = math.prod(inner) * itemsize, (0, 0.0, 0, 0)
    for axis, (n, part) in enumerate(zip(cell, inner, strict=True)):
        if part > 1 and n // part < PARTS_OF_CELL:
            prime = _smallest_prime(part)
            if prime <= MOST_PARTS and nbytes // prime >= STACK_BYTES:
                best = max(best, (1 + (n < shape[axis]), part / n, part, axis + 1))
    return best[-1]


def _next_cut(shape: Sequence[int], inner: Sequence[int], free: Sequence[bool]) -> tuple[int, int]:
    """The axis on which inner chunks are cut next, and their length on it then.

    It is the one with the fewest parts so far, and of those the longest; but an axis that can only
    be cut into many parts at once comes last.
    """
    lengths = {axis: _part(n, free[axis]) for axis, n in enumerate(inner) if n > 1}

    def cost(axis: int) -> tuple[float, float, int]:
        parts = inner[axis] / lengths[axis]
        return parts if parts > MOST_PARTS else 0, shape[axis] / inner[axis], -inner[axis]

    axis = min(lengths, key=cost)
    return axis, lengths[axis]


def _even_share(steps: int, most: int) -> int:
    """The length, at most `most`, of the fewest even chunks of `steps`; the last may be shorter."""
    return -(-steps // -(-steps // most))


@dataclass(frozen=True, slots=True)
class Cells:
    """Equal blocks of an array: their shape, and the processes that hold each, by grid place."""

    shape: Shape
    owners: dict[Shape, frozenset[int]]


def writer_cells(shape: Sequence[int], itemsize: int, blocks: Sequence[Iterable[Box]]) -> Cells:
    """The largest blocks of an array that a process can write without gathering much.

    `blocks[p]` are those that process p holds. They come from a sharding, so all have one shape.
    Neighbouring blocks of one process are joined while the result has at most `INNER_BYTES`:
    a small array becomes a single chunk, a large one keeps a block per device.

    >>> halves = [Box((i * 4,), (i * 4 + 4,)) for i in range(2)]
    >>> writer_cells((8,), 4, [halves]).shape, writer_cells((8,), 4, [halves[:1], halves[1:]]).shape
    ((8,), (4,))
    """
    cell: list[int] = []
    owners: dict[Shape, frozenset[int]] = {}
    for process, boxes in enumerate(blocks):
        for box in boxes:
            cell = list(box.shape)
            place = grid_place(box, [max(1, n) for n in cell])
            owners[place] = owners.get(place, frozenset()) | {process}
    for axis in reversed(range(len(cell))):
        while 0 < cell[axis] < shape[axis]:
            factor = _smallest_prime(shape[axis] // cell[axis])
            joined: dict[Shape, frozenset[int]] = {}
            for place, who in owners.items():
                place = (*place[:axis], place[axis] // factor, *place[axis + 1 :])
                joined[place] = joined.get(place, who) & who
            if math.prod(cell) * factor * itemsize > INNER_BYTES or not all(joined.values()):
                break
            owners = joined
            cell[axis] *= factor
    return Cells(tuple(cell), owners)


def grid_boxes(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Box]:
    """The blocks of a regular grid of `chunk`, clipped to `shape`, in row-major order.

    >>> [str(box) for box in grid_boxes((5,), (2,))]
    ['[0:2]', '[2:4]', '[4:5]']
    """
    for start in itertools.product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
        yield _clipped(start, chunk, shape)


@functools.lru_cache(maxsize=1024)
def grid_shape(shape: Shape, chunk: Shape) -> Shape:
    """The number of chunks along each axis of an array, including incomplete ones at its end."""
    return tuple(-(-n // max(1, c)) for n, c in zip(shape, chunk, strict=True))


def row_boxes(shape: Sequence[int], itemsize: int, max_bytes: int) -> Iterator[Box]:
    """Blocks of whole rows that hold the array once, each of at most `max_bytes` or one row.

    >>> [str(box) for box in row_boxes((10, 256), itemsize=4, max_bytes=4096)]
    ['[0:4, 0:256]', '[4:8, 0:256]', '[8:10, 0:256]']
    """
    if not shape:
        yield Box((), ())
        return
    rows = max(1, max_bytes // max(1, math.prod(shape[1:]) * itemsize))
    if math.prod(shape):
        yield from grid_boxes(shape, (rows, *shape[1:]))


def rows_of_chunks(
    shape: Sequence[int], chunk: Sequence[int], itemsize: int, max_bytes: int
) -> Shape:
    """The largest block of whole chunks of at most `max_bytes`, last axes first; at least one.

    >>> rows_of_chunks((4096, 4096), (512, 512), itemsize=4, max_bytes=16 << 20)
    (1024, 4096)
    """
    block = [max(1, n) for n in chunk]
    for axis in reversed(range(len(block))):
        steps = -(-max(1, shape[axis]) // block[axis])
        block[axis] *= max(1, min(steps, max_bytes // (math.prod(block) * itemsize)))
    return tuple(block)


def run_boxes(shape: Sequence[int], itemsize: int, max_bytes: int) -> Iterator[Box]:
    """Blocks in row-major order, each of at most `max_bytes` and a run of the array's elements."""
    return grid_boxes(shape, rows_of_chunks(shape, (1,) * len(shape), itemsize, max_bytes))


def whole_chunks(box: Box, chunk: Sequence[int]) -> Box:
    """The block of whole chunks around a box, which may reach past the end of the array.

    >>> str(whole_chunks(Box((3, 0), (5, 9)), (4, 8)))
    '[0:8, 0:16]'
    """
    start = tuple(a // c * c for a, c in zip(box.start, chunk, strict=True))
    return Box(start, tuple(-(-b // c) * c for b, c in zip(box.stop, chunk, strict=True)))


def grid_place(box: Box, chunk: Sequence[int]) -> Shape:
    """The place in the grid of `chunk` of the block whose first element is that of `box`."""
    return tuple(a // c for a, c in zip(box.start, chunk, strict=True))


def outer_boxes(shape: Sequence[int], chunk: Sequence[int], boxes: Sequence[Box]) -> list[Box]:
    """The blocks of a grid of `chunk`, clipped to `shape`, that share an element with a box.

    >>> [str(box) for box in outer_boxes((9, 4), (4, 2), [Box((0, 2), (5, 3))])]
    ['[0:4, 2:4]', '[4:8, 2:4]']
    """
    if all(map(operator.ge, chunk, shape)):  # one block, as for nearly every small array
        return [Box.whole(shape)] if any(box.size for box in boxes) else []
    places: set[Shape] = set()
    for box in boxes:
        sides = zip(box.start, box.stop, chunk, strict=True)
        places.update(itertools.product(*(range(a // n, -(-b // n)) for a, b, n in sides)))
    return [
        _clipped(tuple(p * n for p, n in zip(place, chunk, strict=True)), chunk, shape)
        for place in sorted(places)
    ]


def _clipped(start: Shape, chunk: Sequence[int], shape: Sequence[int]) -> Box:
    """The chunk that begins at `start`, without elements past the end of the array."""
    return Box(start, tuple(min(a + c, n) for a, c, n in zip(start, chunk, shape, strict=True)))


def _part(length: int, ragged: bool) -> int:
    """The longest part of a length: a half if it is even or may be `ragged`, else a divisor."""
    if length % 2 and ragged and length >= RAGGED_LENGTH:
        return length // 2 + 1
    return length // _smallest_prime(length)


def _smallest_prime(n: int) -> int:
    return next((p for p in range(2, min(math.isqrt(n), LARGEST_DIVISOR) + 1) if n % p == 0), n)
