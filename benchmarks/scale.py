"""A conversion by shares. Of a trillion parameters with optimizer, in integers only: cut for one
worker, 64 and 1,024, what each does, and what it costs to say so. And of what fits here, from a
bucket to a bucket that gives each connection so many bytes a second: how much faster more processes
are, what each reads, and the memory it takes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

import jax_ucp as ucp
from benchmarks.plan import STATES, parameters
from benchmarks.race import Options, Table
from benchmarks.scale_worker import EXECUTORS, peak_mib
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.protocol import ArrayInfo, MakesArrays
from jax_ucp.files.path import file_path
from jax_ucp.jobs.run import shares_of
from jax_ucp.layout.box import Box
from jax_ucp.tree import Key, Leaf
from jax_ucp.universal.copy import UniversalTarget, plan_copy

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from servers.fault_proxy import FaultProxy, Faults
from servers.stores import Store, gcs

WORKERS = (1, 64, 1024)
PROCESSES = (1, 2, 4, 8)

# Arrays of 1 MiB, three of them on their way at once: two processors are not what limits eight
# processes.
NETWORK = Faults(latency_s=0.02, connection_rate=1e6)
STATE_MIB = 288
BUDGET_MIB = 9
BEYOND_MIB = 150
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")


class Declared(MakesArrays):
    """Arrays of which only shape and dtype are there."""

    def __init__(self, arrays: Mapping[str, ArrayInfo]):
        self._arrays = arrays

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read(self, key: str, box: Box) -> np.ndarray:
        raise NotImplementedError("nothing is read for a plan")


def trillion() -> Contents:
    """The checkpoint, in names and shapes."""
    info = functools.lru_cache(lambda shape: ArrayInfo(shape, np.dtype(np.float32)))
    arrays: dict[str, ArrayInfo] = {}
    leaves: list[Leaf] = []
    for i, (shape, _) in enumerate(parameters()):
        for state in range(STATES):
            name = f"state_{state}.parameter_{i}"
            arrays[name] = info(shape)
            path = (Key("dict", f"state_{state}"), Key("dict", f"parameter_{i}"))
            leaves.append(Leaf(path, name, "array", shape, "float32"))
    return Contents("declared", "/a checkpoint", leaves, Declared(arrays))


def planned(count: int) -> dict[str, object]:
    contents = trillion()
    begun, before = time.process_time(), peak_mib()
    plan = plan_copy(contents)
    groups = UniversalTarget(contents, plan, file_path("nowhere")).groups(count)
    nbytes = [0] * count
    for group, share in zip(groups, shares_of(groups, count), strict=True):
        nbytes[share] += sum(block.nbytes for block in group)
    return {
        "arrays": len(plan.arrays),
        "TB": round(plan.write_bytes / 1e12, 2),
        "pieces": len(plan.blocks),
        "largest piece MiB": round(max(block.nbytes for block in plan.blocks) / (1 << 20), 1),
        "pieces of a worker": round(len(plan.blocks) / count),
        "most / mean bytes": round(max(nbytes) * count / sum(nbytes), 4),
        "plan CPU s": round(time.process_time() - begun, 1),
        "checkpoint described MiB": before,
        "peak MiB": peak_mib(),
    }


def speed_up() -> Table:
    """From one to eight processes, each of which has a way of its own to the bucket."""
    rows: dict[str, dict[str, object]] = {}
    one_s = 0.0
    with gcs() as store:
        os.environ.update(store.env)
        array = np.random.default_rng(0).standard_normal((256, 1024), np.float32)
        tree = {f"w{i:03}": array + np.float32(i) for i in range(STATE_MIB)}
        ucp.Checkpoint.of({"param": tree}).save(f"{store.url}/source")
        for count in PROCESSES:
            with contextlib.ExitStack() as stack:
                proxies = [FaultProxy(store.endpoint, NETWORK) for _ in range(count)]
                for proxy in proxies:
                    stack.enter_context(proxy)
                reports = _converted(store, proxies)
            seconds = max(report["s"] for report in reports)
            one_s = one_s or seconds
            rows[f"{count} processes"] = _speed_row(proxies, reports, one_s / seconds)
    connection = f"{NETWORK.connection_rate / 1e6} MB/s a connection"
    title = f"{STATE_MIB} MiB from a bucket to a bucket, {connection}, budget {BUDGET_MIB} MiB"
    return Table(title, rows)


def _converted(store: Store, proxies: Sequence[FaultProxy]) -> list[dict[str, float]]:
    """What workers that begin at once say, each behind its proxy."""
    source, target = f"{store.url}/source", f"{store.url}/target-{len(proxies)}"
    workers: list[subprocess.Popen[str]] = []
    for i, proxy in enumerate(proxies):
        share = [str(i), str(len(proxies)), str(BUDGET_MIB << 20)]
        worker = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale_worker", source, target, *share],
            env={**os.environ, **store.behind(proxy.endpoint).env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        workers.append(worker)
    for worker in workers:
        assert worker.stdout.readline() == "ready\n", "a worker did not start"
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    return [json.loads(worker.communicate()[0]) for worker in workers]


def _speed_row(
    proxies: Sequence[FaultProxy], reports: Sequence[Mapping[str, float]], speed_up: float
) -> dict[str, object]:
    count = len(reports)
    nbytes = [report["bytes"] for report in reports]
    peak = max(report["peak MiB"] for report in reports)
    assert all(report["without JAX"] for report in reports), "a worker has imported JAX"
    assert peak <= BUDGET_MIB + BEYOND_MIB, f"a worker took {peak} MiB"
    return {
        "s": round(max(report["s"] for report in reports), 1),
        "speed-up": round(speed_up, 2),
        "efficiency": round(speed_up / count, 2),
        "CPU s of all": round(sum(report["CPU s"] for report in reports), 1),
        "open s, most": round(max(report["open s"] for report in reports), 2),
        "MiB read by a worker, least to most": "{:.1f} to {:.1f}".format(
            *(f(proxy.met["bytes"] / (1 << 20) for proxy in proxies) for f in (min, max))
        ),
        "most / mean bytes": round(max(nbytes) * count / sum(nbytes), 3),
        "requests of all": sum(sum(proxy.met[m] for m in METHODS) for proxy in proxies),
        "peak MiB, most": peak,
        "promised MiB": BUDGET_MIB + BEYOND_MIB,
    }


def worker_memory(folder: Path) -> Table:
    """What workers of an executor take, and what they do before they have anything to do."""
    rows: dict[str, dict[str, object]] = {}
    source, target = folder / "source", folder / "target"
    array = np.random.default_rng(0).standard_normal((4096, 1024), np.float32)
    tree = {f"w{i}": array + np.float32(i) for i in range(STATE_MIB // 16)}
    ucp.Checkpoint.of({"param": tree}).save(source)
    arguments = str(source), str(target), BUDGET_MIB << 20
    for name in EXECUTORS:
        shutil.rmtree(target, ignore_errors=True)
        # a main module would be imported by each worker again
        command = f"from benchmarks.scale_worker import workers; workers({name!r}, *{arguments})"
        report = json.loads(subprocess.check_output([sys.executable, "-c", command]))
        assert report["peak MiB"] <= BUDGET_MIB + BEYOND_MIB, f"a worker of {name}: {report}"
        rows[name] = report | {"promised MiB": BUDGET_MIB + BEYOND_MIB}
    title = f"Workers of an executor: {STATE_MIB} MiB in arrays of 16 MiB, budget {BUDGET_MIB} MiB"
    return Table(title, rows)


def run(options: Options) -> Iterator[Table]:
    rows = {}
    for count in WORKERS:
        command = [sys.executable, "-m", "benchmarks.scale", str(count)]
        rows[f"{count:,} workers"] = msgspec.json.decode(subprocess.check_output(command))
    yield Table("A trillion parameters with optimizer, converted by shares", rows)
    yield speed_up()
    yield worker_memory(options.work / "workers")


if __name__ == "__main__":
    print(msgspec.json.encode(planned(int(sys.argv[1]))).decode())
