"""Options of commands whose work other processes can do."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import click

from jax_ucp.errors import WorkerError

_WORKERS = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let N processes of this machine do the work; unsaid, threads of this one do.",
)
_SCHEDULER = click.option(
    "--scheduler",
    metavar="URL",
    help="Let the workers of a Dask scheduler do it: tcp://HOST:8786. They must see the same"
    " files by the same names.",
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
            raise click.UsageError(
                "--workers are processes of this machine, and --scheduler has its own: give one"
            )
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
        with _dask(scheduler) as executor:
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
        # each task is run, also where Dask has the result of one that looks the same
        yield client.get_executor(pure=False)
