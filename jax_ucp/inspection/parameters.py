"""Lazy arrays and parameters of an opened checkpoint, which notebooks show as tables."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np

from jax_ucp.arrays.contents import Contents, Piece, require_values
from jax_ucp.arrays.proved import ProvedReads
from jax_ucp.layout.box import Box
from jax_ucp.text import html_table, visible
from jax_ucp.tree import Leaf

Index = SupportsIndex | slice | EllipsisType


class LazyArray:
    """The array of one leaf, with shape and dtype, whose elements are read by indexing.

    `array[3, :10]` reads the smallest box around those elements, `numpy.asarray(array)` all. Each
    read is checked as by `Checkpoint.read`. Nothing is cached: elements that are indexed twice are
    read twice.
    """

    def __init__(self, leaf: Leaf, read: Callable[[Leaf, Box], np.ndarray]):
        self._leaf, self._read = leaf, read

    @property
    def shape(self) -> tuple[int, ...]:
        return self._leaf.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._leaf.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self._name} is a scalar, which has no length")
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        """The elements at `index`, as numpy has it. Raises IndexError if they are outside,
        TypeError for an index of another kind than ints, slices and `...`.
        """
        given = index if isinstance(index, tuple) else (index,)
        items = [item for item in given if item is not Ellipsis]
        dots = len(given) - len(items)
        if dots > 1:
            raise IndexError(f"{self._name}: an index has one `...`, not {dots}")
        if len(items) > self.ndim:
            raise IndexError(
                f"{self._name} has {self.ndim} axes, and the index is for {len(items)}"
            )
        # Axes without an index are whole.
        place = next((i for i, item in enumerate(given) if item is Ellipsis), len(items))
        whole = [slice(None)] * (self.ndim - len(items))
        axes: list[Any] = [*items[:place], *whole, *items[place:]]
        spans = [_span(item, n, self._name) for item, n in zip(axes, self.shape, strict=True)]
        box = Box(*zip(*spans, strict=True)) if spans else Box((), ())
        inside: list[Any] = []  # the index of the same elements in the box that is read
        for item in given:
            step = slice(None, None, item.step) if isinstance(item, slice) else 0
            inside.append(item if item is Ellipsis else step)
        return self._read(self._leaf, box)[tuple(inside)]

    def __array__(
        self, dtype: np.dtype | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """All elements. Raises ValueError for `copy=False`: reading makes an array."""
        if copy is False:
            raise ValueError(f"{self._name} is on disk; copy=False cannot read it")
        values = self._read(self._leaf, Box.whole(self.shape))
        return np.array(values, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"<array {self._name}: {self.dtype} {list(self.shape)}>"

    @property
    def _name(self) -> str:
        return visible(self._leaf.label)


def _span(item: SupportsIndex | slice, n: int, name: str) -> tuple[int, int]:
    """The range of elements of an axis of length `n` that an index selects, as (start, stop).

    >>> _span(slice(None, None, -3), 8, "w")
    (1, 8)
    """
    if isinstance(item, slice):
        selected = range(n)[item]
        ends = sorted((selected[0], selected[-1])) if selected else (0, -1)
        return ends[0], ends[1] + 1
    try:
        if isinstance(item, bool):
            raise TypeError
        i = operator.index(item)
    except TypeError:
        raise TypeError(
            f"{name} is indexed by ints, slices and `...`, not {item!r:.80}; read it with"
            " numpy.asarray first"
        ) from None
    if not -n <= i < n:
        raise IndexError(f"{name}: index {i} is outside an axis of {n} elements")
    return i % n, i % n + 1


@dataclass(frozen=True, repr=False)
class Parameter:
    """A parameter of an imported checkpoint, and its states (`param`, `exp_avg`, ...)."""

    name: str
    states: Mapping[str, Leaf]
    contents: Contents
    reads: ProvedReads

    @property
    def shape(self) -> tuple[int, ...]:
        return self.states["param"].shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.states["param"].dtype)

    def where(self, state: str = "param") -> Sequence[Piece]:
        return self.contents.locate(self.states[state])

    def read(self, state: str = "param", box: Box | None = None) -> np.ndarray:
        """The array of a state, or a box of it, after the same check as by `Checkpoint.read`."""
        leaf = self.states[state]
        require_values(self.contents, [leaf])
        return self.reads.read(leaf, box)

    def __repr__(self) -> str:
        return f"<{visible(self.name)}: {self.dtype} {list(self.shape)}, {', '.join(self.states)}>"

    def _repr_html_(self) -> str:
        rows = [
            (state, leaf.dtype, str(list(leaf.shape)), str(piece.target), str(piece))
            for state, leaf in self.states.items()
            for piece in self.contents.locate(leaf)
        ]
        return html_table(self.name, ("state", "dtype", "shape", "block", "is stored in"), rows)


class ParameterTable(dict[str, Parameter]):
    """Parameters by name, in the checkpoint's order."""

    def _repr_html_(self) -> str:
        rows = [
            (p.name, str(p.dtype), str(list(p.shape)), ", ".join(p.states)) for p in self.values()
        ]
        return html_table(
            f"{len(rows)} parameters", ("parameter", "dtype", "shape", "states"), rows
        )
