"""Array expressions: an array of a checkpoint as a value, a tree over stored arrays.

`evaluate` reads them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, Piece
from jax_ucp.errors import LayoutError
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import LeafLayout, Part, Place, Shape, row_major, straight


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
    """Inputs put into place: part by part of `layout`, whose numbers are those of `inputs`.

    `rule` is what people wrote, where a mapping puts them there.
    """

    layout: ParamLayout
    inputs: tuple[Array, ...]
    info: ArrayInfo
    rule: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Numbers that a rule makes of its inputs, which are by role."""

    rule: Rule
    inputs: Mapping[str, Array]
    info: ArrayInfo


Array = Stored | Constant | Joined | Computed


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

    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of each input, by role, whose elements a box of the result is computed from: the
        same box of `elementwise` inputs.

        It may have more elements than are used. The roles are the same for every box.
        """
        return dict.fromkeys(self.elementwise, box)

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


def cut(name: str, whole: Array, start: int, shape: Shape, transposed: bool = False) -> Array:
    """Consecutive elements of an array in row-major order, from `start` on, as an array of `shape`;
    with `transposed`, with the axes of `shape` the other way round. All of an array is itself.

    Raises LayoutError, with the name, if they reach past the array.
    """
    stored, size = whole.info.shape, math.prod(shape)
    if start < 0 or start + size > math.prod(stored):
        run = Box((start,), (start + size,))
        raise LayoutError(f"{name}: {run} is not inside an array of {math.prod(stored)} elements")
    if stored == shape and not transposed:
        return whole
    if (offset := _rows_at(stored, start, shape)) is not None:
        depth = len(stored) - len(shape)
        source = Place(offset, tuple([(depth + axis, 1) for axis in range(len(shape))]))
    else:
        whole = _flat(whole)
        source = Place((start,), row_major(shape))
    target, axes = straight(len(shape)), shape
    if transposed:
        target, axes = target[::-1], shape[::-1]
    part = Part(0, shape, source, Place((0,) * len(shape), target))
    layout = ParamLayout(axes, (whole.info.shape,), (part,))
    return Joined(layout, (whole,), ArrayInfo(axes, whole.info.dtype))


def _rows_at(stored: Shape, start: int, shape: Shape) -> Shape | None:
    """The place in an array of shape `stored` at which it has, as whole rows of one of its blocks,
    the elements from `start` on, as an array of `shape`: those of a layer or an expert of several.

    >>> _rows_at((2, 4, 3, 2), 12, (3, 2)), _rows_at((2, 4, 3, 2), 10, (3, 2))
    ((0, 2, 0, 0), None)
    """
    depth, row = len(stored) - len(shape), math.prod(shape[1:])
    is_of_rows = depth >= 0 and shape != () and 0 not in shape and stored[depth + 1 :] == shape[1:]
    if not is_of_rows or start % row:
        return None
    *leading, first = map(int, np.unravel_index(start // row, stored[: depth + 1]))
    if first + shape[0] > stored[depth]:
        return None
    return (*leading, first, *(0 for _ in shape[1:]))


def _flat(whole: Array) -> Array:
    """The elements of an array in row-major order, on one axis."""
    shape, size = whole.info.shape, math.prod(whole.info.shape)
    if len(shape) == 1:
        return whole
    part = Part(
        0, shape, Place((0,) * len(shape), straight(len(shape))), Place((0,), row_major(shape))
    )
    layout = ParamLayout((size,), (shape,), (part,))
    return Joined(layout, (whole,), ArrayInfo((size,), whole.info.dtype))


def formed(layout: LeafLayout, inputs: Sequence[Array], rule: str) -> Joined:
    """The leaf that a mapping's rule makes of parameters, which are `inputs`."""
    shapes = tuple([array.info.shape for array in inputs])
    parts = ParamLayout(layout.shape, shapes, layout.parts, padded=layout.padding > 0)
    first = layout.parts[0]
    whole = inputs[first.input].info
    if whole.chunk is not None:
        info = ArrayInfo(layout.shape, whole.dtype, first.chunk(whole.chunk))
    else:
        row = whole.row or (*(1,) * (len(whole.shape) - 1), *whole.shape[-1:])
        info = ArrayInfo(layout.shape, whole.dtype, row=first.chunk(row))
    return Joined(parts, tuple(inputs), info, rule)


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
        case Joined(inputs=inputs):
            start = start_of(array)
            return f"{label(inputs[0])} from {start}" if start else label(inputs[0])
        case _:
            return next(items_of(array))


def start_of(array: Array) -> int:
    """The element of its one input that an array begins with, by its number in row-major order; 0
    of an array that is made otherwise.
    """
    if not isinstance(array, Joined) or len(array.layout.parts) != 1:
        return 0
    (part,), (shape, *_) = array.layout.parts, array.layout.shards
    return int(np.ravel_multi_index(part.source.offset, shape)) if part.size else 0


def inputs_of(array: Array) -> Iterable[Array]:
    """The arrays that an expression is made of directly."""
    match array:
        case Joined(inputs=inputs):
            return inputs
        case Computed(inputs=inputs):
            return inputs.values()
        case Stored() | Constant():
            return ()


def nodes(array: Array) -> Iterator[Array]:
    """An array, and all the arrays that it is made of."""
    yield array
    for inner in inputs_of(array):
        yield from nodes(inner)


def stored(array: Array) -> Iterator[Stored]:
    """The stored arrays that an array is made of."""
    return (node for node in nodes(array) if isinstance(node, Stored))


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
