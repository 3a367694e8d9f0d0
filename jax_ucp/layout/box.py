"""Boxes: half-open blocks of an array's index space."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A block of an array: `start[i] <= x[i] < stop[i]` on every axis, in elements.

    >>> Box((2, 0), (5, 4)).shape
    (3, 4)
    >>> Box((2, 0), (5, 4)).intersect(Box((4, 1), (9, 3)))
    Box(start=(4, 1), stop=(5, 3))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of all elements of an array of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def spanning(cls, spans: Iterable[tuple[int, int]]) -> Box:
        """The box with these half-open ranges on its axes."""
        ranges = list(spans)
        return cls(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))

    @classmethod
    def around(cls, boxes: Iterable[Box]) -> Box:
        """The smallest box around some boxes, of which there is at least one.

        >>> str(Box.around([Box((0, 4), (1, 6)), Box((2, 0), (3, 5))]))
        '[0:3, 0:6]'
        """
        starts, stops = zip(*((box.start, box.stop) for box in boxes), strict=True)
        return cls(
            tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True)))
        )

    @property
    def ndim(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements; 1 for the box of a scalar."""
        return math.prod(map(operator.sub, self.stop, self.start))

    @property
    def index(self) -> tuple[slice | EllipsisType, ...]:
        """The same block as a numpy index, which makes views: `()` would copy a scalar.

        >>> Box((2,), (5,)).index, Box((), ()).index
        ((slice(2, 5, None),), (Ellipsis,))
        """
        return tuple(map(slice, self.start, self.stop)) or (...,)

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, or None where there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(map(operator.ge, start, stop)) else Box(start, stop)

    def within(self, other: Box) -> bool:
        """Whether every element of this box is in `other`."""
        is_above = all(map(operator.ge, self.start, other.start))
        return is_above and all(map(operator.le, self.stop, other.stop))

    def meets(self, other: Box) -> bool:
        """Whether both boxes, neither of them empty, have an element in common."""
        is_before = all(map(operator.lt, self.start, other.stop))
        return is_before and all(map(operator.gt, self.stop, other.start))

    def shift(self, by: Sequence[int]) -> Box:
        """This box moved by `by[i]` elements along axis i."""
        return Box(
            tuple([a + d for a, d in zip(self.start, by, strict=True)]),
            tuple([b + d for b, d in zip(self.stop, by, strict=True)]),
        )

    def relative_to(self, origin: Box) -> Box:
        """This box in coordinates that count from the first element of `origin`."""
        return Box(
            tuple(map(operator.sub, self.start, origin.start)),
            tuple(map(operator.sub, self.stop, origin.start)),
        )

    def minus(self, other: Box) -> Iterator[Box]:
        """Disjoint boxes of the elements of this box that are not in `other`: at most 2 * ndim."""
        hole = self.intersect(other)
        if hole is None:
            yield self
            return
        start, stop = list(self.start), list(self.stop)
        for axis in range(self.ndim):
            if start[axis] < hole.start[axis]:
                yield Box(tuple(start), (*stop[:axis], hole.start[axis], *stop[axis + 1 :]))
            if hole.stop[axis] < stop[axis]:
                yield Box((*start[:axis], hole.stop[axis], *start[axis + 1 :]), tuple(stop))
            start[axis], stop[axis] = hole.start[axis], hole.stop[axis]

    def __str__(self) -> str:
        return _text(self.start, self.stop)


@functools.lru_cache(maxsize=1024)
def _text(start: tuple[int, ...], stop: tuple[int, ...]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True)) + "]"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of an array whose elements lie one after the other.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])


def range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements `start <= i < stop` of an array, in row-major order, as boxes.

    Boxes come in that same order and hold contiguous elements: at most `2 * ndim - 1` of them.
    A flat ZeRO partition is such a range of every parameter it touches.

    >>> [str(box) for box in range_boxes((4, 3), 2, 10)]
    ['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"range [{start}, {stop}) does not lie in an array of {math.prod(shape)} elements"
        )
    if start == stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop,)) if shape else Box((), ())]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)

    def in_row(r: int, a: int, b: int) -> list[Box]:
        return [Box((r, *box.start), (r + 1, *box.stop)) for box in range_boxes(shape[1:], a, b)]

    if first == last:
        return in_row(first, head, tail)
    rows = Box((first + bool(head), *(0,) * (len(shape) - 1)), (last, *shape[1:]))
    between = [rows] if rows.size else []
    return [*in_row(first, head or row, row), *between, *in_row(last, 0, tail)]
