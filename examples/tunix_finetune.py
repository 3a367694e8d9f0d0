"""A Hugging Face model is fine-tuned by tunix on two meshes, and goes back to transformers.

    pip install --no-deps google-tunix==0.1.7             # beside jax_ucp
    pip install flax optax qwix jaxtyping omegaconf tenacity tqdm grain jinja2 sentencepiece \
        google-metrax perfetto pillow pandas safetensors transformers torch==2.13.0
    python examples/tunix_finetune.py
    python examples/tunix_finetune.py --negative-control

A tiny Qwen2 is opened, mapped to tunix's model, and restored onto a mesh of (fsdp 4, tp 2), where
tunix's PeftTrainer trains it for four steps and saves, with the manager that it builds itself:
`ucp.orbax_everywhere()` around it is the only change. From there it goes on to step 8, once on the
same mesh, where its losses must be those of a run that was never interrupted, bit for bit; and once
on (fsdp 2, tp 2), where numbers are added in another order: it must not be further from the
uninterrupted run on that mesh than uninterrupted runs on the two meshes are from each other. What
the manager saved last is exported, and transformers' logits must be those of tunix's model.
`--negative-control` sets AdamW's moments to zero before the run goes on; the losses must then part,
and it fails if they do not.

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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import equal_logits
import jax_ucp as ucp

Shape = tuple[int, int]  # devices along "fsdp", along "tp"
SAVED, OTHER = (4, 2), (2, 2)
STOP, STEPS = 4, 8
BATCH, LENGTH = 8, 16
MODEL = Path(__file__).parent.parent / "tests" / "data" / "torch" / "hf_qwen2" / "ckpt"
MAPPING = "hf-qwen2-to-tunix"
TOLERANCE = 1e-5


def batch_of(step: int) -> np.ndarray:
    starts = np.random.default_rng(step).integers(0, 64, (BATCH, 1))
    return ((starts + np.arange(LENGTH) * 3) % 64).astype(np.int32)


def model_on(mesh: jax.sharding.Mesh) -> nnx.Module:
    """The checkpoint of Hugging Face's as tunix's model, on the mesh."""
    from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]

    checkpoint = ucp.open(MODEL)
    config = equal_logits.model_config(qwen2, checkpoint.config)
    with jax.set_mesh(mesh):  # the abstract model then says how tunix shards it
        graph, state = nnx.split(nnx.eval_shape(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(0))))
    restored = checkpoint.map(MAPPING).restore({"param": state}, mesh=mesh)
    return nnx.merge(graph, restored["param"])


def train(shape: Shape, steps: int, directory: Path) -> None:
    """A stretch of training by tunix, from the newest step in the directory, if it has one. Leaves
    the losses and the trained model's logits beside the steps.
    """
    from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # many devices share few cores
    positions = np.tile(np.arange(LENGTH), (BATCH, 1))
    mask = np.tile(np.tri(LENGTH, dtype=bool), (BATCH, 1, 1))
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = model_on(mesh)
    with mesh, ucp.orbax_everywhere():
        config = peft_trainer.TrainingConfig(
            eval_every_n_steps=100, max_steps=steps, checkpoint_root_directory=str(directory)
        )
        trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-2), config)
        first = trainer.train_steps
        trainer.with_gen_model_input_fn(
            lambda batch: {
                "input_tokens": batch.input_tokens,
                "input_mask": batch.input_mask,
                "positions": positions,
                "attention_mask": mask,
            }
        )
        trainer.train(
            peft_trainer.TrainingInput(batch_of(step), np.ones((BATCH, LENGTH), bool))
            for step in range(steps)
        )
        logits = nnx.jit(lambda model, tokens: model(tokens, positions, None, mask)[0])
        np.save(directory / "logits.npy", logits(trainer.model, jnp.asarray(batch_of(STEPS))))
    found = trainer.metrics_logger.get_metric_history("", "loss", "train")
    losses = {first + i: float(loss) for i, loss in enumerate(found)}
    (directory / "losses.json").write_text(json.dumps(losses))


def losses(shape: Shape, steps: int, directory: Path) -> dict[int, float]:
    """The losses of a stretch of training in a process of its own, by step."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={shape[0] * shape[1]}",
    }
    worker = [sys.executable, __file__, "--worker", *map(str, (*shape, steps, directory))]
    done = subprocess.run(worker, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"tunix on mesh {shape} failed:\n{done.stderr[-4000:]}")
    found = {int(at): x for at, x in json.loads((directory / "losses.json").read_text()).items()}
    print(f"  mesh {shape}: steps {min(found)} to {max(found)}", flush=True)
    return found


def zero_moments(item: Path) -> None:
    """Set AdamW's moments in a checkpoint to zero."""
    tree = ucp.open(item).restore()
    adam = tree["opt_state"][0]
    for moment in ("mu", "nu"):
        adam[moment] = jax.tree.map(np.zeros_like, adam[moment])
    shutil.rmtree(item)
    ucp.CheckpointHandler().save(item, ucp.args.Save(tree))


def publish(step: Path, folder: Path) -> None:
    """What tunix's manager saved, as a folder that transformers loads."""
    words = ["--params", "model_params", "--mapping", MAPPING, "--inverse", "--config", str(MODEL)]
    command = [sys.executable, "-m", "jax_ucp", "export", str(step), str(folder), *words]
    subprocess.run(command, check=True)


def transformers_logits(folder: Path) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(batch_of(STEPS)).long()).logits.numpy()


def apart(some: Mapping[int, float], others: Mapping[int, float]) -> float:
    """The largest difference between two runs at any step that both did."""
    return max(abs(some[step] - others[step]) for step in some.keys() & others.keys())


def main(negative_control: bool) -> int:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        print("uninterrupted:")
        whole = {shape: losses(shape, STEPS, root / str(shape)) for shape in (SAVED, OTHER)}
        print("interrupted:")
        losses(SAVED, STOP, root / "first")
        step = root / "first" / str(STOP)
        formats = {at: ucp.open(step / at).format for at in ("model_params", "optimizer_state")}
        print(f"  saved: {formats}")
        if negative_control:
            zero_moments(step / "optimizer_state")
        shutil.copytree(root / "first", root / "second")
        same, other = losses(SAVED, STEPS, root / "first"), losses(OTHER, STEPS, root / "second")
        publish(root / "second" / str(STEPS), root / "published")
        ours = np.load(root / "second" / "logits.npy")
        theirs, before = transformers_logits(root / "published"), transformers_logits(MODEL)
    if min(same) != STOP or min(other) != STOP:
        raise RuntimeError(f"began at {min(same)} and {min(other)} instead of going on at {STOP}")
    spread = apart(whole[SAVED], whole[OTHER])
    error, moved = (float(np.abs(x - ours).max() / np.abs(ours).max()) for x in (theirs, before))
    print(f"spread of the uninterrupted runs:       {spread:.2e}")
    print(f"resumed on the same mesh, difference:   {apart(same, whole[SAVED]):.2e}")
    print(f"resumed on the other mesh, difference:  {apart(other, whole[OTHER]):.2e}")
    print(f"transformers' logits of what was exported differ by {error:.1e} of their scale")
    print(f"those of the model before fine-tuning by {moved:.1e}")
    agree = apart(same, whole[SAVED]) == 0 and apart(other, whole[OTHER]) <= spread
    print("The runs agree." if agree else "The runs part.")
    back = error <= TOLERANCE and moved > 100 * TOLERANCE
    ours_wrote = set(formats.values()) == {"universal"}
    return 0 if ours_wrote and back and agree != negative_control else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--negative-control", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        fsdp, tp, steps, directory = given.worker
        train((int(fsdp), int(tp)), int(steps), Path(directory))
        sys.exit(0)
    sys.exit(main(given.negative_control))
