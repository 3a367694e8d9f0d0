"""Training runs of JAX that went on from a checkpoint of torch, in whatever is put around an
optimizer of optax.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

import jax_ucp as ucp
from helpers import MemoryStore, contents_of, mesh_of
from jax_ucp.layout.box import Box

Transformation = optax.GradientTransformation
MESH = mesh_of(4, 2)

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
    "partition": lambda core: optax.partition({"a": core, "b": optax.chain(optax.clip(1.0), core)},
        lambda tree: jax.tree.map(lambda leaf: "a" if len(leaf.shape) > 1 else "b", tree)),
    "inject_hyperparams": lambda core: optax.inject_hyperparams(
        lambda rate: optax.chain(core, optax.scale(rate))
    )(0.5),
    "an injected schedule": lambda core: optax.inject_hyperparams(
        lambda rate: optax.chain(core, optax.scale_by_learning_rate(rate))
    )(SCHEDULE),
    "MultiSteps": lambda core: optax.MultiSteps(core, 4).gradient_transformation(),
    "all at once": lambda core: optax.chain(optax.clip(1.0),
        optax.MultiSteps(halves(optax.chain(core), of_matrices), 2).gradient_transformation()),
}  # fmt: skip
CORES = {
    "adam": (ADAMW, ["exp_avg", "exp_avg_sq", "step"]),
    "sgd": (optax.sgd(SCHEDULE, 0.9, nesterov=True), ["momentum_buffer"]),
    "lion": (optax.lion(SCHEDULE), ["exp_avg", "step"]),
}


def saved(tree: Any, path: Path, stock: bool = False) -> ucp.Checkpoint:
    """The tree as a manager saves it, with our handler or with stock Orbax's, and opened."""
    handler = ocp.StandardCheckpointHandler() if stock else ucp.CheckpointHandler()
    args = ocp.args.StandardSave(tree) if stock else ucp.args.Save(tree)
    with ocp.CheckpointManager(path, item_handlers=handler) as manager:
        manager.save(7, args=args)
        manager.wait_until_finished()
    return ucp.open(path / "7" / "default")


def run_of(
    checkpoint: ucp.Checkpoint, tx: Transformation, mesh: Mesh | None = None, **said: Any
) -> dict[str, Any]:
    """What a training loop in JAX holds that went on from a checkpoint of torch: parameters,
    optax state and step.
    """
    params = checkpoint.abstract()["param"]
    plan = checkpoint.plan_optimizer(tx, params, check=False, **said)  # which no state shows
    restored = checkpoint.restore(mesh=mesh)["param"]
    return {"params": restored, "opt_state": plan.restore(mesh=mesh), "step": plan.step}


SHAPES = {"embed": (6, 4), "dense/kernel": (4, 3), "dense/bias": (3,), "norm/scale": ()}


def trained(core: str, dtype: Any = np.float32) -> ucp.Checkpoint:
    """What torch's optimizer keeps after five steps; every element is another number."""
    rng = np.random.default_rng(5)
    tree: dict[str, dict[str, np.ndarray]] = {
        state: {
            name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()
        }
        for state in ("param", *CORES[core][1])
    }
    if "step" in tree:
        dtype = np.int32 if core == "lion" else np.float32
        tree["step"] = dict.fromkeys(SHAPES, np.asarray(5, dtype))
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
    state = source.plan_optimizer(tx, params, step=5).restore()
    return {"params": params, "opt_state": state, "step": 5}


def changed(tree: dict[str, Any], label: str, change: Callable[[Any], Any]) -> ucp.Checkpoint:
    """A checkpoint of the tree in which one leaf is another, or is not there for None."""
    found = ucp.Checkpoint.of(tree)._contents
    (leaf,) = [leaf for leaf in found.leaves if leaf.label == label]
    leaves = [one for one in found.leaves if one.has_array]
    arrays = {x.name: np.array(found.arrays.read(x.name, Box.whole(x.shape))) for x in leaves}
    value = change(arrays[leaf.name])
    leaves = [one for one in found.leaves if one is not leaf]
    if value is not None:
        arrays[leaf.name] = np.asarray(value)
        array = arrays[leaf.name]
        leaves.append(replace(leaf, shape=array.shape, dtype=array.dtype.name))
    return ucp.Checkpoint(replace(found, leaves=leaves, arrays=MemoryStore(arrays)))
