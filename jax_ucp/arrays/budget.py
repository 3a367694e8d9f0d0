"""Many jobs at once, within a budget of bytes."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

DEFAULT_BUDGET = 1 << 30

# From so many bytes on, chunks that are read in several blocks are held decoded. Of fewer, opening
# an array once more costs as much as decoding them.
HELD_BYTES = 4 << 20

# To hand a job to a thread costs some 0.1 ms, more than a small array does: so many bytes, or jobs,
# go together.
BATCH_BYTES = 4 << 20
BATCH_JOBS = 64

# Of jobs that read or write over a network.
REMOTE_JOBS = 64


def fair_share(sizes: Sequence[int], total: int) -> int:
    """The size to which those that are larger are cut, for all together to be at most `total`.

    >>> fair_share([10, 20, 300, 400], 230), fair_share([10, 20], 230)
    (100, 20)
    """
    left = total
    for sizes_left, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if size > left // sizes_left:
            return max(1, left // sizes_left)
        left -= size
    return max(sizes, default=1)


def threads(remote: bool = False) -> int:
    """How many jobs are worth having in flight at once. Those that wait for a network take no
    processor.
    """
    return REMOTE_JOBS if remote else min(8, (os.cpu_count() or 1) + 1)


def run_bounded(
    jobs: Iterable[tuple[int, Callable[[], object]]], budget_bytes: int, remote: bool = False
) -> None:
    """Run (cost in bytes, job) pairs in threads, as many at once as the budget and
    `threads(remote)` allow.

    Neighbours that cost little are run as one, unless each waits for a network. The first job that
    raises stops those not yet begun, and its error is raised here.
    """

    def run_all(batch: list[tuple[int, Callable[[], object]]]) -> None:
        for _, job in batch:
            job()

    max_bytes = min(BATCH_BYTES, budget_bytes // threads())
    with ThreadPoolExecutor(threads(remote)) as pool:
        submissions = (
            Submission(sum(cost for cost, _ in batch), partial(run_all, batch))
            for batch in batches(
                jobs, operator.itemgetter(0), max_bytes, 1 if remote else BATCH_JOBS
            )
        )
        submit_bounded(pool, submissions, budget_bytes, lambda: threads(remote))


class Submission(NamedTuple, Generic[T]):
    """Work for an executor: its cost, what is run, and what its result is given to here, which may
    return work to be submitted next.
    """

    cost: int
    work: Callable[[], T]
    finish: Callable[[T], Submission[T] | None] = lambda result: None


def submit_bounded(
    executor: Executor,
    submissions: Iterable[Submission[T]],
    max_cost: float,
    max_count: Callable[[], int],
) -> None:
    """Submit work in its order, as much at once as may cost `max_cost` together, at most
    `max_count()`, at least one.

    Results are handed on here, in the order in which they come. At the first error what has not
    begun is cancelled and what has is waited for; then the error is raised.
    """
    running: dict[Future[T], Submission[T]] = {}
    done: SimpleQueue[Future[T]] = SimpleQueue()
    in_flight = 0

    def submit(submission: Submission[T]) -> int:
        future = executor.submit(submission.work)
        running[future] = submission
        future.add_done_callback(done.put)
        return submission.cost

    def settle() -> int:
        future = done.get()
        submission = running.pop(future)
        following = submission.finish(future.result())
        return submission.cost - (submit(following) if following else 0)

    try:
        for submission in submissions:
            while running and (
                in_flight + submission.cost > max_cost or len(running) >= max_count()
            ):
                in_flight -= settle()
            in_flight += submit(submission)
        while running:
            settle()
    finally:
        wait([future for future in running if not future.cancel()])


def in_order(
    jobs: Iterable[tuple[int, Callable[[], T]]], budget_bytes: int, remote: bool = False
) -> Generator[T, None, None]:
    """The results of (cost in bytes, job) pairs, in their order, while those that follow run in
    threads.

    A result counts against the budget until the next is asked for. The job waited for is always one
    that was begun.
    """
    begun: deque[tuple[int, Future[T]]] = deque()
    in_flight = 0
    with ThreadPoolExecutor(threads(remote)) as pool:
        for cost, job in jobs:
            while begun and (in_flight + cost > budget_bytes or len(begun) >= threads(remote)):
                yield begun[0][1].result()
                in_flight -= begun.popleft()[0]
            begun.append((cost, pool.submit(job)))
            in_flight += cost
        while begun:
            yield begun.popleft()[1].result()


def in_threads(jobs: Sequence[Callable[[], T]], remote: bool = False) -> Iterator[T]:
    """The results of the jobs, in their order, of which `threads(remote)` run at once. Each should
    hold little memory.
    """
    # Thousands of small ones are handed over some at a time, which costs less than each.
    some = max(1, len(jobs) // (64 * threads(remote)))
    groups = [jobs[at : at + some] for at in range(0, len(jobs), some)]
    with ThreadPoolExecutor(threads(remote)) as pool:
        for results in pool.map(lambda group: [job() for job in group], groups):
            yield from results


def batches(
    items: Iterable[T],
    cost: Callable[[T], int],
    max_cost: int,
    max_count: int,
    belong: Callable[[T, T], bool] | None = None,
) -> Iterator[list[T]]:
    """Neighbours together, up to so much in all and so many; at least one, and with it what belongs
    to the one before.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        is_full = batch and (total + cost(item) > max_cost or len(batch) >= max_count)
        if is_full and not (belong and belong(batch[-1], item)):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += cost(item)
    if batch:
        yield batch
