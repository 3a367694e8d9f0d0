"""Functions of paths: `jax_ucp.open` and `jax_ucp.diff`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from jax_ucp.arguments import switch
from jax_ucp.arrays.budget import DEFAULT_BUDGET
from jax_ucp.checkpoint.checkpoint import Checkpoint, open_with, opened
from jax_ucp.options import Dequantize, GroupsFunction, Options

if TYPE_CHECKING:
    from jax_ucp.inspection.diff import Difference
    from jax_ucp.mapping import rules as mappings
    from jax_ucp.shard_spec.rules import Spec


def open(
    path: str | os.PathLike[str],
    *,
    sizes: Mapping[str, int] | None = None,
    spec: str | os.PathLike[str] | Spec | None = None,
    weights_only: bool = False,
    on_conflict: Literal["master", "copy"] | None = None,
    dequantize: Dequantize = None,
    optimizer_groups: str | Sequence[Sequence[str]] | GroupsFunction | None = None,
    model: str | None = None,
    step: int | None = None,
    share_reads: bool = False,
) -> Checkpoint:
    """Open the checkpoint at `path`, of any known format. Reads metadata only.

    The options are for what a checkpoint does not say itself. An option that has no effect is
    refused, such as a name in `sizes` that nothing needs.

    Args:
        path: a file or folder, local or a URL (`s3://`, `gs://`, `az://`, `https://`, `hf://`).
        sizes: lengths by name, such as `{"vocab": 50257}`. Megatron does not record the true
            vocabulary; by default the padded rows stay.
        spec: how shards form parameters, if the checkpoint does not say it: a YAML file, or a
            `jax_ucp.Spec`.
        weights_only: ignore the optimizer.
        on_conflict: which to take where something is stored twice and the copies differ, which
            `save` refuses otherwise: the `master` (and the first of several replicas), or the
            `copy` that the model computed with, in its dtype. Where nothing is stored twice, a note
            says that the option had no effect.
        dequantize: how to read weights that are stored as codes and scales. None refuses them
            wherever weights are asked for. `"bfloat16"`, `"float16"` or `"float32"` gives the
            numbers that they stand for, computed in float32 by the formula of the library that
            wrote them and rounded once; other weights keep their dtypes. False gives the parts as
            they are stored, under the state `stored` instead of `param`.
        optimizer_groups: which parameters the optimizer's states belong to, if they have numbers
            and no names: `"module-order"`, if every group lists its parameters in the order of the
            model; `"hf-decay"`, if transformers' Trainer made the two groups (parameters with
            weight decay; biases and norms); lists with the names of each group in order; or a
            function that makes such lists of the names of the model's parameters. If the files do
            not have the model's order, it is that of the class of transformers that they name, or
            that you name: `"hf-decay:llama"`. By default such states are kept under `other`, unless
            shapes or masters prove which parameters they belong to. What you say is recorded in
            `source` and `notes`.
        model: the model to open, if there are several, such as a teacher and a student, or the
            items of a step of Orbax.
        step: the step to open, if `path` is the folder of a run; by default the last finished one.
        share_reads: let one process of `jax.distributed` read the metadata of a checkpoint in a
            bucket, and send them to the others. All processes must make this call, with the same
            arguments; an error in one is raised in all. It has no effect for files on a disk, and
            in a single process.

    Returns:
        The checkpoint, of which only metadata has been read.

    Raises:
        NotACheckpoint: where there is none, or more than one.
        FormatError: where a file is not what it should be, or does not fit the options.
        SpecError: for `sizes` and a `spec` that have no use, and invalid `optimizer_groups`.
        UnsupportedPath: for a URL of an unknown kind.
        QuantizedWeights: where weights are to be dequantised and nothing says by which scheme.
        ValueError: for another value of `on_conflict` or `dequantize`.
        TreeMismatch: where processes that share reads open different paths.

    Example:
        >>> import jax_ucp as ucp
        >>> checkpoint = ucp.open("tests/data/deepspeed/z1_bf16_dp2")
        >>> checkpoint.format, len(checkpoint.leaves), checkpoint.nbytes
        ('deepspeed', 124, 89092)
    """
    options = Options.of(
        sizes, spec, weights_only, on_conflict, dequantize, optimizer_groups, model, step
    )
    return open_with(path, options, share_reads=switch("share_reads", share_reads))


def diff(
    first: str | os.PathLike[str] | Checkpoint,
    second: str | os.PathLike[str] | Checkpoint,
    *,
    mapping: mappings.Mapping | str | os.PathLike[str] | None = None,
    rename: Mapping[str, str] | None = None,
    only: str | None = None,
    headers: bool = False,
    budget_bytes: int = DEFAULT_BUDGET,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Difference:
    """Compare two checkpoints of any formats, leaf by leaf, element by element.

    Args:
        first: a path, or an opened checkpoint.
        second: another.
        mapping: a mapping that is applied to the first, for example if it is the Hugging Face model
            from which the second was trained.
        rename: beginnings of labels, those in the first to those in the second: `{"param":
            "params"}`.
        only: a regular expression; only leaves whose labels in the second match are compared.
        headers: compare names, shapes, dtypes and settings, and read no array.
        budget_bytes: how much memory the blocks that are compared may take.
        progress: called with numbers of bytes of the first that were compared.

    Returns:
        Which leaves are missing, added, reshaped or recast; for each array with changed elements
        how many changed, by how much, and the cosine; and which settings differ.

    Raises:
        UCPError: as `open`, `Checkpoint.map` and `Checkpoint.read` do.

    Example:
        >>> ucp.diff("run/100", "run/200", only="^params/").values[0].largest  # doctest: +SKIP
    """
    from jax_ucp.inspection.diff import difference

    one, other = opened(first), opened(second)
    if mapping is not None:
        one = one.map(mapping)
    return difference(
        one._side(),
        other._side(),
        rename=rename,
        only=only,
        headers=headers,
        budget_bytes=budget_bytes,
        progress=progress,
    )
