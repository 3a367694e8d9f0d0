"""Elastic training: the same run, whatever mesh it continues on.

A small transformer learns the characters of `data/lighthouse_log.txt`. The run starts on 8 devices,
a mesh of (data 4, model 2), and is killed three times with SIGKILL, each time just after a save has
begun. It continues on (2, 2), then on (8, 1), then on 2 devices, every time from the newest save
that was finished, and does again what was lost. The same training is also done without any
interruption, once on each of these four meshes.

A mesh decides the order in which numbers are added, so even uninterrupted runs differ in the last
bits, and training makes the difference grow. How far they part is measured here: the largest
difference between any two of them at any step is the spread. At every step the interrupted run has
to be within one spread of an uninterrupted one.

`--negative-control` sets AdamW's moments to zero after every restore. The check must then fail, and
does, with some hundred thousand spreads. By eye one would have let it pass: its loss falls faster.

    python examples/elastic_training.py
    python examples/elastic_training.py --negative-control

The devices are virtual ones of the CPU. Every run is a process of its own (this file with
`--worker`): a process has one number of devices for life, and SIGKILL leaves it no time to tidy up.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import jax_ucp as ucp

TEXT = Path(__file__).parent / "data" / "lighthouse_log.txt"
SEED = 0
HIDDEN, HEADS, LAYERS, SEQUENCE, BATCH = 64, 4, 2, 64, 16

MeshShape = tuple[int, int]  # devices along "data", devices along "model"


# The model. Each kernel says which of its dimensions lies on the mesh axis "model"; AdamW's moments
# take that over.


def linear(
    inputs: int, outputs: int, spec: tuple[str | None, str | None], rngs: nnx.Rngs
) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), spec)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q, self.k, self.v = (linear(HIDDEN, HIDDEN, (None, "model"), rngs) for _ in range(3))
        self.out = linear(HIDDEN, HIDDEN, ("model", None), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:-1], HEADS, HIDDEN // HEADS)
        q, k, v = (project(x).reshape(heads) for project in (self.q, self.k, self.v))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = (
            nnx.RMSNorm(HIDDEN, rngs=rngs),
            nnx.RMSNorm(HIDDEN, rngs=rngs),
        )
        self.attention = Attention(rngs)
        self.up = linear(HIDDEN, 4 * HIDDEN, (None, "model"), rngs)
        self.down = linear(4 * HIDDEN, HIDDEN, ("model", None), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    def __init__(self, vocab: int, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), (None, "model"))
        self.tokens = nnx.Embed(vocab, HIDDEN, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(SEQUENCE, HIDDEN, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


# A worker: one process, one mesh. It continues from the newest save it finds and prints "step loss"
# for every step.


def batch_of(step: int, text: np.ndarray) -> np.ndarray:
    """Token rows of shape (BATCH, SEQUENCE + 1): a function of the step alone, whoever computes
    it and when.
    """
    starts = np.random.default_rng((SEED, step)).integers(0, len(text) - SEQUENCE, BATCH)
    return np.stack([text[start : start + SEQUENCE + 1] for start in starts])


def without_moments(opt_state: Any) -> Any:
    mu, nu = (
        jax.tree.map(jnp.zeros_like, optax.tree_utils.tree_get(opt_state, name))
        for name in ("mu", "nu")
    )
    return optax.tree_utils.tree_set(opt_state, mu=mu, nu=nu)


def train(mesh_shape: MeshShape, steps: int, directory: Path, zero_moments: bool) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh = jax.make_mesh(mesh_shape, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    jax.set_mesh(mesh)  # Flax wants a mesh in sight where a module names an axis
    characters, text = np.unique(np.frombuffer(TEXT.read_bytes(), np.uint8), return_inverse=True)
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(0, 3e-3, warmup_steps=30, decay_steps=200)
    )
    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(len(characters), nnx.Rngs(SEED))))

    def fresh_state() -> dict[str, Any]:
        params = nnx.state(Transformer(len(characters), nnx.Rngs(SEED)), nnx.Param)
        return {
            "params": params,
            "opt_state": optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
        }

    def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def loss_of(params: nnx.State) -> jax.Array:
            logits = nnx.merge(graph, params)(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    abstract_state = jax.eval_shape(fresh_state)
    shardings = nnx.get_named_sharding(abstract_state, mesh)
    # What a kill cut short of a save, Orbax removes when the next process begins.
    policies: dict[str, Any] = {
        "save_decision_policy": v1.training.save_decision_policies.FixedIntervalPolicy(steps // 8),
        "preservation_policy": v1.training.preservation_policies.LatestN(2),
        "cleanup_tmp_directories": True,
    }
    with v1.training.Checkpointer(
        str(directory), context=ucp.orbax_context(), **policies
    ) as checkpointer:
        if checkpointer.latest is None:
            state = jax.jit(fresh_state, out_shardings=shardings)()
        else:
            target = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                abstract_state,
                shardings,
            )
            state = checkpointer.load(checkpointer.latest, target)
            if zero_moments:
                state["opt_state"] = without_moments(state["opt_state"])

        # We ask for the state to leave a step sharded as it came in. Left to itself, XLA forgets
        # axes of size 1, and a save made on (8, 1) would no longer know what lies on "model".
        shardings = jax.tree.map(lambda x: x.sharding, state)
        step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
        for step in range(int(state["step"]) + 1, steps + 1):
            batch = jax.device_put(batch_of(step, text), NamedSharding(mesh, PartitionSpec("data")))
            state, loss = step_fn(state, batch)
            print(step, float(loss), flush=True)
            checkpointer.save_async(step, state)  # if the policy says so


# The orchestrator: starts the workers, kills them, and compares what they printed.


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of training on one mesh; `kill_at` is the step whose loss is the worker's death
    sentence.
    """

    mesh: MeshShape
    kill_at: int | None = None


def interrupted_runs(steps: int) -> list[Run]:
    """Four runs that share `steps`. The first three die one step after every second save was begun,
    so that this save may be unfinished, while the one before it is finished: Orbax writes one save
    at a time.
    """
    first, second, third = (quarter * steps // 4 + 1 for quarter in (1, 2, 3))
    return [Run((4, 2), first), Run((2, 2), second), Run((8, 1), third), Run((2, 1))]


def losses_of(run: Run, directory: Path, options: Sequence[str]) -> dict[int, float]:
    """The loss of every step a worker reports until it ends, by itself or by our hand."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={run.mesh[0] * run.mesh[1]}",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", str(directory.parent / "compiled")
        ),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [
        sys.executable,
        __file__,
        "--worker",
        *map(str, run.mesh),
        "--directory",
        str(directory),
        *options,
    ]
    losses = {}
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    ) as worker:
        for line in worker.stdout or ():
            step, loss = line.split()
            losses[int(step)] = float(loss)
            if int(step) == run.kill_at:
                worker.kill()
    if worker.returncode != (0 if run.kill_at is None else -signal.SIGKILL):
        raise RuntimeError(
            f"the worker on mesh {run.mesh} ended by itself with exit code {worker.returncode}"
        )
    status = "finished" if run.kill_at is None else "killed"
    print(f"  mesh {run.mesh}: steps {min(losses)} to {max(losses)}, {status}", flush=True)
    return losses


def verdict(
    interrupted: Mapping[int, tuple[MeshShape, float]],
    uninterrupted: Mapping[MeshShape, Mapping[int, float]],
) -> bool:
    """Print both curves side by side; whether they part by no more than uninterrupted runs do
    among themselves.
    """
    reference = uninterrupted[4, 2]
    print(
        f"\n{'step':>4}  {'mesh':>6}  {'interrupted':>11}  {'uninterrupted':>13} "
        f" {'difference':>10}"
    )
    for step, (mesh, loss) in sorted(interrupted.items()):
        difference = loss - reference[step]
        print(f"{step:4}  {mesh}  {loss:11.6f}  {reference[step]:13.6f}  {difference:10.1e}")

    spread = max(np.ptp([losses[step] for losses in uninterrupted.values()]) for step in reference)
    parted = {
        step: min(abs(loss - losses[step]) for losses in uninterrupted.values())
        for step, (_, loss) in interrupted.items()
    }
    largest = max(parted.values())
    same = bool(largest <= spread)
    print(f"\nspread of the uninterrupted runs:                      {spread:.2e}")
    print(f"largest distance of the interrupted run from them all: {largest:.2e}")
    print(
        "The runs agree." if same else "The runs part: the state was not restored as it was saved."
    )
    return same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=96, help="a multiple of 8; a save after every eighth of them"
    )
    parser.add_argument(
        "--negative-control", action="store_true", help="zero the moments after every restore"
    )
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps % 8:
        parser.error("--steps must be a multiple of 8")
    if given.worker:
        data, model = given.worker
        train((data, model), given.steps, given.directory, given.negative_control)
        return 0

    runs = interrupted_runs(given.steps)
    options = [
        "--steps",
        str(given.steps),
        *(["--negative-control"] if given.negative_control else []),
    ]
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        print("interrupted:")
        interrupted = {}
        for run in runs:
            losses = losses_of(run, temporary / "interrupted", options)
            if interrupted and min(losses) == 1:
                raise RuntimeError(
                    f"the worker on mesh {run.mesh} began anew instead of continuing"
                )
            interrupted |= {step: (run.mesh, loss) for step, loss in losses.items()}
        print("uninterrupted:")
        uninterrupted = {
            run.mesh: losses_of(Run(run.mesh), temporary / f"run{i}", options)
            for i, run in enumerate(runs)
        }
    return 0 if verdict(interrupted, uninterrupted) else 1


if __name__ == "__main__":
    sys.exit(main())
