"""What two checkpoints have that differs, whoever wrote them, array by array."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jax_ucp.arguments import whole_number
from jax_ucp.errors import TreeMismatch
from jax_ucp.layout.blocks import grid_boxes
from jax_ucp.layout.box import Box
from jax_ucp.sources.budget import DEFAULT_BUDGET, run_bounded, threads
from jax_ucp.sources.contents import About
from jax_ucp.sources.optimizer_groups import Group
from jax_ucp.sources.protocol import BLOCK_BYTES
from jax_ucp.tree import Leaf

# What a comparison holds of an element beside what was read: two wide numbers and their difference.
_WORKING_BYTES = 3 * 16
# So many elements are looked at at once: what is made of them stays in a core's cache, and is small
# enough for memory that was used before.
_CACHED = 1 << 13


@dataclass(frozen=True, slots=True)
class Change:
    """An array, or a value, that is something else in the second checkpoint."""

    label: str
    first: str
    second: str


@dataclass(frozen=True)
class Values:
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
        """Changed elements over all."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints; `same` where nothing does.

    `missing` are labels that the first has alone, `added` those that the second has alone. `values`
    are the arrays with changed elements, which was asked unless `headers_only`. `equal` counts the
    arrays, and values without arrays, in which nothing differs.
    """

    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    reshaped: tuple[Change, ...] = ()
    recast: tuple[Change, ...] = ()
    replaced: tuple[Change, ...] = ()
    values: tuple[Values, ...] = ()
    facts: tuple[Change, ...] = ()
    equal: int = 0
    headers_only: bool = False

    @property
    def same(self) -> bool:
        parts = (self.missing, self.added, self.reshaped, self.recast, self.replaced)
        return not any((*parts, self.values, self.facts))


@dataclass(frozen=True)
class Side:
    """One of two checkpoints: its leaves, how a box of one is read, and what it says of itself."""

    leaves: Sequence[Leaf]
    read: Callable[[Leaf, Box], np.ndarray]
    about: About
    groups: Sequence[Group]

    def by_path(self, only: str | None, rename: Mapping[str, str]) -> dict[_Path, Leaf]:
        """The leaves whose labels `only` matches, by their paths, as `rename` has them.

        Raises TreeMismatch where two have one path then.
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
    """What differs between two opened checkpoints; the arguments are those of `jax_ucp.diff`."""
    budget_bytes = whole_number("budget_bytes", budget_bytes)
    ours, theirs = first.by_path(only, rename or {}), second.by_path(only, {})
    labels = _labels(filter(theirs.__contains__, ours))
    both = {label: (ours[path], theirs[path]) for path, label in labels.items()}
    values: list[Values] = []
    if not headers:
        values = _compared(first.read, second.read, both, budget_bytes, progress)
    reshaped, recast = _changes(both, _shape), _changes(both, _dtype)
    replaced = _changes(both, _value)
    changed = {change.label for change in (*reshaped, *recast, *replaced)}
    changed |= {each.label for each in values}
    return Difference(
        missing=_labels_absent(ours, theirs),
        added=_labels_absent(theirs, ours),
        reshaped=reshaped,
        recast=recast,
        replaced=replaced,
        values=tuple(values),
        facts=tuple(_facts(first, second)),
        equal=len(both) - len(changed),
        headers_only=headers,
    )


_Path = tuple[str, ...]


def _labels_absent(paths: Iterable[_Path], other: Container[_Path]) -> tuple[str, ...]:
    """The labels of paths that the other checkpoint lacks."""
    return tuple("/".join(path) for path in paths if path not in other)


def _labels(paths: Iterable[_Path]) -> dict[_Path, str]:
    """A label for each path; the path itself where another has its label."""
    labels = {path: "/".join(path) for path in paths}
    counts = Counter(labels.values())
    return {p: label if counts[label] == 1 else str([*p]) for p, label in labels.items()}


def _renamed(path: _Path, rename: Mapping[str, str]) -> _Path:
    """The path, whose beginning is replaced if `rename` has it, with slashes between names."""
    for old, new in rename.items():
        begins = tuple(old.split("/"))
        if path[: len(begins)] == begins:
            return *new.split("/"), *path[len(begins) :]
    return path


_Pair = tuple[Leaf, Leaf]


def _changes(both: Mapping[str, _Pair], fact: Callable[[Leaf], str | None]) -> tuple[Change, ...]:
    """Pairs of which a fact differs, where both have it."""
    facts = ((label, fact(one), fact(other)) for label, (one, other) in both.items())
    return tuple(
        Change(label, one, other)
        for label, one, other in facts
        if one is not None and other is not None and one != other
    )


def _shape(leaf: Leaf) -> str | None:
    return str(list(leaf.shape)) if leaf.has_array else None


def _dtype(leaf: Leaf) -> str | None:
    return leaf.dtype if leaf.has_array else None


def _value(leaf: Leaf) -> str:
    """What a leaf without an array is; all arrays are alike."""
    return "an array" if leaf.has_array else f"{leaf.kind} {leaf.value!r}"


def _facts(first: Side, second: Side) -> Iterator[Change]:
    """What the checkpoints say of themselves: the step, and what the optimizer was told."""
    steps = first.about.step, second.about.step
    if None not in steps and steps[0] != steps[1]:
        yield Change("step", *map(str, steps))
    yield from _settings_that_differ(*map(_settings_of_params, (first.groups, second.groups)))


_Settings = Mapping[str, Mapping[str, object]]


def _settings_of_params(groups: Sequence[Group]) -> _Settings:
    return {name: group.settings for group in groups for name in group.params}


def _settings_that_differ(ours: _Settings, theirs: _Settings) -> Iterator[Change]:
    """Settings of the optimizer that are something else for a parameter of both; one change for all
    parameters of which it is the same. A setting that one side lacks is "" there.
    """
    both = [name for name in ours if name in theirs]
    names: dict[tuple[str, str, str], list[str]] = {}
    for name in both:
        for change in _changed_settings(ours[name], theirs[name]):
            names.setdefault(change, []).append(name)
    for (key, *values), several in names.items():
        of = "" if len(several) == len(both) else f" of {_some(several)}"
        yield Change(f"{key}{of}", *values)


def _changed_settings(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """The settings of one parameter that differ, with both values; "" where one side lacks it."""
    for key in dict.fromkeys((*one, *other)):
        if key not in one or key not in other or one[key] != other[key]:
            first, second = (str(side[key]) if key in side else "" for side in (one, other))
            yield key, first, second


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)}, such as {names[0]}"


@dataclass
class _Sums:
    """What has been seen of an array so far, by several threads."""

    elements: int
    changed: int = 0
    unrounded: int = 0
    largest: float = 0.0
    relative: float = 0.0
    products: np.ndarray = field(default_factory=lambda: np.zeros(3))  # a.b, a.a, b.b
    not_finite: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Count a block of both arrays, which are in one line."""
        for i in range(0, a.size, _CACHED):
            self._add(a[i : i + _CACHED], b[i : i + _CACHED])

    def _add(self, a: np.ndarray, b: np.ndarray) -> None:
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
        wide_a, wide_b = self._finite(_wide(a), _wide(b))
        pairs = ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b))
        self.products += [np.vdot(one, other).real for one, other in pairs]
        if count:
            apart = _apart(a, b) if _are_integers(a, b) else np.abs(wide_a - wide_b)
            self._add_distances(apart, np.maximum(np.abs(wide_a), np.abs(wide_b)))

    def _finite(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The elements that are finite in both; the others are counted."""
        finite = [np.isfinite(each) for each in (a, b)]
        self.not_finite += [int(np.count_nonzero(~each)) for each in finite]
        both = finite[0] & finite[1]
        return (a, b) if both.all() else (a[both], b[both])

    def _add_distances(self, apart: np.ndarray, size: np.ndarray) -> None:
        """Count how far elements of a magnitude are from one another."""
        self.largest = max(self.largest, apart.max(initial=0.0))
        relative = np.divide(apart, size, out=np.zeros_like(apart), where=size > 0)
        self.relative = max(self.relative, relative.max(initial=0.0))

    def join(self, part: _Sums) -> None:
        """Count what was seen of a part."""
        self.changed += part.changed
        self.unrounded += part.unrounded
        self.largest = max(self.largest, part.largest)
        self.relative = max(self.relative, part.relative)
        self.products += part.products
        self.not_finite += part.not_finite

    def values(self, label: str, recast: bool) -> Values:
        product, *squares = self.products
        norm = math.sqrt(squares[0]) * math.sqrt(squares[1])
        return Values(
            label,
            self.elements,
            self.changed,
            float(self.largest),
            float(self.relative),
            _cosine(float(product), norm),
            (int(self.not_finite[0]), int(self.not_finite[1])),
            recast and not self.unrounded,
        )


def _cosine(product: float, norm: float) -> float:
    """Of two vectors; NaN where one is of zeros, or doubles do not hold the squares of their
    elements.
    """
    return product / norm if norm and math.isfinite(norm) else math.nan


def _changed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which elements differ: in any bit where both have one dtype, in value elsewhere."""
    if a.dtype != b.dtype:
        exact = a.dtype.kind in "biu" and b.dtype.kind in "biu"
        return a != b if exact else (_wide(a) != _wide(b)) | _is_rounded(a) | _is_rounded(b)
    width = min(8, a.dtype.itemsize)
    shape = (-1, a.dtype.itemsize // width)
    bits = [np.ascontiguousarray(array).view(f"u{width}").reshape(shape) for array in (a, b)]
    return (bits[0] != bits[1]).any(axis=1) if shape[1] > 1 else (bits[0] != bits[1])[:, 0]


def _is_rounded(array: np.ndarray) -> np.ndarray:
    """Which elements are integers that no double has, and so no other float either."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
        return np.zeros(array.size, bool)
    wide = _wide(array)
    fits = wide < 2.0 ** (64 if array.dtype.kind == "u" else 63)
    return ~fits | (np.where(fits, wide, 0).astype(array.dtype) != array)


def _are_integers(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.dtype.kind in "iu"


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far integers are from one another, as doubles: subtracted before they are rounded."""
    return np.where(a > b, a - b, b - a).view(f"u{a.dtype.itemsize}").astype(np.float64)


def _wide(array: np.ndarray) -> np.ndarray:
    """The elements as a vector of doubles."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64).ravel()


_Read = Callable[[Leaf, Box], np.ndarray]


def _compared(
    read_first: _Read,
    read_second: _Read,
    both: Mapping[str, _Pair],
    budget_bytes: int,
    progress: Callable[[int], None],
) -> list[Values]:
    """The arrays of one shape with changed elements, compared block by block in threads."""
    pairs = {label: pair for label, pair in both.items() if _are_comparable(pair)}
    sums = {label: _Sums(math.prod(one.shape)) for label, (one, _) in pairs.items()}
    lock = threading.Lock()

    def compare(label: str, pair: _Pair, box: Box) -> None:
        a, b = read_first(pair[0], box), read_second(pair[1], box)
        part = _Sums(box.size)
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
        sums[label].values(label, one.dtype != other.dtype)
        for label, (one, other) in pairs.items()
        if sums[label].changed
    ]


def _are_comparable(pair: _Pair) -> bool:
    """Whether both are arrays of one shape."""
    one, other = pair
    return one.has_array and other.has_array and one.shape == other.shape


def _blocks(pair: _Pair, budget_bytes: int) -> Iterator[tuple[Box, int]]:
    """Blocks of both arrays, each with the bytes that comparing it holds."""
    each = sum(np.dtype(leaf.dtype).itemsize for leaf in pair) + _WORKING_BYTES
    most = max(1, min(BLOCK_BYTES, budget_bytes // threads()) // each)
    for box in grid_boxes(pair[0].shape, _block(pair[0].shape, most)):
        yield box, box.size * each


def _block(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """The shape of blocks of at most so many elements, of whole rows where those are fewer.

    >>> _block((10, 256), 1000), _block((10, 256), 100)
    ((3, 256), (1, 100))
    """
    block = list(shape)
    for axis, length in enumerate(shape):
        block[axis] = max(1, min(length, most // max(1, math.prod(shape[axis + 1 :]))))
        if block[axis] > 1:
            break
    return tuple(block)
