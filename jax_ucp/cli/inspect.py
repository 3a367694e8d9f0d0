"""`jax-ucp inspect`."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

import click

from jax_ucp.cli.options import Regex, as_json, open_checkpoint, source_options
from jax_ucp.cli.output import console, print_head, print_inventory, print_json
from jax_ucp.cli.text_table import TextTable
from jax_ucp.errors import TreeMismatch
from jax_ucp.inspection import report
from jax_ucp.inspection.report import Report


@click.command()
@click.argument("path")
@click.option(
    "--leaf", "pattern", type=Regex(), help="Show where every byte of the leaves that match lies."
)
@click.option(
    "--all", "all_", is_flag=True, help="Print every item of the inventory, and every extra."
)
@source_options
@as_json
def inspect(path: str, pattern: str | None, all_: bool, json_: bool, **source: Any) -> None:
    """What is in the checkpoint at PATH, where its bytes are, and what is not understood."""
    if all_ and pattern is not None:
        raise click.UsageError(
            "--all prints the inventory, --leaf the leaves that match: give one of them"
        )
    inspection = report.inspection(open_checkpoint(path, **source))
    if pattern is not None:
        inspection["leaves"] = _matching(pattern, inspection["leaves"], path)
    if json_:
        print_json(inspection)
        return
    print_head(inspection)
    if pattern is not None:
        console.print(_piece_table(inspection["leaves"]))
        return
    console.print(_leaf_table(inspection["leaves"]))
    print_inventory(inspection["inventory"], all_)
    if all_:
        console.print_json(json.dumps(inspection["extras"]), ensure_ascii=True)


def _matching(pattern: str, leaves: list[Report], path: str) -> list[Report]:
    """The leaves that match. Raises TreeMismatch where none does."""
    matching = [leaf for leaf in leaves if re.search(pattern, leaf["leaf"])]
    if not matching:
        labels = [leaf["leaf"] for leaf in leaves]
        few = difflib.get_close_matches(pattern, labels, n=3, cutoff=0.3) or labels[:3]
        raise TreeMismatch(
            f"no leaf of {path} matches {pattern!r}; it has {len(labels)}, such as {', '.join(few)}"
        )
    return matching


def _piece_table(leaves: list[Report]) -> TextTable:
    """One line a piece: where the bytes of each block of a leaf are."""
    rows: list[tuple[str, ...]] = []
    for leaf in leaves:
        pieces = leaf.get("stored", ())
        rows += [
            (leaf["leaf"], piece["to"], piece["file"], piece["item"], piece["from"])
            for piece in pieces
        ]
    return TextTable(("leaf", "block", "file", "item", "block there"), rows)


def _leaf_table(leaves: list[Report]) -> TextTable:
    """One line a parameter where the tree is {state: {parameter: array}}, one line a leaf
    elsewhere.
    """
    arrays = [leaf for leaf in leaves if "shape" in leaf]
    paths = [leaf["leaf"].split("/") for leaf in arrays]
    if all(len(parts) == 2 for parts in paths) and "param" in {state for state, *_ in paths}:
        return _parameter_table(arrays)
    rows = [
        (
            leaf["leaf"],
            leaf.get("dtype", leaf["kind"]),
            str(leaf.get("shape", "")),
            _spec(leaf),
            _files(leaf),
        )
        for leaf in leaves
    ]
    return TextTable(("leaf", "dtype", "shape", "saved as", "stored in"), rows)


def _parameter_table(arrays: list[Report]) -> TextTable:
    states_of: dict[str, list[Report]] = {}
    for leaf in arrays:
        states_of.setdefault(leaf["leaf"].split("/")[1], []).append(leaf)
    rows: list[tuple[str, ...]] = []
    for name, states in states_of.items():
        kinds = [f"{leaf['leaf'].split('/')[0]} {leaf['dtype']}" for leaf in states]
        rows.append((name, str(states[0]["shape"]), ", ".join(kinds), _files(*states)))
    return TextTable(("parameter", "shape", "states", "stored in"), rows)


def _files(*leaves: Report) -> str:
    files = {piece["file"] for leaf in leaves for piece in leaf.get("stored", ())}
    return next(iter(files)) if len(files) == 1 else f"{len(files)} files"


def _spec(leaf: Report) -> str:
    return f"{tuple(leaf['spec'])} on {leaf['mesh']}" if "spec" in leaf else ""
