"""A run of Megatron goes on in tunix or MaxText, with its optimizer: its next three losses.

    python examples/megatron_resume.py tunix              # needs what tunix_finetune.py needs
    python examples/megatron_resume.py maxtext            # needs what maxtext_resume.py needs
    python examples/megatron_resume.py maxtext --negative-control

Megatron-Core trained tiny models for three steps, saved, and went on for three more, whose tokens
and losses are kept beside the checkpoint (`tests/generators/megatron_core.py`). Here each
checkpoint is opened as its ranks wrote it, and mapped to Hugging Face's names and from there to the
framework's. The weights go into the framework's own model, Adam's moments and steps into its own
optax state, and the framework's own train step does the same three steps. The losses must be
Megatron's. `--negative-control` sets the moments to zero; the losses must then part, and it fails
if they do not. `--export FOLDER` writes what a run of Qwen3 or Qwen3-MoE in MaxText has become for
Megatron's `--load`, with which `tests/generators/megatron_runs.py` goes on.

MaxText keeps the scale of a Llama's or Mixtral's query in its weight, where Adam would take other
steps: `plan_optimizer` refuses what the mapping to it gives. Such a run goes on with the moments of
the mapping without its scales, and an optimizer that sees the query as it is without
(`before_scaling`).
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import equal_logits
import jax_ucp as ucp
import maxtext_logits

DATA = Path(__file__).parents[1] / "tests" / "data" / "megatron_next"
# Framework -> case -> its mapping to Hugging Face's names, and the one from there.
CASES = {
    "tunix": {
        "llama": ("megatron-llama-to-hf", "hf-llama-to-tunix"),
        "qwen3": ("megatron-qwen3-to-hf", "hf-qwen3-to-tunix"),
        "qwen3_moe": ("megatron-qwen3-moe-to-hf", "hf-qwen3-moe-to-tunix"),
    },
    "maxtext": {
        "llama": ("megatron-llama-to-hf", "hf-llama2-to-maxtext"),
        "qwen3": ("megatron-qwen3-to-hf", "hf-qwen3-to-maxtext"),
        "qwen3_moe": ("megatron-qwen3-moe-to-hf", "hf-qwen3-moe-to-maxtext"),
        "mixtral": ("megatron-mixtral-to-hf", "hf-mixtral-to-maxtext"),
        "deepseek3": ("megatron-deepseek3-to-hf", "hf-deepseek3-to-maxtext"),
    },
}
SCALED = {"llama", "mixtral"}  # whose query MaxText has scaled
TOLERANCE = 1e-5
RATE = 1e-2  # with which Megatron ran
BIAS_RATE = 1e-3  # by which it changed the biases of experts' scores at a step
BACK = {"qwen3", "qwen3_moe"}  # what `--export` writes

# The optax state of an optimizer for parameters that have the names of the mapped checkpoint.
StateOf = Callable[[optax.GradientTransformation, Any], Any]
# Takes what a run has become: its optimizer, the parameters and the optax state.
Keep = Callable[[optax.GradientTransformation, Any, Any], None]


def main(framework: str, negative_control: bool, folder: Path | None) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    train = {"tunix": in_tunix, "maxtext": in_maxtext}[framework]
    failed = 0
    for case, (first, second) in CASES[framework].items():
        with np.load(DATA / case / "truth.npz") as truth:
            tokens, want = truth["io/tokens"], truth["io/losses"]
        hf = ucp.open(DATA / case / "ckpt").map(first)
        mapped = hf.map(second)
        config = {**hf.config, "rope_parameters": hf.config["rope_scaling"]}
        moments = hf.map(without_scales(second)) if case in SCALED else mapped
        state_of = functools.partial(optax_state, moments, negative_control)
        go_on = train
        if folder and framework == "maxtext" and case in BACK:
            keep = functools.partial(export, case, folder / case)
            go_on = functools.partial(in_maxtext, keep=keep)
        losses = go_on(mapped, config, tokens, state_of)
        off = float(np.max(np.abs(losses - want) / want))
        print(f"{case}: {framework} {shown(losses)}, Megatron {shown(want)}, apart by {off:.1e}")
        wrong = off < 10 * TOLERANCE if negative_control else off > TOLERANCE
        failed += wrong
    right = "The runs part." if negative_control else "The runs agree."
    print(f"{failed} of {len(CASES[framework])} fail." if failed else right)
    return min(failed, 1)


def optax_state(
    mapped: ucp.Checkpoint, zeros: bool, tx: optax.GradientTransformation, params: Any
) -> Any:
    """The optax state of `tx` from a mapped checkpoint of Megatron; with `zeros`, for the negative
    control, its moments are zero.
    """
    state = mapped.plan_optimizer(tx, params).restore()
    if not zeros:
        return state
    return jax.tree.map(lambda x: jnp.zeros_like(x) if jnp.ndim(x) else x, state)


def export(
    case: str, folder: Path, tx: optax.GradientTransformation, params: Any, opt_state: Any
) -> None:
    """Write what a run in MaxText has become, as Megatron would have saved it."""
    first, second = CASES["maxtext"][case]
    source = ucp.open(DATA / case / "ckpt")
    run = ucp.Checkpoint.of({"params": params, "opt_state": opt_state})
    hf = run.torch_states(tx).map(
        ucp.Mapping.load(second).inverse(), config=source.map(first).config
    )
    back = hf.map(ucp.Mapping.load(first).inverse(), config=source.config)
    back.export(folder, "megatron", like=DATA / case / "ckpt")


def without_scales(name: str) -> ucp.Mapping:
    """The mapping of that name, but for its scales: the moments of all parameters follow."""
    content = ucp.Mapping.load(name).to_dict()
    for rule in content["leaves"]:
        rule.pop("scale", None)
    return ucp.Mapping.from_dict(content)


def before_scaling(tx: optax.GradientTransformation, scale: float) -> optax.GradientTransformation:
    """`tx` for parameters whose query has been multiplied by `scale`: it updates the query, of
    which its state is, as it was before.
    """

    def times(factor: float, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf * factor if "query" in jax.tree_util.keystr(path) else leaf,
            tree,
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = tx.update(times(scale, updates), state, times(1 / scale, params))
        return times(scale, updates), state

    return optax.GradientTransformation(tx.init, update)


def going_on(tx: optax.GradientTransformation, state: Any) -> optax.GradientTransformation:
    """A copy of `tx` whose `init` returns `state`: frameworks make their optimizers' states so."""
    return tx._replace(init=lambda _: state)


def shown(losses: Any) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


def in_tunix(
    mapped: ucp.Checkpoint, config: dict[str, Any], tokens: np.ndarray, state_of: StateOf
) -> np.ndarray:
    """The losses of tunix's PeftTrainer, which predicts the tokens of a row but its first."""
    from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]
    from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

    module, kind = (llama3, "Llama3") if config["model_type"] == "llama" else (qwen3, "Qwen3")
    sizes = equal_logits.model_config(module, config)
    model = nnx.eval_shape(lambda: getattr(module, kind)(sizes, rngs=nnx.Rngs(0)))
    graph, wanted = nnx.split(model)
    params = mapped.restore({"param": wanted}, partial=True)["param"]
    rows, length = tokens.shape[1:]
    positions = np.tile(np.arange(length), (rows, 1))
    causal = np.tile(np.tri(length, dtype=bool), (rows, 1, 1))

    def decays(tree: Any) -> Any:  # norms are not decayed by Megatron
        return jax.tree.map(lambda weight: weight.ndim > 1, tree)

    adamw = optax.adamw(RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decays)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    trainer = peft_trainer.PeftTrainer(
        nnx.merge(graph, params),
        going_on(tx, state_of(tx, params)),
        peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=len(tokens)),
    )
    trainer.with_gen_model_input_fn(
        lambda batch: {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": positions,
            "attention_mask": causal,
        }
    )
    trainer.train(peft_trainer.TrainingInput(batch, np.ones(batch.shape, bool)) for batch in tokens)
    return np.asarray(trainer.metrics_logger.get_metric_history("", "loss", "train"))


def in_maxtext(
    mapped: ucp.Checkpoint,
    config: dict[str, Any],
    tokens: np.ndarray,
    state_of: StateOf,
    keep: Keep | None = None,
) -> np.ndarray:
    """The losses of MaxText's `train_step` with MaxText's optimizer, whose defaults are Megatron's
    arguments but for the norms, which it decays unless told.
    """
    from maxtext.common.train_state_nnx import (  # pyright: ignore[reportMissingImports]
        TrainStateNNX,
    )
    from maxtext.layers.moe import MoEBiasVar  # pyright: ignore[reportMissingImports]
    from maxtext.models import models  # pyright: ignore[reportMissingImports]
    from maxtext.optimizers import optimizers  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]
    from maxtext.utils import maxtext_utils  # pyright: ignore[reportMissingImports]

    is_scaled = config["model_type"] in SCALED
    said = {**maxtext_logits.settings(config), "adamw_mask": ["scale"]}
    if is_scaled:
        said["gradient_clipping_threshold"] = 0.0
    if said.get("routed_bias"):
        said["routed_bias_update_rate"] = BIAS_RATE
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    settings = maxtext_logits.configured(said, inputs.shape[1:])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(settings), settings.mesh_axes)
    with jax.set_mesh(mesh):
        model = models.Transformer(settings, mesh, quant=None, rngs=nnx.Rngs(0))
        wanted = {"params": nnx.state(model, (nnx.Param, MoEBiasVar))}
        nnx.update(model, mapped.restore({"param": wanted}, partial=True)["param"]["params"])
        params = {"params": nnx.state(model, nnx.Param)}
        tx = optimizers.get_optimizer(settings, optax.constant_schedule(RATE), model)
        if is_scaled:
            tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
        state = jax.tree.map(
            lambda node: node["params"] if isinstance(node, dict) else node,
            state_of(tx, params),
            is_leaf=lambda node: isinstance(node, dict),
        )
        if is_scaled:
            tx = before_scaling(tx, config["head_dim"] ** -0.5)
        optimizer = nnx.Optimizer(model, going_on(tx, state), wrt=nnx.Param)
        graph, run = nnx.split(TrainStateNNX(model, optimizer))
        step = jax.jit(functools.partial(train.train_step, graph, settings, None, None))
        places = np.tile(np.arange(inputs.shape[-1]), (inputs.shape[1], 1))
        losses: list[float] = []
        for given, next_tokens in zip(inputs, targets, strict=True):
            batch = {"inputs": given, "targets": next_tokens}
            for name in tuple(batch):
                batch |= {f"{name}_position": places, f"{name}_segmentation": np.ones_like(places)}
            run, metrics = step(run, batch)
            losses.append(float(metrics["scalar"]["learning/loss"]))
        if keep:
            now = nnx.merge(graph, run)
            state = jax.tree.map(
                lambda node: {"params": node} if isinstance(node, nnx.State) else node,
                nnx.pure(now.optimizer.opt_state),
                is_leaf=lambda node: isinstance(node, nnx.State),
            )
            keep(tx, {"params": nnx.state(now.model, nnx.Param)}, state)
    return np.asarray(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("framework", choices=CASES)
    parser.add_argument("--negative-control", action="store_true")
    parser.add_argument("--export", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    sys.exit(main(given.framework, given.negative_control, given.export))
