"""What lies in the folder of a checkpoint and is no part of it."""

from __future__ import annotations

from collections.abc import Collection

from jax_ucp.files.path import FilePath
from jax_ucp.sources.contents import Item

# What Orbax's managers leave in a folder that is finished.
MARKERS = frozenset({"_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"})


def items_beside(path: FilePath, known: Collection[str], prefix: str = "") -> list[Item]:
    """Everything in a folder, not looked into, that is not among the names of what is read there.

    The folder is listed once; `prefix` is what is in front of the names in an inventory.
    """
    others = [info for info in path.folder().list() if info.name not in known]
    reason = "lies beside the checkpoint; not read"
    return [
        Item(prefix + info.name, "folder" if info.kind == "folder" else "file", "skipped", reason)
        for info in others
    ]
