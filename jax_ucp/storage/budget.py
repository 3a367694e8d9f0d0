"""Many jobs at once, within a budget of bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

DEFAULT_BUDGET = 1 << 30


def threads() -> int:
    """How many jobs are worth having in flight at once."""
    return min(8, (os.cpu_count() or 1) + 1)


def run_bounded(jobs: Iterable[tuple[int, Callable[[], object]]], budget_bytes: int) -> None:
    """Run (cost in bytes, job) pairs in threads, as many at once as the budget and `threads()` allow.

    The first job that raises stops those not yet begun, and its error is raised here.
    """
    running: dict[Future[object], int] = {}

    def settle() -> None:
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            del running[future]
            future.result()

    with ThreadPoolExecutor(threads()) as pool:
        for cost, job in jobs:
            while running and (sum(running.values()) + cost > budget_bytes or len(running) >= threads()):
                settle()
            running[pool.submit(job)] = cost
        while running:
            settle()
