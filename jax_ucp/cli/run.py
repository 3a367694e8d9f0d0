"""`jax-ucp run`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import click

from jax_ucp.orbax_import import ORBAX, patch_orbax

LAUNCHER = Path(__file__).parents[1] / "launcher"


def _print_launcher(ctx: click.Context, param: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(LAUNCHER)
        ctx.exit()


class _Program(click.Command):
    """A command whose own options end after `-m MODULE`, as with `python -m`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["-m"]:
            args[2:2] = ["--"]
        return super().parse_args(ctx, args)


@click.command(
    "run",
    cls=_Program,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-m", "module", metavar="MODULE", help="Run this module, as python -m does.")
@click.option(
    "--launcher",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_launcher,
    help="Print a folder, and end. With it in PYTHONPATH, every Python program is run so.",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(module: str | None, args: tuple[str, ...]) -> None:
    """Run a program, a file or with -m a module, with its arguments.

    Whatever it saves or restores by Orbax's managers is in the universal format, as within
    orbax_everywhere(); nothing of it is changed. The first line on stderr says what is patched. So
    MaxText's own command line keeps its checkpoints in it:

    jax-ucp run -m maxtext.trainers.pre_train.train base.yml run_name=first
    """
    if module is None and not args:
        raise click.UsageError("give a program to run: a file, or -m MODULE")
    patch_orbax()
    try:
        _run(module, args)
    except Exception as error:  # of the user's program: printed as Python would print it
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    if ORBAX not in sys.modules:
        click.echo(
            "jax_ucp: the program did not import Orbax, of which nothing was patched", err=True
        )


def _run(module: str | None, args: tuple[str, ...]) -> None:
    if module is None:
        program, *rest = args
        sys.argv = [program, *rest]
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
    else:
        sys.argv = [module, *args]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
