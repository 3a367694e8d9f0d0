"""What each array of a checkpoint costs whoever opens it and looks at it, in CPU seconds: 1,000,
10,000 and 100,000 of them, and fewer in files of torch.

Every measurement is a process of its own, with files in the page cache. What importing takes is
measured apart from the rest.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax_ucp
from benchmarks import array_cases
from benchmarks.race import Options, Table

Writer = Callable[[Path, int], None]
SIZES = (1_000, 10_000, 100_000)
TORCH_SIZES = (1_000, 5_000, 20_000)
CASES: dict[str, tuple[Writer, tuple[int, ...]]] = {
    "universal, as a manager saves it, arrays": (array_cases.saved, SIZES),
    "universal, as a conversion writes it, arrays": (array_cases.converted, SIZES),
    "DeepSpeed ZeRO-3, parameters": (array_cases.deepspeed, TORCH_SIZES),
    "Megatron, parameters": (array_cases.megatron, TORCH_SIZES),
}


def run(options: Options) -> Iterator[Table]:
    options.work.mkdir(parents=True, exist_ok=True)
    for title, (write, sizes) in CASES.items():
        rows: dict[str, dict[str, object]] = {}
        for size in sizes:
            folder = options.work / f"{write.__name__}_{size}"
            if not folder.exists():
                write(folder, size)
            rows[f"{size:,}"] = _row(folder, options.runs)
        yield Table(title, rows, ["CPU seconds; a next read in milliseconds."])


def _row(folder: Path, runs: int) -> dict[str, object]:
    samples = [_measured(folder) for _ in range(runs + 1)][1:]
    median = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return {
        "arrays": sum(leaf.has_array for leaf in jax_ucp.open(folder).leaves),
        "import": round(median["import"], 2),
        "open": round(median["open"], 3),
        "params": round(median["params"], 3),
        "first read": round(median["first read"], 4),
        "next read": round(median["next read"] * 1000, 3),
        "inspect": round(median["inspect"], 2),
    }


def _measured(folder: Path) -> dict[str, float]:
    """CPU seconds of each step, in fresh processes."""
    taken: dict[str, float] = {}
    for command in ("read", "inspect"):
        worker = [sys.executable, "-m", "benchmarks.array_worker", command, str(folder)]
        done = subprocess.run(worker, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(worker)} failed:\n{done.stderr[-2000:]}")
        taken |= json.loads(done.stdout)
    return taken
