"""Files and folders that lie in the folder of a checkpoint and are not part of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from jax_ucp.arrays.contents import Item
from jax_ucp.files.path import FilePath

# Files that Orbax's managers leave in a folder that is finished.
MARKERS = frozenset({"_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"})

# Files that macOS and Windows leave in every folder that they show.
_CLUTTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})


def is_clutter(name: str) -> bool:
    """Whether a file manager left a file of this name: `._x` is what macOS keeps beside `x`.

    >>> is_clutter("._1.0"), is_clutter(".zarray")
    (True, False)
    """
    return name.startswith("._") or name in _CLUTTER


def items_beside(path: FilePath, known: Collection[str], prefix: str = "") -> list[Item]:
    """Items for what a folder holds beyond the `known` names of what is read there. Where these are
    `a` and `b/c`, of its folders only `b` is looked into.

    Each folder is listed once; `prefix` is what is in front of the names in an inventory.
    """
    inside: dict[str, set[str]] = defaultdict(set)
    for name in known:
        first, _, rest = name.partition("/")
        inside[first].add(rest)
    items: list[Item] = []
    for info in path.folder().list():
        name = prefix + info.name
        if info.name not in inside:
            what = "folder" if info.kind == "folder" else "file"
            items.append(Item(name, what, "skipped", "lies beside the checkpoint; not read"))
        elif "" not in inside[info.name]:
            items += items_beside(path / info.name, inside[info.name], f"{name}/")
    return items
