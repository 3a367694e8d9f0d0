"""Adam's two moments of each parameter of a tree, and the update that follows from them."""

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

# The names in torch's and optax's Adam of the averages of gradients and of their squares.
_TORCH = "exp_avg", "exp_avg_sq"
_OPTAX = "mu", "nu"


@dataclass(frozen=True, slots=True)
class Moments:
    """A parameter and its moments, `m` and `v`; its optimizer's settings; and if it has a count of
    steps, the parameter to read that from.
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
    """All arrays in groups to read together: a parameter with its moments, or one other array."""
    moments: list[Moments] = []
    for name, parameter in params.items():
        states = parameter.states
        if states.keys() >= {*_TORCH}:
            m, v = operator.itemgetter(*_TORCH)(states)
            counted = parameter if "step" in states else None
            moments.append(Moments(states["param"], m, v, settings.get(name, {}), counted))
    moments = moments or list(_moments_of_optax(leaves))
    by_param = {
        each.param.name: each
        for each in moments
        if each.param.shape == each.m.shape == each.v.shape
    }
    shown_with_params: set[str] = set()
    for each in by_param.values():
        shown_with_params |= {each.m.name, each.v.name}
    rest = [leaf for leaf in leaves if leaf.has_array and leaf.name not in shown_with_params]
    groups: list[Together] = []
    for leaf in rest:
        own = by_param.get(leaf.name)
        groups.append(Together((leaf, own.m, own.v), _adam_step(own)) if own else Together((leaf,)))
    return groups


def _adam_step(moments: Moments) -> AdamStep:
    """The last update of the parameter, or if settings or the count are missing, `m / sqrt(v)`."""
    settings = moments.settings
    betas = settings.get("betas")
    if moments.counted is None or not isinstance(betas, list):
        return AdamStep()
    numbers = settings.get("lr"), settings.get("eps"), *betas
    if len(numbers) != 4 or not {int, float}.issuperset(map(type, numbers)):
        return AdamStep()
    try:
        count = moments.counted.read("step")
    except UCPError:
        return AdamStep()  # the error is reported with the array `step`
    steps = int(count.reshape(())) if count.size == 1 and np.isfinite(count).all() else 0
    first, second = (1 - beta**steps for beta in betas)
    if 0 in (first, second):
        return AdamStep()
    return AdamStep(settings["lr"], first, second, settings["eps"])


def _moments_of_optax(leaves: Sequence[Leaf]) -> Iterator[Moments]:
    """Optax's moments `.../mu/PATH` and `.../nu/PATH`, each with the only parameter at PATH."""
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
