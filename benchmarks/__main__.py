"""`python -m benchmarks NAME`: measures, prints Markdown tables, and leaves them as JSON and
Markdown.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path

import click

# A benchmark is a module with `run(options) -> Iterator[Table]`.
BENCHMARKS = {
    "elastic": "benchmarks.elastic",
    "small": "benchmarks.small",
    "import": "benchmarks.importing",
    "memory": "benchmarks.memory",
    "processes": "benchmarks.processes",
    "plan": "benchmarks.plan",
    "scale": "benchmarks.scale",
    "arrays": "benchmarks.arrays",
    "quantized": "benchmarks.quantized",
    "gguf": "benchmarks.gguf",
    "remote": "benchmarks.remote",
    "links": "benchmarks.links",
    "loaders": "benchmarks.loaders",
    "device": "benchmarks.device",
}


@click.command()
@click.argument("name", type=click.Choice(list(BENCHMARKS)))
@click.option("--work", type=click.Path(path_type=Path), help="Folder for checkpoints and results.")
@click.option(
    "--runs", default=5, show_default=True, help="Runs of each contestant, after one that warms."
)
@click.option("--mib", default=1024, show_default=True, help="Size of the large state.")
@click.option("--torch-python", help="A Python with torch: without it, PyTorch's rows are absent.")
@click.option("--ones", is_flag=True, help="Of `elastic`: numbers that compress, not random ones.")
@click.option("--counts", default="", help="Of `arrays`: only what each step takes of so many.")
def main(
    name: str,
    work: Path | None,
    runs: int,
    mib: int,
    torch_python: str | None,
    ones: bool,
    counts: str,
) -> None:
    """Measure one thing, beside every peer and the physical limit."""
    # before JAX is imported
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=16")
    from benchmarks.race import Options, write

    with tempfile.TemporaryDirectory() as temporary:
        folder = (work or Path(temporary)).absolute()
        numbers = [int(count) for count in counts.split(",") if count]
        options = Options(folder, runs, torch_python, mib, numbers, ones)
        tables = []
        for table in importlib.import_module(BENCHMARKS[name]).run(options):
            tables.append(table)
            text = write(name, tables, options)
            click.echo(f"{table.title}: done", err=True)
        click.echo(text)


if __name__ == "__main__":
    main()
