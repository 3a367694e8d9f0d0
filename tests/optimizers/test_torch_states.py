"""The state of an optax optimizer as that of torch's: found by type, bit for bit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import differences, faults_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import FormatError, TreeMismatch, UnsupportedLeaf
from jax_ucp.layout.box import Box
from training_runs import ADAMW, CORES, MESH, WRAPPED, changed, saved, trained, tree_of


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("core", CORES)
def test_states_are_found_in_whatever_is_around_them(core, wrap):
    source, tx = trained(core), WRAPPED[wrap](CORES[core][0])
    back = ucp.Checkpoint.of(tree_of(source, tx)).torch_states(tx)
    assert differences(source, back) == []
    assert faults_of(back) == []
    kept = back.extras["tree"].items()
    assert all(value in (5, 0.5) or name.endswith("rate") for name, value in kept)


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("wrap", ["all at once", "inject_hyperparams", "partition"])
def test_a_save_of_ours_and_one_of_stock_orbax_hold_the_same(wrap, stock, tmp_path):
    source, tx = trained("adam", ml_dtypes.bfloat16), WRAPPED[wrap](ADAMW)
    stored = saved(tree_of(source, tx), tmp_path / "run", stock)
    assert stored.format == ("orbax" if stock else "universal")
    assert differences(source, stored.torch_states(tx)) == []
    assert differences(source, stored.torch_states(tx).save(tmp_path / "kept")) == []


class Model(nnx.Module):
    def __init__(self):
        sizes = (4, 3, nnx.Rngs(0)), (3, 2, nnx.Rngs(1))
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b, rngs in sizes])
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(2))


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("stock", [False, True])
def test_an_optimizer_of_flax_is_seen_through(stock, pure, tmp_path):
    tx = WRAPPED["chain"](ADAMW)
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def leaves(m):
        return jax.tree.leaves(nnx.state(m, nnx.Param))

    loss = nnx.value_and_grad(lambda m: sum(jnp.sum(jnp.sin(x)) for x in leaves(m)))
    for _ in range(3):
        optimizer.update(model, loss(model)[1])
    tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    if pure:
        tree = {key: nnx.to_pure_dict(state) for key, state in tree.items()}
    stored = saved(tree, tmp_path, stock)
    params = nnx.state(model, nnx.Param)
    back = stored.torch_states(tx, params, params="model", opt_state="optimizer/opt_state")
    adam = optimizer.opt_state[1][0]
    for state, moments in (("param", params), ("exp_avg", adam.mu), ("exp_avg_sq", adam.nu)):
        for i in range(2):
            for name in ("kernel", "bias"):
                want = np.asarray(moments["layers"][i][name][...])
                assert want.any()
                assert same_bits(back.read(f"{state}/layers/{i}/{name}"), want)
                assert back.read(f"step/layers/{i}/{name}") == 3
    assert len(back.leaves) == 16
    (note,) = [note for note in back.notes if "arrays that are not parameters" in note]
    assert "model/dropout/rngs" in note
    assert back.extras["tree"][f"optimizer/step{'' if pure else '/value'}"] == 3


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(sorted(WRAPPED)), max_size=3),
    st.sampled_from(sorted(CORES)),
    st.data(),
)
def test_the_way_back_undoes_the_way_there(wraps, core, data):
    dtype = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]))
    tx, source = CORES[core][0], trained(core, dtype)
    for wrap in wraps:
        tx = WRAPPED[wrap](tx)
    assert differences(source, ucp.Checkpoint.of(tree_of(source, tx)).torch_states(tx)) == []


def test_a_run_in_float64_needs_no_jax_in_float64():
    tx, source = WRAPPED["chain"](ADAMW), trained("adam")

    def wide(x):
        return np.asarray(x, np.float64 if x.dtype == np.float32 else None)

    tree = jax.tree.map(wide, tree_of(source, tx) | {"step": np.int32(5)})
    back = ucp.Checkpoint.of(tree).torch_states(tx)
    assert back.read("exp_avg/embed").dtype == np.float64
    np.testing.assert_array_equal(back.read("exp_avg/embed"), source.read("exp_avg/embed"))


class Stopped(Exception):
    pass


def stopped(checkpoint: ucp.Checkpoint, path: Path) -> None:
    """A save that ends after its first block."""

    def stop(_: object) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        checkpoint.save(path, progress=stop)


def test_a_stopped_save_of_other_states_is_not_taken_up(tmp_path):
    tree = tree_of(trained("adam"), ADAMW)
    stored = saved(tree, tmp_path / "run")
    stopped(stored.torch_states(ADAMW), tmp_path / "out")
    with pytest.raises(FormatError, match="a conversion of another source"):
        stored.torch_states(ADAMW, step_dtype=np.int32).save(tmp_path / "out")
    assert differences(trained("adam"), stored.torch_states(ADAMW).save(tmp_path / "out")) == []
    stopped(ucp.Checkpoint.of(tree), tmp_path / "other")
    with pytest.raises(FormatError, match="a conversion of another source"):
        ucp.Checkpoint.of(jax.tree.map(lambda x: x + 1, tree)).save(tmp_path / "other")


def test_a_tree_in_memory_is_a_checkpoint(tmp_path, monkeypatch):
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    x = jax.device_put(x, NamedSharding(MESH, P("data")))
    tree = {"x": x, "n": [3, np.float16(0.5)], "s": "text", "none": None}
    checkpoint = ucp.Checkpoint.of(tree)
    assert same_bits(checkpoint.read("x", Box((1, 1), (7, 3))), np.asarray(x)[1:7, 1:3])
    for found in (checkpoint, checkpoint.save(tmp_path / "out")):
        want = tree | {"x": np.asarray(x)}
        assert jax.tree.all(jax.tree.map(np.array_equal, found.restore(), want))
    with pytest.raises(UnsupportedLeaf, match="x is abstract"):
        ucp.Checkpoint.of({"x": jax.ShapeDtypeStruct((2,), np.float32)})
    assert not ucp.Checkpoint.of({"x": np.ones(3)}).read("x").flags.writeable
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UnsupportedLeaf, match="in the memory of several processes; save it"):
        ucp.Checkpoint.of({"x": np.ones(3)})


def test_a_schedule_that_was_begun_anew_is_kept_as_an_extra_where_that_is_said():
    tx = WRAPPED["chain"](ADAMW)
    source = trained("adam")
    checkpoint = changed(tree_of(source, tx), "opt_state/1/2/count", lambda n: n - 3)
    back = checkpoint.torch_states(tx, step=5)
    assert differences(source, back) == []
    assert back.extras["tree"]["opt_state/1/2/count"] == 2
    assert "opt_state/1/2/count counts 2, where opt_state/1/0/count has 5 updates" in back.notes[-1]
    with pytest.raises(TreeMismatch, match="opt_state/1/0/count counts 5 updates, but step=2 was"):
        checkpoint.torch_states(tx, step=2)


def test_what_is_beside_a_run_is_told():
    source, tx = trained("adam"), WRAPPED["bare"](ADAMW)
    tree = tree_of(source, tx) | {"ema": {"embed": np.ones(3)}}
    tree |= {"rng": jax.random.key(0), "name": "x", "none": None}
    tree |= {"loss": np.float32("nan")}
    back = ucp.Checkpoint.of(tree).torch_states(tx)
    assert differences(source, back) == []
    told = {item.where: (item.status, item.reason) for item in back.inventory}
    assert len(told) == len(back.inventory) == len(ucp.Checkpoint.of(tree).leaves)
    skipped = "skipped", "no parameter, and no state of the optimizer"
    assert told["ema/embed"] == told["rng"] == skipped
    assert told["none"] == ("skipped", "it holds nothing")
    assert told["step"][0] == told["name"][0] == "extra"
    assert back.notes == ["2 arrays that are not parameters are left out, the first ema/embed"]
    want = {"opt_state/2/count": 5, "name": "x", "step": 5, "loss": {"!float": "nan"}}
    assert back.extras["tree"] == want


def test_a_model_that_is_given_says_which_arrays_are_parameters():
    source, tx = trained("adam"), WRAPPED["bare"](ADAMW)
    tree = tree_of(source, tx)
    model = jax.eval_shape(lambda: tree["params"])
    tree["params"] = tree["params"] | {"statistics": np.ones(3)}
    assert differences(source, ucp.Checkpoint.of(tree).torch_states(tx, model)) == []
    with pytest.raises(TreeMismatch, match="mu/statistics: the optimizer has it, the checkpoint"):
        ucp.Checkpoint.of(tree).torch_states(tx)
    model["embed"] = jax.ShapeDtypeStruct((6, 5), np.float32)
    model["more"] = jax.ShapeDtypeStruct((), np.float32)
    with pytest.raises(TreeMismatch, match=r"embed has shape \(6, 5\) in the model, \(6, ") as told:
        ucp.Checkpoint.of(tree).torch_states(tx, model)
    assert "more: a parameter of the model, but not at params" in str(told.value)


def test_moments_are_read_when_they_are_asked_for_and_not_before():
    tx = WRAPPED["all at once"](ADAMW)
    checkpoint = changed(tree_of(trained("adam"), tx), "params/embed", lambda a: a)
    store = checkpoint._contents.arrays
    back = checkpoint.torch_states(tx)
    assert sum(box.size for _, box in store.reads) == len(store.reads)
    store.reads.clear()
    back.read("exp_avg/embed", Box((1, 0), (3, 2)))
    # And of the gradients that are gathered a sample, which must be zeros.
    asked = [(key, box) for key, box in store.reads if "acc_grads" not in key]
    name = "opt_state.1.inner_opt_state.0.inner_state.0.0.mu.embed"
    assert asked == [(name, Box((1, 0), (3, 2)))]
