"""Rules of mapped leaves (scales, casts, numbers that must agree), and the proof of tied copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_ucp.arrays.checks import Check, Extent
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.evaluate import read, split
from jax_ucp.arrays.proof import Proof
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.arrays.value import Array, Computed, Joined, Rule
from jax_ucp.errors import CorruptData
from jax_ucp.layout.box import Box
from jax_ucp.layout.parts import LeafForm
from jax_ucp.layout.samples import sample_boxes


@dataclass(frozen=True, slots=True)
class Scaled(Rule):
    """Numbers `x * scale + add`, or with `backwards` `(x - add) / scale`, in the precision of `x`,
    or in fp32 where that is less, rounded once; then cast to `dtype`.
    """

    scale: float
    add: float
    backwards: bool
    dtype: np.dtype

    @property
    def elementwise(self) -> Sequence[str]:
        return ["x"]

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        data = parts["x"]
        if (self.scale, self.add) != (1, 0):
            wide = data.astype(np.promote_types(data.dtype, np.float32))
            scale, add = wide.dtype.type(self.scale), wide.dtype.type(self.add)
            scaled = (wide - add) / scale if self.backwards else wide * scale + add
            data = scaled.astype(data.dtype)
        return data.astype(self.dtype, copy=False)


def scaled(array: Array, form: LeafForm) -> Array:
    """The array with the scale and the dtype of a leaf's form; itself if unchanged."""
    dtype = np.dtype(form.dtype or array.info.dtype)
    if not form.scaled and dtype == array.info.dtype:
        return array
    rule = Scaled(form.scale, form.add, form.backwards, dtype)
    return Computed(rule, {"x": array}, replace(array.info, dtype=dtype))


@dataclass(frozen=True, slots=True)
class Agreed(Rule):
    """Any of several arrays that hold the same bits; `name` is that of the leaf."""

    name: str
    arrays: tuple[str, ...]

    @property
    def elementwise(self) -> Sequence[str]:
        return self.arrays

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The elements. Raises CorruptData where two arrays differ."""
        first = parts[self.arrays[0]]
        for other in self.arrays[1:]:
            if not same_bits(first, parts[other]):
                raise CorruptData(
                    f"{self.name}: {self.arrays[0]} is {first}, but {other} is {parts[other]}; the"
                    " parameters that form one leaf need one value of this state"
                )
        return first


def agreed(name: str, arrays: Mapping[str, Array]) -> Array:
    """The one value that arrays, by name, have; a single one is itself."""
    first = next(iter(arrays.values()))
    if len(arrays) == 1:
        return first
    return Computed(Agreed(name, tuple(arrays)), arrays, first.info)


@dataclass(frozen=True)
class Agreement:
    """The equality of the arrays of which `array` is made."""

    label: str
    array: Array

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterable[Check]:
        return [Check(self.label, leaves, 2 * self.array.info.nbytes, self._fault)]

    def _fault(self) -> str | None:
        try:
            read(self.array, Box.whole(self.array.info.shape))
        except CorruptData as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Tied(Proof):
    """A leaf called `key`, before it is scaled or cast. `tied` are it and its copies, which are the
    same, made of the arrays `names`.
    """

    label: str
    key: str
    array: Array
    tied: Sequence[Joined]
    names: Sequence[str]

    @property
    def infos(self) -> Sequence[ArrayInfo]:
        return [self.array.info] * 2

    def sample(self) -> Sequence[Box]:
        return sample_boxes(*(list(one.layout.replicas) for one in self.tied))

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        """The first box that is not the same in every copy."""
        for box, data in zip(boxes, split(elements, boxes), strict=True):
            for copy in self.tied[1:]:
                if not same_bits(data, read(copy, box)):
                    names = " and ".join(self.names)
                    return (
                        f"{self.key}: {box} differs between {names}, which the mapping says are"
                        " tied"
                    )
        return None
