"""Counts the lines of the package that a restore by our handler executes, for docs/what-runs.md.

python docs/what_runs.py           # prints the table
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import jax_ucp as ucp

PACKAGE = Path(ucp.__file__).parent
lines: dict[str, set[int]] = defaultdict(set)


def trace(frame: FrameType, event: str, argument: Any) -> Any:
    file = frame.f_code.co_filename
    if not file.startswith(str(PACKAGE)):
        return None
    if event == "line":
        lines[file].add(frame.f_lineno)
    return trace


def restored() -> None:
    mesh, other = (jax.make_mesh(shape, ("data", "model")) for shape in ((4, 2), (2, 4)))
    placed = NamedSharding(mesh, PartitionSpec("data", "model"))
    state = {"w": jax.device_put(jnp.ones((512, 512)), placed), "b": jnp.zeros(8), "step": 1}
    folder = tempfile.mkdtemp()
    with ocp.CheckpointManager(folder, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(1, args=ucp.args.Save(state))
    threading.settrace(trace)
    sys.settrace(trace)
    with ocp.CheckpointManager(folder, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.restore(1, args=ucp.args.Restore(state, mesh=other))
    sys.settrace(None)
    threading.settrace(None)  # pyright: ignore[reportArgumentType]


def table() -> str:
    rooms: dict[str, list[int]] = {}
    for file, executed in lines.items():
        room, *inside = Path(file).relative_to(PACKAGE).parts
        rooms.setdefault(room if inside else "at the top", []).append(len(executed))
    ordered = sorted(rooms.items(), key=lambda each: -sum(each[1]))
    rows = [
        f"{room:<11}{sum(counts):>6,} lines of {len(counts):>2} files" for room, counts in ordered
    ]
    counts = [len(executed) for executed in lines.values()]
    return "\n".join([*rows, f"{'all':<11}{sum(counts):>6,} lines of {len(counts):>2} files"])


if __name__ == "__main__":
    restored()
    print(table())
