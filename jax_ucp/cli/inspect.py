"""`jax-ucp inspect`."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter

import click

from jax_ucp.cli.command import Arguments, command
from jax_ucp.cli.options import JSON, SOURCE, argument, option
from jax_ucp.cli.output import (
    Row,
    console,
    folded_table,
    print_head,
    print_inventory,
    print_json,
    without_empty,
)
from jax_ucp.cli.text_table import TextTable
from jax_ucp.cli.types import REGEX
from jax_ucp.errors import TreeMismatch
from jax_ucp.inspection import report
from jax_ucp.inspection.report import Report
from jax_ucp.inspection.words import SKIPPED, head_lines, several, skipped_reasons, spec_words


@command(
    "inspect",
    argument("path"),
    option("--leaf", REGEX, "Show where every byte of the matching leaves is stored."),
    option("--files", None, "Show which files each leaf is stored in."),
    option(
        "--inventory",
        None,
        "List every stored item: an array, kept as an extra, or skipped and why.",
    ),
    option(
        "--all all_", None, "Print all of it, with one line for each leaf and each stored item."
    ),
    *SOURCE,
    JSON,
)
def inspect(args: Arguments) -> None:
    """Show what is in the checkpoint at PATH, where it is stored, and what was not understood.

    Only metadata is read. Leaves whose names differ only in numbers share a line:
    layers.{0..31}.w stands for 32 of them.
    """
    pattern = args.leaf
    if pattern is not None and (args.files or args.inventory or args.all_):
        raise click.UsageError(
            "--files, --inventory and --all print the whole checkpoint, --leaf the leaves that"
            " match: give one of them"
        )
    inspection = report.inspection(args.open(args.path))
    if pattern is not None:
        inspection["leaves"] = _matching(pattern, inspection["leaves"], args.path)
    if args.json_:
        print_json(inspection)
        return
    meshes = Counter(_mesh_words(leaf) for leaf in inspection["leaves"] if "mesh" in leaf)
    mesh = ("saved on", next(iter(meshes)) if len(meshes) == 1 else "")
    print_head(inspection, [*head_lines(inspection), mesh])
    if pattern is not None:
        rows = [
            (leaf["leaf"], piece["to"], piece["file"], piece["item"], piece["from"])
            for leaf in inspection["leaves"]
            for piece in leaf.get("stored", ())
        ]
        console.print(TextTable(("leaf", "block", "file", "item", "block there"), rows))
        return
    heads, rows, files = _leaf_rows(inspection["leaves"], len(meshes) > 1)
    heads, rows = without_empty(heads, rows)
    if args.files or args.all_:
        heads = (*heads, "stored in")
        rows = [(*row, file) for row, file in zip(rows, files, strict=True)]
    console.print(folded_table(heads, rows, args.all_))
    items = inspection["inventory"]
    if args.inventory or args.all_:
        print_inventory(items, args.all_)
    elif reasons := skipped_reasons(items):
        console.print(TextTable(SKIPPED, reasons))
    if args.all_:
        console.rich.print_json(json.dumps(inspection["extras"]), ensure_ascii=True)


def _matching(pattern: str, leaves: list[Report], path: str) -> list[Report]:
    """The leaves whose labels match. Raises TreeMismatch if there is none."""
    matching = [leaf for leaf in leaves if re.search(pattern, leaf["leaf"])]
    if not matching:
        labels = [leaf["leaf"] for leaf in leaves]
        few = difflib.get_close_matches(pattern, labels, n=3, cutoff=0.3) or labels[:3]
        raise TreeMismatch(
            f"no leaf of {path} matches {pattern!r}; it has {len(labels)}, such as {', '.join(few)}"
        )
    return matching


def _leaf_rows(leaves: list[Report], has_meshes: bool) -> tuple[Row, list[Row], list[str]]:
    """The headings, a row for each leaf, and the files of each row. For a tree {state: {parameter:
    array}}, a row is a parameter, with its states if they are not the usual ones. With several
    meshes, rows have the mesh.
    """
    arrays = [leaf for leaf in leaves if "shape" in leaf]
    paths = [leaf["leaf"].split("/") for leaf in arrays]
    if not all(len(parts) == 2 for parts in paths) or "param" not in {parts[0] for parts in paths}:
        rows: list[Row] = []
        for leaf in leaves:
            shape, dtype = leaf.get("shape", ""), leaf.get("dtype", leaf["kind"])
            if "key" in leaf:
                shape, dtype = leaf["shape"][:-1], leaf["key"]
            spec = spec_words(leaf["spec"]) if "spec" in leaf else ""
            mesh = f" on {_mesh_words(leaf)}" if has_meshes and spec else ""
            rows.append((leaf["leaf"], str(shape), dtype, spec + mesh))
        return ("leaf", "shape", "dtype", "saved as"), rows, [_files([leaf]) for leaf in leaves]
    states_of: dict[str, list[Report]] = {}
    for (_, name), leaf in zip(paths, arrays, strict=True):
        states_of.setdefault(name, []).append(leaf)
    for states in states_of.values():  # the parameter itself first: a row has its shape and dtype
        states.sort(key=lambda leaf: not leaf["leaf"].startswith("param/"))
    kinds = [
        ", ".join(f"{leaf['leaf'].split('/')[0]} {leaf['dtype']}" for leaf in states)
        for states in states_of.values()
    ]
    usual = Counter(kind for kind in kinds if kind.startswith("param ")).most_common(1)[0][0]
    rows = []
    for (name, states), kind in zip(states_of.items(), kinds, strict=True):
        shape, dtype = str(states[0]["shape"]), states[0]["dtype"]
        rows.append((name, shape, dtype, "" if kind == usual else kind))
    heads = ("parameter", "shape", "dtype", "other states")
    return heads, rows, list(map(_files, states_of.values()))


def _files(leaves: list[Report]) -> str:
    files = {piece["file"] for leaf in leaves for piece in leaf.get("stored", ())}
    return next(iter(files)) if len(files) == 1 else f"{len(files)} files"


def _mesh_words(leaf: Report) -> str:
    """The mesh of a leaf in words, with only the number of axes of length 1."""
    cuts = [f"{axis}={n}" for axis, n in leaf["mesh"].items() if n > 1]
    whole = len(leaf["mesh"]) - len(cuts)
    axes = several(whole, "axis", "axes") + " of length 1"
    return ", ".join([*cuts, *[axes] * bool(whole)])
