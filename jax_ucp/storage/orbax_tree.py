"""The small files by which stock Orbax knows the tree of a PyTree checkpoint: written here, and read here.

Facts: `_src/metadata/tree.py`, `_src/metadata/empty_values.py`, `_src/metadata/sharding.py` and
`_src/handlers/base_pytree_checkpoint_handler.py` of orbax-checkpoint 0.12.8. Nothing of Orbax is imported.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.metadata import VERSION, Axes, Key, KeyKind, Leaf, LeafKind, SavedSharding
from jax_ucp.storage.directory import Directory

TREE_FILE = "_METADATA"
SHARDING_FILE = "_sharding"
STRINGS_FILE = "_strings.json"

# In `custom_metadata`, which stock Orbax leaves to its users: this tree belongs to a universal checkpoint.
MARK = "jax_ucp"

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
# What stock writes for a node without children: a named tuple, such as optax.EmptyState, comes back as None.
_EMPTY_TYPES: dict[KeyKind, str] = {"dict": "Dict", "list": "List", "tuple": "Tuple", "attr": "None"}
_NOT_STORED = {"None", "Dict", "List", "Tuple", "NamedTuple"}


def orbax_files(leaves: Sequence[Leaf], arrays: Mapping[str, tuple[int, ...]], ocdbt: bool = False) -> dict[str, bytes]:
    """The files, by name and in the order to write them in, that let stock Orbax read the leaves.

    `arrays` has the outer chunk of each array; with `ocdbt`, stock looks for them in an OCDBT database.
    """
    tree, shardings, strings, keys = {}, {}, {}, []
    for leaf in leaves:
        value_type = _EMPTY_TYPES[leaf.value] if leaf.kind == "empty" else _VALUE_TYPES[leaf.kind]
        value: dict[str, Any] = {"value_type": value_type, "skip_deserialize": value_type in _NOT_STORED}
        name = ".".join(map(str, leaf.path))
        if value_type == "jax.Array":
            value["write_shape"] = arrays[leaf.name]
            shardings[base64.b64encode(name.encode()).decode()] = _sharding_json(leaf.sharding)
            if leaf.kind == "prng_key":
                shapes = {"write_shape": arrays[leaf.name], "chunk_shape": arrays[leaf.name]}
                ext = {"ext_metadata": {"random_key_impl": leaf.key_impl}}
                keys.append({"array_metadata": {"param_name": name, **shapes, **ext}})
        elif value_type == "string":
            strings[name] = leaf.value
        tree[str(tuple(map(str, leaf.path)))] = {
            "key_metadata": [{"key": str(key), "key_type": _key_type(key)} for key in leaf.path],
            "value_metadata": value,
        }
    about = {"use_ocdbt": ocdbt, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    files: dict[str, Any] = {SHARDING_FILE: shardings}
    if keys:  # all that stock reads of the others is in their `zarr.json`
        files["array_metadatas/process_0"] = {"array_metadatas": keys}
    if strings:
        files[STRINGS_FILE] = strings
    # Last, because stock Orbax takes the directory for a checkpoint when this file is there.
    files[TREE_FILE] = {"tree_metadata": tree, **about, "custom_metadata": {MARK: VERSION}}
    return {name: _compact(content).encode() for name, content in files.items()}


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """What a stock PyTree checkpoint says of its tree and of the way its arrays are stored.

    The leaves have no shape or dtype yet: those are with the arrays, whose names they have.
    """

    leaves: tuple[Leaf, ...]
    ocdbt: bool
    zarr3: bool
    all_chunks_stored: bool


def read_orbax_tree(directory: Directory) -> OrbaxTree:
    """The tree of the stock PyTree checkpoint in `directory`.

    Raises FormatError where a file is not JSON, or says something stock Orbax 0.12 does not; NotACheckpoint
    where it belongs to a universal checkpoint without its `ucp.json`, which stock would read half of.
    """
    content = _json(directory, TREE_FILE)
    if MARK in (content.get("custom_metadata") or {}):
        raise NotACheckpoint(
            f"{directory} is a universal checkpoint without its ucp.json: it was never finished, or the file is lost. "
            "If a conversion was stopped here, run it again."
        )
    shardings = {base64.b64decode(k).decode(): json.loads(v) for k, v in _json(directory, SHARDING_FILE, {}).items()}
    strings = _json(directory, STRINGS_FILE, {})
    impls: dict[str, str] = {}
    for name in directory.files():
        if name.startswith("array_metadatas/"):
            for entry in _json(directory, name)["array_metadatas"]:
                array = entry["array_metadata"]
                impls[array["param_name"]] = (array.get("ext_metadata") or {}).get("random_key_impl", "")
    leaves = []
    for entry in content["tree_metadata"].values():
        keys = entry["key_metadata"]
        path = tuple(_key(key["key"], key["key_type"]) for key in keys)
        name = ".".join(key["key"] for key in keys)
        value_type = entry["value_metadata"]["value_type"]
        impl = impls.get(name, "")
        kind, value = _kind(value_type, impl, f"{directory}/{TREE_FILE}: {name}")
        if kind == "str":
            if name not in strings:
                raise FormatError(
                    f"{directory}/{STRINGS_FILE} has no value for {name}, which {TREE_FILE} says is a string"
                )
            value = strings[name]
        sharding = _saved_sharding(shardings.get(name))
        leaves.append(Leaf(path, name, kind, value=value, key_impl=impl, sharding=sharding))
    # Where not even zeros are left out, a chunk that is not there is a loss and not a default.
    complete = bool(content.get("store_array_data_equal_to_fill_value"))
    return OrbaxTree(tuple(leaves), bool(content["use_ocdbt"]), bool(content.get("use_zarr3")), complete)


def _key_type(key: Key) -> int:
    by_position = key.kind in ("list", "tuple") or (key.kind == "attr" and isinstance(key.name, int))
    return _SEQUENCE if by_position else _DICT


def _key(name: str, key_type: int) -> Key:
    return Key("list", int(name)) if key_type == _SEQUENCE else Key("dict", name)


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
            raise FormatError(f"{where} has value type {value_type!r}, which stock Orbax 0.12 does not write")


@functools.lru_cache(maxsize=1024)
def _sharding_json(sharding: SavedSharding | None) -> str:
    if sharding is None:
        return _compact({"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"})
    ids = sharding.device_ids or range(math.prod(sharding.axis_sizes))
    mesh = np.array([{"id": i} for i in ids], dtype=object).reshape(sharding.axis_sizes)
    about = {
        "sharding_type": "NamedSharding",
        "shape": sharding.axis_sizes,
        "axis_names": sharding.axis_names,
        "axis_types": ["AxisType.Auto"] * len(sharding.axis_names),
        "partition_spec": sharding.spec,
        "device_mesh": {"mesh": mesh.tolist()},
    }
    return _compact(about)


def _compact(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _saved_sharding(content: dict[str, Any] | None) -> SavedSharding | None:
    if content is None or content.get("sharding_type") != "NamedSharding":
        return None
    spec: list[Axes] = [tuple(axes) if isinstance(axes, list) else axes for axes in content["partition_spec"]]
    mesh: Any = np.array((content.get("device_mesh") or {}).get("mesh") or [], dtype=object)
    ids = tuple(int(device["id"]) for device in mesh.ravel())
    return SavedSharding(tuple(content["axis_names"]), tuple(content["shape"]), tuple(spec), ids)


def _json(directory: Directory, name: str, default: Any = None) -> Any:
    data = directory.read(name)
    if data is None:
        if default is None:
            raise FormatError(f"{directory}/{name} is missing; a PyTree checkpoint of Orbax has it")
        return default
    try:
        return json.loads(data)
    except ValueError as error:
        raise FormatError(f"{directory}/{name} is damaged: {error}") from None
