"""`jax-ucp mappings`."""

from __future__ import annotations

import click

import jax_ucp
from jax_ucp.cli.command import Arguments, command
from jax_ucp.cli.options import JSON, argument, option
from jax_ucp.cli.output import console, print_json, without_empty
from jax_ucp.cli.text_table import TextTable
from jax_ucp.inspection.mapping_report import mapping_list


@command(
    "mappings",
    argument("source", required=False),
    option("--config", "FILE", "The model's config.json, if the checkpoint has none."),
    JSON,
)
def mappings(args: Arguments) -> None:
    """List the mappings that come with the package; with SOURCE, those that fit that checkpoint."""
    source = args.source
    if args.config is not None and source is None:
        raise click.UsageError("--config goes with SOURCE: give that too")
    entries = mapping_list(jax_ucp.open(source) if source else None, args.config)
    if args.json_:
        print_json({"mappings": entries})
        return
    heads = ("mapping", "variants", "model", "target", "fits")
    rows: list[tuple[str, ...]] = []
    for entry in entries:
        variants = ", ".join(f":{name}" for name in entry["variants"])
        fits = {True: "yes", False: "no", None: ""}[entry.get("fits")]
        rows.append((entry["name"], variants, entry["model"], entry["target"], fits))
    if rows:
        console.print(TextTable(*without_empty(heads, rows)))
        for entry in filter(lambda entry: entry.get("why"), entries):
            console.print(f"{entry['name']}: {entry['why']}")
    elif source:
        console.print(
            f"{source}: no mapping of the package fits; `jax-ucp map {source} --suggest --target"
            " TREE` drafts one",
        )
