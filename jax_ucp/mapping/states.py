"""Where in a tree the parameters are, and the optimizer's states of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import expressions
from jax_ucp.errors import TreeMismatch
from jax_ucp.tree import Key, Leaf, Path, tree_fault

_MOST_LABELS = 32  # at which a mapping is tried
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
    weights = _weights(contents, params)
    suffix = {id(leaf): name for name, leaf in weights.items()}
    states: dict[Path, dict[str, Leaf]] = defaultdict(dict)
    others: list[Leaf] = []
    place: Path = ()
    for leaf in contents.leaves:
        if id(leaf) in suffix:
            place = _place(leaf.path, params)
            states[place][suffix[id(leaf)]] = leaf
            continue
        found = next(_named(leaf, weights), None) if leaf.has_array else None
        if found is None:
            others.append(leaf)
        else:
            states[found[0]][found[1]] = leaf
    return States(place, dict(states), others)


def top_labels(contents: Contents) -> Sequence[str]:
    """The labels of the first three levels above arrays, those called `params` first; none of a
    tree `{state: {parameter: array}}`.
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
    """The parameters of a training run's tree as `{param: {parameter: array}}`, and nothing else.

    Raises TreeMismatch where there are none below the label `params`.
    """
    weights = _weights(contents, params)
    at = {
        (*PARAM, *(Key("dict", key) for key in name.split("/"))): leaf
        for name, leaf in weights.items()
    }
    left = len(contents.leaves) - len(at)
    notes = [f"{left} leaves that are not parameters are left out"] if left else []
    return replace(
        _placed(contents, at),
        notes=[*contents.notes, *notes],
        # nothing else tells one part of the tree from another that has the same names
        reading=repr((contents.reading, params)),
    )


def _imported(contents: Contents) -> States:
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


def _place(path: Path, label: str) -> Path:
    """How a path begins that has a label there."""
    return next(path[:i] for i in range(len(path)) if label_of(path[:i]) == label)


def _named(leaf: Leaf, weights: Mapping[str, Leaf]) -> Iterator[tuple[Path, str]]:
    """The places at which a leaf has the name of a parameter, the longest name first."""
    path = _without_value(leaf.path, bool(weights) and _has_values(weights.values()))
    for i in range(len(path)):
        name = label_of(path[i:])
        if name in weights:
            yield path[:i], name


def _weights(contents: Contents, params: str) -> dict[str, Leaf]:
    """The arrays below a label by name; those of Flax's variables have the variable's."""
    above = list(filter(None, params.split("/")))
    depth = len(above)
    arrays = [leaf for leaf in contents.leaves if leaf.has_array and len(leaf.path) > depth]
    below = {leaf.path[depth:]: leaf for leaf in arrays if [*map(str, leaf.path[:depth])] == above}
    if not below:
        tops = ", ".join(dict.fromkeys(str(leaf.path[0]) for leaf in contents.leaves if leaf.path))
        raise TreeMismatch(f"{contents.path} has no parameters at {params!r}; it has {tops}")
    has_values = _has_values(below.values())
    named: dict[str, Leaf] = {}
    for path, leaf in below.items():
        name = label_of(_without_value(path, has_values))
        if name in named:
            raise TreeMismatch(f"{contents.path} has two parameters {name}")
        named[name] = leaf
    return named


def _has_values(leaves: Iterable[Leaf]) -> bool:
    """Whether every array is that of a variable of Flax."""
    return all(len(leaf.path) > 1 and leaf.path[-1].name == "value" for leaf in leaves)


def _without_value(path: Path, has_values: bool) -> Path:
    return path[:-1] if has_values and path and path[-1].name == "value" else path


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
    """A checkpoint with these of its leaves alone, at other paths."""
    stored = expressions(contents.arrays)
    placed = [(replace(leaf, path=path), stored[leaf.name]) for path, leaf in at.items()]
    return contents.with_leaves(placed, stored)
