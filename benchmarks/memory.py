"""Peak memory of a restore beyond the arrays that it gives, and of a save beyond the state that it
saves, by budget.

Every row is a process of its own, and its peak is the kernel's own count. The promise is the budget
and 64 MiB.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import OURS, fresh
from benchmarks.race import Options, Table

BUDGETS_MIB = (32, 256, 2048)
ARRAYS = 16
PEERS = ("Orbax v0, default", "Orbax v1, default")
REPEATS = 10
BEYOND_MIB = 64


def run(options: Options) -> Iterator[Table]:
    options.work.mkdir(parents=True, exist_ok=True)
    side = math.isqrt(options.mib * (1 << 20) // 4) // 64 * 64
    states = {f"{ARRAYS} arrays": ((side // 4, side // 4), ARRAYS), "one array": ((side, side), 1)}
    for what, (shape, count) in states.items():
        yield _compete(what, shape, count, options)


def _compete(what: str, shape: tuple[int, int], count: int, options: Options) -> Table:
    mib = count * math.prod(shape) * 4 / (1 << 20)
    path = options.work / "state"
    common = {"path": str(path), "shape": shape, "count": count, "times": 1, "dtype": "float32"}
    rows: dict[str, dict[str, object]] = {}
    for budget in BUDGETS_MIB:
        found = _child(**common, do="save", peer=OURS, budget=budget << 20)
        rows[f"save, budget {budget} MiB"] = _row(found["peak_mib"], budget)
    for onto in ("rows", "columns", "one device"):
        for budget in BUDGETS_MIB:
            found = _child(**common, do="restore", peer=OURS, budget=budget << 20, onto=onto)
            rows[f"restore onto {onto}, budget {budget} MiB"] = _row(
                found["peak_mib"] - mib, budget
            )
    for budget in BUDGETS_MIB:
        found = _child(
            **common | {"dtype": "bfloat16"},
            do="restore",
            peer=OURS,
            budget=budget << 20,
            onto="columns",
        )
        rows[f"restore onto columns as bfloat16, budget {budget} MiB"] = _row(
            found["peak_mib"] - mib / 2, budget
        )
    again = _child(
        **common | {"times": REPEATS},
        do="restore",
        peer=OURS,
        budget=BUDGETS_MIB[0] << 20,
        onto="columns",
    )
    kept = again["left_mib"]
    for peer in PEERS:
        found = _child(**common, do="save", peer=peer, budget=None)
        rows[f"{peer}, save"] = _row(found["peak_mib"])
        found = _child(**common, do="restore", peer=peer, budget=None, onto="columns")
        rows[f"{peer}, restore onto columns"] = _row(found["peak_mib"] - mib)
    fresh(path)
    note = (
        f"Resident after each of {REPEATS} restores, arrays released, MiB above the start: {kept}."
    )
    return Table(f"Memory beyond the state: {what}, {mib:,.0f} MiB", rows, [note])


def _row(beyond: float, budget: int | None = None) -> dict[str, object]:
    promised = {} if budget is None else {"promised MiB": budget + BEYOND_MIB}
    return {"beyond MiB": round(beyond, 1), **promised}


def _child(**request: Any) -> dict[str, Any]:
    """What `memory_worker` prints. Raises RuntimeError, with all that it said, if it fails."""
    command = [sys.executable, "-m", "benchmarks.memory_worker", json.dumps(request)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{request} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
