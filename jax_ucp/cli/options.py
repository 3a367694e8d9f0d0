"""Options of commands, as tables of names, kinds and help texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from jax_ucp.arrays.budget import DEFAULT_BUDGET
from jax_ucp.cli.types import (
    JSON_OBJECT,
    MESH_SIZES,
    NAMED_SIZE,
    OPTIMIZER_GROUPS,
    RULE,
    SHARE_OF,
    SIZE,
)


def option(
    names: str, kind: click.ParamType | Sequence[str] | None, text: str, **more: Any
) -> click.Option:
    """An option with this help text.

    `names` has the flag, and after it the attribute of `Arguments`, if that is another. `kind` is a
    type, a list of words to choose from, a placeholder for any text, or None for a switch.
    """
    if kind is None:
        more["is_flag"] = True
    elif isinstance(kind, str):
        more["metavar"] = kind
    else:
        more["type"] = kind if isinstance(kind, click.ParamType) else click.Choice(kind)
    return click.Option(names.split(), help=text, **more)


def argument(name: str, required: bool = True) -> click.Argument:
    return click.Argument([name], required=required)


JSON = option("--json json_", None, "Print JSON, for programs.")
BUDGET = option(
    "--budget",
    SIZE,
    "How much memory the blocks that are being copied may take, such as 512MiB.",
    default=DEFAULT_BUDGET,
    show_default="1GiB",
)

# Facts about a checkpoint that its files do not state, and how to read it.
OPENING = (
    option(
        "--size sizes",
        NAMED_SIZE,
        "A length that the files lack, such as vocab=50257; may be repeated.",
        multiple=True,
    ),
    option("--spec", "FILE", "A YAML file that says how shards form parameters."),
    option("--weights-only", None, "Ignore the optimizer."),
    option("--step", click.INT, "The step to open, where the path is the folder of a run."),
    option("--model", "NAME", "The model to open, where there are several."),
    option(
        "--optimizer-groups",
        OPTIMIZER_GROUPS,
        "Where the optimizer's states have numbers and no names: which parameters they belong to."
        " module-order and hf-decay are known orders; a JSON file lists names.",
    ),
    option("--no-dequantize", None, "Read quantised weights as they are stored: codes and scales."),
    option(
        "--dequantize",
        ("bfloat16", "float16", "float32"),
        "Read quantised weights as numbers of this dtype.",
    ),
    option(
        "--on-conflict",
        ("master", "copy"),
        "Where a parameter is stored as a master and as a 16-bit copy: take this one, and do not"
        " compare them.",
    ),
)

MODEL = (
    option(
        "--mapping",
        "NAME|FILE",
        "Show the leaves of your model: a mapping of the package, or a YAML file; or several with"
        " commas between them, one after another.",
    ),
    option(
        "--inverse",
        None,
        "With --mapping: apply it backwards, from the model's leaves to parameters.",
    ),
    option(
        "--params",
        "LABEL",
        "With --mapping: where the parameters are in the tree of a training run in JAX; the"
        " optimizer's states are mapped with them.",
    ),
    option(
        "--config", "FILE", "With --mapping: the model's config.json, if the checkpoint has none."
    ),
    option(
        "--assume",
        "NAME",
        "With --mapping: take this requirement of the mapping as met; may be repeated.",
        multiple=True,
    ),
    option(
        "--merge",
        "ADAPTER",
        "Merge this LoRA adapter (a folder that peft wrote); may be repeated.",
        multiple=True,
    ),
)
SOURCE = (*MODEL, *OPENING)

MESH = (
    option(
        "--mesh",
        MESH_SIZES,
        "A mesh, such as data=4,model=2; this machine need not have its devices.",
    ),
    option(
        "--rule rules",
        RULE,
        "With --mesh: how to shard the arrays whose labels match, as 'kernel$=data,None'; may be"
        " repeated.",
        multiple=True,
    ),
    option(
        "--hosts",
        click.IntRange(1),
        "With --mesh: how many processes share its devices.",
        default=1,
        show_default=True,
    ),
)

# The tree and the place of a checkpoint that a framework's own loader expects.
LAYOUT = (
    option("--root", "LABEL", "Where the parameters go in the tree; default: param."),
    option("--variables", None, "Put each parameter into a node `value`, as Flax NNX stores it."),
    option(
        "--to-step",
        click.IntRange(0),
        "TARGET is the folder of a run: add the checkpoint to it as this step.",
    ),
    option("--item", "NAME", "With --to-step: the name of the item; default: default."),
    option(
        "--custom-metadata",
        JSON_OBJECT,
        "With --to-step: what the step says to its readers, such as '{\"scan_layers\": false}' to"
        " MaxText.",
    ),
)

WORKERS = (
    option(
        "--workers",
        click.IntRange(min=1),
        "Use N processes of this machine; by default the work is done by threads.",
        metavar="N",
    ),
    option(
        "--scheduler",
        "URL|mpi",
        "Use the workers of a Dask scheduler (tcp://HOST:8786) or, with `mpi`, the other ranks of"
        " the mpiexec that started this command. All must see the same files at the same paths.",
    ),
)
SHARE = (
    option(
        "--worker share",
        SHARE_OF,
        "Do share I of N, I from 0 to N - 1; start one such process for each share. The last to end"
        " commits. `auto` takes both numbers from a SLURM array or MPI, `auto/N` takes I from an"
        " indexed job of Kubernetes.",
        metavar="I/N",
    ),
    option(
        "--progress",
        ("bar", "json"),
        "How to show progress: a bar on a terminal, or a line of JSON on stderr each second. With"
        " --worker, of this share alone.",
        default="bar",
        show_default=True,
    ),
)

# The sections of a command's help, after the COMMON options. Up to FEW options are not divided.
SECTIONS = {
    "Your model": MODEL,
    "What the files do not say": OPENING,
    "A mesh": MESH,
    "For a framework's own loader": LAYOUT,
    "Several processes": (*WORKERS, *SHARE),
}
COMMON = ("mapping", "mesh", "step", "weights_only", "dequantize")
FEW = 12
