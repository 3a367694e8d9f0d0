"""`jax-ucp convert`."""

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
from jax_ucp.cli.output import console, print_json, print_share, progress, to_stderr
from jax_ucp.cli.workers import progress_option, share_option, worker_options
from jax_ucp.errors import ShardingWarning
from jax_ucp.inspection import report
from jax_ucp.inspection.words import size

if TYPE_CHECKING:
    import jax_ucp
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostMesh

_AS_IT_IS = {"root": None, "variables": False, "step": None}


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
    total = 0 if share else checkpoint.nbytes
    with progress("converting", total, progress_style, share) as meter, warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)  # what it says are the notes above
        if share:
            save = partial(checkpoint.save_share, share=share, begin=meter.expect)
        else:
            save = partial(checkpoint.save, executor=executor, **place)
        result = save(
            target,
            **mesh_arguments(mesh, rules),
            budget_bytes=budget,
            progress=lambda block: meter.advance(block.nbytes),
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
