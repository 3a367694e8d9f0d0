"""Which arrays of a tree are Adam's two moments of which parameter, and which step they mean."""

from __future__ import annotations

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
    found = list(_moments_of_params(params, settings)) or list(_moments_of_optax(leaves))
    first = {each.param.name: each for each in found if _are_alike(each)}
    rest = {leaf.name for each in first.values() for leaf in (each.m, each.v)}
    return [
        Together((leaf, each.m, each.v), adam_step(each))
        if (each := first.get(leaf.name))
        else Together((leaf,))
        for leaf in leaves
        if leaf.has_array and leaf.name not in rest
    ]


def is_step_known(settings: Mapping[str, Any]) -> bool:
    """Whether an optimizer's settings say how large its steps are."""
    betas = settings.get("betas")
    numbers = settings.get("lr"), settings.get("eps"), *(betas if isinstance(betas, list) else ())
    return len(numbers) == 4 and all(type(n) in (int, float) for n in numbers)


def adam_step(moments: Moments) -> AdamStep:
    """How the parameter was moved last; where that is not known, by `m / sqrt(v)`, the direction
    of a step of rate 1.
    """
    if moments.counted is None or not is_step_known(moments.settings):
        return AdamStep()
    count = _count(moments.counted)
    first, second = (1 - beta**count for beta in moments.settings["betas"])
    if not (first and second):
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
        if all(state in states for state in _TORCH):
            m, v = (states[state] for state in _TORCH)
            counted = parameter if "step" in states else None
            yield Moments(states["param"], m, v, settings.get(name, {}), counted)


def _moments_of_optax(leaves: Sequence[Leaf]) -> Iterator[Moments]:
    """Those of a tree with optax's states, `.../mu/PATH` and `.../nu/PATH`, whose parameter is the
    one other leaf with a path that ends so; where several are, none is taken.
    """
    params: dict[_Names, list[Leaf]] = defaultdict(list)
    moments: dict[tuple[str, _Names, _Names], Leaf] = {}
    for leaf in leaves:
        names = tuple(map(str, leaf.path))
        at = next((i for i, name in enumerate(names) if name in _OPTAX), None)
        if at is None:
            params[names[1:]].append(leaf)
        else:
            moments[names[at], names[:at], names[at + 1 :]] = leaf
    for (kind, before, path), m in moments.items():
        v = moments.get((_OPTAX[1], before, path))
        if kind == _OPTAX[0] and v is not None and len(params[path]) == 1:
            yield Moments(params[path][0], m, v)


_Names = tuple[str, ...]


def _are_alike(moments: Moments) -> bool:
    """Whether all three have one shape."""
    shapes = {moments.param.shape, moments.m.shape, moments.v.shape}
    return len(shapes) == 1
