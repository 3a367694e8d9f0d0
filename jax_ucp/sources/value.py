"""What an array of a checkpoint is made of, as a value: a tree of expressions over stored arrays.

`evaluate` reads them. They hold no files and no other objects that read.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_ucp.errors import LayoutError
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment, ParamLayout
from jax_ucp.sources.protocol import ArrayInfo


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """An array that files have under the name `item`, which is `file:item`."""

    item: str
    info: ArrayInfo


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """An array that no file has as an array; `where`, `file:item`, states it."""

    value: np.ndarray
    where: str

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

        >>> whole = Stored("w", ArrayInfo((2, 4, 3, 2), np.dtype(np.float32)))
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


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Numbers that a rule makes of its inputs, which are by role."""

    rule: Rule
    inputs: Mapping[str, Array]
    info: ArrayInfo


Array = Stored | Constant | Joined | Cut | Computed


class Rule(Protocol):
    """How to compute an array box by box."""

    @property
    def elementwise(self) -> Sequence[str]:
        """The inputs that have, for each element of the result, the element at its place."""
        ...

    @abstractmethod
    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of each input, by role, that a box of the result needs."""
        ...

    @abstractmethod
    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The elements of `box`, from the elements of just those boxes of the inputs."""
        ...


def joined(name: str, layout: ParamLayout, keys: Sequence[str], inputs: Sequence[Array]) -> Array:
    """The parameter `name`, whose shards are `inputs`, called `keys`; one whole shard is itself.

    Raises LayoutError, naming the parameter and its shards, where shapes or dtypes do not fit.
    """
    if len(inputs) != len(layout.shards):
        raise LayoutError(
            f"{name}: the layout has {len(layout.shards)} shards, but {len(keys)} are named: {keys}"
        )
    for key, array, shape in zip(keys, inputs, layout.shards, strict=True):
        if array.info.shape != shape:
            raise LayoutError(
                f"{name}: {key} was declared with shape {shape}, but has {array.info.shape}"
            )
    dtypes = {key: array.info.dtype for key, array in zip(keys, inputs, strict=True)}
    if len({*dtypes.values()}) != 1:
        raise LayoutError(f"{name}: the shards differ in dtype: {dtypes}")
    try:
        layout.check()
    except LayoutError as error:
        raise LayoutError(f"{name}: {error} (shards: {', '.join(keys)})") from None
    if layout.is_one_shard:
        return inputs[0]
    return Joined(layout, tuple(inputs), ArrayInfo(layout.shape, inputs[0].info.dtype))


def stored(array: Array) -> Iterator[Stored]:
    """The stored arrays that an array is made of."""
    match array:
        case Stored():
            yield array
        case Cut(whole):
            yield from stored(whole)
        case Joined(inputs=inputs):
            yield from itertools.chain.from_iterable(map(stored, inputs))
        case Computed(inputs=inputs):
            yield from itertools.chain.from_iterable(map(stored, inputs.values()))


def flat_boxes(array: Array, range: Box) -> list[Box]:
    """The boxes of an array that hold a range of its row-major elements, in their order."""
    return range_boxes(array.info.shape, range.start[0], range.stop[0])


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
