"""The one reader of array expressions, box by box."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jax_ucp.arrays.checks import watchers
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.extents import StoredArray
from jax_ucp.arrays.gather import aligned_arrays
from jax_ucp.arrays.protocol import BLOCK_BYTES, ArrayInfo, ArraySource, Piece
from jax_ucp.arrays.rounding import round_into
from jax_ucp.arrays.value import Array, Computed, Constant, Joined, Rule, Stored, stored
from jax_ucp.files.copying import copy_into
from jax_ucp.layout.blocks import grid_boxes, rows_of_chunks
from jax_ucp.layout.box import Box, row_major_strides
from jax_ucp.layout.parts import MOST_READ, Part, Place

# The sides of what a rule computes at once: as float32 it fits the caches of a core, and it is
# square, so that neither order of inputs and outputs reads or writes single elements.
PIECE_SIDE = 512

# Boxes of one array with the memory of each; and those of an array.
Reads = list[tuple[Box, np.ndarray]]
Want = tuple[Array, Sequence[Box], Sequence[np.ndarray]]


def read(array: Array, box: Box) -> np.ndarray:
    """The elements of `box`, in the shape of the box: memory of the caller's own."""
    if not watchers(id(array)):
        if isinstance(array, Stored):
            return array.source.read(array.item, box)
        if isinstance(array, Joined) and (whole := _in_one_box(array, box)):
            return read(*whole)
    out = np.empty(box.shape, array.info.dtype)
    read_into(array, [box], [out])
    return out


def read_into(array: Array, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
    """Read each box into its memory, of any strides; what several boxes want is read once."""
    read_each([(array, boxes, outs)])


def read_each(wants: Sequence[Want]) -> None:
    """Read boxes of several arrays: what lies together is read together."""
    reads = _Reads()
    for array, boxes, outs in wants:
        reads.want(array, boxes, outs)
    reads.run()


class _Reads:
    """Reads of stored arrays, and the actions that wait for them, in order."""

    def __init__(self) -> None:
        self._sources: dict[int, ArraySource] = {}
        self._stored: dict[int, dict[str, tuple[list[Box], list[np.ndarray]]]] = {}
        self._after: list[Callable[[], None]] = []

    def run(self) -> None:
        for key, source in self._sources.items():
            wants = [(item, *boxes_and_outs) for item, boxes_and_outs in self._stored[key].items()]
            source.read_each(wants)
        for action in self._after:
            action()

    def then(self, action: Callable[[], None]) -> None:
        """Run an action when everything that was wanted so far is read."""
        self._after.append(action)

    def want(self, array: Array, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Add what boxes of an array need, down to what is stored."""
        match array:
            case Stored(source, item):
                self._sources[id(source)] = source
                items = self._stored.setdefault(id(source), {})
                all_boxes, all_outs = items.setdefault(item, ([], []))
                all_boxes += boxes
                all_outs += outs
            case Constant(value):
                for box, out in zip(boxes, outs, strict=True):
                    out[...] = value[box.index]
            case Joined():
                _want_joined(self, array, boxes, outs)
            case Computed():
                _want_computed(self, array, boxes, outs)
        for watcher in watchers(id(array)):
            self.then(partial(watcher.see, boxes, outs))


def locate(array: Array, box: Box) -> Iterator[Piece]:
    """The blocks of files that hold a box of an array, every copy of them."""
    match array:
        case Stored(source, item):
            yield from source.locate(item, box)
        case Constant(pieces=pieces):
            yield from pieces
        case Joined():
            yield from _locate_joined(array, box)
        case Computed(rule, inputs):
            for role in rule.elementwise:
                yield from locate(inputs[role], box)
            if rule.scheme:
                for role, wanted in rule.boxes(box).items():
                    for piece in locate(inputs[role], wanted):
                        yield replace(piece, target=box, rule=f"{role} of {rule.scheme}")


def unequal_replicas(array: Array, box: Box, data: np.ndarray) -> Box | None:
    """The first block of which another copy differs in any bit from `data`, read of `box`."""
    if not isinstance(array, Joined) or array.layout.averaged:
        return None
    for first, *others in array.layout.meeting(box):
        if (hit := first.target_box.intersect(box)) is None:
            continue
        wanted = data[hit.relative_to(box).index]
        for replica in others:
            copy = np.empty(hit.shape, data.dtype)
            reads = _Reads()
            _want_steps(reads, array.inputs[replica.input], list(_steps(replica, hit, copy)))
            reads.run()
            if not same_bits(wanted, copy):
                return hit
    return None


def tiles(array: Array) -> Sequence[Box]:
    """The blocks of an array that are each made of one stored array."""
    return list(dict.fromkeys(_tiles(array, Box.whole(array.info.shape))))


class Evaluated(ArraySource):
    """Array expressions by name, as an `ArraySource`."""

    def __init__(self, values: Mapping[str, Array]):
        self.values = values
        self._arrays = {name: value.info for name, value in values.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read(self, key: str, box: Box) -> np.ndarray:
        return read(self.values[key], box)

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        read_into(self.values[key], boxes, outs)

    def lies_in(self, key: str) -> str:
        """The storage unit of the first stored array that an array is made of."""
        first = next(stored(self.values[key]), None)
        return key if first is None else first.source.lies_in(first.item)

    def read_each(self, wants: Sequence[tuple[str, Sequence[Box], Sequence[np.ndarray]]]) -> None:
        read_each([(self.values[key], boxes, outs) for key, boxes, outs in wants])

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        yield from locate(self.values[key], box)


def expressions(source: ArraySource) -> Mapping[str, Array]:
    """The arrays of a source by name, as expressions."""
    if isinstance(source, Evaluated):
        return source.values
    return {name: Stored(source, name, info) for name, info in source.arrays().items()}


def is_in_rows(array: Array) -> bool:
    """Whether the rows of an array follow one another where they are stored, so that blocks of them
    cost no more to read than all at once.
    """
    match array:
        case Stored(source, item, info):
            if info.chunk or info.row:
                return False
            stored = source.stored(item)
            strides = stored.strides if isinstance(stored, StoredArray) else None
            return stored is not None and strides in (None, row_major_strides(info.shape))
        case Constant():
            return True
        case Joined(layout, inputs):
            orders = ((part.source.order, part.target.order) for part in layout.parts)
            return all(a == b for a, b in orders) and all(map(is_in_rows, inputs))
        case Computed(rule, inputs):
            return inputs.keys() <= {*rule.elementwise} and all(map(is_in_rows, inputs.values()))


def elements_of(array: Array, boxes: Sequence[Box]) -> np.ndarray:
    """The elements of the boxes, one box after the other."""
    result = np.empty(sum(box.size for box in boxes), array.info.dtype)
    read_into(array, boxes, split(result, boxes))
    return result


def split(elements: np.ndarray, boxes: Sequence[Box]) -> list[np.ndarray]:
    """The array of each box, where its elements are one box after the other."""
    arrays: list[np.ndarray] = []
    end = 0
    for box in boxes:
        arrays.append(elements[end : end + box.size].reshape(box.shape))
        end += box.size
    return arrays


class _Step(NamedTuple):
    """Memory for the elements of a part with these indices, an axis for each index; `source` is the
    smallest box of the input around them.
    """

    part: Part
    indices: Box
    source: Box
    out: np.ndarray

    def cut(self, boxes: Iterable[Box]) -> Iterator[_Step]:
        """The same for boxes of the indices."""
        for box in boxes:
            out = self.out[box.relative_to(self.indices).index]
            yield _Step(self.part, box, self.part.source.hull(box), out)

    @property
    def place(self) -> np.ndarray | None:
        """The memory as an array of the source box; None if there is none.

        That is where all of that box is wanted, and lies so regularly in memory that numpy can give
        it that shape.
        """
        source = self.part.source
        if source.is_box:
            return self.out
        if self.source.size != self.out.size:
            return None
        try:  # numpy refuses a shape that would take a copy
            return np.reshape(self.out.transpose(source.order), self.source.shape, copy=False)
        except ValueError:
            return None


def _steps(part: Part, box: Box, out: np.ndarray) -> Iterator[_Step]:
    """Where the elements go that a part has of a box."""
    target = part.target_box
    if part.target.is_box and target.within(box):  # all of them, as boxes of thousands of arrays
        view = out if target == box else out[target.relative_to(box).index]
        yield _Step(part, Box.whole(part.sizes), part.source_box, view)
        return
    for indices in part.inside(box):
        target = part.target.hull(indices)
        view = out if target == box else out[target.relative_to(box).index]
        if not part.target.is_box:
            view = _strided(view, part.target, indices)
        yield _Step(part, indices, part.source.hull(indices), view)


def _want_joined(
    reads: _Reads, array: Joined, boxes: Sequence[Box], outs: Sequence[np.ndarray]
) -> None:
    """Want the parts of all inputs; every input is asked once for all that is wanted of it."""
    layout = array.layout
    steps: dict[int, list[_Step]] = defaultdict(list)
    means: list[tuple[np.ndarray, list[np.ndarray]]] = []
    for box, out in zip(boxes, outs, strict=True):
        if layout.padded:
            out[...] = np.zeros((), out.dtype)
        for replicas in layout.meeting(box):
            if not layout.averaged:
                steps[replicas[0].input] += _steps(replicas[0], box, out)
            elif (hit := replicas[0].target_box.intersect(box)) is not None:
                copies = [np.empty(hit.shape, out.dtype) for _ in replicas]
                for part, copy in zip(replicas, copies, strict=True):
                    steps[part.input] += _steps(part, hit, copy)
                means.append((out[hit.relative_to(box).index], copies))
    for number, found in steps.items():
        _want_steps(reads, array.inputs[number], found)
    for out, copies in means:
        reads.then(partial(_average, out, copies))


def _want_steps(reads: _Reads, array: Array, steps: Sequence[_Step]) -> None:
    """Want what steps need of an array: straight into their memory, or boxes from which copies are
    then made.

    Steps of the same rows, such as the columns that several devices want, share one box. Where that
    would be more than `MOST_READ` times what is wanted of it, each reads what is dense enough.
    """
    in_place: Reads = []
    loose: list[_Step] = []
    limit = BLOCK_BYTES // array.info.dtype.itemsize

    def place(step: _Step) -> bool:
        if (out := step.place) is not None:
            in_place.append((step.source, out))
        return out is not None

    for step in steps:
        if place(step):
            continue
        if step.source.size <= limit:
            loose.append(step)
        else:
            loose += step.cut(step.part.slabs(step.indices, limit))
    if in_place:
        reads.want(array, [box for box, _ in in_place], [out for _, out in in_place])
        in_place = []
    if not loose:
        return
    shared: list[tuple[Box, list[_Step]]] = []
    for box, sharing in _overlapping(loose):
        if box.size <= MOST_READ * sum(step.out.size for step in sharing):
            shared.append((box, sharing))
            continue
        dense = (piece for step in sharing for piece in step.cut(step.part.dense(step.indices)))
        shared += [(piece.source, [piece]) for piece in dense if not place(piece)]
    if in_place:
        reads.want(array, [box for box, _ in in_place], [out for _, out in in_place])
    if array.info.chunk is None and sum(box.size for box, _ in shared) > limit:
        for box, sharing in shared:
            _copy_all([(box, sharing)], [read(array, box)])
    elif shared:  # of an array in chunks each is read once for all
        buffers = aligned_arrays([box.shape for box, _ in shared], array.info.dtype)
        reads.want(array, [box for box, _ in shared], buffers)
        reads.then(partial(_copy_all, shared, buffers))


def _overlapping(steps: Sequence[_Step]) -> Iterator[tuple[Box, list[_Step]]]:
    """The boxes that steps together cover in the source, with the steps of each."""
    sharing: list[_Step] = []
    box = Box((), ())
    for step in sorted(steps, key=lambda step: step.source.start):
        if sharing and step.source.meets(box):
            box = Box.around([box, step.source])
            sharing.append(step)
            continue
        if sharing:
            yield box, sharing
        box, sharing = step.source, [step]
    if sharing:
        yield box, sharing


def _copy_all(shared: Iterable[tuple[Box, list[_Step]]], buffers: Iterable[np.ndarray]) -> None:
    """Copy the elements of steps out of the boxes that they share."""
    for (box, sharing), elements in zip(shared, buffers, strict=True):
        for step in sharing:
            inside = elements[step.source.relative_to(box).index]
            copy_into(step.out, _strided(inside, step.part.source, step.indices))


def _average(out: np.ndarray, copies: Sequence[np.ndarray]) -> None:
    # DeepSpeed's order and precision: the copies are summed as they are stored, then divided
    # (`sum(slices) / len(slices)`, merge_tp_slices in deepspeed/checkpoint/ds_to_universal.py).
    out[...] = sum(copies[1:], copies[0]) / np.asarray(len(copies), copies[0].dtype)


def _in_one_box(array: Joined, box: Box) -> tuple[Array, Box] | None:
    """The input and the box of it that a box consists of, in the same order; None if it is not
    one.
    """
    found = [] if array.layout.averaged else array.layout.meeting(box)
    if len(found) != 1:
        return None
    part = found[0][0]
    if not part.source.is_box or not part.target.is_box:
        return None
    for indices in part.inside(box):
        if indices.shape == box.shape:
            return array.inputs[part.input], part.source.hull(indices)
    return None


def _strided(array: np.ndarray, place: Place, indices: Box) -> np.ndarray:
    """The elements of a box of indices, with an axis for each index, of an array that is the
    smallest box around them.
    """
    # numpy makes no strided views of the 8-bit floats of ml_dtypes; complex128 it does.
    bits = array if array.dtype.itemsize > 8 else array.view(f"u{array.dtype.itemsize}")
    steps = [array.strides[axis] * stride for axis, stride in place.steps]
    if bits.flags.c_contiguous:  # of memory without gaps numpy makes it ten times as fast
        return np.ndarray(indices.shape, bits.dtype, bits, 0, steps).view(array.dtype)
    return as_strided(bits, indices.shape, steps).view(array.dtype)


def _locate_joined(array: Joined, box: Box) -> Iterator[Piece]:
    """The pieces of the inputs, in the order of their elements; of a mapped array each has the
    smallest block around what it fills.
    """
    for part in itertools.chain.from_iterable(array.layout.meeting(box)):
        whole = array.inputs[part.input]
        for indices in part.inside(box):
            if not array.rule:
                yield from _located(whole, part, indices)
                continue
            for piece in locate(whole, part.source.hull(indices)):
                if hits := _hits(part.inverse(), piece.target, indices):
                    filled = Box.around(map(part.target.hull, hits))
                    yield replace(piece, target=filled, rule=array.rule)


def _located(whole: Array, part: Part, indices: Box) -> Iterator[Piece]:
    """The pieces of the elements that a part of an input has at a box of indices."""
    for run in part.runs(indices):
        parted = set[Box]()
        box = part.source.hull(run)
        for piece in locate(whole, box):
            hits = [run] if piece.target == box else _hits(part.inverse(), piece.target, run)
            if len(hits) == 1 or piece.rule:
                yield replace(piece, target=Box.around(map(part.target.hull, hits)))
                continue
            if piece.source.shape == piece.target.shape:
                for hit in hits:
                    source = part.source.hull(hit).relative_to(piece.target)
                    source = source.shift(piece.source.start)
                    yield replace(piece, source=source, target=part.target.hull(hit))
                continue
            for hit in set(hits) - parted:  # of what is stored twice, once
                yield from _located(whole, part, hit)
            parted.update(hits)


def _hits(back: Part, box: Box, indices: Box) -> list[Box]:
    """The boxes of these indices whose elements `back` has in a box of its target."""
    hits = (found.intersect(indices) for found in back.inside(box))
    return [hit for hit in hits if hit is not None]


def _want_computed(
    reads: _Reads, array: Computed, boxes: Sequence[Box], outs: Sequence[np.ndarray]
) -> None:
    """Want what all boxes need of each input, the same box once; then compute."""
    wanted = [
        (box, array.rule.boxes(box), out) for box, out in zip(boxes, outs, strict=True) if box.size
    ]
    parts: dict[str, dict[Box, np.ndarray]] = {}
    for role in wanted[0][1] if wanted else ():
        whole = array.inputs[role]
        needed = dict.fromkeys(boxes_by_role[role] for _, boxes_by_role, _ in wanted)
        parts[role] = {box: np.empty(box.shape, whole.info.dtype) for box in needed}
        reads.want(whole, list(parts[role]), list(parts[role].values()))
    for box, boxes_by_role, out in wanted:
        inputs = {role: (inner, parts[role][inner]) for role, inner in boxes_by_role.items()}
        reads.then(partial(_compute, array.rule, box, inputs, out))


def _compute(
    rule: Rule, box: Box, inputs: Mapping[str, tuple[Box, np.ndarray]], out: np.ndarray
) -> None:
    """Make the numbers of a box, of the boxes of its inputs, piece by piece."""
    sides = [1] * (box.ndim - 2) + [min(PIECE_SIDE, n) for n in box.shape[-2:]]
    for piece in grid_boxes(box.shape, rows_of_chunks(box.shape, sides, 1, PIECE_SIDE**2)):
        place = piece.shift(box.start)
        needed: dict[str, np.ndarray] = {}
        for role, wanted in rule.boxes(place).items():
            around, elements = inputs[role]
            needed[role] = elements[wanted.relative_to(around).index]
        values = rule.values(place, needed)
        # A number beyond all of the dtype is infinite, as the libraries have it.
        with np.errstate(over="ignore", invalid="ignore"):
            round_into(out[piece.index], values)


def _tiles(array: Array, box: Box) -> Iterator[Box]:
    if not isinstance(array, Joined):
        yield box
        return
    for part in array.layout.parts:
        back = part.inverse()
        for indices in part.inside(box):
            for tile in _tiles(array.inputs[part.input], part.source.hull(indices)):
                yield from map(part.target.hull, _hits(back, tile, indices))
