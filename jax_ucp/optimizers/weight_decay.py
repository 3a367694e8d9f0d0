"""Whether an optax optimizer decays the weights that a trainer's did, and in the same way.

Weight decay leaves no state, so an optimizer is asked: from zero moments and zero gradients only
decay moves a weight. Torch's AdamW and SGD, and Lion, move it in proportion to itself; torch's Adam
adds decay to the gradient, which Adam then normalises (`torch/optim/adam.py`, 2.13:
`decoupled_weight_decay` of a group says which).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_ucp.arrays.optimizer_groups import Group

# A schedule may begin at zero, and MultiSteps updates every so many steps: an optimizer is asked
# this often.
TRIES = 1000

Decay = Literal["none", "in proportion", "through the gradient"]


def decay_faults(
    groups: Sequence[Group], tx: optax.GradientTransformation, params: Any
) -> Iterator[str]:
    """Parameters that `tx` decays otherwise than `groups`; names are those of `params`."""
    settings_of = {name: group.settings for group in groups for name in group.params}
    settings_of = {
        name: settings for name, settings in settings_of.items() if "weight_decay" in settings
    }
    decays = decays_of(tx, params) if settings_of else {}
    for name, settings in settings_of.items():
        if name not in decays:
            continue
        rate, decoupled = settings["weight_decay"], settings.get("decoupled_weight_decay")
        if fault := _fault(rate, decoupled, decays[name]):
            yield f"{name}: the checkpoint's optimizer {fault}"


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


def decays_of(tx: optax.GradientTransformation, params: Any) -> dict[str, Decay]:
    """The decay that `tx` applies to each parameter; {} if it makes no update in 1,000 steps.

    It is asked on small arrays with as many axes; of sizes a mask sees no more than 1 or 2.

    >>> decays_of(optax.adamw(1e-3, mask={"w": True, "b": False}),
    ...     {"w": jnp.ones(4), "b": jnp.ones(4)})
    {'b': 'none', 'w': 'in proportion'}
    """
    update = jax.jit(tx.update)

    def updates(weight: float, gradient: float) -> Iterator[dict[str, np.ndarray]]:
        """Updates one after the other, by the parameter's name."""
        weights = jax.tree.map(
            lambda p: jnp.full([min(size, 2) for size in p.shape], weight, p.dtype), params
        )
        gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), weights)
        state = tx.init(weights)
        for _ in range(TRIES):
            deltas, state = update(gradients, state, weights)
            yield {
                _name(path): np.asarray(leaf)
                for path, leaf in jax.tree_util.tree_leaves_with_path(deltas)
            }

    moves = (any(leaf.any() for leaf in update.values()) for update in updates(1.0, 1.0))
    first = next((i for i, is_move in enumerate(moves) if is_move), None)
    if first is None:
        return {}
    once, twice = (
        next(itertools.islice(updates(weight, 0.0), first, None)) for weight in (1.0, 2.0)
    )
    return {name: _decay(once[name], twice[name]) for name in once}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _decay(once: np.ndarray, twice: np.ndarray) -> Decay:
    if not once.any():
        return "none"
    is_proportional = np.allclose(twice, 2 * once, rtol=0.1, atol=0)
    return "in proportion" if is_proportional else "through the gradient"
