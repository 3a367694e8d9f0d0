"""`jax-ucp convert`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import click

from jax_ucp.cli.command import Arguments, command
from jax_ucp.cli.options import BUDGET, JSON, LAYOUT, MESH, SHARE, SOURCE, WORKERS, argument
from jax_ucp.cli.output import console, print_json, print_share, progress, to_stderr
from jax_ucp.errors import ShardingWarning
from jax_ucp.inspection import report
from jax_ucp.inspection.words import size


@command(
    "convert",
    argument("source"),
    argument("target"),
    *LAYOUT,
    *MESH,
    *SOURCE,
    BUDGET,
    *WORKERS,
    *SHARE,
    JSON,
)
def convert(args: Arguments) -> None:
    """Write the checkpoint at SOURCE to TARGET in the universal format.

    Every checksum, and everything that SOURCE stores twice, is compared while it is copied. If the
    command is stopped, TARGET is not a checkpoint; run the same command again to continue.

    With --mesh the chunks are cut for that mesh: a restore there reads only what it needs. Any
    other mesh can read them too.

    --root, --variables, --to-step and --item put it where a framework's own loader looks. MaxText:
    --root params --to-step 0 --item items, and of layers that are not scanned --custom-metadata
    '{"scan_layers": false}'. tunix: --root "" --variables --to-step 0 --item model_params.
    """
    layout = args.layout
    if args.share and (args.executor or layout):
        raise click.UsageError(
            "--worker goes with none of --workers, --scheduler, --root, --variables and --to-step"
        )
    checkpoint = args.open(args.source)
    mesh_notes: Sequence[str] = ()
    if args.mesh:
        from jax_ucp.sharding.reads import fit_notes  # brings in jax, which nothing else here needs

        mesh_notes = fit_notes(checkpoint.leaves, args.mesh, args.rules)
    for note in (*checkpoint.notes, *mesh_notes):
        to_stderr.print(f"note: {note}")
    total = 0 if args.share else checkpoint.nbytes
    with (
        progress("converting", total, args.progress, args.share) as meter,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ShardingWarning)  # what it says are the notes above
        if args.share:
            save = partial(checkpoint.save_share, share=args.share, begin=meter.expect)
        else:
            save = partial(checkpoint.save, executor=args.executor, **layout)
        result = save(
            args.target,
            **args.save_mesh,
            budget_bytes=args.budget,
            progress=lambda block: meter.advance(block.nbytes),
        )
    if result is None:
        print_share(args.target, args.share, args.json_)
        return
    if args.json_:
        summary = report.inspection(result)
        keys = ("path", "format", "bytes", "arrays", "items", "source")
        print_json({**{key: summary[key] for key in keys}, "notes": list(checkpoint.notes)})
    else:
        arrays = sum(leaf.has_array for leaf in result.leaves)
        extras = len(result.extras)
        console.print(f"{args.target}: {arrays} arrays, {size(result.nbytes)}, {extras} extras")
