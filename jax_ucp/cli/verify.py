"""`jax-ucp verify`."""

from __future__ import annotations

import sys
from concurrent.futures import Executor
from typing import Any

import click
from rich.text import Text

from jax_ucp.cli.options import as_json, open_checkpoint, source_options
from jax_ucp.cli.output import console, print_json, to_stderr
from jax_ucp.cli.workers import worker_options
from jax_ucp.text import visible_lines


@click.command()
@click.argument("path")
@source_options
@worker_options
@as_json
def verify(path: str, json_: bool, executor: Executor | None, **options: Any) -> None:
    """Check every byte of the checkpoint at PATH that has a checksum or is stored twice.

    Exit code 1 if there is a fault. Formats without checksums, such as stock Orbax and safetensors,
    have little to check.
    """
    checkpoint = open_checkpoint(path, **options)
    outcomes = [fault for _, fault in checkpoint.verify(executor=executor)]
    checks, faults = len(outcomes), list(filter(None, outcomes))
    if json_:
        about = {"path": path, "format": checkpoint.format, "notes": [*checkpoint.notes]}
        print_json({**about, "checks": checks, "faults": faults})
    else:
        for fault in faults:
            to_stderr.print(Text.assemble(("fault", "red"), f" {visible_lines(fault)}"))
        for note in checkpoint.notes:
            console.print(f"note: {note}")
        console.print(f"{path}: {checks} checks, {len(faults)} faults")
        if not checks:
            console.print("nothing in this format can be checked")
    if faults:
        sys.exit(1)
