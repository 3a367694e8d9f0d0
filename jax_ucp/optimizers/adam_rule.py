"""Whether what optax keeps in a ScaleByAdamState are Adam's moments.

Adamax, Yogi and ADOPT keep other sums in a state of the same type. So an optimizer is asked for one
update from chosen moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_ucp.arrays.optimizer_groups import Group
from jax_ucp.optimizers.settings import TRIES
from jax_ucp.optimizers.slots import OptaxLeaf, few, slots_of

# Small enough that no clipping begins, and not too small for moments in 16 bits.
_GRADIENT = 2e-6

Moments = Mapping[tuple[str, str], float]


def rule_faults(
    tx: optax.GradientTransformation, params: Any, groups: Sequence[Group] = ()
) -> Iterator[str]:
    """Messages about moments in a ScaleByAdamState that `tx` does not update as Adam does, or with
    other betas than `groups` say; `params` is the model's tree of arrays or of their shapes.
    """
    probe = _Probe(tx, params)
    if not probe.keys:
        return
    # moments after an update of ones, of zeros by one and by two gradients, and beside large ones
    rest, twice = probe.after(1, 1, 0), probe.after(0, 0, 2 * _GRADIENT)
    once, used = probe.after(0, 0, _GRADIENT), probe.after(0, 100, _GRADIENT)
    others: dict[str, list[str]] = {"exp_avg": [], "exp_avg_sq": []}
    for key in probe.keys:
        # a moment of Adam decays, and grows as the gradient or its square
        role, param = key
        is_square, by_one = role == "exp_avg_sq", once[key] or np.nan
        is_adams = rest[key] < 1 and _is_about(twice[key] / by_one, 4 if is_square else 2)
        if not (is_adams and (is_square or _is_about(used[key] / by_one, 1))):
            others[role].append(param)
    for role, names in others.items():
        if names:
            yield (
                f"{few(names)}: tx keeps in a ScaleByAdamState what is not the {role} of Adam, as"
                " optax's adamax, yogi and adopt do; give the optimizer that was trained with"
            )
    yield from _beta_faults(probe, rest, groups)


def _beta_faults(probe: _Probe, kept: Moments, groups: Sequence[Group]) -> Iterator[str]:
    """Messages about moments that `tx` multiplies by another number than the groups' betas.

    `kept` has that number.
    """
    unlike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    betas_of = {name: group.settings.get("betas") for group in groups for name in group.params}
    for role, name in probe.keys:
        match betas_of.get(name):
            case [int() | float() as first, int() | float() as second]:
                beta = first if role == "exp_avg" else second
                if abs(kept[role, name] - beta) > 4 * probe.precision[role, name]:
                    unlike[role, f"{beta}", f"{kept[role, name]:.4g}"].append(name)
            case _:
                pass
    for (role, beta, found), names in unlike.items():
        yield (
            f"{few(names)}: the checkpoint's optimizer keeps {beta} of {role} at an update (betas),"
            f" tx {found}; give tx the same"
        )


def _is_about(ratio: float, wanted: float) -> bool:
    return 0.75 < ratio / wanted < 1.33


class _Probe:
    """An optimizer asked for updates of small arrays; `keys` are its moments of Adam's type, by
    role and parameter, `precision` that of their dtypes.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any):
        self._tx, self._update = tx, jax.jit(tx.update)
        self._params = jax.tree.map(
            lambda p: jnp.zeros([min(size, 2) for size in p.shape], jnp.float32), params
        )
        _, self._slots = slots_of(tx, self._params)
        moments = [slot for slot in self._slots if _is_moment(slot)]
        self.keys = [(slot.role, slot.param) for slot in moments]
        self.precision = {
            (slot.role, slot.param): float(jnp.finfo(slot.value.dtype).eps) for slot in moments
        }

    def after(self, first: float, second: float, gradient: float) -> Moments:
        """The moments after the first update that changes any.

        Before it all first and second moments are `first` and `second`, and gradients `gradient`.
        """
        state = self._tx.init(self._params)
        value_of = {"exp_avg": first, "exp_avg_sq": second}
        values = [
            jnp.full_like(leaf, value_of[slot.role]) if _is_moment(slot) else leaf
            for slot, leaf in zip(self._slots, jax.tree.leaves(state), strict=True)
        ]
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


def _is_moment(slot: OptaxLeaf) -> bool:
    return slot.owner is optax.ScaleByAdamState and bool(slot.param)
