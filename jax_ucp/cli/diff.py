"""`jax-ucp diff`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import jax_ucp
from jax_ucp.cli.command import Arguments, by_name, command
from jax_ucp.cli.options import BUDGET, JSON, SOURCE, argument, option
from jax_ucp.cli.output import (
    console,
    folded_table,
    leaf_table,
    print_json,
    progress,
    without_empty,
)
from jax_ucp.cli.text_table import TextTable
from jax_ucp.cli.types import REGEX, RENAME
from jax_ucp.inspection.diff import ElementChange
from jax_ucp.inspection.fold import fold
from jax_ucp.inspection.words import several


@command(
    "diff",
    argument("first"),
    argument("second"),
    option("--headers", None, "Compare names, shapes and dtypes only; no array is read."),
    option("--only", REGEX, "Compare only leaves whose labels in SECOND match."),
    option(
        "--rename",
        RENAME,
        "Labels that begin with FIRST in the one begin with SECOND in the other; may be repeated.",
        multiple=True,
    ),
    option("--all all_", None, "Print one line for every leaf that differs."),
    *SOURCE,
    BUDGET,
    JSON,
)
def diff(args: Arguments) -> None:
    """Show what differs between the checkpoints FIRST and SECOND, of any formats.

    Exit code 1 if anything differs. --mapping, and options that say how to open a checkpoint, apply
    to FIRST.
    """
    one, other = args.open(args.first), jax_ucp.open(args.second)
    with progress("comparing", 0 if args.headers else one.nbytes) as meter:
        difference = jax_ucp.diff(
            one,
            other,
            rename=by_name("--rename", args.rename),
            only=args.only,
            headers=args.headers,
            budget_bytes=args.budget,
            progress=meter.advance,
        )
    if args.json_:
        sides = {"first": one.path, "second": other.path, "same": difference.same}
        print_json({**sides, **asdict(difference)})
    else:
        console.print(f"first   {one.path}")
        console.print(f"second  {other.path}")
        if difference.facts:
            facts = [(fact.label, fact.first, fact.second) for fact in difference.facts]
            console.print(folded_table(("fact", "first", "second"), facts, args.all_))
        rows = list(difference.changes())
        if rows:
            console.print(leaf_table(("leaf", "what", "first", "second"), rows, args.all_))
        # for a trainer's tree, a table for each state, which is left out of the labels
        states: dict[str, list[ElementChange]] = {}
        for each in difference.values:
            state, _, name = each.label.partition("/")
            states.setdefault(f"{state} of", []).append(replace(each, label=name))
        if difference.values and (args.all_ or "param of" not in states):
            states = {"leaf": list(difference.values)}
        for title, values in states.items():
            console.print(_values_table(title, values, args.all_))
        differing = {label for label, *_ in rows} | {each.label for each in difference.values}
        compared = "names, shapes and dtypes" if difference.headers_only else "all elements"
        count = several(len(difference.facts), "fact differs", "facts differ")
        also = f"; {count}" if difference.facts else ""
        leaves = several(len(differing), "leaf differs", "leaves differ")
        console.print(f"{leaves}, {difference.equal:,} equal in {compared}{also}")
    if not difference.same:
        sys.exit(1)


def _values_table(title: str, values: Sequence[ElementChange], all_: bool) -> TextTable:
    """A table of changed arrays; a folded row has the largest differences and least cosine."""
    groups = [(each.label, [each]) for each in values]
    if not all_:
        folded = fold([(each.label,) for each in values])
        groups = [(row.name, [values[place] for place in row.rows]) for row in folded]
    heads = (title, "changed", "largest", "relative", "cosine", "not finite", "")
    rows: list[tuple[str, ...]] = []
    for name, alike in groups:
        cosines = [each.cosine for each in alike if not math.isnan(each.cosine)]
        counts = [sum(each.not_finite[side] for each in alike) for side in (0, 1)]
        notes = [f"x{len(alike)}"] * (len(alike) > 1)
        notes += ["rounded"] * all(each.rounded for each in alike)
        row = (
            name,
            f"{max(each.share for each in alike):.3%}",
            f"{max(each.largest for each in alike):.3g}",
            f"{max(each.relative for each in alike):.3g}",
            f"{min(cosines):.6f}" if cosines else "undefined",
            f"{counts[0]} -> {counts[1]}" if any(counts) else "",
            ", ".join(notes),
        )
        rows.append(row)
    return TextTable(*without_empty(heads, rows))
