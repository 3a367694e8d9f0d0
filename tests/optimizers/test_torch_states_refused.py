"""What would give torch another optimizer than the one that trained is refused by label."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_ucp as ucp
from jax_ucp.errors import CorruptData, TreeMismatch
from training_runs import ADAMW, CORES, SCHEDULE, WRAPPED, changed, of_matrices, trained, tree_of

OTHERS = {
    "turned round": optax.chain(ADAMW, optax.clip_by_global_norm(1.0)),
    "without the clipping": ADAMW,
    "with one more": optax.chain(optax.clip_by_global_norm(1.0), ADAMW, optax.clip(1.0)),
    "without the schedule": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "of another kind": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(SCHEDULE)),
    "of the same moments under other names": optax.chain(optax.clip_by_global_norm(1.0),
        optax.sgd(SCHEDULE, 0.9)),
    "of another dtype": optax.chain(optax.clip_by_global_norm(1.0),
        optax.adamw(SCHEDULE, mu_dtype=jnp.bfloat16)),
    "of some parameters": optax.chain(optax.clip_by_global_norm(1.0), optax.masked(ADAMW, of_matrices)),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_optimizer_is_refused(other):
    checkpoint = ucp.Checkpoint.of(tree_of(trained("adam"), WRAPPED["chain"](ADAMW)))
    with pytest.raises(TreeMismatch, match="the state of this optimizer is not what is at opt_"):
        checkpoint.torch_states(OTHERS[other])


COUNTED = "opt_state/1/0/count"
WRONG = [
    ("chain", "opt_state/1/0/nu/dense/bias",
     lambda _: None, "dense/bias: the optimizer has it, the checkpoint not"),
    ("chain", "opt_state/1/0/mu/embed", np.transpose,
     r"has float32 \(6, 4\), the checkpoint float32 \(4, 6\)"),
    ("chain", "params/dense/bias", lambda _: None, "mu/dense/bias: the checkpoint has it, the optimizer not"),
    ("chain", COUNTED,
     lambda n: n + 1, f"opt_state/1/2/count counts 5, but {COUNTED} has 6 updates of dense/bias"),
    ("chain", "opt_state/1/2/count", lambda n: n - 5, rf"counts 0, but {COUNTED} has 5 .* give step=5"),
    ("inject_hyperparams", "opt_state/count", lambda n: n + 1, "opt_state/count counts 6"),
    ("MultiSteps", "opt_state/gradient_step", lambda n: n + 1, "opt_state/gradient_step counts 6"),
    ("MultiSteps", "opt_state/mini_step", lambda n: n + 3, "mini_step is 3: gradients are being gathered"),
    ("bare", "opt_state/0/count",
     lambda n: n + (1 << 24), "16777221, which float32 does not hold; give step_dtype="),
]  # fmt: skip


@pytest.mark.parametrize(("wrap", "label", "change", "message"), WRONG)
def test_a_state_that_would_be_wrong_is_refused(wrap, label, change, message):
    tx = WRAPPED[wrap](ADAMW)
    tree = tree_of(trained("adam"), tx)
    assert changed(tree, label, lambda value: value).torch_states(tx)
    with pytest.raises(TreeMismatch, match=message):
        changed(tree, label, change).torch_states(tx)


def test_schedules_of_sgd_that_differ_are_refused_too():
    tx = optax.chain(optax.scale_by_schedule(SCHEDULE), CORES["sgd"][0])
    tree = tree_of(trained("sgd"), tx)
    with pytest.raises(TreeMismatch, match="counts 7, but opt_state/0/count has 5"):
        changed(tree, "opt_state/1/1/count", lambda n: n + 2).torch_states(tx)
    back = ucp.Checkpoint.of(tree).torch_states(tx, step=4)
    assert "opt_state/0/count counts 5, where step=4 has 4 updates" in back.notes[0]


def test_gradients_where_none_are_being_gathered_stop_an_export(tmp_path):
    tx = WRAPPED["MultiSteps"](ADAMW)
    tree = changed(tree_of(trained("adam"), tx), "opt_state/acc_grads/dense/bias", lambda a: a + 1)
    back = tree.torch_states(tx)
    with pytest.raises(CorruptData, match=r"acc_grads/dense/bias: .* has gradients, though none"):
        back.save(tmp_path / "out")


def test_several_optimizers_in_one_tree_are_refused():
    tx = optax.GradientTransformation(jax.vmap(ADAMW.init), jax.vmap(ADAMW.update))
    params = {"w": jnp.ones((3, 2))}
    with pytest.raises(TreeMismatch, match=r"opt_state/0/count has shape \(3,\): it is not one"):
        ucp.Checkpoint.of({"params": params, "opt_state": tx.init(params)}).torch_states(tx)


def test_an_optimizer_of_one_vector_is_refused():
    tx = optax.flatten(ADAMW)
    params = tree_of(trained("adam"), ADAMW)["params"]
    with pytest.raises(TreeMismatch, match="opt_state/0/mu is not the exp_avg of a parameter"):
        ucp.Checkpoint.of({"params": params, "opt_state": tx.init(params)}).torch_states(tx)


def test_two_parameters_of_one_name_are_refused():
    params = {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}}
    with pytest.raises(TreeMismatch, match="two parameters are called a/b"):
        ucp.Checkpoint.of({"params": params, "opt_state": ADAMW.init(params)}).torch_states(ADAMW)


def test_moments_of_one_parameter_in_two_states_are_refused():
    tx = optax.chain(ADAMW, optax.scale_by_adam())
    tree = tree_of(trained("adam"), ADAMW)
    twice = ucp.Checkpoint.of(tree | {"opt_state": tx.init(tree["params"])})
    with pytest.raises(TreeMismatch, match="0/0/mu/embed and opt_state/1/mu/embed are both exp_"):
        twice.torch_states(tx)


@pytest.mark.parametrize(("said", "message"), [
    ({"opt_state": "optimizer"}, "has nothing at 'optimizer'; it has opt_state, params, step"),
    ({"params": "model"},        "has nothing at 'model'"),
    ({"params": "step"},         "has no parameters at 'step'"),
])  # fmt: skip
def test_a_label_at_which_there_is_nothing_is_refused(said, message):
    checkpoint = ucp.Checkpoint.of(tree_of(trained("adam"), ADAMW))
    with pytest.raises(TreeMismatch, match=message):
        checkpoint.torch_states(ADAMW, **said)
