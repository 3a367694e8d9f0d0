"""What each array of a checkpoint costs whoever opens, looks at, plans and restores it, in CPU
seconds: 1,000, 10,000 and 100,000 of them, and fewer in files of torch, of many ranks and experts.
With `--counts`, what every step takes of so many, beside Orbax and PyTorch's distributed
checkpoint.

Every measurement is a process of its own, with files in the page cache. What importing takes is
measured apart from the rest.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax_ucp
from benchmarks import array_cases
from benchmarks.count_worker import written
from benchmarks.race import Options, Table

Writer = Callable[[Path, int], None]
SIZES = (1_000, 10_000, 100_000)
TORCH_SIZES = (1_000, 5_000, 20_000)
CASES: dict[str, tuple[Writer, tuple[int, ...]]] = {
    "universal, as a manager saves it, arrays": (array_cases.saved, SIZES),
    "universal, as a conversion writes it, arrays": (array_cases.converted, SIZES),
    "DeepSpeed ZeRO-3, parameters": (array_cases.deepspeed, TORCH_SIZES),
    "Megatron, parameters": (array_cases.megatron, TORCH_SIZES),
    "DeepSpeed ZeRO-3 of 2,000 parameters, ranks": (array_cases.many_ranks, (16, 32, 64)),
    "Megatron torch_dist of 60 layers, experts of each": (array_cases.many_experts, (64, 128, 256)),
}


# Each step, and the checkpoint that it makes or reads: those of one checkpoint follow its first.
OURS = ("make", "open", "plan", "inspect", "verify", "restore", "convert", "save", "jax_put")
ORBAX, DCP = ("orbax_save", "orbax_restore"), ("dcp_save", "dcp_restore")
# With more arrays than that peers are not asked, and after so long they are not waited for.
PEER_ARRAYS, PEER_S = 100_000, 600


def run(options: Options) -> Iterator[Table]:
    options.work.mkdir(parents=True, exist_ok=True)
    if options.counts:
        yield from _counted(options)
        return
    for title, (write, sizes) in CASES.items():
        rows: dict[str, dict[str, object]] = {}
        for size in sizes:
            folder = options.work / f"{write.__name__}_{size}"
            if not folder.exists():
                write(folder, size)
            rows[f"{size:,}"] = _row(folder, options.runs)
        notes = [
            "CPU seconds; a next read in milliseconds. Planned for 64 devices, restored to one."
        ]
        yield Table(title, rows, notes)


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
        "plan": round(median["plan"], 2),
        "restore": round(median["restore"], 2),
    }


def _counted(options: Options) -> Iterator[Table]:
    """CPU and memory of every step, an array; each is run once."""
    cpu: dict[str, dict[str, object]] = {}
    memory: dict[str, dict[str, object]] = {}
    for count in options.counts:
        for step, python in _steps(count, options.torch_python):
            taken = _step(python, step, options.work / f"{step.partition('_')[0]}_{count}", count)
            cpu.setdefault(step, {})[f"{count:,}"] = taken[0]
            memory.setdefault(step, {})[f"{count:,}"] = taken[1]
    yield Table("CPU, microseconds an array", cpu)
    yield Table("Memory at its peak beyond what was there before, bytes an array", memory)


def _steps(count: int, torch_python: str | None) -> Iterator[tuple[str, str]]:
    """The steps that are measured with so many arrays, each with its Python."""
    yield from ((step, sys.executable) for step in OURS)
    if count <= PEER_ARRAYS:
        yield from ((step, sys.executable) for step in ORBAX)
        yield from ((step, torch_python) for step in DCP if torch_python)


def _step(python: str, step: str, path: Path, count: int) -> tuple[object, object]:
    if step in OURS:
        path = path.with_name(f"ours_{count}")
    worker = [python, "-W", "ignore", "-m", "benchmarks.count_worker", step, str(path), str(count)]
    try:
        done = subprocess.run(worker, capture_output=True, text=True, timeout=PEER_S)
    except subprocess.TimeoutExpired:
        return f"not within {PEER_S} s", ""
    finally:
        shutil.rmtree(written(path), ignore_errors=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(worker)} failed:\n{done.stderr[-2000:]}")
    taken = json.loads(done.stdout)
    return round(taken["cpu_s"] / count * 1e6, 1), round(taken["peak"] / count)


def _measured(folder: Path) -> dict[str, float]:
    """CPU seconds of each step, in fresh processes."""
    taken: dict[str, float] = {}
    for command in ("read", "inspect", "place"):
        worker = [sys.executable, "-m", "benchmarks.array_worker", command, str(folder)]
        done = subprocess.run(worker, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(worker)} failed:\n{done.stderr[-2000:]}")
        taken |= json.loads(done.stdout)
    return taken
