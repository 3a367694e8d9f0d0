"""The small files by which stock Orbax knows the tree of a PyTree checkpoint: written here, and
read here.

Facts: `_src/metadata/tree.py`, `_src/metadata/empty_values.py`, `_src/metadata/sharding.py` and
`_src/handlers/base_pytree_checkpoint_handler.py` of orbax-checkpoint 0.12.8. Nothing of Orbax is
imported.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.protocol import Files, read_file, walk
from jax_ucp.tree import (
    MAX_TREE_DEPTH,
    Axes,
    Key,
    KeyKind,
    Leaf,
    LeafKind,
    SavedSharding,
    leaf_names,
    tree_fault,
)
from jax_ucp.tree import Path as TreePath
from jax_ucp.universal.checked import sharding_fault
from jax_ucp.universal.metadata import VERSION

T = TypeVar("T")

TREE_FILE = "_METADATA"
SHARDING_FILE = "_sharding"
STRINGS_FILE = "_strings.json"

# In `custom_metadata`, which stock Orbax leaves to its users: this tree belongs to a universal
# checkpoint.
MARK = "jax_ucp"

# With more devices than that, of all leaves together, stock is told none, and takes those that it
# has, in their order: it wants them listed for each leaf anew, some ten bytes each, and a thousand
# leaves may share one mesh.
MAX_DEVICES_LISTED = 1 << 24

_SEQUENCE, _DICT = 1, 2
_VALUE_TYPES: dict[LeafKind, str] = {
    "jax": "jax.Array",
    "prng_key": "jax.Array",
    "array": "np.ndarray",
    "numpy": "np.ndarray",
    "numpy_scalar": "scalar",
    "bool": "scalar",
    "int": "scalar",
    "float": "scalar",
    "complex": "scalar",
    "str": "string",
    "none": "None",
}
# What stock writes for a node without children: a named tuple, such as optax.EmptyState, comes back
# as None.
_EMPTY_TYPES: dict[KeyKind, str] = {
    "dict": "Dict",
    "list": "List",
    "tuple": "Tuple",
    "attr": "None",
}
_NOT_STORED = {"None", "Dict", "List", "Tuple", "NamedTuple"}


def orbax_files(
    leaves: Sequence[Leaf], arrays: Mapping[str, tuple[int, ...]], ocdbt: bool = False
) -> dict[str, bytes]:
    """The files, by name and in the order to write them in, that let stock Orbax read the leaves.

    `arrays` has the outer chunk of each array; with `ocdbt`, stock looks for them in an OCDBT
    database.
    """
    named = [(".".join(map(str, leaf.path)), leaf) for leaf in leaves]
    # all that stock reads of other arrays is in their `zarr.json`
    keys = [_key_entry(name, leaf, arrays) for name, leaf in named if leaf.kind == "prng_key"]
    strings = {name: leaf.value for name, leaf in named if leaf.kind == "str"}
    files: dict[str, Any] = {SHARDING_FILE: _sharding_table(named)}
    if keys:
        files["array_metadatas/process_0"] = {"array_metadatas": keys}
    if strings:
        files[STRINGS_FILE] = strings
    # Last, because stock Orbax takes the directory for a checkpoint when this file is there.
    files[TREE_FILE] = {
        "tree_metadata": {
            str(tuple(map(str, leaf.path))): _tree_entry(leaf, arrays) for leaf in leaves
        },
        "use_ocdbt": ocdbt,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {MARK: VERSION},
    }
    return {name: _compact(content).encode() for name, content in files.items()}


def _sharding_table(named: Sequence[tuple[str, Leaf]]) -> dict[str, str]:
    """How each JAX array lies on devices, by stock's name of it."""
    devices = sum(len(leaf.sharding.device_ids) for _, leaf in named if leaf.sharding)
    return {
        base64.b64encode(name.encode()).decode(): _sharding_json(
            leaf.sharding, devices <= MAX_DEVICES_LISTED
        )
        for name, leaf in named
        if _value_type(leaf) == "jax.Array"
    }


def _value_type(leaf: Leaf) -> str:
    return _EMPTY_TYPES[leaf.value] if leaf.kind == "empty" else _VALUE_TYPES[leaf.kind]


def _tree_entry(leaf: Leaf, arrays: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What the tree file says of a leaf."""
    value_type = _value_type(leaf)
    value: dict[str, Any] = {
        "value_type": value_type,
        "skip_deserialize": value_type in _NOT_STORED,
    }
    if value_type == "jax.Array":
        value["write_shape"] = arrays[leaf.name]
    keys = [{"key": str(key), "key_type": _key_type(key)} for key in leaf.path]
    return {"key_metadata": keys, "value_metadata": value}


def _key_entry(name: str, leaf: Leaf, arrays: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What is said of an array of PRNG keys, which stock calls `name`."""
    chunk = arrays[leaf.name]
    return {
        "array_metadata": {
            "param_name": name,
            "write_shape": chunk,
            "chunk_shape": chunk,
            "ext_metadata": {"random_key_impl": leaf.key_impl},
        }
    }


class _KeyEntry(msgspec.Struct):
    key: str
    key_type: Literal[1, 2]


class _ValueEntry(msgspec.Struct):
    value_type: str
    write_shape: tuple[int, ...] | None = None


class _Entry(msgspec.Struct):
    key_metadata: Annotated[tuple[_KeyEntry, ...], msgspec.Meta(max_length=MAX_TREE_DEPTH)]
    value_metadata: _ValueEntry


class _TreeFile(msgspec.Struct):
    """What is read of `_METADATA`; older versions do not say the last two."""

    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool
    custom_metadata: dict[str, Any] | None = None
    use_zarr3: bool | None = None
    store_array_data_equal_to_fill_value: bool | None = None


class _ShardingKind(msgspec.Struct):
    sharding_type: str = ""


class _DeviceMesh(msgspec.Struct):
    mesh: list[Any]


class _Sharding(msgspec.Struct):
    """A NamedSharding in `_sharding`; its devices, which older versions lack, are in lists as
    deep as it has axes.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    partition_spec: tuple[Axes, ...]
    device_mesh: _DeviceMesh | None = None


class _Device(msgspec.Struct):
    id: int


class _KeyArray(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _ArrayEntry(msgspec.Struct):
    array_metadata: _KeyArray


class _ArrayMetadatas(msgspec.Struct):
    array_metadatas: list[_ArrayEntry]


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """What a stock PyTree checkpoint says of its tree and of the way its arrays are stored.

    The leaves have no shape or dtype yet: those are with the arrays. `stored` has the name that
    stock gave each array, by the name of its leaf here, which is safe for a directory; stock's need
    not be. `written` is the shape of what a device wrote of an array, where it says so.
    """

    leaves: tuple[Leaf, ...]
    stored: Mapping[str, str]
    written: Mapping[str, tuple[int, ...]]
    ocdbt: bool
    zarr3: bool
    all_chunks_stored: bool


def read_orbax_tree(directory: Files) -> OrbaxTree:
    """The tree of the stock PyTree checkpoint in `directory`.

    Raises FormatError where a file says something stock Orbax 0.12 does not, or two leaves have one
    name, as stock gives to `{"a": {"b": x}}` and `{"a.b": y}`, of which it keeps one array;
    NotACheckpoint where it belongs to a universal checkpoint without its `ucp.json`, which stock
    would read half of.
    """
    content = _json(directory, TREE_FILE, _TreeFile)
    if MARK in (content.custom_metadata or {}):
        raise NotACheckpoint(
            f"{directory} is a universal checkpoint without its ucp.json: it was never finished, or"
            " the file is lost. If a conversion was stopped here, run it again."
        )
    files = _TreeFiles(
        directory,
        _shardings(directory),
        _json(directory, STRINGS_FILE, dict[str, str], {}),
        _key_impls(directory),
    )
    entries = list(content.tree_metadata.values())
    paths = [tuple(_key(directory, key) for key in entry.key_metadata) for entry in entries]
    if fault := tree_fault(paths):
        raise FormatError(f"{directory}/{TREE_FILE} is no tree: {fault}")
    leaves: list[Leaf] = []
    stored: dict[str, str] = {}
    written: dict[str, tuple[int, ...]] = {}
    for entry, path, name in zip(entries, paths, leaf_names(paths), strict=True):
        stock_name = _stock_name(entry)
        leaf = files.leaf(path, name, stock_name, entry.value_metadata.value_type)
        leaves.append(leaf)
        if leaf.has_array:
            stored[name] = stock_name
            if entry.value_metadata.write_shape is not None:
                written[name] = entry.value_metadata.write_shape
    _require_own_places(directory, entries, leaves)
    # Where not even zeros are left out, a chunk that is not there is a loss and not a default.
    complete = bool(content.store_array_data_equal_to_fill_value)
    return OrbaxTree(
        tuple(leaves), stored, written, content.use_ocdbt, bool(content.use_zarr3), complete
    )


@dataclass(frozen=True)
class _TreeFiles:
    """What the files beside the tree say of leaves, by stock's names of them."""

    directory: Files
    shardings: Mapping[str, SavedSharding]
    strings: Mapping[str, str]
    key_impls: Mapping[str, str]

    def leaf(self, path: TreePath, name: str, stock_name: str, value_type: str) -> Leaf:
        """A leaf of the tree. Raises FormatError for a type that stock does not write, and for a
        string without its text.
        """
        impl = self.key_impls.get(stock_name, "")
        kind, value = _kind(value_type, impl, f"{self.directory}/{TREE_FILE}: {stock_name}")
        if kind == "str":
            if stock_name not in self.strings:
                raise FormatError(
                    f"{self.directory}/{STRINGS_FILE} has no value for {stock_name}, which"
                    f" {TREE_FILE} says is a string"
                )
            value = self.strings[stock_name]
        sharding = self.shardings.get(stock_name)
        return Leaf(path, name, kind, value=value, key_impl=impl, sharding=sharding)


def _key_impls(directory: Files) -> dict[str, str]:
    """Of what kind the arrays of PRNG keys are, by stock's names of them; "" of other arrays."""
    impls: dict[str, str] = {}
    for name in (file.name for file in walk(directory)):
        if name.startswith("array_metadatas/") and not name.startswith("array_metadatas/."):
            for entry in _json(directory, name, _ArrayMetadatas).array_metadatas:
                impl = (entry.array_metadata.ext_metadata or {}).get("random_key_impl", "")
                impls[entry.array_metadata.param_name] = impl if isinstance(impl, str) else ""
    return impls


def _require_own_places(
    directory: Files, entries: Sequence[_Entry], leaves: Sequence[Leaf]
) -> None:
    """Raises FormatError where two leaves with a value have one name."""
    seen: set[str] = set()
    for entry, leaf in zip(entries, leaves, strict=True):
        if leaf.kind in ("none", "empty"):
            continue
        name = _stock_name(entry)
        if name in seen:
            raise FormatError(
                f"{directory}/{TREE_FILE}: {name} is the name of two leaves: Orbax wrote both to"
                " one place and kept the last"
            )
        seen.add(name)


def _stock_name(entry: _Entry) -> str:
    return ".".join(key.key for key in entry.key_metadata)


def _key_type(key: Key) -> int:
    by_position = key.kind in ("list", "tuple") or (
        key.kind == "attr" and isinstance(key.name, int)
    )
    return _SEQUENCE if by_position else _DICT


def _key(directory: Files, entry: _KeyEntry) -> Key:
    if entry.key_type != _SEQUENCE:
        return Key("dict", entry.key)
    if not re.fullmatch("[0-9]{1,9}", entry.key):
        raise FormatError(f"{directory}/{TREE_FILE} has {entry.key!r:.80} for a place in a list")
    return Key("list", int(entry.key))


def _kind(value_type: str, impl: str, where: str) -> tuple[LeafKind, Any]:
    match value_type:
        case "jax.Array":
            return ("prng_key" if impl else "jax"), None
        case "np.ndarray":
            return "numpy", None
        case "scalar":
            return "numpy_scalar", None
        case "string":
            return "str", None
        case "None":
            return "none", None
        case "Dict" | "List" | "Tuple":
            return "empty", value_type.lower()
        case "NamedTuple":
            return "empty", "attr"
        case _:
            raise FormatError(
                f"{where} has value type {value_type!r}, which stock Orbax 0.12 does not write"
            )


@functools.lru_cache(maxsize=1024)
def _sharding_json(sharding: SavedSharding | None, with_devices: bool) -> str:
    if sharding is None:
        return _compact({"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"})
    about: dict[str, Any] = {
        "sharding_type": "NamedSharding",
        "shape": sharding.axis_sizes,
        "axis_names": sharding.axis_names,
        "axis_types": ["AxisType.Auto"] * len(sharding.axis_names),
        "partition_spec": sharding.spec,
    }
    if with_devices and sharding.device_ids:
        mesh = np.array([{"id": i} for i in sharding.device_ids], dtype=object).reshape(
            sharding.axis_sizes
        )
        about["device_mesh"] = {"mesh": mesh.tolist()}
    return _compact(about)


def _compact(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _shardings(directory: Files) -> dict[str, SavedSharding]:
    """The NamedShardings of leaves, by stock's names of them."""
    shardings: dict[str, SavedSharding] = {}
    for key, text in _json(directory, SHARDING_FILE, dict[str, str], {}).items():
        try:
            name = base64.b64decode(key, validate=True).decode()
            if msgspec.json.decode(text, type=_ShardingKind).sharding_type == "NamedSharding":
                shardings[name] = _saved_sharding(msgspec.json.decode(text, type=_Sharding))
        except (ValueError, RecursionError) as error:
            raise FormatError(
                f"{directory}/{SHARDING_FILE} is damaged at {key!r:.80}: {error}"
            ) from None
    return shardings


def _saved_sharding(stored: _Sharding) -> SavedSharding:
    """Raises ValueError where it is of no mesh."""
    devices: list[Any] = stored.device_mesh.mesh if stored.device_mesh else []
    for _ in stored.shape[1:]:
        devices = [device for row in devices if isinstance(row, list) for device in row]
    ids = tuple(device.id for device in msgspec.convert(devices, list[_Device]))
    sharding = SavedSharding(stored.axis_names, stored.shape, stored.partition_spec, ids)
    if fault := sharding_fault(sharding):
        raise ValueError(f"a sharding {fault}")
    return sharding


def _json(directory: Files, name: str, kind: type[T], default: T | None = None) -> T:
    """What a file says, which is of a kind; `default` if it is not there."""
    data = read_file(directory, name)
    if data is None:
        if default is None:
            raise FormatError(f"{directory}/{name} is missing; a PyTree checkpoint of Orbax has it")
        return default
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{directory}/{name} is damaged: {error}") from None
