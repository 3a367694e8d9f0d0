"""Tasks: the pieces of a conversion, an export or a verification, run by threads here or by any
`concurrent.futures.Executor`.

A task describes its work in integers and names. The process that runs it has the checkpoint open,
or opens it for the first task of the job that it gets.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar

import xxhash

from jax_ucp.arrays.budget import DEFAULT_BUDGET, Submission, batches, run_bounded, submit_bounded
from jax_ucp.arrays.checks import Check
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.proved import Proofs, only_ones
from jax_ucp.errors import CorruptData, UCPError, WorkerError
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import Files

# Bytes or boxes that a task for another process reads, about: handing it over costs some
# milliseconds, and all of a task is done again if its process ends.
TASK_BYTES = 64 << 20
TASK_BOXES = 256

# The number of tasks that wait for other processes at once.
TASKS_IN_FLIGHT = 4096

# Opens a checkpoint as it was opened here: a value that can be pickled.
Opener = Callable[[], Contents]
T = TypeVar("T")
AnyTask = TypeVar("AnyTask", bound="Task[Any]")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Workers:
    """The place where tasks run: an executor, or threads here. Other processes of an executor need
    an `opener`, which exists for a checkpoint that can be opened by its path.
    """

    executor: Executor | None = None
    opener: Opener | None = None

    def __post_init__(self) -> None:
        if self.executor is not None and not isinstance(self.executor, Executor):
            raise TypeError(
                f"executor={self.executor!r:.80} should be a concurrent.futures.Executor, such as"
                " ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))"
            )


HERE = Workers()


@dataclass(frozen=True)
class Job:
    """The common part of a job's tasks: how a process opens their checkpoint, and the digest of the
    identity that it must find.
    """

    id: str
    opener: Opener | None = None
    identity: str = ""

    def open(self) -> OpenedJob:
        """The checkpoint as this process opens it. Raises CorruptData if it has changed."""
        assert self.opener is not None, "tasks go to other processes only with an opener"
        contents = self.opener()
        if _identity(contents) != self.identity:
            raise CorruptData(
                f"{contents.path} is another checkpoint for this process than for the one that"
                " shares out the work: it was written to, or is not the same folder on both. Open"
                " it again when nothing writes to it"
            )
        return OpenedJob(contents, is_elsewhere=True)


class OpenedJob:
    """A checkpoint that this process has open for a job.

    `is_elsewhere` is true in a process that only runs tasks: there the observations of each task
    must be handed over, and its writes must be durable when it ends.
    """

    def __init__(
        self,
        contents: Contents,
        is_elsewhere: bool = False,
        ours: Callable[[Check], bool] = lambda check: True,
    ):
        self.contents = contents
        self.is_elsewhere = is_elsewhere
        self._ours = ours
        self.process = os.getpid()
        # Elsewhere tasks run one at a time, so that the observations of each are known.
        self.turn = threading.Lock()
        self._files: dict[str, Files] = {}
        self._watching = ExitStack()
        self._proofs: Proofs | None = None

    @property
    def proofs(self) -> Proofs:
        """The proofs of the checkpoint while it is read; elsewhere, from their first use on."""
        if self._proofs is None:
            self._proofs = Proofs(self.contents, self.is_elsewhere, self._ours)
            if self.is_elsewhere:
                self._watching.enter_context(self._proofs.watching())
        return self._proofs

    def take(self) -> Mapping[str, Sequence[Any]]:
        """The observations of the proofs since the last call."""
        return self._proofs.take() if self._proofs else {}

    @cached_property
    def checks(self) -> Mapping[str, Check]:
        """The checks of the checkpoint by name, to be run one by one; without those that share a
        name.
        """
        return only_ones((check.name, check) for check in self.every_check)

    @cached_property
    def every_check(self) -> Sequence[Check]:
        return list(self.contents.checks("full"))

    def files(self, root: str) -> Files:
        """A directory that tasks write to, opened once."""
        return self._files.setdefault(root, file_path(root).folder())


class Task(Protocol[T_co]):
    """A piece of work that depends on no other: a small value that can be pickled.

    `cost` is the memory it takes, in bytes; the result of `run` is small too. A task whose reads
    are to prove something first uses `opened.proofs`.
    """

    @property
    def job(self) -> Job: ...

    @property
    def cost(self) -> int: ...

    def run(self, opened: OpenedJob) -> T_co: ...


@dataclass(frozen=True)
class Done(Generic[T]):
    """The result of a task, with the observations of its reads if it ran elsewhere; or the error
    that stopped it.

    An executor's own error is raised instead, so that it is not taken for an error of a task.
    """

    result: T | None = None
    seen: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    error: Exception | None = None


# By the id of a job: those that this process shares out, and the last one whose tasks it ran.
_shared_out: dict[str, OpenedJob] = {}
_reopened: dict[str, OpenedJob] = {}
_reopening = threading.Lock()


def perform(task: Task[T]) -> Done[T]:
    """The result of a task, run in this process, whichever it is. Its error is returned in a form
    that can be sent back.
    """
    try:
        if opened := _shared_out.get(task.job.id):
            return Done(task.run(opened))
        opened = _opened(task.job)
        with opened.turn:
            try:
                result = task.run(opened)
            finally:  # the observations of a task that failed are dropped
                seen = opened.take()
            return Done(result, seen)
    except Exception as error:
        return Done(error=_portable(error))


def _opened(job: Job) -> OpenedJob:
    with _reopening:
        if job.id not in _reopened:
            _reopened.clear()
            _reopened[job.id] = job.open()
        return _reopened[job.id]


def _portable(error: Exception) -> Exception:
    """The error, or a WorkerError with its text if pickling changes it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return WorkerError(f"{type(error).__name__}: {error}")


def _place(job_id: str) -> str:
    """The place where an executor runs this call: `here`, `forked` or `elsewhere`."""
    opened = _shared_out.get(job_id)
    if opened is None:
        return "elsewhere"
    return "here" if opened.process == os.getpid() else "forked"


class Coordinator:
    """A coordinator, which shares out the tasks of one job and receives their results."""

    def __init__(self, job: Job, opened: OpenedJob, workers: Workers, is_here: bool, again: str):
        self.job = job
        self.opened = opened
        self.is_here = is_here  # whether tasks run in this process
        self._executor = workers.executor
        self._again = again

    def run(
        self,
        tasks: Iterable[AnyTask],
        finish: Callable[[AnyTask, Any], None],
        budget_bytes: int,
        remote: bool = False,
    ) -> None:
        """Run all tasks. `finish` is called with each task that is done and its result, by several
        threads at once if tasks run here. `remote` tasks write over a network.

        Tasks that run here cost at most `budget_bytes` together. The first error stops those not
        yet begun and is raised here.
        """
        if self._executor is None:
            run_bounded(
                ((task.cost, partial(self._run_here, task, finish)) for task in tasks),
                budget_bytes,
                remote or self.opened.contents.files.is_remote,
            )
            return
        submissions = (
            Submission(task.cost, partial(perform, task), partial(self._finish, task, finish))
            for task in tasks
        )
        with _naming_failure(self._again):
            submit_bounded(
                self._executor,
                submissions,
                budget_bytes if self.is_here else math.inf,
                TASKS_IN_FLIGHT,
            )

    def _run_here(self, task: AnyTask, finish: Callable[[AnyTask, Any], None]) -> None:
        finish(task, task.run(self.opened))

    def _finish(
        self, task: AnyTask, finish: Callable[[AnyTask, Any], None], done: Done[Any]
    ) -> None:
        if done.error is not None:
            raise _NotOfExecutor(done.error)
        if done.seen:
            self.opened.proofs.add(done.seen)
        try:
            finish(task, done.result)
        except Exception as error:
            raise _NotOfExecutor(error) from error


@contextmanager
def shared_out(
    contents: Contents,
    workers: Workers,
    again: str,
    ours: Callable[[Check], bool] = lambda check: True,
) -> Iterator[Coordinator]:
    """Context of a job on a checkpoint whose tasks the workers run. Workers that cannot run them
    are refused first, before anything is written.

    `again` is the advice if a worker's process has ended. `ours` selects the checks to be proved.

    Raises WorkerError if the executor's processes cannot open the checkpoint, were forked from this
    one, or do not start.
    """
    opened = OpenedJob(contents, ours=ours)
    job = Job(uuid.uuid4().hex)
    _shared_out[job.id] = opened
    try:
        is_here = workers.executor is None or _runs_here(workers.executor, job.id)
        if not is_here:
            if workers.opener is None:
                raise WorkerError(
                    f"{contents.path}: other processes cannot open this checkpoint, which is not"
                    " what a path and options of `open` and `map` give, but a tree in memory, or"
                    " made from one by functions. Do it without the executor, or with one of"
                    " threads"
                )
            try:
                pickle.dumps(workers.opener)
            except Exception as error:  # whatever a __reduce__ raises
                raise WorkerError(
                    f"{contents.path}: other processes cannot open this checkpoint, because what"
                    f" `open` or `map` were given cannot be pickled ({type(error).__name__}:"
                    f" {error}). Do it without the executor, or with one of threads, or give what"
                    " can be pickled, such as files"
                ) from error
            job = Job(job.id, workers.opener, _identity(contents))
        yield Coordinator(job, opened, workers, is_here, again)
    finally:
        del _shared_out[job.id]


def _runs_here(executor: Executor, job_id: str) -> bool:
    with _naming_failure(_NOT_STARTED):
        place = executor.submit(_place, job_id).result()
    if place == "forked":
        raise WorkerError(
            "the executor forks this process, whose threads (JAX has some) do not live on in the"
            " copy: give it mp_context=multiprocessing.get_context('spawn')"
        )
    return place == "here"


def _identity(contents: Contents) -> str:
    return xxhash.xxh3_128_hexdigest(repr(contents.identity()).encode())


_NOT_STARTED = (
    "None has begun its work. A script that gives ProcessPoolExecutor work does so below"
    ' `if __name__ == "__main__":`, because its processes import it'
)


class _NotOfExecutor(Exception):
    """A carrier for the error of a task or of `finish`, as opposed to one of the executor."""

    def __init__(self, error: Exception):
        self.error = error


@contextmanager
def _naming_failure(again: str) -> Iterator[None]:
    """Raise WorkerError, with the advice `again`, if the executor itself failed: one of its
    processes has ended, or cannot be reached.
    """
    try:
        yield
    except _NotOfExecutor as other:
        raise other.error from other.error.__cause__
    except UCPError:
        raise
    except BrokenExecutor as error:
        raise WorkerError(
            f"a process of the executor has ended before its work was done, killed (perhaps for its"
            f" memory) or crashed: {type(error).__name__}: {error} {again}"
        ) from error
    except Exception as error:
        raise WorkerError(
            "the executor could not have the work done. Each of its processes needs jax_ucp, of the"
            f" same version as here: {type(error).__name__}: {error} {again}"
        ) from error


@dataclass(frozen=True)
class CheckTask:
    """Checks to be run, by name."""

    job: Job
    names: tuple[str, ...]
    cost: int

    def run(self, opened: OpenedJob) -> list[str | None]:
        return [opened.checks[name].run() for name in self.names]


def verify(contents: Contents, workers: Workers) -> Iterator[tuple[str, str | None]]:
    """Compare all data that is stored twice or has a checksum. Yields (label of the check, its
    fault or None).
    """
    if workers.executor is None:
        yield from contents.verify()
        return
    faults: dict[str, str | None] = {}

    def finish(task: CheckTask, found: Sequence[str | None]) -> None:
        faults.update(zip(task.names, found, strict=True))

    with shared_out(contents, workers, "Verify again, with a new executor.") as coordinator:
        opened = coordinator.opened
        together = batches(
            opened.checks.values(), lambda check: check.nbytes, TASK_BYTES, TASK_BOXES
        )
        tasks = (
            CheckTask(
                coordinator.job,
                tuple(check.name for check in some),
                max(check.memory for check in some),
            )
            for some in together
        )
        coordinator.run(tasks, finish, DEFAULT_BUDGET)
    # Checks that share a name run here: elsewhere one could be taken for another.
    for check in opened.every_check:
        yield check.label, faults[check.name] if check.name in faults else check.run()
