"""Many jobs at once, within a budget of bytes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

DEFAULT_BUDGET = 1 << 30

# From so many bytes on, chunks that are read in several blocks are held decoded. Of fewer, opening
# an array once more costs as much as decoding them.
HELD_BYTES = 4 << 20

# To hand a job to a thread costs some 0.1 ms, more than a small array does: so many bytes, or jobs,
# go together.
BATCH_BYTES = 4 << 20
BATCH_JOBS = 64


def threads() -> int:
    """How many jobs are worth having in flight at once."""
    return min(8, (os.cpu_count() or 1) + 1)


def run_bounded(jobs: Iterable[tuple[int, Callable[[], object]]], budget_bytes: int) -> None:
    """Run (cost in bytes, job) pairs in threads, as many at once as the budget and `threads()`
    allow.

    Neighbours that cost little are run as one. The first job that raises stops those not yet begun,
    and its error is raised here.
    """
    running: dict[Future[None], int] = {}

    def settle() -> None:
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            del running[future]
            future.result()

    with ThreadPoolExecutor(threads()) as pool:
        for cost, batch in _batches(jobs, min(BATCH_BYTES, budget_bytes // threads())):
            while running and (
                sum(running.values()) + cost > budget_bytes or len(running) >= threads()
            ):
                settle()
            running[pool.submit(_run_all, batch)] = cost
        while running:
            settle()


def in_order(
    jobs: Iterable[tuple[int, Callable[[], T]]], budget_bytes: int
) -> Generator[T, None, None]:
    """The results of (cost in bytes, job) pairs, in their order, while those that follow run in
    threads.

    A result counts against the budget until the next is asked for. The job waited for is always one
    that was begun.
    """
    begun: deque[tuple[int, Future[T]]] = deque()
    in_flight = 0
    with ThreadPoolExecutor(threads()) as pool:
        for cost, job in jobs:
            while begun and (in_flight + cost > budget_bytes or len(begun) >= threads()):
                yield begun[0][1].result()
                in_flight -= begun.popleft()[0]
            begun.append((cost, pool.submit(job)))
            in_flight += cost
        while begun:
            yield begun.popleft()[1].result()


def in_threads(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results of the jobs, in their order, of which `threads()` run at once. Each should
    hold little memory.
    """
    with ThreadPoolExecutor(threads()) as pool:
        yield from pool.map(lambda job: job(), jobs)


def _batches(
    jobs: Iterable[tuple[int, Callable[[], object]]], max_bytes: int
) -> Iterator[tuple[int, list[Callable[[], object]]]]:
    """Neighbouring jobs together, up to so many bytes and `BATCH_JOBS`; at least one."""
    batch: list[Callable[[], object]] = []
    total = 0
    for cost, job in jobs:
        if batch and (total + cost > max_bytes or len(batch) == BATCH_JOBS):
            yield total, batch
            batch, total = [], 0
        batch.append(job)
        total += cost
    if batch:
        yield total, batch


def _run_all(batch: list[Callable[[], object]]) -> None:
    for job in batch:
        job()
