"""Whether what optax keeps are the moments of Adam, or of SGD, and moves weights as theirs do.

Adamax, Yogi and ADOPT keep other sums in a state of Adam's type, and with Nesterov's step the same
sums move weights otherwise. So an optimizer is asked for one update from chosen moments.
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
from jax_ucp.optimizers.slots import OptaxLeaf, few, param_leaves, slots_of

# Small enough that no clipping begins, and not too small for moments in 16 bits.
_GRADIENT = 2e-6

# Of a moment: the state of optax that has it, whose it is, and what else optax keeps there.
_ADAM = "ScaleByAdamState", "Adam", "adamax, yogi and adopt"
_OWNERS = {
    "exp_avg": _ADAM,
    "exp_avg_sq": _ADAM,
    "momentum_buffer": ("TraceState", "SGD", "lars and traces after a learning rate"),
}

Moments = Mapping[tuple[str, str], float]


def rule_faults(
    tx: optax.GradientTransformation, params: Any, groups: Sequence[Group] = ()
) -> Iterator[str]:
    """Messages about moments that `tx` does not sum as Adam or SGD does, or about other betas,
    another momentum or Nesterov's step than `groups` say; `params` is the model's tree of arrays or
    of their shapes.
    """
    probe = _Probe(tx, params)
    if not probe.keys:
        return
    # moments after an update of ones, of zeros by one and by two gradients, and beside large ones
    rest, twice = probe.after(1, 1, 0), probe.after(0, 0, 2 * _GRADIENT)
    once, used = probe.after(0, 0, _GRADIENT), probe.after(0, 100, _GRADIENT)
    others: dict[str, list[str]] = defaultdict(list)
    for key in probe.keys:
        # a moment decays, and grows as the gradient or its square; LARS sums updates
        role, param = key
        is_square, by_one = role == "exp_avg_sq", once[key] or np.nan
        is_sum = rest[key] < 1 and by_one > 0
        is_sum = is_sum and _is_about(twice[key] / by_one, 4 if is_square else 2)
        if not (is_sum and (is_square or _is_about(used[key] / by_one, 1))):
            others[role].append(param)
    for role, names in others.items():
        state, whose, others_of = _OWNERS[role]
        yield (
            f"{few(names)}: tx keeps in a {state} what is not the {role} of {whose}, as optax's"
            f" {others_of} do; give the optimizer that was trained with"
        )
    if groups:
        yield from _kept_faults(probe, rest, groups)


def _kept_faults(probe: _Probe, kept: Moments, groups: Sequence[Group]) -> Iterator[str]:
    """Messages, one for each difference, about moments of which `tx` keeps another part at an
    update than the groups' betas or momentum say, or takes Nesterov's step where they do not, or
    does not where they do.

    `kept` has the part that `tx` keeps.
    """
    unlike: dict[tuple[str, str], list[str]] = defaultdict(list)
    settings_of = {name: group.settings for group in groups for name in group.params}
    is_ahead = probe.is_ahead()
    for role, name in probe.keys:
        settings = settings_of.get(name, {})
        setting, declared = _declared(role, settings)
        if not setting:
            continue
        found = kept[role, name]
        if abs(found - declared) > 4 * probe.precision[role, name]:
            keeps = f"keeps {declared} of {role} at an update ({setting})"
            unlike[keeps, f"{found:.4g}"].append(name)
        nesterov = bool(settings.get("nesterov"))
        if role != "exp_avg_sq" and is_ahead[role, name] != nesterov:
            unlike[f"has nesterov={nesterov}", str(not nesterov)].append(name)
    for (does, found), names in unlike.items():
        yield f"{few(names)}: the checkpoint's optimizer {does}, tx {found}; give tx the same"


def _declared(role: str, settings: Mapping[str, Any]) -> tuple[str, float]:
    """The setting that says what is kept of a moment at an update, and its value; or ""."""
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
    """An optimizer asked for updates of small arrays; `keys` are its moments of Adam's and SGD's
    types, by role and parameter, `precision` that of their dtypes.
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
        begun = moments = self._moments(self._begun(first, second))
        for _, moments in self._updates(first, second, gradient):
            if moments != begun:
                break
        return moments

    def is_ahead(self) -> dict[tuple[str, str], bool]:
        """Whether a first moment moves its weight less than a gradient that makes the same moment,
        as Nesterov's step does; False where `tx` moves nothing.
        """
        ahead = dict.fromkeys(self.keys, False)
        kept = self._updates(_GRADIENT, 1, 0)
        for (of_kept, old), (of_new, new) in zip(kept, self._updates(0, 1, _GRADIENT), strict=True):
            if not any(of_new.values()):
                continue
            for key in self.keys:
                of_moment, of_gradient = of_kept[key[1]] * new[key], of_new[key[1]] * old[key]
                ahead[key] = abs(of_moment) < 0.9 * abs(of_gradient)
            break
        return ahead

    def _begun(self, first: float, second: float) -> Any:
        """The state of `tx` before any update, with `first` and `second` as its moments."""
        state = self._tx.init(self._params)
        values = [
            jnp.full_like(leaf, second if slot.role == "exp_avg_sq" else first)
            if _is_moment(slot)
            else leaf
            for slot, leaf in zip(self._slots, jax.tree.leaves(state), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(state), values)

    def _updates(
        self, first: float, second: float, gradient: float
    ) -> Iterator[tuple[Mapping[str, float], Moments]]:
        """Updates one after the other, by the parameter's name, and the moments after each."""
        state = self._begun(first, second)
        gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), self._params)
        for _ in range(TRIES):
            updates, state = self._update(gradients, state, self._params)
            moved = {name: float(jnp.ravel(u)[0]) for name, u in param_leaves(updates).items()}
            yield moved, self._moments(state)

    def _moments(self, state: Any) -> Moments:
        leaves = zip(self._slots, jax.tree.leaves(state), strict=True)
        return {
            (slot.role, slot.param): float(jnp.ravel(leaf)[0])
            for slot, leaf in leaves
            if _is_moment(slot)
        }


def _is_moment(slot: OptaxLeaf) -> bool:
    return slot.owner in (optax.ScaleByAdamState, optax.TraceState) and bool(slot.param)
