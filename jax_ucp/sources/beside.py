"""What lies in the folder of a checkpoint and is no part of it."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from jax_ucp.sources.contents import Item

# What Orbax's managers leave in a folder that is finished.
MARKERS = frozenset({"_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"})


def items_beside(path: Path, known: Collection[str], prefix: str = "") -> list[Item]:
    """Everything in a folder, not looked into, that is not among the names of what is read there.

    The folder is listed once; `prefix` is what is in front of the names in an inventory.
    """
    with os.scandir(path) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries if entry.name not in known)
    reason = "lies beside the checkpoint; not read"
    return [
        Item(prefix + name, "folder" if is_folder else "file", "skipped", reason)
        for name, is_folder in found
    ]
