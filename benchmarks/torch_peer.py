"""PyTorch's distributed checkpoint, in processes of a Python that has torch; rows of it are absent without one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.race import Sample

WORKER = Path(__file__).parent / "torch_worker.py"


class Group:
    """`ranks` processes that hold one sharded state, as DTensors on a one-dimensional mesh."""

    def __init__(self, python: str, ranks: int, rendezvous: Path):
        rendezvous.unlink(missing_ok=True)
        self.ranks = [
            subprocess.Popen(
                [python, "-W", "ignore", str(WORKER), str(rank), str(ranks), str(rendezvous)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def ask(self, **what: Any) -> Sample:
        """Let every rank do something; the wall clock of all together, the sum of their CPU."""
        begun = time.perf_counter()
        for rank in self.ranks:
            print(json.dumps(what), file=rank.stdin, flush=True)
        answers = [json.loads(rank.stdout.readline()) for rank in self.ranks]
        return Sample(time.perf_counter() - begun, sum(answer["cpu_s"] for answer in answers))

    def close(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)
            rank.stdout.close()


@contextmanager
def group(python: str, ranks: int, work: Path) -> Iterator[Group]:
    found = Group(python, ranks, work / f"rendezvous_{ranks}")
    try:
        yield found
    finally:
        found.close()
