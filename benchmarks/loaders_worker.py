"""One way from a folder of Hugging Face's Qwen3-0.6B to arrays on eight CPU devices.

python loaders_worker.py WAY FOLDER SCRATCH

Prints the seconds, what the process read from files, and a digest of each array.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint import v1

import jax_ucp as ucp

NAME, MAPPING = "qwen3-0.6b", "hf-qwen3-to-maxtext"
DEVICES = 8

Tree = Mapping[str, Any]


def config(**more: Any) -> Any:
    from maxtext.configs import pyconfig

    said = {
        "run_name": "loaders",
        "model_name": NAME,
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "attention": "dot_product",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "hardware": "cpu",
        "ici_fsdp_parallelism": DEVICES,
        **more,
    }
    return pyconfig.initialize(["", str(Path(pyconfig.__file__).parent / "base.yml")], **said)


def target(said: Any) -> nnx.State:
    """MaxText's parameters as shapes with its own shardings."""
    from maxtext.utils import maxtext_utils, model_creation_utils

    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(said), said.mesh_axes)
    _, model = model_creation_utils.create_nnx_abstract_model(said, mesh)
    return nnx.state(model, nnx.Param)


def wanted() -> dict[str, Any]:
    return {"params": {"params": nnx.to_pure_dict(target(config()))}}


def ours(folder: Path, scratch: Path) -> Callable[[], Tree]:
    tree = {"param": wanted()["params"]}
    return lambda: ucp.open(folder).map(MAPPING).restore(tree)["param"]["params"]


def ours_linked(folder: Path, scratch: Path) -> Callable[[], Tree]:
    return _stock(lambda path: ucp.open(folder).map(MAPPING).link(path), scratch)


def ours_converted(folder: Path, scratch: Path) -> Callable[[], Tree]:
    return _stock(lambda path: ucp.open(folder).map(MAPPING).save(path), scratch)


def _stock(write: Callable[[Path], object], scratch: Path) -> Callable[[], Tree]:
    tree = {"param": wanted()["params"]}

    def run() -> Tree:
        write(scratch / "step")
        with ocp.StandardCheckpointer() as stock:
            return stock.restore(scratch / "step", tree)["param"]["params"]

    return run


def to_maxtext(folder: Path, scratch: Path) -> Callable[[], Tree]:
    from maxtext.checkpoint_conversion import to_maxtext
    from maxtext.common.checkpointing import load_params_from_path
    from maxtext.configs import pyconfig

    base = str(Path(pyconfig.__file__).parent / "base.yml")
    said = {"model_name": NAME, "base_output_directory": str(scratch), "scan_layers": "true"}
    said |= {"skip_jax_distributed_system": "true", "hardware": "cpu", "hf_access_token": "none"}
    words = ["", base, *(f"{key}={value}" for key, value in said.items())]
    state = target(config())

    def run() -> Tree:
        to_maxtext.main(words, hf_model_path=str(folder), simulated_cpu_devices_count=DEVICES)
        return nnx.to_pure_dict(load_params_from_path(str(scratch / "0" / "items"), state, 8))

    return run


def safetensors_dynamic(folder: Path, scratch: Path) -> Callable[[], Tree]:
    from maxtext.common.checkpointing import load_safetensors_dynamic_state

    said = config()
    tree = target(said)
    return lambda: load_safetensors_dynamic_state(str(folder), tree, said)[1]["params"]


def safetensors_layout(folder: Path, scratch: Path) -> Callable[[], Tree]:
    """Orbax's own: in the names and shapes of the files, each cut along its first axis."""
    mesh = jax.make_mesh((DEVICES,), ("x",), (jax.sharding.AxisType.Auto,))

    def spec(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = ("x",) if one.shape and one.shape[0] % DEVICES == 0 else ()
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)

    def run() -> Tree:
        layout = v1.options.CheckpointLayout.SAFETENSORS
        with v1.Context(checkpoint_layout=layout):
            shapes = v1.pytree_metadata(folder).metadata
            return v1.load_pytree(folder, jax.tree.map(spec, shapes))

    return run


def tunix(folder: Path, scratch: Path) -> Callable[[], Tree]:
    from tunix.models.qwen3 import model, params

    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((DEVICES, 1), ("fsdp", "tp"), axes)
    said = model.ModelConfig.qwen3_0p6b()

    def run() -> Tree:
        loaded = params.create_model_from_safe_tensors(str(folder), said, mesh)
        return nnx.to_pure_dict(nnx.state(loaded, nnx.Param))

    return run


WAYS = {
    "jax_ucp": ours,
    "jax_ucp: link, stock Orbax": ours_linked,
    "jax_ucp: convert, stock Orbax": ours_converted,
    "MaxText: to_maxtext, its restore": to_maxtext,
    "MaxText: safetensors_dynamic": safetensors_dynamic,
    "Orbax v1: safetensors layout": safetensors_layout,
    "tunix: its loader": tunix,
}


def digests(tree: Tree) -> dict[str, str]:
    """The SHA-256 of each array's shape, dtype and bytes, by its path."""
    found = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(value)
        head = f"{array.shape} {array.dtype} ".encode()
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = hashlib.sha256(head + array.tobytes()).hexdigest()[:16]
    return found


def bytes_read() -> int:
    """Bytes that this process has asked of files, from the page cache or not."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def memory(key: str) -> int:
    """The bytes of memory of this process: now, `VmRSS`, or at most, `VmHWM`."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) << 10


def main() -> None:
    way, folder, scratch = sys.argv[1:]
    run = WAYS[way](Path(folder), Path(scratch))
    Path("/proc/self/clear_refs").write_text("5")  # the most begins here
    held = memory("VmRSS")
    before, begun, cpu = bytes_read(), time.perf_counter(), time.process_time()
    tree = jax.block_until_ready(run())
    taken, cpu = time.perf_counter() - begun, time.process_time() - cpu
    said: dict[str, Any] = {"wall_s": taken, "cpu_s": cpu, "read": bytes_read() - before}
    said["memory"] = memory("VmHWM") - held
    print(json.dumps({**said, "digests": digests(tree)}))


if __name__ == "__main__":
    main()
