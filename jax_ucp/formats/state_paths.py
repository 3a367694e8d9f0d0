"""Which tensor of a trainer's nested state dict is a weight, and which is an optimizer's state of which weight.

A path is the keys that lead to a tensor. The rules, in order:

1. A tensor claims to be a state if its path has the key `state`, then a name, then the state's name:
   `optimizer, state, layers.0.weight, exp_avg`. The same may be one flattened key,
   `optimizer, state.layers.0.weight.exp_avg`, where the longest name that is a parameter's counts.
2. The model is the dict in which the names of the states are found. Of several (a second copy of the weights, such
   as an average) it is the one whose key is a usual word for a model: `model`, `module`, `state_dict`, ...
3. Without states it is the one dict with such a key; else the outermost dict, if tensors lie in it; else the one
   dict in which all tensors lie.
4. Every tensor in the model is a weight (`param`), under its path from there, joined by dots. Of the outermost
   dict only the tensors that lie in it directly are.
5. The states of one optimizer are mapped if every one of them names a parameter. Everything else is `other`, under
   its full name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Steps = tuple[str | int, ...]

MODEL_WORDS = ("model", "module", "state_dict", "model_state_dict", "model_state")
_FLAT_STATE = re.compile(r"(?:^|.*?\.)state\.")


@dataclass
class Places:
    """Where each tensor goes: `at[name]` is (state, parameter). `notes` say what could not be decided."""

    at: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A tensor that is a state if one of `splits` begins with a parameter's name: (parameter, state)."""

    optimizer: Steps
    splits: tuple[tuple[str, str], ...]


def places(paths: Mapping[str, Steps]) -> Places:
    """The place of each tensor by the path that leads to it.

    >>> tensors = {"model.w": ("model", "w"), "optim.state.w.step": ("optim", "state", "w", "step"), "lr": ("lr",)}
    >>> places(tensors).at
    {'model.w': ('param', 'w'), 'optim.state.w.step': ('step', 'w'), 'lr': ('other', 'lr')}
    """
    found = Places()
    claims = {name: claim for name, path in paths.items() if (claim := _claim(path))}
    inside = _by_dict(path for name, path in paths.items() if name not in claims or "state" not in path)
    root = _root(paths, claims, inside, found.notes)
    if root:  # what lies in the model is a weight, whatever its name
        claims = {name: claim for name, claim in claims.items() if paths[name][: len(root)] != root}
    states = _states(claims, inside.get(root, set()) if root is not None else set(), found.notes)
    for name, path in paths.items():
        if name in states:
            found.at[name] = states[name]
        elif name not in claims and root is not None and path[: len(root)] == root and (root or len(path) == 1):
            found.at[name] = "param", _joined(path[len(root) :])
        else:
            found.at[name] = "other", name
    if root is None and paths and not found.notes:
        found.notes.append("nothing says which tensors are the model's weights; all are kept under `other`")
    return found


def _claim(path: Steps) -> _Claim | None:
    for i, step in enumerate(path):
        if step == "state" and len(path) - i >= 3:
            return _Claim(path[:i], ((str(path[i + 1]), _joined(path[i + 2 :])),))
        if isinstance(step, str) and (flat := _FLAT_STATE.match(step)):
            rest = _joined((step[flat.end() :], *path[i + 1 :]))
            dots = [at for at, letter in enumerate(rest) if letter == "."]
            splits = tuple((rest[:at], rest[at + 1 :]) for at in reversed(dots))
            return _Claim((*path[:i], step[: flat.end()]), splits) if splits else None
    return None


def _by_dict(paths: Iterable[Steps]) -> dict[Steps, set[str]]:
    """For each dict that holds tensors, at any depth below it, their names in it."""
    names: dict[Steps, set[str]] = defaultdict(set)
    for path in paths:
        for depth in range(len(path)):
            if depth or len(path) == 1:
                names[path[:depth]].add(_joined(path[depth:]))
    return names


def _root(
    paths: Mapping[str, Steps], claims: Mapping[str, _Claim], inside: Mapping[Steps, set[str]], notes: list[str]
) -> Steps | None:
    """Where the model is, if that can be said."""
    by_name: dict[str, list[Steps]] = defaultdict(list)
    for root, names in inside.items():
        for name in names:
            by_name[name].append(root)
    hits: Counter[Steps] = Counter()
    for claim in claims.values():
        hits.update({root for param, _ in claim.splits for root in by_name.get(param, ())})
    most = max(hits.values(), default=0)
    roots = [root for root, count in hits.items() if count == most]
    if not roots:
        roots = [root for root in inside if root and root[-1] in MODEL_WORDS and not _worded(root[:-1])]
    if not roots and () in inside:
        return ()
    if not roots:
        dicts = {path[:-1] for path in paths.values()}
        return dicts.pop() if len(dicts) == 1 else None
    worded = roots if len(roots) == 1 else [root for root in roots if _worded(root)]
    if len(worded) == 1:
        return worded[0]
    choice = ", ".join(sorted(_joined(root) or "the outermost dict" for root in roots))
    notes.append(f"several dicts could be the model, so all tensors are kept under `other`: {choice}")
    return None


def _worded(root: Steps) -> bool:
    return any(step in MODEL_WORDS for step in root)


def _states(claims: Mapping[str, _Claim], params: set[str], notes: list[str]) -> dict[str, tuple[str, str]]:
    """The tensors that are states, by name: (state, parameter)."""
    found: dict[str, tuple[str, str]] = {}
    optimizers: dict[Steps, list[str]] = defaultdict(list)
    owners: dict[tuple[str, str], set[Steps]] = defaultdict(set)
    for name, claim in claims.items():
        optimizers[claim.optimizer].append(name)
        hit = next(((state, param) for param, state in claim.splits if param in params), None)
        if hit is not None:
            found[name] = hit
            owners[hit].add(claim.optimizer)
    shared = {optimizer for several in owners.values() if len(several) > 1 for optimizer in several}
    for optimizer, names in optimizers.items():
        missing = [name for name in names if name not in found]
        if missing or optimizer in shared:
            why = "another optimizer has states of the same parameters"
            if missing:
                why = f"{len(missing)} name no parameter of the model, the first {missing[0]}"
            where = _joined(optimizer).rstrip(".") or "the outermost dict"
            notes.append(f"{len(names)} optimizer states in {where} are kept under `other`: {why}")
            for name in names:
                found.pop(name, None)
    return found


def _joined(path: Steps) -> str:
    return ".".join(map(str, path))
