"""`jax-ucp map`."""

from __future__ import annotations

import sys
from typing import Any

import click

from jax_ucp.cli.mapping import target_shapes
from jax_ucp.cli.options import (
    as_json,
    load_mapping,
    map_arguments,
    open_checkpoint,
    source_options,
)
from jax_ucp.cli.output import console, folded_table, print_json, to_stderr
from jax_ucp.inspection.mapping_report import mapping_report
from jax_ucp.inspection.report import Report
from jax_ucp.mapping.rules import shipped


@click.command("map")
@click.argument("source")
@click.option(
    "--target", help="module:function, `inspect --json` of a checkpoint, or a checkpoint."
)
@source_options
@as_json
def map_(source: str, target: str | None, mapping: str | None, json_: bool, **options: Any) -> None:
    """Check --mapping against the checkpoint SOURCE and a model's tree, and suggest fixes."""
    rules = load_mapping(mapping)
    if rules is None:
        raise click.UsageError(f"give --mapping: a file, or one of {', '.join(shipped())}")
    config, assume = options.pop("config"), options.pop("assume")
    checkpoint = open_checkpoint(source, of_mapping=rules, **options)
    arguments = map_arguments(rules, options["sizes"], config, assume)
    shapes = target_shapes(target) if target else None
    report = mapping_report(checkpoint, rules, shapes, **arguments)
    if json_:
        print_json(report)
    else:
        _print_mapping(report, bool(target))
    if report["faults"]:
        sys.exit(1)


def _print_mapping(report: Report, has_target: bool) -> None:
    heads = ("leaf", "parameters: axes", "leaves: axes", "shape", "target")
    columns = 5 if has_target else 4
    rows = [_row(leaf)[:columns] for leaf in report["leaves"]]
    if rows:
        console.print(folded_table(heads[:columns], rows))
    for requirement in report["requires"]:
        values = f", {requirement['found']}" if requirement["state"] == "met" else ""
        console.print(
            f"requires {requirement['name']}: {requirement['state']}{values}", markup=False
        )
    if report["skipped"]:
        console.print(folded_table(("skipped", "because"), report["skipped"]))
    for note in report["notes"]:
        console.print(f"note: {note}")
    for fault in report["faults"]:
        to_stderr.print(f"fault: {fault}")
    for suggestion in report["suggestions"]:
        to_stderr.print(f"suggestion: {suggestion}")
    console.print(
        f"{report['mapping']}: {len(report['leaves'])} leaves, {len(report['faults'])} faults"
    )


def _row(leaf: Report) -> tuple[str, ...]:
    params, _, leaves = leaf["rule"].partition(" -> ")
    return leaf["leaf"], params, leaves, str(leaf["shape"]), str(leaf["target"] or "-")
