"""Array expressions, read box by box."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment
from jax_ucp.sources.consolidated import same_bits
from jax_ucp.sources.protocol import ArrayInfo, ArraySource, Piece
from jax_ucp.sources.value import Array, Computed, Constant, Cut, Joined, Stored, flat_boxes
from jax_ucp.sources.watched import Look, Watched, Watching

# Of the result of a rule so many bytes are computed at once; indices may take eight times that.
_COMPUTED_BYTES = 4 << 20

Reads = list[tuple[Box, np.ndarray]]


class Reader:
    """Reads array expressions over the stored arrays of `files`.

    Whoever watches an expression sees all boxes that are read of it, also by the expressions that
    it is an input of.
    """

    def __init__(self, files: ArraySource):
        self._files = files
        self._looks: dict[int, dict[Look, int]] = {}  # by the identity of an array

    def watch(self, array: Array, look: Look) -> AbstractContextManager[None]:
        """Call `look` with what is read of an array, as `Watched.watch` does."""
        return Watching(self._looks, id(array), look)

    def read(self, array: Array, box: Box) -> np.ndarray:
        """The elements of `box`, in the shape of the box: memory of the caller's own."""
        if isinstance(array, Stored) and id(array) not in self._looks:
            return self._files.read(array.item, box)
        out = np.empty(box.shape, array.info.dtype)
        self.read_into(array, [box], [out])
        return out

    def read_into(self, array: Array, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read each box into its memory, of any strides; what several boxes want is read once."""
        match array:
            case Stored(item):
                self._files.read_into(item, boxes, outs)
            case Constant(value):
                for box, out in zip(boxes, outs, strict=True):
                    out[...] = value[box.index]
            case Joined():
                self._join(array, boxes, outs)
            case Cut(transposed=False):
                self._cut(array, boxes, outs)
            case Cut():
                turned = [Box(box.start[::-1], box.stop[::-1]) for box in boxes]
                self._cut(array, turned, [out.T for out in outs])
            case Computed():
                for box, out in zip(boxes, outs, strict=True):
                    self._compute(array, box, out)
        for look in self._looks.get(id(array), ()):
            look(boxes, outs)

    def _join(self, array: Joined, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read the parts of all inputs: every input is asked once for all that is wanted of it."""
        reads: dict[int, Reads] = defaultdict(list)
        for box, out in zip(boxes, outs, strict=True):
            for replicas in array.layout.narrow(box):
                first, hit = replicas[0], _hit(replicas[0], box)
                block = out if hit == box else out[(*hit.relative_to(box).index, ...)]
                if array.layout.averaged:
                    block[...] = _mean([self._fragment(array, one, hit) for one in replicas])
                elif (place := _place(first, hit, block)) is not None:
                    reads[first.shard].append((first.source, place))
                else:
                    block[...] = self._fragment(array, first, hit)
        for shard, wanted in reads.items():
            sources, places = zip(*wanted, strict=True)
            self.read_into(array.inputs[shard], sources, places)

    def _fragment(self, array: Joined, fragment: Fragment, box: Box) -> np.ndarray:
        """The elements of `box`, which one fragment has."""
        narrow = fragment.narrow(box)
        assert narrow is not None, "only a fragment that has elements is asked for them"
        data = self.read(array.inputs[fragment.shard], narrow.source)
        return data.reshape(narrow.target.shape)[box.relative_to(narrow.target).index]

    def _cut(self, array: Cut, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read boxes of what is cut out, not transposed."""
        if (place := array.place) is not None:
            one = (np.newaxis,) * len(place)
            inside = [
                Box((*place, *box.start), (*(i + 1 for i in place), *box.stop)) for box in boxes
            ]
            self.read_into(array.whole, inside, [out[*one, ...] for out in outs])
            return
        reads: Reads = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for box, out in zip(boxes, outs, strict=True):
            if (narrow := array.fragment.narrow(box)) is None:
                continue
            run = _place(narrow, box, out)
            if run is None:
                run = np.empty(narrow.source.size, out.dtype)
                whole_rows = run.reshape(narrow.target.shape)
                copies.append((out, whole_rows[box.relative_to(narrow.target).index]))
            reads += _split(run, flat_boxes(array.whole, narrow.source))
        self.read_into(array.whole, [box for box, _ in reads], [out for _, out in reads])
        for out, elements in copies:
            out[...] = elements

    def _compute(self, array: Computed, box: Box, out: np.ndarray) -> None:
        for rows in row_boxes(box.shape, out.itemsize, _COMPUTED_BYTES):
            block = rows.shift(box.start)
            needed = array.rule.boxes(block)
            parts = {role: self.read(array.inputs[role], part) for role, part in needed.items()}
            out[rows.index] = array.rule.values(block, parts)

    def unequal_replicas(self, array: Array, box: Box, data: np.ndarray) -> Box | None:
        """The first block of which another copy differs in any bit from `data`, read of `box`."""
        if not isinstance(array, Joined) or array.layout.averaged:
            return None
        for replicas in array.layout.narrow(box):
            hit = _hit(replicas[0], box)
            first = data[hit.relative_to(box).index]
            if not all(same_bits(first, self._fragment(array, r, hit)) for r in replicas[1:]):
                return hit
        return None

    def locate(self, array: Array, box: Box) -> Iterator[Piece]:
        """The blocks of files that hold a box of an array, every copy of them."""
        match array:
            case Stored(item):
                yield from self._files.locate(item, box)
            case Constant(where=where):
                file, _, item = where.partition(":")
                yield Piece(file, item, Box((), ()), Box((), ()))
            case Cut():
                for part in array.pieces(box):
                    for piece in self.locate(array.whole, part.source):
                        yield replace(piece, target=part.target)
            case Computed():
                for role in array.rule.elementwise:
                    yield from self.locate(array.inputs[role], box)
            case Joined():
                for outer in _pieces(array, box):
                    for inner in self.locate(array.inputs[outer.shard], outer.source):
                        for part in _through(Fragment(0, inner.source, inner.target), outer):
                            yield replace(inner, source=part.source, target=part.target)


class Evaluated(Watched):
    """Array expressions by name, as an `ArraySource`."""

    def __init__(self, reader: Reader, values: Mapping[str, Array]):
        self._reader, self._values = reader, values
        self._arrays = {name: value.info for name, value in values.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def watch(self, key: str, look: Look) -> AbstractContextManager[None]:
        return self._reader.watch(self._values[key], look)

    def read(self, key: str, box: Box) -> np.ndarray:
        return self._reader.read(self._values[key], box)

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        self._reader.read_into(self._values[key], boxes, outs)

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        yield from self._reader.locate(self._values[key], box)

    def tiles(self, key: str) -> Sequence[Box]:
        """The blocks of an array that are each made of one stored array."""
        array = self._values[key]
        return list(dict.fromkeys(_tiles(array, Box.whole(array.info.shape))))

    def unequal_replicas(self, key: str, box: Box, data: np.ndarray) -> Box | None:
        """The first block of which another copy differs in any bit from `data`, read of `box`."""
        return self._reader.unequal_replicas(self._values[key], box, data)


def _tiles(array: Array, box: Box) -> Iterator[Box]:
    if not isinstance(array, Joined):
        yield box
        return
    for outer in _pieces(array, box):
        for tile in _tiles(array.inputs[outer.shard], outer.source):
            yield from (part.target for part in _through(Fragment(0, tile, tile), outer))


def _pieces(array: Joined, box: Box) -> Iterator[Fragment]:
    """What every fragment, each replica too, has of a box."""
    for fragment in array.layout.fragments:
        yield from fragment.pieces(box)


def _through(inner: Fragment, outer: Fragment) -> Iterator[Fragment]:
    """The elements of an input's fragment in what it is joined into; `outer` places the input.

    Of a flat input they are a range, which may be several boxes of the result.
    """
    if not outer.is_flat:
        by = [t - s for s, t in zip(outer.source.start, outer.target.start, strict=True)]
        yield Fragment(inner.shard, inner.source, inner.target.shift(by))
        return
    inside = inner.target.relative_to(outer.source)
    at = inner.source.start[0]
    for box in range_boxes(outer.target.shape, inside.start[0], inside.stop[0]):
        yield Fragment(inner.shard, Box((at,), (at + box.size,)), box.shift(outer.target.start))
        at += box.size


def _hit(fragment: Fragment, box: Box) -> Box:
    """The block of `box` that a fragment has, which `narrow` cut to it."""
    if not fragment.is_flat:
        return fragment.target
    hit = fragment.target.intersect(box)
    assert hit is not None, "narrow() returns fragments that meet the box"
    return hit


def _place(fragment: Fragment, hit: Box, block: np.ndarray) -> np.ndarray | None:
    """The memory that a fragment can be read into; None where it does not fill the block as it
    is stored.
    """
    if not fragment.is_flat:
        return block
    # A flat shard gives whole rows, of which some elements may be wanted, and a run of it may have
    # gaps where it goes.
    fills_run = fragment.target == hit and block.flags.c_contiguous
    return block.reshape(-1) if fills_run else None


def _split(run: np.ndarray, boxes: Sequence[Box]) -> Iterator[tuple[Box, np.ndarray]]:
    """Consecutive elements, as the memory of boxes that have them in this order."""
    end = 0
    for box in boxes:
        yield box, run[end : end + box.size].reshape(box.shape)
        end += box.size


def _mean(copies: Sequence[np.ndarray]) -> np.ndarray:
    # DeepSpeed's order and precision: the copies are summed as they are stored, then divided
    # (`sum(slices) / len(slices)`, merge_tp_slices in deepspeed/checkpoint/ds_to_universal.py).
    return sum(copies[1:], copies[0]) / np.asarray(len(copies), copies[0].dtype)
