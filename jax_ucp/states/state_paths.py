"""The place of each tensor of a trainer's nested state dict: a weight, or a weight's state.

A path is the keys that lead to something stored. The rules, in order:

1. The optimizers are the dicts that `optimizer_dicts` finds; their states have numbers or names.
2. The model is the dict outside the optimizers in which most of their states find a parameter's
   name. Of several (a second copy of the weights, such as an average) it is the one under a usual
   word for a model: `model`, `module`, ...
3. Where no state names a parameter, it is the one dict under such a word; else the outermost dict,
   if tensors lie in it; else the one dict in which all tensors lie. Whatever they say, it is the
   dict that the user names (`model`), or the part of a dict whose names begin so.
4. Every tensor in the model is a weight (`param`), under its path from there, joined by dots. Of
   the outermost dict only the tensors that lie in it directly are.
5. The states of an optimizer are mapped where names, a proof or the user say whose they are
   (`state_pairing`): a usual word does not. Everything else is `other`, under its full name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jax_ucp.options import Options
from jax_ucp.states.optimizer_dicts import (
    OptimizerDict,
    Steps,
    dict_name,
    joined,
    optimizer_dicts,
    prefixes,
)
from jax_ucp.states.state_pairing import (
    ModelDict,
    ModelOrders,
    Places,
    StateTensor,
    names_by_dict,
    pair_states,
    relative,
)

MODEL_WORDS = frozenset(("model", "module", "state_dict", "model_state_dict", "model_state"))

_DEFAULTS = Options()


class UnknownModel(ValueError):
    """The user names a model that is not there; the text lists those that are."""


def places(
    tensors: Mapping[str, StateTensor],
    objects: Mapping[Steps, Any] = MappingProxyType({}),
    options: Options = _DEFAULTS,
    orders: ModelOrders | None = None,
) -> Places:
    """The place of each tensor. `objects` are other values by path, `orders` those of the model if
    the tensors are not in its order. Raises Undecided as `pair_states` does, and UnknownModel if
    `options.model` is not there.

    >>> paths = {"model.w": ("model", "w"), "optim.state.w.step": ("optim", "state", "w", "step"),
    ...     "lr": ("lr",)}
    >>> tensors = {name: StateTensor(path) for name, path in paths.items()}
    >>> places(tensors, {("optim", "param_groups", 0, "lr"): 0.1}).at
    {'model.w': ('param', 'w'), 'optim.state.w.step': ('step', 'w'), 'lr': ('other', 'lr')}
    """
    paths = {name: stored.path for name, stored in tensors.items()}
    optimizers = optimizer_dicts(paths, objects)
    # the tensors that lie in the dict of an optimizer that has states
    dicts = {path for path, optimizer in optimizers.items() if optimizer.has_state}
    in_optimizers = {n for n, path in paths.items() if not dicts.isdisjoint(prefixes(path))}
    outside = {name: tensors[name] for name in tensors if name not in in_optimizers}
    if options.model is None:
        model = _model(outside, optimizers.values())
    else:
        outside, model = _said_model(outside, options.model)
    groups = None if options.weights_only else options.optimizer_groups
    paired = pair_states(tensors, [*optimizers.values()], outside, model, groups, orders)
    at = {name: ("other", name) for name in tensors}
    at |= {name: ("param", weight) for name, weight in model.weights.items()}
    at |= paired.at
    if options.weights_only:
        return Places(at, [*model.notes], in_optimizers, left=in_optimizers)
    notes = [*model.notes, *paired.notes]
    return replace(paired, at=at, notes=notes, in_optimizers=in_optimizers)


def _model(outside: Mapping[str, StateTensor], optimizers: Iterable[OptimizerDict]) -> ModelDict:
    if not outside:
        return ModelDict()
    paths = [stored.path for stored in outside.values()]
    dicts: dict[str, set[Steps]] = defaultdict(set)  # that have a tensor of a name, at any depth
    for path in paths:
        for root, name in names_by_dict(path):
            dicts[name].add(root)
    roots = set[Steps]().union(*dicts.values())

    # The dicts in which most states name a parameter; of several, those under a usual word.
    hits: Counter[Steps] = Counter()
    for optimizer in optimizers:
        for readings in optimizer.states.values():
            named = [dicts.get(str(owner), ()) for owner, _ in readings if isinstance(owner, str)]
            hits.update(set[Steps]().union(*named))
    most = max(hits.values(), default=0)
    of_states = [root for root, count in hits.items() if count == most]
    candidates = list(filter(has_word, of_states)) or of_states

    # Else those under a usual word, in no other such dict; else the outermost dict, if tensors lie
    # in it; else the one dict in which all tensors lie.
    if not candidates:
        candidates = [root for root in roots if has_word(root) and not has_word(root[:-1])]
    if not candidates and () in roots:
        candidates = [()]
    parents = {path[:-1] for path in paths}
    if not candidates and len(parents) == 1 and all(isinstance(path[-1], str) for path in paths):
        candidates = [*parents]

    match candidates:
        case []:
            note = "nothing says which tensors are the model's weights; all are kept under `other`"
            return ModelDict(notes=[note])
        case [model]:
            weights = _weights(model, outside)
            with_every_name = set[Steps].intersection(*(dicts[name] for name in weights.values()))
            copies = ", ".join(sorted(map(dict_name, with_every_name - {model})))
            note = (
                f"{dict_name(model)} is taken for the model; {copies} with the same names is kept"
                " under `other`"
            )
            return ModelDict(model, weights, [note] if copies else [])
        case _:
            choice = ", ".join(sorted(map(dict_name, candidates)))
            note = (
                f"several dicts could be the model, so all tensors are kept under `other`: {choice}"
            )
            return ModelDict(notes=[note])


def _said_model(
    outside: Mapping[str, StateTensor], name: str
) -> tuple[Mapping[str, StateTensor], ModelDict]:
    """The model that the user names, and the tensors in no optimizer. Raises UnknownModel."""
    roots = _dicts_called(outside, name)
    if not roots:
        # a dict with names that begin with `name` is one dict more for each such beginning
        depth = name.count(".") + 1
        cut: dict[str, StateTensor] = {}
        for key, stored in outside.items():
            *parents, last = stored.path
            *first, rest = str(last).split(".", depth)
            path = (*parents, *first, rest) if len(first) == depth else stored.path
            cut[key] = replace(stored, path=path)
        outside = cut
        roots = _dicts_called(outside, name)
    if len(roots) != 1:
        paths = [stored.path for stored in outside.values() if stored.trainable]
        known = ", ".join(model_names(paths))
        fault = "there is no such model" if not roots else f"{len(roots)} dicts are called so"
        raise UnknownModel(f"model={name!r}: {fault}; the models are: {known or 'none'}")
    (root,) = roots
    notes = [f"{dict_name(root)} is the model, as asked; what lies beside it is kept under `other`"]
    return outside, ModelDict(root, _weights(root, outside), notes, is_said=True)


def _dicts_called(tensors: Mapping[str, StateTensor], name: str) -> list[Steps]:
    """The dicts with this full name, or if there is none, those with it as their last key."""
    roots: dict[Steps, None] = {}
    for stored in tensors.values():
        roots |= dict.fromkeys(prefixes(stored.path))
    full = [root for root in roots if joined(root) == name]
    return full or [root for root in roots if root and str(root[-1]) == name]


def model_names(paths: Sequence[Steps]) -> list[str]:
    """The names that models may have, for tensors at these paths: the names of dicts that lie side
    by side, or the first words of names in one dict.

    >>> model_names([("gen", "w"), ("disc", "w")]), model_names([("sd", "gen.w"), ("sd", "dis.w")])
    (['disc', 'gen'], ['dis', 'gen'])
    """
    root: Steps = ()
    inside = _dicts_inside(paths, root)
    while len(inside) == 1 and all(path[: len(root) + 1] in inside for path in paths):
        (root,) = inside
        inside = _dicts_inside(paths, root)
    if inside:
        return sorted(joined(path[len(root) :]) for path in inside)
    names = [str(path[-1]) for path in paths]
    return sorted({name.partition(".")[0] for name in names if "." in name})


def _dicts_inside(paths: Sequence[Steps], root: Steps) -> set[Steps]:
    depth = len(root) + 1
    return {path[:depth] for path in paths if len(path) > depth}


def _weights(model: Steps, tensors: Mapping[str, StateTensor]) -> dict[str, str]:
    """The tensors that lie in the dict `model`, with their names from there."""
    inner = {name: relative(stored.path, model) for name, stored in tensors.items()}
    return {name: joined(path) for name, path in inner.items() if path is not None}


def has_word(path: Steps) -> bool:
    """Whether a path leads through a dict under a usual word for a model."""
    return not MODEL_WORDS.isdisjoint(path)
