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
@click.option(
    "--root", metavar="LABEL", help="Where the parameters go in the tree; default: param."
)
@click.option(
    "--variables",
    is_flag=True,
    help="Put each parameter into a node `value`, as Flax NNX stores it.",
)
@click.option(
    "--to-step",
    type=click.IntRange(0),
    help="TARGET is the folder of a run: add the checkpoint to it as this step.",
)
@click.option(
    "--item", metavar="NAME", help="With --to-step: the name of the item; default: default."
)
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

    Every checksum, and everything that SOURCE stores twice, is compared while it is copied. If the
    command is stopped, TARGET is not a checkpoint; run the same command again to continue.

    With --mesh the chunks are cut for that mesh: a restore there reads only what it needs. Any
    other mesh can read them too.

    --root, --variables, --to-step and --item put it where a framework's own loader looks. MaxText:
    --root params --to-step 0 --item items. tunix: --root "" --variables --to-step 0 --item
    model_params.
    """
    place = _place(root, variables, to_step, item)
    if share and (executor or place != _AS_IT_IS):
        raise click.UsageError(
            "--worker goes with none of --workers, --scheduler, --root, --variables and --to-step"
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
