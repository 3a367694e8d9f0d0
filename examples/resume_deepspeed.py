"""Training that DeepSpeed began goes on in JAX: its checkpoint, mapped to a Flax model and an optax
state, sharded.

    python examples/resume_deepspeed.py [CASE [module-order]]

The checkpoint is opened from the files of its ranks and mapped to the reference transformer of
`models/`. Parameters, moments, step and schedule are restored onto eight devices, and the next
steps are taken on the batches that the live run saw. Their losses are printed beside those of torch
going on from the same state in fp32, and of the live run.

ZeRO-0 in fp32 stores no names of the parameters that moments belong to. That its optimizer groups
are in the order of the module is what the second argument says, for z0_fp32_dp2 and
moe_ep2_dp2_z0_fp32.
"""

from __future__ import annotations

import functools
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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from models.transformer import Config, Transformer, next_token_loss

DATA = Path(__file__).parent.parent / "tests" / "data" / "deepspeed"
MAPPING = "deepspeed-gpt-to-reference"
TOLERANCE = 1e-5
# What a leaf's name ends with -> how it lies on the mesh; all others are on every device whole.
SHARDINGS = [(f"attention/{name}/kernel", P("data", "model")) for name in ("q", "k", "v")]
SHARDINGS += [("attention/out/kernel", P("model")), ("mlp/down/kernel", P("model"))]

Tree = Any


@dataclass(frozen=True)
class Run:
    """A training run at the end of a step: what goes into the next one. `balance` weighs the
    experts' balance loss.
    """

    graph: Any
    tx: optax.GradientTransformation
    params: Tree
    opt_state: Tree
    balance: float = 0.0


def main(case: str, groups: str | None = None) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    about = json.loads((DATA / case / "case.json").read_text())

    checkpoint = ucp.open(DATA / case, optimizer_groups=groups)
    mapped = checkpoint.map(MAPPING, sizes=rows_of(about["model"]))
    run, report = resumed(mapped, about, mesh)
    print(f"{case}: {len(mapped.params)} parameters of the model; of its optimizer's state")
    print("\n".join(f"    {line}" for line in report.splitlines() if "embed/embedding" in line))
    with np.load(DATA / case / "truth.npz") as truth:
        losses = next_losses(run, batches_of(truth["io/tokens_after"], about))
    torch, live = (about["dense_continuation"][key] for key in ("losses_fp32", "live_losses"))
    for loss, dense, seen in zip(losses, torch, live, strict=True):
        print(f"loss {loss:.6f}; of torch in fp32 {dense:.6f}; of the live run {seen:.6f}")
    worst = max(abs(loss / dense - 1) for loss, dense in zip(losses, torch, strict=True))
    print(f"at most {worst:.1e} from torch in fp32")
    return int(worst > TOLERANCE)


def resumed(mapped: ucp.Checkpoint, about: Mapping[str, Any], mesh: Mesh) -> tuple[Run, str]:
    """The run as the mapped checkpoint left it, in fp32 on the mesh, and where each leaf of its
    optimizer is from.
    """
    config = config_of(about["model"])
    graph, variables = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    target = sharded(nnx.to_pure_dict(variables), mesh)
    params = mapped.restore({"param": target}, partial=True, cast=True)["param"]
    step, schedule = schedule_of(mapped)
    tx = optimizer_of(about, schedule, trained_in(mapped))
    plan = mapped.plan_optimizer(tx, target, step=step)
    balance = 0.01 if about["model"]["kind"] == "gpt" else 0.0
    return Run(graph, tx, params, plan.restore(cast=True), balance), plan.report()


def schedule_of(checkpoint: ucp.Checkpoint) -> tuple[int | None, optax.Schedule]:
    """DeepSpeed's linear WarmupLR as a schedule of optax, and the steps done where no state says
    them.

    DeepSpeed 0.19 (`runtime/lr_schedules.py`): the rate of an update is that of the iterations
    before it, from `last_batch_iteration`, which leaves out updates that were skipped before it
    first moved, as the step does.
    """
    files = [
        item
        for item in checkpoint.extras.values()
        if isinstance(item, dict) and item.get("lr_scheduler")
    ]
    said, iteration = (
        files[0]["ds_config"]["scheduler"],
        files[0]["lr_scheduler"]["last_batch_iteration"],
    )
    assert said["type"] == "WarmupLR"
    params = said["params"]
    assert params["warmup_type"] == "linear"
    steps = [name for name in checkpoint.params if "step" in checkpoint.params[name].states]
    done = int(checkpoint.params[steps[0]].read("step")) if steps else None
    ahead = iteration - (iteration + 1 if done is None else done)
    warmup = optax.linear_schedule(
        params["warmup_min_lr"], params["warmup_max_lr"], params["warmup_num_steps"]
    )
    return (iteration + 1 if done is None else None), lambda count: warmup(count + ahead)


def config_of(model: Mapping[str, Any]) -> Config:
    """The reference transformer's numbers for a model of the cases."""
    gated, gpt = model["activation"] == "swiglu", model["kind"] == "gpt"
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
    """How heads lie in the rows of query_key_value: q, k, v of each head, or all queries first."""
    if model["qkv"] == "interleaved":
        return {"group": model["heads"]}
    return {"group": 1, "q": model["heads"], "k": model["kv_heads"], "v": model["kv_heads"]}


def trained_in(checkpoint: ucp.Checkpoint) -> set[str]:
    """The parameters that have a moment; the others are frozen."""
    moments = {"exp_avg", "momentum_buffer"}
    return {name for name, param in checkpoint.params.items() if moments & set(param.states)}


def optimizer_of(
    about: Mapping[str, Any], rate: optax.Schedule, trained: set[str]
) -> optax.GradientTransformation:
    """What the run did with gradients: clip them, decay matrices, leave what is frozen."""
    said = about["optimizer"]
    b1, b2 = said.get("betas", (0, 0))
    match said["type"]:
        case "AdamW":
            core = optax.adamw(
                rate, b1, b2, said["eps"], weight_decay=said["weight_decay"], mask=decayed
            )
        case "Lion":
            core = optax.lion(rate, b1, b2, weight_decay=said["weight_decay"], mask=decayed)
        case _:
            decay = optax.add_decayed_weights(said["weight_decay"], decayed)
            core = optax.chain(decay, optax.sgd(rate, said["momentum"]))
    clipped = optax.chain(optax.clip_by_global_norm(about["gradient_clipping"] or np.inf), core)

    def labels(params: Tree) -> Tree:
        return jax.tree.map_with_path(
            lambda path, _: "trained" if name_of(path) in trained else "frozen", params
        )

    return optax.partition({"trained": clipped, "frozen": optax.set_to_zero()}, labels)


def decayed(params: Tree) -> Tree:
    """Which parameters have weight decay: those with more than one axis in torch."""
    return jax.tree.map_with_path(
        lambda path, _: name_of(path).endswith(("kernel", "embedding")), params
    )


def sharded(params: Tree, mesh: Mesh) -> Tree:
    """The abstract parameters with a sharding each."""

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = next((spec for end, spec in SHARDINGS if name_of(path).endswith(end)), P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map_with_path(place, params)


def name_of(path: tuple[Any, ...]) -> str:
    return "/".join(str(key.key) for key in path)


def batches_of(tokens: np.ndarray, about: Mapping[str, Any]) -> np.ndarray:
    """`tokens` [step, row, length] as [step, micro batch, row, length]."""
    return tokens.reshape(len(tokens), -1, about["micro_batch"], tokens.shape[-1])


def next_losses(run: Run, batches: np.ndarray) -> list[float]:
    """The loss of each further step: the mean over micro batches, of the parameters before the
    update.
    """
    state, losses = (run.params, run.opt_state), []
    shardings = jax.tree.map(lambda x: x.sharding, state)
    for batch in batches:
        *state, loss = train_step(run.graph, run.tx, run.balance, *state, jnp.asarray(batch))
        # XLA chose how these lie: with other shardings than before, the next step is compiled anew
        state = jax.device_put(tuple(state), shardings)
        losses.append(float(loss))
    return losses


@functools.partial(jax.jit, static_argnames=("graph", "tx", "balance"))
def train_step(
    graph: Any,
    tx: optax.GradientTransformation,
    balance: float,
    params: Tree,
    opt_state: Tree,
    batch: jax.Array,
) -> tuple[Tree, Tree, jax.Array]:
    def loss_of(params: Tree) -> jax.Array:
        return jax.vmap(lambda rows: next_token_loss(nnx.merge(graph, params), rows, balance))(
            batch
        ).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["z1_fp32_dp4"])))
