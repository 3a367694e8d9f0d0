"""Msgpack files of Flax, and the folders with one, of T5X and old versions of Orbax, in which the
arrays of the tree lie beside it.

A file is what `flax.serialization.to_bytes` makes of a tree, by `flax.training.checkpoints` or by a
user. In place of some arrays it may say where they are:

- Flax: the text `//GDAPlaceholder:a/b`, the array is `<file>_gda/a/b`;
- T5X: a TensorStore spec, whose path is relative to the folder;
- Orbax before it had `_METADATA`: the text `PLACEHOLDER://a.b`, a folder or a name in OCDBT.

Facts: `flax/training/checkpoints.py` of flax 0.12.7; `t5x/checkpoints.py` of google-research/t5x
cc342d4; `base_pytree_checkpoint_handler.py` of orbax-checkpoint 0.5.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jax_ucp.arrays.beside import MARKERS, items_beside
from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.codecs.json_values import as_json
from jax_ucp.codecs.msgpack import decode, is_map_of_names
from jax_ucp.codecs.msgpack_tree import (
    is_packed,
    leaf_values,
    packed_leaf,
    packed_table,
    plain_leaf,
)
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import read_bytes
from jax_ucp.files.ranges import FileRange
from jax_ucp.formats.orbax.arrays import (
    ZarrArrays,
    ZarrFolder,
    check_size,
    databases,
    joined,
    names_beside,
)
from jax_ucp.formats.orbax.reader import NO_CHECKSUMS, UNMERGED, note_files
from jax_ucp.formats.orbax.tree import AGGREGATE_FILE, placeholder, shardings
from jax_ucp.options import Options
from jax_ucp.tree import Leaf, leaf_names, tree_fault
from jax_ucp.tree import Path as TreePath
from jax_ucp.universal.orbax_tree import SHARDING_FILE, TREE_FILE
from jax_ucp.universal.validation import leaf_fault

_HEAD_BYTES = 256
_GDA_SUFFIX = "_gda"
_GDA = "//GDAPlaceholder:"
_NO_CHECKSUMS = "Flax keeps no checksums: what the file holds cannot be verified"
# Before, T5X stored other trees; it does not read those either.
_OLDEST_T5X = 2


@dataclass(frozen=True)
class _Pointer:
    """An array that lies elsewhere, and what is said of it."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class _Save:
    """A file of Flax, T5X or Orbax (`format`), the `folder` with its arrays elsewhere, and `own`
    names in it of no array.
    """

    file: FilePath
    tree: Any
    format: str
    folder: FilePath
    own: frozenset[str]
    extras: Mapping[str, Any]


def recognise(path: FilePath) -> bool:
    """Whether it is a msgpack file with a tree of names, or a folder with one; not noted."""
    if path.is_dir():
        path = path / AGGREGATE_FILE
    if not path.is_file():
        return False
    file = path.file()
    return is_map_of_names(read_bytes(path.files, file, 0, min(file.size, _HEAD_BYTES)))


def parse(path: FilePath, options: Options) -> Contents:
    """The tree of a msgpack file, or of the folder that has one. Raises FormatError."""
    save = _read(path)
    try:
        values = dict(leaf_values(save.tree, lambda at: _pointer(save.format, at) is not None))
    except _NotOfT5X as error:
        raise FormatError(f"{save.file} has a TensorStore spec that {error}") from None
    if fault := tree_fault(values):
        raise FormatError(f"{save.file} is not a tree: {fault}")
    names = dict(zip(values, leaf_names(list(values)), strict=True))
    all_pointers = {at: _pointer(save.format, value) for at, value in values.items()}
    pointers = {at: pointer for at, pointer in all_pointers.items() if pointer is not None}
    stored = {names[at]: pointer.name for at, pointer in pointers.items()}
    packed = {names[at]: value for at, value in values.items() if is_packed(value)}
    arrays, storage = packed_table(save.file, packed), None
    is_orbaxs = save.format == "orbax"
    if stored:  # in folders, or in a database
        if not save.folder.is_dir():
            raise FormatError(
                f"{save.file} has arrays in the folder {save.folder}, which is missing"
            )
        directory = save.folder.folder()
        note_files(directory)
        in_databases = databases(directory, None) if is_orbaxs else ()
        storage = ZarrFolder(directory, save.file.name, in_databases)
        zarr = ZarrArrays(storage, stored)
        check_size(storage, zarr.arrays())
        arrays = joined(arrays, zarr)
    saved = shardings(save.folder.folder()) if is_orbaxs else {}
    leaves: list[Leaf] = []
    for at, value in values.items():
        if at in pointers:
            leaf = _pointed(save, at, names[at], pointers[at], arrays.arrays()[names[at]])
            sharding = saved.get(pointers[at].name)
            leaves.append(replace(leaf, kind="jax", sharding=sharding) if sharding else leaf)
        elif not isinstance(value, bytes):
            leaf_of = packed_leaf if is_packed(value) else plain_leaf
            leaf = leaf_of(at, names[at], value)
            if fault := leaf_fault(leaf):
                raise FormatError(f"{save.file} says of {leaf.label!r:.200} that it is {fault}")
            leaves.append(leaf)
    extras = dict(save.extras)
    for at, value in values.items():
        if isinstance(value, bytes):
            extras["/".join(map(str, at))] = as_json(value, "", arrays.read)  # bytes alone
    name = save.file.name
    inventory = [Item(leaf.label, leaf.kind, "mapped", leaf.label) for leaf in leaves]
    inventory += [Item(at, "value", "extra", "kept as JSON") for at in extras]
    inventory += _beside(path, save, storage, stored)
    kept = {name: extras} if extras else {}
    notes = [NO_CHECKSUMS if is_orbaxs else _NO_CHECKSUMS]
    if storage and storage.is_unmerged:
        notes.append(UNMERGED)
    if is_orbaxs:
        notes.append(
            f"{TREE_FILE} is missing, as Orbax up to 0.2 left it: the tree is that of {name}, in"
            " which dicts stand for nodes with fields"
        )
    return Contents(save.format, str(path), leaves, arrays, inventory, extras=kept, notes=notes)


def _read(path: FilePath) -> _Save:
    """The file at a path, or the one in the folder there, as what its writer meant."""
    file = path / AGGREGATE_FILE if path.is_dir() else path
    tree = decode(FileRange(file), str(file))
    if isinstance(tree, dict) and {"version", "optimizer"} == tree.keys():
        version = tree["version"]
        if type(version) is not int or version < _OLDEST_T5X:
            raise FormatError(
                f"{file} is of version {version!r:.40} of T5X's checkpoints; those from"
                f" {_OLDEST_T5X} on are read, as T5X does"
            )
        own = frozenset({file.name, *MARKERS})
        return _Save(file, tree["optimizer"], "t5x", file.parent, own, {"version": version})
    if any(placeholder(value) for _, value in leaf_values(tree, lambda value: False)):
        own = frozenset({file.name, SHARDING_FILE, *MARKERS})
        return _Save(file, tree, "orbax", file.parent, own, {})
    folder = file.with_name(file.name + _GDA_SUFFIX)
    return _Save(file, tree, "flax", folder, frozenset(), {})


def _pointed(save: _Save, at: TreePath, name: str, pointer: _Pointer, info: ArrayInfo) -> Leaf:
    """The leaf of an array elsewhere. Raises FormatError where it is not what the file says."""
    leaf = Leaf(at, name, "array", info.shape, info.dtype.name)
    if pointer.shape not in (None, info.shape) or pointer.dtype not in (None, info.dtype.name):
        raise FormatError(
            f"{save.folder / pointer.name} is an array of {info.dtype} {info.shape}, but"
            f" {save.file.name} says {pointer.dtype} {pointer.shape} of it: they are of two saves"
        )
    if pointer.dtype == "uint16":
        raise FormatError(
            f"{save.file} has {leaf.label} in uint16, which T5X up to its version 2 used for"
            " bfloat16, and no longer reads: nothing says which it is"
        )
    return leaf


def _beside(
    path: FilePath, save: _Save, storage: ZarrFolder | None, stored: Mapping[str, str]
) -> list[Item]:
    arrays = names_beside(storage, stored) if storage else set[str]()
    if save.format == "flax":
        items = items_beside(save.folder, arrays, f"{save.folder.name}/") if storage else []
        return items + (items_beside(path, {save.file.name, *MARKERS}) if path.is_dir() else [])
    return items_beside(save.folder, arrays | save.own)


# How the three say that an array lies elsewhere


class _NotOfT5X(Exception):
    """A TensorStore spec is not as T5X writes it."""


class _SpecPlace(msgspec.Struct):
    driver: str
    path: str | None = None


class _SpecMetadata(msgspec.Struct):
    shape: tuple[int, ...]


class _Spec(msgspec.Struct):
    """A TensorStore spec of T5X; up to tensorstore 0.1.13 the path is beside `kvstore`."""

    driver: str
    kvstore: _SpecPlace
    metadata: _SpecMetadata
    dtype: str | None = None
    path: str | None = None


def _pointer(format: str, value: Any) -> _Pointer | None:
    """The array elsewhere that a value stands for; None of any other value. Raises _NotOfT5X for a
    TensorStore spec that T5X does not write.
    """
    if format == "flax":
        is_pointer = isinstance(value, str) and value.startswith(_GDA)
        return _Pointer(value.removeprefix(_GDA)) if is_pointer else None
    if format == "orbax":
        name = placeholder(value)
        return _Pointer(name) if name else None
    if not isinstance(value, dict) or not {"driver", "kvstore", "metadata"} <= value.keys():
        return None
    try:
        spec = msgspec.convert(value, _Spec)
    except msgspec.ValidationError as error:
        raise _NotOfT5X(f"is not as T5X writes it: {error}") from None
    path = spec.kvstore.path or spec.path
    if spec.driver != "zarr" or not path:
        raise _NotOfT5X(f"is of {spec.driver!r:.40} at {path!r:.80}")
    return _Pointer(path.removesuffix("/"), spec.metadata.shape, spec.dtype)
