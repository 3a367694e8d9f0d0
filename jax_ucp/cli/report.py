"""`jax-ucp report`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from jax_ucp.cli.options import (
    Renames,
    Size,
    budget,
    mesh_arguments,
    mesh_options,
    once,
    open_checkpoint,
    source_options,
)
from jax_ucp.cli.output import console, progress, to_stderr
from jax_ucp.inspection.statistics import MAX_READ

if TYPE_CHECKING:
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostMesh


@click.command()
@click.argument("path")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="report.html",
    show_default=True,
    help="The file to write.",
)
@click.option("--against", metavar="PATH", help="Another checkpoint to compare it with.")
@click.option(
    "--rename",
    type=Renames(),
    multiple=True,
    help="With --against: labels that begin with FIRST here begin with SECOND there; may be"
    " repeated.",
)
@click.option(
    "--headers",
    is_flag=True,
    help="Read metadata and a small sample; the page then has no statistics.",
)
@click.option(
    "--sample-above",
    type=Size(),
    default=MAX_READ,
    show_default="64GiB",
    help="If there are more bytes than this, sample the large arrays.",
)
@mesh_options
@source_options
@budget
def report(
    path: str,
    output: str,
    against: str | None,
    rename: tuple[tuple[str, str], ...],
    headers: bool,
    sample_above: int,
    mesh: HostMesh | None,
    rules: tuple[Rule, ...],
    budget: int,
    **source: Any,
) -> None:
    """Write a web page about the checkpoint at PATH: one file, which needs no network.

    The page has a tree of the arrays with a search, bytes by module, where each array is stored,
    and statistics by depth; with --mesh, which device holds what; with --against, what differs.
    Exit code 1 if an array cannot be read; the page says why.
    """
    if rename and against is None:
        raise click.UsageError("--rename is for --against: give that too")
    checkpoint = open_checkpoint(path, **source)
    with progress("reading", 0 if headers else checkpoint.nbytes) as meter:
        page = checkpoint.report(
            against=against,
            rename=once("--rename", rename),
            **mesh_arguments(mesh, rules),
            headers=headers,
            max_read_bytes=sample_above,
            budget_bytes=budget,
            progress=meter.advance,
        )
    page.save(output)
    for fault in page.faults:
        to_stderr.print(f"fault: {fault}")
    console.print(f"{output}: a page about {checkpoint.path}")
    if page.faults:
        sys.exit(1)
