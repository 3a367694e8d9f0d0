"""A conversion of a trillion parameters with optimizer, cut for one worker, 64 and 1,024: what each
does, and what it costs to say so. Integers only.
"""

from __future__ import annotations

import functools
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from benchmarks.plan import STATES, parameters
from benchmarks.race import Options, Table
from jax_ucp.layout.box import Box
from jax_ucp.sources.contents import Contents
from jax_ucp.sources.protocol import ArrayInfo, MakesArrays
from jax_ucp.tree import Key, Leaf
from jax_ucp.universal.copy import plan_copy
from jax_ucp.universal.shares import parts_of

WORKERS = (1, 64, 1024)


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
    begun, before = time.process_time(), _peak()
    plan = plan_copy(contents)
    parts = parts_of(contents, plan, count)
    nbytes = [sum(block.nbytes for block in part.alone) for part in parts]
    return {
        "arrays": len(plan.arrays),
        "TB": round(plan.write_bytes / 1e12, 2),
        "pieces": len(plan.blocks),
        "largest piece MiB": round(max(block.nbytes for block in plan.blocks) / (1 << 20), 1),
        "pieces of a worker": round(len(plan.blocks) / count),
        "most / mean bytes": round(max(nbytes) * count / sum(nbytes), 4),
        "plan CPU s": round(time.process_time() - begun, 1),
        "checkpoint described MiB": before,
        "peak MiB": _peak(),
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def run(options: Options) -> Iterator[Table]:
    rows = {}
    for count in WORKERS:
        command = [sys.executable, "-m", "benchmarks.scale", str(count)]
        rows[f"{count:,} workers"] = msgspec.json.decode(subprocess.check_output(command))
    yield Table("A trillion parameters with optimizer, converted by shares", rows)


if __name__ == "__main__":
    print(msgspec.json.encode(planned(int(sys.argv[1]))).decode())
