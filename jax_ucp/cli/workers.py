"""Executors for commands whose work other processes can do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import click

from jax_ucp.errors import WorkerError


@contextmanager
def executor_of(workers: int | None, scheduler: str | None) -> Iterator[Executor | None]:
    """The executor that does the work; None for threads of this process."""
    if workers and scheduler:
        raise click.UsageError("--workers and --scheduler exclude each other: give one of them")
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
