"""`jax-ucp export`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

import jax_ucp
from jax_ucp.cli.command import Arguments, command, imported
from jax_ucp.cli.options import BUDGET, JSON, SHARE, SOURCE, WORKERS, argument, option
from jax_ucp.cli.output import console, print_json, print_share, progress, to_stderr
from jax_ucp.cli.types import SIZE
from jax_ucp.errors import NotACheckpoint, TreeMismatch
from jax_ucp.files.path import target_path
from jax_ucp.formats.exporting import EXPORT_FORMATS
from jax_ucp.inspection import report
from jax_ucp.inspection.words import several, size
from jax_ucp.mapping.rules import inverse_chain

# Options that apply to one format only, by their names.
_FORMAT_OF = {
    "max_shard": "safetensors",
    "zero_stage": "deepspeed",
    "adapter_config": "safetensors",
    "like": "megatron",
}


@command(
    "export",
    argument("source"),
    argument("target"),
    option(
        "--format", EXPORT_FORMATS, "The format to write.", default="safetensors", show_default=True
    ),
    option(
        "--dtype",
        "DTYPE",
        "Cast floating-point parameters, for example to bfloat16; by default no bit changes.",
    ),
    option("--max-shard", SIZE, "With safetensors: how large a file may be; default: 50 GB."),
    option(
        "--zero-stage",
        click.IntRange(1, 3),
        "With deepspeed: the ZeRO stage of the run that will load it; default: that of SOURCE.",
    ),
    option(
        "--adapter-config",
        "FILE",
        "With safetensors: SOURCE is an adapter trained in JAX; its adapter_config.json for peft.",
    ),
    option(
        "--like",
        "CHECKPOINT",
        "With megatron: one of the run that goes on, whose arguments SOURCE does not have.",
    ),
    option(
        "--optimizer",
        "MODULE:FUNCTION",
        "SOURCE is a training run in JAX; the function returns its optax optimizer.",
    ),
    option(
        "--opt-state",
        "LABEL",
        "With --optimizer: where its state is in the tree; default: opt_state.",
    ),
    option(
        "--step-dtype",
        ("float32", "int32", "int64"),
        "With --optimizer: the dtype of steps; default: float32, and int32 for Lion.",
    ),
    option(
        "--forward",
        None,
        "With --mapping: SOURCE has the names that the mapping leads from, as Megatron's do, and"
        " those that it leads to are written.",
    ),
    *SOURCE,
    BUDGET,
    *WORKERS,
    *SHARE,
    JSON,
)
def export(args: Arguments) -> None:
    """Write the checkpoint at SOURCE as a new folder TARGET that PyTorch programs can load.

    Formats: safetensors is weights, for transformers; dcp is weights and optimizer, for
    torch.distributed.checkpoint; deepspeed is a universal folder, for a run with load_universal;
    megatron is a save directory of torch_dist, for Megatron's --load at any parallelism.

    A model trained in JAX: --mapping is the mapping that gave it its names, and is undone; with
    --forward it is applied, as megatron-llama-to-hf to a run of Megatron. --params takes only the
    weights of a training run, from a label of its tree or an item of its step. --config is the
    model's config.json, or the folder that has it; it is written beside the weights. With
    --optimizer the optax state becomes that of torch's optimizer; the function may also return the
    pair (optimizer, abstract tree of the model).

    Every checksum, and everything that SOURCE stores twice, is compared while it is copied. If the
    command is stopped, there is nothing at TARGET; in a bucket there may be files, but not the one
    that makes the folder loadable. With --worker, run the same command again to continue.
    """
    _check_options(args)
    target_path(args.target)  # refuses a path that cannot be written to
    args.inverse = False  # the mapping is undone anyway
    mappings = args.load_mappings(its_own=("config", "assume", "forward"))
    if args.optimizer:
        checkpoint = args.open_unmapped(args.source, mappings)
        given = {name: getattr(args, name) for name in ("params", "opt_state", "step_dtype")}
        labels = {name: label for name, label in given.items() if label}
        checkpoint = checkpoint.torch_states(*_optimizer(args.optimizer), **labels)
    else:
        checkpoint = _weights(args, mappings)
    checkpoint = args.mapped(checkpoint, mappings if args.forward else inverse_chain(mappings))
    options = {
        "dtype": args.dtype,
        "max_shard_bytes": args.max_shard,
        "zero_stage": args.zero_stage,
        "adapter_config": args.adapter_config,
        # a mapping that is applied has the config of its source, and says that of the result
        "config": args.config if args.format == "safetensors" and not args.forward else None,
        "like": args.like,
        "budget_bytes": args.budget,
    }
    planned = checkpoint.plan_export(args.format, **options)
    for note in (*checkpoint.notes, *planned.notes):
        to_stderr.print(f"note: {note}")
    total = 0 if args.share else planned.write_bytes
    with progress("exporting", total, args.progress, args.share) as meter:
        if args.share:
            write = partial(checkpoint.export_share, share=args.share, begin=meter.expect)
        else:
            write = partial(checkpoint.export, executor=args.executor)
        result = write(args.target, args.format, **options, progress=meter.advance)
    summary = report.export_plan(planned, args.target)
    if result is None:
        print_share(args.target, args.share, args.json_)
    elif args.json_:
        print_json(summary)
    else:
        tensors, files = several(summary["tensors"], "tensor"), several(summary["files"], "file")
        console.print(f"{args.target}: {tensors}, {size(summary['bytes'])}, in {files}")


def _check_options(args: Arguments) -> None:
    """Raises UsageError for an option that does not go with the others."""
    if not args.optimizer:
        for name in ("opt_state", "step_dtype"):
            if getattr(args, name):
                flag = name.replace("_", "-")
                raise click.UsageError(f"--{flag} goes with --optimizer: give that too")
    if args.forward and (args.inverse or args.optimizer):
        raise click.UsageError("--forward goes with neither --inverse nor --optimizer")
    for name, format in _FORMAT_OF.items():
        if getattr(args, name) is not None and args.format != format:
            raise click.UsageError(f"--{name.replace('_', '-')} is for --format {format}")
    if args.share and args.executor:
        raise click.UsageError("--worker goes with neither --workers nor --scheduler")


def _weights(args: Arguments, mappings: Sequence[jax_ucp.Mapping]) -> jax_ucp.Checkpoint:
    """The checkpoint, or with `--params` only the weights at that label of a run's tree, or of the
    item with that name in a step of several items.
    """
    params = args.params
    if params is None:
        return args.open_unmapped(args.source, mappings)
    try:
        checkpoint = args.open_unmapped(args.source, mappings)
    except NotACheckpoint:
        if args.model is not None:
            raise
        checkpoint = args.open_unmapped(args.source, mappings, model=params)
    is_item = Path(checkpoint.path).name == params
    return checkpoint.weights("" if is_item else params)


def _optimizer(name: str) -> tuple[Any, ...]:
    """The optimizer that a function returns, and the model's tree if it returns both."""
    result = imported(name, "optimizer")
    import optax  # an extra, which is only needed here

    optimizer, *model = result if type(result) is tuple else (result,)
    if not isinstance(optimizer, optax.GradientTransformation) or len(model) > 1:
        raise TreeMismatch(f"{name} gives {result!r:.80}, which is not an optax optimizer")
    return optimizer, *model
