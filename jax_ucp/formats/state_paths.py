"""Which tensor of a trainer's nested state dict is a weight, and which an optimizer's state of which weight.

A path is the keys that lead to something stored. The rules, in order:

1. The optimizers are the dicts that `optimizer_dicts` finds; their states have numbers or names.
2. The model is the dict outside the optimizers in which most of their states find a parameter's name. Of several (a
   second copy of the weights, such as an average) it is the one under a usual word for a model: `model`, `module`, ...
3. Where no state names a parameter, it is the one dict under such a word; else the outermost dict, if tensors lie in
   it; else the one dict in which all tensors lie.
4. Every tensor in the model is a weight (`param`), under its path from there, joined by dots. Of the outermost
   dict only the tensors that lie in it directly are.
5. The states of an optimizer are mapped where names, a proof or the user say whose they are (`state_pairing`): a usual
   word does not. Everything else is `other`, under its full name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jax_ucp.formats.optimizer_dicts import OptimizerDict, Steps, joined, optimizer_dicts
from jax_ucp.formats.options import Options
from jax_ucp.formats.state_pairing import Stored, pair_states, relative

MODEL_WORDS = ("model", "module", "state_dict", "model_state_dict", "model_state")

_NOTHING_SAID = Options()


@dataclass
class Places:
    """Where each tensor goes: `at[name]` is (state, parameter). `notes` say what could not be decided.

    `in_optimizers` are the tensors that lie in an optimizer's dict, mapped or not. `settings` are pairs: a parameter's
    name, and what its optimizer was told. `used`: what the user said of optimizer groups was of use.
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
    """The place of each tensor; `objects` are what is no tensor, by path. Raises Undecided as `pair_states`.

    >>> paths = {"model.w": ("model", "w"), "optim.state.w.step": ("optim", "state", "w", "step"), "lr": ("lr",)}
    >>> tensors = {name: Stored(path) for name, path in paths.items()}
    >>> places(tensors, {("optim", "param_groups", 0, "lr"): 0.1}).at
    {'model.w': ('param', 'w'), 'optim.state.w.step': ('step', 'w'), 'lr': ('other', 'lr')}
    """
    found = Places()
    optimizers = optimizer_dicts({name: stored.path for name, stored in tensors.items()}, objects)
    with_state = {path for path, optimizer in optimizers.items() if optimizer.has_state}
    outside: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if any(stored.path[:i] in with_state for i in range(len(stored.path))):
            found.in_optimizers.add(name)
        else:
            outside[name] = stored
    paths = [stored.path for stored in outside.values()]
    dicts = _dicts_by_name(paths)
    model = _model(paths, dicts, optimizers.values(), found.notes)
    weights: dict[str, str] = {}
    for name, stored in outside.items():
        if model is not None and (inner := relative(stored.path, model)) is not None:
            weights[name] = joined(inner)
    if model is not None and (others := _copies(model, weights.values(), dicts)):
        found.notes.append(
            f"{joined(model) or 'the outermost dict'} is taken for the model; {', '.join(others)} with the same names "
            "is kept under `other`"
        )
    if outside and not weights and not found.notes:
        found.notes.append("nothing says which tensors are the model's weights; all are kept under `other`")
    groups = None if options.weights_only else options.optimizer_groups
    pairs = pair_states(tensors, [*optimizers.values()], outside, model, weights, groups)
    for name in tensors:
        found.at[name] = pairs.at.get(name) or (("param", weights[name]) if name in weights else ("other", name))
    if not options.weights_only:
        found.notes += pairs.notes
        found.settings, found.used = pairs.settings, pairs.used
    return found


def _dicts_by_name(paths: Iterable[Steps]) -> dict[str, set[Steps]]:
    """The dicts in which, at any depth, there is a tensor of a name."""
    found: dict[str, set[Steps]] = defaultdict(set)
    for path in paths:
        for root in (path[:depth] for depth in range(len(path))):
            if (inner := relative(path, root)) is not None:
                found[joined(inner)].add(root)
    return found


def _copies(model: Steps, names: Collection[str], dicts: Mapping[str, set[Steps]]) -> list[str]:
    """The dicts beside the model that have every name of it."""
    count = Counter(root for name in names for root in dicts[name])
    return sorted(joined(root) for root, n in count.items() if n == len(names) and root != model)


def _model(
    paths: Collection[Steps],
    by_name: Mapping[str, set[Steps]],
    optimizers: Iterable[OptimizerDict],
    notes: list[str],
) -> Steps | None:
    """The path of the dict that is the model, if that can be said; `paths` are those of tensors in no optimizer."""
    inside = {root for roots in by_name.values() for root in roots}
    hits: Counter[Steps] = Counter()
    for readings in (readings for optimizer in optimizers for readings in optimizer.states.values()):
        hits.update({root for owner, _ in readings if isinstance(owner, str) for root in by_name.get(owner, ())})
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
        choice = ", ".join(sorted(joined(root) or "the outermost dict" for root in roots))
        notes.append(f"several dicts could be the model, so all tensors are kept under `other`: {choice}")
    return roots[0] if len(roots) == 1 else None


def _worded(root: Steps) -> bool:
    return any(step in MODEL_WORDS for step in root)
