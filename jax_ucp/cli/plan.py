"""`jax-ucp plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from jax_ucp.cli.options import (
    as_json,
    budget,
    mesh_arguments,
    mesh_options,
    open_checkpoint,
    source_options,
)
from jax_ucp.cli.output import (
    Row,
    console,
    leaf_table,
    print_head,
    print_inventory,
    print_json,
    without_empty,
)
from jax_ucp.cli.text_table import TextTable
from jax_ucp.inspection import report
from jax_ucp.inspection.fold import fold
from jax_ucp.inspection.report import Report
from jax_ucp.inspection.words import counted, several, size, spec_words

if TYPE_CHECKING:
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostMesh

HOST_ROWS_SHOWN = 16


@click.command()
@click.argument("source")
@click.argument("target", required=False)
@click.option(
    "--inventory", is_flag=True, help="List the stored items that are not arrays of the tree."
)
@click.option(
    "--all", "all_", is_flag=True, help="Print every leaf, host and item of the inventory."
)
@mesh_options
@source_options
@budget
@as_json
def plan(
    source: str,
    target: str | None,
    inventory: bool,
    all_: bool,
    mesh: HostMesh | None,
    rules: tuple[Rule, ...],
    budget: int,
    json_: bool,
    **options: Any,
) -> None:
    """Show what converting SOURCE, or restoring it on a mesh, would read and write.

    No data is moved. With --mesh: what each host would read, how each array is sharded, and what of
    the rules the mesh cannot give. With --mesh and TARGET, the chunks are those of `convert
    --mesh`. The states of a parameter share a line where they are alike.
    """
    checkpoint = open_checkpoint(source, **options)
    cut_for = mesh_arguments(mesh if target is not None else None, rules)
    copy_plan = checkpoint.plan_save(budget, path=target, **cut_for)
    summary = report.copy_plan(checkpoint, target, copy_plan)
    if mesh:
        summary["restore"] = report.mesh_plan(checkpoint, mesh, rules)
    if json_:
        print_json(summary)
        return
    print_head(summary, _totals(summary))
    if mesh:
        _print_mesh_plan(summary["restore"], all_)
    else:
        heads = ("leaf", "shape", "dtype", "pieces", "outer chunk, if cut", "inner chunk, if cut")
        _print_leaves(heads, summary["leaves"], _chunk_row, all_)
    if inventory or all_:
        print_inventory(summary["not_mapped"], all_)


def _totals(summary: Report) -> Iterator[tuple[str, str]]:
    blocks = several(summary["blocks"], "block")
    largest = size(summary["largest_block_bytes"])
    yield "to read", f"{size(summary['read_bytes'])} in {several(summary['files'], 'file')}"
    yield "to write", f"{size(summary['write_bytes'])} in {blocks} of at most {largest}"
    in_flight, budget = size(summary["peak_bytes_in_flight"]), size(summary["budget_bytes"])
    yield "in memory", f"at most {in_flight}, with a budget of {budget}"
    if opening := summary["opening"]["requests"]:
        nbytes = size(summary["opening"]["nbytes"])
        yield "opened", f"by {several(opening, 'request')}, which brought {nbytes}"
    items = Counter(item["status"] for item in summary["not_mapped"])
    if items:
        extras, skipped = several(items["extra"], "item"), items["skipped"]
        yield "not arrays", f"{extras} kept as extras, {skipped} skipped: --inventory lists them"


def _print_mesh_plan(summary: Report, all_: bool) -> None:
    mesh = ", ".join(f"{axis} {size}" for axis, size in summary["mesh"].items())
    nbytes, devices = size(summary["device_bytes"]), summary["devices"]
    console.print(f"on a mesh of {mesh}: {nbytes} on each of {several(devices, 'device')}")
    for note in summary["notes"]:
        console.print(f"note: {note}")
    _print_hosts(summary, all_)
    heads = ("leaf", "shape", "spec", "on each device")
    _print_leaves(heads, summary["leaves"], _placement_row, all_)
    given_up = counted((note, leaf["leaf"]) for leaf in summary["leaves"] for note in leaf["notes"])
    if given_up:
        console.print(TextTable(("leaves", "given up", "such as"), given_up))


def _print_hosts(summary: Report, all_: bool) -> None:
    hosts = summary["hosts"]
    heads = ("host", "to read", "needed", "read / needed", "files", "requests")
    alike = fold([_host_row(i, host) for i, host in enumerate(hosts)])
    shown = alike if all_ else alike[:HOST_ROWS_SHOWN]
    rows = [(row.name, *row.cells) for row in shown]
    console.print(TextTable(*without_empty(heads, rows)))
    if left := sum(row.count for row in alike) - sum(row.count for row in shown):
        console.print(f"and {several(left, 'host')} more, which --all lists")
    amplification, balance = summary["amplification"], summary["balance"]
    console.print(f"all hosts: read / needed {amplification:.3f}, most / mean {balance:.3f}")
    if most := max(host["requests"] for host in hosts):
        console.print(f"requests: about {summary['requests']} of all hosts, {most} of one")


def _host_row(i: int, host: Report) -> Row:
    read, needed = size(host["read_bytes"]), size(host["needed_bytes"])
    requests = f"about {host['requests']}" if host["requests"] else ""
    return str(i), read, needed, f"{host['amplification']:.3f}", str(host["files"]), requests


def _print_leaves(
    heads: Sequence[str], leaves: Sequence[Report], row: Callable[[Report], Row], all_: bool
) -> None:
    """The arrays of a plan; scalars, of which there is nothing to say, are counted."""
    shown = [leaf for leaf in leaves if leaf["shape"] or all_]
    if shown:
        console.print(leaf_table(heads, list(map(row, shown)), all_))
    if scalars := len(leaves) - len(shown):
        console.print(f"and {several(scalars, 'scalar')}")


def _chunk_row(leaf: Report) -> Row:
    """Chunks are said where they are smaller than what they lie in."""
    shape, outer, inner = leaf["shape"], leaf["outer_chunk"], leaf["inner_chunk"]
    chunks = "" if outer == shape else str(outer), "" if inner == outer else str(inner)
    return leaf["leaf"], str(shape), leaf["dtype"], str(leaf["pieces"]), *chunks


def _placement_row(leaf: Report) -> Row:
    shape, local = str(leaf["shape"]), str(leaf["device_shape"])
    return leaf["leaf"], shape, spec_words(leaf["spec"]), "" if local == shape else local
