"""One of several processes that do a conversion, by shares: `python -m benchmarks.scale_worker
SOURCE TARGET I N BUDGET`.

It says that it is ready, and begins when a line comes on stdin; what it took is printed as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import obstore  # else the first request imports it

import jax_ucp as ucp
from jax_ucp.universal.copy import CopyBlock


def peak_mib() -> int:
    """The most that was resident of this program; `ru_maxrss` has that of who started it too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def main(source: str, target: str, index: str, count: str, budget: str) -> None:
    _ = ucp.open, obstore.store
    print("ready", flush=True)
    sys.stdin.readline()
    begin, cpu, blocks = time.monotonic(), time.process_time(), [0]

    def progress(block: CopyBlock) -> None:
        blocks[0] += block.nbytes

    checkpoint = ucp.open(source)
    opened = time.monotonic()
    share = int(index), int(count)
    checkpoint.save_share(target, share, budget_bytes=int(budget), progress=progress)
    report = {
        "open s": opened - begin,
        "s": time.monotonic() - begin,
        "CPU s": time.process_time() - cpu,
        "bytes": blocks[0],
        "peak MiB": peak_mib(),
        "without JAX": "jax" not in sys.modules,
    }
    print(json.dumps(report), flush=True)


def workers(name: str, source: str, target: str, budget: int) -> None:
    """Convert by an executor, and print the most MiB that were resident of a worker."""
    with EXECUTORS[name]() as executor:
        before = _peaks(executor)
        ucp.open(source).save(target, executor=executor, budget_bytes=budget)
        after = _peaks(executor)
    report = {"workers": len(after), "before MiB": max(before.values())}
    print(json.dumps(report | {"peak MiB": max(after.values())}))


def _peaks(executor: Executor) -> dict[int, int]:
    """By process what was resident of it at most so far."""
    return dict(executor.map(_peak, range(8 * WORKERS)))


def _peak(_: int) -> tuple[int, int]:
    time.sleep(0.1)  # no worker is to do the tasks of all
    return os.getpid(), peak_mib()


def _pool() -> AbstractContextManager[Executor]:
    return ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))


@contextmanager
def _dask() -> Iterator[Executor]:
    import distributed

    with (
        distributed.LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor(pure=False)


WORKERS = 2
EXECUTORS = {"--workers": _pool, "--scheduler, of Dask": _dask}

if __name__ == "__main__":
    main(*sys.argv[1:])
