"""States of torch's optimizers in optax: the updates that follow are those of torch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import contents_of, mesh_of
from jax_ucp.errors import TreeMismatch

B1, B2, EPS, LR, DECAY = 0.9, 0.95, 1e-6, 1e-2, 0.1
SHAPES = {"dense/kernel": (8, 4), "dense/bias": (4,), "norm/scale": (8,)}
States = dict[str, dict[str, np.ndarray]]


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


# The algorithms as the documentation of torch.optim writes them; `t` is the number of this update,
# from one.
def adamw(states: States, t: int) -> None:
    for name, g in gradients(t).items():
        p, m, v = (states[key][name] for key in ("param", "exp_avg", "exp_avg_sq"))
        p *= 1 - LR * DECAY
        m[...] = B1 * m + (1 - B1) * g
        v[...] = B2 * v + (1 - B2) * g * g
        p -= LR * (m / (1 - B1**t)) / (np.sqrt(v / (1 - B2**t)) + EPS)
        states["step"][name][...] = t


def adam(states: States, t: int) -> None:
    """With weight decay, which torch's Adam adds to the gradient."""
    for name, g in gradients(t).items():
        p, m, v = (states[key][name] for key in ("param", "exp_avg", "exp_avg_sq"))
        g = g + DECAY * p
        m[...] = B1 * m + (1 - B1) * g
        v[...] = B2 * v + (1 - B2) * g * g
        p -= LR * (m / (1 - B1**t)) / (np.sqrt(v / (1 - B2**t)) + EPS)
        states["step"][name][...] = t


def sgd(states: States, t: int, nesterov: bool = False) -> None:
    for name, g in gradients(t).items():
        p, b = states["param"][name], states["momentum_buffer"][name]
        b[...] = g if t == 1 else B1 * b + g
        p -= LR * (g + B1 * b if nesterov else b)


def sgd_nesterov(states: States, t: int) -> None:
    sgd(states, t, nesterov=True)


def lion(states: States, t: int) -> None:
    for name, g in gradients(t).items():
        p, m = states["param"][name], states["exp_avg"][name]
        p *= 1 - LR * DECAY
        p -= LR * np.sign(B1 * m + (1 - B1) * g)
        m[...] = B2 * m + (1 - B2) * g
        states["step"][name][...] = t


ADAMW = optax.adamw(LR, B1, B2, EPS, weight_decay=DECAY)
OPTIMIZERS: dict[str, tuple[Callable[[States, int], None], optax.GradientTransformation]] = {
    "adamw": (adamw, ADAMW),
    "adam, decay in the gradient": (adam,
        optax.chain(optax.add_decayed_weights(DECAY), optax.adam(LR, B1, B2, EPS))),
    "sgd": (sgd, optax.sgd(LR, B1)),
    "sgd, nesterov": (sgd_nesterov, optax.sgd(LR, B1, nesterov=True)),
    "lion": (lion, optax.lion(LR, B1, B2, weight_decay=DECAY)),
    "in a chain, with a schedule": (adamw, optax.chain(optax.clip_by_global_norm(1e9), ADAMW)),
    "injected hyperparameters": (adamw,
        optax.inject_hyperparams(optax.adamw)(LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)),
    "an injected schedule": (adamw,
        optax.inject_hyperparams(optax.adamw)(lambda _: LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)),
    "several steps gathered": (adamw, optax.MultiSteps(ADAMW, 1).gradient_transformation()),
    "masks that leave all": (
        adamw,
        optax.chain(
            optax.masked(
                ADAMW, {"dense": {"kernel": True, "bias": False}, "norm": {"scale": False}}
            ),
            optax.masked(
                ADAMW, {"dense": {"kernel": False, "bias": True}, "norm": {"scale": True}}
            ),
        ),
    ),
    "partitions": (
        adamw,
        optax.partition(
            {"a": ADAMW, "b": optax.chain(ADAMW)},
            {"dense": {"kernel": "a", "bias": "b"}, "norm": {"scale": "b"}},
        ),
    ),
}  # fmt: skip


def trained(update: Callable[[States, int], None], steps: int) -> States:
    rng = np.random.default_rng(99)

    def zeros():
        return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}

    states = {key: zeros() for key in KEYS[update]}
    states["param"] = {name: rng.standard_normal(s, np.float32) for name, s in SHAPES.items()}
    if "step" in states:
        states["step"] = {name: np.zeros((), np.float32) for name in SHAPES}
    for t in range(1, steps + 1):
        update(states, t)
    return states


KEYS = {
    **dict.fromkeys((adamw, adam), ("param", "exp_avg", "exp_avg_sq", "step")),
    **dict.fromkeys((sgd, sgd_nesterov), ("param", "momentum_buffer")),
    lion: ("param", "exp_avg", "step"),
}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flat.items():
        module, _, leaf = name.partition("/")
        found.setdefault(module, {})[leaf] = value
    return found


def checkpoint_of(states: States, **more: Any) -> ucp.Checkpoint:
    return ucp.Checkpoint(contents_of(states, **more))


def continued(states: States, tx: Any, steps: range, step=None) -> dict[str, np.ndarray]:
    """The parameters after the updates `steps`, in optax, from the states as a checkpoint."""
    params = nested({name: jnp.asarray(p) for name, p in states["param"].items()})
    plan = checkpoint_of(states).plan_optimizer(tx, jax.eval_shape(lambda: params), step=step)
    opt_state = plan.restore()
    for t in steps:
        updates, opt_state = tx.update(nested(gradients(t)), opt_state, params)
        params = optax.apply_updates(params, updates)
    paths = {name: name.partition("/") for name in SHAPES}
    return {name: np.asarray(params[a][b]) for name, (a, _, b) in paths.items()}


def distance(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    return max(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max() for name in SHAPES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_goes_on_as_torch_would(name):
    update, tx = OPTIMIZERS[name]
    states, want = trained(update, 3), trained(update, 6)["param"]
    step = None if "step" in states else 3
    assert distance(continued(states, tx, range(4, 7), step), want) < 1e-6


@pytest.mark.parametrize("wrong", ["step", "zeroed", "exchanged"])
def test_a_wrong_state_would_be_seen(wrong):
    states, want = trained(adamw, 3), trained(adamw, 6)["param"]
    if wrong == "step":
        states["step"] = {name: step + 1 for name, step in states["step"].items()}
    elif wrong == "zeroed":
        states["exp_avg"] = {name: np.zeros_like(m) for name, m in states["exp_avg"].items()}
    else:
        states["exp_avg"], first = states["exp_avg_sq"], states["exp_avg"]
        states["exp_avg_sq"] = {name: np.abs(moment) for name, moment in first.items()}
    assert distance(continued(states, ADAMW, range(4, 7)), want) > 1e-3


@pytest.mark.parametrize("kind", ["adamw", "injected hyperparameters"])
def test_integers_of_64_bits_beside_what_is_trained_are_no_warning(kind):
    states = trained(adamw, 3)
    states["param"]["rope/rows"] = np.arange(3) + 2**40
    checkpoint = checkpoint_of(states)
    tx = optax.masked(OPTIMIZERS[kind][1], {"dense": True, "norm": True, "rope": False})
    params = nested(checkpoint.abstract()["param"])
    assert params["rope"]["rows"].dtype == np.int64
    assert checkpoint.plan_optimizer(tx, params).step == 3


def test_every_leaf_says_where_it_comes_from():
    several = optax.MultiSteps(optax.sgd(LR), 2).gradient_transformation()
    tx = optax.chain(optax.inject_hyperparams(optax.adamw)(LR), several)
    states = {**trained(adamw, 3), "max_exp_avg_sq": trained(adamw, 3)["exp_avg_sq"]}
    params = nested(states["param"])
    plan = checkpoint_of(states).plan_optimizer(tx, params, check=False)
    told = {one.slot.label: (one.status, one.reason) for one in plan.filled}
    assert told["0/inner_state/0/mu/dense/kernel"] == ("mapped", "from exp_avg/dense/kernel")
    assert told["0/count"] == ("computed", "3 steps of dense/bias and 2 more")
    assert told["0/hyperparams/learning_rate"][0] == "initial"
    zeros = "zeros: a checkpoint is saved between two updates"
    assert told["1/acc_grads/norm/scale"] == ("computed", zeros)
    assert len(told) == len(jax.tree.leaves(jax.eval_shape(tx.init, params)))
    reason = "torch keeps the maximum of uncorrected moments, which optax has no place for"
    assert plan.left == {"max_exp_avg_sq": reason}
    assert "max_exp_avg_sq of the checkpoint: left" in plan.report()
    restored = plan.restore()
    assert restored[0].hyperparams["learning_rate"] == np.float32(LR)
    assert restored[1].gradient_step == 3
    assert not np.any(restored[1].acc_grads["dense"]["kernel"])


def test_moments_lie_as_their_parameters_do():
    mesh = mesh_of(4, 2)
    states = trained(adamw, 3)
    specs = {"dense/kernel": P("data", "model"), "dense/bias": P("model"), "norm/scale": P("data")}
    own = {n: NamedSharding(mesh, spec) for n, spec in specs.items()}
    like = {n: jax.ShapeDtypeStruct(SHAPES[n], np.float32, sharding=own[n]) for n in specs}
    params = nested(like)
    restored = checkpoint_of(states).plan_optimizer(ADAMW, params).restore()[0]
    assert restored.mu["dense"]["kernel"].sharding == params["dense"]["kernel"].sharding
    assert restored.count.sharding == NamedSharding(mesh, P())
    for moment, key in ((restored.mu, "exp_avg"), (restored.nu, "exp_avg_sq")):
        for name in SHAPES:
            module, _, leaf = name.partition("/")
            np.testing.assert_array_equal(moment[module][leaf], states[key][name])


def test_flax_variables_are_seen_through():
    class Model(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    states = trained(adamw, 3)
    for key, some in states.items():
        states[key] = {name: array for name, array in some.items() if name.startswith("dense")}
    model = Model()
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    plan = checkpoint_of(states).plan_optimizer(ADAMW, nnx.state(model, nnx.Param))
    optimizer.opt_state = nnx.data(plan.restore())
    mu = optimizer.opt_state[0].mu["dense"]["kernel"][...]
    np.testing.assert_array_equal(mu, states["exp_avg"]["dense/kernel"])
    assert plan.step == 3


def test_what_cannot_be_filled_is_said_all_at_once():
    states = trained(adamw, 3)
    del states["exp_avg_sq"]["norm/scale"], states["step"]["dense/bias"]
    states["step"]["dense/kernel"] = np.float32(2.0)
    with pytest.raises(TreeMismatch) as told:
        checkpoint_of(states).plan_optimizer(ADAMW, nested(states["param"]))
    assert "no exp_avg_sq of norm/scale" in str(told.value)
    assert "does not say the steps of dense/bias; give step=" in str(told.value)


@pytest.mark.parametrize(("tx", "change", "message"), [
    (optax.amsgrad(LR), {}, "is a ScaleByAmsgradState, and nothing says which state of torch it is"),
    (ADAMW, {"step": {"dense/bias": np.float32(2)}}, "steps differ: 2 of dense/bias, 3 of dense/kernel"),
    (ADAMW, {"step": {"dense/bias": np.float32(2.5)}}, "2.5, which is not a number of steps"),
    (optax.sgd(LR, B1), {}, "has no momentum_buffer of dense/kernel"),
    (ADAMW, {"param": {"dense/bias": np.zeros(5, np.float32)}},
     r"shape \(4,\) in the model, \(5,\) in the checkpoint"),
])  # fmt: skip
def test_a_state_that_would_be_wrong_is_refused(tx, change, message):
    states, params = trained(adamw, 3), nested(trained(adamw, 3)["param"])
    for key, values in change.items():
        states[key] |= values
    with pytest.raises(TreeMismatch, match=message):
        checkpoint_of(states).plan_optimizer(tx, params)


def test_a_sum_that_is_not_that_of_optax_is_refused():
    states = trained(sgd, 3)
    extras = {"optim.pt": {"param_groups": [{"lr": LR, "dampening": 0.1}]}}
    checkpoint, params = checkpoint_of(states, extras=extras), nested(states["param"])
    with pytest.raises(TreeMismatch, match=r"dampening=0.1: torch's momentum is another sum"):
        checkpoint.plan_optimizer(optax.sgd(LR, B1), params, step=3)


def test_a_step_that_is_given_must_be_that_of_the_checkpoint():
    states = trained(adamw, 3)
    with pytest.raises(TreeMismatch, match="step=4 was given, but dense/bias has done 3"):
        checkpoint_of(states).plan_optimizer(ADAMW, nested(states["param"]), step=4)
