"""The small files by which stock Orbax knows the tree of a PyTree checkpoint.

Facts: `_src/metadata/tree.py`, `_src/metadata/empty_values.py`, `_src/metadata/sharding.py` and
`_src/handlers/base_pytree_checkpoint_handler.py` of orbax-checkpoint 0.12.8. Nothing of Orbax is
imported; `formats.orbax.tree` reads them.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jax_ucp.tree import Leaf, LeafKind, SavedSharding
from jax_ucp.universal.metadata import VERSION

T = TypeVar("T")

TREE_FILE = "_METADATA"
SHARDING_FILE = "_sharding"
STRINGS_FILE = "_strings.json"

# In `custom_metadata`, which stock Orbax leaves to its users: this tree belongs to a universal
# checkpoint.
MARK = "jax_ucp"

# With more devices than this, of all leaves together, none are listed, and stock takes its own, in
# their order: a list is needed for each leaf, with some ten bytes a device, and a thousand leaves
# may share one mesh.
MAX_DEVICES_LISTED = 1 << 24

SEQUENCE, _DICT = 1, 2
_VALUE_TYPES: Mapping[LeafKind, str] = {
    **{"jax": "jax.Array", "prng_key": "jax.Array", "array": "np.ndarray", "numpy": "np.ndarray"},
    **dict.fromkeys(("numpy_scalar", "bool", "int", "float", "complex"), "scalar"),
    **{"str": "string", "none": "None"},
}
# What stock writes for a node without children: a named tuple, such as optax.EmptyState, comes back
# as None.
_EMPTY_TYPES = {"dict": "Dict", "list": "List", "tuple": "Tuple", "attr": "None"}
NOT_STORED = {"None", "Dict", "List", "Tuple", "NamedTuple"}


def orbax_files(
    leaves: Sequence[Leaf], arrays: Mapping[str, tuple[int, ...]], ocdbt: bool = False
) -> dict[str, bytes]:
    """The files, in writing order, by which stock Orbax reads arrays of these outer chunks."""
    named = [(".".join(map(str, leaf.path)), leaf) for leaf in leaves]
    # all that stock reads of other arrays is in their `zarr.json`
    keys = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": arrays[leaf.name],
                "chunk_shape": arrays[leaf.name],
                "ext_metadata": {"random_key_impl": leaf.key_impl},
            }
        }
        for name, leaf in named
        if leaf.kind == "prng_key"
    ]
    strings = {name: leaf.value for name, leaf in named if leaf.kind == "str"}
    devices = sum(len(leaf.sharding.device_ids) for _, leaf in named if leaf.sharding)
    # the sharding of each JAX array, by stock's name of the array in base64
    shardings = {
        base64.b64encode(name.encode()).decode(): _sharding_json(
            leaf.sharding, devices <= MAX_DEVICES_LISTED
        )
        for name, leaf in named
        if _value_type(leaf) == "jax.Array"
    }
    files: dict[str, Any] = {SHARDING_FILE: shardings}
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


def _value_type(leaf: Leaf) -> str:
    return _EMPTY_TYPES[leaf.value] if leaf.kind == "empty" else _VALUE_TYPES[leaf.kind]


def _tree_entry(leaf: Leaf, arrays: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    value_type = _value_type(leaf)
    value: dict[str, Any] = {"value_type": value_type, "skip_deserialize": value_type in NOT_STORED}
    if value_type == "jax.Array":
        value["write_shape"] = arrays[leaf.name]
    keys: list[dict[str, Any]] = []
    for key in leaf.path:
        is_item = key.kind == "attr" and isinstance(key.name, int)
        kind = SEQUENCE if is_item or key.kind in ("list", "tuple") else _DICT
        keys.append({"key": str(key), "key_type": kind})
    return {"key_metadata": keys, "value_metadata": value}


@functools.lru_cache(maxsize=1024)
def _sharding_json(sharding: SavedSharding | None, with_devices: bool) -> str:
    if sharding is None:
        # As JAX before 0.10 called the device; stock Orbax since then knows both names.
        return _compact({"sharding_type": "SingleDeviceSharding", "device_str": "TFRT_CPU_0"})
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
