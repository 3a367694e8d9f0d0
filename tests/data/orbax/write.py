"""Writes the checkpoints beside it, with stock Orbax: `python tests/data/orbax/write.py` (orbax-checkpoint 0.12.8).

`ocdbt` and `plain` are Orbax v0's, with and without an OCDBT database, zarr v2; `zarr3` is v1's.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

HERE = Path(__file__).parent.resolve()


def tree() -> dict:
    mesh = jax.make_mesh((2,), ("data",))
    kernel = jnp.arange(24, dtype=jnp.float32).reshape(6, 4)
    return {
        "params": {
            "kernel": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec("data"))),
            "bias": jnp.linspace(0, 1, 4, dtype=jnp.bfloat16),
        },
        "opt": [np.arange(3, dtype=np.int8), {"zeros": np.zeros(5, np.float32)}, None, {}],
        "step": 7,
        "rate": 0.5,
        "rng": jax.random.key(3),
    }


def main() -> None:
    for name in ("ocdbt", "plain", "zarr3"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    for name, ocdbt in (("ocdbt", True), ("plain", False)):
        saved = ocp.args.PyTreeSave({**tree(), "note": "a text"})
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)).save(HERE / name, args=saved)
    v1.save(HERE / "zarr3", {**tree(), "note": "a text"})


if __name__ == "__main__":
    main()
