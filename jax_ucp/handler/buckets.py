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

    Orbax saves a step under a temporary name and renames it, which buckets cannot do. With these
    options it writes each step under its own name, and at the end a file `commit_success.txt`,
    without which the step is unfinished. This is Orbax's default for Google Cloud Storage, but not
    for S3 and Azure.

    Args:
        options: the manager's options, or a context; everything else in it stays as it is.

    Returns:
        A copy with that one setting.

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
