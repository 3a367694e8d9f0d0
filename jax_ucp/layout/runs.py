"""Grids of an array in which each chunk is one run of bytes of a file, as a link needs them.

An array is stored in strided blocks: boxes whose elements have constant distances in a file along
each axis. A chunk of a regular grid is a run if its elements follow one another, with its axes in
an order that is the same for all chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax_ucp.errors import LayoutError
from jax_ucp.layout.box import Box, row_major_strides
from jax_ucp.layout.parts import Shape

# The sizes of chunks: a reader fetches a whole chunk for any part of it, so that smaller chunks
# need too many reads, and larger ones read too many bytes that are not needed.
LEAST_BYTES, MOST_BYTES = 256 << 10, 8 << 20

# Many chunks of fewer bytes would be read more slowly than a copy.
SHORT_BYTES, MANY = 16 << 10, 256


class StridedBlock(NamedTuple):
    """A box of an array in a file: the number of the file, the byte of the box's first element, and
    the distance in bytes between elements along each axis.
    """

    box: Box
    file: int
    offset: int
    strides: tuple[int, ...]

    def at(self, start: Sequence[int]) -> int:
        """The byte of an element of the box."""
        steps = zip(start, self.box.start, self.strides, strict=True)
        return self.offset + sum((a - b) * stride for a, b, stride in steps)

    def part(self, box: Box) -> StridedBlock:
        """A box inside this one."""
        return StridedBlock(box, self.file, self.at(box.start), self.strides)

    def shift(self, by: Sequence[int]) -> StridedBlock:
        """The same bytes in an array in which the box is elsewhere."""
        return self._replace(box=self.box.shift(by))


class RunGrid(NamedTuple):
    """A grid of an array: the shape of its chunks, which divides the array's shape; the axes of a
    chunk from the slowest to the fastest in a file; and for each chunk, in row-major order of the
    grid, the number of the file and the byte at which it begins.
    """

    chunk: Shape
    order: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def run_grid(shape: Shape, itemsize: int, blocks: Sequence[StridedBlock]) -> RunGrid:
    """The grid of an array, which `blocks` tile, of the largest chunks up to MOST_BYTES that are
    each one run.

    Raises LayoutError, with the reason, where there is none, or only one of many short runs.

    >>> rows = StridedBlock(Box((0, 0), (4, 3)), 0, 100, (3, 1))
    >>> run_grid((4, 3), 1, [rows])
    RunGrid(chunk=(4, 3), order=(0, 1), places=((0, 100),))
    >>> columns = StridedBlock(Box((0, 0), (3, 4)), 0, 100, (1, 3))
    >>> run_grid((3, 4), 1, [columns])
    RunGrid(chunk=(3, 4), order=(1, 0), places=((0, 100),))
    """
    # chunks may not cross the edges of blocks, which are where blocks start, and the array's end
    edges = [
        math.gcd(n, *{block.box.start[axis] for block in blocks}) for axis, n in enumerate(shape)
    ]
    chunk, fastest_first, nbytes = [1] * len(shape), list[int](), itemsize
    while nbytes < MOST_BYTES:
        rest = [axis for axis in range(len(shape)) if axis not in fastest_first]
        follows = (a for a in rest if all(block.strides[a] == nbytes for block in blocks))
        if (axis := next(follows, None)) is None:
            break
        fastest_first.append(axis)
        chunk[axis] = _length(edges[axis], nbytes)
        nbytes *= chunk[axis]
    count = math.prod(shape) // math.prod(chunk)
    if nbytes < SHORT_BYTES and count > MANY:
        raise LayoutError(f"its elements lie in {count} runs, the longest of {nbytes} bytes")
    slow = (axis for axis in range(len(shape)) if axis not in fastest_first)
    return RunGrid(tuple(chunk), (*slow, *reversed(fastest_first)), _places(shape, chunk, blocks))


def _length(most: int, nbytes: int) -> int:
    """The divisor of `most` for the length of a chunk whose parts have `nbytes` each: the largest
    for at most MOST_BYTES, or if that has fewer than LEAST_BYTES, the smallest for at least as
    many.
    """
    small = [n for n in range(1, math.isqrt(most) + 1) if most % n == 0]
    divisors = sorted({*small, *(most // n for n in small)})
    within = [n for n in divisors if n * nbytes <= MOST_BYTES]
    if within and within[-1] * nbytes >= LEAST_BYTES:
        return within[-1]
    return next(n for n in divisors if n * nbytes >= LEAST_BYTES or n == most)


def _places(
    shape: Shape, chunk: Sequence[int], blocks: Sequence[StridedBlock]
) -> tuple[tuple[int, int], ...]:
    """The file and byte of each chunk of a grid. Raises LayoutError if one is missing."""
    grid = [n // c for n, c in zip(shape, chunk, strict=True)]
    steps = row_major_strides(grid)
    places: list[tuple[int, int] | None] = [None] * math.prod(grid)
    for block in blocks:
        starts = zip(block.box.start, block.box.stop, chunk, strict=True)
        for start in itertools.product(*(range(a, b, c) for a, b, c in starts)):
            number = sum(a // c * step for a, c, step in zip(start, chunk, steps, strict=True))
            places[number] = block.file, block.at(start)
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        raise LayoutError("some of its elements are in no file")
    return tuple(known)
