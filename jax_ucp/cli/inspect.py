"""`jax-ucp inspect`."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from typing import Any, NamedTuple

import click

from jax_ucp.cli.options import Regex, as_json, open_checkpoint, source_options
from jax_ucp.cli.output import (
    console,
    folded_table,
    print_head,
    print_inventory,
    print_json,
    print_skipped,
    without_empty,
)
from jax_ucp.cli.text_table import TextTable
from jax_ucp.errors import TreeMismatch
from jax_ucp.inspection import report
from jax_ucp.inspection.report import Report
from jax_ucp.inspection.words import spec_words


@click.command()
@click.argument("path")
@click.option(
    "--leaf",
    "pattern",
    type=Regex(),
    help="Show where every byte of the matching leaves is stored.",
)
@click.option("--files", is_flag=True, help="Show which files each leaf is stored in.")
@click.option(
    "--inventory",
    is_flag=True,
    help="List every stored item: an array, kept as an extra, or skipped and why.",
)
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help="Print all of it, with one line for each leaf and each stored item.",
)
@source_options
@as_json
def inspect(
    path: str,
    pattern: str | None,
    files: bool,
    inventory: bool,
    all_: bool,
    json_: bool,
    **source: Any,
) -> None:
    """Show what is in the checkpoint at PATH, where it is stored, and what was not understood.

    Only metadata is read. Leaves whose names differ only in numbers share a line:
    layers.{0..31}.w stands for 32 of them.
    """
    show = _Show(files or all_, inventory or all_, all_)
    if pattern is not None and any(show):
        raise click.UsageError(
            "--files, --inventory and --all print the whole checkpoint, --leaf the leaves that"
            " match: give one of them"
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
    console.print(_leaf_table(inspection["leaves"], show))
    if show.inventory:
        print_inventory(inspection["inventory"], all_)
    else:
        print_skipped(inspection["inventory"])
    if all_:
        console.print_json(json.dumps(inspection["extras"]), ensure_ascii=True)


class _Show(NamedTuple):
    """Which of what is left out of a short answer is asked for; `all`: nothing is folded."""

    files: bool
    inventory: bool
    all: bool


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


def _leaf_table(leaves: list[Report], show: _Show) -> TextTable:
    """One line a parameter where the tree is {state: {parameter: array}}, one line a leaf
    elsewhere; those that differ in numbers of their names alone are folded.
    """
    arrays = [leaf for leaf in leaves if "shape" in leaf]
    paths = [leaf["leaf"].split("/") for leaf in arrays]
    if all(len(parts) == 2 for parts in paths) and "param" in {state for state, *_ in paths}:
        return _parameter_table(arrays, show)
    rows = [
        (leaf["leaf"], str(leaf.get("shape", "")), leaf.get("dtype", leaf["kind"]), _spec(leaf))
        for leaf in leaves
    ]
    files = [_files([leaf]) for leaf in leaves]
    return _with_files(("leaf", "shape", "dtype", "saved as"), rows, files, show)


def _parameter_table(arrays: list[Report], show: _Show) -> TextTable:
    """The states of a parameter are said where they are not those that most have."""
    states_of: dict[str, list[Report]] = {}
    for leaf in arrays:
        states_of.setdefault(leaf["leaf"].split("/")[1], []).append(leaf)
    for states in states_of.values():  # the parameter itself first: a row has its shape and dtype
        states.sort(key=lambda leaf: not leaf["leaf"].startswith("param/"))
    kinds = [_states(states) for states in states_of.values()]
    usual = Counter(kind for kind in kinds if kind.startswith("param ")).most_common(1)[0][0]
    rows: list[tuple[str, ...]] = []
    for (name, states), kind in zip(states_of.items(), kinds, strict=True):
        shape, dtype = str(states[0]["shape"]), states[0]["dtype"]
        rows.append((name, shape, dtype, "" if kind == usual else kind))
    heads = ("parameter", "shape", "dtype", "other states")
    return _with_files(heads, rows, list(map(_files, states_of.values())), show)


def _states(leaves: list[Report]) -> str:
    return ", ".join(f"{leaf['leaf'].split('/')[0]} {leaf['dtype']}" for leaf in leaves)


def _with_files(
    heads: tuple[str, ...], rows: list[tuple[str, ...]], files: list[str], show: _Show
) -> TextTable:
    """The table, without columns that say nothing, and with the files of each row if asked for."""
    heads, rows = without_empty(heads, rows)
    if show.files:
        heads = (*heads, "stored in")
        rows = [(*row, file) for row, file in zip(rows, files, strict=True)]
    return folded_table(heads, rows, show.all)


def _files(leaves: list[Report]) -> str:
    files = {piece["file"] for leaf in leaves for piece in leaf.get("stored", ())}
    return next(iter(files)) if len(files) == 1 else f"{len(files)} files"


def _spec(leaf: Report) -> str:
    if "spec" not in leaf:
        return ""
    mesh = ",".join(f"{axis}={n}" for axis, n in leaf["mesh"].items())
    return f"{spec_words(leaf['spec'])} on {mesh}"
