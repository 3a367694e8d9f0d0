"""What several commands print, on stdout for its reader, notes and progress on stderr.

All text goes through `Screen.print` or `TextTable`: names, paths and messages are others', and none
of them is obeyed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from jax_ucp.inspection.fold import fold
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
    """What people ask first, a line each; what the files do not say is left out."""
    console.print(f"{report['path']}: {_format(report)}")
    for heading, text in _head_lines(report):
        if text:
            console.print(f"{heading:<12}{text}")
    for note in report["notes"]:
        console.print(f"note: {note}")


def _format(report: Report) -> str:
    """What wrote it; of a copy in the universal format, what it was imported from."""
    source = report["source"]
    if report["format"] != "universal" or "name" not in source:
        return report["writer"] or report["format"]
    return f"universal, imported from {source['name']} ({report['writer'] or source.get('format')})"


def _head_lines(report: Report) -> Iterator[tuple[str, str]]:
    yield "step", "" if report["step"] is None else str(report["step"])
    yield "cut by", ", ".join(f"{axis} {n}" for axis, n in report["parallelism"].items())
    states = report["states"]
    if states:
        weights = states["param"]
        dtypes = ", ".join(weights["dtypes"])
        yield "parameters", f"{weights['parameters']}, {weights['elements']:,} elements, {dtypes}"
        yield (
            "optimizer",
            ", ".join(
                f"{state} {'/'.join(kind['dtypes'])} of {kind['parameters']}"
                for state, kind in states.items()
                if state != "param"
            ),
        )
    yield from _group_lines(report["groups"])
    dtypes = ", ".join(f"{n} {dtype}" for dtype, n in report["dtypes"].items())
    yield "arrays", f"{report['arrays']} in all ({dtypes}), {report['elements']:,} elements"
    items = ", ".join(f"{n} {status}" for status, n in report["items"].items())
    yield "stored", f"{size(report['bytes'])} in {report['files']} files; items: {items}"


def _group_lines(groups: list[Report]) -> Iterator[tuple[str, str]]:
    """What the optimizer does with all parameters, then what it does with those of each group
    alone; what is off is left out.
    """
    if not groups:
        return
    common = _common_settings([group["settings"] for group in groups])
    yield "settings", _settings(common)
    if len(groups) == 1:
        return
    for group in groups:
        own = {name: value for name, value in group["settings"].items() if name not in common}
        yield "  group", f"of {group['parameters']}: {_settings(own)}"


def _common_settings(each: Sequence[Report]) -> Report:
    """Settings that all groups have, with the same value."""
    first, *others = each
    return {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }


def _settings(values: Report) -> str:
    return ", ".join(
        f"{name} {value}"
        for name, value in values.items()
        if value is not None and value is not False
    )


def print_skipped(items: list[Report]) -> None:
    """Why items are skipped, each reason once."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for item in items:
        if item["status"] == "skipped":
            name = re.split(r"[:/]", item["where"])[-1]
            reason = item["reason"].replace(name, "...") if name else item["reason"]
            first.setdefault(reason, item["where"])
            counts[reason] += 1
    if counts:
        rows = [(str(n), reason, first[reason]) for reason, n in counts.most_common()]
        console.print(TextTable(("skipped", "because", "such as"), rows))


def print_inventory(items: list[Report], all_: bool) -> None:
    """Items that are stored, and what became of them; folded, but with `all_`."""
    rows = [(item["where"], item["what"], item["status"], item["reason"]) for item in items]
    if rows:
        console.print(folded_table(("item", "what", "status", "why"), rows, all_))


def folded_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], all_: bool = False
) -> TextTable:
    """A table of (name, *cells), where rows whose names differ in numbers alone are one, with how
    many they are; each by itself with `all_`.
    """
    if all_:
        return TextTable(heads, rows)
    folded = fold(rows)
    if all(row.count == 1 for row in folded):
        return TextTable(heads, [(row.name, *row.cells) for row in folded])
    counts = (f"x{row.count}" if row.count > 1 else "" for row in folded)
    cells = [(row.name, *row.cells, n) for row, n in zip(folded, counts, strict=True)]
    return TextTable((*heads, ""), cells)


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
