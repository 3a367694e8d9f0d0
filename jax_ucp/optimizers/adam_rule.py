"""Whether what optax keeps in a ScaleByAdamState are Adam's moments.

Adamax, Yogi and ADOPT keep other sums in a state of the same type, so that a checkpoint of Adam
loads into them without a word. What an optimizer sums is found by asking it for one update from
chosen moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_ucp.optimizers.slots import Slot, few, slots_of
from jax_ucp.optimizers.weight_decay import TRIES

# Small enough that no clipping begins, and not too small for moments in 16 bits.
_GRADIENT = 2e-6

Moments = Mapping[tuple[str, str], float]


def rule_faults(tx: optax.GradientTransformation, params: Any) -> Iterator[str]:
    """States of `tx` that have the type of Adam's, and are updated otherwise.

    `params` is the tree of the model, of arrays or ShapeDtypeStructs.
    """
    probe = _Probe(tx, params)
    if not probe.keys:
        return
    answers = _Answers(
        rest=probe.after(1, 1, 0),
        once=probe.after(0, 0, _GRADIENT),
        twice=probe.after(0, 0, 2 * _GRADIENT),
        used=probe.after(0, 100, _GRADIENT),
    )
    others: dict[str, list[str]] = {"exp_avg": [], "exp_avg_sq": []}
    for role, param in probe.keys:
        if not answers.are_adams(role, param):
            others[role].append(param)
    for role, names in others.items():
        if names:
            yield (
                f"{few(names)}: tx keeps in a ScaleByAdamState what is not the {role} of Adam, as"
                " optax's adamax, yogi and adopt do; give the optimizer that was trained with"
            )


@dataclass(frozen=True)
class _Answers:
    """Moments after an update: of ones, of zeros by one and two gradients, beside large ones."""

    rest: Moments
    once: Moments
    twice: Moments
    used: Moments

    def are_adams(self, role: str, param: str) -> bool:
        """Whether a moment decays, and grows as the gradient or its square."""
        key = role, param
        once = self.once[key] or np.nan
        fades = self.rest[key] < 1
        if role == "exp_avg_sq":
            return fades and _is_about(self.twice[key] / once, 4)
        return (
            fades and _is_about(self.twice[key] / once, 2) and _is_about(self.used[key] / once, 1)
        )


def _is_about(ratio: float, wanted: float) -> bool:
    return 0.75 < ratio / wanted < 1.33


class _Probe:
    """An optimizer asked for updates of small arrays; `keys` are its moments of Adam's type."""

    def __init__(self, tx: optax.GradientTransformation, params: Any):
        self._tx, self._update = tx, jax.jit(tx.update)
        self._params = jax.tree.map(
            lambda p: jnp.zeros([min(size, 2) for size in p.shape], jnp.float32), params
        )
        _, self._slots = slots_of(tx, self._params)
        self.keys = [(slot.role, slot.param) for slot in self._slots if _is_moment(slot)]

    def after(self, first: float, second: float, gradient: float) -> Moments:
        """The moments after the first update from these that changes them."""
        state = self._tx.init(self._params)
        leaves = zip(self._slots, jax.tree.leaves(state), strict=True)
        values = [_started(slot, leaf, first, second) for slot, leaf in leaves]
        state = jax.tree.unflatten(jax.tree.structure(state), values)
        gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), self._params)
        begun = moments = self._moments(state)
        for _ in range(TRIES):
            _, state = self._update(gradients, state, self._params)
            moments = self._moments(state)
            if moments != begun:
                break
        return moments

    def _moments(self, state: Any) -> Moments:
        leaves = zip(self._slots, jax.tree.leaves(state), strict=True)
        return {
            (slot.role, slot.param): float(jnp.ravel(leaf)[0])
            for slot, leaf in leaves
            if _is_moment(slot)
        }


def _is_moment(slot: Slot) -> bool:
    return slot.owner is optax.ScaleByAdamState and bool(slot.param)


def _started(slot: Slot, leaf: jax.Array, first: float, second: float) -> jax.Array:
    if not _is_moment(slot):
        return leaf
    return jnp.full_like(leaf, first if slot.role == "exp_avg" else second)
