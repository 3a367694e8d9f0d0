"""Commands, and the arguments that a command is given."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import click

import jax_ucp
from jax_ucp.arguments import local_path
from jax_ucp.checkpoint import open_with
from jax_ucp.cli.options import COMMON, FEW, SECTIONS
from jax_ucp.errors import NotACheckpoint, TreeMismatch, WorkerError
from jax_ucp.options import Options

if TYPE_CHECKING:
    from jax_ucp.sharding.reads import HostMesh


@contextmanager
def executor_of(workers: int | None, scheduler: str | None) -> Iterator[Executor | None]:
    """Context with the executor that does the work; None for threads of this process."""
    if workers and scheduler:
        raise click.UsageError("--workers and --scheduler exclude each other: give one of them")
    if workers:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        # the threads of JAX, if it is loaded, do not exist in a forked process
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool
    elif scheduler:
        with _mpi() if scheduler == "mpi" else _dask(scheduler) as executor:
            yield executor
    else:
        yield None


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    """Context with the workers of a Dask scheduler. Raises WorkerError if it does not answer."""
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
        # every task is run, even if Dask has the result of an equal one
        yield client.get_executor(pure=False)


@contextmanager
def _mpi() -> Iterator[Executor]:
    """Context with the other ranks of this MPI job, each of which runs this command too. There, the
    context works for rank 0 until the end of the job, and then ends the command.
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


_Value = TypeVar("_Value", int, str)


class Arguments(SimpleNamespace):
    """The values of a command's arguments and options, by their names.

    With the options MESH, `mesh` is a HostMesh or None; with WORKERS, `executor` does the work,
    None for threads here.
    """

    def open(self, path: str) -> jax_ucp.Checkpoint:
        """The checkpoint at a path, opened and mapped by the options SOURCE."""
        mappings = self.load_mappings()
        checkpoint = self.open_unmapped(path, mappings)
        return self.mapped(checkpoint, mappings, params=self.params)

    def open_unmapped(
        self, path: str, mappings: Sequence[jax_ucp.Mapping] = (), model: str | None = None
    ) -> jax_ucp.Checkpoint:
        """The checkpoint at a path, not mapped yet; some of the sizes may be for `mappings`.

        `model` takes the place of the option `--model`.
        """
        if self.dequantize and self.no_dequantize:
            raise click.UsageError(
                "--dequantize and --no-dequantize contradict each other: give one of them"
            )
        options = Options.of(
            by_name("--size", self.sizes),
            self.spec,
            self.weights_only,
            self.on_conflict,
            False if self.no_dequantize else self.dequantize,
            self.optimizer_groups,
            self.model if model is None else model,
            self.step,
        )
        names = frozenset[str]().union(*(mapping.names for mapping in mappings))
        checkpoint = open_with(path, options, names)
        adapters = vars(self).get("merge")  # not every command merges
        return checkpoint.merge(*adapters) if adapters else checkpoint

    def load_mappings(
        self, its_own: Sequence[str] = ("config", "assume", "params", "inverse")
    ) -> list[jax_ucp.Mapping]:
        """The mappings of `--mapping` in order, or with `--inverse` their inverses. Raises
        UsageError if options that need a mapping (`its_own`) are given without one.
        """
        if self.mapping is not None:
            from jax_ucp.mapping.rules import inverse_chain

            is_file = local_path(self.mapping).is_file()  # with a comma in its name, perhaps
            names = [self.mapping] if is_file else map(str.strip, self.mapping.split(","))
            mappings = list(map(jax_ucp.Mapping.load, names))
            return inverse_chain(mappings) if self.inverse else mappings
        if any(getattr(self, name) not in (None, False, ()) for name in its_own):
            flags = " and ".join(f"--{name}" for name in its_own)
            raise click.UsageError(f"{flags} go with --mapping: give that too")
        return []

    def mapped(
        self,
        checkpoint: jax_ucp.Checkpoint,
        mappings: Sequence[jax_ucp.Mapping],
        params: str | None = None,
    ) -> jax_ucp.Checkpoint:
        """The checkpoint with these mappings applied in order."""
        for mapping in mappings:
            arguments = self.map_arguments(mapping, mappings)
            checkpoint = checkpoint.map(mapping, **arguments, params=params)
        return checkpoint

    def map_arguments(
        self, mapping: jax_ucp.Mapping, mappings: Sequence[jax_ucp.Mapping]
    ) -> dict[str, Any]:
        """The arguments of `Checkpoint.map` for one of the mappings: the sizes and assumptions that
        it has, and the config, unless a mapping before it makes one.
        """
        lengths = {name: n for name, n in self.sizes if name in mapping.names}
        at = mappings.index(mapping)
        has_config = any(before.config for before in mappings[:at])
        # an assumption that no mapping has is given to the last one, which refuses it
        of_others = {one.name for other in mappings if other != mapping for one in other.requires}
        own = {one.name for one in mapping.requires}
        if at == len(mappings) - 1:
            own |= set(self.assume) - of_others
        return {
            "sizes": lengths,
            "config": None if has_config else self.config,
            "assume": [name for name in self.assume if name in own],
        }

    @property
    def layout(self) -> dict[str, Any]:
        """The given options LAYOUT, as arguments of `Checkpoint.save`."""
        of_step = {"item": self.item, "custom_metadata": self.custom_metadata}
        for name, value in of_step.items():
            if value is not None and self.to_step is None:
                flag = name.replace("_", "-")
                raise click.UsageError(f"--{flag} goes with --to-step: give that too")
        variables = self.variables or None
        given = {"root": self.root, "variables": variables, "step": self.to_step, **of_step}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def save_mesh(self) -> dict[str, Any]:
        """The options MESH, as arguments of `Checkpoint.save`."""
        if self.mesh is None:
            return {}
        return {"mesh": self.mesh.sizes, "rules": self.rules, "hosts": self.mesh.hosts}


def command(
    name: str, *params: click.Parameter
) -> Callable[[Callable[[Arguments], None]], click.Command]:
    """A decorator that makes a command with these parameters of a function of its arguments."""

    def made(run: Callable[[Arguments], None]) -> click.Command:
        def callback(**values: Any) -> None:
            args = Arguments(**values)
            if "mesh" in values:
                args.mesh = _host_mesh(args)
            with executor_of(values.get("workers"), values.get("scheduler")) as executor:
                args.executor = executor
                run(args)

        return _Sectioned(name, params=list(params), callback=callback, help=run.__doc__)

    return made


class _Sectioned(click.Command):
    """A command whose help lists the most common options first, and others in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        section_of = {each: title for title, several in SECTIONS.items() for each in several}
        common = [each for name in COMMON for each in params if each.name == name]
        sections: dict[str, list[click.Option]] = {"Options": common}
        for each in filter(lambda each: each not in common, params):
            title = section_of.get(each, "Options") if len(params) > FEW else "Options"
            sections.setdefault(title, []).append(each)
        for title, several in sections.items():
            records = [record for each in several if (record := each.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _host_mesh(args: Arguments) -> HostMesh | None:
    if args.mesh is None:
        if args.rules or args.hosts != 1:
            raise click.UsageError("--rule and --hosts are for a mesh: give --mesh too")
        return None
    from jax_ucp.sharding.reads import HostMesh  # brings in jax, which nothing else here needs

    try:
        return HostMesh.of(args.mesh, args.hosts)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def by_name(option: str, pairs: Sequence[tuple[str, _Value]]) -> dict[str, _Value]:
    """The values of a repeated option by name. Raises UsageError for a name with two values."""
    values: dict[str, _Value] = {}
    for name, value in pairs:
        if values.setdefault(name, value) != value:
            raise click.UsageError(f"{option} gives {name} twice: {values[name]} and {value}")
    return values


def imported(target: str, what: str) -> Any:
    """The result of the function that `module:function` names; `what` describes it in errors.

    Raises NotACheckpoint if the name has another form, TreeMismatch if the function cannot be
    imported or called.
    """
    local_path(target)
    module, colon, function = target.partition(":")
    if not colon:
        raise NotACheckpoint(
            f"{target} is neither a path that exists nor a function; write module:function"
        )
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise TreeMismatch(f"{target} gives no {what}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
