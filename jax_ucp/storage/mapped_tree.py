"""A checkpoint's tree `{state: {parameter: array}}` with the leaves of a model in place of the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jax_ucp.errors import LayoutError, TreeMismatch
from jax_ucp.layout.box import Box
from jax_ucp.layout.strided import LeafForm, LeafLayout, hull
from jax_ucp.metadata import Group, Key, Leaf, groups_of, leaf_names
from jax_ucp.storage.checks import Check, Extent, passed_on
from jax_ucp.storage.contents import Contents, Item, Piece
from jax_ucp.storage.dtypes import holds_every
from jax_ucp.storage.mapped import Formed, MappedView

FAULTS_SHOWN = 20


def states_of(contents: Contents) -> dict[str, dict[str, Leaf]]:
    """The leaves by state and by the parameter's name: what is below `param`, `exp_avg` and so on.

    Raises TreeMismatch where the tree is no `{state: {parameter: array}}`.
    """
    states: dict[str, dict[str, Leaf]] = defaultdict(dict)
    for leaf in contents.leaves:
        if len(leaf.path) < 2 or not leaf.has_array:
            raise TreeMismatch(f"{contents.path}: {leaf.label} is no array of the state of a parameter")
        name = "/".join(map(str, leaf.path[1:]))
        if name in states[str(leaf.path[0])]:
            raise TreeMismatch(f"{contents.path} has two arrays {leaf.label}")
        states[str(leaf.path[0])][name] = leaf
    if "param" not in states:
        other = f"; {len(states['other'])} are below `other`, and its notes say why" if "other" in states else ""
        raise TreeMismatch(f"{contents.path} has no parameters: a mapping wants them below `param`{other}")
    return dict(states)


def map_contents(
    contents: Contents,
    forms: Mapping[str, LeafForm],
    skipped: Mapping[str, str],
    notes: list[str],
    source: Mapping[str, Any],
) -> Contents:
    """The checkpoint with the leaves that `forms` says, at `(state, *parts of the name between slashes)`.

    A state that has the parameter's shape is mapped as the parameter is. One that is a number, such as Adam's
    step, is that of every parameter that forms the leaf, and they must agree. `skipped` names parameters that
    are left out, with the reason. `source` is what the result says of where it comes from.

    Raises LayoutError with every state that has another shape, or that only some of a leaf's parameters have.
    """
    tree = _Tree(contents, forms)
    leaves, formed = tree.leaves()
    view = MappedView(contents.arrays, formed)
    infos = view.arrays()
    made = [Leaf(path, name, "array", infos[name].shape, infos[name].dtype.name) for path, name in leaves.items()]
    labels = {leaf.name: leaf.label for leaf in made}

    def checks(extent: Extent) -> Iterator[Check]:
        yield from passed_on(contents.checks(extent), _users(formed))
        for name in formed:
            if view.has_copies(name):
                nbytes = 2 * infos[name].nbytes
                yield Check(labels[name], frozenset([name]), nbytes, partial(view.compare_copies, name, extent))

    def where(leaf: Leaf) -> list[Piece]:
        return list(_pieces(contents, tree.by_name, formed[leaf.name]))

    return replace(
        contents,
        leaves=made,
        arrays=view,
        account=list(_account(contents, tree, skipped)),
        groups=_groups(contents, forms),
        notes=[*contents.notes, *notes, *tree.notes],
        source=source,
        checks=checks,
        where=where,
    )


def _users(formed: Mapping[str, Formed]) -> dict[str, set[str]]:
    """By the name of an array, the leaves that are made of it, or of a copy of which it is one."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, leaf in formed.items():
        layouts = () if leaf.equal else (leaf.form.layout, *leaf.form.copies)
        for array in (*leaf.equal, *(part.array for layout in layouts for part in layout.parts)):
            found[array].add(name)
    return found


class _Tree:
    """The leaves of a mapped checkpoint, and what is said of those that are left out."""

    def __init__(self, contents: Contents, forms: Mapping[str, LeafForm]):
        self.states = states_of(contents)
        self.by_name = {leaf.name: leaf for leaf in contents.leaves}
        self.forms = forms
        self.notes: list[str] = []
        self.left: dict[str, str] = {}  # label of a state that is in no leaf -> why
        self.faults: list[str] = []

    def leaves(self) -> tuple[dict[tuple[Key, ...], str], dict[str, Formed]]:
        """Paths with the names of their arrays, and how each array is formed."""
        found: dict[tuple[Key, ...], Formed] = {}
        for state in self.states:
            for name, form in self.forms.items():
                formed = self._formed(state, name, form)
                if formed is not None:
                    found[(Key("dict", state), *(Key("dict", part) for part in name.split("/")))] = formed
        if self.faults:
            more = [f"... and {len(self.faults) - FAULTS_SHOWN} more"] if len(self.faults) > FAULTS_SHOWN else []
            lines = "\n  ".join(self.faults[:FAULTS_SHOWN] + more)
            raise LayoutError(f"the states of {len(self.faults)} leaves cannot be mapped:\n  {lines}")
        names = dict(zip(found, leaf_names(list(found)), strict=True))
        return names, {names[path]: formed for path, formed in found.items()}

    def _formed(self, state: str, name: str, form: LeafForm) -> Formed | None:
        """One state of a leaf; None where none of its parameters has it, or where it does not follow."""
        params, there = self.states["param"], self.states[state]
        have = [param for param in form.params if param in there]
        if not have:
            return None
        # Of tied parameters an optimizer has but one, so the copies that a state has are those it is made of.
        layouts = [layout for layout in (form.layout, *form.copies) if {p.array for p in layout.parts} <= set(have)]
        if not layouts:
            lacking = sorted({part.array for part in form.layout.parts} - set(have))
            some = " and ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
            self.faults.append(f"{state}/{name}: {have[0]} has this state, but {some} not")
            return None
        if form.scaled and state != "param":
            why = f"{name} is scaled: its {state} would be that of other values, and moments do not scale with them"
            self.left |= {f"{state}/{param}": why for param in have}
            self.notes.append(f"{state}/{name} is left out: {why}")
            return None
        others = {p: there[p].shape for p in have if there[p].shape != params[p].shape}
        if others and (len(others) < len(have) or any(shape != () for shape in others.values())):
            p, shape = next((p, shape) for p, shape in others.items() if shape != () or len(others) < len(have))
            self.faults.append(
                f"{state} of {p} has shape {list(shape)}, the parameter {list(params[p].shape)}: only states of the "
                "parameter's shape, and single numbers, have a place; open with weights_only=True to leave them"
            )
            return None
        dtypes = {there[p].dtype for p in have}
        if len(dtypes) > 1:
            self.faults.append(f"{state}/{name}: its parameters differ in dtype, {', '.join(sorted(dtypes))}")
            return None
        if others:
            return Formed(form, [there[p].name for p in have])
        first, *copies = (_renamed(layout, there) for layout in layouts)
        dtype = form.dtype if state == "param" else ""
        if dtype and dtype != (stored := dtypes.pop()):
            how = "exact" if holds_every(np.dtype(dtype), np.dtype(stored)) else "rounded"
            self.notes.append(f"{name} is cast from {stored} to {dtype}: {how}")
        return Formed(replace(form, layout=first, copies=tuple(copies), dtype=dtype))


def _renamed(layout: LeafLayout, leaves: Mapping[str, Leaf]) -> LeafLayout:
    """The layout with the names of arrays in place of those of parameters."""
    return replace(layout, parts=tuple(replace(part, array=leaves[part.array].name) for part in layout.parts))


def _pieces(contents: Contents, leaves: Mapping[str, Leaf], formed: Formed) -> Iterator[Piece]:
    """Where the bytes of a leaf are: for each piece of its parameters the block of the leaf that it fills."""
    if formed.equal:
        for name in formed.equal:
            yield from contents.where(leaves[name])
        return
    stored: dict[str, list[Piece]] = {}
    for part in formed.form.layout.parts:
        if part.array not in stored:
            stored[part.array] = list(contents.where(leaves[part.array]))
        back = part.inverse(part.array)
        for piece in stored[part.array]:
            steps = list(back.inside(piece.target))
            if steps:
                boxes = [hull(part.target, indices) for indices in steps]
                start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
                stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
                yield replace(piece, target=Box(start, stop), rule=formed.form.rule)


def _groups(contents: Contents, forms: Mapping[str, LeafForm]) -> tuple[Group, ...]:
    """What the optimizer was told for each leaf: that in which the parameters that form it agree."""
    said = {name: group.settings for group in contents.groups for name in group.params}
    found: dict[str, dict[str, Any]] = {}
    for leaf, form in forms.items():
        first, *others = [said[param] for param in form.params if param in said] or [{}]
        found[leaf] = {key: v for key, v in first.items() if all(key in o and o[key] == v for o in others)}
    return groups_of(found)


def _account(contents: Contents, tree: _Tree, skipped: Mapping[str, str]) -> Iterator[Item]:
    """The account of the checkpoint, in which parameters that the mapping leaves out are skipped.

    An item that holds nothing else is skipped itself; of others the parameter is an item of its own.
    """
    left = dict(tree.left)
    for state, there in tree.states.items():
        left |= {f"{state}/{name}": reason for name, reason in skipped.items() if name in there}
    kept: set[str] = set()
    gone: dict[str, tuple[str, str]] = {}
    for state, there in tree.states.items():
        for name, leaf in there.items():
            for piece in contents.where(leaf) if left else ():
                if f"{state}/{name}" in left:
                    gone[f"{piece.file}:{piece.item}"] = f"{state}/{name}", left[f"{state}/{name}"]
                else:
                    kept.add(f"{piece.file}:{piece.item}")
    told: set[str] = set()
    for item in contents.account:
        if item.where in gone and item.where not in kept:
            label, reason = gone[item.where]
            told.add(label)
            yield replace(item, fate="skipped", reason=reason)
        else:
            yield item
    for label, reason in left.items():
        if label not in told:
            state, _, name = label.partition("/")
            leaf = tree.states[state][name]
            yield Item(label, f"{leaf.dtype} {list(leaf.shape)}", "skipped", reason)
