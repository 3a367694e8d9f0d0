"""The one reader of array expressions, box by box."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.gather import aligned_arrays
from jax_ucp.arrays.protocol import BLOCK_BYTES, ArrayInfo, ArraySource, Piece
from jax_ucp.arrays.rounding import round_into
from jax_ucp.arrays.value import (
    Array,
    Computed,
    Constant,
    Cut,
    Joined,
    Rearranged,
    Rule,
    Stored,
    stored,
)
from jax_ucp.arrays.watched import watchers
from jax_ucp.files.copying import copy_into
from jax_ucp.layout.blocks import grid_boxes, rows_of_chunks
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment
from jax_ucp.layout.strided import MOST_READ, Part, PartStep, Place, hull, strides

# The sides of what a rule computes at once: as float32 it fits the caches of a core, and it is
# square, so that neither order of inputs and outputs reads or writes single elements.
PIECE_SIDE = 512

# Boxes of one array with the memory of each; memory to fill with elements; and boxes of an array.
Reads = list[tuple[Box, np.ndarray]]
Copies = list[tuple[np.ndarray, np.ndarray]]
Want = tuple[Array, Sequence[Box], Sequence[np.ndarray]]


def read(array: Array, box: Box) -> np.ndarray:
    """The elements of `box`, in the shape of the box: memory of the caller's own."""
    if not watchers(id(array)):
        if isinstance(array, Stored):
            return array.source.read(array.item, box)
        if isinstance(array, Rearranged) and (whole := _in_one_box(array, box)):
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
            case Cut(transposed=False):
                _want_cut(self, array, boxes, outs)
            case Cut():
                turned = [Box(box.start[::-1], box.stop[::-1]) for box in boxes]
                _want_cut(self, array, turned, [out.T for out in outs])
            case Rearranged():
                _want_rearranged(self, array, boxes, outs)
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
        case Cut():
            for part in array.pieces(box):
                for piece in locate(array.whole, part.source):
                    yield replace(piece, target=part.target)
        case Joined():
            for outer in _pieces(array, box):
                for inner in locate(array.inputs[outer.shard], outer.source):
                    for part in _through(Fragment(0, inner.source, inner.target), outer):
                        yield replace(inner, source=part.source, target=part.target)
        case Rearranged():
            yield from _locate_rearranged(array, box)
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
    for replicas in array.layout.narrow(box):
        hit = _hit(replicas[0], box)
        first = data[hit.relative_to(box).index]
        for replica in replicas[1:]:
            rows = read(array.inputs[replica.shard], replica.source)
            inside = hit.relative_to(replica.target).index
            if not same_bits(first, rows.reshape(replica.target.shape)[inside]):
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


def _want_joined(
    reads: _Reads, array: Joined, boxes: Sequence[Box], outs: Sequence[np.ndarray]
) -> None:
    """Want the parts of all inputs; every input is asked once for all that is wanted of it."""
    whole: dict[int, Reads] = defaultdict(list)
    flat: dict[int, list[_FlatBlock]] = defaultdict(list)
    means: list[tuple[np.ndarray, list[np.ndarray]]] = []
    for box, out in zip(boxes, outs, strict=True):
        for replicas in array.layout.narrow(box):
            hit = _hit(replicas[0], box)
            block = out if hit == box else out[(*hit.relative_to(box).index, ...)]
            used, blocks = replicas[:1], [block]
            if array.layout.averaged:
                used, blocks = replicas, [np.empty(hit.shape, out.dtype) for _ in replicas]
                means.append((block, blocks))
            for fragment, part in zip(used, blocks, strict=True):
                if fragment.is_flat:
                    flat[fragment.shard].append(_FlatBlock(fragment, hit, part))
                else:
                    whole[fragment.shard].append((fragment.source, part))
    copies: Copies = []
    for shard, parts in flat.items():
        whole[shard] += _run_reads(parts, copies)
    for shard, wanted in whole.items():
        sources, places = zip(*wanted, strict=True)
        reads.want(array.inputs[shard], sources, places)
    reads.then(partial(_copy_all, copies))
    for block, blocks in means:
        reads.then(partial(_average, block, blocks))


def _want_cut(reads: _Reads, array: Cut, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
    """Want boxes of a cut that is not transposed."""
    if (place := array.place) is not None:
        one = (np.newaxis,) * len(place)
        after = tuple([i + 1 for i in place])
        inside = [Box((*place, *box.start), (*after, *box.stop)) for box in boxes]
        reads.want(array.whole, inside, [out[*one, ...] for out in outs])
        return
    blocks: list[_FlatBlock] = []
    for box, out in zip(boxes, outs, strict=True):
        if (narrow := array.fragment.narrow(box)) is not None:
            blocks.append(_FlatBlock(narrow, box, out))
    copies: Copies = []
    split_reads: Reads = []
    for run, out in _run_reads(blocks, copies):
        of_whole = range_boxes(array.whole.info.shape, run.start[0], run.stop[0])
        split_reads += zip(of_whole, split(out, of_whole), strict=True)
    reads.want(array.whole, [box for box, _ in split_reads], [out for _, out in split_reads])
    reads.then(partial(_copy_all, copies))


@dataclass(frozen=True, slots=True)
class _FlatBlock:
    """Memory for the box `hit`, of which a flat shard has the elements: `fragment` is the run of
    whole rows around them.
    """

    fragment: Fragment
    hit: Box
    out: np.ndarray


def _run_reads(blocks: Sequence[_FlatBlock], copies: Copies) -> Reads:
    """Runs of a flat shard that fill blocks, or memory from which `copies` are then made.

    Blocks of the same rows, such as the columns that several devices want, share one run. Where a
    run would be more than `MOST_READ` times what is wanted of it, each row is read by itself.
    """
    reads: Reads = []
    loose: list[_FlatBlock] = []
    for block in blocks:
        if block.fragment.target == block.hit and block.out.flags.c_contiguous:
            reads.append((block.fragment.source, block.out.reshape(-1)))
        else:
            loose.append(block)
    for run, sharing in _overlapping(loose):
        if run.size > MOST_READ * sum(block.hit.size for block in sharing):
            for block in sharing:
                rows = np.empty(block.hit.shape, block.out.dtype)
                for piece in block.fragment.pieces(block.hit):
                    row = rows[piece.target.relative_to(block.hit).index]
                    reads.append((piece.source, row.reshape(-1)))
                copies.append((block.out, rows))
            continue
        elements = np.empty(run.size, sharing[0].out.dtype)
        reads.append((run, elements))
        for block in sharing:
            source, target = block.fragment.source.relative_to(run), block.fragment.target
            rows = elements[source.index].reshape(target.shape)
            copies.append((block.out, rows[block.hit.relative_to(target).index]))
    return reads


def _overlapping(blocks: Sequence[_FlatBlock]) -> Iterator[tuple[Box, list[_FlatBlock]]]:
    """The ranges that runs of blocks together cover, with the blocks of each."""
    sharing: list[_FlatBlock] = []
    run = Box((0,), (0,))
    for block in sorted(blocks, key=lambda block: block.fragment.source.start):
        source = block.fragment.source
        if sharing and source.start < run.stop:
            run = Box.around([run, source])
            sharing.append(block)
            continue
        if sharing:
            yield run, sharing
        run, sharing = source, [block]
    if sharing:
        yield run, sharing


def _copy_all(copies: Copies) -> None:
    for out, elements in copies:
        copy_into(out, elements)


def _average(out: np.ndarray, copies: Sequence[np.ndarray]) -> None:
    # DeepSpeed's order and precision: the copies are summed as they are stored, then divided
    # (`sum(slices) / len(slices)`, merge_tp_slices in deepspeed/checkpoint/ds_to_universal.py).
    out[...] = sum(copies[1:], copies[0]) / np.asarray(len(copies), copies[0].dtype)


def _want_rearranged(
    reads: _Reads, array: Rearranged, boxes: Sequence[Box], outs: Sequence[np.ndarray]
) -> None:
    """Want boxes straight out of the boxes of the inputs that hold them: at most `MOST_READ` times
    the elements that are wanted, in as few reads as that allows.
    """
    in_place: dict[str, Reads] = defaultdict(list)
    copied: dict[str, list[tuple[Part, PartStep, np.ndarray]]] = defaultdict(list)
    for box, out in zip(boxes, outs, strict=True):
        if array.layout.padding:
            out[...] = np.zeros((), out.dtype)
        for i in sorted(array.index.meeting(box)):
            part = array.layout.parts[i]
            for step in part.steps(box, BLOCK_BYTES // out.itemsize):
                view = out[(*step.target.relative_to(box).index, ...)]
                place = _place_of_step(view, part, step)
                if place is not None:
                    in_place[part.array].append((step.source, place))
                else:
                    copied[part.array].append((part, step, view))
    for name, wanted in in_place.items():
        sources, places = zip(*wanted, strict=True)
        reads.want(array.inputs[name], sources, places)
    for name, steps in copied.items():
        sources = [step.source for _, step, _ in steps]
        for (part, step, view), data in zip(
            steps, _fetched(array.inputs[name], sources), strict=True
        ):
            elements = _strided(data, part.source, step.indices)
            copy_into(_strided(view, part.target, step.indices), elements)


def _fetched(array: Array, boxes: Sequence[Box]) -> Iterable[np.ndarray]:
    """The elements of each box; those of an array in chunks are read together."""
    if array.info.chunk is None:
        return (read(array, box) for box in boxes)
    outs = aligned_arrays([box.shape for box in boxes], array.info.dtype)
    read_into(array, boxes, outs)
    return outs


def _in_one_box(array: Rearranged, box: Box) -> tuple[Array, Box] | None:
    """The input and the box of it that a box consists of, in the same order; None if it is not
    one.
    """
    found = list(array.index.meeting(box))
    if len(found) != 1:
        return None
    part = array.layout.parts[found[0]]
    terms = [run.terms for run in part.target]
    is_in_order = terms == [run.terms for run in part.source] and all(
        len(t) <= 1 and all(stride == 1 for _, stride in t) for t in terms
    )
    if not is_in_order:
        return None
    steps = list(part.steps(box, box.size))
    if [step.target for step in steps] != [box]:
        return None
    return array.inputs[part.array], steps[0].source


def _place_of_step(view: np.ndarray, part: Part, step: PartStep) -> np.ndarray | None:
    """The elements of a step where they go, as an array of the box that they are read from; None if
    there is none.

    That is where all of that box is wanted, and lies so regularly in the target that numpy can give
    it that shape.
    """
    axes = [axis for run in part.source for axis, _ in run.terms]
    try:  # numpy refuses another number of elements, and a shape that would take a copy
        bits = np.reshape(
            _strided(view, part.target, step.indices).transpose(axes), step.source.shape, copy=False
        )
    except ValueError:
        return None
    return bits.view(view.dtype)


def _strided(array: np.ndarray, place: Place, indices: Box) -> np.ndarray:
    """The bits of an array that is the hull of the indices' elements, as just these, with an
    axis for each index.
    """
    # numpy makes no strided views of the 8-bit floats of ml_dtypes; complex128 it does.
    array = array if array.dtype.itemsize > 8 else array.view(f"u{array.dtype.itemsize}")
    steps = [array.strides[dim] * stride for dim, stride in strides(place, indices.ndim)]
    return as_strided(array, indices.shape, steps)


def _locate_rearranged(array: Rearranged, box: Box) -> Iterator[Piece]:
    """Each piece of the inputs, with the smallest block around what it fills of the result; those
    that meet the box.
    """
    for i in sorted(array.index.meeting(box)):
        part = array.layout.parts[i]
        back, whole = part.inverse(part.array), array.inputs[part.array]
        for piece in locate(whole, Box.whole(whole.info.shape)):
            filled = [hull(part.target, indices) for indices in back.inside(piece.target)]
            if filled and (target := Box.around(filled)).intersect(box):
                yield replace(piece, target=target, rule=array.rule)


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
            round_into(out[(*piece.index, ...)], values)


def _tiles(array: Array, box: Box) -> Iterator[Box]:
    if not isinstance(array, Joined):
        yield box
        return
    for outer in _pieces(array, box):
        for tile in _tiles(array.inputs[outer.shard], outer.source):
            yield from (part.target for part in _through(Fragment(0, tile, tile), outer))


def _pieces(array: Joined, box: Box) -> Iterator[Fragment]:
    """The pieces of a box that each fragment holds, replicas included."""
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
