"""`jax-ucp verify`."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.text import Text

from jax_ucp.cli.options import as_json, open_checkpoint, source_options
from jax_ucp.cli.output import console, print_json, to_stderr
from jax_ucp.text import visible_lines


@click.command()
@click.argument("path")
@source_options
@as_json
def verify(path: str, json_: bool, **said: Any) -> None:
    """Read every byte of the checkpoint at PATH that has a checksum or a duplicate, and compare."""
    checkpoint = open_checkpoint(path, **said)
    looked, faults = 0, []
    for _, fault in checkpoint.verify():
        looked += 1
        if fault:
            faults.append(fault)
    if json_:
        print_json({"path": path, "format": checkpoint.format, "checks": looked, "faults": faults})
    else:
        for fault in faults:
            to_stderr.print(Text.assemble(("fault", "red"), f" {visible_lines(fault)}"))
        for note in checkpoint.notes:
            console.print(f"note: {note}")
        console.print(f"{path}: {looked} checks, {len(faults)} faults")
        if not looked:
            console.print("nothing in this format can be checked")
    if faults:
        sys.exit(1)
