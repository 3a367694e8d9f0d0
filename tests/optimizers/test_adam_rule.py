"""A state of Adam's type that an optimizer updates otherwise is refused, both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import contents_of
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import TreeMismatch
from jax_ucp.optimizers.adam_rule import rule_faults
from jax_ucp.optimizers.small_run import SmallRun

MOMENTS = ("param", "exp_avg", "exp_avg_sq")
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(3, jnp.bfloat16)}
RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
ADAMS = {
    "adam": optax.adam(1e-3),
    "eps_root": optax.adam(1e-3, b2=0.99999, eps_root=1e-8),
    "nadamw": optax.nadamw(1e-3),
    "warm-up, mask": optax.adamw(RATE, weight_decay=0.1, mask={"w": True, "b": False}),
    "moments in bfloat16": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "moments in float16": optax.adamw(1e-3, mu_dtype=jnp.float16),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.01), optax.adam(1e-3)),
    "decay through the gradient": optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3)),
    "gathered": optax.MultiSteps(optax.adam(1e-3), 4),
    "injected": optax.inject_hyperparams(optax.adamw)(RATE),
    "frozen": optax.partition({"a": optax.adamw(1e-3), "f": optax.set_to_zero()}, {"w": "a", "b": "f"}),
    "gathered, one of two": optax.partition({"a": optax.adamw(1e-3), "m": optax.MultiSteps(optax.adamw(1e-3), 3)}, {"w": "a", "b": "m"}),
    "a long momentum in float16": optax.adamw(1e-3, b1=0.99, mu_dtype=jnp.float16),
    "lamb": optax.lamb(1e-3),
    "lion": optax.lion(1e-3),
    "sgd": optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(RATE, 0.9, nesterov=True)),
    "sgd, gathered": optax.MultiSteps(optax.sgd(0.1, 0.9, accumulator_dtype=jnp.bfloat16), 4),
}  # fmt: skip
OTHERS = {
    "adamax": (optax.adamax(1e-3), "exp_avg_sq", "b and 1 more"),
    "adamaxw": (optax.adamaxw(RATE), "exp_avg_sq", "b and 1 more"),
    "yogi": (optax.yogi(1e-3), "exp_avg_sq", "b and 1 more"),
    "adopt": (optax.contrib.adopt(1e-3), "exp_avg", "b and 1 more"),
    "adopt, not clipped": (optax.contrib.adopt(1e-3, use_clipping=False), "exp_avg", "b and 1 more"),
    "one of two": (optax.partition({"a": optax.adamw(1e-3), "y": optax.yogi(1e-3)}, {"w": "a", "b": "y"}),
        "exp_avg_sq", "b"),
    "gathered": (optax.MultiSteps(optax.yogi(1e-3), 3), "exp_avg_sq", "b and 1 more"),
    "turned": (optax.chain(optax.scale(-1.0), optax.adam(-1e-3)), "exp_avg", "b and 1 more"),
    "lars": (optax.lars(0.1), "momentum_buffer", "b and 1 more"),
    "trace of updates": (optax.chain(optax.scale(-0.1), optax.trace(0.9)), "momentum_buffer", "b and 1 more"),
    "trace of lengths": (optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1, 0.9)), "momentum_buffer", "b and 1 more"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAMS)
def test_what_sums_as_adam_does_is_taken(name):
    assert list(rule_faults(SmallRun(ADAMS[name], PARAMS))) == []


@pytest.mark.parametrize("name", OTHERS)
def test_what_sums_otherwise_is_told(name):
    tx, moment, params = OTHERS[name]
    (fault,) = rule_faults(SmallRun(tx, PARAMS))
    assert fault.startswith(f"{params}: ")
    owner = "SGD" if moment == "momentum_buffer" else "Adam"
    assert f"not the {moment} of {owner}" in fault


@pytest.mark.parametrize("before", [optax.clip(1e-6), optax.scale(-1.0)])
def test_it_is_told_that_what_comes_before_adam_may_be_why(before):
    told = list(rule_faults(SmallRun(optax.chain(before, optax.adam(1e-3)), PARAMS)))
    assert told
    for fault in told:
        assert "by gradients of 2e-06" in fault
        assert "what clips, normalises or negates gradients before" in fault


def test_adams_moments_do_not_load_into_yogi_unless_they_are_meant_to():
    params = {name: jnp.ones_like(value, jnp.float32) for name, value in PARAMS.items()}
    states = {state: jax.tree.map(np.asarray, params) for state in MOMENTS}
    checkpoint = Checkpoint(contents_of(states))
    with pytest.raises(TreeMismatch, match=r"exp_avg_sq of Adam.* or check=False"):
        checkpoint.plan_optimizer(optax.yogi(1e-3), params, step=1)
    assert checkpoint.plan_optimizer(optax.yogi(1e-3), params, step=1, check=False).filled
    assert checkpoint.plan_optimizer(optax.adam(1e-3), params, step=1).filled


def test_nor_do_yogis_go_to_torch_as_adams():
    params = {"w": jnp.ones((3, 2))}
    checkpoint = Checkpoint.of({"params": params, "opt_state": optax.yogi(1e-3).init(params)})
    words = "w: tx keeps in a ScaleByAdamState what is not the exp_avg_sq of Adam"
    with pytest.raises(TreeMismatch, match=words):
        checkpoint.torch_states(optax.yogi(1e-3))
    checkpoint = Checkpoint.of({"params": params, "opt_state": optax.adam(1e-3).init(params)})
    assert set(checkpoint.torch_states(optax.adam(1e-3)).params["w"].states) == {*MOMENTS, "step"}
