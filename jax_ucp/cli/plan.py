"""`jax-ucp plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax_ucp.cli.command import Arguments, command
from jax_ucp.cli.options import BUDGET, JSON, MESH, SOURCE, argument, option
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

HOST_ROWS_SHOWN = 16


@command(
    "plan",
    argument("source"),
    argument("target", required=False),
    option("--inventory", None, "List the stored items that are not arrays of the tree."),
    option("--all all_", None, "Print every leaf, host and item of the inventory."),
    *MESH,
    *SOURCE,
    BUDGET,
    JSON,
)
def plan(args: Arguments) -> None:
    """Show what converting SOURCE, or restoring it on a mesh, would read and write.

    No data is moved. With --mesh: what each host would read, how each array is sharded, and what of
    the rules the mesh cannot give. With --mesh and TARGET, the chunks are those of `convert
    --mesh`. The states of a parameter share a line where they are alike.
    """
    checkpoint = args.open(args.source)
    cut_for = args.save_mesh if args.target is not None else {}
    copy_plan = checkpoint.plan_save(args.budget, path=args.target, **cut_for)
    summary = report.copy_plan(checkpoint, args.target, copy_plan)
    if args.mesh:
        summary["restore"] = report.mesh_plan(checkpoint, args.mesh, args.rules)
    if args.json_:
        print_json(summary)
        return
    print_head(summary, _totals(summary))
    if args.mesh:
        _print_mesh_plan(summary["restore"], args.all_)
    else:
        _print_leaves(_CHUNKS, summary["leaves"], args.all_)
    if args.inventory or args.all_:
        print_inventory(summary["not_mapped"], args.all_)


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
    heads = ("host", "to read", "needed", "read / needed", "files", "requests")
    hosts: list[Row] = []
    for i, host in enumerate(summary["hosts"]):
        read, needed = size(host["read_bytes"]), size(host["needed_bytes"])
        requests = f"about {host['requests']}" if host["requests"] else ""
        amplification = f"{host['amplification']:.3f}"
        hosts.append((str(i), read, needed, amplification, str(host["files"]), requests))
    alike = fold(hosts)
    shown = alike if all_ else alike[:HOST_ROWS_SHOWN]
    console.print(TextTable(*without_empty(heads, [(row.name, *row.cells) for row in shown])))
    if left := len(hosts) - sum(row.count for row in shown):
        console.print(f"and {several(left, 'host')} more, which --all lists")
    amplification, balance = summary["amplification"], summary["balance"]
    console.print(f"all hosts: read / needed {amplification:.3f}, most / mean {balance:.3f}")
    if most := max(host["requests"] for host in summary["hosts"]):
        console.print(f"requests: about {summary['requests']} of all hosts, {most} of one")
    _print_leaves(_PLACES, summary["leaves"], all_)
    given_up = counted((note, leaf["leaf"]) for leaf in summary["leaves"] for note in leaf["notes"])
    if given_up:
        console.print(TextTable(("leaves", "given up", "such as"), given_up))


def _print_leaves(
    columns: Mapping[str, Callable[[Report], str]], leaves: Sequence[Report], all_: bool
) -> None:
    """Print the arrays of a plan, and the number of scalars."""
    shown = [leaf for leaf in leaves if leaf["shape"] or all_]
    if shown:
        rows = [tuple(cell(leaf) for cell in columns.values()) for leaf in shown]
        console.print(leaf_table(tuple(columns), rows, all_))
    if scalars := len(leaves) - len(shown):
        console.print(f"and {several(scalars, 'scalar')}")


def _unless(value: object, usual: object) -> str:
    """The value as a text; empty if it is the usual one."""
    return "" if value == usual else str(value)


# Functions of a leaf for the cells of a table, by their headings.
_CHUNKS: dict[str, Callable[[Report], str]] = {
    "leaf": lambda leaf: leaf["leaf"],
    "shape": lambda leaf: str(leaf["shape"]),
    "dtype": lambda leaf: leaf["dtype"],
    "pieces": lambda leaf: str(leaf["pieces"]),
    "outer chunk, if cut": lambda leaf: _unless(leaf["outer_chunk"], leaf["shape"]),
    "inner chunk, if cut": lambda leaf: _unless(leaf["inner_chunk"], leaf["outer_chunk"]),
}
_PLACES: dict[str, Callable[[Report], str]] = {
    "leaf": lambda leaf: leaf["leaf"],
    "shape": lambda leaf: str(leaf["shape"]),
    "spec": lambda leaf: spec_words(leaf["spec"]),
    "on each device": lambda leaf: _unless(leaf["device_shape"], leaf["shape"]),
}
