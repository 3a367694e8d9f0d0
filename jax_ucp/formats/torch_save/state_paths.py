"""Which tensor of a trainer's nested state dict is a weight, and which an optimizer's state of
which weight.

A path is the keys that lead to something stored. The rules, in order:

1. The optimizers are the dicts that `optimizer_dicts` finds; their states have numbers or names.
2. The model is the dict outside the optimizers in which most of their states find a parameter's
   name. Of several (a second copy of the weights, such as an average) it is the one under a usual
   word for a model: `model`, `module`, ...
3. Where no state names a parameter, it is the one dict under such a word; else the outermost dict,
   if tensors lie in it; else the one dict in which all tensors lie.
4. Every tensor in the model is a weight (`param`), under its path from there, joined by dots. Of
   the outermost dict only the tensors that lie in it directly are.
5. The states of an optimizer are mapped where names, a proof or the user say whose they are
   (`state_pairing`): a usual word does not. Everything else is `other`, under its full name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.optimizer_dicts import (
    OptimizerDict,
    Owner,
    Steps,
    joined,
    optimizer_dicts,
    prefixes,
)
from jax_ucp.formats.torch_save.state_pairing import Stored, names_by_dict, pair_states, relative

MODEL_WORDS = ("model", "module", "state_dict", "model_state_dict", "model_state")
_WORDS = frozenset(MODEL_WORDS)

_NOTHING_SAID = Options()


@dataclass
class Places:
    """Where each tensor goes: `at[name]` is (state, parameter). `notes` say what could not be
    decided.

    `in_optimizers` are the tensors that lie in an optimizer's dict, mapped or not. `settings` are
    pairs: a parameter's name, and what its optimizer was told. `used`: what the user said of
    optimizer groups was of use.
    """

    at: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    in_optimizers: set[str] = field(default_factory=set)
    settings: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    used: bool = False


def places(
    tensors: Mapping[str, Stored],
    objects: Mapping[Steps, Any] = MappingProxyType({}),
    options: Options = _NOTHING_SAID,
) -> Places:
    """The place of each tensor; `objects` are what is no tensor, by path. Raises Undecided as
    `pair_states`.

    >>> paths = {"model.w": ("model", "w"), "optim.state.w.step": ("optim", "state", "w", "step"),
    ...     "lr": ("lr",)}
    >>> tensors = {name: Stored(path) for name, path in paths.items()}
    >>> places(tensors, {("optim", "param_groups", 0, "lr"): 0.1}).at
    {'model.w': ('param', 'w'), 'optim.state.w.step': ('step', 'w'), 'lr': ('other', 'lr')}
    """
    found = Places()
    optimizers = optimizer_dicts({name: stored.path for name, stored in tensors.items()}, objects)
    found.in_optimizers = _in_optimizers(tensors, optimizers)
    outside = {name: tensors[name] for name in tensors if name not in found.in_optimizers}
    model, weights, found.notes = _weights(outside, optimizers.values())
    groups = None if options.weights_only else options.optimizer_groups
    pairs = pair_states(tensors, [*optimizers.values()], outside, model, weights, groups)
    found.at = {name: ("other", name) for name in tensors}
    found.at |= {name: ("param", weight) for name, weight in weights.items()}
    found.at |= pairs.at
    if not options.weights_only:
        found.notes += pairs.notes
        found.settings, found.used = pairs.settings, pairs.used
    return found


def _in_optimizers(
    tensors: Mapping[str, Stored], optimizers: Mapping[Steps, OptimizerDict]
) -> set[str]:
    """The tensors that lie in the dict of an optimizer that has states."""
    dicts = {path for path, optimizer in optimizers.items() if optimizer.has_state}
    return {name for name, stored in tensors.items() if not dicts.isdisjoint(prefixes(stored.path))}


def _weights(
    outside: Mapping[str, Stored], optimizers: Iterable[OptimizerDict]
) -> tuple[Steps | None, dict[str, str], list[str]]:
    """The model's dict, its tensors with their names from there, and notes where that is in doubt;
    `outside` are the tensors in no optimizer.
    """
    paths = [stored.path for stored in outside.values()]
    dicts = _dicts_by_name(paths)
    roots = _models(paths, dicts, optimizers)
    model = roots[0] if len(roots) == 1 else None
    weights = _inside(model, outside)
    return model, weights, _doubts(roots, weights, dicts) if outside else []


def _inside(model: Steps | None, tensors: Mapping[str, Stored]) -> dict[str, str]:
    """The tensors that lie in the dict `model`, with their names from there."""
    names: dict[str, str] = {}
    if model is None:
        return names
    for name, stored in tensors.items():
        if (path := relative(stored.path, model)) is not None:
            names[name] = joined(path)
    return names


def _doubts(
    models: Sequence[Steps], weights: Mapping[str, str], dicts: Mapping[str, set[Steps]]
) -> list[str]:
    """Notes on what could be the model too, or that nothing could be."""
    if len(models) > 1:
        choice = _listed(models)
        return [
            f"several dicts could be the model, so all tensors are kept under `other`: {choice}"
        ]
    copies = _copies(models[0], weights.values(), dicts) if models else []
    if copies:
        return [
            f"{_listed(models)} is taken for the model; {', '.join(copies)} with the same names is"
            " kept under `other`"
        ]
    if not weights:
        return ["nothing says which tensors are the model's weights; all are kept under `other`"]
    return []


def _listed(dicts: Iterable[Steps]) -> str:
    return ", ".join(sorted(joined(path) or "the outermost dict" for path in dicts))


def _dicts_by_name(paths: Iterable[Steps]) -> dict[str, set[Steps]]:
    """The dicts in which, at any depth, there is a tensor of a name."""
    found: dict[str, set[Steps]] = defaultdict(set)
    for path in paths:
        for root, name in names_by_dict(path):
            found[name].add(root)
    return found


def _copies(model: Steps, names: Collection[str], dicts: Mapping[str, set[Steps]]) -> list[str]:
    """The dicts beside the model that have every name of it."""
    roots = set[Steps].intersection(*(dicts[name] for name in names)) if names else set[Steps]()
    return sorted(joined(root) for root in roots - {model})


def _models(
    paths: Collection[Steps],
    dicts: Mapping[str, set[Steps]],
    optimizers: Iterable[OptimizerDict],
) -> list[Steps]:
    """The paths of the dicts that could be the model; `paths` are those of tensors in no
    optimizer.
    """
    return _named_by_states(dicts, optimizers) or _worded(dicts) or _only_dict(paths, dicts)


def _named_by_states(
    dicts: Mapping[str, set[Steps]], optimizers: Iterable[OptimizerDict]
) -> list[Steps]:
    """The dicts in which most states name a parameter; of several, those under a usual word."""
    hits: Counter[Steps] = Counter()
    for optimizer in optimizers:
        for readings in optimizer.states.values():
            hits.update(_dicts_with(dicts, (owner for owner, _ in readings)))
    most = max(hits.values(), default=0)
    roots = [root for root, count in hits.items() if count == most]
    return [root for root in roots if has_word(root)] or roots


def _dicts_with(dicts: Mapping[str, set[Steps]], owners: Iterable[Owner]) -> set[Steps]:
    """The dicts that have a tensor of one of these names; a number is no name."""
    names = [owner for owner in owners if isinstance(owner, str)]
    return set[Steps]().union(*(dicts.get(name, ()) for name in names))


def _worded(dicts: Mapping[str, set[Steps]]) -> list[Steps]:
    """The dicts under a usual word, in no other such dict."""
    roots = set[Steps]().union(*dicts.values())
    worded = [root for root in roots if root and root[-1] in MODEL_WORDS]
    return [root for root in worded if not has_word(root[:-1])]


def _only_dict(paths: Collection[Steps], dicts: Mapping[str, set[Steps]]) -> list[Steps]:
    """The outermost dict, if tensors lie in it; else the one dict in which all tensors lie."""
    if any(() in roots for roots in dicts.values()):
        return [()]
    parents = {path[:-1] for path in paths}
    by_name = all(isinstance(path[-1], str) for path in paths)
    return [*parents] if by_name and len(parents) == 1 else []


def has_word(path: Steps) -> bool:
    """Whether a path leads through a dict under a usual word for a model."""
    return not _WORDS.isdisjoint(path)
