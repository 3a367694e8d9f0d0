"""`jax-ucp plan` and `jax-ucp convert`: the copy in the universal format, foreseen and done."""

from __future__ import annotations

import warnings
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
    print_head,
    print_inventory,
    print_json,
    progress,
    size,
    table,
    to_stderr,
)
from jax_ucp.errors import ShardingWarning
from jax_ucp.inspection import report
from jax_ucp.inspection.report import Report

if TYPE_CHECKING:
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
    **said: Any,
) -> None:
    """What converting SOURCE to TARGET would do, or restoring it on a mesh. Moves no data.

    With --mesh and TARGET, the chunks are those of `convert --mesh`; what hosts read, they read of
    SOURCE.
    """
    checkpoint = open_checkpoint(source, **said)
    found = report.copy_plan(
        checkpoint,
        target,
        checkpoint.plan_save(
            budget, path=target, **mesh_arguments(mesh if target is not None else None, rules)
        ),
    )
    if mesh:
        found["restore"] = report.mesh_plan(checkpoint, mesh, rules)
    if json_:
        print_json(found)
        return
    print_head(found)
    console.print(
        f"to read {size(found['read_bytes'])}, to write {size(found['write_bytes'])} in"
        f" {found['blocks']} blocks of at most {size(found['largest_block_bytes'])}; at most"
        f" {size(found['peak_bytes_in_flight'])} in flight"
    )
    if mesh:
        _print_mesh_plan(found["restore"])
    else:
        rows = [
            (
                a["leaf"],
                a["dtype"],
                str(a["shape"]),
                str(a["pieces"]),
                str(a["outer_chunk"]),
                str(a["inner_chunk"]),
            )
            for a in found["leaves"]
        ]
        console.print(
            table(("leaf", "dtype", "shape", "pieces", "outer chunk", "inner chunk"), rows)
        )
    print_inventory(found["not_mapped"], True)


@click.command()
@click.argument("source")
@click.argument("target")
@mesh_options
@source_options
@budget
@as_json
def convert(
    source: str,
    target: str,
    mesh: HostMesh | None,
    rules: tuple[Rule, ...],
    budget: int,
    json_: bool,
    **said: Any,
) -> None:
    """Write the checkpoint at SOURCE to TARGET in the universal format.

    With --mesh it is cut as a save from that mesh cuts it: a restore there reads what it needs and
    nothing beside it, and one elsewhere reads it too.

    What SOURCE stores twice is compared on the way. Stopped at any moment, nothing at TARGET looks like
    a checkpoint; the same command takes up where it was stopped.
    """
    checkpoint = open_checkpoint(source, **said)
    for note in (*checkpoint.notes, *(report.mesh_notes(checkpoint, mesh, rules) if mesh else ())):
        to_stderr.print(f"note: {note}")
    with progress("converting", checkpoint.nbytes) as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)  # what it says are the notes above
        result = checkpoint.save(
            target,
            **mesh_arguments(mesh, rules),
            budget_bytes=budget,
            progress=lambda block: advance(block.nbytes),
        )
    found = report.inspection(result)
    if json_:
        kept = {key: found[key] for key in ("path", "format", "bytes", "arrays", "items", "source")}
        print_json({**kept, "notes": list(checkpoint.notes)})
    else:
        console.print(
            f"{target}: {found['arrays']} arrays, {size(found['bytes'])}, {len(found['extras'])}"
            " extras"
        )


def _print_mesh_plan(found: Report) -> None:
    mesh = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    console.print(
        f"on a mesh of {mesh}: {size(found['device_bytes'])} on each of {found['devices']} devices"
    )
    for note in found["notes"]:
        console.print(f"note: {note}")
    hosts = found["hosts"]
    rows = [
        (
            str(i),
            size(h["read_bytes"]),
            size(h["needed_bytes"]),
            f"{h['amplification']:.3f}",
            str(h["files"]),
        )
        for i, h in enumerate(hosts[:HOSTS_SHOWN])
    ]
    console.print(table(("host", "to read", "needed", "read / needed", "files"), rows))
    if len(hosts) > HOSTS_SHOWN:
        console.print(f"and {len(hosts) - HOSTS_SHOWN} hosts more, which --json lists")
    console.print(
        f"all hosts: read / needed {found['amplification']:.3f}, most / mean {found['balance']:.3f}"
    )
    rows = [
        (
            leaf["leaf"],
            str(leaf["shape"]),
            str(tuple(leaf["spec"])),
            str(leaf["device_shape"]),
            "; ".join(leaf["notes"]),
        )
        for leaf in found["leaves"]
    ]
    console.print(table(("leaf", "shape", "spec", "on each device", "given up"), rows))
