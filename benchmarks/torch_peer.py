"""PyTorch's distributed checkpoint, in processes of a Python that has torch; rows of it are
absent without one.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.group import Group

WORKER = Path(__file__).parent / "torch_worker.py"


def group(python: str, ranks: int, work: Path) -> Group:
    """`ranks` processes that hold one sharded state, as DTensors on a one-dimensional mesh."""
    rendezvous = work / f"rendezvous_{ranks}"
    rendezvous.unlink(missing_ok=True)
    worker = [python, "-W", "ignore", str(WORKER)]
    return Group([[*worker, str(rank), str(ranks), str(rendezvous)] for rank in range(ranks)])
