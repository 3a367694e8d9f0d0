"""The parameters in a tree, and the optimizer's states that have the same names."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import expressions
from jax_ucp.errors import TreeMismatch
from jax_ucp.tree import Key, Leaf, Path, tree_fault

_MOST_LABELS = 32  # that are tried as the place of the parameters
PARAM: Path = (Key("dict", "param"),)
BUFFER: Path = (Key("dict", "buffer"),)


@dataclass(frozen=True)
class States:
    """The arrays of a tree by the place of a state, and in it by the parameter's name.

    A state is a part of the tree that has the parameters' names, such as the first moments;
    `params` is the place of the parameters. `others` are the leaves of no state.
    """

    params: Path
    at: Mapping[Path, Mapping[str, Leaf]]
    others: Sequence[Leaf] = field(default=())

    @property
    def weights(self) -> Mapping[str, Leaf]:
        return self.at[self.params]

    def with_buffers(self, is_named: Callable[[str], bool]) -> States:
        """The states with the buffers that have these names among the parameters.

        Raises TreeMismatch where a name is that of a parameter too.
        """
        buffers = self.at.get(BUFFER, {})
        named = {name: leaf for name, leaf in buffers.items() if is_named(name)}
        if twice := sorted(named.keys() & self.weights.keys()):
            raise TreeMismatch(f"{twice[0]} is a parameter, and a buffer too: leave one out")
        rest = {name: leaf for name, leaf in buffers.items() if name not in named}
        at = {**self.at, self.params: {**self.weights, **named}, BUFFER: rest}
        return replace(self, at={place: leaves for place, leaves in at.items() if leaves})

    def labels(self) -> Iterator[tuple[str, Leaf]]:
        """Every state of every parameter, by label."""
        for place, leaves in self.at.items():
            yield from ((label_of(place, name), leaf) for name, leaf in leaves.items())


def label_of(place: Path, name: str = "") -> str:
    """The label of a place, or of a parameter's state there."""
    return "/".join([*map(str, place), *([name] if name else [])])


def states_of(contents: Contents, params: str | None = None) -> States:
    """The states of a tree `{state: {parameter: array}}`, or of a training run's tree, in which the
    parameters are below the label `params`: every other part of it that has their names is a state.

    Raises TreeMismatch where the tree is neither.
    """
    if params is None:
        return _imported(contents)
    weights = parameters_at(contents, params)
    below, first = next(iter(weights.values()))
    # the leaves of Flax's variables lie one level deeper
    are_variables = label_of(first.path[: -len(below)]) != params.strip("/")
    place = first.path[: len(first.path) - len(below) - are_variables]
    name_of = {id(leaf): name for name, (_, leaf) in weights.items()}
    states: dict[Path, dict[str, Leaf]] = defaultdict(dict)
    others: list[Leaf] = []
    for leaf in contents.leaves:
        if id(leaf) in name_of:
            states[place][name_of[id(leaf)]] = leaf
            continue
        # the part of the path that is the name of a parameter, the longest that is one
        path = leaf.path[:-1] if are_variables and _is_variable(leaf.path) else leaf.path
        starts = (i for i in range(len(path)) if label_of(path[i:]) in weights)
        if leaf.has_array and (i := next(starts, None)) is not None:
            states[path[:i]][label_of(path[i:])] = leaf
        else:
            others.append(leaf)
    return States(place, dict(states), others)


def top_labels(contents: Contents) -> Sequence[str]:
    """The labels of the tree's first three levels, those that begin with a name like `params`
    first; empty for a tree `{state: {parameter: array}}`.
    """
    paths = [leaf.path for leaf in contents.leaves if leaf.has_array]
    if any(len(path) > 1 and path[0].name == "param" for path in paths):
        return ()
    labels = {
        label_of(path[:depth]): depth for path in paths for depth in (1, 2, 3) if path[depth:]
    }
    ranked = sorted(labels, key=lambda label: ("param" not in label.split("/")[0], labels[label]))
    return ranked[:_MOST_LABELS]


def weights_of(contents: Contents, params: str) -> Contents:
    """Contents with only the parameters of a training run's tree, as `{param: {parameter: array}}`.

    Raises TreeMismatch where there are none below the label `params`.
    """
    at = {
        (*PARAM, *(Key("dict", key) for key in name.split("/"))): leaf
        for name, (_, leaf) in parameters_at(contents, params).items()
    }
    left = len(contents.leaves) - len(at)
    notes = [f"{left} leaves that are not parameters are left out"] if left else []
    return replace(
        _placed(contents, at),
        notes=[*contents.notes, *notes],
        # parts of the tree that have the same names differ only in this
        reading=repr((contents.reading, params)),
    )


def _imported(contents: Contents) -> States:
    """The states of a tree `{state: {parameter: array}}`. Raises TreeMismatch."""
    states: dict[Path, dict[str, Leaf]] = defaultdict(dict)
    for leaf in contents.leaves:
        if len(leaf.path) < 2 or not leaf.has_array:
            raise TreeMismatch(
                f"{contents.path}: {leaf.label} is not an array of the state of a parameter; for"
                " the tree of a training run, say where its parameters are with params= (--params)"
            )
        place, name = leaf.path[:1], label_of(leaf.path[1:])
        if name in states[place]:
            raise TreeMismatch(f"{contents.path} has two arrays {leaf.label}")
        states[place][name] = leaf
    named = {label_of(place): place for place in states}
    if "param" not in named:
        count = len(states[named["other"]]) if "other" in named else 0
        others = f"; {count} are below `other`, and its notes say why" if count else ""
        raise TreeMismatch(
            f"{contents.path} has no parameters: a mapping needs them below `param`{others}; for"
            " the tree of a training run, say where they are with params= (--params)"
        )
    return States(named["param"], dict(states))


def leaves_at(contents: Contents, label: str) -> dict[Path, Leaf]:
    """The leaves at a label and below it, by the rest of their paths; of "" all leaves.

    Raises TreeMismatch if there is none.
    """
    below: dict[Path, Leaf] = {}
    for leaf in contents.leaves:
        labels = itertools.accumulate(map(str, leaf.path), "{}/{}".format)
        for depth, above in enumerate(itertools.chain([""], labels)):
            if above == label.strip("/"):
                below[leaf.path[depth:]] = leaf
    if not below:
        tops = dict.fromkeys(str(leaf.path[0]) for leaf in contents.leaves if leaf.path)
        raise TreeMismatch(
            f"{contents.path} has nothing at {label!r}; it has {', '.join(tops) or 'one leaf'}"
        )
    return below


def parameters_at(contents: Contents, label: str) -> dict[str, tuple[Path, Leaf]]:
    """The arrays below a label by name, with the rest of their paths. The array of a variable of
    Flax has the variable's name and path.

    Raises TreeMismatch if there is none, or two have one name.
    """
    arrays = {path: leaf for path, leaf in leaves_at(contents, label).items() if leaf.has_array}
    are_variables = all(map(_is_variable, arrays))
    named: dict[str, tuple[Path, Leaf]] = {}
    for path, leaf in arrays.items():
        path = path[:-1] if are_variables else path
        name = label_of(path)
        if name in named:
            raise TreeMismatch(f"{contents.path}: two parameters are called {name}")
        if path:
            named[name] = path, leaf
    if not named:
        raise TreeMismatch(f"{contents.path} has no parameters at {label!r}")
    return named


def _is_variable(path: Path) -> bool:
    """Whether the array at a path is that of a variable of Flax."""
    return len(path) > 1 and path[-1].name == "value"


def rerooted(contents: Contents, root: str, variables: bool) -> Contents:
    """The tree with the parameters below the label `root` in place of `param`, and with
    `variables` each in a node of its own, `value`, as the variables of Flax NNX are stored.

    Raises TreeMismatch where the tree has no parameters, or has no place for its other states, and
    for a root with an empty name in it.
    """
    states = states_of(contents)
    names = root.split("/") if root else []
    if not all(names):
        meant = "/".join(filter(None, names))
        raise TreeMismatch(f"root={root!r} has an empty name: give {meant!r} if that is meant")
    if not root:
        others = [label_of(place) for place in states.at if place != states.params]
        if others:
            raise TreeMismatch(
                f"{contents.path} has {', '.join(others)} beside its parameters, which therefore"
                " cannot be the whole tree: give them a root, or open with weights_only=True"
                " (--weights-only)"
            )
    above = tuple(Key("dict", name) for name in names)
    below = (Key("dict", "value"),) if variables else ()
    placed: list[tuple[Path, Leaf]] = []
    for place, leaves in states.at.items():
        top = above if place == states.params else place
        placed += [((*top, *leaf.path[1:], *below), leaf) for leaf in leaves.values()]
    at = dict(placed)
    fault = "two leaves have one path" if len(at) < len(placed) else None
    if fault := tree_fault(at) or fault:
        raise TreeMismatch(f"{contents.path} cannot have its parameters at {root!r}: {fault}")
    return _placed(contents, at)


def _placed(contents: Contents, at: Mapping[Path, Leaf]) -> Contents:
    """Contents with only these leaves, at these paths."""
    stored = expressions(contents.arrays)
    placed = [(replace(leaf, path=path), stored[leaf.name]) for path, leaf in at.items()]
    return contents.with_leaves(placed, stored)
