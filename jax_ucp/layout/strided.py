"""Arrays that hold the same elements in different places: affine index maps between boxes.

The axes notation is lowered to these. They are all that reading through it needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_ucp.layout.axes import Component, Line, index_size
from jax_ucp.layout.box import Box

# A read fetches the smallest box around what it wants, as long as that is at most so many times as
# large; what lies wider apart is fetched in several reads.
MOST_READ = 2


@dataclass(frozen=True, slots=True)
class AxisMap:
    """Where indices lie on an axis of an array: `offset + sum(stride * index[axis])`."""

    offset: int
    terms: tuple[tuple[int, int], ...] = ()

    def span(self, box: Box) -> tuple[int, int]:
        """The half-open range that the indices in a box reach."""
        start = self.offset + sum(stride * box.start[axis] for axis, stride in self.terms)
        reach = sum(stride * (box.stop[axis] - box.start[axis] - 1) for axis, stride in self.terms)
        return start, start + reach + 1


Place = tuple[AxisMap, ...]


def hull(place: Place, box: Box) -> Box:
    """The smallest box of an array that holds the elements of a box of indices."""
    return Box.spanning(run.span(box) for run in place)


def strides(place: Place, ndim: int) -> tuple[tuple[int, int], ...]:
    """For each of `ndim` indices, the array's axis that it runs on and its stride in elements."""
    by_axis = {axis: (dim, stride) for dim, run in enumerate(place) for axis, stride in run.terms}
    return tuple(map(by_axis.__getitem__, range(ndim)))


@dataclass(frozen=True, slots=True)
class PartStep:
    """Elements to move: a box of indices, and their bounding boxes in source and target."""

    indices: Box
    source: Box
    target: Box


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that array `array` of a source has in common with a target.

    They have indices in the box of `sizes`; `source` and `target` say for every axis of the two
    arrays where the element of an index lies. Both maps are one to one.
    """

    array: str
    sizes: tuple[int, ...]
    source: Place
    target: Place

    def steps(self, box: Box, limit: int) -> Iterator[PartStep]:
        """How to fetch a box of the target; no read is over `MOST_READ` times what is wanted."""
        for indices in self.inside(box):
            for piece in self._cut(indices, limit):
                yield PartStep(piece, hull(self.source, piece), hull(self.target, piece))

    def inverse(self, array: str) -> Part:
        """The same elements, from the target to the source, which is called `array`."""
        return Part(array, self.sizes, self.target, self.source)

    def chunk(self, source: Sequence[int]) -> tuple[int, ...]:
        """The shape of the target box that a source chunk of shape `source` fills."""
        extents = {
            axis: -(-n // stride)
            for n, run in zip(source, self.source, strict=True)
            for axis, stride in run.terms
        }
        stop = tuple(max(1, min(size, extents[axis])) for axis, size in enumerate(self.sizes))
        return hull(self.target, Box((0,) * len(stop), stop)).shape

    def inside(self, box: Box) -> Iterator[Box]:
        """The indices of the elements in a box of the target, as disjoint boxes."""
        on_axes = [
            self._spans(run, a, b)
            for run, a, b in zip(self.target, box.start, box.stop, strict=True)
        ]
        for combination in itertools.product(*on_axes):
            spans: dict[int, tuple[int, int]] = {}
            for on_axis in combination:
                spans |= on_axis
            yield Box.spanning(map(spans.__getitem__, range(len(self.sizes))))

    def _spans(self, run: AxisMap, start: int, stop: int) -> list[dict[int, tuple[int, int]]]:
        """The indices with elements in a range of a target axis, as boxes: a span for each."""
        axes = [axis for axis, _ in run.terms]
        steps = [(self.sizes[axis], stride) for axis, stride in run.terms]
        boxes = _within(steps, start - run.offset, stop - run.offset)
        return [dict(zip(axes, box, strict=True)) for box in boxes]

    def _cut(self, indices: Box, limit: int) -> Iterator[Box]:
        """Boxes of indices that are dense enough in the source to be read at once."""
        around = hull(self.source, indices).size
        if around > MOST_READ * indices.size:
            axis, step = self._widest(indices), 1
        elif around > limit and (axis := self._outermost(indices)) is not None:
            step = max(1, limit * indices.shape[axis] // around)
        else:
            yield indices
            return
        for at in range(indices.start[axis], indices.stop[axis], step):
            start, stop = list(indices.start), list(indices.stop)
            start[axis], stop[axis] = at, min(at + step, stop[axis])
            yield from self._cut(Box(tuple(start), tuple(stop)), limit)

    def _outermost(self, indices: Box) -> int | None:
        """The slowest axis on the source's first axis, if it has more than one index there."""
        terms = self.source[0].terms if self.source else ()
        return next((axis for axis, _ in terms if indices.shape[axis] > 1), None)

    def _widest(self, indices: Box) -> int:
        """The axis whose elements have the widest gaps between them in the source."""
        gaps: dict[int, float] = {}
        for run in self.source:
            reach = 1
            for axis, stride in reversed(run.terms):
                extent = indices.stop[axis] - indices.start[axis]
                if extent > 1:
                    gaps[axis] = stride / reach
                    reach += stride * (extent - 1)
        return max(gaps, key=gaps.__getitem__)


def _within(
    steps: Sequence[tuple[int, int]], start: int, stop: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """The indices of nested axes, (size, stride) outermost first, with `start <= place < stop`.

    They come as boxes, at most `2 * len(steps) - 1` of them.
    """
    if not steps:
        if start <= 0 < stop:
            yield ()
        return
    (size, stride), inner = steps[0], steps[1:]
    reach = 1 + sum((n - 1) * s for n, s in inner)
    first = min(max(-(-start // stride), 0), size)
    last = min(max((stop - reach) // stride + 1, first), size)
    if first:
        yield from _at(first - 1, stride, inner, start, stop)
    if first < last:
        yield ((first, last), *((0, n) for n, _ in inner))
    if last < size:
        yield from _at(last, stride, inner, start, stop)


def _at(
    index: int, stride: int, inner: Sequence[tuple[int, int]], start: int, stop: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    for spans in _within(inner, start - index * stride, stop - index * stride):
        yield ((index, index + 1), *spans)


def part(
    array: str,
    source: Component,
    target: Component,
    sizes: Mapping[str, int],
    fixed: Mapping[str, int],
) -> Part:
    """The elements that two components with the same axes have in common.

    `fixed` are indices of axes of which only one is meant: the layer, where each layer is an array
    of its own.
    """
    names = [name for line in target.lines for name, _ in line.terms if name not in fixed]
    order = {name: i for i, name in enumerate(names)}
    return Part(
        array,
        tuple(index_size(name, sizes) for name in names),
        tuple(_axis_map(line, order, fixed) for line in source.lines),
        tuple(_axis_map(line, order, fixed) for line in target.lines),
    )


def _axis_map(line: Line, order: Mapping[str, int], fixed: Mapping[str, int]) -> AxisMap:
    at = sum(stride * fixed[name] for name, stride in line.terms if name in fixed)
    return AxisMap(
        line.offset + at,
        tuple((order[name], stride) for name, stride in line.terms if name in order),
    )


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """An array of `shape`, made of parts of source arrays; what no part covers is zero."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def arrays(self) -> set[str]:
        """The source arrays that it is made of."""
        return {part.array for part in self.parts}

    @property
    def padding(self) -> int:
        """Number of elements that no source has."""
        return math.prod(self.shape) - sum(math.prod(part.sizes) for part in self.parts)


@dataclass(frozen=True)
class LeafForm:
    """How parameters form a leaf: the parts of its layout are named by parameter.

    `copies` are layouts that give the same leaf from other parameters, which are tied to the first.
    The value is `x * scale + add`, or with `backwards` `(x - add) / scale`, and then cast to
    `dtype` if there is one. `rule` is what people wrote.
    """

    layout: LeafLayout
    rule: str
    copies: tuple[LeafLayout, ...] = ()
    dtype: str = ""
    scale: float = 1
    add: float = 0
    backwards: bool = False

    @property
    def scaled(self) -> bool:
        return (self.scale, self.add) != (1, 0)

    @property
    def params(self) -> list[str]:
        """The parameters that it is made of, tied ones too."""
        parts = [part for layout in (self.layout, *self.copies) for part in layout.parts]
        return list(dict.fromkeys(part.array for part in parts))
