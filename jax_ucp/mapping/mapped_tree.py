"""Contents `{state: {parameter: array}}` with a model's leaves in place of the parameters."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.arrays.checks import Claims, LeafClaim, passed_on
from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.arrays.dtypes import holds_every
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.mapped import Agreed, Agreement, Tied, agreed, scaled
from jax_ucp.arrays.optimizer_groups import (
    Group,
    common_settings,
    groups_of,
    settings_by_parameter,
)
from jax_ucp.arrays.value import Array, Computed, Joined, formed, users
from jax_ucp.errors import LayoutError
from jax_ucp.layout.parts import LeafForm, LeafLayout
from jax_ucp.mapping.states import BUFFER, States, label_of
from jax_ucp.text import listed
from jax_ucp.tree import Key, Leaf, Path, leaf_names


def map_contents(
    contents: Contents,
    states: States,
    forms: Mapping[str, LeafForm],
    skipped: Mapping[str, str],
    notes: list[str],
    source: Mapping[str, Any],
) -> Contents:
    """The contents with the leaves that `forms` describes, at `(state, *name.split("/"))`.

    Leaves of no state stay where they are. A state of the parameter's shape is mapped like the
    parameter. For a state that is one number, such as Adam's step, all parameters that form a leaf
    must agree, and the leaf has that number. `skipped` has the parameters that are left out, with
    the reasons. `source` is the record of origin that the result has.

    Raises LayoutError with every state that has another shape, or that only some of a leaf's
    parameters have.
    """
    stored = expressions(contents.arrays)
    tree = _Tree(states, forms, stored)
    leaves, formed = tree.leaves()
    arrays = Evaluated({name: one.array for name, one in formed.items()})
    infos = arrays.arrays()
    resting: dict[str, set[str]] = defaultdict(set)
    for name, one in formed.items():
        for array in (one.array, *one.tied):
            for stored_name in users({name: array}, stored):
                resting[stored_name].add(name)
    kept = {leaf.path: leaf for leaf in states.others}
    made = [
        replace(kept[path], name=name)
        if path in kept
        else Leaf(path, name, "array", infos[name].shape, infos[name].dtype.name)
        for path, name in leaves.items()
    ]
    made += [leaf for leaf in states.others if not leaf.has_array]
    labels = {leaf.name: leaf.label for leaf in made}

    def claims() -> Iterator[LeafClaim]:
        """The claims of the contents; and that numbers agree, and tied copies are equal."""
        yield from passed_on(contents.claims, resting)
        for name, one in formed.items():
            if isinstance(one.array, Computed) and isinstance(one.array.rule, Agreed):
                yield LeafClaim(Agreement(labels[name], one.array), frozenset([name]))
            if one.tied:
                tied = Tied(labels[name], name, one.tied[0], one.tied, one.names)
                yield LeafClaim(tied, frozenset([name]))

    return replace(
        contents,
        leaves=made,
        arrays=arrays,
        inventory=list(_inventory(contents, tree, skipped)),
        groups=_groups(contents, forms),
        notes=[*contents.notes, *notes, *tree.notes],
        source=source,
        claims=Claims(claims),
    )


@dataclass(frozen=True)
class _Formed:
    """The array of a leaf. If parameters are tied, `tied` are the same leaf formed of each copy, of
    the arrays `names`.
    """

    array: Array
    tied: Sequence[Joined] = ()
    names: Sequence[str] = ()


class _Unmappable(Exception):
    """A state of a leaf cannot be mapped; the message says why."""


class _Tree:
    """The leaves of a mapped checkpoint, and the states that are left out, with the reasons."""

    def __init__(self, states: States, forms: Mapping[str, LeafForm], stored: Mapping[str, Array]):
        self.states = states
        self.stored = stored
        self.forms = forms
        self.notes: list[str] = []
        self.left: dict[str, str] = {}  # label of a state that is in no leaf -> why

    def leaves(self) -> tuple[dict[tuple[Key, ...], str], dict[str, _Formed]]:
        """The names of arrays by the paths of their leaves, and the arrays by name."""
        formed_at: dict[tuple[Key, ...], _Formed] = {}
        faults: list[str] = []
        for state, name in itertools.product(self.states.at, self.forms):
            try:
                formed = self._formed(state, name)
            except _Unmappable as fault:
                faults.append(str(fault))
                continue
            if formed is not None:
                is_buffer = self.forms[name].buffer
                place = (
                    *(BUFFER if is_buffer else state),
                    *(Key("dict", key) for key in name.split("/")),
                )
                formed_at[place] = formed
        if faults:
            raise LayoutError(f"the states of {len(faults)} leaves cannot be mapped:", faults)
        for leaf in filter(lambda leaf: leaf.has_array, self.states.others):
            formed_at[leaf.path] = _Formed(self.stored[leaf.name])
        names = dict(zip(formed_at, leaf_names(list(formed_at)), strict=True))
        return names, {names[path]: formed for path, formed in formed_at.items()}

    def _formed(self, state: Path, name: str) -> _Formed | None:
        """The array of one state of a leaf; None if no parameter has it, or it is left out."""
        form, leaves = self.forms[name], self.states.at[state]
        params = list(filter(leaves.__contains__, form.params))
        if not params:
            return None
        label, of_weights = label_of(state, name), state == self.states.params
        layouts = _complete_layouts(form, params, label)
        if (form.scaled or form.buffer) and not of_weights:
            why = f"{name} is a buffer, which no optimizer changes"
            if not form.buffer:
                why = (
                    f"{name} is scaled: its {label_of(state)} would be that of other values, and"
                    " moments do not scale with them"
                )
            self.left |= {label_of(state, param): why for param in params}
            self.notes.append(f"{label_of(state, name)} is left out: {why}")
            return None
        has_numbers = self._has_numbers(state, params)
        dtypes = {leaves[param].dtype for param in params}
        if len(dtypes) > 1:
            raise _Unmappable(
                f"{label}: its parameters differ in dtype, {', '.join(sorted(dtypes))}"
            )
        dtype = dtypes.pop()
        if has_numbers:
            names = [leaves[param].name for param in params]
            return _Formed(agreed(label, {name: self.stored[name] for name in names}))
        inputs = [[leaves[param].name for param in layout.params] for layout in layouts]
        tied = [
            formed(layout, [self.stored[name] for name in names], form.rule)
            for layout, names in zip(layouts, inputs, strict=True)
        ]
        array: Array = tied[0]
        if of_weights:
            if form.dtype not in ("", dtype):
                is_exact = holds_every(np.dtype(form.dtype), np.dtype(dtype))
                how = "exact" if is_exact else "rounded"
                self.notes.append(f"{name} is cast from {dtype} to {form.dtype}: {how}")
            array = scaled(array, form)
        if len(tied) == 1:
            return _Formed(array)
        return _Formed(array, tied, sorted(itertools.chain.from_iterable(inputs)))

    def _has_numbers(self, state: Path, params: Sequence[str]) -> bool:
        """Whether a state is one number for each parameter, rather than an array of its shape."""
        leaves, wanted = self.states.at[state], self.states.weights
        unlike = [param for param in params if leaves[param].shape != wanted[param].shape]
        all_unlike = len(unlike) == len(params)
        for param in unlike:
            shape = leaves[param].shape
            if shape != () or not all_unlike:
                raise _Unmappable(
                    f"{label_of(state)} of {param} has shape {list(shape)}, the parameter"
                    f" {list(wanted[param].shape)}: only states of the parameter's shape, and"
                    " single numbers, have a place; open with weights_only=True to leave them"
                )
        return all_unlike


def _complete_layouts(form: LeafForm, params: Collection[str], label: str) -> list[LeafLayout]:
    """The layouts of a leaf for which all parameters are present.

    An optimizer has only one of several tied parameters, so that some copies lack the state. Raises
    _Unmappable if no layout is complete.
    """
    layouts = [layout for layout in (form.layout, *form.copies) if {*layout.params} <= {*params}]
    if layouts:
        return layouts
    lacking = sorted({*form.layout.params}.difference(params))
    raise _Unmappable(f"{label}: {next(iter(params))} has this state, but {listed(lacking, 3)} not")


def _groups(contents: Contents, forms: Mapping[str, LeafForm]) -> tuple[Group, ...]:
    """The optimizer's settings for each leaf: those that all its parameters have in common."""
    settings_of = settings_by_parameter(contents.groups)
    agreed: dict[str, dict[str, Any]] = {}
    for leaf, form in forms.items():
        known = [settings_of[param] for param in form.params if param in settings_of]
        agreed[leaf] = common_settings(known or [{}])
    return groups_of(agreed)


def _inventory(contents: Contents, tree: _Tree, skipped: Mapping[str, str]) -> Iterator[Item]:
    """The inventory of the checkpoint, with parameters that the mapping leaves out as skipped.

    A stored item with nothing but such a parameter is marked as skipped. If the item has other
    arrays too, an item is added for the parameter.
    """
    leaves = list(tree.states.labels())
    left = dict(tree.left)
    for state, of_state in tree.states.at.items():
        left |= {label_of(state, name): why for name, why in skipped.items() if name in of_state}
    # by stored item, the label of a left-out state in it; `kept` are the items with other states
    labels: dict[str, str] = {}
    kept: set[str] = set()
    for label, leaf in leaves if left else ():
        items = [f"{piece.file}:{piece.item}" for piece in contents.locate(leaf)]
        if label in left:
            labels |= dict.fromkeys(items, label)
        else:
            kept.update(items)
    accounted: set[str] = set()
    for item in contents.inventory:
        label = None if item.where in kept else labels.get(item.where)
        if label is None:
            yield item
        else:
            accounted.add(label)
            yield replace(item, status="skipped", reason=left[label])
    leaf_of = dict(leaves)
    for label, reason in left.items():
        if label not in accounted:
            leaf = leaf_of[label]
            yield Item(label, f"{leaf.dtype} {list(leaf.shape)}", "skipped", reason)
