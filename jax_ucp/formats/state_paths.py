"""Which tensor of a trainer's nested state dict is a weight, and which is an optimizer's state of which weight.

A path is the keys that lead to something stored. The rules, in order:

1. An optimizer is a dict with the keys `state` and `param_groups`, as `torch.optim.Optimizer.state_dict` makes it.
   A state of it lies at `state`, a parameter's name, the state's name. Or that is one flattened key,
   `state.layers.0.weight.exp_avg` (`flatten_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict`),
   where the longest name that is a parameter's counts. A number is no name: it is a place in the optimizer's list of
   parameters, which is stored only if the optimizer was given names (`param_names` of its groups).
2. The model is the dict outside the optimizers in which most of their states find a parameter's name. Of several (a
   second copy of the weights, such as an average) it is the one under a usual word for a model: `model`, `module`, ...
3. Where no state names a parameter, it is the one dict under such a word; else the outermost dict, if tensors lie in
   it; else the one dict in which all tensors lie.
4. Every tensor in the model is a weight (`param`), under its path from there, joined by dots. Of the outermost
   dict only the tensors that lie in it directly are.
5. The states of one optimizer are mapped if every one of them names a parameter. Everything else is `other`, under
   its full name.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Steps = tuple[str | int, ...]

MODEL_WORDS = ("model", "module", "state_dict", "model_state_dict", "model_state")


@dataclass
class Places:
    """Where each tensor goes: `at[name]` is (state, parameter). `notes` say what could not be decided.

    `in_optimizers` are the tensors that lie in an optimizer's dict, mapped or not.
    """

    at: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    in_optimizers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _State:
    """A state of an optimizer. What it says of itself can be read as any of `readings`: (parameter, state)."""

    optimizer: Steps
    readings: tuple[tuple[str, str], ...]


def places(tensors: Mapping[str, Steps], objects: Mapping[Steps, Any] = MappingProxyType({})) -> Places:
    """The place of each tensor by the path that leads to it; `objects` are what is no tensor, by path.

    >>> tensors = {"model.w": ("model", "w"), "optim.state.w.step": ("optim", "state", "w", "step"), "lr": ("lr",)}
    >>> places(tensors, {("optim", "param_groups", 0, "lr"): 0.1}).at
    {'model.w': ('param', 'w'), 'optim.state.w.step': ('step', 'w'), 'lr': ('other', 'lr')}
    """
    found = Places()
    optimizers = _optimizers([*tensors.values(), *objects])
    named = dict(_named(objects))
    states: dict[str, _State] = {}
    outside: dict[str, Steps] = {}
    for name, stored in tensors.items():
        number = next((stored[:i] for i in range(len(stored)) if stored[:i] in named), ())
        path = named.get(number, ()) + stored[len(number) :]
        optimizer = next((path[:i] for i in range(len(path)) if path[:i] in optimizers), None)
        if optimizer is None:
            outside[name] = path
            continue
        found.in_optimizers.add(name)
        if _head(path[len(optimizer)]) == "state":
            states[name] = _State(optimizer, _readings(path[len(optimizer) :]))
    model = _model(outside.values(), states.values(), found.notes)
    weights: dict[str, str] = {}
    for name, path in outside.items():
        if model is not None and (relative := _relative(path, model)) is not None:
            weights[name] = _joined(relative)
    placed = _placed(states, set(weights.values()), found.notes)
    for name in tensors:
        found.at[name] = placed.get(name) or (("param", weights[name]) if name in weights else ("other", name))
    if outside and not weights and not found.notes:
        found.notes.append("nothing says which tensors are the model's weights; all are kept under `other`")
    return found


def hyperparameters(objects: Mapping[Steps, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(a parameter's name, what the optimizer was told for it), of the objects in `param_groups`, by path.

    >>> dict(hyperparameters({("optim", "param_groups.layers.0.w.lr"): 0.1}))
    {'layers.0.w': {'lr': 0.1}}
    >>> group = ("optim", "param_groups", 0)
    >>> dict(hyperparameters({(*group, "params"): ["a", "b"], (*group, "lr"): 0.1}))
    {'a': {'params': ['a', 'b'], 'lr': 0.1}, 'b': {'params': ['a', 'b'], 'lr': 0.1}}
    """
    for path, value in objects.items():
        if path and isinstance(path[-1], str) and path[-1].startswith("param_groups."):
            name, _, key = path[-1].removeprefix("param_groups.").rpartition(".")
            yield name, {key: value}
    for group in itertools.chain.from_iterable(_groups(objects).values()):
        for name in group.get("param_names", group.get("params")) or ():
            if isinstance(name, str) and not name.isdigit():
                yield name, group


def _groups(objects: Mapping[Steps, Any]) -> dict[Steps, list[dict[str, Any]]]:
    """The `param_groups` of each optimizer, of the objects that lie in them, by path."""
    found: dict[Steps, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for path, value in objects.items():
        match path:
            case (*optimizer, "param_groups", int(number), str(key)):
                found[tuple(optimizer)][number][key] = value
            case (*optimizer, "param_groups", int(number), str(key), int()):  # an item of a list, which come in order
                found[tuple(optimizer)][number].setdefault(key, []).append(value)
    return {optimizer: list(groups.values()) for optimizer, groups in found.items()}


def _named(objects: Mapping[Steps, Any]) -> Iterator[tuple[Steps, Steps]]:
    """For each optimizer whose groups have names: where the states of a number are, and where they are by name."""
    for optimizer, groups in _groups(objects).items():
        ids, called = ([group.get(key, []) for group in groups] for key in ("params", "param_names"))
        if all(isinstance(each, list) for each in ids + called) and [*map(len, ids)] == [*map(len, called)]:
            numbers, names = [*itertools.chain(*ids)], [*itertools.chain(*called)]
            typed = all(type(n) is int for n in numbers) and all(isinstance(name, str) for name in names)
            if typed and len(set(numbers)) == len(set(names)) == len(names):
                for number, name in zip(numbers, names, strict=True):
                    for step in (number, str(number)):  # as pickled, and as DCP's planner writes a key in a path
                        yield (*optimizer, "state", step), (*optimizer, "state", name)


def _optimizers(paths: Iterable[Steps]) -> set[Steps]:
    keys: dict[Steps, set[str]] = defaultdict(set)
    for path in paths:
        for i, step in enumerate(path):
            keys[path[:i]].add(_head(step))
    return {path for path, found in keys.items() if {"state", "param_groups"} <= found}


def _head(step: str | int) -> str:
    return str(step).partition(".")[0]


def _readings(path: Steps) -> tuple[tuple[str, str], ...]:
    """`path` begins at `state`. Of one flattened key every dot may be the end of the parameter's name."""
    if path[0] == "state":
        found = [(str(path[1]), _joined(path[2:]))] if len(path) > 2 else []
    else:
        flat = _joined(path).removeprefix("state.")
        found = [(flat[:at], flat[at + 1 :]) for at in range(len(flat) - 1, -1, -1) if flat[at] == "."]
    return tuple(reading for reading in found if not reading[0].isdigit())


def _relative(path: Steps, root: Steps) -> Steps | None:
    """The path from the dict `root`, if it lies there; in the outermost dict only what lies in it directly does."""
    inside = path[: len(root)] == root if root else len(path) == 1 and isinstance(path[0], str)
    return path[len(root) :] if inside else None


def _model(paths: Collection[Steps], states: Iterable[_State], notes: list[str]) -> Steps | None:
    """The path of the dict that is the model, if that can be said; `paths` are those of tensors in no optimizer."""
    by_name: dict[str, set[Steps]] = defaultdict(set)  # the dicts in which, at any depth, there is a name
    for path in paths:
        for root in (path[:depth] for depth in range(len(path))):
            if (relative := _relative(path, root)) is not None:
                by_name[_joined(relative)].add(root)
    inside = {root for roots in by_name.values() for root in roots}
    hits: Counter[Steps] = Counter()
    for state in states:
        hits.update({root for param, _ in state.readings for root in by_name.get(param, ())})
    roots = [root for root, count in hits.items() if count == max(hits.values())]
    if len(roots) > 1:
        roots = [root for root in roots if _worded(root)] or roots
    if not roots:
        roots = [root for root in inside if root and root[-1] in MODEL_WORDS and not _worded(root[:-1])]
    if not roots and () in inside:
        roots = [()]
    if not roots and all(isinstance(path[-1], str) for path in paths):
        dicts = {path[:-1] for path in paths}
        roots = [*dicts] if len(dicts) == 1 else []
    if len(roots) > 1:
        choice = ", ".join(sorted(_joined(root) or "the outermost dict" for root in roots))
        notes.append(f"several dicts could be the model, so all tensors are kept under `other`: {choice}")
    return roots[0] if len(roots) == 1 else None


def _worded(root: Steps) -> bool:
    return any(step in MODEL_WORDS for step in root)


def _placed(states: Mapping[str, _State], params: set[str], notes: list[str]) -> dict[str, tuple[str, str]]:
    """The states of optimizers whose every state names a parameter, by name: (state, parameter)."""
    found: dict[str, tuple[str, str]] = {}
    optimizers: dict[Steps, list[str]] = defaultdict(list)
    owners: dict[tuple[str, str], set[Steps]] = defaultdict(set)
    for name, one in states.items():
        optimizers[one.optimizer].append(name)
        place = next(((state, param) for param, state in one.readings if param in params), None)
        if place is not None:
            found[name] = place
            owners[place].add(one.optimizer)
    shared = {optimizer for several in owners.values() if len(several) > 1 for optimizer in several}
    for optimizer, names in optimizers.items():
        missing = [name for name in names if name not in found]
        if missing or optimizer in shared:
            why = "another optimizer has states of the same parameters"
            if missing:
                why = f"{len(missing)} name no parameter of the model, the first {missing[0]}"
                if not any(states[name].readings for name in missing):
                    why = "they go by numbers, and nothing stored says which parameter has which number"
            where = _joined(optimizer) or "the outermost dict"
            notes.append(f"{len(names)} optimizer states in {where} are kept under `other`: {why}")
            for name in names:
                found.pop(name, None)
    return found


def _joined(path: Steps) -> str:
    return ".".join(map(str, path))
