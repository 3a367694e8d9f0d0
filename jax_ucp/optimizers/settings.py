"""Checks that an optax optimizer has the weight decay, eps and learning rates of a trainer's.

No state shows them, so an optimizer is run on small arrays: with zero moments and zero gradients,
only decay changes a weight. In torch's AdamW and SGD, and in Lion, the change is proportional to
the weight; torch's Adam adds decay to the gradient, which Adam then normalises
(`torch/optim/adam.py`, 2.13: `decoupled_weight_decay` of a group tells which).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
import optax

from jax_ucp.arrays.optimizer_groups import Group, settings_by_parameter
from jax_ucp.optimizers.slots import few
from jax_ucp.optimizers.small_run import SmallRun, Updates

# Settings of Adam's moments and of SGD's; a gradient that is too small to be clipped, and the least
# one whose second moment float32 has.
_MOMENTS, _NOT_CLIPPED, _LEAST = ("betas", "momentum"), 1e-6, 1e-16
# The relative tolerance for rates and eps, which may be measured on weights of 16 bits.
_TOLERANCE = 0.05

Decay = Literal["none", "in proportion", "through the gradient"]


def setting_faults(groups: Sequence[Group], run: SmallRun) -> Iterator[str]:
    """Messages about parameters for which an optimizer has another weight decay, eps or learning
    rate than `groups` say.

    Groups name parameters by their paths in the model's tree. For Adam and SGD the rate of weight
    decay is measured by comparison with the update by a gradient of known size. Learning rates
    follow schedules, so only their ratios between parameters are compared.
    """
    settings_of = settings_by_parameter(groups)
    updates = TrialUpdates(run) if settings_of else None
    if updates is None or not (decays := updates.decays()):
        return
    unit = updates.after(0.0, 1.0)
    unlike: dict[tuple[str, float, str], list[str]] = defaultdict(list)
    others: dict[str, list[str]] = defaultdict(list)
    rates: dict[str, tuple[float, float]] = {}  # the checkpoint's, and the size of tx's update
    for name, settings in settings_of.items():
        if name not in decays:
            continue
        if other := _other_optimizer(settings):
            others[other].append(name)
        rate, decoupled = settings.get("weight_decay"), settings.get("decoupled_weight_decay")
        if rate is not None and (fault := _fault(rate, decoupled, decays[name])):
            yield f"{name}: the checkpoint's optimizer {fault}"
        elif not settings.keys().isdisjoint(_MOMENTS) and unit[name]:
            if settings.get("bias_correction") in (False, 0):
                unlike["bias_correction", False, "True, as all of optax"].append(name)
            # an update of SGD has the size of the gradient, unless that is clipped
            size = 1.0 if "betas" in settings else _NOT_CLIPPED
            by_one = abs(updates.after(0.0, size)[name]) / size
            if isinstance(lr := settings.get("lr"), float) and lr:
                rates[name] = lr, by_one
            if rate and decays[name] == "in proportion":
                decayed = abs(updates.after(1.0, 0.0)[name]) / by_one
                if not _is_about(decayed, rate):
                    unlike["weight_decay", rate, f"about {decayed:.2g}"].append(name)
            eps = settings.get("eps")
            if not isinstance(eps, float) or not eps:  # CAME has two
                continue
            if (of_tx := updates.other_eps(name, eps, by_one)) is not None:
                unlike["eps", eps, f"about {of_tx:.2g}"].append(name)
    for other, names in others.items():
        yield (
            f"{few(names)}: the checkpoint's optimizer is {other}, whose states have the names of"
            " another's; give the optimizer that was trained with, and check=False"
        )
    yield from _rate_faults(rates)
    for (setting, declared, of_tx), names in unlike.items():
        yield (
            f"{few(names)}: the checkpoint's optimizer has {setting}={declared}, tx {of_tx};"
            " give tx the same, or check=False"
        )


# Settings of optimizers whose states have the names of Adam's or SGD's, but whose updates differ:
# torch 2.13 `nadam.py`, `_muon.py`, DeepSpeed 0.19 `muon_optimizer.py`, `fused_lamb.py`, apex.
_OTHERS = {
    "momentum_decay": "NAdam",
    "ns_steps": "Muon",
    "use_muon": "Muon",
    "max_coeff": "LAMB",
    "grad_averaging": "LAMB",
}


def _other_optimizer(settings: Mapping[str, Any]) -> str:
    """The name of an optimizer other than Adam and SGD, by settings that only it has; else ""."""
    named = next((name for key, name in _OTHERS.items() if settings.get(key)), "")
    # torch's Adam has both, its RAdam the first alone (`adam.py`, `radam.py`)
    is_like_radam = "differentiable" in settings and "amsgrad" not in settings
    return named or ("RAdam, or one like it" if is_like_radam and "betas" in settings else "")


def _rate_faults(rates: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Messages about parameters whose learning rate equals that of the first parameter only in the
    checkpoint, or only in `tx`. `rates` has both by name, those of `tx` as the size of its update.
    """
    first, (stored_first, size_first) = next(iter(rates.items()), ("", (1.0, 1.0)))
    unlike: dict[tuple[float, str], list[str]] = defaultdict(list)
    for name, (stored, size) in rates.items():
        is_alike = _is_about(stored, stored_first)
        if is_alike != _is_about(size, size_first):
            unlike[stored, f"{size / size_first:.2g}"].append(name)
    for (stored, times), names in unlike.items():
        is_alike = _is_about(stored, stored_first)
        other = f"as for {first}" if is_alike else f"and {stored_first} for {first}"
        yield (
            f"{few(names)}: the checkpoint's optimizer has lr={stored}, {other}, and tx about"
            f" {times} times the rate of {first}; give tx rates of the same ratio"
            " (optax.partition), or check=False"
        )


def _is_about(measured: float, wanted: float) -> bool:
    return abs(measured / wanted - 1) < _TOLERANCE


def _fault(rate: float, decoupled: bool | None, decay: Decay) -> str | None:
    """The difference between a parameter's decay in the checkpoint and in `tx`, with the remedy."""
    if bool(rate) != (decay != "none"):
        does = "does not decay it" if rate else f"decays it {decay}"
        return (
            f"has weight_decay={rate} for it, and tx {does}; give tx the same mask, or check=False"
        )
    if not rate or decoupled is None or decoupled == (decay == "in proportion"):
        return None
    how = "in proportion (AdamW)" if decoupled else "through the gradient (Adam)"
    return (
        f"decays it {how}, tx {decay}; optax.adamw is torch's AdamW,"
        " chain(add_decayed_weights(...), adam(...)) its Adam; or check=False"
    )


class TrialUpdates:
    """Updates of an optimizer without moments.

    `first` is the number of the first update that changes anything, or None if none of 1,000 does.

    >>> params = {"w": np.ones(4), "b": np.ones(4)}
    >>> tx = optax.adamw(1e-3, mask={"w": True, "b": False})
    >>> TrialUpdates(SmallRun(tx, params)).decays()
    {'b': 'none', 'w': 'in proportion'}
    """

    def __init__(self, run: SmallRun) -> None:
        self._run = run
        self._known: dict[tuple[float, float], tuple[Updates, optax.OptState]] = {}
        moves = (any(update.values()) for update, _ in run.updates(1.0, 1.0))
        self.first = next((i for i, is_move in enumerate(moves) if is_move), None)

    def after(self, weight: float, gradient: float) -> Updates:
        """The update `first` of each parameter, if all weights and gradients have these values."""
        return self._after(weight, gradient)[0]

    def other_eps(self, name: str, eps: float, by_one: float) -> float | None:
        """The eps of `tx` if it is another than this; `by_one` is the size of an update by 1.

        An update by g has the size g / (g + eps) of that.
        """
        times = self.times.get(name, 1.0)
        size = max(eps / times, _LEAST)
        given = times * size
        share = abs(self.after(0.0, size)[name]) / by_one
        if _is_about(share, given / (given + eps)):
            return None
        return given / share - given if share else np.inf

    @cached_property
    def times(self) -> Mapping[str, float]:
        """How many times its gradient Adam is given of each parameter, as where several are summed:
        by its second moments, from which as many updates without gradients take a part.
        """
        state = self._after(0.0, _NOT_CLIPPED)[1]
        later, times = state, dict[str, float]()
        for _ in range((self.first or 0) + 1):
            _, later = self._run.update(later, 0.0, 0.0)
        before, after = self._squares(state), self._squares(later)
        for name, (square, count) in before.items():
            less, more = after[name]
            if 0 < less < square and count < more:
                kept = (less / square) ** (1 / (more - count))
                times[name] = (square / (1 - kept**count)) ** 0.5 / _NOT_CLIPPED
        return times

    def _squares(self, state: Any) -> dict[str, tuple[float, float]]:
        """The second moment of each parameter of Adam, and the number of its updates."""
        slots = zip(self._run.slots, jax.tree.leaves(state), strict=True)
        of_adam = [
            (s, float(np.ravel(x)[0])) for s, x in slots if s.owner is optax.ScaleByAdamState
        ]
        counts = {name: number for slot, number in of_adam for name in slot.covers}
        squares = {slot.param: number for slot, number in of_adam if slot.role == "exp_avg_sq"}
        return {name: (square, counts[name]) for name, square in squares.items()}

    def _after(self, weight: float, gradient: float) -> tuple[Updates, Any]:
        key = weight, gradient
        if key not in self._known:
            self._known[key] = next(itertools.islice(self._run.updates(*key), self.first, None))
        return self._known[key]

    def decays(self) -> dict[str, Decay]:
        """The kind of weight decay of each parameter; {} if `tx` changes none."""
        if self.first is None:
            return {}
        decays: dict[str, Decay] = {}
        twice = self.after(2.0, 0.0)
        for name, once in self.after(1.0, 0.0).items():
            is_proportional = abs(twice[name] - 2 * once) <= 0.2 * abs(once)
            decays[name] = "in proportion" if is_proportional else "through the gradient"
            if not once:
                decays[name] = "none"
        return decays
