"""`jax-ucp inspect`."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

import click
from rich.table import Table

from jax_ucp.cli import report
from jax_ucp.cli.options import Regex, as_json, open_checkpoint, source_options
from jax_ucp.cli.output import console, print_account, print_head, print_json, table
from jax_ucp.cli.report import Report
from jax_ucp.errors import TreeMismatch


@click.command()
@click.argument("path")
@click.option("--leaf", "pattern", type=Regex(), help="Show where every byte of the leaves that match lies.")
@click.option("--all", "all_", is_flag=True, help="Print every item of the account, and every extra.")
@source_options
@as_json
def inspect(path: str, pattern: str | None, all_: bool, json_: bool, **source: Any) -> None:
    """What is in the checkpoint at PATH, where its bytes are, and what is not understood."""
    if all_ and pattern is not None:
        raise click.UsageError("--all prints the account, --leaf the leaves that match: give one of them")
    found = report.inspection(open_checkpoint(path, **source))
    if pattern is not None:
        leaves = [leaf for leaf in found["leaves"] if re.search(pattern, leaf["leaf"])]
        if not leaves:
            labels = [leaf["leaf"] for leaf in found["leaves"]]
            few = difflib.get_close_matches(pattern, labels, n=3, cutoff=0.3) or labels[:3]
            raise TreeMismatch(f"no leaf of {path} matches {pattern!r}; it has {len(labels)}, such as {', '.join(few)}")
        found["leaves"] = leaves
    if json_:
        print_json(found)
        return
    print_head(found)
    if pattern is not None:
        rows = [
            (leaf["leaf"], piece["to"], piece["file"], piece["item"], piece["from"])
            for leaf in found["leaves"]
            for piece in leaf.get("stored", ())
        ]
        console.print(table(("leaf", "block", "file", "item", "block there"), rows))
        return
    console.print(_leaf_table(found))
    print_account(found["account"], all_)
    if all_:
        console.print_json(json.dumps(found["extras"]), ensure_ascii=True)


def _leaf_table(found: Report) -> Table:
    """One line a parameter where the tree is {state: {parameter: array}}, one line a leaf elsewhere."""
    leaves = [leaf for leaf in found["leaves"] if "shape" in leaf]
    if {leaf["leaf"].count("/") for leaf in leaves} != {1} or not any(x["leaf"].startswith("param/") for x in leaves):
        rows = [
            (leaf["leaf"], leaf.get("dtype", leaf["kind"]), str(leaf.get("shape", "")), _spec(leaf), _files(leaf))
            for leaf in found["leaves"]
        ]
        return table(("leaf", "dtype", "shape", "saved as", "stored in"), rows)
    params: dict[str, list[Report]] = {}
    for leaf in leaves:
        params.setdefault(leaf["leaf"].split("/")[1], []).append(leaf)
    rows = []
    for name, states in params.items():
        kinds = [f"{x['leaf'].split('/')[0]} {x['dtype']}" for x in states]
        rows.append((name, str(states[0]["shape"]), ", ".join(kinds), _files(*states)))
    return table(("parameter", "shape", "states", "stored in"), rows)


def _files(*leaves: Report) -> str:
    files = {piece["file"] for leaf in leaves for piece in leaf.get("stored", ())}
    return next(iter(files)) if len(files) == 1 else f"{len(files)} files"


def _spec(leaf: Report) -> str:
    return f"{tuple(leaf['spec'])} on {leaf['mesh']}" if "spec" in leaf else ""
