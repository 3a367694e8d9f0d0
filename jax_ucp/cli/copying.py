"""`jax-ucp plan` and `jax-ucp convert`: the copy in the universal format, foreseen and done."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Executor
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
    console,
    folded_table,
    print_head,
    print_inventory,
    print_json,
    progress,
    size,
    to_stderr,
)
from jax_ucp.cli.text_table import TextTable
from jax_ucp.cli.workers import share_option, worker_options
from jax_ucp.errors import ShardingWarning
from jax_ucp.inspection import report
from jax_ucp.inspection.report import Report

if TYPE_CHECKING:
    import jax_ucp
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostMesh

HOSTS_SHOWN = 16


@click.command()
@click.argument("source")
@click.argument("target", required=False)
@mesh_options
@source_options
@budget
@as_json
def plan(
    source: str,
    target: str | None,
    mesh: HostMesh | None,
    rules: tuple[Rule, ...],
    budget: int,
    json_: bool,
    **options: Any,
) -> None:
    """What converting SOURCE to TARGET would do, or restoring it on a mesh. Moves no data.

    With --mesh and TARGET, the chunks are those of `convert --mesh`; what hosts read, they read of
    SOURCE.
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
    print_head(summary)
    console.print(
        f"to read {size(summary['read_bytes'])}, to write {size(summary['write_bytes'])} in"
        f" {summary['blocks']} blocks of at most {size(summary['largest_block_bytes'])}; at most"
        f" {size(summary['peak_bytes_in_flight'])} in flight"
    )
    if mesh:
        _print_mesh_plan(summary["restore"])
    else:
        columns = ("leaf", "dtype", "shape", "pieces", "outer_chunk", "inner_chunk")
        rows = [[str(leaf[column]) for column in columns] for leaf in summary["leaves"]]
        console.print(folded_table([column.replace("_", " ") for column in columns], rows))
    print_inventory(summary["not_mapped"], False)


@click.command()
@click.argument("source")
@click.argument("target")
@mesh_options
@source_options
@budget
@worker_options
@share_option
@as_json
def convert(
    source: str,
    target: str,
    mesh: HostMesh | None,
    rules: tuple[Rule, ...],
    budget: int,
    json_: bool,
    executor: Executor | None,
    share: tuple[int, int] | None,
    **options: Any,
) -> None:
    """Write the checkpoint at SOURCE to TARGET in the universal format.

    With --mesh it is cut as a save from that mesh cuts it: a restore there reads what it needs and
    nothing beside it, and one elsewhere reads it too.

    What SOURCE stores twice is compared on the way. Stopped at any moment, nothing at TARGET looks
    like a checkpoint; the same command takes up where it was stopped.
    """
    if share and executor:
        raise click.UsageError("--worker is one process among others: give it alone")
    checkpoint = open_checkpoint(source, **options)
    for note in (*checkpoint.notes, *(report.mesh_notes(checkpoint, mesh, rules) if mesh else ())):
        to_stderr.print(f"note: {note}")
    total = checkpoint.nbytes // (share[1] if share else 1)
    with progress("converting", total) as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)  # what it says are the notes above
        how = {
            **mesh_arguments(mesh, rules),
            "budget_bytes": budget,
            "progress": lambda block: advance(block.nbytes),
        }
        if share:
            result = checkpoint.save_share(target, share, **how)
        else:
            result = checkpoint.save(target, **how, executor=executor)
    if result is not None:
        _print_result(target, result, checkpoint.notes, json_)
    elif json_:
        print_json({"path": target, "share": share, "committed": False})
    else:
        console.print(f"{target}: this share is done; it is a checkpoint when all are")


def _print_result(
    target: str, result: jax_ucp.Checkpoint, notes: Sequence[str], json_: bool
) -> None:
    summary = report.inspection(result)
    if json_:
        keys = ("path", "format", "bytes", "arrays", "items", "source")
        print_json({**{key: summary[key] for key in keys}, "notes": list(notes)})
    else:
        nbytes, extras = size(summary["bytes"]), len(summary["extras"])
        console.print(f"{target}: {summary['arrays']} arrays, {nbytes}, {extras} extras")


def _print_mesh_plan(summary: Report) -> None:
    mesh = ", ".join(f"{axis} {size}" for axis, size in summary["mesh"].items())
    nbytes, devices = size(summary["device_bytes"]), summary["devices"]
    console.print(f"on a mesh of {mesh}: {nbytes} on each of {devices} devices")
    for note in summary["notes"]:
        console.print(f"note: {note}")
    hosts = summary["hosts"]
    rows = [_host_row(i, host) for i, host in enumerate(hosts[:HOSTS_SHOWN])]
    console.print(TextTable(("host", "to read", "needed", "read / needed", "files"), rows))
    if len(hosts) > HOSTS_SHOWN:
        console.print(f"and {len(hosts) - HOSTS_SHOWN} hosts more, which --json lists")
    amplification, balance = summary["amplification"], summary["balance"]
    console.print(f"all hosts: read / needed {amplification:.3f}, most / mean {balance:.3f}")
    heads = ("leaf", "shape", "spec", "on each device", "given up")
    console.print(folded_table(heads, map(_placement_row, summary["leaves"])))


def _host_row(i: int, host: Report) -> tuple[str, ...]:
    read, needed = size(host["read_bytes"]), size(host["needed_bytes"])
    return str(i), read, needed, f"{host['amplification']:.3f}", str(host["files"])


def _placement_row(leaf: Report) -> tuple[str, ...]:
    spec, shape = tuple(leaf["spec"]), leaf["device_shape"]
    return leaf["leaf"], str(leaf["shape"]), str(spec), str(shape), "; ".join(leaf["notes"])
