"""Options of commands whose work other processes can do."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import click

from jax_ucp.errors import WorkerError

_WORKERS = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use N processes of this machine; by default the work is done by threads.",
)
_SCHEDULER = click.option(
    "--scheduler",
    metavar="URL|mpi",
    help="Use the workers of a Dask scheduler (tcp://HOST:8786) or, with `mpi`, the other ranks of"
    " the mpiexec that started this command. All must see the same files at the same paths.",
)


class _ShareType(click.ParamType):
    """I/N, or `auto` for what the scheduler that started this process says."""

    name = "share"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        word, _, count = value.partition("/")
        if word == "auto":
            said, counted = _from_scheduler(os.environ)
            word, count = said, count or counted
        if not (word.isdecimal() and count.isdecimal() and int(word) < int(count)):
            self.fail(
                f"{value!r} is not a share: give I/N with I from 0 to N - 1, or auto if SLURM or"
                " MPI started this process (auto/N for an indexed job of Kubernetes)",
                param,
                ctx,
            )
        return int(word), int(count)


def _from_scheduler(environment: Mapping[str, str]) -> tuple[str, str]:
    """The index from 0 on, and the count, of this process among those started with it; empty where
    nothing says it.

    Sources: sbatch(1) and srun(1) of SLURM 24.05; "Indexed Job" of Kubernetes 1.31, which does not
    tell the count; mpirun(1) of Open MPI 5; PMI of MPICH 4.
    """
    for index, count, first in _SCHEDULERS:
        begin = environment.get(first, "0")
        if environment.get(index, "").isdecimal() and begin.isdecimal():
            return str(int(environment[index]) - int(begin)), environment.get(count, "")
    return "", ""


# Index, count, first index.
_SCHEDULERS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", "", ""),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
    ("PMI_RANK", "PMI_SIZE", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", ""),
)

share_option = click.option(
    "--worker",
    "share",
    type=_ShareType(),
    metavar="I/N",
    help="Do share I of N, I from 0 to N - 1; start one such process for each share. The last to"
    " end commits. `auto` takes both numbers from a SLURM array or MPI, `auto/N` takes I from an"
    " indexed job of Kubernetes.",
)

progress_option = click.option(
    "--progress",
    "progress_style",
    type=click.Choice(["bar", "json"]),
    default="bar",
    show_default=True,
    help="How to show progress: a bar on a terminal, or a line of JSON on stderr each second. With"
    " --worker, of this share alone.",
)


def worker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--workers` and `--scheduler`; the command gets an `executor`, or None for threads here."""

    @_WORKERS
    @_SCHEDULER
    @functools.wraps(command)
    def with_executor(
        *args: Any, workers: int | None, scheduler: str | None, **options: Any
    ) -> Any:
        if workers and scheduler:
            raise click.UsageError("--workers and --scheduler exclude each other: give one of them")
        with _executor(workers, scheduler) as executor:
            return command(*args, executor=executor, **options)

    return with_executor


@contextmanager
def _executor(workers: int | None, scheduler: str | None) -> Iterator[Executor | None]:
    if workers:
        # JAX's threads, if it is loaded, do not live on in a fork
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool
    elif scheduler:
        with _mpi() if scheduler == "mpi" else _dask(scheduler) as executor:
            yield executor
    else:
        yield None


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    """The workers of a Dask scheduler. Raises WorkerError where it is not reached."""
    try:
        from distributed import Client
    except ImportError:
        raise WorkerError("--scheduler needs Dask: pip install 'jax_ucp[dask]'") from None
    try:
        client = Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"no Dask scheduler answers at {address}: {type(error).__name__}: {error}"
        ) from None
    with client:
        if not client.scheduler_info(n_workers=1)["workers"]:
            click.echo(f"{address} has no worker yet: waiting for the first", err=True)
        # each task is run, also where Dask has the result of one that looks the same
        yield client.get_executor(pure=False)


@contextmanager
def _mpi() -> Iterator[Executor]:
    """The other ranks of this MPI job, each of which runs this command too. They work here until
    rank 0 has no more for them, and then end.
    """
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:  # of mpi4py, or of a library that it does not find
        raise WorkerError(
            f"--scheduler mpi needs mpi4py and an MPI library: pip install 'jax_ucp[mpi]' ({error})"
        ) from None
    executor: Any  # whose type is not that which `with` gives
    with MPICommExecutor(MPI.COMM_WORLD) as executor:
        if executor is not None:
            yield executor
    if executor is None:
        raise click.exceptions.Exit(0)
