"""What one step takes of a checkpoint of many small arrays, in a process of its own: CPU seconds
and memory, as JSON.

    python -m benchmarks.count_worker STEP CHECKPOINT COUNT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

# A step gets ready, which is not measured, and gives what is.
Step = Callable[[Path, int], Callable[[], object]]


def written(path: Path) -> Path:
    """Where a step writes: its caller removes it."""
    return path.with_name(f"{path.name}_written")


def make(path: Path, count: int) -> Callable[[], object]:
    import jax_ucp

    tree = small_tree(count)
    jax_ucp.Checkpoint.of({"imports": "what it needs"})
    return lambda: jax_ucp.Checkpoint.of(tree).save(path)


def open_it(path: Path, count: int) -> Callable[[], object]:
    import jax_ucp
    import jax_ucp.formats.registry

    return lambda: jax_ucp.open(path)


def plan(path: Path, count: int) -> Callable[[], object]:
    import jax_ucp

    target, checkpoint = _target(count), jax_ucp.open(path)
    return lambda: checkpoint.plan(target)


def inspect(path: Path, count: int) -> Callable[[], object]:
    from jax_ucp.cli.main import main

    return lambda: main(["inspect", str(path)], standalone_mode=False)


def verify(path: Path, count: int) -> Callable[[], object]:
    import jax_ucp

    checkpoint = jax_ucp.open(path)
    return lambda: list(checkpoint.verify())


def restore(path: Path, count: int) -> Callable[[], object]:
    import jax

    import jax_ucp

    target, checkpoint = _target(count), jax_ucp.open(path)
    return lambda: jax.block_until_ready(checkpoint.restore(target))


def convert(path: Path, count: int) -> Callable[[], object]:
    import jax_ucp

    checkpoint = jax_ucp.open(path)
    return lambda: checkpoint.save(written(path))


def save(path: Path, count: int) -> Callable[[], object]:
    import orbax.checkpoint as ocp

    import jax_ucp

    tree = _on_devices(count)

    def run() -> None:
        with ocp.Checkpointer(jax_ucp.CheckpointHandler()) as checkpointer:
            checkpointer.save(written(path), args=jax_ucp.args.Save(tree))

    return run


def jax_put(path: Path, count: int) -> Callable[[], object]:
    """The floor of a restore: JAX makes the arrays of what is in memory."""
    import jax

    tree, sharding = small_tree(count), _replicated()
    return lambda: jax.block_until_ready(jax.device_put(tree, sharding))


def orbax_save(path: Path, count: int) -> Callable[[], object]:
    import orbax.checkpoint as ocp

    tree = _on_devices(count)

    def run() -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))

    return run


def orbax_restore(path: Path, count: int) -> Callable[[], object]:
    import orbax.checkpoint as ocp

    def run() -> None:
        target = _on_devices(count)
        restoring = ocp.checkpoint_utils.construct_restore_args(target)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.restore(path, args=ocp.args.PyTreeRestore(target, restoring))

    return run


def dcp_save(path: Path, count: int) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp

    state = _tensors(count)
    return lambda: dcp.save(state, checkpoint_id=path)


def dcp_restore(path: Path, count: int) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp

    state = _tensors(count)
    return lambda: dcp.load(state, checkpoint_id=path)


def small_tree(arrays: int) -> dict[str, dict[str, np.ndarray]]:
    """Parameters and Adam's moments, 12 arrays to a layer."""
    states = ("param", "exp_avg", "exp_avg_sq")
    tree: dict[str, dict[str, np.ndarray]] = {state: {} for state in states}
    for i in range(arrays):
        name = f"layers.{i // 12}.weight_{i // 3 % 4}"
        tree[states[i % 3]][name] = np.full((8, 4), i, np.float32)
    return tree


def _replicated() -> Any:
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _target(count: int) -> Any:
    """What a trainer restores onto: shapes, dtypes and shardings."""
    import jax

    sharding = _replicated()
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), small_tree(count)
    )


def _on_devices(count: int) -> Any:
    import jax

    return jax.block_until_ready(jax.device_put(small_tree(count), _replicated()))


def _tensors(count: int) -> dict[str, Any]:
    import torch

    return {
        f"{state}.{name}": torch.from_numpy(array)
        for state, arrays in small_tree(count).items()
        for name, array in arrays.items()
    }


STEPS: dict[str, Step] = {
    "make": make,
    "open": open_it,
    "plan": plan,
    "inspect": inspect,
    "verify": verify,
    "restore": restore,
    "convert": convert,
    "save": save,
    "jax_put": jax_put,
    "orbax_save": orbax_save,
    "orbax_restore": orbax_restore,
    "dcp_save": dcp_save,
    "dcp_restore": dcp_restore,
}


def measured(run: Callable[[], object]) -> dict[str, float]:
    """CPU seconds of a call, and the most bytes of memory that it took beyond what was there."""
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, begins anew
    begun = time.process_time()
    result = run()
    taken = {"cpu_s": time.process_time() - begun, "peak": _memory("VmHWM") - before}
    del result
    return taken


def _memory(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if what in line)


if __name__ == "__main__":
    step, path, count = sys.argv[1:]
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        taken = measured(STEPS[step](Path(path), int(count)))
    json.dump(taken, sys.stdout)
