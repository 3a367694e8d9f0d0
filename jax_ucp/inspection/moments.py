"""Which arrays of a tree are Adam's two moments of which parameter, and which step they mean."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_ucp.errors import UCPError
from jax_ucp.inspection.parameters import Parameter
from jax_ucp.inspection.statistics import AdamStep, Together
from jax_ucp.tree import Leaf

# What torch's and optax's Adam call the averages of gradients and of their squares.
_TORCH = "exp_avg", "exp_avg_sq"
_OPTAX = "mu", "nu"


@dataclass(frozen=True, slots=True)
class Moments:
    """A parameter and its moments, `m` and `v`.

    `settings` are those of its optimizer, and `counted` is what has its number of steps; empty and
    None where nothing says them.
    """

    param: Leaf
    m: Leaf
    v: Leaf
    settings: Mapping[str, Any] = field(default_factory=dict)
    counted: Parameter | None = None


def together(
    leaves: Sequence[Leaf],
    params: Mapping[str, Parameter],
    settings: Mapping[str, Mapping[str, Any]],
) -> list[Together]:
    """All arrays, each once: a parameter with its moments where it has them, others alone.

    `settings` are those of the optimizer by the name of a parameter.
    """
    moments = list(_moments_of_params(params, settings)) or list(_moments_of_optax(leaves))
    by_param = {each.param.name: each for each in filter(_are_alike, moments)}
    shown_with_params: set[str] = set()
    for each in by_param.values():
        shown_with_params |= {each.m.name, each.v.name}
    rest = [leaf for leaf in leaves if leaf.has_array and leaf.name not in shown_with_params]
    return [_together(leaf, by_param.get(leaf.name)) for leaf in rest]


def _together(leaf: Leaf, moments: Moments | None) -> Together:
    if moments is None:
        return Together((leaf,))
    return Together((leaf, moments.m, moments.v), adam_step(moments))


def is_step_known(settings: Mapping[str, Any]) -> bool:
    """Whether an optimizer's settings say how large its steps are."""
    betas = settings.get("betas")
    if not isinstance(betas, list):
        return False
    numbers = settings.get("lr"), settings.get("eps"), *betas
    return len(numbers) == 4 and {int, float}.issuperset(map(type, numbers))


def adam_step(moments: Moments) -> AdamStep:
    """How the parameter was moved last; where that is not known, by `m / sqrt(v)`, the direction
    of a step of rate 1.
    """
    if moments.counted is None or not is_step_known(moments.settings):
        return AdamStep()
    count = _count(moments.counted)
    first, second = (1 - beta**count for beta in moments.settings["betas"])
    if 0 in (first, second):
        return AdamStep()
    return AdamStep(moments.settings["lr"], first, second, moments.settings["eps"])


def _count(parameter: Parameter) -> int:
    """The number of steps, if that is one number that can be read."""
    try:
        count = parameter.read("step")
    except UCPError:
        return 0  # which is a fault of the array `step`
    return int(count.reshape(())) if count.size == 1 and np.isfinite(count).all() else 0


def _moments_of_params(
    params: Mapping[str, Parameter], settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[Moments]:
    """Those of a trainer's tree, {state: {parameter: array}}."""
    for name, parameter in params.items():
        states = parameter.states
        if states.keys() >= {*_TORCH}:
            m, v = operator.itemgetter(*_TORCH)(states)
            counted = parameter if "step" in states else None
            yield Moments(states["param"], m, v, settings.get(name, {}), counted)


def _moments_of_optax(leaves: Sequence[Leaf]) -> Iterator[Moments]:
    """Those of a tree with optax's states, `.../mu/PATH` and `.../nu/PATH`, whose parameter is the
    one other leaf with a path that ends so; where several are, none is taken.
    """
    params: dict[_Names, list[Leaf]] = defaultdict(list)
    moments: dict[str, dict[tuple[_Names, _Names], Leaf]] = defaultdict(dict)
    for leaf in leaves:
        names = tuple(map(str, leaf.path))
        kind = next(filter(_OPTAX.__contains__, names), None)
        if kind is None:
            params[names[1:]].append(leaf)
        else:
            at = names.index(kind)
            moments[kind][names[:at], names[at + 1 :]] = leaf
    first, second = _OPTAX
    for (before, path), m in moments[first].items():
        v = moments[second].get((before, path))
        candidates = params[path]
        if v is not None and len(candidates) == 1:
            yield Moments(candidates[0], m, v)


_Names = tuple[str, ...]


def _are_alike(moments: Moments) -> bool:
    """Whether all three have one shape."""
    shapes = {moments.param.shape, moments.m.shape, moments.v.shape}
    return len(shapes) == 1
