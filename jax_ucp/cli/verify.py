"""`jax-ucp verify`."""

from __future__ import annotations

import sys

from rich.text import Text

from jax_ucp.cli.command import Arguments, command
from jax_ucp.cli.options import JSON, SOURCE, WORKERS, argument
from jax_ucp.cli.output import console, print_json, to_stderr
from jax_ucp.text import visible_lines


@command("verify", argument("path"), *SOURCE, *WORKERS, JSON)
def verify(args: Arguments) -> None:
    """Check every byte of the checkpoint at PATH that has a checksum or is stored twice.

    Exit code 1 if there is a fault. Formats without checksums, such as stock Orbax and safetensors,
    have little to check, except for files of the Hugging Face hub and its cache, which have hashes.
    """
    checkpoint = args.open(args.path)
    outcomes = [fault for _, fault in checkpoint.verify(executor=args.executor)]
    checks, faults = len(outcomes), list(filter(None, outcomes))
    if args.json_:
        about = {"path": args.path, "format": checkpoint.format, "notes": [*checkpoint.notes]}
        print_json({**about, "checks": checks, "faults": faults})
    else:
        for fault in faults:
            to_stderr.print(Text.assemble(("fault", "red"), f" {visible_lines(fault)}"))
        for note in checkpoint.notes:
            console.print(f"note: {note}")
        console.print(f"{args.path}: {checks} checks, {len(faults)} faults")
        if not checks:
            console.print("nothing in this format can be checked")
    if faults:
        sys.exit(1)
