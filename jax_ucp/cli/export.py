"""`jax-ucp export`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

import click

from jax_ucp.arguments import local_path
from jax_ucp.cli.mapping import imported
from jax_ucp.cli.options import (
    Size,
    as_json,
    budget,
    load_mapping,
    map_arguments,
    open_checkpoint,
    require_mapping,
    source_options,
)
from jax_ucp.cli.output import console, print_json, progress, size, to_stderr
from jax_ucp.cli.workers import worker_options
from jax_ucp.errors import TreeMismatch
from jax_ucp.formats.exporting import EXPORT_FORMATS, ExportFormat
from jax_ucp.inspection import report


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--format", type=click.Choice(EXPORT_FORMATS), required=True, help="What to write.")
@click.option(
    "--dtype",
    help="Cast floating parameters, such as float32 masters to bfloat16; unsaid, no bit changes.",
)
@click.option(
    "--max-shard",
    "max_shard_bytes",
    type=Size(),
    help="Bytes of tensors in a file of safetensors; unsaid, 50 GB.",
)
@click.option(
    "--zero-stage",
    type=click.IntRange(1, 3),
    help="ZeRO stage of the DeepSpeed run that will resume; unsaid, that of SOURCE.",
)
@click.option(
    "--optimizer",
    help="module:function, which returns the optax optimizer of the run that wrote SOURCE.",
)
@click.option(
    "--params", help="With --optimizer: the label of the parameters in SOURCE; unsaid, params."
)
@click.option(
    "--opt-state", help="With --optimizer: the label of the optimizer's state; unsaid, opt_state."
)
@click.option(
    "--step-dtype",
    type=click.Choice(["float32", "int32", "int64"]),
    help="With --optimizer: the dtype of steps; unsaid, float32, and int32 for Lion.",
)
@source_options
@budget
@worker_options
@as_json
def export(
    source: str,
    target: str,
    format: ExportFormat,
    mapping: str | None,
    budget: int,
    json_: bool,
    executor: Executor | None,
    **others: Any,
) -> None:
    """Write the checkpoint at SOURCE to the new folder TARGET in a format that torch's world reads.

    safetensors: weights, as transformers loads them. dcp: weights and optimizer, for
    torch.distributed.checkpoint. deepspeed: a universal folder, for a run with load_universal.
    --mapping names the one by which SOURCE has the leaves of a model: it is undone. --optimizer
    names a function that returns the optax optimizer of a training run in JAX, or it and the
    abstract tree of the model: its state becomes those of torch's. What SOURCE stores twice is
    compared on the way. Stopped at any moment, nothing is at TARGET.
    """
    options = {name: others.pop(name) for name in ("dtype", "max_shard_bytes", "zero_stage")}
    labels = {name: others.pop(name) for name in ("params", "opt_state", "step_dtype")}
    labels = {name: label for name, label in labels.items() if label}
    optimizer = others.pop("optimizer")
    _check_options(format, options, optimizer, labels)
    local_path(target)
    of_model = require_mapping(mapping, others.pop("config"), others.pop("assume"))
    rules = load_mapping(mapping)
    checkpoint = open_checkpoint(source, of_mapping=rules, **others)
    if optimizer:
        checkpoint = checkpoint.torch_states(*_optimizer(optimizer), **labels)
    if rules:
        undone = rules.inverse()
        checkpoint = checkpoint.map(undone, **map_arguments(undone, others["sizes"], *of_model))
    planned = checkpoint.plan_export(format, **options, budget_bytes=budget)
    for note in (*checkpoint.notes, *planned.notes):
        to_stderr.print(f"note: {note}")
    with progress("exporting", planned.write_bytes) as advance:
        checkpoint.export(
            target,
            format,
            **options,
            budget_bytes=budget,
            progress=advance,
            executor=executor,
        )
    summary = report.export_plan(planned, target)
    if json_:
        print_json(summary)
    else:
        nbytes = size(summary["bytes"])
        console.print(
            f"{target}: {summary['tensors']} tensors, {nbytes}, in {summary['files']} files"
        )


def _check_options(
    format: ExportFormat,
    options: Mapping[str, object],
    optimizer: str | None,
    labels: Mapping[str, str],
) -> None:
    """Raises UsageError for an option that does not go with the others."""
    if labels and not optimizer:
        raise click.UsageError(
            f"--{next(iter(labels)).replace('_', '-')} goes with --optimizer: give that too"
        )
    for name, only in (("max_shard_bytes", "safetensors"), ("zero_stage", "deepspeed")):
        if options[name] is not None and format != only:
            raise click.UsageError(
                f"--{name.removesuffix('_bytes').replace('_', '-')} is for --format {only}"
            )


def _optimizer(name: str) -> tuple[Any, ...]:
    """The optimizer that a function returns, and the model's tree if it returns that too."""
    result = imported(name, "optimizer")
    import optax  # which only those have who name an optimizer

    optimizer, *model = result if type(result) is tuple else (result,)
    if not isinstance(optimizer, optax.GradientTransformation) or len(model) > 1:
        raise TreeMismatch(f"{name} gives {result!r:.80}, which is no optax optimizer")
    return optimizer, *model
