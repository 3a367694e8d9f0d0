"""Parameters seen as the leaves of a model that names and shapes them otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jax_ucp.errors import CorruptData
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box
from jax_ucp.layout.box_index import BoxIndex
from jax_ucp.layout.strided import LeafForm, LeafLayout, Part, Place, Step, hull, strides
from jax_ucp.storage.consolidated import same_bits
from jax_ucp.storage.gather import BLOCK_BYTES, read_boxes
from jax_ucp.storage.source import ArrayInfo, ArraySource

COMPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Formed:
    """A leaf made of arrays of a source: the parts of `form` name them. Where `equal` is given, the leaf is any
    of these arrays, which hold the same bits."""

    form: LeafForm
    equal: Sequence[str] = ()

    @cached_property
    def index(self) -> BoxIndex:
        parts = self.form.layout.parts
        return BoxIndex([hull(part.target, Box.whole(part.sizes)) for part in parts])


class MappedView:
    """An `ArraySource` of leaves over an `ArraySource` of parameters.

    A box of a leaf is read straight out of the boxes of the parameters that hold it: at most
    `layout.strided.MOST_READ` times the elements that are wanted, in as few reads as that allows.
    """

    def __init__(self, source: ArraySource, leaves: Mapping[str, Formed]):
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
        data = self._gather(form.layout, formed.index, box)
        if form.scaled:
            data = _scaled(data, form)
        return data.astype(form.dtype) if form.dtype and data.dtype != form.dtype else data

    def compare_copies(self, key: str) -> str | None:
        """What differs between the copies of which a leaf is one, if anything does; reads all of each."""
        formed = self._leaves[key]
        info = self._arrays[key]
        if formed.equal:
            try:
                self._agreed(key, formed.equal, Box.whole(info.shape))
            except CorruptData as error:
                return str(error)
        first = formed.form.layout
        for copy in formed.form.copies:
            index = Formed(replace(formed.form, layout=copy)).index
            for box in row_boxes(info.shape, info.dtype.itemsize, COMPARE_BYTES):
                if not same_bits(self._gather(first, formed.index, box), self._gather(copy, index, box)):
                    names = " and ".join(sorted({part.array for part in (*first.parts, *copy.parts)}))
                    return f"{key}: {box} differs between {names}, which the mapping says are tied"
        return None

    def has_copies(self, key: str) -> bool:
        formed = self._leaves[key]
        return len(formed.equal) > 1 or bool(formed.form.copies)

    def _info(self, formed: Formed) -> ArrayInfo:
        if formed.equal:
            return self._infos[formed.equal[0]]
        layout = formed.form.layout
        found = self._infos[layout.parts[0].array]
        chunk = None if found.chunk is None else layout.parts[0].chunk(found.chunk)
        return ArrayInfo(layout.shape, np.dtype(formed.form.dtype or found.dtype), chunk)

    def _agreed(self, key: str, arrays: Sequence[str], box: Box) -> np.ndarray:
        first = self._source.read(arrays[0], box)
        for other in arrays[1:]:
            data = self._source.read(other, box)
            if not same_bits(first, data):
                raise CorruptData(
                    f"{key}: {arrays[0]} is {first}, but {other} is {data}; the parameters that form one leaf need "
                    "one value of this state"
                )
        return first

    def _gather(self, layout: LeafLayout, index: BoxIndex, box: Box) -> np.ndarray:
        parts = [layout.parts[i] for i in sorted(index.meeting(box))]
        dtype = self._infos[layout.parts[0].array].dtype
        if len(parts) == 1 and _in_order(parts[0]):
            steps = list(parts[0].steps(box, box.size))
            if [step.target for step in steps] == [box]:
                return self._source.read(parts[0].array, steps[0].source)
        moves = [(part, step) for part in parts for step in part.steps(box, BLOCK_BYTES // dtype.itemsize)]
        out = np.zeros(box.shape, dtype) if layout.padding else np.empty(box.shape, dtype)
        for part, step, data in self._fetched(moves):
            view = out[step.target.relative_to(box).index]
            _strided(view, part.target, step.indices)[...] = _strided(data, part.source, step.indices)
        return out

    def _fetched(self, moves: Sequence[tuple[Part, Step]]) -> Iterator[tuple[Part, Step, np.ndarray]]:
        """Each step with what it reads; several boxes of an array in chunks are read together."""
        groups: dict[str, list[tuple[Part, Step]]] = {}
        for part, step in moves:
            groups.setdefault(part.array, []).append((part, step))
        for array, group in groups.items():
            if self._infos[array].chunk is None:
                for part, step in group:
                    yield part, step, self._source.read(array, step.source)
            else:
                boxes = read_boxes(self._source, array, [step.source for _, step in group])
                for (part, step), data in zip(group, boxes, strict=True):
                    yield part, step, data


def _in_order(part: Part) -> bool:
    """Whether the elements have the same axes in source and target."""
    terms = [run.terms for run in part.target]
    return terms == [run.terms for run in part.source] and all(len(t) <= 1 and all(s == 1 for _, s in t) for t in terms)


def _strided(array: np.ndarray, place: Place, indices: Box) -> np.ndarray:
    """The bits of an array that is the hull of the indices' elements, as just these, with an axis for each index."""
    # numpy makes no strided views of the 8-bit floats of ml_dtypes; complex128 it does.
    array = array if array.dtype.itemsize > 8 else array.view(f"u{array.dtype.itemsize}")
    steps = [array.strides[dim] * stride for dim, stride in strides(place, indices.ndim)]
    return as_strided(array, indices.shape, steps)


def _scaled(data: np.ndarray, form: LeafForm) -> np.ndarray:
    """In the precision of the data, or in fp32 where that is less, rounded once."""
    wide = data.astype(np.promote_types(data.dtype, np.float32))
    scale, add = wide.dtype.type(form.scale), wide.dtype.type(form.add)
    return ((wide - add) / scale if form.backwards else wide * scale + add).astype(data.dtype)
