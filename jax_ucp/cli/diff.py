"""`jax-ucp diff`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

import jax_ucp
from jax_ucp.cli.options import (
    Regex,
    Renames,
    as_json,
    budget,
    open_checkpoint,
    source_options,
)
from jax_ucp.cli.output import console, folded_table, print_json, progress
from jax_ucp.cli.text_table import TextTable
from jax_ucp.inspection.diff import Difference, Values
from jax_ucp.inspection.fold import fold
from jax_ucp.inspection.words import changes


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--headers", is_flag=True, help="Compare names, shapes and dtypes, and no elements.")
@click.option("--only", type=Regex(), help="Leaves whose labels match, as SECOND has them.")
@click.option(
    "--rename",
    type=Renames(),
    multiple=True,
    help="What labels of FIRST begin with, and those of SECOND; may be repeated.",
)
@click.option("--all", "all_", is_flag=True, help="Print every leaf that differs, none folded.")
@source_options
@budget
@as_json
def diff(
    first: str,
    second: str,
    headers: bool,
    only: str | None,
    rename: tuple[tuple[str, str], ...],
    all_: bool,
    budget: int,
    json_: bool,
    **source: Any,
) -> None:
    """What differs between the checkpoints FIRST and SECOND, of any formats.

    Exit code 1 where anything does. Options that say how a checkpoint is opened, and --mapping, are
    for FIRST.
    """
    one, other = open_checkpoint(first, **source), jax_ucp.open(second)
    with progress("comparing", 0 if headers else one.nbytes) as advance:
        found = jax_ucp.diff(
            one,
            other,
            rename=dict(rename),
            only=only,
            headers=headers,
            budget_bytes=budget,
            progress=advance,
        )
    if json_:
        print_json({"first": one.path, "second": other.path, "same": found.same, **asdict(found)})
    else:
        console.print(f"first   {one.path}\nsecond  {other.path}")
        _print_difference(found, all_)
    if not found.same:
        sys.exit(1)


def _print_difference(found: Difference, all_: bool) -> None:
    rows = list(changes(found))
    if rows:
        console.print(folded_table(("leaf", "what", "first", "second"), rows, all_))
    if found.values:
        console.print(_values_table(found.values, all_))
    differing = len(rows) - len(found.facts) + len(found.values)
    compared = "names, shapes and dtypes" if found.headers_only else "all elements"
    console.print(f"{found.equal} leaves equal in {compared}, {differing} differences")


def _values_table(values: Sequence[Values], all_: bool) -> TextTable:
    """Arrays with changed elements; folded, the most of each that any has, and the least cosine."""
    groups = [(each.label, [each]) for each in values]
    if not all_:
        folded = fold([(each.label,) for each in values])
        groups = [(row.name, [values[place] for place in row.rows]) for row in folded]
    heads = ("leaf", "changed", "largest", "relative", "cosine", "not finite", "")
    return TextTable(heads, [_values_row(name, alike) for name, alike in groups])


def _values_row(name: str, alike: Sequence[Values]) -> tuple[str, ...]:
    finite = not any(any(each.not_finite) for each in alike)
    counts = [sum(each.not_finite[side] for each in alike) for side in (0, 1)]
    notes = [f"x{len(alike)}"] * (len(alike) > 1)
    notes += ["rounded"] * all(each.rounded for each in alike)
    return (
        name,
        f"{max(each.share for each in alike):.3%}",
        f"{max(each.largest for each in alike):.3g}",
        f"{max(each.relative for each in alike):.3g}",
        f"{min(each.cosine for each in alike):.6f}",
        "" if finite else f"{counts[0]} -> {counts[1]}",
        ", ".join(notes),
    )
