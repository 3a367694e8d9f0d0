"""Tasks: the pieces of a conversion, an export or a verification, run by threads here or by any
`concurrent.futures.Executor`.

A task describes its work in integers and names. The process that runs it has the checkpoint open,
or is sent its contents, a value, with the first tasks of the job.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar

from jax_ucp.arrays.budget import DEFAULT_BUDGET, Submission, batches, run_bounded, submit_bounded
from jax_ucp.arrays.checks import Check
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.proved import Proofs
from jax_ucp.errors import CorruptData, UCPError, WorkerError
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import Files
from jax_ucp.garbage import gc_paused

# Bytes or boxes that a task for another process reads, about: handing it over costs some
# milliseconds, and all of a task is done again if its process ends.
TASK_BYTES = 64 << 20
TASK_BOXES = 256

# How many tasks wait for an executor at once; for other processes so many for each that has done
# one, lest many tasks come to a process before the contents do.
TASKS_IN_FLIGHT, TASKS_A_PROCESS = 4096, 4
# How many messages have the contents at first, and after one came to a process that lacks them.
SENT_AT_ONCE = 16
# What each process would have of a checkpoint whose arrays are in memory: a message is no file.
MAX_MESSAGE_BYTES = 1 << 30

T = TypeVar("T")
AnyTask = TypeVar("AnyTask", bound="Task[Any]")
T_co = TypeVar("T_co", covariant=True)


class OpenedJob:
    """A checkpoint that this process has open for a job, or was sent.

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

    def take(self) -> Mapping[int, Sequence[Any]]:
        """The observations of the proofs since the last call."""
        return self._proofs.take() if self._proofs else {}

    def close(self) -> None:
        """Stop observing what is read."""
        self._watching.close()

    @cached_property
    def checks(self) -> Sequence[Check]:
        """The checks of the checkpoint, to be run one by one."""
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
    def cost(self) -> int: ...

    def run(self, opened: OpenedJob) -> T_co: ...


@dataclass(frozen=True)
class Done(Generic[T]):
    """The result of a task, with the observations of its reads if it ran elsewhere; or the error
    that stopped it; or that the process lacks the contents, and did nothing.

    An executor's own error is raised instead, so that it is not taken for an error of a task.
    """

    result: T | None = None
    seen: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    error: Exception | None = None
    lacks_contents: bool = False
    process: str = field(default_factory=lambda: f"{_IMPORT}-{os.getpid()}")


_IMPORT = uuid.uuid4().hex  # which processes of several machines do not share
# By the id of a job: those that this process shares out, and the last one whose tasks it ran.
_shared_out: dict[str, OpenedJob] = {}
_received: dict[str, OpenedJob] = {}
_receiving = threading.Lock()


def perform(job: str, task: Task[T], message: bytes | None) -> Done[T]:
    """The result of a task that is run in this process, or its error in a form that can be sent."""
    try:
        if opened := _shared_out.get(job):
            return Done(task.run(opened))
        opened = _opened(job, message)
        if opened is None:
            return Done(lacks_contents=True)
        with opened.turn:
            try:
                result = task.run(opened)
            finally:  # the observations of a task that failed are dropped
                seen = opened.take()
            return Done(result, seen)
    except Exception as error:
        return Done(error=_portable(error))


class TooLarge(Exception):
    """A checkpoint is more than `MAX_MESSAGE_BYTES` pickled."""


class _BoundedBytes(io.BytesIO):
    """Bytes in memory that are refused where they are too many."""

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_MESSAGE_BYTES:
            raise TooLarge
        return super().write(data)


def _message(contents: Contents) -> bytes:
    """All of a checkpoint that tasks need. Raises WorkerError for what cannot be sent."""
    again = "Do it without the executor, or with one of threads"
    needed = Contents(
        contents.format,
        contents.path,
        (),
        contents.arrays,
        claims=contents.claims,
        files=contents.files,
    )
    data = _BoundedBytes()
    try:
        with gc_paused():
            pickle.Pickler(data, pickle.HIGHEST_PROTOCOL).dump(needed)
    except TooLarge as error:
        raise WorkerError(
            f"{contents.path}: each process would be sent more than {MAX_MESSAGE_BYTES:,} bytes,"
            f" arrays in memory among them; that is not done. {again}, or save it first"
        ) from error
    except Exception as error:  # whatever a __reduce__ raises
        raise WorkerError(
            f"{contents.path}: this checkpoint cannot be sent to other processes, because not all"
            f" that it is made of can be pickled ({type(error).__name__}: {error}). {again}"
        ) from error
    return zlib.compress(data.getbuffer(), 1)


def _opened(job: str, message: bytes | None) -> OpenedJob | None:
    """The checkpoint that a message has, or an earlier one had; None if there was none. Raises
    CorruptData where its files are not the same here.
    """
    with _receiving:
        if job not in _received and message is not None:
            with gc_paused():
                contents: Contents = pickle.loads(zlib.decompress(message))
            if changes := list(contents.files.changes()):
                raise CorruptData(
                    f"{contents.path} is another checkpoint for this process than for the one that"
                    " shares out the work: it was written to, or is not the same folder on both."
                    f" Open it again when nothing writes to it: {changes[0]}"
                )
            for other in _received.values():
                other.close()
            _received.clear()
            _received[job] = OpenedJob(contents, is_elsewhere=True)
        return _received.get(job)


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

    def __init__(
        self,
        job: str,
        opened: OpenedJob,
        executor: Executor | None,
        message: bytes | None,
        again: str,
    ):
        self.opened = opened
        self.is_here = message is None  # whether tasks run in this process
        self._job, self._executor, self._again = job, executor, again
        self._message, self._to_send = message, SENT_AT_ONCE
        self._processes: set[str] = set()

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

        def run_here(task: AnyTask) -> None:
            finish(task, task.run(self.opened))

        if self._executor is None:
            run_bounded(
                ((task.cost, partial(run_here, task)) for task in tasks),
                budget_bytes,
                remote or self.opened.contents.files.is_remote,
            )
            return
        with _naming_failure(self._again):
            submit_bounded(
                self._executor,
                (self._submission(task, finish) for task in tasks),
                budget_bytes if self.is_here else math.inf,
                self._tasks_in_flight,
            )

    def _tasks_in_flight(self) -> int:
        if self.is_here:
            return TASKS_IN_FLIGHT
        several = max(len(self._processes), SENT_AT_ONCE // TASKS_A_PROCESS)
        return min(TASKS_IN_FLIGHT, several * TASKS_A_PROCESS)

    def _submission(
        self, task: AnyTask, finish: Callable[[AnyTask, Any], None]
    ) -> Submission[Done[Any]]:
        message = self._message if self._to_send > 0 else None
        self._to_send -= 1
        work = partial(perform, self._job, task, message)
        return Submission(task.cost, work, partial(self._finish, task, finish))

    def _finish(
        self, task: AnyTask, finish: Callable[[AnyTask, Any], None], done: Done[Any]
    ) -> Submission[Done[Any]] | None:
        """Give on the result of a task; or return it to be submitted again with the contents."""
        if done.lacks_contents:
            self._to_send = SENT_AT_ONCE
            return self._submission(task, finish)
        self._processes.add(done.process)
        if done.error is not None:
            raise _NotOfExecutor(done.error)
        if done.seen:
            self.opened.proofs.add(done.seen)
        try:
            finish(task, done.result)
        except Exception as error:
            raise _NotOfExecutor(error) from error
        return None


@contextmanager
def shared_out(
    contents: Contents,
    executor: Executor | None,
    again: str,
    ours: Callable[[Check], bool] = lambda check: True,
) -> Iterator[Coordinator]:
    """Context of a job on a checkpoint whose tasks the executor runs, or threads here. One that
    cannot run them is refused first, before anything is written.

    `again` is the advice if a worker's process has ended. `ours` selects the checks to be proved.

    Raises WorkerError if the checkpoint cannot be sent to the executor's processes, or these were
    forked from this one, or do not start.
    """
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            f"executor={executor!r:.80} should be a concurrent.futures.Executor, such as"
            " ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))"
        )
    opened = OpenedJob(contents, ours=ours)
    job = uuid.uuid4().hex
    _shared_out[job] = opened
    message = None
    try:
        if executor is not None:
            with _naming_failure(_NOT_STARTED):
                place = executor.submit(_place, job).result()
            if place == "forked":
                raise WorkerError(
                    "the executor forks this process, whose threads (JAX has some) do not live on"
                    " in the copy: give it mp_context=multiprocessing.get_context('spawn')"
                )
            message = None if place == "here" else _message(contents)
        yield Coordinator(job, opened, executor, message, again)
    finally:
        del _shared_out[job]


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
    """Checks to be run, by their places among all."""

    places: tuple[int, ...]
    cost: int

    def run(self, opened: OpenedJob) -> list[str | None]:
        return [opened.checks[i].run() for i in self.places]


def verify(contents: Contents, executor: Executor | None) -> Iterator[tuple[str, str | None]]:
    """The label of each check of data that is stored twice or has a checksum, and its fault."""
    if executor is None:
        yield from contents.verify()
        return
    faults: dict[int, str | None] = {}

    def finish(task: CheckTask, of_checks: Sequence[str | None]) -> None:
        faults.update(zip(task.places, of_checks, strict=True))

    with shared_out(contents, executor, "Verify again, with a new executor.") as coordinator:
        checks = coordinator.opened.checks
        together = batches(range(len(checks)), lambda i: checks[i].nbytes, TASK_BYTES, TASK_BOXES)
        tasks = (CheckTask(tuple(some), max(checks[i].memory for i in some)) for some in together)
        coordinator.run(tasks, finish, DEFAULT_BUDGET)
    for i, check in enumerate(checks):
        yield check.label, faults[i]
