"""What is called on paths: `jax_ucp.open` and `jax_ucp.diff`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jax_ucp.arguments import switch
from jax_ucp.checkpoint.checkpoint import Checkpoint, open_with, opened
from jax_ucp.formats.options import Dequantize, GroupsFunction, Options
from jax_ucp.inspection.diff import Difference, difference
from jax_ucp.mapping import rules as mappings
from jax_ucp.shard_spec.rules import Spec
from jax_ucp.sources.budget import DEFAULT_BUDGET


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
    """The checkpoint at `path`, whichever of the known formats it has. Reads metadata only.

    What a checkpoint does not say is said by name, and what is said is used or refused: a name in
    `sizes` that the checkpoint has no use for, a `spec` where it says itself how shards form
    parameters.

    Args:
        path: a file or folder, local or a URL (`s3://`, `gs://`, `az://`, `https://`, `hf://`).
        sizes: lengths by name, such as `{"vocab": 50257}`: Megatron does not record the true
            vocabulary; by default the padded rows stay.
        spec: how shards form parameters, for sources that do not say it: a file in the universal
            checkpoint language, or a `jax_ucp.Spec`.
        weights_only: leave the optimizer aside.
        on_conflict: what to take where a source stores something twice and differently, which
            `save` refuses otherwise: the `master` (and the first of several replicas), or the
            `copy` that the model computed with, in its dtype. Where nothing is stored twice, a note
            says that it changed nothing.
        dequantize: what weights stored as codes and scales become, which are named in the notes and
            refused wherever weights are asked for, if this is None. `"bfloat16"`, `"float16"` or
            `"float32"` gives the numbers that they stand for, computed in float32 by the rule of
            the library that wrote them and rounded once, box by box as they are read; weights that
            are not quantised keep their dtypes. False gives the parts as they are stored, under the
            state `stored` in place of `param`, to be read, restored or saved.
        optimizer_groups: which parameters an optimizer has whose states go by numbers:
            `"module-order"`, if every group lists its parameters in the order of the model;
            `"hf-decay"`, if transformers' Trainer made the two groups (what decays; biases and
            norms); the names of each group in order; or a function that makes such lists of the
            names of the model's parameters. Where files do not have the model's order, it is that
            of the class of transformers that they name, or of the one that is said:
            `"hf-decay:llama"`. Unsaid, such states are kept under `other`, unless shapes or masters
            prove whose they are. What was said is in `source` and `notes`.
        model: the one that is meant where a file or folder has several, such as a teacher and a
            student, or the items of a step of Orbax.
        step: the one to open of the folder of a run; by default the last that is finished.
        share_reads: of a checkpoint in a bucket one process reads the metadata, and the others of
            `jax.distributed` get them from it. All must make this call, with the same arguments;
            an error in one is raised in all, in the others with its words. Of files on a disk each
            process reads its own; in one process it changes nothing.

    Returns:
        The checkpoint, of which nothing but metadata has been read.

    Raises:
        NotACheckpoint: where there is none, or more than one.
        FormatError: where a file is not what it should be, or does not fit what was said.
        SpecError: for `sizes` and a `spec` that are not used, and `optimizer_groups` that cannot be
            meant.
        UnsupportedPath: for a URL of an unknown kind.
        QuantizedWeights: where weights are to be dequantised and nothing says how they are meant.
        ValueError: for another `on_conflict` or `dequantize` than these.
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
    """What differs between two checkpoints of any formats, leaf by leaf, element by element.

    Args:
        first: a path, or an opened checkpoint.
        second: another.
        mapping: through which the first is seen: a Hugging Face model, say, that the second was
            trained from.
        rename: what labels of the first begin with, by what those of the second begin with:
            `{"param": "params"}`.
        only: a regular expression; leaves whose labels, in the second, do not match are left out.
        headers: compare names, shapes, dtypes and settings, and read no array.
        budget_bytes: bounds what is in flight.
        progress: is called with the bytes of the first that were compared.

    Returns:
        What is missing, added, reshaped, recast; of each array with changed elements how many, by
        how much, and the cosine; and what the checkpoints say of themselves otherwise.

    Raises:
        UCPError: as `open`, `Checkpoint.map` and `Checkpoint.read` do.

    Example:
        >>> ucp.diff("run/100", "run/200", only="^params/").values[0].largest  # doctest: +SKIP
    """
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
