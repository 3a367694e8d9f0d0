"""What one process takes to import jax_ucp, and to open, look at, plan and restore a checkpoint:
CPU seconds, as JSON.

    python -m benchmarks.array_worker read|inspect|place CHECKPOINT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

NEXT_READS = 100

begun = time.process_time()


def lap() -> float:
    """CPU seconds since the last call, or the start."""
    global begun
    before, begun = begun, time.process_time()
    return begun - before


def read(path: str) -> dict[str, float]:
    import jax_ucp
    import jax_ucp.formats.registry

    taken = {"import": lap()}
    checkpoint = jax_ucp.open(path)
    taken["open"] = lap()
    _ = checkpoint.params
    taken["params"] = lap()
    labels = list(checkpoint)
    step = max(1, len(labels) // NEXT_READS)
    lap()
    checkpoint.read(labels[0])
    taken["first read"] = lap()
    for label in labels[1::step]:
        checkpoint.read(label)
    taken["next read"] = lap() / len(labels[1::step])
    return taken


def inspect(path: str) -> dict[str, float]:
    from jax_ucp.cli.main import main

    taken = {"import CLI": lap()}
    main(["inspect", path], standalone_mode=False)
    return taken | {"inspect": lap()}


def place(path: str) -> dict[str, float]:
    import jax

    import jax_ucp

    checkpoint = jax_ucp.open(path)
    rules = [("", jax.sharding.PartitionSpec("data"))]
    lap()
    checkpoint.plan_reads({"data": 64}, rules=rules)
    taken = {"plan": lap()}
    mesh = jax.make_mesh((1,), ("data",))
    lap()
    jax.block_until_ready(checkpoint.restore(mesh=mesh, rules=rules))
    return taken | {"restore": lap()}


COMMANDS: dict[str, Callable[[str], dict[str, float]]] = {
    "read": read,
    "inspect": inspect,
    "place": place,
}

if __name__ == "__main__":
    command, path = sys.argv[1:]
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        taken = COMMANDS[command](path)
    json.dump(taken, sys.stdout)
