"""`jax-ucp map`."""

from __future__ import annotations

import sys
from typing import Any

import click

from jax_ucp.cli.mapping import mapping_report
from jax_ucp.cli.options import (
    as_json,
    load_mapping,
    map_arguments,
    open_checkpoint,
    source_options,
)
from jax_ucp.cli.output import console, print_json, to_stderr
from jax_ucp.cli.text_table import TextTable
from jax_ucp.inspection.report import Report
from jax_ucp.mapping.rules import shipped


@click.command("map")
@click.argument("source")
@click.option(
    "--target", help="module:function, `inspect --json` of a checkpoint, or a checkpoint."
)
@source_options
@as_json
def map_(source: str, target: str | None, mapping: str | None, json_: bool, **said: Any) -> None:
    """Check --mapping against the checkpoint SOURCE and a model's tree, and suggest what could
    be meant.
    """
    rules = load_mapping(mapping)
    if rules is None:
        raise click.UsageError(f"give --mapping: a file, or one of {', '.join(shipped())}")
    config, assume = said.pop("config"), said.pop("assume")
    checkpoint = open_checkpoint(source, of_mapping=rules, **said)
    found = mapping_report(
        checkpoint, rules, map_arguments(rules, said["sizes"], config, assume), target
    )
    if json_:
        print_json(found)
    else:
        _print_mapping(found, target)
    if found["faults"]:
        sys.exit(1)


def _print_mapping(found: Report, target: str | None) -> None:
    rows = [
        (
            leaf["rule"].partition(" -> ")[0],
            leaf["rule"].partition(" -> ")[2],
            leaf["leaf"],
            str(leaf["shape"]),
        )
        + ((str(leaf["target"]) if leaf["target"] else "-",) if target else ())
        for leaf in found["leaves"]
    ]
    heads = ("parameters: axes", "leaves: axes", "leaf", "shape", *(("target",) if target else ()))
    if rows:
        console.print(TextTable(heads, rows))
    for one in found["requires"]:
        has = f", {one['found']}" if one["state"] == "met" else ""
        console.print(f"requires {one['name']}: {one['state']}{has}", markup=False)
    for name, reason in found["skipped"]:
        console.print(f"skipped: {name}: {reason}")
    for note in found["notes"]:
        console.print(f"note: {note}")
    for fault in found["faults"]:
        to_stderr.print(f"fault: {fault}")
    for suggestion in found["suggestions"]:
        to_stderr.print(f"suggestion: {suggestion}")
    console.print(
        f"{found['mapping']}: {len(found['leaves'])} leaves, {len(found['faults'])} faults"
    )
