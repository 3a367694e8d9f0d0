"""Array expressions: an array of a checkpoint as a value, a tree over stored arrays.

`evaluate` reads them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, Piece
from jax_ucp.errors import LayoutError
from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex
from jax_ucp.layout.fragments import Fragment, ParamLayout
from jax_ucp.layout.strided import LeafLayout, hull


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """An array that is stored: `item` of `source`."""

    source: ArraySource
    item: str
    info: ArrayInfo


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """An array that no file has as an array; `pieces` say what states it."""

    value: np.ndarray
    pieces: Sequence[Piece] = ()

    @property
    def info(self) -> ArrayInfo:
        return ArrayInfo(self.value.shape, self.value.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Inputs put into place: `inputs[i]` is shard i of `layout`, which was proved to tile."""

    layout: ParamLayout
    inputs: tuple[Array, ...]
    info: ArrayInfo


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Consecutive elements of an array in row-major order, from `start` on, as an array of `shape`.

    With `transposed` the result has the axes of `shape` the other way round.
    """

    whole: Array
    start: int
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def info(self) -> ArrayInfo:
        shape = self.shape[::-1] if self.transposed else self.shape
        return ArrayInfo(shape, self.whole.info.dtype)

    @property
    def fragment(self) -> Fragment:
        """The elements in the flat whole, and in an array of `shape`."""
        range = Box((self.start,), (self.start + math.prod(self.shape),))
        return Fragment(0, range, Box.whole(self.shape))

    @property
    def place(self) -> tuple[int, ...] | None:
        """The leading indices at which the whole has the cut, if it is all that there is.

        A layer or an expert of several is read so, a part of it too, and no element beside it.

        >>> whole = Constant(np.zeros((2, 4, 3, 2), np.float32))
        >>> Cut(whole, 12, (3, 2)).place, Cut(whole, 10, (3, 2)).place
        ((0, 2), None)
        """
        stored = self.whole.info.shape
        depth, size = len(stored) - len(self.shape), math.prod(self.shape)
        if depth < 0 or stored[depth:] != self.shape or not size or self.start % size:
            return None
        return tuple(map(int, np.unravel_index(self.start // size, stored[:depth])))

    def check(self, name: str) -> None:
        """Raise LayoutError if the cut, called `name`, reaches past its whole."""
        range, elements = self.fragment.source, math.prod(self.whole.info.shape)
        if range.start[0] < 0 or range.stop[0] > elements:
            raise LayoutError(f"{name}: {range} is not inside an array of {elements} elements")

    def pieces(self, box: Box) -> Iterator[Fragment]:
        """The runs of consecutive elements of the whole that a box of the cut consists of.

        If transposed, each run is a part of one column: its elements have one order in both places.
        """
        if not self.transposed:
            yield from self._runs(box)
            return
        for part in _lines(_reversed(box)):
            for run in self._runs(part):
                yield Fragment(0, run.source, _reversed(run.target))

    def _runs(self, box: Box) -> Iterator[Fragment]:
        narrow = self.fragment.narrow(box)
        if narrow is not None and narrow.target == box:
            yield narrow
        elif narrow is not None:
            for part in _rows(box, next(axis for axis, n in enumerate(box.shape) if n > 1)):
                yield from self._runs(part)


@dataclass(frozen=True, eq=False)
class Rearranged:
    """Elements of inputs in other places, as a mapping has them; zero where no part of `layout` is.

    The parts name the inputs. `rule` is what people wrote.
    """

    layout: LeafLayout
    inputs: Mapping[str, Array]
    rule: str = ""

    @cached_property
    def info(self) -> ArrayInfo:
        first = self.layout.parts[0]
        whole = self.inputs[first.array].info
        if whole.chunk is not None:
            return ArrayInfo(self.layout.shape, whole.dtype, first.chunk(whole.chunk))
        row = whole.row or (*(1,) * (len(whole.shape) - 1), *whole.shape[-1:])
        return ArrayInfo(self.layout.shape, whole.dtype, row=first.chunk(row))

    @cached_property
    def hulls(self) -> list[Box]:
        """Of each part the smallest block of the result around it."""
        return [hull(part.target, Box.whole(part.sizes)) for part in self.layout.parts]

    @cached_property
    def index(self) -> BoxIndex:
        return BoxIndex(self.hulls)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Numbers that a rule makes of its inputs, which are by role."""

    rule: Rule
    inputs: Mapping[str, Array]
    info: ArrayInfo


Array = Stored | Constant | Joined | Cut | Rearranged | Computed


class Rule(Protocol):
    """How to compute an array box by box.

    Boxes that two boxes need of an input lie in one another as those do.
    """

    @property
    def elementwise(self) -> Sequence[str]:
        """The inputs that have, for each element of the result, the element at its place."""
        return ()

    @property
    def scheme(self) -> str:
        """A name for people, where an element rests on more than elements at its place."""
        return ""

    @abstractmethod
    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of each input, by role, whose elements a box of the result is computed from.

        It may have more elements than are used. The roles are the same for every box.
        """
        ...

    @abstractmethod
    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The elements of `box`, from the elements of just those boxes of the inputs.

        They are of the dtype of the result, or numbers that are then rounded to it once.
        """
        ...


def joined(
    name: str, layout: ParamLayout, inputs: Sequence[Array], labels: Sequence[str] | None = None
) -> Array:
    """The parameter `name`, whose shards are `inputs`; one whole shard is itself.

    Raises LayoutError, naming the parameter and its shards, by `labels` or as they are stored,
    where shapes or dtypes do not fit.
    """
    shapes = tuple([array.info.shape for array in inputs])
    dtypes = {array.info.dtype for array in inputs}
    if shapes != layout.shards or len(dtypes) != 1:
        raise _misfit(name, layout, inputs, labels or [*map(label, inputs)])
    try:
        layout.check()
    except LayoutError as error:
        shards = ", ".join(labels or map(label, inputs))
        raise LayoutError(f"{name}: {error} (shards: {shards})") from None
    if layout.is_one_shard:
        return inputs[0]
    return Joined(layout, tuple(inputs), ArrayInfo(layout.shape, inputs[0].info.dtype))


def _misfit(
    name: str, layout: ParamLayout, inputs: Sequence[Array], labels: Sequence[str]
) -> LayoutError:
    """The error for shards whose number, shapes or dtypes are not those of the layout."""
    if len(inputs) != len(layout.shards):
        return LayoutError(
            f"{name}: the layout has {len(layout.shards)} shards, but {len(inputs)} are named:"
            f" {list(labels)}"
        )
    for shard, array, shape in zip(labels, inputs, layout.shards, strict=True):
        if array.info.shape != shape:
            return LayoutError(
                f"{name}: {shard} was declared with shape {shape}, but has {array.info.shape}"
            )
    dtypes = {shard: array.info.dtype for shard, array in zip(labels, inputs, strict=True)}
    return LayoutError(f"{name}: the shards differ in dtype: {dtypes}")


def stated(value: np.ndarray, where: str) -> Constant:
    """A value that no file has as an array; `where`, `file:item`, states it."""
    file, _, item = where.partition(":")
    return Constant(value, (Piece(file, item, Box((), ()), Box((), ())),))


def label(array: Array) -> str:
    """A name for an array, for people: where its first elements are stored."""
    match array:
        case Constant(pieces=pieces):
            return pieces[0].name
        case Cut(whole, start):
            return f"{label(whole)} from {start}"
        case _:
            return next(items_of(array))


def inputs_of(array: Array) -> Iterable[Array]:
    """The arrays that an expression is made of directly."""
    match array:
        case Cut(whole):
            return (whole,)
        case Joined(inputs=inputs):
            return inputs
        case Rearranged(inputs=inputs) | Computed(inputs=inputs):
            return inputs.values()
        case Stored() | Constant():
            return ()


def stored(array: Array) -> Iterator[Stored]:
    """The stored arrays that an array is made of."""
    if isinstance(array, Stored):
        yield array
    for inner in inputs_of(array):
        yield from stored(inner)


def nodes(array: Array) -> Iterator[Array]:
    """An array, and all the arrays that it is made of."""
    yield array
    for inner in inputs_of(array):
        yield from nodes(inner)


def items_of(array: Array) -> Iterator[str]:
    """The names of the stored arrays that have the elements of an array, not their scales."""
    if isinstance(array, Stored):
        yield array.item
    inputs = inputs_of(array)
    if isinstance(array, Computed):
        inputs = [array.inputs[role] for role in array.rule.elementwise]
    for inner in inputs:
        yield from items_of(inner)


def users(made: Mapping[str, Array], of: Mapping[str, Array]) -> dict[str, set[str]]:
    """By the name of an array of `of`, the names of the arrays of `made` that rest on it."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, array in of.items():
        names[id(array)].append(name)
    found: dict[str, set[str]] = defaultdict(set)

    def visit(array: Array, user: str) -> None:
        if id(array) in names:
            for name in names[id(array)]:
                found[name].add(user)
            return
        for inner in inputs_of(array):
            visit(inner, user)

    for user, array in made.items():
        visit(array, user)
    return found


def _reversed(box: Box) -> Box:
    return Box(box.start[::-1], box.stop[::-1])


def _rows(box: Box, axis: int) -> Iterator[Box]:
    for at in range(box.start[axis], box.stop[axis]):
        yield Box(
            (*box.start[:axis], at, *box.start[axis + 1 :]),
            (*box.stop[:axis], at + 1, *box.stop[axis + 1 :]),
        )


def _lines(box: Box, axis: int = 0) -> Iterator[Box]:
    """The box, cut on every axis but the last."""
    if axis >= box.ndim - 1:
        yield box
        return
    for part in _rows(box, axis):
        yield from _lines(part, axis + 1)
