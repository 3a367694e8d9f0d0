"""What other trainers wrote is the same model in JAX: the same logits, and the same losses when
training goes on.

The model is the reference transformer of `examples/models`; training goes on as
`examples/resume_deepspeed.py` does it.
"""

import dataclasses
import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ucp as ucp
import resume_deepspeed as resume
from cases import CORRUPTED, DATA, Case, names_of
from helpers import mesh_of
from models.transformer import Config, Transformer

pytestmark = pytest.mark.usefixtures("unoptimized")
MESH = mesh_of(4, 2)
# A case of each optimizer and model: that states are those of the run, however they are partitioned,
# is a law of every case.
DEEPSPEED = [
    "z1_bf16_dp2", "z1_fp16_dp2", "z1_fp32_dp2_lion", "z1_fp32_dp2_sgd", "z3_bf16_dp2_frozen_tied",
    "moe_ep2_dp2_z0_fp32", "autoep2_dp4_z3_fp32",
    "tp2_dp1_z1_fp32_gqa", "tp2_dp2_z1_bf16_swiglu", "pp2_dp2_z1_fp32",
]  # fmt: skip


def megatron_config(model):
    gated, rotary, bias = (
        model["activation"] == "swiglu",
        model["position_embedding_type"] == "rope",
        "add_bias_linear",
    )
    every = model["moe_layer_freq"]
    listed = isinstance(every, list)
    chosen = every if listed else [i % every == 0 for i in range(model["num_layers"])]
    return Config(
        vocab=model["vocab_size"],
        embed=model["hidden_size"],
        layers=model["num_layers"],
        heads=model["num_attention_heads"],
        kv_heads=model["num_query_groups"],
        head_dim=model["kv_channels"],
        mlp=model["ffn_hidden_size"],
        activation="silu" if gated else "gelu",
        norm="layer" if model["normalization"] == "LayerNorm" else "rms",
        eps=model["norm_epsilon"],
        parts=2 if gated else 1,
        positions=None if rotary else model["max_position_embeddings"],
        rope_theta=model["rotary_base"] if rotary else None,
        qkv_bias=model[bias],
        out_bias=model[bias],
        mlp_bias=model[bias],
        qk_norm=model["qk_layernorm"],
        tied=model["tied_embeddings"],
        moe_layers=tuple(np.flatnonzero(chosen).tolist()) if model["num_experts"] else (),
        experts=model["num_experts"] or 0,
        moe_mlp=model["moe_ffn_hidden_size"] or 0,
        per_token=model["moe_router_topk"],
    )


# Of those that a generator of tests/generators wrote no logits are kept.
NAMES = names_of("megatron")
WITH_LOGITS = [c for c in NAMES if "activation" in Case(f"megatron/{c}").about["model"]]


@pytest.mark.parametrize("case", WITH_LOGITS)
def test_a_megatron_checkpoint_gives_the_logits_of_its_weights_and_other_heads_do_not(case):
    live = Case(f"megatron/{case}")
    about = live.about["model"]
    # its optimizer is refused; it is fp32, so that its weights are the masters
    checkpoint = live.open(weights_only=case == CORRUPTED)
    model = nnx.eval_shape(lambda: Transformer(megatron_config(about), rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    target = {"param": resume.sharded(nnx.to_pure_dict(state), MESH)}
    mapped = checkpoint.map("megatron-gpt-to-reference")
    params = mapped.restore(target, partial=True, cast=True)["param"]
    measured = live.measured()
    tokens, want = jnp.asarray(measured["tokens"]), measured["logits_ref"]
    logits = jax.jit(lambda params: nnx.merge(graph, params)(tokens)[0])
    assert np.abs(logits(params) - want).max() <= 1e-5 * np.abs(want).max()
    out = params["layers"][0]["attention"]["out"]
    out["kernel"] = jnp.roll(out["kernel"], 1, axis=0)
    assert np.abs(logits(params) - want).max() > 1e-3 * np.abs(want).max()


def mapping_of(about):
    """The shipped mapping, with the names that pipelines and transformers' models have."""
    if about["model"]["kind"] == "hf":
        return ucp.Mapping.load(DATA / "mappings" / "hf-style-to-reference.yaml")
    rules = ucp.Mapping.load(resume.MAPPING)
    if about["parallel"]["pp"] == 1:
        return rules
    last, tied = about["model"]["layers"] + 1, about["model"]["tied"]
    names = {"layers.{layer}.": "{layer+1}.", "final_layernorm.": f"{last}."}
    names['"head.'] = f'"{last + 1}.'
    text = json.dumps(rules.to_dict())
    for old, new in (names | {'"embed.': '"tied_modules.embed.' if tied else '"0.'}).items():
        text = text.replace(old, new)
    return ucp.Mapping.from_dict(json.loads(text))


@cache
def restored(case):
    live = Case(f"deepspeed/{case}")
    about, measured = live.about, live.measured()
    mapped = live.open().map(mapping_of(about), sizes=resume.rows_of(about["model"]))
    run, _ = resume.resumed(mapped, about, MESH)
    batches = resume.batches_of(measured["tokens_after"], about)
    return run, batches, about, measured["losses_after"]


def gap(case, change=lambda run: run):
    """How far the next losses are from torch's from the same state, of their size; the losses."""
    run, batches, about, live = restored(case)
    losses = np.array(resume.next_losses(change(run), batches))
    return np.abs(losses / about["dense_continuation"].get("losses_fp32", live) - 1).max(), losses


@pytest.mark.parametrize("case", DEEPSPEED)
def test_training_that_deepspeed_began_goes_on_with_the_losses_that_torch_gives(case):
    difference, losses = gap(case)
    assert difference <= 1e-5
    _, _, about, live = restored(case)
    recorded = about["dense_continuation"].get("max_gap", 0)
    assert np.abs(losses - live).max() <= recorded + 1e-5 * live.max()


@pytest.mark.parametrize("case", DEEPSPEED)
def test_the_schedule_that_the_checkpoint_says_is_that_of_the_live_run(case):
    live = Case(f"deepspeed/{case}")
    about = live.about
    _, rate = resume.schedule_of(ucp.open(live.path))
    done = (about["counters"]["optimizer_steps"] or [about["steps_before"]])[0]
    rates = [float(rate(done + i)) for i in range(about["steps_after"])]
    np.testing.assert_allclose(rates, [live[0] for live in about["rates_after"]], rtol=1e-6)


def changed(tree, end, change):
    """The tree with one thing done to each leaf whose name ends so."""

    def ends(path):
        return jax.tree_util.keystr(path, simple=True, separator="/").endswith(end)

    return jax.tree.map_with_path(lambda path, x: change(x) if ends(path) else x, tree)


def without(moment):
    def change(run):
        opt_state = jax.tree.map_with_path(
            lambda path, x: jnp.zeros_like(x) if f".{moment}[" in jax.tree_util.keystr(path) else x,
            run.opt_state,
        )
        return dataclasses.replace(run, opt_state=opt_state)

    return change


def one_step_off(run):
    state = changed(run.opt_state, "count", lambda count: count + 1)
    return dataclasses.replace(run, opt_state=state)


def q_and_k_swapped(run):
    params = jax.tree.map(lambda x: x, run.params)
    attention = params["layers"][0]["attention"]
    attention["q"], attention["k"] = attention["k"], attention["q"]
    return dataclasses.replace(run, params=params)


def experts_exchanged(run):
    params = changed(run.params, "layers/1/mlp/up/kernel", lambda x: x[::-1])
    return dataclasses.replace(run, params=params)


@pytest.mark.parametrize(
    "change", [without("mu"), without("nu"), one_step_off, q_and_k_swapped, experts_exchanged]
)
def test_a_state_that_is_not_the_right_one_gives_other_losses(change):
    assert gap("moe_ep2_dp2_z0_fp32", change)[0] > 1e-5
