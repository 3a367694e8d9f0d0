"""Options of Orbax's managers for steps in buckets."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import orbax.checkpoint as ocp

if TYPE_CHECKING:
    from orbax.checkpoint import v1

Options = TypeVar("Options", "ocp.CheckpointManagerOptions", "v1.Context")


def in_bucket(options: Options) -> Options:
    """The options of a `CheckpointManager`, or the context of a v1 `Checkpointer`, for a bucket.

    Orbax saves a step under another name and renames it, and no bucket renames. With these options
    it writes each step where it belongs and a file `commit_success.txt` at its end, without which
    the step is unfinished. It does so by itself on Google Cloud Storage; S3 and Azure need it.

    Args:
        options: of the manager, or a context; everything else in it stays as it is.

    Returns:
        A copy with that one thing set.

    Example:
        >>> import jax_ucp as ucp, orbax.checkpoint as ocp
        >>> options = ucp.in_bucket(ocp.CheckpointManagerOptions(max_to_keep=3))
        >>> manager = ocp.CheckpointManager("s3://bucket/run", options=options,
        ...     item_handlers=ucp.CheckpointHandler())  # doctest: +SKIP
    """
    if isinstance(options, ocp.CheckpointManagerOptions):
        return dataclasses.replace(
            options, temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath
        )
    from orbax.checkpoint import v1

    context: Any = v1.Context(options)
    context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    return context
