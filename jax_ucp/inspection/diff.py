"""Differences of two checkpoints, whoever wrote them, array by array."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jax_ucp.arguments import whole_number
from jax_ucp.arrays.budget import DEFAULT_BUDGET, run_bounded, threads
from jax_ucp.arrays.contents import About
from jax_ucp.arrays.optimizer_groups import Group, settings_by_parameter
from jax_ucp.arrays.protocol import BLOCK_BYTES
from jax_ucp.errors import TreeMismatch
from jax_ucp.layout.blocks import run_boxes
from jax_ucp.layout.box import Box
from jax_ucp.text import html_table, visible
from jax_ucp.tree import Leaf

# Memory that a comparison takes for an element, beside the two arrays: two wide numbers and their
# difference.
_WORKING_BYTES = 3 * 16
# The number of elements that are compared at once: the temporary arrays stay in a core's cache, and
# are small enough that the allocator reuses their memory.
_CACHED = 1 << 13


@dataclass(frozen=True, slots=True)
class LeafChange:
    """An array, a value or a setting that differs, in words for both checkpoints."""

    label: str
    first: str
    second: str


@dataclass(frozen=True)
class ElementChange:
    """How the elements of an array differ between two checkpoints.

    Elements of one dtype are equal if all their bits are: NaNs may be equal, and 0.0 and -0.0 are
    not. Of two dtypes they are equal if their values are. `largest` and `relative` are the largest
    difference and the largest one over the larger magnitude, among elements finite in both;
    `cosine` is that of the two arrays as vectors, of the same elements, NaN where one has only
    zeros there, or their squares overflow. `rounded`: the second array is the first one in the
    second's dtype.
    """

    label: str
    elements: int
    changed: int = 0
    largest: float = 0.0
    relative: float = 0.0
    cosine: float = 1.0
    not_finite: tuple[int, int] = (0, 0)
    rounded: bool = False

    @property
    def share(self) -> float:
        """The part of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, repr=False)
class Difference:
    """The differences of two checkpoints; `same` if there are none.

    `missing` are labels that only the first has, `added` those that only the second has;
    `reshaped`, `recast` and `replaced` are leaves of another shape, of another dtype, or that are
    not both arrays or not the same value. `values` are the arrays with changed elements, which are
    not read if `headers_only`. `facts` are differences of the step and the optimizer's settings.
    `equal` counts the leaves in which nothing differs.
    """

    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    reshaped: tuple[LeafChange, ...] = ()
    recast: tuple[LeafChange, ...] = ()
    replaced: tuple[LeafChange, ...] = ()
    values: tuple[ElementChange, ...] = ()
    facts: tuple[LeafChange, ...] = ()
    equal: int = 0
    headers_only: bool = False

    @property
    def same(self) -> bool:
        parts = (self.missing, self.added, self.reshaped, self.recast, self.replaced)
        return not any((*parts, self.values, self.facts))

    def changes(self) -> Iterator[tuple[str, str, str, str]]:
        """Rows for leaves that differ in more than elements: label, kind of change, both sides."""
        for what, several in (
            ("reshaped", self.reshaped),
            ("recast", self.recast),
            ("replaced", self.replaced),
        ):
            yield from ((change.label, what, change.first, change.second) for change in several)
        yield from ((label, "missing", "here", "") for label in self.missing)
        yield from ((label, "added", "", "here") for label in self.added)

    def __repr__(self) -> str:
        parts = {
            "missing": self.missing,
            "added": self.added,
            "of another shape": self.reshaped,
            "of another dtype": self.recast,
            "replaced": self.replaced,
            "with other elements": self.values,
        }
        counts = [f"{len(several)} {what}" for what, several in parts.items() if several]
        if self.facts:
            counts.append("settings: " + visible(", ".join(fact.label for fact in self.facts)))
        return f"<{', '.join(counts) or 'no difference'}; {self.equal} leaves are equal>"

    def _repr_html_(self) -> str:
        rows = [*self.changes()]
        rows += [
            (each.label, "elements", f"{each.changed:,} of {each.elements:,}", "")
            for each in self.values
        ]
        return html_table(repr(self), ("leaf", "what", "first", "second"), rows)


@dataclass(frozen=True)
class Side:
    """A checkpoint that is compared: its leaves, the function that reads them, and its settings."""

    leaves: Sequence[Leaf]
    read: Callable[[Leaf, Box], np.ndarray]
    about: About
    groups: Sequence[Group]

    def by_path(self, only: str | None, rename: Mapping[str, str]) -> dict[_Path, Leaf]:
        """The leaves by renamed path, those in which `only`, a regular expression, is found.

        Raises TreeMismatch for two leaves of one renamed path.
        """
        leaves: dict[_Path, Leaf] = {}
        for leaf in self.leaves:
            path = _renamed(tuple(map(str, leaf.path)), rename)
            if path in leaves:
                label = "/".join(path)
                raise TreeMismatch(
                    f"by rename, {leaves[path].label} and {leaf.label} would both be {label}"
                )
            leaves[path] = leaf
        return {
            path: leaf
            for path, leaf in leaves.items()
            if only is None or re.search(only, "/".join(path))
        }


def difference(
    first: Side,
    second: Side,
    *,
    only: str | None = None,
    rename: Mapping[str, str] | None = None,
    headers: bool = False,
    budget_bytes: int = DEFAULT_BUDGET,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Difference:
    """The differences of two opened checkpoints; the arguments are those of `jax_ucp.diff`."""
    budget_bytes = whole_number("budget_bytes", budget_bytes)
    ours, theirs = first.by_path(only, rename or {}), second.by_path(only, {})
    labels = {path: "/".join(path) for path in ours if path in theirs}
    counts = Counter(labels.values())
    for path, label in labels.items():
        if counts[label] > 1:  # the path itself, where another has its label
            labels[path] = str([*path])
    both = {label: (ours[path], theirs[path]) for path, label in labels.items()}
    values: list[ElementChange] = []
    if not headers:
        values = _compared(first.read, second.read, both, budget_bytes, progress)
    arrays = {
        label: pair for label, pair in both.items() if pair[0].has_array and pair[1].has_array
    }
    reshaped = _changes(arrays, lambda leaf: str(list(leaf.shape)))
    recast = _changes(arrays, lambda leaf: leaf.dtype)
    replaced = _changes(
        both, lambda leaf: "an array" if leaf.has_array else f"{leaf.kind} {leaf.value!r}"
    )
    changed = {change.label for change in (*reshaped, *recast, *replaced)}
    changed |= {each.label for each in values}
    return Difference(
        missing=tuple("/".join(path) for path in ours if path not in theirs),
        added=tuple("/".join(path) for path in theirs if path not in ours),
        reshaped=reshaped,
        recast=recast,
        replaced=replaced,
        values=tuple(values),
        facts=tuple(_facts(first, second)),
        equal=len(both) - len(changed),
        headers_only=headers,
    )


_Path = tuple[str, ...]


def _renamed(path: _Path, rename: Mapping[str, str]) -> _Path:
    """The path with its beginning replaced, if `rename` has it as names with slashes between."""
    for old, new in rename.items():
        begins = tuple(old.split("/"))
        if path[: len(begins)] == begins:
            return *new.split("/"), *path[len(begins) :]
    return path


_Pair = tuple[Leaf, Leaf]


def _changes(both: Mapping[str, _Pair], fact: Callable[[Leaf], str]) -> tuple[LeafChange, ...]:
    """The pairs of leaves for which `fact` gives different texts."""
    facts = ((label, fact(one), fact(other)) for label, (one, other) in both.items())
    return tuple(LeafChange(*each) for each in facts if each[1] != each[2])


def _facts(first: Side, second: Side) -> Iterator[LeafChange]:
    """Differences of the steps, and of the optimizers' settings for parameters of both.

    A setting that differs alike for several parameters is one change; "" where a side lacks it.
    """
    steps = first.about.step, second.about.step
    if None not in steps and steps[0] != steps[1]:
        yield LeafChange("step", *map(str, steps))
    ours, theirs = (settings_by_parameter(side.groups) for side in (first, second))
    both = [name for name in ours if name in theirs]
    names: dict[tuple[str, str, str], list[str]] = {}
    for name in both:
        one, other = ours[name], theirs[name]
        for key in dict.fromkeys((*one, *other)):
            if key not in one or key not in other or one[key] != other[key]:
                first_value, second_value = (
                    str(side[key]) if key in side else "" for side in (one, other)
                )
                names.setdefault((key, first_value, second_value), []).append(name)
    for (key, *values), several in names.items():
        some = several[0] if len(several) == 1 else f"{len(several)}, such as {several[0]}"
        yield LeafChange(key if len(several) == len(both) else f"{key} of {some}", *values)


@dataclass
class _RunningDifference:
    """The difference of two arrays, in the blocks that were compared so far."""

    elements: int
    changed: int = 0
    unrounded: int = 0
    largest: float = 0.0
    relative: float = 0.0
    products: np.ndarray = field(default_factory=lambda: np.zeros(3))  # a.b, a.a, b.b
    not_finite: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Add a flat block of both arrays."""
        if a.size > _CACHED:
            for i in range(0, a.size, _CACHED):
                self.add(a[i : i + _CACHED], b[i : i + _CACHED])
            return
        changed = _changed(a, b)
        count = int(np.count_nonzero(changed))
        if not count and a.dtype == b.dtype:
            wide = _wide(a)
            square = np.vdot(wide, wide).real
            if math.isfinite(square):  # and so are all elements
                self.products += square
                return
        self.changed += count
        if a.dtype != b.dtype:
            self.unrounded += int(np.count_nonzero(_changed(a.astype(b.dtype), b)))
        wide_a, wide_b = _wide(a), _wide(b)
        finite = [np.isfinite(wide) for wide in (wide_a, wide_b)]
        self.not_finite += [int(np.count_nonzero(~each)) for each in finite]
        in_both = finite[0] & finite[1]
        if not in_both.all():
            wide_a, wide_b = wide_a[in_both], wide_b[in_both]
        pairs = ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b))
        self.products += [np.vdot(one, other).real for one, other in pairs]
        if count:
            if a.dtype == b.dtype and a.dtype.kind in "iu":  # subtracted before they are rounded
                distance = np.where(a > b, a - b, b - a).view(f"u{a.dtype.itemsize}")
                distance = distance.astype(np.float64)
            else:
                distance = np.abs(wide_a - wide_b)
            size = np.maximum(np.abs(wide_a), np.abs(wide_b))
            self.largest = max(self.largest, distance.max(initial=0.0))
            relative = np.divide(distance, size, out=np.zeros_like(distance), where=size > 0)
            self.relative = max(self.relative, relative.max(initial=0.0))

    def join(self, part: _RunningDifference) -> None:
        """Add the difference in another part of the arrays."""
        self.changed += part.changed
        self.unrounded += part.unrounded
        self.largest = max(self.largest, part.largest)
        self.relative = max(self.relative, part.relative)
        self.products += part.products
        self.not_finite += part.not_finite

    def change(self, label: str, recast: bool) -> ElementChange:
        """The difference in numbers, of the array `label`; `recast`: the dtypes differ."""
        product, *squares = self.products
        norm = math.sqrt(squares[0]) * math.sqrt(squares[1])
        # the cosine is undefined for arrays of zeros, and if the squares overflow
        is_defined = norm and math.isfinite(norm)
        return ElementChange(
            label,
            self.elements,
            self.changed,
            float(self.largest),
            float(self.relative),
            float(product) / norm if is_defined else math.nan,
            (int(self.not_finite[0]), int(self.not_finite[1])),
            recast and not self.unrounded,
        )


def _changed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A mask of the elements that differ: in a bit if both arrays have one dtype, else in value."""
    if a.dtype != b.dtype:
        exact = a.dtype.kind in "biu" and b.dtype.kind in "biu"
        return a != b if exact else (_wide(a) != _wide(b)) | _is_rounded(a) | _is_rounded(b)
    width = min(8, a.dtype.itemsize)
    shape = (-1, a.dtype.itemsize // width)
    bits = [np.ascontiguousarray(array).view(f"u{width}").reshape(shape) for array in (a, b)]
    return (bits[0] != bits[1]).any(axis=1) if shape[1] > 1 else (bits[0] != bits[1])[:, 0]


def _is_rounded(array: np.ndarray) -> np.ndarray:
    """A mask of the integers that a double cannot represent, nor any other float."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
        return np.zeros(array.size, bool)
    wide = _wide(array)
    fits = wide < 2.0 ** (64 if array.dtype.kind == "u" else 63)
    return ~fits | (np.where(fits, wide, 0).astype(array.dtype) != array)


def _wide(array: np.ndarray) -> np.ndarray:
    """The elements as float64 or complex128, on one axis."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64).ravel()


_Read = Callable[[Leaf, Box], np.ndarray]


def _compared(
    read_first: _Read,
    read_second: _Read,
    both: Mapping[str, _Pair],
    budget_bytes: int,
    progress: Callable[[int], None],
) -> list[ElementChange]:
    """The arrays with changed elements, among those with equal shapes, compared in threads."""
    pairs = {
        label: (one, other)
        for label, (one, other) in both.items()
        if one.has_array and other.has_array and one.shape == other.shape
    }
    sums = {label: _RunningDifference(math.prod(one.shape)) for label, (one, _) in pairs.items()}
    lock = threading.Lock()

    def compare(label: str, pair: _Pair, box: Box) -> None:
        a, b = read_first(pair[0], box), read_second(pair[1], box)
        part = _RunningDifference(box.size)
        part.add(a.ravel(), b.ravel())
        with lock:
            sums[label].join(part)
            progress(a.nbytes)

    run_bounded(
        (
            (cost, partial(compare, label, pair, box))
            for label, pair in pairs.items()
            for box, cost in _blocks(pair, budget_bytes)
        ),
        budget_bytes,
    )
    return [
        sums[label].change(label, one.dtype != other.dtype)
        for label, (one, other) in pairs.items()
        if sums[label].changed
    ]


def _blocks(pair: _Pair, budget_bytes: int) -> Iterator[tuple[Box, int]]:
    """Blocks of both arrays, each with the bytes of memory that comparing it takes."""
    each = sum(np.dtype(leaf.dtype).itemsize for leaf in pair) + _WORKING_BYTES
    most = max(1, min(BLOCK_BYTES, budget_bytes // threads()) // each)
    for box in run_boxes(pair[0].shape, 1, most):
        yield box, box.size * each
