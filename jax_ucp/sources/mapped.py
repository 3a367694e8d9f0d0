"""Parameters seen as the leaves of a model that names and shapes them otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jax_ucp.errors import CorruptData
from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex
from jax_ucp.layout.samples import sample_boxes
from jax_ucp.layout.strided import LeafForm, LeafLayout, Part, Place, Step, hull, strides
from jax_ucp.sources.checks import Check, Extent
from jax_ucp.sources.consolidated import same_bits
from jax_ucp.sources.gather import read_boxes
from jax_ucp.sources.protocol import BLOCK_BYTES, ArrayInfo, ArraySource, MakesArrays, Piece
from jax_ucp.sources.watched import Proof, Watched, split


@dataclass(frozen=True)
class Formed:
    """A leaf made of arrays of a source: the parts of `form` name them. Where `equal` is given,
    the leaf is any of these arrays, which hold the same bits."""

    form: LeafForm
    equal: Sequence[str] = ()

    @cached_property
    def hulls(self) -> list[Box]:
        """Of each part the smallest block of the leaf around it."""
        return [hull(part.target, Box.whole(part.sizes)) for part in self.form.layout.parts]

    @cached_property
    def index(self) -> BoxIndex:
        return BoxIndex(self.hulls)


class MappedView(Watched, MakesArrays):
    """An `ArraySource` of leaves over an `ArraySource` of parameters.

    A box of a leaf is read straight out of the boxes of the parameters that hold it: at most
    `layout.strided.MOST_READ` times the elements that are wanted, in as few reads as that allows.
    """

    def __init__(self, source: ArraySource, leaves: Mapping[str, Formed]):
        super().__init__()
        self._source, self._leaves = source, leaves
        self._infos = source.arrays()
        self._arrays = {name: self._info(formed) for name, formed in leaves.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read(self, key: str, box: Box) -> np.ndarray:
        """The elements of `box`. Raises CorruptData where arrays that should be equal are not."""
        formed = self._leaves[key]
        if formed.equal:
            return self._agreed(key, formed.equal, box)
        form = formed.form
        data = self.stored(formed, box)
        self._show(key, [box], [data])
        if form.scaled:
            data = _scaled(data, form)
        return data.astype(form.dtype) if form.dtype and data.dtype != form.dtype else data

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read each box into its array. What is no more than moved goes there from where it is
        stored.
        """
        formed = self._leaves[key]
        if (
            formed.equal
            or formed.form.scaled
            or self._arrays[key].dtype != self._stored(formed).dtype
        ):
            super().read_into(key, boxes, outs)
        else:
            self._fill(formed.form.layout, formed.index, boxes, outs)
            self._show(key, boxes, outs)

    def copy_check(self, key: str, label: str, extent: Extent) -> Check | None:
        """That the copies of which a leaf is one are equal; None where it is the only one."""
        formed = self._leaves[key]
        if len(formed.equal) > 1:
            nbytes = 2 * self._arrays[key].nbytes
            return Check(label, frozenset([key]), nbytes, partial(self._unequal, key))
        if formed.equal or not formed.form.copies:
            return None
        copies = [Formed(replace(formed.form, layout=copy)) for copy in formed.form.copies]
        return _Tied(label, self, key, formed, copies).check([key], extent)

    def _unequal(self, key: str) -> str | None:
        try:
            self.read(key, Box.whole(self._arrays[key].shape))
        except CorruptData as error:
            return str(error)
        return None

    def stored(self, formed: Formed, box: Box) -> np.ndarray:
        """The elements of a leaf, or of a copy of it, before they are scaled or cast."""
        return self._gather(formed.form.layout, formed.index, box)

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        """Each piece of the parameters, with the smallest block of the leaf around what it fills of
        it; those that meet the box.
        """
        formed = self._leaves[key]
        for name in formed.equal:
            yield from self._source.locate(name, Box.whole(self._infos[name].shape))
        for part in () if formed.equal else formed.form.layout.parts:
            back = part.inverse(part.array)
            for piece in self._source.locate(part.array, Box.whole(self._infos[part.array].shape)):
                filled = [hull(part.target, indices) for indices in back.inside(piece.target)]
                if filled and (target := Box.around(filled)).intersect(box):
                    yield replace(piece, target=target, rule=formed.form.rule)

    def _info(self, formed: Formed) -> ArrayInfo:
        if formed.equal:
            return self._infos[formed.equal[0]]
        layout = formed.form.layout
        stored = self._stored(formed)
        chunk = None if stored.chunk is None else layout.parts[0].chunk(stored.chunk)
        return ArrayInfo(layout.shape, np.dtype(formed.form.dtype or stored.dtype), chunk)

    def _stored(self, formed: Formed) -> ArrayInfo:
        return self._infos[formed.form.layout.parts[0].array]

    def _agreed(self, key: str, arrays: Sequence[str], box: Box) -> np.ndarray:
        first = self._source.read(arrays[0], box)
        for other in arrays[1:]:
            data = self._source.read(other, box)
            if not same_bits(first, data):
                raise CorruptData(
                    f"{key}: {arrays[0]} is {first}, but {other} is {data}; the parameters that"
                    " form one leaf need one value of this state"
                )
        return first

    def _gather(self, layout: LeafLayout, index: BoxIndex, box: Box) -> np.ndarray:
        parts = [layout.parts[i] for i in sorted(index.meeting(box))]
        dtype = self._infos[layout.parts[0].array].dtype
        if len(parts) == 1 and _in_order(parts[0]):
            steps = list(parts[0].steps(box, box.size))
            if [step.target for step in steps] == [box]:
                return self._source.read(parts[0].array, steps[0].source)
        out = np.empty(box.shape, dtype)
        self._fill(layout, index, [box], [out])
        return out

    def _fill(
        self, layout: LeafLayout, index: BoxIndex, boxes: Sequence[Box], outs: Sequence[np.ndarray]
    ) -> None:
        """Read boxes of a layout into their arrays: of each array of the source, what they want
        of it together.
        """
        in_place: dict[str, list[tuple[Box, np.ndarray]]] = defaultdict(list)
        copied: dict[str, list[tuple[Part, Step, np.ndarray]]] = defaultdict(list)
        for box, out in zip(boxes, outs, strict=True):
            if layout.padding:
                out[...] = np.zeros((), out.dtype)
            for part, step in _steps(layout, index, box, BLOCK_BYTES // out.itemsize):
                view = out[(*step.target.relative_to(box).index, ...)]
                place = _place(view, part, step)
                if place is not None:
                    in_place[part.array].append((step.source, place))
                else:
                    copied[part.array].append((part, step, view))
        for array, reads in in_place.items():
            sources, places = zip(*reads, strict=True)
            self._source.read_into(array, sources, places)
        for array, steps in copied.items():
            for (part, step, view), data in zip(steps, self._fetched(array, steps), strict=True):
                _strided(view, part.target, step.indices)[...] = _strided(
                    data, part.source, step.indices
                )

    def _fetched(
        self, array: str, steps: Sequence[tuple[Part, Step, np.ndarray]]
    ) -> Iterable[np.ndarray]:
        """What each step reads; several boxes of an array in chunks are read together."""
        sources = [step.source for _, step, _ in steps]
        if self._infos[array].chunk is None:
            return (self._source.read(array, source) for source in sources)
        return read_boxes(self._source, array, sources)


@dataclass(frozen=True)
class _Tied(Proof[MappedView]):
    """A leaf of a view as it is stored, of which each of the copies is the same."""

    label: str
    source: MappedView
    key: str
    leaf: Formed
    copies: Sequence[Formed]

    def nbytes(self, extent: Extent) -> int:
        return 2 * self.source.arrays()[self.key].nbytes

    def sample(self) -> Sequence[Box]:
        return sample_boxes(self.leaf.hulls, *(copy.hulls for copy in self.copies))

    def read(self, boxes: Sequence[Box]) -> np.ndarray:
        parts = [self.source.stored(self.leaf, box).reshape(-1) for box in boxes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first box that is not the same in every copy."""
        for box, data in zip(boxes, split(elements, boxes), strict=True):
            for copy in self.copies:
                if not same_bits(data, self.source.stored(copy, box)):
                    parts = *self.leaf.form.layout.parts, *copy.form.layout.parts
                    names = " and ".join(sorted({part.array for part in parts}))
                    return (
                        f"{self.key}: {box} differs between {names}, which the mapping says are"
                        " tied"
                    )
        return None


def _steps(
    layout: LeafLayout, index: BoxIndex, box: Box, max_size: int
) -> Iterator[tuple[Part, Step]]:
    """What to read for a box of a layout: the steps of each part that meets it, of about
    `max_size` elements.
    """
    for i in sorted(index.meeting(box)):
        part = layout.parts[i]
        for step in part.steps(box, max_size):
            yield part, step


def _place(view: np.ndarray, part: Part, step: Step) -> np.ndarray | None:
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


def _in_order(part: Part) -> bool:
    """Whether the elements have the same axes in source and target."""
    terms = [run.terms for run in part.target]
    return terms == [run.terms for run in part.source] and all(
        len(t) <= 1 and all(s == 1 for _, s in t) for t in terms
    )


def _strided(array: np.ndarray, place: Place, indices: Box) -> np.ndarray:
    """The bits of an array that is the hull of the indices' elements, as just these, with an
    axis for each index.
    """
    # numpy makes no strided views of the 8-bit floats of ml_dtypes; complex128 it does.
    array = array if array.dtype.itemsize > 8 else array.view(f"u{array.dtype.itemsize}")
    steps = [array.strides[dim] * stride for dim, stride in strides(place, indices.ndim)]
    return as_strided(array, indices.shape, steps)


def _scaled(data: np.ndarray, form: LeafForm) -> np.ndarray:
    """In the precision of the data, or in fp32 where that is less, rounded once."""
    wide = data.astype(np.promote_types(data.dtype, np.float32))
    scale, add = wide.dtype.type(form.scale), wide.dtype.type(form.add)
    return ((wide - add) / scale if form.backwards else wide * scale + add).astype(data.dtype)
