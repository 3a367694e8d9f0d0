"""Marks of PyTorch's distributed checkpoint: the files by whose names it is recognised."""

from __future__ import annotations

import re

from jax_ucp.errors import NotACheckpoint
from jax_ucp.files.path import FilePath

METADATA_FILE = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")


def recognise(path: FilePath) -> bool:
    if not path.is_dir():
        return False
    names = [child.name for child in path.children()]
    has_data = any(name.startswith("__") and name.endswith(".distcp") for name in names)
    return has_data or bool(metadata_files(path))


def metadata_files(folder: FilePath) -> list[FilePath]:
    """`.metadata`, or without it one `__<rank>.metadata` per rank, in order."""
    if (folder / METADATA_FILE).is_file():
        return [folder / METADATA_FILE]
    ranks: dict[int, FilePath] = {}
    for path in folder.children():
        if match := _RANK_METADATA.fullmatch(path.name):
            ranks[int(match[1])] = path
    return [ranks[rank] for rank in sorted(ranks)]


def require_metadata(folder: FilePath) -> None:
    """Raise NotACheckpoint for a folder without the table of its items."""
    if not metadata_files(folder):
        raise NotACheckpoint(
            f"{folder} has .distcp files but no .metadata: the save never ended, for that file is"
            " written last, or it was not copied with the others, for its name begins with a dot"
        )
