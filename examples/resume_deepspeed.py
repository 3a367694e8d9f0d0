"""Training that DeepSpeed began goes on in JAX: its checkpoint, mapped to a Flax model and its optax state, sharded.

    python examples/resume_deepspeed.py [CASE]

The checkpoint is opened from the ranks' files, mapped to the reference transformer of `models/`, and restored with
AdamW's moments, step and schedule onto eight devices. The next steps are taken on the batches that the live run saw,
and their losses are printed beside those of torch going on from the same state in fp32, and of the live run itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from jax_ucp.optimizers import OptimizerPlan
from models.transformer import Config, Transformer, next_token_loss

DATA = Path(__file__).parent.parent / "tests" / "data" / "deepspeed"
SHARDINGS = [(f"{name}/kernel", P("data", "model")) for name in ("q", "k", "v")]
SHARDINGS += [("mlp/up/kernel", P("data", None, "model")), ("out/kernel", P("model")), ("mlp/down/kernel", P("model"))]

Tree = Any


def main(case: str) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    run = restored(case, Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")))
    print(f"{case}: training goes on after {run.plan.step} steps of torch's {run.about['optimizer']['type']}")
    print("\n".join(run.plan.report().splitlines()[:4]), "\n...")
    losses = go_on(run)
    torch, live = (run.about["dense_continuation"][name] for name in ("losses_fp32", "live_losses"))
    for loss, dense, seen in zip(losses, torch, live, strict=True):
        print(f"loss {loss:.6f}; torch in fp32 {dense:.6f}; the live run {seen:.6f}")
    worst = max(abs(loss / dense - 1) for loss, dense in zip(losses, torch, strict=True))
    print(f"at most {worst:.1e} from torch in fp32")
    return int(worst > 1e-5)


@dataclass(frozen=True)
class Run:
    """A training run as it was when the checkpoint was written, and the batches that the live run saw next."""

    about: Mapping[str, Any]
    graph: Any
    tx: optax.GradientTransformation
    plan: OptimizerPlan
    params: Tree
    opt_state: Tree
    batches: np.ndarray


def restored(case: str, mesh: Mesh) -> Run:
    """Parameters and optimizer of a case, in the reference transformer's names and on the mesh."""
    about = json.loads((DATA / case / "case.json").read_text())
    mapped = ucp.open(DATA / case).map("deepspeed-gpt-to-reference", sizes=rows_of(about["model"]))
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(config_of(about["model"]), rngs=nnx.Rngs(0))))
    params = sharded(nnx.to_pure_dict(params), mesh)
    tx = optimizer_of(about)
    plan = mapped.plan_optimizer(tx, params)
    with np.load(DATA / case / "truth.npz") as truth:
        batches = micro_batches(truth["tokens_after"], about)
    restored = mapped.restore({"param": params}, partial=True)["param"]
    return Run(about, graph, tx, plan, restored, plan.restore(mesh=mesh), batches)


def config_of(model: Mapping[str, Any]) -> Config:
    """The reference transformer's numbers for a model of the cases."""
    gated = model["activation"] == "swiglu"
    gpt = model["kind"] == "gpt"
    return Config(
        vocab=model["vocab"],
        embed=model["hidden"],
        layers=model["layers"],
        heads=model["heads"],
        kv_heads=model["kv_heads"],
        head_dim=model["hidden"] // model["heads"],
        mlp=model["ffn"],
        activation="silu" if gated else "gelu_tanh",
        norm="layer",
        parts=2 if gated else 1,
        positions=model["seq"] if gpt else None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=gpt,
        tied=model["tied"],
        head_bias=model["head_bias"],
        final_gain=gpt,
        moe_layers=tuple(model["moe_layers"]),
        experts=model["experts"],
        moe_mlp=model["ffn"],
        per_token=1 if gpt else 2,
        renormalized=not gpt,
        expert_bias=gpt,
    )


def rows_of(model: Mapping[str, Any]) -> dict[str, int]:
    """How heads lie in the rows of query_key_value: head by head, or all queries first."""
    if model["qkv"] == "interleaved":
        return {"group": model["heads"]}
    return {"group": 1, "q": model["heads"], "k": model["kv_heads"], "v": model["kv_heads"]}


def optimizer_of(about: Mapping[str, Any]) -> optax.GradientTransformation:
    """The optax optimizer that does as the run's: its clipping, weight decay of matrices alone, and WarmupLR."""
    said, done = about["optimizer"], (about["counters"]["optimizer_steps"] or [about["steps_before"]])[0]
    first, *_, last = (rates[0] for rates in about["rates_after"])
    schedule = optax.linear_schedule(first, last, about["steps_after"] - 1, transition_begin=done)
    match said["type"]:
        case "AdamW":
            b1, b2 = said["betas"]
            core = optax.adamw(schedule, b1, b2, said["eps"], weight_decay=said["weight_decay"], mask=decayed)
        case "Lion":
            core = optax.lion(schedule, *said["betas"], weight_decay=said["weight_decay"], mask=decayed)
        case "SGD":
            decay = optax.add_decayed_weights(said["weight_decay"], decayed)
            core = optax.chain(decay, optax.sgd(schedule, said["momentum"]))
        case other:
            raise ValueError(f"no optax optimizer is known here for {other}")
    return optax.chain(optax.clip_by_global_norm(about["gradient_clipping"] or np.inf), core)


def decayed(params: Tree) -> Tree:
    """The parameters with weight decay: those that are matrices in torch, where biases have one axis."""
    names = ("kernel", "embedding")
    return jax.tree.map_with_path(lambda path, _: path[-1].key in names, params)


def sharded(params: Tree, mesh: Mesh) -> Tree:
    """The abstract parameters with a sharding each: rows of big matrices over `data`, heads and hidden over `model`."""

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = "/".join(str(key.key) for key in path)
        spec = next((spec for rule, spec in SHARDINGS if name.endswith(rule)), P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map_with_path(place, params)


def micro_batches(tokens: np.ndarray, about: Mapping[str, Any]) -> np.ndarray:
    """`tokens` [step, row, length] as [step, micro batch, row, length]: a loss is the mean over micro batches."""
    return tokens.reshape(len(tokens), -1, about["micro_batch"], tokens.shape[-1])


def go_on(run: Run) -> list[float]:
    """The losses of the next steps, one for each of the batches."""
    balance = run.about["model"].get("balance", 0.0)

    @jax.jit
    def loss_of(params: Tree, batch: jax.Array) -> jax.Array:
        model = nnx.merge(run.graph, params)
        return jax.vmap(lambda tokens: next_token_loss(model, tokens, balance))(batch).mean()

    @jax.jit
    def step(params: Tree, opt_state: Tree, batch: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = run.tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state, losses = run.params, run.opt_state, []
    for batch in run.batches:
        params, opt_state, loss = step(params, opt_state, jnp.asarray(batch))
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "z1_fp32_dp4"))
