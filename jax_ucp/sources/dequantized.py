"""Weights that are stored as codes and scales, seen as the numbers that they stand for.

A scheme is a `Dequantizer`: for a box of the weight it says with integers alone which box of which
part is needed, and it makes numbers of exactly those parts. Everything else is here and the same
for all: what is read, that it is read once, that scales are numbers, and that the result is rounded
once.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jax_ucp.errors import CorruptData
from jax_ucp.layout.blocks import grid_boxes, rows_of_chunks
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.sources.protocol import ArrayInfo, ArraySource, Piece
from jax_ucp.sources.rounding import round_into
from jax_ucp.sources.watched import Watched

# The sides of what is computed at once: as float32 it fits the caches of a core, and it is square,
# so that neither order of inputs and outputs reads or writes single elements.
PIECE_SIDE = 512


@dataclass(frozen=True, slots=True)
class Part:
    """A stored array that a weight is made of.

    `shape` is what it is read as: that of the array, or the rows in which a flat one is cut.
    `valid(elements)` says of each element whether it can be meant, and `why` what it should be.
    """

    array: str
    shape: tuple[int, ...]
    valid: Callable[[np.ndarray], np.ndarray] | None = None
    why: str = ""


class Dequantizer(Protocol):
    """How one weight is made of its parts.

    `shape` is that of the weight, and `scheme` is what the method is called. `parts` are by role,
    which `boxes` and `values` name them by.
    """

    @property
    def scheme(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def parts(self) -> Mapping[str, Part]: ...

    @abstractmethod
    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of each part that a box of the weight needs. Of a box inside another the boxes
        are inside the other's.
        """
        ...

    @abstractmethod
    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The numbers in a box of the weight as float32 or float64, of just those boxes of the
        parts; the caller rounds them once.
        """
        ...


class DequantizedView(Watched):
    """An `ArraySource` of weights over an `ArraySource` of their parts.

    Arrays that are in no weight stay what they are; `dtypes` are those of weights. A
    box is read part by part: what several boxes need of one part is asked for together, and what is
    the same for them once.
    """

    def __init__(
        self,
        source: ArraySource,
        weights: Mapping[str, Dequantizer],
        others: Mapping[str, str],
        dtypes: np.dtype | Mapping[str, np.dtype],
    ):
        super().__init__()
        self._source, self._weights, self._others = source, weights, others
        stored = source.arrays()
        self._flat = {
            part.array: stored[part.array].shape
            for weight in weights.values()
            for part in weight.parts.values()
            if stored[part.array].shape != part.shape
        }
        self._dtypes = {key: info.dtype for key, info in stored.items()}
        self._arrays = {name: stored[array] for name, array in others.items()}
        for name, weight in weights.items():
            dtype = dtypes[name] if isinstance(dtypes, Mapping) else dtypes
            self._arrays[name] = ArrayInfo(weight.shape, dtype)

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read each box into its array. Raises CorruptData for a scale that is none."""
        if key in self._others:
            self._source.read_into(self._others[key], boxes, outs)
        else:
            self._dequantize(key, boxes, outs)
        self._show(key, boxes, outs)

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        """Which blocks of which files hold the parts that a box needs."""
        if key in self._others:
            yield from self._source.locate(self._others[key], box)
            return
        weight = self._weights[key]
        for role, wanted in weight.boxes(box).items():
            part = weight.parts[role]
            for stored in self._stored_boxes(part, wanted):
                for piece in self._source.locate(part.array, stored):
                    yield replace(piece, target=box, rule=f"{role} of {weight.scheme}")

    def users(self) -> dict[str, set[str]]:
        """By the name of an array of the source, the arrays here that are made of it."""
        users: dict[str, set[str]] = {array: {name} for name, array in self._others.items()}
        for name, weight in self._weights.items():
            for part in weight.parts.values():
                users.setdefault(part.array, set()).add(name)
        return users

    def _dequantize(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        weight = self._weights[key]
        wanted = [weight.boxes(box) for box in boxes]
        read = {role: self._read(key, role, [w[role] for w in wanted]) for role in weight.parts}
        # A number beyond all of the dtype is infinite, as the libraries have it.
        with np.errstate(over="ignore", invalid="ignore"):
            for box, out, parts in zip(boxes, outs, wanted, strict=True):
                here = {role: (parts[role], read[role][parts[role]]) for role in parts}
                _compute(weight, box, here, out)

    def _read(self, key: str, role: str, wanted: Sequence[Box]) -> dict[Box, np.ndarray]:
        """The elements of each of some boxes of a part, each of which is read once."""
        part = self._weights[key].parts[role]
        dtype = self._dtypes[part.array]
        arrays = {box: np.empty(box.shape, dtype) for box in dict.fromkeys(wanted)}
        boxes: list[Box] = []
        outs: list[np.ndarray] = []
        for box, array in arrays.items():
            stored = list(self._stored_boxes(part, box))
            boxes += stored
            outs += _cut(array, stored)
        self._source.read_into(part.array, boxes, outs)
        for box, array in arrays.items():
            _require_valid(key, part, box, array)
        return arrays

    def _stored_boxes(self, part: Part, box: Box) -> Iterable[Box]:
        """The boxes of an array that hold a box of a part, in its order."""
        if part.array not in self._flat:
            return [box]
        return flat_boxes(self._flat[part.array], part.shape, box)


def _compute(
    weight: Dequantizer, box: Box, parts: Mapping[str, tuple[Box, np.ndarray]], out: np.ndarray
) -> None:
    """Make the numbers of a box, of the boxes of its parts, piece by piece."""
    for piece in _pieces(box.shape):
        place = piece.shift(box.start)
        needed: dict[str, np.ndarray] = {}
        for role, wanted in weight.boxes(place).items():
            around, elements = parts[role]
            needed[role] = elements[wanted.relative_to(around).index]
        round_into(out[(*piece.index, ...)], weight.values(place, needed))


def _pieces(shape: Sequence[int]) -> Iterator[Box]:
    sides = [1] * (len(shape) - 2) + [min(PIECE_SIDE, n) for n in shape[-2:]]
    return grid_boxes(shape, rows_of_chunks(shape, sides, 1, PIECE_SIDE**2))


def flat_boxes(stored: Sequence[int], shape: Sequence[int], box: Box) -> list[Box]:
    """The boxes of an array that hold a box of the same elements in another shape, in its order.

    >>> [str(box) for box in flat_boxes((12, 1), (3, 4), Box((1, 1), (3, 3)))]
    ['[5:7, 0:1]', '[9:11, 0:1]']
    >>> [str(box) for box in flat_boxes((12, 1), (3, 4), Box((1, 0), (3, 4)))]
    ['[4:12, 0:1]']
    """
    axis = box.ndim - 1  # the last one that the box does not have all of
    while axis > 0 and box.shape[axis] == shape[axis]:
        axis -= 1
    if axis < 0:
        return range_boxes(stored, 0, 1)
    strides = [math.prod(shape[i + 1 :]) for i in range(box.ndim)]
    leading = [range(a, b) for a, b in zip(box.start[:axis], box.stop[:axis], strict=True)]
    boxes: list[Box] = []
    for index in itertools.product(*leading):
        origin = sum(i * stride for i, stride in zip(index, strides[:axis], strict=True))
        start, stop = (origin + edge[axis] * strides[axis] for edge in (box.start, box.stop))
        boxes += range_boxes(stored, start, stop)
    return boxes


def _cut(array: np.ndarray, boxes: Sequence[Box]) -> list[np.ndarray]:
    """The memory of an array, in row-major order, as arrays of boxes that fill it."""
    if len(boxes) == 1:
        return [array.reshape(boxes[0].shape)]
    flat, outs, end = array.reshape(-1), [], 0
    for box in boxes:
        outs.append(flat[end : end + box.size].reshape(box.shape))
        end += box.size
    return outs


def _require_valid(key: str, part: Part, box: Box, array: np.ndarray) -> None:
    if part.valid is None:
        return
    with np.errstate(invalid="ignore"):  # a NaN of eight bits
        valid = part.valid(array)
    if valid.all():
        return
    at = tuple(int(i) for i in np.argwhere(~valid)[0])
    place = [int(i + start) for i, start in zip(at, box.start, strict=True)]
    raise CorruptData(f"{key}: {part.array} has {array[at]} at {place}, which should be {part.why}")
