"""What several commands print, on stdout for its reader, notes and progress on stderr.

All text goes through `Screen.print` or `TextTable`: names, paths and messages are others', and none
of them is obeyed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from jax_ucp.cli.text_table import TextTable
from jax_ucp.inspection.report import Report
from jax_ucp.text import visible_lines


class Screen(Console):
    """A console that prints text as text: no markup, no emoji names, no escape sequences."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(
            *(Text(visible_lines(o)) if isinstance(o, str) else o for o in objects), **options
        )


# Where the output is read by a program, lines are as long as they need to be.
console = Screen(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
to_stderr = Screen(stderr=True, highlight=False, soft_wrap=True)


def print_json(report: Report) -> None:
    click.echo(json.dumps(report))


def print_head(report: Report) -> None:
    items = ", ".join(f"{n} {status}" for status, n in report["items"].items())
    console.print(
        f"{report['path']}: {report['format']}, {report['arrays']} arrays, {size(report['bytes'])}"
    )
    if report["writer"]:
        console.print(f"written by {report['writer']}")
    console.print(f"stored items: {items}")
    for note in report["notes"]:
        console.print(f"note: {note}")


def print_inventory(items: list[Report], all_: bool) -> None:
    shown = [item for item in items if all_ or item["status"] == "skipped"]
    if shown:
        rows = [(item["status"], item["where"], item["what"], item["reason"]) for item in shown]
        console.print(TextTable(("status", "item", "what", "why"), rows))


def size(nbytes: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing where stderr is a file or a pipe."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(True),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, TimeRemainingColumn(), console=to_stderr, disable=not to_stderr.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
