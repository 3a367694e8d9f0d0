"""Which arrays of a tree are Adam's two moments of which parameter, and which step they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ucp.inspection.parameters import Parameter
from jax_ucp.inspection.statistics import AdamStep, Together
from jax_ucp.tree import Leaf

# What torch's and optax's Adam call the averages of gradients and of their squares.
_TORCH = "exp_avg", "exp_avg_sq"
_OPTAX = "mu", "nu"


class Moments(NamedTuple):
    """A parameter and its moments; `settings` and `count` are empty where nothing says them."""

    param: Leaf
    first: Leaf
    second: Leaf
    settings: Mapping[str, Any] = {}
    count: Parameter | None = None


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
    rest = {leaf.name for each in first.values() for leaf in (each.first, each.second)}
    return [
        Together((leaf, each.first, each.second), adam_step(each))
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
    count = _count(moments.count) if moments.count else 0
    if not (count and is_step_known(moments.settings)):
        return AdamStep()
    first, second = (1 - beta**count for beta in moments.settings["betas"])
    if not (first and second):
        return AdamStep()
    return AdamStep(moments.settings["lr"], first, second, moments.settings["eps"])


def _count(parameter: Parameter) -> int:
    """The number of steps, if that is one number."""
    count = np.asarray(parameter.read("step"))
    return int(count.reshape(())) if count.size == 1 and np.isfinite(count).all() else 0


def _moments_of_params(
    params: Mapping[str, Parameter], settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[Moments]:
    """Those of a trainer's tree, {state: {parameter: array}}."""
    for name, parameter in params.items():
        states = parameter.states
        if all(state in states for state in _TORCH):
            pair = (states[state] for state in _TORCH)
            count = parameter if "step" in states else None
            yield Moments(states["param"], *pair, settings.get(name, {}), count)


def _moments_of_optax(leaves: Sequence[Leaf]) -> Iterator[Moments]:
    """Those of a tree with optax's states, `.../mu/PATH` and `.../nu/PATH`, whose parameter is the
    one other leaf with a path that ends so; where several are, none is taken.
    """
    arrays = {tuple(map(str, leaf.path)): leaf for leaf in leaves if leaf.has_array}
    inside = {path: _after(path) for path in arrays}
    params: dict[tuple[str, ...], list[Leaf]] = {}
    for path, leaf in arrays.items():
        if inside[path] is None:
            params.setdefault(path[1:], []).append(leaf)
    for path, leaf in arrays.items():
        rest = inside[path]
        if rest is None or path[-len(rest) - 1] != _OPTAX[0] or len(params.get(rest, ())) != 1:
            continue
        second = arrays.get((*path[: -len(rest) - 1], _OPTAX[1], *rest))
        if second is not None:
            yield Moments(params[rest][0], leaf, second)


def _after(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """What of a path comes after `mu` or `nu`, if that is in it."""
    for i, name in enumerate(path[:-1]):
        if name in _OPTAX:
            return path[i + 1 :]
    return None


def _are_alike(moments: Moments) -> bool:
    """Whether all three have one shape, and numbers that are read as they are."""
    shapes = {moments.param.shape, moments.first.shape, moments.second.shape}
    return len(shapes) == 1
