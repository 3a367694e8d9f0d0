"""An optax optimizer that is run on small arrays in the place of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_ucp.layout.fragments import Shape
from jax_ucp.optimizers.slots import OptaxLeaf, param_leaves, slots_of

# The most updates that are tried: a schedule may begin at zero, and MultiSteps updates only after
# several steps.
TRIES = 1000

Updates = Mapping[str, float]  # of each parameter, by its name
Moments = Mapping[tuple[str, str], float]  # by role and parameter


class SmallRun:
    """An optimizer of arrays with as many axes as the parameters, of length 1 or 2, in which all
    weights have one value, and all gradients another. Of each array the first element is looked at.

    `slots` are the leaves of the state, and `moments` those of them that are in states of Adam's
    and SGD's types.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any) -> None:
        self._tx = tx
        self._small = jax.tree.map(lambda p: np.zeros(_small(p.shape), np.float32), params)
        self._names = [*param_leaves(self._small)]
        self._begun, self._step = jax.jit(tx.init)(self._small), jax.jit(self._stepped)
        _, self.slots = slots_of(tx, self._small)
        self.moments = [slot for slot in self.slots if _is_moment(slot)]

    def updates(self, weight: float, gradient: float) -> Iterator[tuple[Updates, optax.OptState]]:
        """Consecutive updates, and the state after each."""
        state = self._begun
        for _ in range(TRIES):
            updates, state = self.update(state, weight, gradient)
            yield updates, state

    def update(
        self, state: optax.OptState, weight: float, gradient: float
    ) -> tuple[Updates, optax.OptState]:
        """The update that follows on a state, and the state after it."""
        updates, _, state = self._step(state, weight, gradient)
        return dict(zip(self._names, updates.tolist(), strict=True)), state

    def updates_from(
        self, first: float, second: float, gradient: float
    ) -> Iterator[tuple[Updates, Moments]]:
        """Consecutive updates of weights of zero, and the moments after each.

        First moments are set to `first` and second ones to `second` before each, so that only
        schedules and counts differ between updates.
        """
        of_moments = {"exp_avg_sq": second}
        begun = [
            np.full(slot.value.shape, of_moments.get(slot.role, first), slot.value.dtype)
            if _is_moment(slot)
            else None
            for slot in self.slots
        ]
        state, keys = self._begun, [(slot.role, slot.param) for slot in self.moments]
        for _ in range(TRIES):
            pairs = zip(begun, jax.tree.leaves(state), strict=True)
            leaves = [leaf if moment is None else moment for moment, leaf in pairs]
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
            # always floats, so that JAX compiles only one step
            updates, moments, state = self._step(state, 0.0, float(gradient))
            of_params = dict(zip(self._names, updates.tolist(), strict=True))
            yield of_params, dict(zip(keys, moments.tolist(), strict=True))

    def _stepped(
        self, state: optax.OptState, weight: float, gradient: float
    ) -> tuple[jax.Array, jax.Array, optax.OptState]:
        updates, state = self._tx.update(self._filled(gradient), state, self._filled(weight))
        leaves = zip(self.slots, jax.tree.leaves(state), strict=True)
        moments = [leaf for slot, leaf in leaves if _is_moment(slot)]
        return _first_numbers(jax.tree.leaves(updates)), _first_numbers(moments), state

    def _filled(self, value: float) -> Any:
        return jax.tree.map(lambda p: jnp.full(p.shape, value, p.dtype), self._small)


def _small(shape: Shape) -> list[int]:
    """The shape of a small array, with elements, that stands for one of this shape."""
    return [min(max(size, 1), 2) for size in shape]


def _first_numbers(arrays: Sequence[jax.Array]) -> jax.Array:
    firsts = [lax.slice(array, [0] * array.ndim, [1] * array.ndim) for array in arrays]
    flat = [lax.reshape(first, (1,)).astype(jnp.float32) for first in firsts]
    return lax.concatenate(flat, 0) if flat else jnp.zeros(0)


def _is_moment(slot: OptaxLeaf) -> bool:
    return slot.owner in (optax.ScaleByAdamState, optax.TraceState) and bool(slot.param)
