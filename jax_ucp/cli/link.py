"""`jax-ucp link`."""

from __future__ import annotations

from jax_ucp.cli.command import Arguments, command
from jax_ucp.cli.options import BUDGET, JSON, LAYOUT, SOURCE, argument, option
from jax_ucp.cli.output import console, print_json, to_stderr
from jax_ucp.inspection import report
from jax_ucp.inspection.words import several, size


@command(
    "link",
    argument("source"),
    argument("target"),
    option("--dry-run", None, "Say what would be linked and what copied, and write nothing."),
    option(
        "--checksum",
        None,
        "Read every linked byte once, and record the CRC-32 of each chunk for `verify`.",
    ),
    *LAYOUT,
    *SOURCE,
    BUDGET,
    JSON,
)
def link(args: Arguments) -> None:
    """Write a checkpoint to TARGET whose arrays stay in the files of SOURCE.

    Orbax, and what is built on it, restores it on any mesh without jax_ucp. What does not lie in
    the files as runs of elements is copied. The files must stay as they are: jax_ucp refuses a link
    whose files have changed, Orbax does not look.

    In a bucket TARGET is a folder that has SOURCE in it, and nothing else. With --dry-run nothing
    is read for --checksum either.
    """
    layout = args.layout
    checkpoint = args.open(args.source)
    for note in checkpoint.notes:
        to_stderr.print(f"note: {note}")
    step, item = layout.get("step"), layout.get("item", "default")
    place = args.target if step is None else f"{args.target}/{step}/{item}"
    plan = checkpoint.plan_link(place, args.budget)
    if not args.dry_run:
        checkpoint.link(args.target, checksum=args.checksum, budget_bytes=args.budget, **layout)
    summary = report.link_plan(checkpoint, args.target, plan)
    if args.json_:
        print_json(summary)
        return
    linked, copied = summary["linked"], summary["copied"]
    would = "would be " if args.dry_run else ""
    console.print(
        f"{summary['target']}: {several(linked['arrays'], 'array')} ({size(linked['bytes'])})"
        f" {would}linked in {several(linked['files'], 'file')},"
        f" {several(copied['arrays'], 'array')} ({size(copied['bytes'])}) {would}copied"
    )
    for reason, count in copied["reasons"].items():
        console.print(f"  {several(count, 'array')} copied: {reason}")
