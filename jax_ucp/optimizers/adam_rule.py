"""Checks that the moments of an optax optimizer are those of Adam or SGD, and are used in the same
way.

Adamax, Yogi and ADOPT keep other sums in a state of Adam's type, and with Nesterov's step the same
sums give other updates. So an optimizer is run for single updates from chosen moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ucp.arrays.optimizer_groups import Group, settings_by_parameter
from jax_ucp.optimizers.slots import few
from jax_ucp.optimizers.small_run import TRIES, Moments, SmallRun

# Small enough not to be clipped; moments in float16 have few digits below 6e-5.
_GRADIENT, _GRADIENT_FLOAT16 = 2e-6, 1e-3

# By moment: the state of optax that has it, the optimizer, and others that use the same state.
_ADAM = "ScaleByAdamState", "Adam", "adamax, yogi and adopt"
_OWNERS = {
    "exp_avg": _ADAM,
    "exp_avg_sq": _ADAM,
    "momentum_buffer": ("TraceState", "SGD", "lars and traces after a learning rate"),
}


def rule_faults(run: SmallRun, groups: Sequence[Group] = ()) -> Iterator[str]:
    """Messages about moments that an optimizer does not sum as Adam or SGD does, or whose betas,
    momentum or Nesterov's step differ from `groups`.
    """
    probe = _Probe(run)
    if not probe.keys:
        return
    # the moments after an update of ones without gradient, of zeros by a gradient of twice the size
    # and by one of its size, and by that beside a large second moment
    rest, twice = probe.after(1, 1, 0), probe.after(0, 0, 2 * probe.gradient)
    once, used = probe.after(0, 0, probe.gradient), probe.after(0, 100, probe.gradient)
    others: dict[str, list[str]] = defaultdict(list)
    for key in probe.keys:
        # a moment decays, and is proportional to the gradient or its square; LARS sums updates
        role, param = key
        is_square, by_one = role == "exp_avg_sq", once[key] or np.nan
        is_sum = rest[key] < 1 and by_one > 0
        is_sum = is_sum and _is_about(twice[key] / by_one, 4 if is_square else 2)
        if not (is_sum and (is_square or _is_about(used[key] / by_one, 1))):
            others[role].append(param)
    for role, names in others.items():
        state, whose, others_of = _OWNERS[role]
        yield (
            f"{few(names)}: tx keeps in a {state} what is not the {role} of {whose}, in at most"
            f" {TRIES} updates by gradients of {probe.gradient}; optax's {others_of} keep other"
            " sums, and what clips, normalises or negates gradients before changes the sum; give"
            " the optimizer that was trained with"
        )
    if groups:
        yield from _kept_faults(probe, rest, groups)


def _kept_faults(probe: _Probe, kept: Moments, groups: Sequence[Group]) -> Iterator[str]:
    """Messages, one for each difference, about moments that decay otherwise in `tx` than by the
    groups' betas or momentum, or for which only one of both takes Nesterov's step.

    `kept` has the part of each moment that remains after an update of `tx`.
    """
    unlike: dict[tuple[str, str], list[str]] = defaultdict(list)
    settings_of = settings_by_parameter(groups)
    # without momentum Nesterov's step is the plain one
    firsts = {key for key in probe.keys if key[0] != "exp_avg_sq" and kept[key]}
    is_ahead = probe.is_ahead(firsts)
    for role, name in probe.keys:
        settings = settings_of.get(name, {})
        setting, declared = _declared(role, settings)
        if not setting:
            continue
        measured = kept[role, name]
        if abs(measured - declared) > 4 * probe.precision[role, name]:
            keeps = f"keeps {declared} of {role} at an update ({setting})"
            unlike[keeps, f"{measured:.4g}"].append(name)
        nesterov = bool(settings.get("nesterov"))
        if is_ahead.get((role, name), nesterov) != nesterov:
            unlike[f"has nesterov={nesterov}", str(not nesterov)].append(name)
    for (does, of_tx), names in unlike.items():
        yield f"{few(names)}: the checkpoint's optimizer {does}, tx {of_tx}; give tx the same"


def _declared(role: str, settings: Mapping[str, Any]) -> tuple[str, float]:
    """The setting for the part of a moment that an update keeps, and its value; "" without one."""
    match role, settings:
        case "momentum_buffer", {"momentum": int() | float() as momentum}:
            return "momentum", momentum
        case "exp_avg", {"betas": [int() | float() as first, _]}:
            return "betas", first
        case "exp_avg_sq", {"betas": [_, int() | float() as second]}:
            return "betas", second
    return "", 0.0


def _is_about(ratio: float, wanted: float) -> bool:
    return 0.75 < ratio / wanted < 1.33


class _Probe:
    """An optimizer that is run for single updates. `keys` are its moments in states of Adam's and
    SGD's types, by role and parameter; `precision` has that of their dtypes; `gradient` is a small
    number that these dtypes represent.
    """

    def __init__(self, run: SmallRun) -> None:
        self._updates = run.updates_from
        self._dtypes = {(slot.role, slot.param): slot.value.dtype for slot in run.moments}
        self.keys = [*self._dtypes]
        self.precision = {key: float(jnp.finfo(x).eps) for key, x in self._dtypes.items()}
        is_float16 = jnp.float16 in self._dtypes.values()
        self.gradient = _GRADIENT_FLOAT16 if is_float16 else _GRADIENT

    def after(self, first: float, second: float, gradient: float) -> Moments:
        """The moments, each after the first update that changes it, by gradients of `gradient`,
        from first moments of `first` and second moments of `second`.
        """
        values = {key: second if key[0] == "exp_avg_sq" else first for key in self.keys}
        begun = {key: float(np.asarray(x, self._dtypes[key])) for key, x in values.items()}
        changed: dict[tuple[str, str], float] = {}
        for _, moments in self._updates(first, second, gradient):
            changed = {key: m for key, m in moments.items() if m != begun[key]} | changed
            if len(changed) == len(begun):
                break
        return {**begun, **changed}

    def is_ahead(self, keys: Set[tuple[str, str]]) -> dict[tuple[str, str], bool]:
        """Whether Nesterov's step is taken, for those of `keys` whose weights `tx` changes: a first
        moment then changes its weight less than a gradient that results in the same moment.

        Each is decided by the first update that changes its weight.
        """
        ahead: dict[tuple[str, str], bool] = {}
        kept, made = self._updates(self.gradient, 1, 0), self._updates(0, 1, self.gradient)
        for (of_kept, old), (of_made, new) in zip(kept, made, strict=True):
            for key in keys - ahead.keys():
                of_moment, of_gradient = of_kept[key[1]] * new[key], of_made[key[1]] * old[key]
                if of_moment and of_gradient:
                    # by a momentum m the ratio is at most m / (1 + m), without Nesterov's step 1
                    ahead[key] = abs(of_moment) < 0.75 * abs(of_gradient)
            if len(ahead) == len(keys):
                break
        return ahead
