"""What an optimizer was told for each parameter, and whether optax decays the same weights."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_ucp as ucp
from cases import DATA, Case, names_of
from helpers import contents_of, in_lanes
from jax_ucp.arrays.optimizer_groups import Group, groups_of
from jax_ucp.arrays.value import stated
from jax_ucp.errors import TreeMismatch
from jax_ucp.formats.megatron.parameters import settings_of
from jax_ucp.formats.megatron.run import Args
from jax_ucp.optimizers.adam_rule import rule_faults
from jax_ucp.optimizers.settings import TrialUpdates, setting_faults
from jax_ucp.optimizers.small_run import SmallRun

# Elastic files keep no groups. The optimizer of `fsdp1_sharded` had one group.
DEEPSPEED = sorted({*names_of("deepspeed")} - {"z1_fp32_dp2_elastic"})
DCP = [
    "fsdp2_dp4_uneven", "fsdp2_tp_2x2", "fsdp2_dp2_bf16_flatopt", "hsdp_2x2", "titan_flat", "titan_prefixed",
]  # fmt: skip
GROUPED = [f"deepspeed/{name}" for name in DEEPSPEED]
GROUPED += [f"deepspeed_universal/{name}" for name in names_of("deepspeed_universal")]
GROUPED += [f"torch/{name}" for name in DCP]
MEGATRON = [n for n in names_of("megatron") if "optimizer" in Case(f"megatron/{n}").about]
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}
WEIGHTS = {"w": True, "b": False}
TRAINED = {"exp_avg", "momentum_buffer"}


def matrices_decay(checkpoint, rate):
    said = {name: group.settings for group in checkpoint.groups for name in group.params}
    trained = {n: param for n, param in checkpoint.params.items() if TRAINED & set(param.states)}
    assert said.keys() == trained.keys()
    for name, param in trained.items():
        assert said[name]["weight_decay"] == (rate if len(param.shape) > 1 else 0.0), name
        assert said[name]["lr"] > 0
    return said


@pytest.mark.parametrize("label", GROUPED)
def test_groups_say_which_weights_were_decayed(label):
    live = Case(label)
    matrices_decay(live.open(), live.about.get("optimizer", {}).get("weight_decay", 0.1))


@pytest.mark.parametrize("case", MEGATRON)
def test_those_of_megatron_follow_from_its_rule(case):
    live = Case(f"megatron/{case}")
    groups = [g for g in live.about["optimizer"]["param_groups"] if "betas" in g]
    [told] = {json.dumps({key: group.get(key) for key in ("betas", "eps")}) for group in groups}
    [rate] = {g["weight_decay"] for g in live.about["optimizer"]["param_groups"]} - {0.0}
    for settings in matrices_decay(live.open(), rate).values():
        if "betas" in settings:  # Muon's have none
            assert json.dumps({key: settings[key] for key in ("betas", "eps")}) == told
            assert settings["decoupled_weight_decay"] is True


DECAYING = {"wd_mult": 1.0, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
OTHERS = DECAYING | {"wd_mult": 0.0, "weight_decay": 0.0}
NORM = "decoder.layers.0.self_attention.q_layernorm.weight"


@pytest.mark.parametrize(("args", "groups", "rate"), [
    ({"weight_decay": 0.1}, [DECAYING, OTHERS], 0.0),
    ({"weight_decay": 0.1, "apply_wd_to_qk_layernorm": True}, [DECAYING, OTHERS], 0.1),
    ({"weight_decay": 0.1, "no_weight_decay_cond_type": "qwen3_next"}, [DECAYING, OTHERS], 0.1),
    ({"weight_decay": 0.1, "no_weight_decay_cond_type": None}, [DECAYING, OTHERS], 0.0),
    ({"weight_decay": 0.1}, [DECAYING], 0.1),
    ({"weight_decay": 0.1}, [OTHERS | {"is_expert_parallel": True, "eps": 1.0}, OTHERS], 0.0),
    ({"weight_decay": 0.1}, [DECAYING, OTHERS, OTHERS | {"eps": 1.0}], 0.0),
    ({}, [DECAYING, OTHERS], None),
])  # fmt: skip
def test_what_megatrons_groups_say_of_a_norm_of_queries(args, groups, rate):
    zeros = np.zeros(8, np.float32)
    states = {state: stated(zeros, "") for state in ("weight", "exp_avg", "exp_avg_sq")}
    told = settings_of(Args(args), groups, NORM, states)
    assert told.get("weight_decay") == rate
    assert told.get("decoupled_weight_decay") == (True if args else None)
    assert told["betas"] == (0.9, 0.95)
    of_rest = {group["eps"] for group in groups if not group.get("is_expert_parallel")}
    assert told.get("eps") == (1e-8 if of_rest == {1e-8} else None)


def test_a_conversion_and_a_mapping_keep_them(tmp_path):
    checkpoint = ucp.open(DATA / "torch" / "fsdp2_dp4_uneven" / "ckpt")
    checkpoint.save(tmp_path / "universal")
    assert list(ucp.open(tmp_path / "universal").groups) == list(checkpoint.groups)

    said = {"a.0": {"lr": 1, "weight_decay": 0.1}, "a.1": {"lr": 1, "weight_decay": 0.0}}
    said["b"] = {"lr": 2}
    plain = contents_of({"param": {name: np.zeros(2) for name in said}})
    contents = replace(plain, groups=groups_of(said))
    rules = [{"param": "a.{layer}", "axes": "n", "leaf": {"stacked": "layer n"}}]
    rules = {"leaves": [*rules, {"param": "b", "leaf": "c/d"}]}
    mapped = ucp.Checkpoint(contents).map(ucp.Mapping.from_dict(rules))
    assert list(mapped.groups) == [Group(("stacked",), {"lr": 1}), Group(("c/d",), {"lr": 2})]


@pytest.mark.parametrize(("tx", "w", "b"), [
    (optax.adamw(1e-3, mask=WEIGHTS), "in proportion", "none"),
    (optax.adamw(optax.linear_schedule(0, 1, 10)), "in proportion", "in proportion"),
    (optax.adam(1e-3), "none", "none"),
    (optax.chain(optax.add_decayed_weights(0.1, WEIGHTS), optax.adam(1e-3)), "through the gradient", "none"),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3, mask=WEIGHTS)), "in proportion", "none"),
    (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9)), "in proportion", "in proportion"),
    (optax.MultiSteps(optax.adamw(1e-3, mask=WEIGHTS), 4), "in proportion", "none"),
    (optax.inject_hyperparams(optax.adamw)(1e-3, mask=WEIGHTS), "in proportion", "none"),
    (
        optax.adamw(
            1e-3, mask=lambda tree: {k: p.ndim > 1 and p.size > 1 for k, p in tree.items()}
        ),
        "in proportion",
        "none",
    ),
    (optax.partition({"on": optax.adamw(1e-3), "off": optax.set_to_zero()}, {"w": "on", "b": "off"}),
     "in proportion", "none"),
])  # fmt: skip
def test_an_optimizer_is_seen_to_decay(tx, w, b):
    assert TrialUpdates(SmallRun(tx, PARAMS)).decays() == {"w": w, "b": b}


def test_an_optimizer_that_moves_nothing_says_nothing():
    assert TrialUpdates(SmallRun(optax.adamw(0.0), PARAMS)).decays() == {}


@pytest.mark.parametrize(("tx", "message"), [
    (optax.adamw(1e-3), "b: the checkpoint's optimizer has weight_decay=0.0 for it, and tx decays it in proportion"),
    (optax.adam(1e-3), "w: the checkpoint's optimizer has weight_decay=0.1 for it, and tx does not decay it"),
    (optax.chain(optax.add_decayed_weights(0.1, WEIGHTS), optax.adam(1e-3)),
        r"w: the checkpoint's optimizer decays it in proportion \(AdamW\), tx through the gradient"),
])  # fmt: skip
def test_another_decay_is_refused_unless_it_is_meant(tx, message):
    names = {"w": (3, 2), "b": (3,)}
    zeros = {name: np.zeros(shape, np.float32) for name, shape in names.items()}
    tree = {state: {**zeros} for state in ("param", "exp_avg", "exp_avg_sq")}
    tree["step"] = {n: np.float32(2) for n in names}
    always = {"decoupled_weight_decay": True}
    groups = [Group((n,), {"weight_decay": d, **always}) for n, d in (("w", 0.1), ("b", 0.0))]
    checkpoint = ucp.Checkpoint(replace(contents_of(tree), groups=groups))
    checkpoint.plan_optimizer(optax.adamw(1e-3, mask=WEIGHTS), PARAMS)
    with pytest.raises(TreeMismatch, match=message):
        checkpoint.plan_optimizer(tx, PARAMS)
    checkpoint.plan_optimizer(tx, PARAMS, check=False)


def trained_with(eps: float = 1e-8) -> list[Group]:
    settings = {"betas": [0.9, 0.95], "eps": eps, "decoupled_weight_decay": True, "lr": 0.01}
    rates = ("w", 0.1), ("b", 0.0)
    return [Group((name,), settings | {"weight_decay": rate}) for name, rate in rates]


def faults(tx, groups, params=PARAMS):
    run = SmallRun(tx, params)
    return [*rule_faults(run, groups), *setting_faults(groups, run)]


def adamw(rate=1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, **more):
    return optax.adamw(rate, b1, b2, eps, weight_decay=weight_decay, mask=WEIGHTS, **more)


# Wrappers hand eps on as it is: it is tried with the dtypes that round it, and sums of gradients.
SAME = [
    adamw,
    lambda **same: adamw(mu_dtype=jnp.bfloat16, **same),
    lambda **same: adamw(mu_dtype=jnp.float16, **same),
    lambda **same: optax.MultiSteps(adamw(**same), 3, use_grad_mean=False),
    lambda **same: optax.MultiSteps(adamw(optax.linear_schedule(0.0, 1e-3, 10), **same), 5, use_grad_mean=False),
    lambda **same: optax.chain(optax.clip_by_global_norm(1.0), adamw(**same)),
    lambda **same: optax.MultiSteps(adamw(**same), 3),
    lambda **same: adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100), **same),
    lambda **same: optax.inject_hyperparams(optax.adamw, ("mask",))(1e-3, 0.9, 0.95, **same, weight_decay=0.1, mask=WEIGHTS),
]  # fmt: skip


EPS = [(make, eps) for make in SAME[:5] for eps in (1e-5, 1e-15, 1e-20)]
EPS += [(make, 1e-8) for make in SAME]


@pytest.mark.parametrize(
    ("make", "eps", "dtype"),
    in_lanes([(*row, dtype) for row in EPS for dtype in (jnp.float32, jnp.bfloat16)]),
)
def test_an_optimizer_with_the_settings_of_the_trainers_is_taken(make, eps, dtype):
    params = {name: value.astype(dtype) for name, value in PARAMS.items()}
    assert faults(make(eps=eps), trained_with(eps), params) == []


def test_a_parameter_without_elements_is_compared_as_any_other():
    params = PARAMS | {"w": jnp.ones((0, 3))}
    assert faults(adamw(), trained_with(), params) == []
    assert len(faults(adamw(b1=0.95), trained_with(), params)) == 1


@pytest.mark.parametrize(("tx", "found"), [
    (adamw(b1=0.95), ["b and 1 more: the checkpoint's optimizer keeps 0.9 of exp_avg at an update (betas), tx 0.95"]),
    (adamw(b2=0.999), ["b and 1 more: the checkpoint's optimizer keeps 0.95 of exp_avg_sq at an update (betas), tx 0.999"]),
    (adamw(weight_decay=0.01), ["w: the checkpoint's optimizer has weight_decay=0.1, tx about 0.01"]),
    (optax.partition({"w": adamw(1e-3), "b": adamw(1e-4)}, {"w": "w", "b": "b"}),
     ["b: the checkpoint's optimizer has lr=0.01, as for w, and tx about 0.1 times the rate of w"]),
    (adamw(eps=1e-6), ["w and 1 more: the checkpoint's optimizer has eps=1e-08, tx about 1e-06"]),
    (optax.MultiSteps(adamw(eps=1e-6), 4, use_grad_mean=False),
     ["w and 1 more: the checkpoint's optimizer has eps=1e-08, tx about 1e-06"]),
    (optax.chain(optax.add_decayed_weights(0.1, WEIGHTS), optax.adam(1e-3, b2=0.95)), ["w: the checkpoint's optimizer decays it in"]),
])  # fmt: skip
def test_one_with_others_is_refused(tx, found):
    told = faults(tx, trained_with())
    assert len(told) == len(found)
    for fault, words in zip(told, found, strict=True):
        assert fault.startswith(words)


def test_an_eps_below_all_second_moments_is_told_from_others():
    [told] = faults(adamw(), trained_with(1e-20))
    assert told.startswith("w and 1 more: the checkpoint's optimizer has eps=1e-20, tx about 1e-08")


def test_one_rate_for_what_was_trained_with_two_is_refused():
    b, w = trained_with()[::-1]
    groups = [b, Group(w.params, w.settings | {"lr": 0.1})]
    [told] = faults(adamw(), groups)
    assert "has lr=0.1, and 0.01 for b, and tx about 1 times the rate of b" in told
    parts = {"w": adamw(1e-2), "b": adamw(1e-3)}
    assert faults(optax.partition(parts, {"w": "w", "b": "b"}), groups) == []


# What groups of torch 2.13 say, of each optimizer what it says of itself alone.
OF_TORCH = {"lr": 0.01, "maximize": False, "foreach": None, "differentiable": False}
OF_ADAM = OF_TORCH | {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}
OF_ADAMW = OF_ADAM | {"weight_decay": 0.01, "decoupled_weight_decay": True, "amsgrad": False}
OF_SGD = OF_TORCH | {"momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}
ADAM, SGD = optax.adam(0.01), optax.sgd(0.01, 0.9)


def decayed(rate, tx):
    return optax.chain(optax.add_decayed_weights(rate), tx)


def of_all(settings):
    return [Group(("w", "b"), settings)]


def partition(w, b):
    return optax.partition({"w": w, "b": b}, {"w": "w", "b": "b"})


# A rate of zero at first, and for long.
WARM = optax.linear_schedule(0, 0.1, 10)
LATE = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [200])


# Any momentum in any dtype, at a rate that moves no weight at first; and other rates with the least
# and the most momentum, in the dtype of least range.
WHOLE = (jnp.float32, 0.5), (jnp.float32, 0.9), (jnp.float32, 0.999)
HALF = (jnp.float16, 0.5), (jnp.float16, 0.999)
BRAIN = (jnp.bfloat16, 0.5), (jnp.bfloat16, 0.99)
MOMENTA = [(dtype, momentum, WARM) for dtype, momentum in (*WHOLE, *BRAIN, *HALF)]
MOMENTA += [(dtype, momentum, rate) for dtype, momentum in HALF for rate in (0.1, LATE)]


@pytest.mark.parametrize(
    ("dtype", "momentum", "rate", "nesterov"),
    in_lanes([(*row, nesterov) for row in MOMENTA for nesterov in (False, True)]),
)
def test_nesterovs_step_is_told_from_the_plain_by_any_momentum(dtype, momentum, rate, nesterov):
    # one moves at once and the other as its rate says, either with Nesterov's step
    rates, how = ((0.1, nesterov), (rate, not nesterov)), {"accumulator_dtype": dtype}
    sgds = [optax.sgd(each, momentum, nesterov=step, **how) for each, step in rates]
    settings = OF_SGD | {"momentum": momentum, "nesterov": nesterov}
    [told] = rule_faults(SmallRun(partition(*sgds), PARAMS), of_all(settings))
    assert told.startswith(f"b: the checkpoint's optimizer has nesterov={nesterov}, tx")


@pytest.mark.parametrize(("dtype", "momentum", "rate"), in_lanes(MOMENTA))
def test_nadam_is_told_from_adam_by_any_momentum(dtype, momentum, rate):
    makers = (0.1, optax.adam), (rate, optax.nadam)
    adams = [make(each, b1=momentum, mu_dtype=dtype) for each, make in makers]
    settings = OF_ADAM | {"betas": [momentum, 0.999]}
    [told] = rule_faults(SmallRun(partition(*adams), PARAMS), of_all(settings))
    assert told.startswith("b: the checkpoint's optimizer has nesterov=False, tx True")


def test_what_is_not_trained_does_not_decide_for_what_is():
    # a mask hands on the gradient of "b"
    masked = optax.masked(optax.nadam(WARM), WEIGHTS)
    [told] = rule_faults(SmallRun(masked, PARAMS), of_all(OF_ADAM))
    assert told.startswith("w: the checkpoint's optimizer has nesterov=False, tx True")


def test_nothing_is_told_of_steps_that_are_not_made():
    frozen = optax.chain(optax.sgd(0.1, 0.9), optax.masked(optax.set_to_zero(), WEIGHTS))
    settings = OF_SGD | {"nesterov": True}
    [told] = rule_faults(SmallRun(frozen, PARAMS), of_all(settings))
    assert told.startswith("b: the checkpoint's optimizer has nesterov=True, tx False")


@pytest.mark.parametrize(("settings", "tx", "told"), [
    (OF_SGD | {"nesterov": True}, optax.sgd(0.01, 0.9, nesterov=True), ""),
    (OF_SGD | {"weight_decay": 1e-4}, decayed(1e-4, SGD), ""),
    (OF_SGD | {"weight_decay": 1e-4}, decayed(1e-3, SGD), "has weight_decay=0.0001, tx about 0.001"),
    (OF_ADAMW, optax.adamw(0.01, weight_decay=0.01), ""),
    (OF_ADAMW, optax.adamw(0.01, eps=1e-6, weight_decay=0.01), "has eps=1e-08, tx about 1e-06"),
])  # fmt: skip
def test_settings_of_parameters_in_float16_are_compared(settings, tx, told):
    params = {name: value.astype(jnp.float16) for name, value in PARAMS.items()}
    assert [told in fault for fault in faults(tx, of_all(settings), params)] == [True] * bool(told)


@pytest.mark.parametrize(("settings", "tx", "told"), [
    (OF_ADAM | {"amsgrad": False}, ADAM, ""),
    (OF_SGD | {"nesterov": True}, partition(*(optax.sgd(rate, 0.9, nesterov=True) for rate in (0.1, WARM))), ""),
    (OF_ADAM | {"decoupled_weight_decay": False}, ADAM, "optimizer is RAdam, or one like it"),
    (OF_ADAM | {"decoupled_weight_decay": False, "momentum_decay": 0.004}, ADAM, "optimizer is NAdam"),
    (OF_ADAM | {"amsgrad": False}, optax.nadam(0.01), "has nesterov=False, tx True"),
    (OF_ADAM | {"amsgrad": False}, optax.MultiSteps(optax.nadam(0.01), 3), "has nesterov=False, tx True"),
    (OF_SGD, SGD, ""),
    (OF_SGD, optax.MultiSteps(optax.sgd(optax.linear_schedule(0, 1, 10), 0.9), 2), ""),
    (OF_SGD | {"nesterov": True}, optax.sgd(0.01, 0.9, nesterov=True), ""),
    (OF_SGD | {"nesterov": True}, SGD, "has nesterov=True, tx False"),
    (OF_SGD, optax.sgd(0.01, 0.9, nesterov=True), "has nesterov=False, tx True"),
    (OF_SGD, optax.sgd(0.01, 0.5), "keeps 0.9 of momentum_buffer at an update (momentum), tx 0.5"),
    (OF_SGD | {"ns_steps": 5}, SGD, "optimizer is Muon"),
    (OF_SGD | {"weight_decay": 0.1}, decayed(0.1, SGD), ""),
    (OF_SGD | {"weight_decay": 0.1}, optax.chain(optax.clip(1e-3), decayed(0.1, SGD)), ""),
    (OF_SGD | {"weight_decay": 0.1}, decayed(0.01, SGD), "has weight_decay=0.1, tx about 0.01"),
    (OF_SGD | {"weight_decay": 0.1, "nesterov": True}, decayed(0.1, optax.sgd(0.01, 0.9, nesterov=True)), ""),
    (OF_SGD, optax.partition({"w": SGD, "b": optax.sgd(0.1, 0.9)}, {"w": "w", "b": "b"}),
     "has lr=0.01, as for w, and tx about 10 times the rate of w"),
])  # fmt: skip
def test_moments_of_one_name_in_another_optimizer_are_refused(settings, tx, told):
    assert [told in fault for fault in faults(tx, of_all(settings))] == [True] * bool(told)


@pytest.mark.parametrize(("state", "tx", "taken"), [
    ("max_exp_avg_sq", ADAM, ["exp_avg", "exp_avg_sq"]),
    ("mu_product", ADAM, ["exp_avg", "exp_avg_sq"]),
    ("exp_avg_sq", optax.lion(0.01), ["exp_avg"]),
    ("square_avg", SGD, ["momentum_buffer"]),
])  # fmt: skip
def test_a_state_that_tx_does_not_take_is_refused_unless_it_is_meant(state, tx, taken):
    ones = {name: np.ones(p.shape, np.float32) for name, p in PARAMS.items()}
    tree = dict.fromkeys(["param", *taken], ones)
    plan = ucp.Checkpoint(contents_of(tree)).plan_optimizer(tx, PARAMS, step=3)
    checkpoint = ucp.Checkpoint(contents_of(tree | {state: ones}))
    with pytest.raises(TreeMismatch, match=f"kept {state} of b and 1 more: .* or check=False"):
        checkpoint.plan_optimizer(tx, PARAMS, step=3)
    meant = checkpoint.plan_optimizer(tx, PARAMS, step=3, check=False)
    assert [*meant.left] == [state]
    assert meant.report().startswith(plan.report())


def test_adam_without_correction_of_its_bias_is_refused():
    never = {"bias_correction": False}
    groups = [Group(one.params, one.settings | never) for one in trained_with()]
    [told] = faults(adamw(), groups)
    assert "bias_correction=False, tx True" in told
