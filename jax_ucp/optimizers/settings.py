"""Whether an optax optimizer has the weight decay, betas and eps that a trainer's had.

No state shows them, so an optimizer is asked for updates of small arrays: from zero moments and
zero gradients only decay moves a weight. Torch's AdamW and SGD, and Lion, move it in proportion to
itself; torch's Adam adds decay to the gradient, which Adam then normalises (`torch/optim/adam.py`,
2.13: `decoupled_weight_decay` of a group says which).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_ucp.arrays.optimizer_groups import Group
from jax_ucp.layout.fragments import Shape
from jax_ucp.optimizers.slots import few

# A schedule may begin at zero, and MultiSteps updates every so many steps: an optimizer is asked
# this often.
TRIES = 1000
# Settings of Adam's moments and of SGD's; a gradient that is too small to be clipped.
_MOMENTS, _NOT_CLIPPED = ("betas", "momentum"), 1e-6
# Of rates and eps that are measured on weights in 16 bits.
_TOLERANCE = 0.05

Decay = Literal["none", "in proportion", "through the gradient"]
Updates = Mapping[str, np.ndarray]


def setting_faults(
    groups: Sequence[Group], tx: optax.GradientTransformation, params: Any
) -> Iterator[str]:
    """Messages about parameters for which `tx` has another weight decay or eps than `groups` say.

    Groups name parameters by their paths in `params`. Of Adam and SGD the rate of weight decay is
    compared too: the update by a gradient of a known size says what to divide by. Learning rates
    follow schedules; of them it is compared whether parameters have the same one.
    """
    settings_of = {name: group.settings for group in groups for name in group.params}
    updates = TrialUpdates(tx, params) if settings_of else None
    if updates is None or not (decays := updates.decays()):
        return
    unit = updates.after(0.0, 1.0)
    unlike: dict[tuple[str, float, str], list[str]] = defaultdict(list)
    others: dict[str, list[str]] = defaultdict(list)
    rates: dict[str, tuple[float, float]] = {}  # the checkpoint's, and that of the first update
    for name, settings in settings_of.items():
        if name not in decays:
            continue
        if other := _other_optimizer(settings):
            others[other].append(name)
        rate, decoupled = settings.get("weight_decay"), settings.get("decoupled_weight_decay")
        if rate is not None and (fault := _fault(rate, decoupled, decays[name])):
            yield f"{name}: the checkpoint's optimizer {fault}"
        elif not settings.keys().isdisjoint(_MOMENTS) and unit[name].any():
            if settings.get("bias_correction") in (False, 0):
                unlike["bias_correction", False, "True, as all of optax"].append(name)
            # an update of SGD is as long as its gradient, unless that is clipped
            size = 1.0 if "betas" in settings else _NOT_CLIPPED
            by_one = float(np.abs(updates.after(0.0, size)[name]).max()) / size
            if isinstance(lr := settings.get("lr"), float) and lr:
                rates[name] = lr, by_one
            if rate and decays[name] == "in proportion":
                decayed = float(np.abs(updates.after(1.0, 0.0)[name]).max()) / by_one
                if not _is_about(decayed, rate):
                    unlike["weight_decay", rate, f"about {decayed:.2g}"].append(name)
            if isinstance(eps := settings.get("eps"), float) and eps:  # CAME has two
                # an update by g is as long as g / (g + eps)
                share = float(np.abs(updates.after(0.0, eps)[name]).max()) / by_one
                if not _is_about(2 * share, 1.0):
                    found = eps / share - eps if share else np.inf
                    unlike["eps", eps, f"about {found:.2g}"].append(name)
    for other, names in others.items():
        yield (
            f"{few(names)}: the checkpoint's optimizer is {other}, whose states have the names of"
            " another's; give the optimizer that was trained with, and check=False"
        )
    yield from _rate_faults(rates)
    for (setting, declared, found), names in unlike.items():
        yield (
            f"{few(names)}: the checkpoint's optimizer has {setting}={declared}, tx {found};"
            " give tx the same, or check=False"
        )


# Settings of optimizers whose states have the names of Adam's or SGD's, and that move weights
# otherwise: torch 2.13 `nadam.py`, `_muon.py`, DeepSpeed 0.19 `muon_optimizer.py`,
# `fused_lamb.py`, apex.
_OTHERS = {
    "momentum_decay": "NAdam",
    "ns_steps": "Muon",
    "use_muon": "Muon",
    "max_coeff": "LAMB",
    "grad_averaging": "LAMB",
}


def _other_optimizer(settings: Mapping[str, Any]) -> str:
    """The name of an optimizer that is neither Adam nor SGD, by the settings that it alone has."""
    named = next((name for key, name in _OTHERS.items() if settings.get(key)), "")
    # torch's Adam has both, its RAdam the first alone (`adam.py`, `radam.py`)
    is_like_radam = "differentiable" in settings and "amsgrad" not in settings
    return named or ("RAdam, or one like it" if is_like_radam and "betas" in settings else "")


def _rate_faults(rates: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Messages about parameters whose learning rate is that of the first parameter in the
    checkpoint and not in `tx`, or the other way round. `rates` has both by name, those of `tx` as
    the size of its first update.
    """
    first, (known_first, found_first) = next(iter(rates.items()), ("", (1.0, 1.0)))
    unlike: dict[tuple[float, str], list[str]] = defaultdict(list)
    for name, (known, found) in rates.items():
        is_alike = _is_about(known, known_first)
        if is_alike != _is_about(found, found_first):
            unlike[known, f"{found / found_first:.2g}"].append(name)
    for (known, times), names in unlike.items():
        other = (
            f"as for {first}" if _is_about(known, known_first) else f"and {known_first} for {first}"
        )
        yield (
            f"{few(names)}: the checkpoint's optimizer has lr={known}, {other}, and tx about"
            f" {times} times the rate of {first}; give tx rates of the same ratio"
            " (optax.partition), or check=False"
        )


def _is_about(found: float, wanted: float) -> bool:
    return abs(found / wanted - 1) < _TOLERANCE


def _fault(rate: float, decoupled: bool | None, decay: Decay) -> str | None:
    """How the decay of a parameter in the checkpoint and in `tx` differ, and the remedy."""
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
    """An optimizer that is asked for updates of small arrays with as many axes as parameters have.

    Of sizes a mask sees no more than 1 or 2. `first` is the number of the first update that moves
    anything, or None if none of 1,000 does.

    >>> params = {"w": jnp.ones(4), "b": jnp.ones(4)}
    >>> TrialUpdates(optax.adamw(1e-3, mask={"w": True, "b": False}), params).decays()
    {'b': 'none', 'w': 'in proportion'}
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any):
        self._tx, self._update, self._params = tx, jax.jit(tx.update), params
        self._known: dict[tuple[float, float], Updates] = {}
        moves = (any(leaf.any() for leaf in update.values()) for update in self._all(1.0, 1.0))
        self.first = next((i for i, is_move in enumerate(moves) if is_move), None)

    def after(self, weight: float, gradient: float) -> Updates:
        """Changes of each parameter in update `first`, if all weights and gradients are these."""
        key = weight, gradient
        if key not in self._known:
            self._known[key] = next(itertools.islice(self._all(*key), self.first, None))
        return self._known[key]

    def decays(self) -> dict[str, Decay]:
        """The kind of weight decay of each parameter; {} if `tx` changes none."""
        if self.first is None:
            return {}
        decays: dict[str, Decay] = {}
        twice = self.after(2.0, 0.0)
        for name, once in self.after(1.0, 0.0).items():
            is_proportional = np.allclose(twice[name], 2 * once, rtol=0.1, atol=0)
            decays[name] = "in proportion" if is_proportional else "through the gradient"
            if not once.any():
                decays[name] = "none"
        return decays

    def _all(self, weight: float, gradient: float) -> Iterator[Updates]:
        """Updates one after the other, by the parameter's name."""
        weights = jax.tree.map(lambda p: jnp.full(small(p.shape), weight, _wide(p)), self._params)
        gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), weights)
        state = self._tx.init(weights)
        for _ in range(TRIES):
            deltas, state = self._update(gradients, state, weights)
            yield {
                _name(path): np.asarray(leaf)
                for path, leaf in jax.tree_util.tree_leaves_with_path(deltas)
            }


def small(shape: Shape) -> list[int]:
    """The shape of a small array, with elements, that stands for one of this shape."""
    return [min(max(size, 1), 2) for size in shape]


def _wide(param: Any) -> Any:
    """The dtype of a parameter, but float32 for float16, in which small updates vanish."""
    return jnp.float32 if param.dtype == jnp.float16 else param.dtype


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
