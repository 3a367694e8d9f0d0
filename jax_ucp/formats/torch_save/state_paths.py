"""Which tensor of a trainer's nested state dict is a weight, and which an optimizer's state of
which weight.

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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from jax_ucp.formats.options import Options, SaidGroups
from jax_ucp.formats.torch_save.optimizer_dicts import (
    OptimizerDict,
    Steps,
    dict_name,
    joined,
    optimizer_dicts,
    prefixes,
)
from jax_ucp.formats.torch_save.state_pairing import Stored, names_by_dict, pair_states, relative

MODEL_WORDS = frozenset(("model", "module", "state_dict", "model_state_dict", "model_state"))

_DEFAULTS = Options()

_DictsByName = Mapping[str, set[Steps]]  # the dicts that have a tensor of a name, at any depth


@dataclass(frozen=True, slots=True)
class Places:
    """Where each tensor goes: `at[name]` is (state, parameter). `notes` say what could not be
    decided.

    `in_optimizers` are the tensors that lie in an optimizer's dict, mapped or not. `settings` are
    pairs: a parameter's name, and its optimizer's settings for it. `said` is what the user said of
    the optimizer's groups, if that was needed.
    """

    at: dict[str, tuple[str, str]]
    notes: list[str]
    in_optimizers: set[str]
    settings: Sequence[tuple[str, Mapping[str, Any]]] = ()
    said: SaidGroups | None = None


class UnknownModel(ValueError):
    """The user names a model that is not there; the text says which are."""


@dataclass(frozen=True, slots=True)
class _Model:
    """The model's dict, if one is decided; its tensors with their parameters; notes on doubts."""

    path: Steps | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    is_said: bool = False


def places(
    tensors: Mapping[str, Stored],
    objects: Mapping[Steps, Any] = MappingProxyType({}),
    options: Options = _DEFAULTS,
    words: Callable[[], Sequence[str] | None] | None = None,
) -> Places:
    """The place of each tensor; `objects` are what is no tensor, by path. `words` are those that
    would decide what is undecided, where tensors are not in the order of the model. Raises
    Undecided as `pair_states`, UnknownModel where `options.model` is not there.

    >>> paths = {"model.w": ("model", "w"), "optim.state.w.step": ("optim", "state", "w", "step"),
    ...     "lr": ("lr",)}
    >>> tensors = {name: Stored(path) for name, path in paths.items()}
    >>> places(tensors, {("optim", "param_groups", 0, "lr"): 0.1}).at
    {'model.w': ('param', 'w'), 'optim.state.w.step': ('step', 'w'), 'lr': ('other', 'lr')}
    """
    paths = {name: stored.path for name, stored in tensors.items()}
    optimizers = optimizer_dicts(paths, objects)
    in_optimizers = _in_optimizers(paths, optimizers)
    outside = {name: tensors[name] for name in tensors if name not in in_optimizers}
    if options.model is None:
        model = _model(outside, optimizers.values())
    else:
        outside, model = _said_model(outside, options.model)
    groups = None if options.weights_only else options.optimizer_groups
    pairs = pair_states(tensors, [*optimizers.values()], outside, model, groups, words)
    at = {name: ("other", name) for name in tensors}
    at |= {name: ("param", weight) for name, weight in model.weights.items()}
    at |= pairs.at
    if options.weights_only:
        return Places(at, [*model.notes], in_optimizers)
    return Places(at, [*model.notes, *pairs.notes], in_optimizers, pairs.settings, pairs.said)


def _in_optimizers(
    paths: Mapping[str, Steps], optimizers: Mapping[Steps, OptimizerDict]
) -> set[str]:
    """The tensors that lie in the dict of an optimizer that has states."""
    dicts = {path for path, optimizer in optimizers.items() if optimizer.has_state}
    return {name for name, path in paths.items() if not dicts.isdisjoint(prefixes(path))}


def _model(outside: Mapping[str, Stored], optimizers: Iterable[OptimizerDict]) -> _Model:
    """The model, of the tensors in no optimizer."""
    if not outside:
        return _Model()
    paths = [stored.path for stored in outside.values()]
    dicts = _dicts_by_name(paths)
    candidates = (
        _named_by_states(dicts, optimizers) or _under_model_words(dicts) or _only_dict(paths, dicts)
    )
    match candidates:
        case []:
            note = "nothing says which tensors are the model's weights; all are kept under `other`"
            return _Model(notes=[note])
        case [model]:
            weights = _weights(model, outside)
            return _Model(model, weights, _notes_on_copies(model, weights.values(), dicts))
        case _:
            choice = ", ".join(sorted(map(dict_name, candidates)))
            note = (
                f"several dicts could be the model, so all tensors are kept under `other`: {choice}"
            )
            return _Model(notes=[note])


def _said_model(outside: Mapping[str, Stored], name: str) -> tuple[Mapping[str, Stored], _Model]:
    """The model that the user names, and the tensors in no optimizer: with names cut where the
    model is a part of a dict. Raises UnknownModel.
    """
    roots = _dicts_called(outside, name)
    if not roots:
        outside = _cut_at(outside, name)
        roots = _dicts_called(outside, name)
    if len(roots) != 1:
        paths = [stored.path for stored in outside.values() if stored.trainable]
        known = ", ".join(model_names(paths))
        found = "there is no such model" if not roots else f"{len(roots)} dicts are called so"
        raise UnknownModel(f"model={name!r}: {found}; the models are: {known or 'none'}")
    (root,) = roots
    weights = _weights(root, outside)
    notes = [f"{dict_name(root)} is the model, as asked; what lies beside it is kept under `other`"]
    return outside, _Model(root, weights, notes, is_said=True)


def _dicts_called(tensors: Mapping[str, Stored], name: str) -> list[Steps]:
    """The dicts with this full name; else those whose last key it is."""
    roots: dict[Steps, None] = {}
    for stored in tensors.values():
        roots |= dict.fromkeys(prefixes(stored.path))
    full = [root for root in roots if joined(root) == name]
    return full or [root for root in roots if root and str(root[-1]) == name]


def _cut_at(tensors: Mapping[str, Stored], name: str) -> dict[str, Stored]:
    """The tensors, where a dict with names that begin with `name` is one dict more for each such
    beginning.
    """
    depth = name.count(".") + 1
    cut: dict[str, Stored] = {}
    for key, stored in tensors.items():
        *parents, last = stored.path
        *first, rest = str(last).split(".", depth)
        path = (*parents, *first, rest) if len(first) == depth else stored.path
        cut[key] = replace(stored, path=path)
    return cut


def model_names(paths: Sequence[Steps]) -> list[str]:
    """What the models may be called of tensors at these paths: the dicts that lie side by side, or
    the first words of names in one dict.

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
    """The dicts that lie in the dict `root`."""
    depth = len(root) + 1
    return {path[:depth] for path in paths if len(path) > depth}


def _weights(model: Steps, tensors: Mapping[str, Stored]) -> dict[str, str]:
    """The tensors that lie in the dict `model`, with their names from there."""
    inner = {name: relative(stored.path, model) for name, stored in tensors.items()}
    return {name: joined(path) for name, path in inner.items() if path is not None}


def _notes_on_copies(model: Steps, names: Collection[str], dicts: _DictsByName) -> list[str]:
    """A note on the dicts beside the model that have every name of it; none if there are none."""
    with_every_name = set[Steps].intersection(*(dicts[name] for name in names))
    copies = ", ".join(sorted(map(dict_name, with_every_name - {model})))
    if not copies:
        return []
    return [
        f"{dict_name(model)} is taken for the model; {copies} with the same names is kept under"
        " `other`"
    ]


def _dicts_by_name(paths: Iterable[Steps]) -> dict[str, set[Steps]]:
    """The dicts in which, at any depth, there is a tensor of a name."""
    dicts: dict[str, set[Steps]] = defaultdict(set)
    for path in paths:
        for root, name in names_by_dict(path):
            dicts[name].add(root)
    return dicts


def _named_by_states(dicts: _DictsByName, optimizers: Iterable[OptimizerDict]) -> list[Steps]:
    """The dicts in which most states name a parameter; of several, those under a usual word."""
    hits: Counter[Steps] = Counter()
    for optimizer in optimizers:
        for readings in optimizer.states.values():
            named = [dicts.get(str(owner), ()) for owner, _ in readings if isinstance(owner, str)]
            hits.update(set[Steps]().union(*named))
    most = max(hits.values(), default=0)
    roots = [root for root, count in hits.items() if count == most]
    return list(filter(has_word, roots)) or roots


def _under_model_words(dicts: _DictsByName) -> list[Steps]:
    """The dicts under a usual word, in no other such dict."""
    roots = set[Steps]().union(*dicts.values())
    return [root for root in roots if has_word(root) and not has_word(root[:-1])]


def _only_dict(paths: Collection[Steps], dicts: _DictsByName) -> list[Steps]:
    """The outermost dict, if tensors lie in it; else the one dict in which all tensors lie."""
    if any(() in roots for roots in dicts.values()):
        return [()]
    parents = {path[:-1] for path in paths}
    by_name = all(isinstance(path[-1], str) for path in paths)
    return [*parents] if by_name and len(parents) == 1 else []


def has_word(path: Steps) -> bool:
    """Whether a path leads through a dict under a usual word for a model."""
    return not MODEL_WORDS.isdisjoint(path)
