"""One of several processes that do a conversion by shares: `python -m benchmarks.scale_worker
SOURCE TARGET I N BUDGET`.

It says that it is ready, and begins when a line comes on stdin; what it took is printed as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import obstore  # else the first request imports it

import jax_ucp as ucp
from jax_ucp.universal.copy import Block


def peak_mib() -> int:
    """The most that was resident of this program; `ru_maxrss` has that of who started it too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def main(source: str, target: str, index: str, count: str, budget: str) -> None:
    _ = ucp.open, obstore.store
    print("ready", flush=True)
    sys.stdin.readline()
    begin, cpu, blocks = time.monotonic(), time.process_time(), [0]

    def progress(block: Block) -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
