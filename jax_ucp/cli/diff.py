"""`jax-ucp diff`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import click

import jax_ucp
from jax_ucp.cli.options import (
    Regex,
    Renames,
    as_json,
    budget,
    once,
    open_checkpoint,
    source_options,
)
from jax_ucp.cli.output import (
    console,
    folded_table,
    leaf_table,
    print_json,
    progress,
    without_empty,
)
from jax_ucp.cli.text_table import TextTable
from jax_ucp.inspection.diff import Difference, Values
from jax_ucp.inspection.fold import fold
from jax_ucp.inspection.words import changes, several, told


@click.command()
@click.argument("first")
@click.argument("second")
@click.option(
    "--headers", is_flag=True, help="Compare names, shapes and dtypes only; no array is read."
)
@click.option("--only", type=Regex(), help="Compare only leaves whose labels in SECOND match.")
@click.option(
    "--rename",
    type=Renames(),
    multiple=True,
    help="Labels that begin with FIRST in the one begin with SECOND in the other; may be repeated.",
)
@click.option("--all", "all_", is_flag=True, help="Print one line for every leaf that differs.")
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
    """Show what differs between the checkpoints FIRST and SECOND, of any formats.

    Exit code 1 if anything differs. --mapping, and options that say how to open a checkpoint, apply
    to FIRST.
    """
    one, other = open_checkpoint(first, **source), jax_ucp.open(second)
    with progress("comparing", 0 if headers else one.nbytes) as meter:
        found = jax_ucp.diff(
            one,
            other,
            rename=once("--rename", rename),
            only=only,
            headers=headers,
            budget_bytes=budget,
            progress=meter.advance,
        )
    if json_:
        print_json({"first": one.path, "second": other.path, "same": found.same, **asdict(found)})
    else:
        console.print(f"first   {one.path}")
        console.print(f"second  {other.path}")
        _print_difference(found, all_)
    if not found.same:
        sys.exit(1)


def _print_difference(found: Difference, all_: bool) -> None:
    if found.facts:
        console.print(folded_table(("fact", "first", "second"), told(found), all_))
    rows = list(changes(found))
    if rows:
        console.print(leaf_table(("leaf", "what", "first", "second"), rows, all_))
    for title, values in _by_state(found.values, all_).items():
        console.print(_values_table(title, values, all_))
    differing = len({label for label, *_ in rows} | {each.label for each in found.values})
    compared = "names, shapes and dtypes" if found.headers_only else "all elements"
    also = f"; {several(len(found.facts), 'fact differs', 'facts differ')}" if found.facts else ""
    differ = several(differing, "leaf differs", "leaves differ")
    console.print(f"{differ}, {found.equal:,} equal in {compared}{also}")


def _by_state(values: Sequence[Values], all_: bool) -> dict[str, list[Values]]:
    """Of a trainer's tree, the arrays of each state, without it in their labels, below a title."""
    states: dict[str, list[Values]] = {}
    for each in values:
        state, _, name = each.label.partition("/")
        states.setdefault(f"{state} of", []).append(replace(each, label=name))
    is_folded = not all_ and "param of" in states
    return states if is_folded else {"leaf": list(values)} if values else {}


def _values_table(title: str, values: Sequence[Values], all_: bool) -> TextTable:
    """Arrays with changed elements; folded, the most of each that any has, and the least cosine."""
    groups = [(each.label, [each]) for each in values]
    if not all_:
        folded = fold([(each.label,) for each in values])
        groups = [(row.name, [values[place] for place in row.rows]) for row in folded]
    heads = (title, "changed", "largest", "relative", "cosine", "not finite", "")
    rows = [_values_row(name, alike) for name, alike in groups]
    return TextTable(*without_empty(heads, rows))


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
        _least_cosine(alike),
        "" if finite else f"{counts[0]} -> {counts[1]}",
        ", ".join(notes),
    )


def _least_cosine(values: Sequence[Values]) -> str:
    cosines = [each.cosine for each in values if not math.isnan(each.cosine)]
    return f"{min(cosines):.6f}" if cosines else "undefined"
