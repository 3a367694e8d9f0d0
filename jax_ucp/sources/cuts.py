"""Tensors that lie inside stored ones: a range of a flat buffer, or of the memory of another
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment, ParamLayout
from jax_ucp.sources.consolidated import Consolidated, ConsolidatedView
from jax_ucp.sources.protocol import ArrayInfo, ArraySource, Piece


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements of stored tensor `key`, in row-major order, from `start` on, as an array of
    `shape`.

    With `transposed` the array that is read has the axes of `shape` the other way round.
    """

    key: str
    start: int
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def range(self) -> Box:
        return Box((self.start,), (self.start + math.prod(self.shape),))

    def pieces(self, box: Box) -> Iterator[Fragment]:
        """Where a box of the array lies in the flat tensor: a range for each run of its elements.

        What is transposed has such a run for every column: in both places its elements come in one
        order.
        """
        if self.transposed:
            for part in _lines(Box(box.start[::-1], box.stop[::-1])):
                for run in self._runs(part):
                    yield Fragment(
                        0, run.source, Box(run.target.start[::-1], run.target.stop[::-1])
                    )
        else:
            yield from self._runs(box)

    def _runs(self, box: Box) -> Iterator[Fragment]:
        narrow = Fragment(0, self.range, Box.whole(self.shape)).narrow(box)
        if narrow is not None and narrow.target == box:
            yield narrow
        elif narrow is not None:
            for part in _rows(box, next(axis for axis, n in enumerate(box.shape) if n > 1)):
                yield from self._runs(part)


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


class WithCuts(ArraySource):
    """A source with some more arrays that are cuts of its own."""

    def __init__(self, source: ArraySource, cuts: Mapping[str, Cut]):
        self._source, self._cuts = source, cuts
        infos = source.arrays()
        self._places = {key: _place(cut, infos[cut.key].shape) for key, cut in cuts.items()}
        inside = {key: cut for key, cut in cuts.items() if self._places[key] is None}
        flat = _Flat(source, {cut.key for cut in inside.values()})

        def consolidated(cut: Cut) -> Consolidated:
            fragment = Fragment(0, cut.range, Box.whole(cut.shape))
            return Consolidated(
                ParamLayout(cut.shape, (flat.arrays()[cut.key].shape,), (fragment,)), [cut.key]
            )

        self._view = ConsolidatedView(flat, {key: consolidated(cut) for key, cut in inside.items()})
        self._arrays = {
            **infos,
            **{key: _info(cut, infos[cut.key].dtype) for key, cut in cuts.items()},
        }

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        cut = self._cuts.get(key)
        if cut is None:
            yield from self._source.locate(key, box)
            return
        for part in cut.pieces(box):
            for piece in self._source.locate(cut.key, part.source):
                yield replace(piece, target=part.target)

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        cut = self._cuts.get(key)
        if cut is None:
            self._source.read_into(key, boxes, outs)
            return
        if cut.transposed:
            boxes = [Box(box.start[::-1], box.stop[::-1]) for box in boxes]
            outs = [out.T for out in outs]
        if (place := self._places[key]) is None:
            self._view.read_into(key, boxes, outs)
        else:
            one = (np.newaxis,) * len(place)
            self._source.read_into(
                cut.key,
                [_at(place, box) for box in boxes],
                [out[*one, ...] for out in outs],
            )


def _info(cut: Cut, dtype: np.dtype) -> ArrayInfo:
    return ArrayInfo(cut.shape[::-1] if cut.transposed else cut.shape, dtype)


def _place(cut: Cut, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """The leading indices at which a stored tensor of that shape has the cut, if it is all that
    there is.

    A layer or an expert of several is read so, a part of it too, and no element beside it.

    >>> _place(Cut("w", 12, (3, 2)), (2, 4, 3, 2)), _place(Cut("w", 10, (3, 2)), (2, 4, 3, 2))
    ((0, 2), None)
    """
    depth, size = len(stored) - len(cut.shape), math.prod(cut.shape)
    if (
        depth < 0
        or stored[depth:] != cut.shape
        or not size
        or cut.start % size
        or cut.start >= math.prod(stored)
    ):
        return None
    return tuple(map(int, np.unravel_index(cut.start // size, stored[:depth])))


def _at(place: tuple[int, ...], box: Box) -> Box:
    return Box((*place, *box.start), (*(i + 1 for i in place), *box.stop))


class _Flat(ArraySource):
    """Arrays of a source as their elements in row-major order."""

    def __init__(self, source: ArraySource, keys: set[str]):
        self._source = source
        self._shapes = {key: info.shape for key, info in source.arrays().items() if key in keys}
        infos = source.arrays()
        self._arrays = {
            key: ArrayInfo((math.prod(s),), infos[key].dtype) for key, s in self._shapes.items()
        }

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        parts: list[Box] = []
        places: list[np.ndarray] = []
        for box, out in zip(boxes, outs, strict=True):
            at = 0
            for part in range_boxes(self._shapes[key], box.start[0], box.stop[0]):
                parts.append(part)
                places.append(out[at : at + part.size].reshape(part.shape))
                at += part.size
        self._source.read_into(key, parts, places)
