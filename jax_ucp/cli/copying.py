"""`jax-ucp plan` and `jax-ucp convert`: the copy in the universal format, foreseen and done."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
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
    print_share,
    progress,
    to_stderr,
)
from jax_ucp.cli.text_table import TextTable
from jax_ucp.cli.workers import progress_option, share_option, worker_options
from jax_ucp.errors import ShardingWarning
from jax_ucp.inspection import report
from jax_ucp.inspection.report import Report
from jax_ucp.inspection.words import size

if TYPE_CHECKING:
    import jax_ucp
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostMesh

HOSTS_SHOWN = 16
_AS_IT_IS = {"root": None, "variables": False, "step": None}


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
    if opening := summary["opening"]["requests"]:
        console.print(
            f"opened by {opening} requests, which brought {size(summary['opening']['nbytes'])}"
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
@click.option("--root", help="The label of the parameters at TARGET, in place of param.")
@click.option(
    "--variables", is_flag=True, help="Each parameter in a node `value`, as Flax NNX stores them."
)
@click.option(
    "--to-step",
    type=click.IntRange(0),
    help="TARGET is a run, to which this step is added.",
)
@click.option("--item", help="With --to-step: the item's name; unsaid, default.")
@mesh_options
@source_options
@budget
@worker_options
@share_option
@progress_option
@as_json
def convert(
    source: str,
    target: str,
    mesh: HostMesh | None,
    rules: tuple[Rule, ...],
    budget: int,
    json_: bool,
    root: str | None,
    variables: bool,
    to_step: int | None,
    item: str | None,
    executor: Executor | None,
    share: tuple[int, int] | None,
    progress_style: str,
    **options: Any,
) -> None:
    """Write the checkpoint at SOURCE to TARGET in the universal format.

    --root, --variables, --to-step and --item write it where a framework's own loader looks:
    MaxText's wants --root params --to-step 0 --item items, tunix's --root "" --variables --to-step
    0 --item model_params.

    With --mesh it is cut as a save from that mesh cuts it: a restore there reads what it needs and
    nothing beside it, and one elsewhere reads it too.

    What SOURCE stores twice is compared on the way. Stopped at any moment, nothing at TARGET looks
    like a checkpoint; the same command takes up where it was stopped.
    """
    place = _place(root, variables, to_step, item)
    if share and (executor or place != _AS_IT_IS):
        raise click.UsageError(
            "--worker is one process among others, which write TARGET as it is: give it alone"
        )
    checkpoint = open_checkpoint(source, **options)
    mesh_notes = report.mesh_notes(checkpoint, mesh, rules) if mesh else ()
    for note in (*checkpoint.notes, *mesh_notes):
        to_stderr.print(f"note: {note}")
    total, save = checkpoint.nbytes, partial(checkpoint.save, executor=executor, **place)
    if share:
        total, save = total // share[1], partial(checkpoint.save_share, share=share)
    with progress("converting", total, progress_style, share) as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)  # what it says are the notes above
        result = save(
            target,
            **mesh_arguments(mesh, rules),
            budget_bytes=budget,
            progress=lambda block: advance(block.nbytes),
        )
    if result is not None:
        _print_result(target, result, checkpoint.notes, json_)
    else:
        print_share(target, share, json_)


def _place(
    root: str | None, variables: bool, to_step: int | None, item: str | None
) -> dict[str, Any]:
    """Where `Checkpoint.save` puts the parameters. Raises UsageError for an item without a step."""
    place = {"root": root, "variables": variables, "step": to_step}
    if item is None:
        return place
    if to_step is None:
        raise click.UsageError("--item goes with --to-step: give that too")
    return {**place, "item": item}


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
    heads = ("host", "to read", "needed", "read / needed", "files", "requests")
    is_remote = any(host["requests"] for host in hosts)
    console.print(TextTable(heads if is_remote else heads[:-1], rows))
    if len(hosts) > HOSTS_SHOWN:
        console.print(f"and {len(hosts) - HOSTS_SHOWN} hosts more, which --json lists")
    amplification, balance = summary["amplification"], summary["balance"]
    console.print(f"all hosts: read / needed {amplification:.3f}, most / mean {balance:.3f}")
    if is_remote:
        most = max(host["requests"] for host in hosts)
        console.print(f"requests: about {summary['requests']} of all hosts, {most} of one")
    heads = ("leaf", "shape", "spec", "on each device", "given up")
    console.print(folded_table(heads, map(_placement_row, summary["leaves"])))


def _host_row(i: int, host: Report) -> tuple[str, ...]:
    read, needed = size(host["read_bytes"]), size(host["needed_bytes"])
    row = str(i), read, needed, f"{host['amplification']:.3f}", str(host["files"])
    return (*row, f"about {host['requests']}") if host["requests"] else row


def _placement_row(leaf: Report) -> tuple[str, ...]:
    spec, shape = tuple(leaf["spec"]), leaf["device_shape"]
    return leaf["leaf"], str(leaf["shape"]), str(spec), str(shape), "; ".join(leaf["notes"])
