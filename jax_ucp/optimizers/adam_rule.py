"""Whether what optax keeps are the moments of Adam, or of SGD, and moves weights as theirs do.

Adamax, Yogi and ADOPT keep other sums in a state of Adam's type, and with Nesterov's step the same
sums move weights otherwise. So an optimizer is asked for one update from chosen moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_ucp.arrays.optimizer_groups import Group
from jax_ucp.optimizers.settings import TRIES, small
from jax_ucp.optimizers.slots import OptaxLeaf, few, param_leaves, slots_of

# Small enough that no clipping begins; moments in float16 have few digits below 6e-5.
_GRADIENT, _GRADIENT_FLOAT16 = 2e-6, 1e-3

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
    rest, twice = probe.after(1, 1, 0), probe.after(0, 0, 2 * probe.gradient)
    once, used = probe.after(0, 0, probe.gradient), probe.after(0, 100, probe.gradient)
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
            f"{few(names)}: tx keeps in a {state} what is not the {role} of {whose}, in at most"
            f" {TRIES} updates by gradients of {probe.gradient}; optax's {others_of} keep other"
            " sums, and what clips, normalises or negates gradients before changes the sum; give"
            " the optimizer that was trained with"
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
    # without momentum Nesterov's step is the plain one
    firsts = {key for key in probe.keys if key[0] != "exp_avg_sq" and kept[key]}
    is_ahead = probe.is_ahead(firsts)
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
        if is_ahead.get((role, name), nesterov) != nesterov:
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
    types, by role and parameter, `precision` that of their dtypes, `gradient` a small one that
    these hold.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any):
        self._tx, self._step, self._read = tx, jax.jit(self._stepped), jax.jit(_first_numbers)
        self._params = jax.tree.map(lambda p: jnp.zeros(small(p.shape), jnp.float32), params)
        _, self._slots = slots_of(tx, self._params)
        moments = [slot for slot in self._slots if _is_moment(slot)]
        self.keys = [(slot.role, slot.param) for slot in moments]
        self.precision = {
            (slot.role, slot.param): float(jnp.finfo(slot.value.dtype).eps) for slot in moments
        }
        is_float16 = any(slot.value.dtype == jnp.float16 for slot in moments)
        self.gradient = _GRADIENT_FLOAT16 if is_float16 else _GRADIENT

    def after(self, first: float, second: float, gradient: float) -> Moments:
        """The moments, each after the first update that changes it.

        Before it all first and second moments are `first` and `second`, and gradients `gradient`.
        """
        begun = self._moments(self._with_moments(self._tx.init(self._params), first, second))
        changed: dict[tuple[str, str], float] = {}
        for _, moments in self._updates(first, second, gradient):
            changed = {key: m for key, m in moments.items() if m != begun[key]} | changed
            if len(changed) == len(begun):
                break
        return {**begun, **changed}

    def is_ahead(self, keys: Set[tuple[str, str]]) -> dict[tuple[str, str], bool]:
        """Whether a first moment moves its weight less than a gradient that makes the same moment,
        as Nesterov's step does, of those of `keys` whose weights `tx` moves.

        Each is decided by the first update that moves its weight.
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

    def _with_moments(self, state: Any, first: float, second: float) -> Any:
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
        """Updates one after the other, by the parameter's name, and the moments after each.

        Each begins with the same moments, so that it says the same of them after any warm-up.
        """
        state, names = self._tx.init(self._params), param_leaves(self._params)
        for _ in range(TRIES):
            # of one type, so that JAX compiles one step
            moved, state = self._step(state, float(first), float(second), float(gradient))
            yield dict(zip(names, moved.tolist(), strict=True)), self._moments(state)

    def _stepped(
        self, state: Any, first: float, second: float, gradient: float
    ) -> tuple[jax.Array, Any]:
        """The first number of each parameter's update, and the state after it."""
        gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), self._params)
        begun = self._with_moments(state, first, second)
        updates, state = self._tx.update(gradients, begun, self._params)
        return _first_numbers([*param_leaves(updates).values()]), state

    def _moments(self, state: Any) -> Moments:
        leaves = zip(self._slots, jax.tree.leaves(state), strict=True)
        moments = [leaf for slot, leaf in leaves if _is_moment(slot)]
        return dict(zip(self.keys, self._read(moments).tolist(), strict=True))


def _first_numbers(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.ravel(array)[0].astype(jnp.float32) for array in arrays])


def _is_moment(slot: OptaxLeaf) -> bool:
    return slot.owner in (optax.ScaleByAdamState, optax.TraceState) and bool(slot.param)
