"""Where each leaf goes on a new mesh: saved PartitionSpecs, rules, and what had to be given up."""

from __future__ import annotations

import functools
import itertools
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ucp.errors import ShardingWarning
from jax_ucp.layout.fragments import Shape
from jax_ucp.text import fault_lines, visible_lines
from jax_ucp.tree import Axes, Leaf

# (regular expression on the leaf's label, PartitionSpec), or (logical axis name, mesh axes).
Rule = tuple[str, PartitionSpec | Axes]

# Kinds of leaves that go on devices; the others are values of the host program.
ON_DEVICES = ("jax", "array", "prng_key")


@dataclass(frozen=True, slots=True)
class Fit:
    """A PartitionSpec, and in words each way in which it is not the one asked for."""

    spec: tuple[Axes, ...]
    notes: tuple[str, ...] = ()


def fit_spec(spec: Sequence[Axes], shape: Sequence[int], mesh: Mapping[str, int]) -> Fit:
    """The spec on a mesh, without axes that are gone, used twice, or do not divide the shape.

    Of several axes on one dimension the last are dropped first, since those before it still divide.

    >>> fit_spec(("data", "model"), (8, 6), {"data": 4, "model": 4})
    Fit(spec=('data', None), notes=('axis 1 of 6 is not cut over model: 6 does not divide by 4',))
    >>> fit_spec((("replica", "data"),), (8,), {"data": 2}).spec
    ('data',)
    """
    return _fit(tuple(spec), tuple(shape), tuple(mesh.items()))


# Thousands of arrays have few shapes and specs.
@functools.lru_cache(maxsize=1024)
def _fit(spec: tuple[Axes, ...], shape: Shape, axes_of_mesh: tuple[tuple[str, int], ...]) -> Fit:
    if not shape:
        return Fit(())
    mesh = dict(axes_of_mesh)
    notes: list[str] = []
    fitted: list[Axes] = []
    used: set[str] = set()
    for i, (axes, n) in enumerate(zip(spec, shape, strict=False)):
        kept: list[str] = []
        for name in axis_names(axes):
            fault = _misfit(n, kept, name, mesh, used)
            if fault:
                notes.append(f"axis {i} of {n} is not cut over {name}: {fault}")
            else:
                kept.append(name)
                used.add(name)
        fitted.append(tuple(kept) if len(kept) > 1 else next(iter(kept), None))
    for name in itertools.chain.from_iterable(map(axis_names, spec[len(shape) :])):
        notes.append(f"{name} is dropped: the array has only {len(shape)} axes")
    return Fit(tuple(fitted), tuple(notes))


def _misfit(
    n: int, kept: Sequence[str], name: str, mesh: Mapping[str, int], used: Collection[str]
) -> str | None:
    """The reason why an axis of `n` elements, which is cut over the mesh axes `kept`, cannot be cut
    over `name` too, or None; `used` are the mesh axes that any axis of the array is cut over.
    """
    if name not in mesh:
        return "the mesh has no such axis"
    if name in used:
        return "it is already" if name in kept else "another axis is"
    parts = math.prod(mesh[axis] for axis in (*kept, name))
    return f"{n} does not divide by {parts}" if n % parts else None


def check_rules(rules: Sequence[Rule], leaves: Sequence[Leaf] = ()) -> None:
    """Raise ValueError for a rule that is malformed, has a tuple in place of a PartitionSpec, or is
    on a logical axis and must be meant for the label of one of the leaves.
    """
    for rule in rules:
        match rule:
            case (str(pattern), PartitionSpec()):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"the rule {pattern!r} is not a regular expression: {error}"
                    ) from None
            case (str(), None | str()):
                pass
            case (str(), tuple() | list() as axes):
                if not all(isinstance(name, str) for name in axes):
                    raise ValueError(
                        f"the rule {rule!r:.120} has a {type(axes).__name__} where a spec is meant;"
                        f" write {_as_spec(axes)}"
                    )
            case _:
                raise ValueError(
                    f"the rule {rule!r:.120} is not a pair of a regular expression and a"
                    " PartitionSpec, or of a logical axis and mesh axes"
                )
    logical = _logical_names(leaves)
    for name, axes in rules:
        # Rules of a family of models name axes that this one does not have.
        is_plain_name = name.isidentifier() and bool(logical)
        if isinstance(axes, PartitionSpec) or name in logical or is_plain_name:
            continue
        label = _first_label(name, leaves)
        if label is not None:
            raise ValueError(
                f"the rule {(name, axes)!r:.120} is for a logical axis, which no leaf has, but the"
                f" label {label!r} matches it: where a spec is meant, write {_as_spec(axes)}"
            )


def _first_label(pattern: str, leaves: Sequence[Leaf]) -> str | None:
    try:
        search = re.compile(pattern).search
    except re.error:
        return None
    labels = (leaf.label for leaf in leaves if leaf.has_array)
    return next(filter(search, labels), None)


def _as_spec(axes: object) -> str:
    """The PartitionSpec that mesh axes were meant to be, as it is written."""
    names = axes if isinstance(axes, tuple | list) else [axes]
    return f"PartitionSpec({', '.join(map(repr, names)):.120})"


def warn_given_up(notes: Sequence[str], stacklevel: int) -> None:
    """Warn of leaves that are not placed as asked for; `stacklevel` counts from the caller."""
    if notes:
        text = f"the sharding is not what was asked for:{fault_lines(notes)}"
        warnings.warn(visible_lines(text), ShardingWarning, stacklevel=stacklevel + 1)


def unused_rules(rules: Sequence[Rule], leaves: Sequence[Leaf]) -> list[str]:
    """A note on each rule that applies to no leaf."""
    logical = _logical_names(leaves)
    notes: list[str] = []
    for name, spec in rules:
        if not isinstance(spec, PartitionSpec):
            if name not in logical:
                notes.append(
                    f"no leaf has the logical axis {name!r}; a rule on labels has a PartitionSpec"
                )
        elif _first_label(name, leaves) is None:
            notes.append(f"the rule {name!r} matches no leaf")
    return notes


def _logical_names(leaves: Sequence[Leaf]) -> set[str]:
    axes = itertools.chain.from_iterable(leaf.axes or () for leaf in leaves)
    return set(itertools.chain.from_iterable(map(axis_names, axes)))


def axis_names(axes: object) -> tuple[str, ...]:
    """The names in one entry of a spec, of mesh axes or logical ones."""
    if isinstance(axes, tuple | list):
        return tuple(axes)
    return (axes,) if isinstance(axes, str) else ()


def wanted_spec(
    leaf: Leaf, mesh: Mapping[str, int], rules: Sequence[Rule] = ()
) -> tuple[Axes, ...]:
    """The spec asked for: by rules on the label, on logical axes, as saved, by those of its logical
    axes that are axes of the mesh, as Flax means them without rules, or replicated.
    """
    mesh_axes: dict[str, tuple[str, ...]] = {}  # by the first rule on a logical axis
    for pattern, spec in rules:
        if not isinstance(spec, PartitionSpec):
            mesh_axes.setdefault(pattern, axis_names(spec))
        elif re.search(pattern, leaf.label):
            return tuple(None if axes is PartitionSpec.UNCONSTRAINED else axes for axes in spec)
    if mesh_axes and leaf.axes is not None:
        cut_over = [[mesh_axes.get(name, ()) for name in axis_names(axes)] for axes in leaf.axes]
        return tuple(tuple(itertools.chain.from_iterable(names)) or None for names in cut_over)
    if leaf.sharding:
        return leaf.sharding.spec
    return tuple(
        tuple(filter(mesh.__contains__, axis_names(axes))) or None for axes in leaf.axes or ()
    )


def fit_axes(leaf: Leaf, mesh: Mapping[str, int], rules: Sequence[Rule] = ()) -> Fit:
    shape = leaf.shape[:-1] if leaf.kind == "prng_key" else leaf.shape
    return fit_spec(wanted_spec(leaf, mesh, rules), shape, mesh)


def fit_on_host(leaf: Leaf, mesh: Mapping[str, int], rules: Sequence[Rule]) -> Fit:
    """No spec, for an array that stays in the memory of the host; a rule that cuts it is noted."""
    if not leaf.shape or not any(wanted_spec(leaf, mesh, rules)):
        return Fit(())
    note = (
        "a numpy array, which no rule puts on the mesh; give a target with a jax.Array or a"
        " jax.ShapeDtypeStruct in its place"
    )
    return Fit((), (note,))


def fit_leaf(
    leaf: Leaf, mesh: Mesh, rules: Sequence[Rule] = ()
) -> tuple[NamedSharding, tuple[str, ...]]:
    """The sharding of a leaf on `mesh`, and notes of what had to be given up."""
    fit = fit_axes(leaf, dict(mesh.shape), rules)
    return NamedSharding(mesh, PartitionSpec(*fit.spec)), fit.notes
