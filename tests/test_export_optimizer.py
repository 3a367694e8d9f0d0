"""From torch to optax and back: every parameter and every state of the optimizer, bit for bit, and by name."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import MemoryStore, contents_of
from jax_ucp.errors import CorruptData, FormatError, TreeMismatch, UnsupportedLeaf
from jax_ucp.layout.box import Box
from jax_ucp.storage.consolidated import same_bits
from resume_deepspeed import optimizer_of, rows_of, schedule_of, trained_in
from test_cli import run

DATA = Path(__file__).parent / "data"
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
FORMATS = ["dcp", "deepspeed"]
Transformation = optax.GradientTransformation

SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 100)
ADAMW = optax.adamw(SCHEDULE)


def halves(core: Transformation, mask: Callable[[Any], Any]) -> Transformation:
    """Two optimizers, each of the parameters that the other leaves."""
    return optax.chain(
        optax.masked(core, lambda tree: jax.tree.map(bool, mask(tree))),
        optax.masked(core, lambda tree: jax.tree.map(lambda here: not here, mask(tree))),
    )


def of_matrices(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: len(leaf.shape) > 1, tree)


WRAPPED: dict[str, Callable[[Transformation], Transformation]] = {
    "bare": lambda core: core,
    "chain": lambda core: optax.chain(optax.clip_by_global_norm(1.0), core),
    "masked": lambda core: halves(core, of_matrices),
    "partition": lambda core: optax.partition(
        {"a": core, "b": optax.chain(optax.clip(1.0), core)},
        lambda tree: jax.tree.map(lambda leaf: "a" if len(leaf.shape) > 1 else "b", tree),
    ),
    "inject_hyperparams": lambda core: optax.inject_hyperparams(lambda rate: optax.chain(core, optax.scale(rate)))(0.5),
    "an injected schedule": lambda core: optax.inject_hyperparams(
        lambda rate: optax.chain(core, optax.scale_by_learning_rate(rate))
    )(SCHEDULE),
    "MultiSteps": lambda core: optax.MultiSteps(core, 4).gradient_transformation(),
    "all at once": lambda core: optax.chain(
        optax.clip(1.0), optax.MultiSteps(halves(optax.chain(core), of_matrices), 2).gradient_transformation()
    ),
}
CORES = {
    "adam": (ADAMW, ["exp_avg", "exp_avg_sq", "step"]),
    "sgd": (optax.sgd(SCHEDULE, 0.9, nesterov=True), ["momentum_buffer"]),
    "lion": (optax.lion(SCHEDULE), ["exp_avg", "step"]),
}


def differences(source: ucp.Checkpoint, target: ucp.Checkpoint) -> list[str]:
    """The labels of leaves that only one of them has, or of which a bit differs."""
    want, found = ({leaf.label for leaf in some.leaves} for some in (source, target))
    return sorted((want ^ found) | {x for x in want & found if not same_bits(source.read(x), target.read(x))})


def saved(tree: Any, path: Path, stock: bool = False) -> ucp.Checkpoint:
    """The tree as a manager saves it, with our handler or with stock Orbax's, and opened."""
    handler = ocp.StandardCheckpointHandler() if stock else ucp.CheckpointHandler()
    args = ocp.args.StandardSave(tree) if stock else ucp.args.Save(tree)
    with ocp.CheckpointManager(path, item_handlers=handler) as manager:
        manager.save(7, args=args)
        manager.wait_until_finished()
    return ucp.open(path / "7" / "default")


def run_of(checkpoint: ucp.Checkpoint, tx: Transformation, mesh: Mesh | None = None, **said: Any) -> dict[str, Any]:
    """What a training loop in JAX holds that went on from a checkpoint of torch: parameters, optax state and step."""
    params = checkpoint.abstract()["param"]
    plan = checkpoint.plan_optimizer(tx, params, check=False, **said)  # which no state shows
    restored = checkpoint.restore(mesh=mesh)["param"]
    return {"params": restored, "opt_state": plan.restore(mesh=mesh), "step": plan.step}


def account_is_whole(stored: ucp.Checkpoint, back: ucp.Checkpoint) -> bool:
    """Whether each stored leaf is in the account once, and those that are mapped are what the result is made of."""
    told = [item.where for item in back.account if item.where != "ucp.json"]
    arrays = [leaf.name for leaf in stored.leaves if leaf.has_array]
    mapped = {item.where for item in back.account if item.fate == "mapped"}
    used = {piece.file.partition("/")[0] for leaf in back.leaves for piece in back.where(leaf)}
    return sorted(told) == sorted(arrays) and mapped == used


# Precisions, optimizers, tensor parallelism with grouped heads, a gated MLP, and experts beside dense MLPs.
CASES = ["z1_fp32_dp4", "z2_bf16_dp2_bf16master", "z1_fp32_dp2_sgd", "z1_fp32_dp2_lion", "tp2_dp1_z1_fp32_gqa"]
CASES += ["tp2_dp2_z1_bf16_swiglu", "moe_ep2_dp2_z1_bf16"]


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_deepspeed_comes_back_out_of_jax(case, tmp_path):
    about = json.loads((DATA / "deepspeed" / case / "case.json").read_text())
    source, sizes = ucp.open(DATA / "deepspeed" / case), rows_of(about["model"])
    rules = ucp.Mapping.load("deepspeed-gpt-to-reference")
    mapped = source.map(rules, sizes=sizes)
    step, rate = schedule_of(mapped)
    tx = optimizer_of(about, rate, trained_in(mapped))
    stored = saved(run_of(mapped, tx, MESH, step=step), tmp_path / "run")
    back = stored.torch_states(tx)
    assert account_is_whole(stored, back)
    assert [fault for _, fault in back.verify() if fault] == []
    for format in FORMATS:
        exported = back.map(rules.inverse(), sizes=sizes).export(tmp_path / format, format)
        assert differences(source, exported) == []


@pytest.mark.parametrize("wrap", ["masked", "partition"])
@pytest.mark.parametrize("case", ["fsdp2_tp_2x2", "fsdp2_dp2_bf16_flatopt"])
def test_a_run_of_fsdp_comes_back_out_of_jax_by_its_own_names(case, wrap, tmp_path):
    source = ucp.open(DATA / "torch" / case / "ckpt")
    trained = {name for name, param in source.params.items() if "exp_avg" in param.states}
    core = WRAPPED[wrap](ADAMW)
    tx = optax.masked(core, {name: name in trained for name in source.params})
    back = saved(run_of(source, tx), tmp_path / "run").torch_states(tx)
    assert f"no state of {len(source.params) - len(trained)} parameters" in back.notes[-1]
    for format in FORMATS:
        assert differences(source, back.export(tmp_path / format, format)) == []


@pytest.mark.parametrize(
    ("case", "counts"), [("legacy_ep2_moe_seq_distopt_fp32", np.int32), ("dist_tp2_gqa_swiglu_qknorm_fp32", np.float32)]
)
def test_a_run_of_megatron_comes_back_out_of_jax(case, counts, tmp_path):
    source = ucp.open(DATA / "megatron" / case / "ckpt")
    rules = ucp.Mapping.load("megatron-gpt-to-reference")
    tx = optax.chain(optax.clip(1.0), ADAMW)
    tree = run_of(source.map(rules), tx)
    lengths = source.map(rules).source["mapping"]["lengths"]
    back = ucp.Checkpoint.of(tree).torch_states(tx, step_dtype=counts).map(rules.inverse(), sizes=lengths)
    assert differences(source, back.export(tmp_path / "out", "dcp")) == []


SHAPES = {"embed": (6, 4), "dense/kernel": (4, 3), "dense/bias": (3,), "norm/scale": ()}


def trained(core: str, dtype: Any = np.float32) -> ucp.Checkpoint:
    """What torch's optimizer keeps of some parameters after five steps; every element is another number."""
    rng = np.random.default_rng(5)
    tree: dict[str, dict[str, np.ndarray]] = {
        state: {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}
        for state in ("param", *CORES[core][1])
    }
    if "step" in tree:
        tree["step"] = dict.fromkeys(SHAPES, np.asarray(5, np.int32 if core == "lion" else np.float32))
    return ucp.Checkpoint(contents_of(tree))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flat.items():
        module, slash, leaf = name.partition("/")
        if slash:
            found.setdefault(module, {})[leaf] = value
        else:
            found[name] = value
    return found


def tree_of(source: ucp.Checkpoint, tx: Transformation) -> dict[str, Any]:
    """The training loop's tree that went on from a checkpoint of `trained`."""
    params = nested({name: jnp.asarray(param.read()) for name, param in source.params.items()})
    return {"params": params, "opt_state": source.plan_optimizer(tx, params, step=5).restore(), "step": 5}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("core", CORES)
def test_states_are_found_in_whatever_is_around_them(core, wrap):
    source, tx = trained(core), WRAPPED[wrap](CORES[core][0])
    back = ucp.Checkpoint.of(tree_of(source, tx)).torch_states(tx)
    assert differences(source, back) == []
    assert [fault for _, fault in back.verify() if fault] == []
    assert all(value in (5, 0.5) or name.endswith("rate") for name, value in back.extras["tree"].items())


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
        self.layers = nnx.List([nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1))])
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(2))


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("stock", [False, True])
def test_an_optimizer_of_flax_is_seen_through(stock, pure, tmp_path):
    tx = WRAPPED["chain"](ADAMW)
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    loss = nnx.value_and_grad(lambda m: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(nnx.state(m, nnx.Param))))
    for _ in range(3):
        optimizer.update(model, loss(model)[1])
    tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    stored = saved({key: nnx.to_pure_dict(state) for key, state in tree.items()} if pure else tree, tmp_path, stock)
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
    (note,) = [note for note in back.notes if "arrays that are no parameters" in note]
    assert "model/dropout/rngs" in note
    assert back.extras["tree"][f"optimizer/step{'' if pure else '/value'}"] == 3


@settings(max_examples=12)
@given(st.lists(st.sampled_from(sorted(WRAPPED)), max_size=3), st.sampled_from(sorted(CORES)), st.data())
def test_the_way_back_undoes_the_way_there(wraps, core, data):
    tx, source = CORES[core][0], trained(core, data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16])))
    for wrap in wraps:
        tx = WRAPPED[wrap](tx)
    assert differences(source, ucp.Checkpoint.of(tree_of(source, tx)).torch_states(tx)) == []


def changed(tree: dict[str, Any], label: str, change: Callable[[Any], Any]) -> ucp.Checkpoint:
    """A checkpoint of the tree in which one leaf is another; where `change` gives None, it is not there."""
    found = ucp.Checkpoint.of(tree)._contents
    (leaf,) = [leaf for leaf in found.leaves if leaf.label == label]
    arrays = {
        one.name: np.array(found.arrays.read(one.name, Box.whole(one.shape))) for one in found.leaves if one.has_array
    }
    value = change(arrays[leaf.name])
    leaves = [one for one in found.leaves if one is not leaf]
    if value is not None:
        arrays[leaf.name] = np.asarray(value)
        leaves.append(replace(leaf, shape=arrays[leaf.name].shape, dtype=arrays[leaf.name].dtype.name))
    return ucp.Checkpoint(replace(found, leaves=leaves, arrays=MemoryStore(arrays)))


OTHERS = {
    "turned round": optax.chain(ADAMW, optax.clip_by_global_norm(1.0)),
    "without the clipping": ADAMW,
    "with one more": optax.chain(optax.clip_by_global_norm(1.0), ADAMW, optax.clip(1.0)),
    "without the schedule": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "of another kind": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(SCHEDULE)),
    "of the same moments under other names": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(SCHEDULE, 0.9)),
    "of another dtype": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, mu_dtype=jnp.bfloat16)),
    "of some parameters": optax.chain(optax.clip_by_global_norm(1.0), optax.masked(ADAMW, of_matrices)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_optimizer_is_refused(other):
    checkpoint = ucp.Checkpoint.of(tree_of(trained("adam"), WRAPPED["chain"](ADAMW)))
    with pytest.raises(TreeMismatch, match="the state of this optimizer is not what is at opt_state"):
        checkpoint.torch_states(OTHERS[other])


COUNTED = "opt_state/1/0/count"
WRONG = [
    ("chain", "opt_state/1/0/nu/dense/bias", lambda _: None, "dense/bias: the optimizer has it, the checkpoint not"),
    ("chain", "opt_state/1/0/mu/embed", np.transpose, r"has float32 \(6, 4\), the checkpoint float32 \(4, 6\)"),
    ("chain", "params/dense/bias", lambda _: None, "mu/dense/bias: the checkpoint has it, the optimizer not"),
    ("chain", COUNTED, lambda n: n + 1, f"opt_state/1/2/count counts 5, but {COUNTED} has 6 updates of dense/bias"),
    ("chain", "opt_state/1/2/count", lambda n: n - 5, rf"counts 0, but {COUNTED} has 5 .* give step=5"),
    ("inject_hyperparams", "opt_state/count", lambda n: n + 1, "opt_state/count counts 6"),
    ("MultiSteps", "opt_state/gradient_step", lambda n: n + 1, "opt_state/gradient_step counts 6"),
    ("MultiSteps", "opt_state/mini_step", lambda n: n + 3, "mini_step is 3: gradients are being gathered"),
    ("bare", "opt_state/0/count", lambda n: n + (1 << 24), "16777221, which float32 does not hold; give step_dtype="),
]


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


def test_a_schedule_that_was_begun_anew_is_kept_as_an_extra_where_that_is_said():
    tx = WRAPPED["chain"](ADAMW)
    source = trained("adam")
    checkpoint = changed(tree_of(source, tx), "opt_state/1/2/count", lambda n: n - 3)
    back = checkpoint.torch_states(tx, step=5)
    assert differences(source, back) == []
    assert back.extras["tree"]["opt_state/1/2/count"] == 2
    assert "opt_state/1/2/count counts 2, where opt_state/1/0/count has 5 updates" in back.notes[-1]
    with pytest.raises(TreeMismatch, match="opt_state/1/0/count counts 5 updates, but step=2 was given"):
        checkpoint.torch_states(tx, step=2)


def test_gradients_where_none_are_being_gathered_stop_an_export(tmp_path):
    tx = WRAPPED["MultiSteps"](ADAMW)
    back = changed(tree_of(trained("adam"), tx), "opt_state/acc_grads/dense/bias", lambda a: a + 1).torch_states(tx)
    with pytest.raises(CorruptData, match=r"acc_grads/dense/bias: .* has gradients, though none are being gathered"):
        back.save(tmp_path / "out")


def test_a_run_in_float64_needs_no_jax_in_float64():
    tx, source = WRAPPED["chain"](ADAMW), trained("adam")
    tree = jax.tree.map(
        lambda x: np.asarray(x, np.float64 if x.dtype == np.float32 else None),
        tree_of(source, tx) | {"step": np.int32(5)},
    )
    back = ucp.Checkpoint.of(tree).torch_states(tx)
    assert back.read("exp_avg/embed").dtype == np.float64
    np.testing.assert_array_equal(back.read("exp_avg/embed"), source.read("exp_avg/embed"))


def test_several_optimizers_in_one_tree_are_refused():
    tx = optax.GradientTransformation(jax.vmap(ADAMW.init), jax.vmap(ADAMW.update))
    params = {"w": jnp.ones((3, 2))}
    with pytest.raises(TreeMismatch, match=r"opt_state/0/count has shape \(3,\): it is not one number"):
        ucp.Checkpoint.of({"params": params, "opt_state": tx.init(params)}).torch_states(tx)


def test_an_optimizer_of_one_vector_is_refused():
    tx = optax.flatten(ADAMW)
    params = tree_of(trained("adam"), ADAMW)["params"]
    with pytest.raises(TreeMismatch, match="opt_state/0/mu is no exp_avg of a parameter"):
        ucp.Checkpoint.of({"params": params, "opt_state": tx.init(params)}).torch_states(tx)


def test_two_parameters_of_one_name_are_refused():
    params = {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}}
    with pytest.raises(TreeMismatch, match="two parameters are called a/b"):
        ucp.Checkpoint.of({"params": params, "opt_state": ADAMW.init(params)}).torch_states(ADAMW)


class Stopped(Exception):
    pass


def stopped(checkpoint: ucp.Checkpoint, path: Path) -> None:
    """A save that ends after its first block."""

    def stop(_: object) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        checkpoint.save(path, done=stop)


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
    x = jax.device_put(np.arange(24.0, dtype=np.float32).reshape(8, 3), NamedSharding(MESH, P("data")))
    tree = {"x": x, "n": [3, np.float16(0.5)], "s": "text", "none": None}
    checkpoint = ucp.Checkpoint.of(tree)
    assert same_bits(checkpoint.read("x", Box((1, 1), (7, 3))), np.asarray(x)[1:7, 1:3])
    for found in (checkpoint, checkpoint.save(tmp_path / "out")):
        assert jax.tree.all(jax.tree.map(np.array_equal, found.restore(), tree | {"x": np.asarray(x)}))
    with pytest.raises(UnsupportedLeaf, match="x is abstract"):
        ucp.Checkpoint.of({"x": jax.ShapeDtypeStruct((2,), np.float32)})
    assert not ucp.Checkpoint.of({"x": np.ones(3)}).read("x").flags.writeable
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UnsupportedLeaf, match="in the memory of several processes; save it"):
        ucp.Checkpoint.of({"x": np.ones(3)})


def test_moments_of_one_parameter_in_two_states_are_refused():
    tx = optax.chain(ADAMW, optax.scale_by_adam())
    tree = tree_of(trained("adam"), ADAMW)
    twice = ucp.Checkpoint.of(tree | {"opt_state": tx.init(tree["params"])})
    with pytest.raises(TreeMismatch, match="0/0/mu/embed and opt_state/1/mu/embed are both exp_avg of embed"):
        twice.torch_states(tx)


def test_what_is_beside_a_run_is_told():
    source, tx = trained("adam"), WRAPPED["bare"](ADAMW)
    tree = tree_of(source, tx) | {"rng": jax.random.key(0), "ema": {"embed": np.ones(3)}, "name": "x", "none": None}
    tree |= {"loss": np.float32("nan")}
    back = ucp.Checkpoint.of(tree).torch_states(tx)
    assert differences(source, back) == []
    told = {item.where: (item.fate, item.reason) for item in back.account}
    assert len(told) == len(back.account) == len(ucp.Checkpoint.of(tree).leaves)
    assert told["ema/embed"] == told["rng"] == ("skipped", "no parameter, and no state of the optimizer")
    assert told["none"] == ("skipped", "it holds nothing")
    assert told["step"][0] == told["name"][0] == "extra"
    assert back.notes == ["2 arrays that are no parameters are left out, the first ema/embed"]
    assert back.extras["tree"] == {"opt_state/2/count": 5, "name": "x", "step": 5, "loss": {"!float": "nan"}}


def test_a_model_that_is_given_says_which_arrays_are_parameters():
    source, tx = trained("adam"), WRAPPED["bare"](ADAMW)
    tree = tree_of(source, tx)
    model = jax.eval_shape(lambda: tree["params"])
    tree["params"] = tree["params"] | {"statistics": np.ones(3)}
    assert differences(source, ucp.Checkpoint.of(tree).torch_states(tx, model)) == []
    with pytest.raises(TreeMismatch, match="mu/statistics: the optimizer has it, the checkpoint not"):
        ucp.Checkpoint.of(tree).torch_states(tx)
    model["embed"] = jax.ShapeDtypeStruct((6, 5), np.float32)
    model["more"] = jax.ShapeDtypeStruct((), np.float32)
    with pytest.raises(TreeMismatch, match=r"embed has shape \(6, 5\) in the model, \(6, 4\)") as told:
        ucp.Checkpoint.of(tree).torch_states(tx, model)
    assert "more: a parameter of the model, but not at params" in str(told.value)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"opt_state": "optimizer"}, "has nothing at optimizer; it has opt_state, params, step"),
        ({"params": "model"}, "has nothing at model"),
        ({"params": "step"}, "has no parameters at step"),
    ],
)
def test_a_label_at_which_there_is_nothing_is_refused(said, message):
    checkpoint = ucp.Checkpoint.of(tree_of(trained("adam"), ADAMW))
    with pytest.raises(TreeMismatch, match=message):
        checkpoint.torch_states(ADAMW, **said)


def test_moments_are_read_when_they_are_asked_for_and_not_before():
    tx = WRAPPED["all at once"](ADAMW)
    checkpoint = changed(tree_of(trained("adam"), tx), "params/embed", lambda a: a)
    store = checkpoint._contents.arrays
    back = checkpoint.torch_states(tx)
    assert sum(box.size for _, box in store.reads) == len(store.reads)
    store.reads.clear()
    back.read("exp_avg/embed", Box((1, 0), (3, 2)))
    assert store.reads == [("opt_state.1.inner_opt_state.0.inner_state.0.0.mu.embed", Box((1, 0), (3, 2)))]


PROGRAM = """\
import optax

def tx():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100)))

def with_model():
    import jax
    shapes = {"embed": (6, 4), "dense": {"kernel": (4, 3), "bias": (3,)}, "norm": {"scale": ()}}
    model = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=lambda x: isinstance(x, tuple))
    return tx(), model

def nothing():
    return 3
"""
MAPPING = """\
leaves:
- param: embed
  leaf: embed
- param: dense/kernel
  axes: a b
  leaf: {dense.weight: b a}
- {param: dense/bias, leaf: dense.bias}
- {param: norm/scale, leaf: norm.weight}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory of the user's own, with a training run, the function that made its optimizer, and a mapping."""
    monkeypatch.chdir(tmp_path)
    name = f"train_{tmp_path.name.replace('-', '_')}"
    Path(f"{name}.py").write_text(PROGRAM)
    inverse = ucp.Mapping.parse(MAPPING).inverse().to_dict()
    Path("names.yaml").write_text(json.dumps(inverse))
    saved(tree_of(trained("adam"), WRAPPED["chain"](ADAMW)), tmp_path / "run")
    return name


@pytest.mark.parametrize("function", ["tx", "with_model"])
def test_one_command_exports_a_run(function, folder):
    options = ("--format", "dcp", "--optimizer", f"{folder}:{function}", "--mapping", "names.yaml")
    printed = run("export", "run/7/default", "out", *options)
    assert "out: 16 tensors" in printed
    want = trained("adam").map(ucp.Mapping.parse(MAPPING))
    assert differences(want, ucp.open("out")) == []


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("nowhere", "nowhere is neither there nor a function; write module:function"),
        ("no_such_module:tx", "ModuleNotFoundError"),
        ("MODULE:absent", "AttributeError"),
        ("MODULE:nothing", "MODULE:nothing gives 3, which is no optax optimizer"),
    ],
)
def test_an_optimizer_that_is_none_is_refused_without_a_traceback(optimizer, message, folder):
    options = ("--format", "dcp", "--optimizer", optimizer.replace("MODULE", folder))
    assert message.replace("MODULE", folder) in run("export", "run/7/default", "out", *options, code=1)
    assert not Path("out").exists()


def test_what_is_told_of_a_run_is_printed_and_labels_are_given_by_name(folder):
    tx = WRAPPED["chain"](ADAMW)
    tree = tree_of(trained("adam"), tx)
    tree = {"model": tree["params"], "optimizer": {"state": tree["opt_state"]}, "ema": np.ones(3)}
    saved(tree, Path("other").resolve())
    labels = ("--params", "model", "--opt-state", "optimizer/state")
    options = ("--format", "deepspeed", "--mapping", "names.yaml", "--step-dtype", "int32", *labels)
    printed = run("export", "other/7/default", "out", *options, "--optimizer", f"{folder}:tx")
    assert "note: 1 arrays that are no parameters are left out, the first ema" in printed
    assert ucp.open("out").read("step/dense.weight").dtype == np.int32
    assert "--params goes with --optimizer" in run("export", "other/7/default", "x", *options, code=2)


PAGE = (DATA.parent.parent / "docs" / "export.md").read_text()


def test_the_commands_print_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (loop,) = re.findall(r"```python\n(from pathlib.*?)```", PAGE, re.DOTALL)
    (rules,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (command, printed), *others = re.findall(r"```\n\$ jax-ucp (.*?)\n(.*?)```", PAGE, re.DOTALL)
    assert not others
    module = f"train_{tmp_path.name.replace('-', '_')}"
    Path(f"{module}.py").write_text(f"{loop}\ntrain()\n")
    Path("names.yaml").write_text(rules)
    subprocess.run([sys.executable, f"{module}.py"], check=True, timeout=120)
    Path(f"{module}.py").write_text(loop)
    assert run(*command.replace("train:", f"{module}:").split()) == printed
    space: dict[str, Any] = {}
    exec(loop, space)
    (in_python,) = re.findall(r"```python\n(run = .*?)```", PAGE, re.DOTALL)
    exec(in_python.replace('"torch"', '"again"'), space)
    assert differences(ucp.open("torch"), ucp.open("again")) == []
    assert ucp.open("torch").params.keys() == {"embed.weight", "head.weight"}
