"""One of two processes that are joined: `failing_save.py DIRECTORY`; prints what the saves said in which
something fails.

Every way to save meets every fault, and goes on: the same step without it, then the next. Of each
there is the error in this process, what looked like a checkpoint after it, and what is wrong with
those that were saved then.
"""

import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import jax_ucp as ucp
from jax_ucp.files.local import LocalFiles
from jax_ucp.handler import items as handler
from jax_ucp.sharding import save as sharding_save
from jax_ucp.sharding import shared_save

root, rank = Path(sys.argv[1]), jax.process_index()
MESH = Mesh(np.array(jax.devices()), ("x",))
WANT = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
BY_ROWS = NamedSharding(MESH, P("x"))
TREE = {
    "w": jax.make_array_from_callback(WANT.shape, BY_ROWS, lambda index: WANT[index]),
    "host": np.zeros(3, np.int8),
}
STEP = 3
# what is saved, and at how many steps beyond the one that is meant
SAVED = {"tree": TREE, "beyond": 0}

shared_save.LOOK_AROUND_S = 1


@functools.cache
def manager(path: Path, asynchronous: bool) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)
    return ocp.CheckpointManager(path, item_handlers=ucp.CheckpointHandler(), options=options)


def asked(snapshot_bytes: int | None = None) -> ucp.args.Save:
    return ucp.args.Save(SAVED["tree"], snapshot_bytes=snapshot_bytes)


def by_v0(asynchronous: bool, path: Path, step: int, **bound: int) -> None:
    manager(path, asynchronous).save(step, args=asked(**bound))
    manager(path, asynchronous).wait_until_finished()


def by_checkpointer(path: Path, step: int) -> None:
    ocp.Checkpointer(ucp.CheckpointHandler()).save(path / str(step) / "default", args=asked())


def by_v1(asynchronous: bool, path: Path, step: int, **bound: int) -> None:
    if asynchronous:
        v1.save_checkpointables_async(path / str(step), {"default": asked(**bound)}).result()
    else:
        v1.save_checkpointables(path / str(step), {"default": asked(**bound)})


def in_stages(save: Callable[..., None], path: Path, step: int) -> None:
    """As from devices with a memory of their own, of which 64 KiB are copied at once."""
    with patch.object(sharding_save, "host_bytes", lambda part: part.nbytes):
        save(path, step, snapshot_bytes=64 << 10)


def replicated() -> jax.Array:
    everywhere = NamedSharding(MESH, P())
    return jax.make_array_from_callback(WANT.shape, everywhere, lambda index: WANT[index])


Way = Callable[[Path, int], None]
WAYS: dict[str, Way] = {
    "v0": functools.partial(by_v0, False),
    "v0 in the background": functools.partial(by_v0, True),
    "v0 without a manager": by_checkpointer,
    "v1": functools.partial(by_v1, False),
    "v1 in the background": functools.partial(by_v1, True),
}
for way in ("v0", "v1"):
    WAYS[f"{way} in stages"] = functools.partial(in_stages, WAYS[f"{way} in the background"])


def full_disk(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


def out_of_memory(*args: object) -> None:
    raise MemoryError("no room for a copy")


# In which process something fails, and what.
FAULTS = {
    "process 1 has a full disk":          (1, patch.object(LocalFiles, "write", full_disk)),
    "process 0 has a full disk":          (0, patch.object(LocalFiles, "write", full_disk)),
    "process 0 cannot commit":            (0, patch.object(handler, "commit_snapshot", full_disk)),
    "process 1 has no memory for a copy": (1, patch.object(handler, "take_snapshot", out_of_memory)),
    "process 1 has what cannot be saved": (1, patch.dict(SAVED, tree={**TREE, "bad": object()})),
    "process 0 has what cannot be saved": (0, patch.dict(SAVED, tree={**TREE, "bad": object()})),
    "process 1 has another tree":         (1, patch.dict(SAVED, tree={**TREE, "more": 5})),
    "process 0 has another tree":         (0, patch.dict(SAVED, tree={**TREE, "more": 5})),
    "process 1 has another shape":        (1, patch.dict(SAVED, tree={**TREE, "host": np.zeros(4, np.int8)})),
    "process 1 has another sharding":     (1, patch.dict(SAVED, tree={**TREE, "w": replicated()})),
    "process 1 is at another step":       (1, patch.dict(SAVED, beyond=5)),
}  # fmt: skip


def met(save: Way, path: Path, process: int, fault: contextlib.AbstractContextManager) -> dict:
    error = None
    try:
        with fault if rank == process else contextlib.nullcontext():
            save(path, STEP + SAVED["beyond"])
    except Exception as raised:
        notes = getattr(raised, "__notes__", [])
        error = [type(raised).__name__, *str(raised).splitlines(), *notes]
    sync_global_devices("failed")
    whole = [str(found) for found in [*path.rglob("ucp.json"), *path.glob("?/default")]]
    sync_global_devices("looked")
    for step in (STEP, STEP + 1):
        save(path, step)
    saved = [ucp.open(path / str(step) / "default") for step in (STEP, STEP + 1)]
    wrong = [fault for each in saved for _, fault in each.verify() if fault]
    return {"error": error, "whole": whole, "wrong": wrong}


said = {}
for way, save in WAYS.items():
    for fault, (process, patched) in FAULTS.items():
        name = f"{way}, {fault}"
        print(name, file=sys.stderr, flush=True)
        said[name] = met(save, root / name.replace(" ", "_"), process, patched)
print(json.dumps(said))
