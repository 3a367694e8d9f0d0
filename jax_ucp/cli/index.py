"""`jax-ucp index`."""

from __future__ import annotations

from jax_ucp.cli.command import Arguments, command
from jax_ucp.cli.options import OPENING, argument
from jax_ucp.cli.output import console


@command("index", argument("source"), argument("target"), *OPENING)
def index(args: Arguments) -> None:
    """Write an index of the checkpoint SOURCE to the file TARGET, whose name ends in .ucp-index.

    TARGET is then a path like any other: opening it reads the index, and asks of the checkpoint's
    files only whether they are as they were.
    """
    checkpoint = args.open_unmapped(args.source)
    checkpoint.save_index(args.target)
    console.print(f"{args.target}: index of {checkpoint.path}")
