"""MaxText trains, saves with the checkpointer that it builds itself, and goes on on another mesh.

    pip install --no-deps maxtext==0.2.5                  # Python 3.12 or newer, beside jax_ucp
    pip install jax==0.11.1 flax omegaconf pydantic aqtp qwix tokamax pathwaysutils transformers \
        grain drjax jinja2 packaging pillow tiktoken sentencepiece sympy ml_collections datasets
    python examples/maxtext_resume.py
    python examples/maxtext_resume.py --negative-control

A small model trains for eight steps of MaxText's own `train.main`, which knows nothing of jax_ucp:
`ucp.orbax_everywhere()` around it is the only change. It saves on a mesh of (fsdp 4, tensor 2).
From its step 3 it goes on once on the same mesh, where its losses must be those of a run that was
never interrupted, bit for bit; and once on (fsdp 2, tensor 2), where numbers are added in another
order: it must not be further from the uninterrupted run on that mesh than uninterrupted runs on the
two meshes are from each other. `--negative-control` sets AdamW's moments to zero in the checkpoint
before the run goes on; the comparison must then fail.

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
import numpy as np

import jax_ucp as ucp

Mesh = tuple[int, int]  # devices along "fsdp", along "tensor"
SAVED, OTHER = (4, 2), (2, 2)
STOP, STEPS = 4, 8
BATCH = 8
SETTINGS: dict[str, Any] = {
    "run_name": "run",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 48,
    "base_num_decoder_layers": 2,
    "vocab_size": 64,
    "max_target_length": 16,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "learning_rate": 1e-2,
    "learning_rate_schedule_steps": 100,
    "warmup_steps_fraction": 0.02,
    "checkpoint_period": STOP - 1,
    "enable_tensorboard": False,
    "gcs_metrics": False,
}


def train(directory: Path, mesh: Mesh, steps: int, metrics: Path) -> None:
    """A stretch of training by MaxText, from the newest step in the directory, if it has one."""
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

    fsdp, tensor = mesh
    settings = SETTINGS | {
        "base_output_directory": directory,
        "metrics_file": metrics,
        "steps": steps,
        "ici_fsdp_parallelism": fsdp,
        "ici_tensor_parallelism": tensor,
        "per_device_batch_size": BATCH // (fsdp * tensor),
    }
    base = Path(pyconfig.__file__).parent / "base.yml"
    with ucp.orbax_everywhere():
        train.main(["train", str(base), *(f"{name}={value}" for name, value in settings.items())])


def losses(directory: Path, mesh: Mesh, steps: int) -> dict[int, float]:
    """The losses of a stretch of training in a process of its own, by step."""
    devices = mesh[0] * mesh[1]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "DECOUPLE_GCLOUD": "TRUE",
    }
    with tempfile.TemporaryDirectory() as name:
        metrics = Path(name) / "metrics.jsonl"
        worker = [sys.executable, __file__, "--worker", *map(str, mesh), str(steps)]
        done = subprocess.run(
            [*worker, str(directory), str(metrics)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"MaxText on mesh {mesh} failed:\n{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = {int(line["step"]): float(line["learning/loss"]) for line in lines}
    print(f"  mesh {mesh}: steps {min(found)} to {max(found)}", flush=True)
    return found


def zero_moments(step: Path) -> None:
    """Set AdamW's moments in a checkpoint to zero."""
    tree = ucp.open(step / "items").restore()
    adam = tree["opt_state"][0]
    for moment in ("mu", "nu"):
        adam[moment] = jax.tree.map(np.zeros_like, adam[moment])
    shutil.rmtree(step / "items")
    ucp.CheckpointHandler().save(step / "items", ucp.args.Save(tree))


def apart(some: Mapping[int, float], others: Mapping[int, float]) -> float:
    """The largest difference between two runs at any step that both did."""
    return max(abs(some[step] - others[step]) for step in some.keys() & others.keys())


def main(negative_control: bool) -> int:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        print("uninterrupted:")
        whole = {
            mesh: losses(root / f"whole{i}", mesh, STEPS) for i, mesh in enumerate((SAVED, OTHER))
        }
        print("interrupted:")
        losses(root / "first", SAVED, STOP)
        step = root / "first" / "run" / "checkpoints" / str(STOP - 1)
        checkpoint = ucp.open(step / "items")
        print(f"  {step.name}/items is in the {checkpoint.format} format")
        if checkpoint.format != "universal":
            return 1
        if negative_control:
            zero_moments(step)
        shutil.copytree(root / "first", root / "second")
        same = losses(root / "first", SAVED, STEPS)
        other = losses(root / "second", OTHER, STEPS)
    if min(same) != STOP or min(other) != STOP:
        raise RuntimeError(f"began at {min(same)} and {min(other)} instead of going on at {STOP}")
    spread = apart(whole[SAVED], whole[OTHER])
    print(f"spread of the uninterrupted runs:       {spread:.2e}")
    print(f"resumed on the same mesh, difference:   {apart(same, whole[SAVED]):.2e}")
    print(f"resumed on the other mesh, difference:  {apart(other, whole[OTHER]):.2e}")
    agree = apart(same, whole[SAVED]) == 0 and apart(other, whole[OTHER]) <= spread
    print("The runs agree." if agree else "The runs part.")
    return 0 if agree != negative_control else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--negative-control", action="store_true")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        fsdp, tensor, steps, directory, metrics = given.worker
        train(Path(directory), (int(fsdp), int(tensor)), int(steps), Path(metrics))
        sys.exit(0)
    sys.exit(main(given.negative_control))
