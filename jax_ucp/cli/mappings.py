"""`jax-ucp mappings`."""

from __future__ import annotations

import click

import jax_ucp
from jax_ucp.cli.options import as_json
from jax_ucp.cli.output import console, print_json
from jax_ucp.cli.text_table import TextTable
from jax_ucp.inspection.mapping_list import mapping_list


@click.command()
@click.argument("source", required=False)
@click.option(
    "--config", metavar="FILE", help="The model's config.json, if the checkpoint has none."
)
@as_json
def mappings(source: str | None, config: str | None, json_: bool) -> None:
    """List the mappings that come with the package; with SOURCE, those that fit that checkpoint."""
    if config is not None and source is None:
        raise click.UsageError("--config goes with SOURCE: give that too")
    entries = mapping_list(jax_ucp.open(source) if source else None, config)
    if json_:
        print_json({"mappings": entries})
        return
    heads = ("mapping", "variants", "model", "target") + (("fits",) if source else ())
    rows = [_row(entry) for entry in entries]
    if rows:
        console.print(TextTable(heads, rows))
        for entry in filter(lambda entry: entry.get("why"), entries):
            console.print(f"{entry['name']}: {entry['why']}", markup=False)
    elif source:
        console.print(
            f"{source}: no mapping of the package fits; `jax-ucp map {source} --suggest --target"
            " TREE` drafts one",
            markup=False,
        )


def _row(entry: dict[str, object]) -> tuple[str, ...]:
    variants = entry["variants"]
    shown = ", ".join(f":{one}" for one in variants) if isinstance(variants, list) else ""
    row = str(entry["name"]), shown, str(entry["model"]), str(entry["target"])
    if "fits" not in entry:
        return row
    return (*row, "yes" if entry["fits"] else "no")
