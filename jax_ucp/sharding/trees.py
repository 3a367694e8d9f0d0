"""Pytrees as leaves with paths, and a target tree matched against what a checkpoint has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jax_ucp.errors import FormatError, TreeMismatch, UnsupportedLeaf
from jax_ucp.tree import MAX_TREE_DEPTH, Axes, Key, KeyKind, Leaf, LeafKind, Path

Abstract = jax.ShapeDtypeStruct

# Leaves of a target that the checkpoint lacks: refused; kept where they have a value; or left as
# they are, a ShapeDtypeStruct too, which is what stock Orbax calls partial.
Missing = Literal["refuse", "keep", "leave"]

_NUMBER_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
# By kind, the kinds that numbers may be cast to.
_CASTS = {kind: _NUMBER_KINDS[i:] for i, kind in enumerate(_NUMBER_KINDS)}
_CASTS[jnp.bool_] = (jnp.bool_,)
_PYTHON_KINDS: dict[type, LeafKind] = {
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
}
_ARRAY_KINDS = ("array", "jax", "numpy", "numpy_scalar")
# By the kind of a Python number, the kinds of numpy scalars that may be given as one.
_NUMPY_KINDS: dict[LeafKind, str] = {"bool": "b", "int": "iu", "float": "f", "complex": "c"}


@dataclass(frozen=True, slots=True)
class StandIn:
    """A target's leaf that says what is wanted; `original` stays if the checkpoint lacks it."""

    value: Any
    original: Any


class AsStored(jax.ShapeDtypeStruct):
    """A leaf of a target made of what a checkpoint says is stored: of a PRNG key, its data."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A leaf of a pytree in memory; None and containers without children count as leaves."""

    path: Path
    value: Any
    axes: tuple[Axes, ...] | None = None
    original: Any = None

    @property
    def label(self) -> str:
        return _label(self.path)


def walk(tree: Any, path: Path = (), axes: tuple[Axes, ...] | None = None) -> Iterator[TreeNode]:
    """Every leaf, None and empty containers too, depth first. Raises UnsupportedLeaf."""
    if len(path) > MAX_TREE_DEPTH:
        raise UnsupportedLeaf(
            f"a tree of more than {MAX_TREE_DEPTH} levels cannot be saved, such as at {path[0]}/..."
        )
    try:
        children, _ = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda node: node is not tree
        )
    except ValueError as error:
        raise UnsupportedLeaf(f"{_label(path)} has keys that JAX cannot sort: {error}") from None
    if len(children) == 1 and children[0][0] == ():
        value, original = (tree.value, tree.original) if isinstance(tree, StandIn) else (tree, None)
        yield TreeNode(path, value, axes, original)
        return
    if not children:
        yield TreeNode(path, tree)
    below = _logical_axes(tree) or axes
    for (key,), child in children:
        yield from walk(child, (*path, _key(key, tree, path)), below)


def kind_of(node: TreeNode) -> LeafKind:
    """The kind of a leaf, for it to come back as that. Raises UnsupportedLeaf."""
    value = node.value
    if value is None:
        return "none"
    if isinstance(value, jax.Array | Abstract):
        return "prng_key" if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else "jax"
    # other subclasses, such as masked arrays, are more than their data
    if type(value) in (np.ndarray, np.memmap):
        return "numpy"
    if isinstance(value, np.generic):
        return "numpy_scalar"
    if type(value) in _PYTHON_KINDS:
        return _PYTHON_KINDS[type(value)]
    if not jax.tree_util.all_leaves([value]):
        return "empty"
    raise UnsupportedLeaf(
        f"{node.label} is a {type(value).__module__}.{type(value).__qualname__}, which is not an"
        " array,"
        " number, string or None. Leave it out of the tree, or save it beside the checkpoint."
    )


def empty_kind(value: Any) -> KeyKind:
    kinds: dict[type, KeyKind] = {dict: "dict", list: "list", tuple: "tuple"}
    return kinds.get(type(value), "attr")


def key_dtype(leaf: Leaf) -> Any:
    """The dtype of a PRNG key. Raises FormatError if this JAX cannot make one of its data."""
    try:
        key = jax.random.key(0, impl=leaf.key_impl)
    except ValueError:
        raise FormatError(
            f"{leaf.label} is a PRNG key of {leaf.key_impl!r:.80}, an implementation that this JAX"
            " does not have"
        ) from None
    data = jax.eval_shape(jax.random.key_data, key).shape
    if leaf.shape[-len(data) :] != data:
        raise FormatError(
            f"{leaf.label} is a PRNG key of {leaf.key_impl}, but its data have shape {leaf.shape}"
        )
    return key.dtype


def narrowed(dtype: np.dtype) -> np.dtype:
    """The dtype that JAX has for 64-bit integers, 32 bits without x64; any other dtype as it is."""
    return jax.dtypes.canonicalize_dtype(dtype) if dtype.kind in "iu" else dtype


@dataclass(frozen=True, slots=True)
class Matched:
    """The target's leaves that the checkpoint has, with its leaves, and those that stay."""

    pairs: Sequence[tuple[TreeNode, Leaf]]
    kept: Sequence[TreeNode]


def match(
    leaves: Sequence[Leaf],
    target: Any,
    partial: bool = False,
    cast: bool = False,
    narrow: bool = False,
    missing: Missing = "refuse",
    mesh: Mesh | None = None,
) -> Matched:
    """Each leaf of the target tree with the leaf of the checkpoint that fills it.

    Paths match by their names, so that a dict may stand for a dataclass; the `value` of a variable
    of flax's NNX is the variable. With `partial`, leaves of the checkpoint that the target lacks
    are left where they are; `missing` says what becomes of those of the target that the checkpoint
    lacks. A sharding, or a spec on `mesh`, stands for the array as it is stored. With
    `cast`, dtypes may differ, and with `narrow` the target may have what JAX makes of
    64-bit integers. A leaf `...` of the target is left as it is, as Orbax leaves it.

    Raises TreeMismatch with every missing, extra, misshapen and mistyped leaf; and where all of the
    target would stay as it is, since the two have no leaf in common.
    """
    left = {tuple(map(str, leaf.path)): leaf for leaf in leaves}  # leaves without a target
    pairs: list[tuple[TreeNode, Leaf]] = []
    kept: list[TreeNode] = []
    lacking: list[TreeNode] = []
    omitted: list[TreeNode] = []
    for node in walk(target):
        leaf = next((left.pop(names) for names in _names(node) if names in left), None)
        if node.value is ...:
            omitted.append(node)
        elif leaf is not None:
            pairs.append((_as_stored(node, leaf, mesh), leaf))
        else:
            has_value = not isinstance(node.value, Abstract | Sharding | PartitionSpec)
            stays = missing == "leave" or (missing == "keep" and has_value)
            (kept if stays else lacking).append(node)
    extra = [] if partial else list(left.values())
    if kept and left and not (pairs or lacking or extra):
        raise TreeMismatch(
            f"no leaf of the target is in the checkpoint: the target has {kept[0].label}, the"
            f" checkpoint {next(iter(left.values())).label}. Give a target with the checkpoint's"
            " names"
        )
    faults = [_missing(node, left.values(), missing == "keep") for node in lacking]
    differences = ((node, _difference(node, leaf, cast, narrow)) for node, leaf in pairs)
    faults += [f"{node.label}: {difference}" for node, difference in differences if difference]
    faults += [f"{leaf.label}: in the checkpoint, but not in the target" for leaf in extra]
    if faults:
        remedy = "To leave out what the target lacks, restore with partial=True." if extra else ""
        title = f"the target does not fit the checkpoint in {len(faults)} leaves:"
        raise TreeMismatch(title, faults, remedy=remedy)
    return Matched(pairs, [*kept, *omitted])


def _as_stored(node: TreeNode, leaf: Leaf, mesh: Mesh | None) -> TreeNode:
    """The node with the stored shape and dtype, if it is a sharding, or a spec on the mesh, alone;
    and as a PRNG key, if it stands for the data of one.

    Raises TreeMismatch for a spec without a mesh.
    """
    is_key, value = leaf.kind == "prng_key", node.value
    if isinstance(value, PartitionSpec):
        if mesh is None:
            raise TreeMismatch(
                f"{node.label}: the target has {value!r:.80}, and there is no mesh for it: give"
                " mesh=, set one (jax.set_mesh), or give a NamedSharding"
            )
        value = NamedSharding(mesh, value)
    if isinstance(value, Sharding) and leaf.has_array:
        shape, dtype, sharding = leaf.shape, np.dtype(leaf.dtype), value
    elif isinstance(value, AsStored) and is_key:
        shape, dtype, sharding = leaf.shape, None, value.sharding
    else:
        return node
    if is_key:
        shape, dtype = leaf.shape[:-1], key_dtype(leaf)
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        raise TreeMismatch(
            f"{node.label}: {sharding.spec} of the target is for {len(sharding.spec)} axes or more,"
            f" and the array has {len(shape)}"
        )
    return replace(node, value=Abstract(shape, dtype, sharding=sharding))


_NNX_VALUE = Key("attr", "value")


def _names(node: TreeNode) -> Iterator[tuple[str, ...]]:
    """The paths under which a checkpoint may have a leaf of a target: its own, and without, or
    with, the `value` of an NNX variable. A tree cannot have two of them.

    Source: flax 0.12 `nnx/variablelib.py`, which flattens a Variable to its attribute `value`.
    """
    names = tuple(map(str, node.path))
    yield names
    if node.path and node.path[-1] == _NNX_VALUE:
        yield names[:-1]
    else:
        yield (*names, "value")


def fill(target: Any, values: Mapping[Path, Any]) -> Any:
    """The target tree with its leaves replaced by the values at their paths."""
    # JAX counts None, and containers without children, as structure.
    nodes = [node for node in walk(target) if jax.tree_util.all_leaves([node.value])]
    leaves = [values[node.path] for node in nodes]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _label(path: Path) -> str:
    return "/".join(map(str, path)) or "the tree"


def _key(key: Any, parent: Any, path: Path) -> Key:
    match key:
        case SequenceKey(idx=idx):
            return Key("list" if isinstance(parent, list) else "tuple", idx)
        case DictKey(key=str() | int() as name) if not isinstance(name, bool):
            # Subclasses, such as members of a str Enum, are on disk what they are equal to.
            return Key("dict", str.__str__(name) if isinstance(name, str) else int(name))
        case GetAttrKey(name=name):
            return Key("attr", name)
        case FlattenedIndexKey(key=idx):
            return Key("attr", idx)
        case _:
            raise UnsupportedLeaf(
                f"{_label(path)} has the key {key}; a checkpoint's keys are strings and integers"
            )


def _logical_axes(node: Any) -> tuple[Axes, ...] | None:
    """The logical axis names that a Flax box carries for the array in it.

    Source: flax 0.12 `nnx/variablelib.py` (metadata `out_sharding`, before 0.12 `sharding_names`)
    and `core/meta.py` (`Partitioned.names`).
    """
    names = getattr(node, "names", None) if hasattr(node, "unbox") else None
    if hasattr(node, "get_metadata"):
        metadata = node.get_metadata()
        names = metadata.get("out_sharding", metadata.get("sharding_names"))
    return tuple(names) if isinstance(names, tuple | list) else None


def _difference(node: TreeNode, leaf: Leaf, cast: bool, narrow: bool) -> str | None:
    try:
        kind = kind_of(node)
    except UnsupportedLeaf:
        return (
            f"the target has a {type(node.value).__qualname__}; it may have an array, a"
            " jax.ShapeDtypeStruct, a sharding, a number, a string or None there"
        )
    if not _kinds_fit(node, kind, leaf):
        return f"the target has {_describe(node.value)}, the checkpoint {_stored(leaf)}"
    if not leaf.has_array or kind in _NUMPY_KINDS:
        return None
    stored_shape = leaf.shape[:-1] if kind == "prng_key" else leaf.shape
    shape = tuple(node.value.shape)
    if shape != stored_shape:
        turned = " (the target may be transposed)" if shape == stored_shape[::-1] else ""
        return f"the target has shape {shape}, the checkpoint {stored_shape}{turned}"
    if kind == "prng_key":
        return None
    stored, target = np.dtype(leaf.dtype), np.dtype(node.value.dtype)
    if cast:
        # A cast keeps the kind of number; integers may become floating.
        number = next(each for each in _NUMBER_KINDS if jnp.issubdtype(stored, each))
        if any(jnp.issubdtype(target, to) for to in _CASTS[number]):
            return None
        return f"{stored} of the checkpoint cannot be cast to {target} of the target without loss"
    native = target.newbyteorder("=")
    is_narrowed = native == narrowed(stored)
    if native == stored or (narrow and is_narrowed):
        return None
    option = "narrow_integers=True" if is_narrowed else "cast=True"
    return f"the target has dtype {target}, the checkpoint {stored}; to convert, {option}"


def _kinds_fit(node: TreeNode, kind: LeafKind, leaf: Leaf) -> bool:
    """Whether a stored leaf can be given as what the target has, apart from shape and dtype."""
    if kind == "prng_key" or leaf.kind == "prng_key":
        return kind == leaf.kind and node.value.dtype == key_dtype(leaf)
    if kind == leaf.kind:
        return True
    if kind in ("empty", "none"):
        # Stock Orbax says None of a named tuple without fields, such as optax.EmptyState.
        container = empty_kind(node.value) if kind == "empty" else leaf.value
        return leaf.kind in ("empty", "none") and container == "attr"
    if kind in _NUMPY_KINDS:
        return leaf.kind == "numpy_scalar" and np.dtype(leaf.dtype).kind in _NUMPY_KINDS[kind]
    return kind != "str" and leaf.has_array


def _missing(node: TreeNode, left: Iterable[Leaf], keep: bool) -> str:
    """The fault for a node of the target that the checkpoint lacks; `left` are unused leaves."""
    if keep:
        return f"{node.label}: not in the checkpoint, and the target has no value to keep"
    labels = [leaf.label for leaf in left]
    near = difflib.get_close_matches(node.label, labels, n=1, cutoff=0.7)
    hint = f"; the checkpoint has {near[0]}" if near else ""
    return f"{node.label}: in the target, but not in the checkpoint{hint}"


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _stored(leaf: Leaf) -> str:
    words = {
        "none": "None",
        "empty": f"an empty {leaf.value}",
        "prng_key": f"a PRNG key ({leaf.key_impl}) {leaf.shape[:-1]}",
        "int": "an int",
        **dict.fromkeys(_ARRAY_KINDS, f"an array of {leaf.dtype} {leaf.shape}"),
    }
    return words.get(leaf.kind, f"a {leaf.kind}")
