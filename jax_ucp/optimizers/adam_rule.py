"""Whether what optax keeps in a ScaleByAdamState are Adam's moments.

Adamax, Yogi and ADOPT keep other sums in a state of the same type, so that a checkpoint of Adam loads into them without
a word. What an optimizer sums is found by asking it for one update from chosen moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    small = jax.tree.map(lambda p: jnp.zeros([min(size, 2) for size in p.shape], jnp.float32), params)
    _, slots = slots_of(tx, small)
    of_adam = [slot for slot in slots if slot.owner is optax.ScaleByAdamState and slot.param]
    if not of_adam:
        return
    update = jax.jit(tx.update)

    def after(first: float, second: float, gradient: float) -> Moments:
        """The moments after one update from these, which an optimizer makes that gathers gradients first, too."""
        state = tx.init(small)
        values = [_started(slot, leaf, first, second) for slot, leaf in zip(slots, jax.tree.leaves(state), strict=True)]
        state = jax.tree.unflatten(jax.tree.structure(state), values)
        gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), small)
        begun = found = _moments(slots, state)
        for _ in range(TRIES):
            _, state = update(gradients, state, small)
            found = _moments(slots, state)
            if found != begun:
                break
        return found

    rest, once, twice = after(1, 1, 0), after(0, 0, _GRADIENT), after(0, 0, 2 * _GRADIENT)
    used = after(0, 100, _GRADIENT)
    other: dict[str, list[str]] = {"exp_avg": [], "exp_avg_sq": []}
    for slot in of_adam:
        key = (slot.role, slot.param)
        grows = 2 if slot.role == "exp_avg" else 4
        as_adam = rest[key] < 1 and 0.75 < twice[key] / (grows * once[key] or np.nan) < 1.33
        if slot.role == "exp_avg":
            as_adam = as_adam and 0.75 < used[key] / once[key] < 1.33
        if not as_adam:
            other[slot.role].append(slot.param)
    for role, names in other.items():
        if names:
            yield (
                f"{few(names)}: tx keeps in a ScaleByAdamState what is no {role} of Adam, as optax's adamax, yogi and "
                "adopt do; give the optimizer that was trained with"
            )


def _started(slot: Slot, leaf: jax.Array, first: float, second: float) -> jax.Array:
    if slot.owner is not optax.ScaleByAdamState or not slot.param:
        return leaf
    return jnp.full_like(leaf, first if slot.role == "exp_avg" else second)


def _moments(slots: Sequence[Slot], state: Any) -> Moments:
    return {
        (slot.role, slot.param): float(jnp.ravel(leaf)[0])
        for slot, leaf in zip(slots, jax.tree.leaves(state), strict=True)
        if slot.owner is optax.ScaleByAdamState and slot.param
    }
