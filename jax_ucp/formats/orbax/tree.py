"""The tree of a PyTree checkpoint of Orbax, as its small files say it.

`_METADATA` has each leaf's path and type. `_sharding` says how JAX arrays lay on devices,
`_strings.json` has texts, `array_metadatas` the kinds of PRNG keys. Up to 0.5 the msgpack file
`checkpoint` has the same tree once more: the values that were not to be files of their own
(`SaveArgs(aggregate=True)`), and for each other a placeholder with the name of its array.

Facts: `_src/metadata/tree.py`, `_src/metadata/empty_values.py`, `_src/metadata/sharding.py` and
`_src/handlers/base_pytree_checkpoint_handler.py` of orbax-checkpoint 0.12.8; `metadata/tree.py` and
`base_pytree_checkpoint_handler.py` of 0.5.20. Nothing of Orbax is imported.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from jax_ucp.codecs.msgpack import decode
from jax_ucp.codecs.msgpack_tree import Packed, is_packed, leaf_values, packed_leaf, plain_leaf
from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files, read_bytes
from jax_ucp.files.ranges import FileRange
from jax_ucp.tree import (
    MAX_TREE_DEPTH,
    Axes,
    Key,
    Leaf,
    LeafKind,
    SavedSharding,
    leaf_names,
    tree_fault,
)
from jax_ucp.tree import Path as TreePath
from jax_ucp.universal.orbax_tree import (
    MARK,
    NOT_STORED,
    SEQUENCE,
    SHARDING_FILE,
    STRINGS_FILE,
    TREE_FILE,
)
from jax_ucp.universal.validation import sharding_fault

T = TypeVar("T")

AGGREGATE_FILE = "checkpoint"  # of Orbax up to 0.5
_PLACEHOLDER = "PLACEHOLDER://"

_KINDS: Mapping[str, tuple[LeafKind, Any]] = {
    **{"jax.Array": ("jax", None), "np.ndarray": ("numpy", None), "string": ("str", None)},
    **{"scalar": ("numpy_scalar", None), "None": ("none", None)},
    **{name: ("empty", name.lower()) for name in ("Dict", "List", "Tuple")},
    "NamedTuple": ("empty", "attr"),
}


class _KeyEntry(msgspec.Struct):
    key: str
    key_type: Literal[1, 2]


class _ValueEntry(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False
    write_shape: tuple[int, ...] | None = None


class _TreeEntry(msgspec.Struct):
    key_metadata: Annotated[tuple[_KeyEntry, ...], msgspec.Meta(max_length=MAX_TREE_DEPTH)]
    value_metadata: _ValueEntry


class _TreeFile(msgspec.Struct):
    """The part of `_METADATA` that is read: 0.5 has only the tree, 0.11.31 adds `use_ocdbt`."""

    tree_metadata: dict[str, _TreeEntry]
    use_ocdbt: bool | None = None
    custom_metadata: dict[str, Any] | None = None
    use_zarr3: bool | None = None
    store_array_data_equal_to_fill_value: bool | None = None


class _ShardingKind(msgspec.Struct):
    sharding_type: str = ""


class _DeviceMesh(msgspec.Struct):
    mesh: list[Any]


class _Sharding(msgspec.Struct):
    """A NamedSharding in `_sharding`; devices, if any, are in lists as deep as its axes."""

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
    """The tree of a stock PyTree checkpoint, and how its arrays are stored.

    The leaves have no shape or dtype yet. `stored` has stock's name of each array, by the name of
    its leaf. `packed` are the values in `checkpoint`. `written` is the shape of what a device wrote
    of an array, if known. `undescribed` are arrays whose properties in `array_metadatas` are lost.
    `ocdbt` is None where the files do not say it.
    """

    leaves: tuple[Leaf, ...]
    stored: Mapping[str, str]
    packed: Mapping[str, Packed] = field(default_factory=dict)
    written: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    undescribed: frozenset[str] = frozenset()
    ocdbt: bool | None = None
    zarr3: bool = False
    all_chunks_stored: bool = False
    has_aggregate: bool = False


def read_orbax_tree(directory: Files) -> OrbaxTree:
    """The tree of the stock PyTree checkpoint in `directory`.

    Raises FormatError for what stock Orbax does not say, or two leaves of one name, as stock gives
    to `{"a": {"b": x}}` and `{"a.b": y}`, of which it keeps one array; NotACheckpoint where it
    belongs to a universal checkpoint without its `ucp.json`, which stock would read half of.
    """
    content = _json(directory, TREE_FILE, _TreeFile)
    if MARK in (content.custom_metadata or {}):
        raise NotACheckpoint(
            f"{directory} is a universal checkpoint without its ucp.json: it was never finished, or"
            " the file is lost. If a conversion was stopped here, run it again."
        )
    entries = list(content.tree_metadata.values())
    paths = [tuple(_key(directory, key) for key in entry.key_metadata) for entry in entries]
    if fault := tree_fault(paths):
        raise FormatError(f"{directory}/{TREE_FILE} is not a tree: {fault}")
    files = _TreeFiles(
        directory,
        shardings(directory),
        _json(directory, STRINGS_FILE, dict[str, str], {}),
        _key_impls(directory),
        _read_aggregate(directory, paths),
    )
    names = leaf_names(paths)
    values = list(map(files.packed_value, paths, entries))
    leaves = list(map(files.leaf, paths, names, entries, values))
    places = [_stock_name(entry) for entry in entries]
    counts = Counter(
        place
        for place, leaf in zip(places, leaves, strict=True)
        if leaf.kind not in ("none", "empty")  # which have no value
    )
    if twice := next((place for place, count in counts.items() if count > 1), None):
        raise FormatError(
            f"{directory}/{TREE_FILE}: {twice} is the name of two leaves: Orbax wrote both to one"
            " place and kept the last"
        )
    packed = {name: value for name, value in zip(names, values, strict=True) if is_packed(value)}
    in_arrays = {
        leaf.name: entry
        for leaf, entry in zip(leaves, entries, strict=True)
        if leaf.has_array and leaf.name not in packed
    }
    return OrbaxTree(
        tuple(leaves),
        {name: _stock_name(entry) for name, entry in in_arrays.items()},
        packed,
        {name: entry.value_metadata.write_shape for name, entry in in_arrays.items()},
        frozenset(name for name, entry in in_arrays.items() if files.lacks(entry)),
        content.use_ocdbt,
        bool(content.use_zarr3),
        # Where not even zeros are left out, a chunk that is not there is a loss and not a default.
        bool(content.store_array_data_equal_to_fill_value),
        bool(files.aggregate),
    )


@dataclass(frozen=True)
class _TreeFiles:
    """Properties of leaves in the files beside the tree, by stock's names; `aggregate` by paths."""

    directory: Files
    shardings: Mapping[str, SavedSharding]
    strings: Mapping[str, str]
    key_impls: Mapping[str, str]
    aggregate: Mapping[TreePath, Any]

    def lacks(self, entry: _TreeEntry) -> bool:
        """Whether an array's properties in `array_metadatas`, and so `write_shape`, are lost.

        Source: `_get_param_infos_with_write_shape` of Orbax 0.12.
        """
        written = entry.value_metadata.write_shape is not None
        return written and _stock_name(entry) not in self.key_impls

    def packed_value(self, path: TreePath, entry: _TreeEntry) -> Any:
        """The value of a leaf in the aggregate file; None of any other. Raises FormatError."""
        value = self.aggregate.get(path)
        about = entry.value_metadata
        is_elsewhere = not self.aggregate or placeholder(value) is not None
        if about.value_type in NOT_STORED:
            return None if is_elsewhere else value
        if about.skip_deserialize is is_elsewhere or (about.skip_deserialize and value is None):
            raise FormatError(
                f"{self.directory}: the value of {_stock_name(entry)!r:.200} should be in"
                f" {AGGREGATE_FILE} by one of {TREE_FILE} and {AGGREGATE_FILE}, and not by the"
                " other: the files are of two saves, or one is missing"
            )
        return value if about.skip_deserialize else None

    def leaf(self, path: TreePath, name: str, entry: _TreeEntry, packed: Any) -> Leaf:
        """A leaf of the tree. Raises FormatError for an unknown type, or a missing text."""
        stock_name, value_type = _stock_name(entry), entry.value_metadata.value_type
        if value_type in NOT_STORED and packed is not None:
            # what 0.5 had no handler for, such as an empty tuple
            leaf_of = packed_leaf if is_packed(packed) else plain_leaf
            return leaf_of(path, name, packed)
        impl = self.key_impls.get(stock_name, "")
        if value_type not in _KINDS:
            raise FormatError(
                f"{self.directory}/{TREE_FILE}: {stock_name} has value type {value_type!r}, which"
                " stock Orbax does not write"
            )
        kind, value = _KINDS[value_type]
        if kind == "jax" and impl:
            kind = "prng_key"
        if kind == "str":
            value = packed if packed is not None else self.strings.get(stock_name)
            if not isinstance(value, str):
                raise FormatError(
                    f"{self.directory}/{STRINGS_FILE} has no value for {stock_name}, which"
                    f" {TREE_FILE} says is a string"
                )
        sharding = self.shardings.get(stock_name)
        return Leaf(path, name, kind, value=value, key_impl=impl, sharding=sharding)


def placeholder(value: Any) -> str | None:
    """The name of the array that a value stands for; None of any other value.

    Source: `leaf_placeholder`, `utils.py` of orbax-checkpoint 0.5.20.
    """
    if isinstance(value, str) and value.startswith(_PLACEHOLDER):
        return value.removeprefix(_PLACEHOLDER)
    return None


def _read_aggregate(directory: Files, paths: Collection[TreePath]) -> Mapping[TreePath, Any]:
    """The values in the file by leaf of the tree; Raises FormatError for another tree."""
    path = FilePath(directory, AGGREGATE_FILE)
    # the files of others that are called so are texts, which begin below 0x80
    if not path.is_file() or path.read_range(0, 1) < b"\x80":
        return {}
    tree = decode(FileRange(path), str(path))
    by_name = {_names(at): value for at, value in leaf_values(tree, lambda value: False)}
    if by_name.keys() != {_names(at) for at in paths}:
        raise FormatError(
            f"{path} has another tree than the _METADATA beside it: they are of two saves"
        )
    return {at: by_name[_names(at)] for at in paths}


def _names(path: TreePath) -> tuple[str, ...]:
    """Keys as text: the file has dicts where the tree has lists."""
    return tuple(map(str, path))


def _key_impls(directory: Files) -> dict[str, str]:
    """The PRNG implementation of each array by stock's name of it; "" if it has no PRNG keys."""
    impls: dict[str, str] = {}
    for name in (file.name for file in directory.walk()):
        if name.startswith("array_metadatas/") and not name.startswith("array_metadatas/."):
            for entry in _json(directory, name, _ArrayMetadatas).array_metadatas:
                impl = (entry.array_metadata.ext_metadata or {}).get("random_key_impl", "")
                impls[entry.array_metadata.param_name] = impl if isinstance(impl, str) else ""
    return impls


def _stock_name(entry: _TreeEntry) -> str:
    return ".".join(key.key for key in entry.key_metadata)


def _key(directory: Files, entry: _KeyEntry) -> Key:
    if entry.key_type != SEQUENCE:
        return Key("dict", entry.key)
    if not re.fullmatch("[0-9]{1,9}", entry.key):
        raise FormatError(f"{directory}/{TREE_FILE} has {entry.key!r:.80} for a place in a list")
    return Key("list", int(entry.key))


def shardings(directory: Files) -> dict[str, SavedSharding]:
    """The NamedShardings of leaves, by stock's names of them."""
    by_name: dict[str, SavedSharding] = {}
    for key, text in _json(directory, SHARDING_FILE, dict[str, str], {}).items():
        try:
            name = base64.b64decode(key, validate=True).decode()
            if msgspec.json.decode(text, type=_ShardingKind).sharding_type == "NamedSharding":
                by_name[name] = _saved_sharding(msgspec.json.decode(text, type=_Sharding))
        except (ValueError, RecursionError) as error:
            raise FormatError(
                f"{directory}/{SHARDING_FILE} is damaged at {key!r:.80}: {error}"
            ) from None
    return by_name


def _saved_sharding(stored: _Sharding) -> SavedSharding:
    """The sharding, as checkpoints here have it. Raises ValueError where it is of no mesh."""
    devices: list[Any] = stored.device_mesh.mesh if stored.device_mesh else []
    for _ in stored.shape[1:]:
        devices = [device for row in devices if isinstance(row, list) for device in row]
    ids = tuple(device.id for device in msgspec.convert(devices, list[_Device]))
    sharding = SavedSharding(stored.axis_names, stored.shape, stored.partition_spec, ids)
    if fault := sharding_fault(sharding):
        raise ValueError(f"a sharding {fault}")
    return sharding


def _json(directory: Files, name: str, kind: type[T], default: T | None = None) -> T:
    file = directory.stat(name)
    data = read_bytes(directory, file) if file is not None and file.kind == "file" else None
    if data is None:
        if default is None:
            raise FormatError(f"{directory}/{name} is missing; a PyTree checkpoint of Orbax has it")
        return default
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{directory}/{name} is damaged: {error}") from None
