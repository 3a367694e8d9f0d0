"""A folder of nothing but zarr arrays, as Paxml leaves its train state, and Orbax before it had
files that say the tree.

The tree is what Orbax makes of such a folder: names of folders, split at dots. Facts:
`pytree_structure`, `utils.py` of orbax-checkpoint 0.5.20; `PaxCheckpointHandler`,
`paxml/checkpoints.py` of google/paxml.
"""

from __future__ import annotations

from jax_ucp.arrays.beside import MARKERS, items_beside
from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.orbax.arrays import ZarrArrays, ZarrFolder, check_size
from jax_ucp.formats.orbax.marks import ARRAY_FILE
from jax_ucp.formats.orbax.reader import NO_CHECKSUMS, note_files
from jax_ucp.options import Options
from jax_ucp.tree import Key, Leaf, leaf_names, tree_fault
from jax_ucp.universal.orbax_tree import SHARDING_FILE, TREE_FILE
from jax_ucp.universal.validation import leaf_fault


def parse(path: FilePath, options: Options) -> Contents:
    """The arrays in the folder, each at the path of its name. Raises FormatError."""
    directory = path.folder()
    note_files(directory)
    stored = [child.name for child in path.children() if (child / ARRAY_FILE).is_file()]
    paths = [tuple(Key("dict", part) for part in name.split(".")) for name in stored]
    if fault := tree_fault(paths):
        raise FormatError(
            f"{path}: the names of its folders, split at dots, do not form a tree: {fault}"
        )
    names = leaf_names(paths)
    storage = ZarrFolder(directory, "the folder")
    arrays = ZarrArrays(storage, dict(zip(names, stored, strict=True)))
    check_size(storage, arrays.arrays())
    leaves: list[Leaf] = []
    for at, name in zip(paths, names, strict=True):
        info = arrays.arrays()[name]
        leaf = Leaf(at, name, "array", info.shape, info.dtype.name)
        if fault := leaf_fault(leaf):
            raise FormatError(f"{path} has {leaf.label!r:.200}, which is {fault}")
        leaves.append(leaf)
    inventory = [
        Item(at, leaf.label, "mapped", leaf.label) for at, leaf in zip(stored, leaves, strict=True)
    ]
    inventory += items_beside(path, {*stored, SHARDING_FILE, *MARKERS})
    notes = [
        NO_CHECKSUMS,
        f"no {TREE_FILE} or other file says the tree, as Paxml leaves it: it is that of the names"
        " of folders, split at dots. Texts, None and empty containers, if there were any, are not"
        " known",
    ]
    return Contents("zarr folders", str(path), leaves, arrays, inventory, notes=notes)
