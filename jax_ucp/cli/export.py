"""`jax-ucp export`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import click

import jax_ucp
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
from jax_ucp.cli.output import console, print_json, print_share, progress, to_stderr
from jax_ucp.cli.workers import progress_option, share_option, worker_options
from jax_ucp.errors import NotACheckpoint, TreeMismatch
from jax_ucp.files.path import target_path
from jax_ucp.formats.exporting import EXPORT_FORMATS, ExportFormat
from jax_ucp.inspection import report
from jax_ucp.inspection.words import several, size

_OPTIONS = ("dtype", "max_shard_bytes", "zero_stage", "adapter_config")
# those that are for one format
_FOR = {
    "max_shard_bytes": "safetensors",
    "zero_stage": "deepspeed",
    "adapter_config": "safetensors",
}


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--format",
    type=click.Choice(EXPORT_FORMATS),
    default="safetensors",
    show_default=True,
    help="The format to write.",
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="Cast floating-point parameters, for example to bfloat16; by default no bit changes.",
)
@click.option(
    "--max-shard",
    "max_shard_bytes",
    type=Size(),
    help="With safetensors: how large a file may be; default: 50 GB.",
)
@click.option(
    "--zero-stage",
    type=click.IntRange(1, 3),
    help="With deepspeed: the ZeRO stage of the run that will load it; default: that of SOURCE.",
)
@click.option(
    "--adapter-config",
    metavar="FILE",
    help="With safetensors: SOURCE is an adapter trained in JAX; its adapter_config.json for peft.",
)
@click.option(
    "--optimizer",
    metavar="MODULE:FUNCTION",
    help="SOURCE is a training run in JAX; the function returns its optax optimizer.",
)
@click.option(
    "--opt-state",
    metavar="LABEL",
    help="With --optimizer: where its state is in the tree; default: opt_state.",
)
@click.option(
    "--step-dtype",
    type=click.Choice(["float32", "int32", "int64"]),
    help="With --optimizer: the dtype of steps; default: float32, and int32 for Lion.",
)
@source_options
@budget
@worker_options
@share_option
@progress_option
@as_json
def export(
    source: str,
    target: str,
    format: ExportFormat,
    mapping: str | None,
    budget: int,
    json_: bool,
    executor: Executor | None,
    share: tuple[int, int] | None,
    progress_style: str,
    **others: Any,
) -> None:
    """Write the checkpoint at SOURCE as a new folder TARGET that PyTorch programs can load.

    Formats: safetensors is weights, for transformers; dcp is weights and optimizer, for
    torch.distributed.checkpoint; deepspeed is a universal folder, for a run with load_universal.

    A model trained in JAX: --mapping is the mapping that gave it its names, and is undone. --params
    takes only the weights of a training run, from a label of its tree or an item of its step.
    --config is the model's config.json, or the folder that has it; it is written beside the
    weights. With --optimizer the optax state becomes that of torch's optimizer; the function may
    also return the pair (optimizer, abstract tree of the model).

    Every checksum, and everything that SOURCE stores twice, is compared while it is copied. If the
    command is stopped, there is nothing at TARGET; in a bucket there may be files, but not the one
    that makes the folder loadable. With --worker, run the same command again to continue.
    """
    options = _taken(others, *_OPTIONS)
    optimizer = _taken(others, "optimizer", "opt_state", "step_dtype")
    _check_options(format, options, optimizer)
    target_path(target)  # refuses what is none
    if share and executor:
        raise click.UsageError("--worker goes with neither --workers nor --scheduler")
    # --inverse says what happens anyway
    of_model = require_mapping(
        mapping, others.pop("config"), others.pop("assume"), None, others.pop("inverse")
    )
    rules = load_mapping(mapping)
    if optimizer["optimizer"]:
        checkpoint = _torch_states(source, rules, others, **optimizer)
    else:
        checkpoint = _weights(source, rules, others)
    if rules:
        undone = rules.inverse()
        checkpoint = checkpoint.map(undone, **map_arguments(undone, others["sizes"], *of_model))
    config = of_model[0] if format == "safetensors" else None
    planned = checkpoint.plan_export(format, **options, config=config, budget_bytes=budget)
    for note in (*checkpoint.notes, *planned.notes):
        to_stderr.print(f"note: {note}")
    total = 0 if share else planned.write_bytes
    with progress("exporting", total, progress_style, share) as meter:
        if share:
            write = partial(checkpoint.export_share, share=share, begin=meter.expect)
        else:
            write = partial(checkpoint.export, executor=executor)
        result = write(
            target, format, **options, config=config, budget_bytes=budget, progress=meter.advance
        )
    if result is None:
        print_share(target, share, json_)
    else:
        _print_result(report.export_plan(planned, target), target, json_)


def _print_result(summary: report.Report, target: str, json_: bool) -> None:
    if json_:
        print_json(summary)
    else:
        nbytes = size(summary["bytes"])
        console.print(
            f"{target}: {several(summary['tensors'], 'tensor')}, {nbytes}, in"
            f" {several(summary['files'], 'file')}"
        )


def _taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options.pop(name) for name in names}


def _torch_states(
    source: str,
    rules: jax_ucp.Mapping | None,
    others: Mapping[str, Any],
    optimizer: str,
    **labels: str | None,
) -> jax_ucp.Checkpoint:
    """The weights of the run at `source`, and torch's states for those of its optimizer."""
    labels["params"] = others["params"]
    open_options = {name: value for name, value in others.items() if name != "params"}
    checkpoint = open_checkpoint(source, of_mapping=rules, **open_options)
    given = {name: label for name, label in labels.items() if label}
    return checkpoint.torch_states(*_optimizer(optimizer), **given)


def _weights(
    source: str, rules: jax_ucp.Mapping | None, others: Mapping[str, Any]
) -> jax_ucp.Checkpoint:
    """The checkpoint at `source`; of a run the weights at the label `params` of its tree, or those
    of the item of that name in a step that has several.
    """
    open_options = {**others, "of_mapping": rules}
    params = open_options.pop("params")
    if params is None:
        return open_checkpoint(source, **open_options)
    try:
        checkpoint = open_checkpoint(source, **open_options)
    except NotACheckpoint:
        if others["model"] is not None:
            raise
        checkpoint = open_checkpoint(source, **{**open_options, "model": params})
    is_item = Path(checkpoint.path).name == params
    return checkpoint.weights("" if is_item else params)


def _check_options(
    format: ExportFormat, options: Mapping[str, object], optimizer: Mapping[str, object]
) -> None:
    """Raises UsageError for an option that does not go with the others."""
    given = [name for name, value in optimizer.items() if value]
    if given and "optimizer" not in given:
        raise click.UsageError(
            f"--{given[0].replace('_', '-')} goes with --optimizer: give that too"
        )
    for name, only in _FOR.items():
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
        raise TreeMismatch(f"{name} gives {result!r:.80}, which is not an optax optimizer")
    return optimizer, *model
