"""Output of commands: results on stdout, notes and progress on stderr.

All text is printed by `Screen.print` or `TextTable`, which escape control characters, because
names, paths and messages come from files.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from jax_ucp.inspection.fold import fold, fold_states, with_moments
from jax_ucp.inspection.report import Report
from jax_ucp.inspection.words import format_words, head_lines
from jax_ucp.text import visible_lines

if TYPE_CHECKING:
    from rich.console import Console

    from jax_ucp.cli.text_table import TextTable

Row = tuple[str, ...]


class Screen:
    """A stream that text is printed to as text: no markup, no emoji names, no escape sequences."""

    def __init__(self, stderr: bool):
        self._stderr = stderr

    def print(self, shown: Any) -> None:
        """Print text, or what rich can render."""
        if isinstance(shown, str):
            click.echo(visible_lines(shown), err=self._stderr)
        else:
            self.rich.print(shown)

    @cached_property
    def rich(self) -> Console:
        """The console of what has columns or colours, which takes long to import."""
        from rich.console import Console

        # lines are not wrapped if the output is not a terminal
        width = None if self._stderr or sys.stdout.isatty() else 1000
        return Console(stderr=self._stderr, highlight=False, soft_wrap=True, width=width)


console, to_stderr = Screen(stderr=False), Screen(stderr=True)


def print_json(report: Report) -> None:
    """Print a report as JSON, with null in place of infinities and NaN."""
    try:
        text = json.dumps(report, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(report), parse_constant=lambda name: None)
        text = json.dumps(finite)
    click.echo(text)


def print_head(report: Report, lines: Iterable[tuple[str, str]] | None = None) -> None:
    """Print the summary of a report, or these `lines`, without empty ones, and its notes."""
    console.print(f"{report['path']}: {format_words(report)}")
    for heading, text in head_lines(report) if lines is None else lines:
        if text:
            console.print(f"{heading:<12}{text}")
    for note in report["notes"]:
        console.print(f"note: {note}")


def print_share(target: str, share: tuple[int, int] | None, json_: bool) -> None:
    """Print that this share is done while others are not."""
    if json_:
        print_json({"path": target, "share": share, "committed": False})
    else:
        console.print(f"{target}: this share is done; it is a checkpoint when all are")


def print_inventory(items: list[Report], all_: bool) -> None:
    """Print the inventory, with similar items folded unless `all_`."""
    rows = [(item["where"], item["what"], item["status"], item["reason"]) for item in items]
    if rows:
        console.print(folded_table(("item", "what", "status", "why"), rows, all_))


def folded_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], all_: bool = False
) -> TextTable:
    """A table of rows (name, *cells). Unless `all_`, rows with equal cells whose names differ only
    in numbers, or in optax's `mu` and `nu`, are folded, with their count in a last column.
    """
    from jax_ucp.cli.text_table import TextTable

    if all_:
        return TextTable(heads, rows)
    folded = with_moments(fold(rows))
    if all(row.count == 1 for row in folded):
        return TextTable(heads, [(row.name, *row.cells) for row in folded])
    counts = (f"x{row.count}" if row.count > 1 else "" for row in folded)
    cells = [(row.name, *row.cells, n) for row, n in zip(folded, counts, strict=True)]
    return TextTable((*heads, ""), cells)


def leaf_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], all_: bool = False
) -> TextTable:
    """A folded table of leaves (label, *cells), without empty columns. The states of a parameter in
    a trainer's tree are one row if they have equal cells; `all_` is as for `folded_table`.
    """
    if not all_ and (folded := fold_states(rows)):
        usual, rows = folded
        title = "parameter" if usual == "param" else f"{usual} of"
        heads = (title, *heads[1:], "other states")
    return folded_table(*without_empty(heads, rows), all_)


def without_empty(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Row, list[Row]]:
    """The headings and rows of a table, without empty columns."""
    is_filled = [any(cells) for cells in zip(*rows, strict=True)]
    heads, *rows = (tuple(compress(row, is_filled)) for row in (heads, *rows))
    return heads, rows


LINE_S = 1.0  # between two lines of progress


class Meter(NamedTuple):
    """Functions to report a number of bytes that were done, and the total if it was unknown."""

    advance: Callable[[int], None]
    expect: Callable[[int], None]


@contextmanager
def progress(
    what: str, total: int, style: str = "bar", share: tuple[int, int] | None = None
) -> Iterator[Meter]:
    """Context that shows progress: a bar on a terminal, or in the style `json` lines of JSON."""
    if style == "json":
        with _progress_lines(what, total, share) as meter:
            yield meter
        return
    if not sys.stderr.isatty():
        yield Meter(lambda nbytes: None, lambda nbytes: None)
        return
    from rich.progress import (  # which takes as long to import as a small file to convert
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=to_stderr.rich, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield Meter(
            lambda nbytes: bar.advance(task, nbytes), lambda nbytes: bar.update(task, total=nbytes)
        )


@contextmanager
def _progress_lines(what: str, total: int, share: tuple[int, int] | None) -> Iterator[Meter]:
    """Context that prints a line on stderr at most each second, and one at the end."""
    begin, lock = time.monotonic(), threading.Lock()
    done, printed = 0, begin

    def print_line() -> None:
        line = {"doing": what, "bytes": done, "of": total, "seconds": round(printed - begin, 1)}
        click.echo(json.dumps({**line, **({"share": share} if share else {})}), err=True)

    def advance(nbytes: int) -> None:
        nonlocal done, printed
        with lock:
            done += nbytes
            if time.monotonic() - printed >= LINE_S:
                printed = time.monotonic()
                print_line()

    def expect(nbytes: int) -> None:
        nonlocal total
        total = nbytes

    try:
        yield Meter(advance, expect)
    finally:
        printed = time.monotonic()
        print_line()
