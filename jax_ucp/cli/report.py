"""`jax-ucp report`."""

from __future__ import annotations

import sys

import click

from jax_ucp.cli.command import Arguments, by_name, command
from jax_ucp.cli.options import BUDGET, MESH, SOURCE, argument, option
from jax_ucp.cli.output import console, progress, to_stderr
from jax_ucp.cli.types import RENAME, SIZE
from jax_ucp.inspection.page import page_target
from jax_ucp.inspection.statistics import MAX_READ


@command(
    "report",
    argument("path"),
    option("-o --output", "FILE", "The file to write.", default="report.html", show_default=True),
    option("--against", "PATH", "Another checkpoint to compare it with."),
    option(
        "--rename",
        RENAME,
        "With --against: labels that begin with FIRST here begin with SECOND there; may be"
        " repeated.",
        multiple=True,
    ),
    option("--headers", None, "Read metadata and a small sample; the page then has no statistics."),
    option(
        "--sample-above",
        SIZE,
        "If there are more bytes than this, sample the large arrays.",
        default=MAX_READ,
        show_default="64GiB",
    ),
    *MESH,
    *SOURCE,
    BUDGET,
)
def report(args: Arguments) -> None:
    """Write a web page about the checkpoint at PATH: one file, which needs no network.

    The page has a tree of the arrays with a search, bytes by module, where each array is stored,
    and statistics by depth; with --mesh, which device holds what; with --against, what differs.
    Exit code 1 if an array cannot be read; the page says why.
    """
    if args.rename and args.against is None:
        raise click.UsageError("--rename is for --against: give that too")
    page_target(args.output)  # before everything is read
    checkpoint = args.open(args.path)
    with progress("reading", 0 if args.headers else checkpoint.nbytes) as meter:
        page = checkpoint.report(
            against=args.against,
            rename=by_name("--rename", args.rename),
            **args.save_mesh,
            headers=args.headers,
            max_read_bytes=args.sample_above,
            budget_bytes=args.budget,
            progress=meter.advance,
        )
    page.save(args.output)
    for fault in page.faults:
        to_stderr.print(f"fault: {fault}")
    console.print(f"{args.output}: a page about {checkpoint.path}")
    if page.faults:
        sys.exit(1)
