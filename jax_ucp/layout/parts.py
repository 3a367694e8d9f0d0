"""Affine parts: elements that two arrays have in common, by which all of the package describes
where elements lie.

Examples are a box of a shard, a range of a flat buffer, and a transposed or stacked weight. The
elements are numbered by the indices of a box, and their place in either array is an affine map of
these indices.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from jax_ucp.errors import LayoutError
from jax_ucp.layout.axes import Component, index_size
from jax_ucp.layout.box import Box, range_boxes, row_major_strides

Shape = tuple[int, ...]

# For each index, the axis on which it runs, and the distance of its neighbours there.
Steps = tuple[tuple[int, int], ...]

# Elements are read as the smallest box around them, if that has at most so many times as many
# elements; otherwise by several reads.
MOST_READ = 2


class Place(NamedTuple):
    """The places of elements in an array: the first is at `offset`, and the next along index k is
    `stride` further on `axis`, where `steps[k]` is `(axis, stride)`.
    """

    offset: Shape
    steps: Steps

    @property
    def is_box(self) -> bool:
        """Whether the elements are a box, with each index on the axis of its number."""
        return self.steps == straight(len(self.offset))

    def hull(self, indices: Box) -> Box:
        """The smallest box of the array around the elements of a box of indices."""
        if self.is_box:
            return indices.shift(self.offset)
        start, stop = list(self.offset), [n + 1 for n in self.offset]
        for (axis, stride), a, b in zip(self.steps, indices.start, indices.stop, strict=True):
            start[axis] += stride * a
            stop[axis] += stride * (b - 1)
        return Box(tuple(start), tuple(stop))

    def around(self, sizes: Shape) -> Box:
        """The smallest box around all elements, which have indices below `sizes`."""
        if self.is_box:
            return Box(self.offset, tuple([a + n for a, n in zip(self.offset, sizes, strict=True)]))
        return self.hull(Box.whole(sizes))

    def shift(self, by: Sequence[int]) -> Place:
        """The place of the same elements moved by `by[i]` along axis i."""
        return Place(tuple([a + d for a, d in zip(self.offset, by, strict=True)]), self.steps)

    def fills(self, sizes: Shape) -> bool:
        """Whether the elements are distinct, and all elements of the smallest box around them."""
        dense = [1] * len(self.offset)
        for size, (axis, stride) in sorted(zip(sizes, self.steps, strict=True), key=lambda k: k[1]):
            if size != 1 and stride != dense[axis]:
                return False
            dense[axis] *= size
        return True

    def on_axis(self, axis: int) -> list[int]:
        """The indices that run on an axis, in the order of decreasing strides."""
        return [k for k in self.order if self.steps[k][0] == axis]

    @property
    def order(self) -> tuple[int, ...]:
        """The indices from the slowest to the fastest, in row-major order of the array."""
        return _order(self.steps)


class Part(NamedTuple):
    """Elements that the input number `input` has in common with a target. They have indices below
    `sizes`, and distinct places in `source`, the input, and in `target`.
    """

    input: int
    sizes: Shape
    source: Place
    target: Place

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def source_box(self) -> Box:
        """The smallest box of the input around the elements."""
        return self.source.around(self.sizes)

    @property
    def target_box(self) -> Box:
        """The smallest box of the target around the elements."""
        return self.target.around(self.sizes)

    def inverse(self) -> Part:
        """The same elements, from the target to the source."""
        return Part(self.input, self.sizes, self.target, self.source)

    def narrow(self, box: Box) -> list[Part]:
        """Parts of exactly the elements in a box of the target."""
        return [
            Part(
                self.input,
                indices.shape,
                Place(self.source.hull(indices).start, self.source.steps),
                Place(self.target.hull(indices).start, self.target.steps),
            )
            for indices in self.inside(box)
        ]

    def chunk(self, source: Sequence[int]) -> Shape:
        """The shape of the target box that a source chunk of shape `source` fills."""
        steps = zip(self.sizes, self.source.steps, strict=True)
        stop = tuple([max(1, min(n, -(-source[axis] // stride))) for n, (axis, stride) in steps])
        return self.target.hull(Box.whole(stop)).shape

    def inside(self, box: Box) -> list[Box]:
        """The indices of the elements in a box of the target, as disjoint boxes."""
        if self.target.is_box:
            offset = self.target.offset
            start = tuple([max(a - d, 0) for a, d in zip(box.start, offset, strict=True)])
            ends = zip(box.stop, offset, self.sizes, strict=True)
            stop = tuple([min(b - d, n) for b, d, n in ends])
            return [Box(start, stop)] if all(map(operator.lt, start, stop)) else []
        found: list[Box] = []
        places = enumerate(zip(self.target.offset, box.start, box.stop, strict=True))
        on_axes = [self._spans(axis, start - at, stop - at) for axis, (at, start, stop) in places]
        for combination in itertools.product(*on_axes):
            spans: dict[int, tuple[int, int]] = {}
            for on_axis in combination:
                spans |= on_axis
            found.append(Box.spanning(map(spans.__getitem__, range(len(self.sizes)))))
        return found

    def _spans(self, axis: int, start: int, stop: int) -> list[dict[int, tuple[int, int]]]:
        """The indices with elements in a range of a target axis, as boxes: a span for each."""
        indices = self.target.on_axis(axis)
        steps = [(self.sizes[k], self.target.steps[k][1]) for k in indices]
        return [dict(zip(indices, box, strict=True)) for box in _within(steps, start, stop)]

    def runs(self, indices: Box) -> Iterator[Box]:
        """Boxes of indices whose elements are boxes of source and target, in the same order."""
        source, target = self.source, self.target
        lengths = indices.shape
        slowest = [k for k in source.order if lengths[k] > 1]
        is_in_order = slowest == [k for k in target.order if lengths[k] > 1]
        if is_in_order and source.hull(indices).size == target.hull(indices).size == indices.size:
            yield indices
            return
        for piece in _slices(indices, slowest[0], 1):
            yield from self.runs(piece)

    def slabs(self, indices: Box, limit: int) -> Iterator[Box]:
        """Boxes of indices whose elements lie in boxes of at most `limit` elements of the source,
        as far as cuts on the source's first axis allow.
        """
        around = self.source.hull(indices).size
        rows = self.source.on_axis(0) if self.source.offset else []
        axis = next((k for k in rows if indices.stop[k] - indices.start[k] > 1), None)
        if around <= limit or axis is None:
            yield indices
            return
        step = max(1, limit * (indices.stop[axis] - indices.start[axis]) // around)
        for slab in _slices(indices, axis, step):
            yield from self.slabs(slab, limit)

    def dense(self, indices: Box) -> Iterator[Box]:
        """Boxes of indices whose elements lie close enough in the source to be read at once."""
        if self.source.hull(indices).size <= MOST_READ * indices.size:
            yield indices
            return
        # cut at the index whose elements have the widest gaps between them in the source
        gaps: dict[int, float] = {}
        for axis in range(len(self.source.offset)):
            reach = 1
            for k in reversed(self.source.on_axis(axis)):
                extent, stride = indices.stop[k] - indices.start[k], self.source.steps[k][1]
                if extent > 1:
                    gaps[k] = stride / reach
                    reach += stride * (extent - 1)
        pieces = list(_slices(indices, max(gaps, key=gaps.__getitem__), 1))
        if self.source.hull(pieces[0]).size <= MOST_READ * pieces[0].size:
            yield from pieces
        else:
            yield from itertools.chain.from_iterable(map(self.dense, pieces))


def box_part(input: int, source: Box, target: Box) -> Part:
    """The part whose elements are those of two boxes, in row-major order. The boxes have equal
    shapes, or the source is a range of one axis.

    Raises LayoutError for other boxes.
    """
    sizes = target.shape
    if source.shape == sizes:
        steps = straight(len(sizes))
    elif len(source.start) == 1 and source.size == math.prod(sizes):
        steps = row_major(sizes)
    else:
        raise LayoutError(
            f"{source} of shard {input} cannot be {target} of the array: the shapes differ"
        )
    return Part(input, sizes, Place(source.start, steps), Place(target.start, straight(len(sizes))))


def range_parts(input: int, offset: int, shape: Shape, first: int, stop: int) -> Iterator[Part]:
    """The parts of a flat input that has the elements `first` to `stop` of an array, in row-major
    order, from `offset` on: at most `2 * ndim - 1`.

    >>> [str(part.target_box) for part in range_parts(0, 5, (2, 3), 1, 5)]
    ['[0:1, 1:3]', '[1:2, 0:2]']
    """
    for box in range_boxes(shape, first, stop):
        sizes = box.shape
        source = Place((offset,), row_major(sizes))
        yield Part(input, sizes, source, Place(box.start, straight(len(sizes))))
        offset += math.prod(sizes)


@cache
def straight(ndim: int) -> Steps:
    """The steps of a box: each index runs on the axis of its number."""
    return tuple([(axis, 1) for axis in range(ndim)])


@lru_cache(maxsize=4096)
def row_major(sizes: Shape) -> Steps:
    """The steps of elements one after another in row-major order, on one axis."""
    return tuple([(0, stride) for stride in row_major_strides(sizes)])


@lru_cache(maxsize=4096)
def _order(steps: Steps) -> tuple[int, ...]:
    return tuple(sorted(range(len(steps)), key=lambda k: (steps[k][0], -steps[k][1])))


def _slices(box: Box, axis: int, step: int) -> Iterator[Box]:
    """The parts of a box, `step` long on an axis from its start on; the last may be shorter."""
    for at in range(box.start[axis], box.stop[axis], step):
        stop = min(at + step, box.stop[axis])
        yield Box(
            (*box.start[:axis], at, *box.start[axis + 1 :]),
            (*box.stop[:axis], stop, *box.stop[axis + 1 :]),
        )


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


def affine_part(
    input: int,
    source: Component,
    target: Component,
    sizes: Mapping[str, int],
    fixed: Mapping[str, int],
) -> Part:
    """The part with the elements that two components with the same axes have in common.

    `fixed` has indices of axes on which only one index is meant, such as the layer if each layer is
    its own array.
    """
    names = [name for line in target.lines for name, _ in line.terms if name not in fixed]
    places = [_place(component, names, fixed) for component in (source, target)]
    return Part(input, tuple(index_size(name, sizes) for name in names), *places)


def _place(component: Component, names: Sequence[str], fixed: Mapping[str, int]) -> Place:
    """The places of a component's elements, for indices in the order of `names`."""
    offset = list[int]()
    steps: dict[str, tuple[int, int]] = {}
    for axis, line in enumerate(component.lines):
        at = sum(stride * fixed[name] for name, stride in line.terms if name in fixed)
        offset.append(line.offset + at)
        steps |= {name: (axis, stride) for name, stride in line.terms}
    return Place(tuple(offset), tuple([steps[name] for name in names]))


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """An array of `shape`, made of parts of `params`, by name; what no part covers is zero."""

    shape: Shape
    params: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def padding(self) -> int:
        """Number of elements that no parameter has."""
        return math.prod(self.shape) - sum(part.size for part in self.parts)


@dataclass(frozen=True)
class LeafForm:
    """The layout of a leaf in parameters, and the change of its values.

    `copies` are layouts of the same leaf in other parameters, which are tied to the first ones. The
    value is `x * scale + add`, or with `backwards` `(x - add) / scale`, cast to `dtype` unless that
    is empty. `rule` is the text of the mapping's rule. A `buffer` is not a parameter.
    """

    layout: LeafLayout
    rule: str
    copies: tuple[LeafLayout, ...] = ()
    dtype: str = ""
    scale: float = 1
    add: float = 0
    backwards: bool = False
    buffer: bool = False

    @property
    def scaled(self) -> bool:
        return (self.scale, self.add) != (1, 0)

    @property
    def params(self) -> list[str]:
        """The parameters that it is made of, tied ones too."""
        params = [param for layout in (self.layout, *self.copies) for param in layout.params]
        return list(dict.fromkeys(params))
