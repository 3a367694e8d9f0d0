"""`jax-ucp map`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import click

import jax_ucp
from jax_ucp.cli.command import Arguments, command, imported
from jax_ucp.cli.options import JSON, SOURCE, argument, option
from jax_ucp.cli.output import Row, console, folded_table, print_json, to_stderr, without_empty
from jax_ucp.errors import TreeMismatch
from jax_ucp.files.path import file_path
from jax_ucp.inspection.fold import fold
from jax_ucp.inspection.mapping_draft import mapping_draft
from jax_ucp.inspection.mapping_report import mapping_report, tree_shapes
from jax_ucp.inspection.report import Report
from jax_ucp.inspection.words import several
from jax_ucp.layout.fragments import Shape
from jax_ucp.mapping.rules import shipped


@command(
    "map",
    argument("source"),
    option(
        "--target",
        "TREE",
        "The leaves of your model: module:function that returns its tree, a checkpoint, or what"
        " `inspect --json` printed of one.",
    ),
    option(
        "--suggest", None, "Print a draft of a mapping from SOURCE to --target, and check nothing."
    ),
    *SOURCE,
    JSON,
)
def map(args: Arguments) -> None:
    """Check --mapping against the checkpoint SOURCE, and with --target against your model.

    Prints which parameters form each leaf, every fault, and suggestions. Exit code 1 if there are
    faults.
    """
    if args.suggest:
        if args.target is None or args.mapping is not None or args.json_:
            raise click.UsageError(
                "--suggest needs --target, and goes with neither --mapping nor --json"
            )
        params = args.open(args.source).params
        shapes = {name: param.shape for name, param in params.items()}
        click.echo(mapping_draft(shapes, target_shapes(args.target)), nl=False)
        return
    mappings = args.load_mappings(its_own=())
    if not mappings:
        raise click.UsageError(f"give --mapping: a file, or one of {', '.join(shipped())}")
    *first, last = mappings
    checkpoint = args.mapped(args.open_unmapped(args.source, mappings), first, args.params)
    shapes = target_shapes(args.target) if args.target else None
    report = mapping_report(
        checkpoint, last, shapes, **args.map_arguments(last, mappings), params=args.params
    )
    if args.json_:
        print_json(report)
    else:
        _print_mapping(report, bool(args.target))
    if report["faults"]:
        sys.exit(1)


def _print_mapping(report: Report, has_target: bool) -> None:
    heads = ("leaf", "its axes", "parameters: axes", "shape", "target, if other")
    rows = [_row(leaf, has_target) for leaf in report["leaves"]]
    if rows:
        console.print(folded_table(*without_empty(heads, rows)))
    for requirement in report["requires"]:
        values = f", {requirement['found']}" if requirement["state"] == "met" else ""
        console.print(f"requires {requirement['name']}: {requirement['state']}{values}")
    if report["skipped"]:
        console.print(folded_table(("skipped", "because"), report["skipped"]))
    for note in report["notes"]:
        console.print(f"note: {note}")
    for heading in ("fault", "suggestion"):
        for row in fold([(line,) for line in report[f"{heading}s"]]):
            count = f"  x{row.count}" if row.count > 1 else ""
            to_stderr.print(f"{heading}: {row.name}{count}")
    console.print(
        f"{report['mapping']}: {several(len(report['leaves']), 'leaf', 'leaves')},"
        f" {several(len(report['faults']), 'fault')}"
    )


def _row(leaf: Report, has_target: bool) -> Row:
    params, _, leaves = leaf["rule"].partition(" -> ")
    axes = leaves if " and " in leaves else leaves.partition(": ")[2]  # of this leaf alone
    shape, target = str(leaf["shape"]), str(leaf["target"] or "missing")
    return leaf["leaf"], axes, params, shape, target if has_target and target != shape else ""


def target_shapes(target: str) -> Mapping[str, Shape]:
    """The shapes of a model's parameters, by their names with slashes.

    `target` is `module:function`, which returns a tree of arrays or `ShapeDtypeStruct`s; a file
    with the output of `inspect --json`; or a checkpoint. If the tree has `param` at the top, only
    the leaves below are taken.

    Raises TreeMismatch for anything else.
    """
    path = file_path(target)
    if path.suffix == ".json" and path.is_file():
        try:
            leaves = json.loads(path.read_bytes())["leaves"]
            shapes = {leaf["leaf"]: tuple(leaf["shape"]) for leaf in leaves if "shape" in leaf}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TreeMismatch(f"{target} is not what `inspect --json` prints: {error}") from error
    elif path.exists():
        shapes = {leaf.label: leaf.shape for leaf in jax_ucp.open(target).leaves if leaf.has_array}
    else:
        shapes = tree_shapes(imported(target, "tree"))
    params = [name for name in shapes if name.startswith("param/")]
    return {name.removeprefix("param/"): shapes[name] for name in params} or shapes
