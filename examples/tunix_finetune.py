"""A Hugging Face model is fine-tuned by tunix on two meshes, and goes back to transformers.

    pip install --no-deps google-tunix==0.1.7             # beside jax_ucp
    pip install flax optax qwix jaxtyping omegaconf tenacity tqdm grain jinja2 sentencepiece \
        google-metrax pillow pandas safetensors transformers torch
    python examples/tunix_finetune.py
    python examples/tunix_finetune.py --negative-control

transformers writes a tiny Qwen3. It is opened, mapped to tunix's model, and restored onto a mesh of
(fsdp 4, tp 2), where tunix's PeftTrainer trains it for four steps and saves, with the manager that
it builds itself: `ucp.orbax_everywhere()` around it is the only change. From there it goes on to
step 8, once on the same mesh, where its losses must be those of a run that was never interrupted,
bit for bit; and once on (fsdp 2, tp 2), where numbers are added in another order: it must not be
further from the uninterrupted run on that mesh than uninterrupted runs on the two meshes are from
each other. The weights of the last step are exported as safetensors, and transformers' logits must
be tunix's. `--negative-control` sets AdamW's moments to zero before the run goes on, and the runs
must then part.

The devices are virtual ones of the CPU, and every stretch of training is a process of its own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_ucp as ucp

Shape = tuple[int, int]  # devices along "fsdp", along "tp"
SAVED, OTHER = (4, 2), (2, 2)
STOP, STEPS = 4, 8
BATCH, LENGTH, VOCABULARY = 8, 16, 64
MAPPING = "hf-qwen3-to-tunix"
TOLERANCE = 1e-5


def write_model(folder: Path) -> None:
    """A tiny Qwen3 with random weights; tunix rotates by a theta of a million."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # pyright: ignore[reportMissingImports]

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3ForCausalLM  # pyright: ignore[reportMissingImports]

    with torch.no_grad():
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def batch_of(step: int) -> np.ndarray:
    rng = np.random.default_rng(step)
    starts = rng.integers(0, VOCABULARY, (BATCH, 1))
    return ((starts + np.arange(LENGTH) * 3) % VOCABULARY).astype(np.int32)


def causal(tokens: Any) -> dict[str, Any]:
    """What a model of tunix is called with, beside its tokens."""
    batch, length = tokens.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    return {
        "positions": jnp.broadcast_to(jnp.arange(length), (batch, length)),
        "attention_mask": jnp.broadcast_to(mask, (batch, length, length)),
    }


def logits_of(model: Any, tokens: Any) -> jax.Array:
    return model(tokens, cache=None, **causal(tokens))[0]


def model_on(mesh: jax.sharding.Mesh, folder: Path) -> Any:
    """The checkpoint of Hugging Face's as tunix's model, on the mesh."""
    from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]

    config = json.loads((folder / "config.json").read_text())
    model_config = qwen3.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=int(config["rope_parameters"]["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
    )
    abstract = nnx.eval_shape(lambda: qwen3.Qwen3(model_config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    mapped = ucp.open(folder).map(MAPPING, assume=["rope_theta"])
    return nnx.merge(graph, mapped.restore({"param": state}, mesh=mesh)["param"])


def train(folder: Path, directory: Path, shape: Shape, steps: int) -> None:
    """A stretch of training by tunix, from the newest step in the directory, if it has one. Prints
    the losses, and after the last step the logits.
    """
    from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # many devices share few cores
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    jax.set_mesh(mesh)
    with ucp.orbax_everywhere():
        trainer = peft_trainer.PeftTrainer(
            model_on(mesh, folder),
            optax.adamw(1e-2),
            peft_trainer.TrainingConfig(
                eval_every_n_steps=100,
                max_steps=steps,
                checkpoint_root_directory=str(directory),
                pbar_description=None,
            ),
        )
        first = trainer.train_steps
        trainer.with_gen_model_input_fn(
            lambda x: {
                "input_tokens": x.input_tokens,
                "input_mask": x.input_mask,
                **causal(x.input_tokens),
            }
        )
        trainer.train(
            peft_trainer.TrainingInput(
                input_tokens=batch_of(step), input_mask=np.ones((BATCH, LENGTH), bool)
            )
            for step in range(steps)
        )
        found = trainer.metrics_logger.get_metric_history("", "loss", "train")
        logits, _ = trainer.model(batch_of(STEPS), cache=None, **causal(batch_of(-1 % 7)))
    losses = {first + i: float(loss) for i, loss in enumerate(found)}
    np.save(directory / "logits.npy", np.asarray(logits))
    (directory / "losses.json").write_text(json.dumps(losses))


def losses(folder: Path, directory: Path, shape: Shape, steps: int) -> dict[int, float]:
    """The losses of a stretch of training in a process of its own, by step."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={shape[0] * shape[1]}",
    }
    worker = [sys.executable, __file__, "--worker", *map(str, (*shape, steps, folder, directory))]
    done = subprocess.run(worker, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"tunix on mesh {shape} failed:\n{done.stderr[-4000:]}")
    found = json.loads((directory / "losses.json").read_text())
    print(f"  mesh {shape}: steps {min(found)} to {max(found)}", flush=True)
    return {int(step): loss for step, loss in found.items()}


def zero_moments(item: Path) -> None:
    """Set AdamW's moments in a checkpoint to zero."""
    tree = ucp.open(item).restore()
    at = jax.tree_util.keystr
    zeroed = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0 if {"mu", "nu"} & set(at(path).split("'")) else leaf, tree
    )
    shutil.rmtree(item)
    ucp.CheckpointHandler().save(item, ucp.args.Save(zeroed))


def publish(item: Path, folder: Path, target: Path) -> None:
    """The parameters of a step as a folder that transformers loads."""
    params = jax.tree.map(
        lambda variable: variable["value"],
        ucp.open(item).restore(),
        is_leaf=lambda node: "value" in node,
    )
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        ucp.CheckpointHandler().save(tree, ucp.args.Save({"param": params}))
        names = ucp.Mapping.load(MAPPING).inverse()
        config = json.loads((folder / "config.json").read_text())
        saved = ucp.open(tree).map(names, config=config, assume=["rope_theta"])
        saved.export(target, "safetensors")
    shutil.copy(folder / "config.json", target)


def apart(some: Mapping[int, float], others: Mapping[int, float]) -> float:
    """The largest difference between two runs at any step that both did."""
    return max(abs(some[step] - others[step]) for step in some.keys() & others.keys())


def main(negative_control: bool) -> int:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = root / "qwen3"
        write_model(model)
        print("uninterrupted:")
        whole = {
            shape: losses(model, root / f"whole{i}", shape, STEPS)
            for i, shape in enumerate((SAVED, OTHER))
        }
        print("interrupted:")
        losses(model, root / "first", SAVED, STOP)
        step = root / "first" / str(STOP)
        formats = {
            item: ucp.open(step / item).format for item in ("model_params", "optimizer_state")
        }
        print(f"  saved: {formats}")
        if negative_control:
            zero_moments(step / "optimizer_state")
        shutil.copytree(root / "first", root / "second")
        same = losses(model, root / "first", SAVED, STEPS)
        other = losses(model, root / "second", OTHER, STEPS)
        publish(root / "second" / str(STEPS) / "model_params", model, root / "published")
        tokens = batch_of(STEPS)
        ours = np.load(root / "second" / "logits.npy")
        theirs, before = (transformers_logits(root / at, tokens) for at in ("published", "qwen3"))
    if min(same) != STOP or min(other) != STOP:
        raise RuntimeError(f"began at {min(same)} and {min(other)} instead of going on at {STOP}")
    scale = np.abs(theirs).max()
    spread = apart(whole[SAVED], whole[OTHER])
    error, moved = (float(np.abs(x - ours).max() / scale) for x in (theirs, before))
    print(f"spread of the uninterrupted runs:       {spread:.2e}")
    print(f"resumed on the same mesh, difference:   {apart(same, whole[SAVED]):.2e}")
    print(f"resumed on the other mesh, difference:  {apart(other, whole[OTHER]):.2e}")
    print(f"transformers' logits of what is published differ by {error:.1e} of their scale")
    print(f"those of the model before fine-tuning by {moved:.1e}")
    agree = set(formats.values()) == {"universal"}
    agree &= apart(same, whole[SAVED]) == 0 and apart(other, whole[OTHER]) <= spread
    agree &= error <= TOLERANCE and moved > 100 * TOLERANCE
    print("The runs agree." if agree else "The runs part.")
    return 0 if agree else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--negative-control", action="store_true")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        fsdp, tp, steps, folder, directory = given.worker
        train(Path(folder), Path(directory), (int(fsdp), int(tp)), int(steps))
        sys.exit(0)
    sys.exit(main(given.negative_control))
