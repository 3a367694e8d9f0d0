"""Megatron's checkpoints in the reference transformer: the logits of a float64 forward pass on the live masters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from megatron_cases import DATA, about
from models import transformer

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
RULES = [(r"(q|k|v|up|down|out)/kernel$|embedding$", P("data", "model"))]


def config_of(model):
    """The reference transformer's numbers for a model of Megatron-core."""
    every = model["moe_layer_freq"]
    moe = [i % every == 0 for i in range(model["num_layers"])] if isinstance(every, int) else map(bool, every)
    gated, rope = model["activation"] == "swiglu", model["position_embedding_type"] == "rope"
    return transformer.Config(
        vocab=model["vocab_size"],
        embed=model["hidden_size"],
        layers=model["num_layers"],
        heads=model["num_attention_heads"],
        kv_heads=model["num_query_groups"] or model["num_attention_heads"],
        head_dim=model["kv_channels"],
        mlp=model["ffn_hidden_size"],
        activation="silu" if gated else "gelu",
        norm="rms" if model["normalization"] == "RMSNorm" else "layer",
        eps=model["norm_epsilon"],
        parts=2 if gated else 1,
        positions=None if rope else model["max_position_embeddings"],
        rope_theta=model["rotary_base"] if rope else None,
        qkv_bias=model["add_bias_linear"],
        out_bias=model["add_bias_linear"],
        mlp_bias=model["add_bias_linear"],
        qk_norm=model["qk_layernorm"],
        tied=model["tied_embeddings"],
        moe_layers=tuple(i for i, yes in enumerate(moe) if yes) if model["num_experts"] else (),
        experts=model["num_experts"] or 0,
        moe_mlp=model["moe_ffn_hidden_size"] or 0,
        per_token=model["moe_router_topk"],
    )


def restored(case):
    """A model without parameters, and the parameters of a case on the mesh."""
    model = about(case)["model"]
    sizes, moved = {"vocab": model["vocab_size"]}, "buckets_fully_reshardable" in case  # its writer moved the masters
    mapped = ucp.open(DATA / case / "ckpt", sizes=sizes, weights_only=moved).map("megatron-gpt-to-reference")
    graph, params = nnx.split(nnx.eval_shape(lambda: transformer.Transformer(config_of(model), rngs=nnx.Rngs(0))))
    target = {"param": nnx.to_pure_dict(params)}
    return graph, mapped.restore(target, mesh=MESH, rules=RULES, partial=True)["param"]


def difference(case, graph, params):
    """The largest difference of the logits from the recorded ones, over their scale."""
    with np.load(DATA / case / "truth.npz") as truth:
        tokens, want = truth["tokens"], truth["logits_ref"]
    logits, _ = jax.jit(lambda p, t: nnx.merge(graph, p)(t))(params, jnp.asarray(tokens))
    return np.abs(np.asarray(logits).reshape(want.shape) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("case", sorted(path.name for path in DATA.iterdir()))
def test_the_logits_are_those_of_the_live_weights(case):
    assert difference(case, *restored(case)) < 1e-5


@pytest.mark.parametrize("wrong", ["heads", "experts"])
def test_exchanged_heads_and_experts_are_seen(wrong):
    graph, params = restored(case := "dist_ep2_moe_grouped_bf16")
    layer = params["layers"][0]
    if wrong == "heads":
        layer["attention"]["out"]["kernel"] = jnp.roll(layer["attention"]["out"]["kernel"], 1, axis=0)
    else:
        layer["mlp"]["down"]["kernel"] = jnp.roll(layer["mlp"]["down"]["kernel"], 1, axis=0)
    assert difference(case, graph, params) > 1e-3
