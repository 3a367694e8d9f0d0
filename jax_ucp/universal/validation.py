"""Checks of the leaves and arrays that `ucp.json` declares, before anything is made by them.

The digest of `ucp.json` shows that nobody changed it by accident. It is not a signature: a file
with any content can be made to have the right digest.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.json_text import is_shallow
from jax_ucp.layout.blocks import grid_shape
from jax_ucp.layout.fragments import Shape
from jax_ucp.tree import MAX_ARRAY_BYTES, Leaf, SavedSharding, is_leaf_name, tree_fault
from jax_ucp.universal.linked import linked_fault
from jax_ucp.universal.metadata import MAX_VALUE_DEPTH, ArrayRecord, Metadata
from jax_ucp.universal.shard_codec import CRC_BYTES
from jax_ucp.universal.stacks import stack_name

# No mesh has so many devices.
MAX_DEVICES = 1 << 20

# numpy's kinds of the dtypes in which a number of the host program is stored, by the kind of its
# leaf.
_NUMBERS = {"bool": "b", "int": "iu", "float": "f", "complex": "c", "numpy_scalar": "biufcV"}


# Dtypes that every version of TensorStore has, which takes long to import.
_EVERYWHERE = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_EVERYWHERE |= {"bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"}


def check_metadata(metadata: Metadata, where: str) -> None:
    """Raise FormatError with the first fault of `ucp.json`, whose size bounds the metadata."""
    for fault in _faults(metadata):
        raise FormatError(
            f"{where} says what jax_ucp does not write, though its digest is right: {fault}"
        )


def _faults(metadata: Metadata) -> Iterator[str]:
    if fault := tree_fault(leaf.path for leaf in metadata.leaves):
        yield fault
    # values that are carried along: the source, extras and the settings of groups
    settings = [group.settings for group in metadata.groups]
    if not is_shallow([metadata.source, metadata.extras, settings], MAX_VALUE_DEPTH):
        yield (
            f"there are values in source, extras or groups nested more than {MAX_VALUE_DEPTH} deep"
        )
    if stray := [file for file, items in metadata.extras.items() if not isinstance(items, dict)]:
        yield f"the extras of {stray[0]!r:.200} have no names"
    names = [leaf.name for leaf in metadata.leaves if leaf.has_array]
    yield from _name_faults(names)
    if metadata.arrays.keys() & metadata.linked.keys():
        yield "an array is linked, and stored too"
    alone = (metadata.arrays.keys() - metadata.stacks.keys()) | metadata.linked.keys()
    stacked = Counter(itertools.chain.from_iterable(metadata.stacks.values()))
    if stray := alone ^ (set(names) - stacked.keys()):
        yield f"the array {min(stray)!r:.200} has no leaf, or the leaf no array"
    if stacked - Counter(names):
        yield "a stack has what is not an array of a leaf, or an array twice"
    for leaf in metadata.leaves:
        if fault := leaf_fault(leaf):
            yield f"{leaf.name!r:.200} is {fault}"
        if leaf.name in metadata.arrays and (
            fault := array_fault(leaf.shape, metadata.arrays[leaf.name])
        ):
            yield f"{leaf.name!r:.200} {fault}"
    yield from _stack_faults(metadata)
    if fault := linked_fault(metadata):
        yield f"it is a link, and {fault}"


def _name_faults(names: Sequence[str]) -> Iterator[str]:
    """Messages about arrays without a directory of their own inside the checkpoint."""
    nested = [name for name in names if "/" in name]
    above = {name[: slash.start()] for name in nested for slash in re.finditer("/", name)}
    seen: set[str] = set()
    for name in names:
        if not is_leaf_name(name):
            yield f"{name!r:.200} is not a name of a leaf's directory inside the checkpoint"
        if name in seen or name in above:
            yield (
                f"{name!r:.200} is the name of two leaves, or has the directory of another in"
                " its own"
            )
        seen.add(name)


def _stack_faults(metadata: Metadata) -> Iterator[str]:
    kind_of = {leaf.name: (leaf.shape, leaf.dtype) for leaf in metadata.leaves if metadata.stacks}
    for i, (stack, names) in enumerate(metadata.stacks.items()):
        kinds = {kind_of[name] for name in names}
        if len(kinds) != 1 or stack not in metadata.arrays or stack != stack_name(i):
            yield f"the stack {stack!r:.200} is none, or has arrays of {len(kinds)} kinds"
            return
        ((shape, _),) = kinds
        stored = metadata.arrays[stack]
        fault = array_fault((len(names), *shape), stored)
        if fault is None and (stored.inner[0] != 1 or stored.places):
            fault = "is a stack, and has chunks of several arrays, or is packed"
        if fault:
            yield f"{stack!r:.200} {fault}"


def leaf_fault(leaf: Leaf) -> str | None:
    """The fault of a leaf that no writer makes, from its own fields; None if there is none."""
    if leaf.has_array and not is_dtype(leaf.dtype):
        return f"an array of {leaf.dtype!r:.40}, which is not a dtype of zarr v3"
    about = f"with shape {leaf.shape} and dtype {leaf.dtype}"
    match leaf.kind:
        case "str" if leaf.value is None:
            return "a string without its text"
        case "empty" if leaf.value not in ("dict", "list", "tuple", "attr"):
            return f"an empty {leaf.value!r:.40}, which is not a kind of node"
        case "prng_key" if not (leaf.key_impl and leaf.shape and leaf.dtype == "uint32"):
            return f"a PRNG key of {leaf.key_impl!r:.40} {about}"
        case kind if kind in _NUMBERS and (
            leaf.shape or np.dtype(leaf.dtype).kind not in _NUMBERS[kind]
        ):
            return f"a number ({kind}) {about}"
    return sharding_fault(leaf.sharding) if leaf.sharding else None


def sharding_fault(sharding: SavedSharding) -> str | None:
    """The fault of a leaf's mesh that cannot exist; None if it can."""
    sizes = sharding.axis_sizes
    if len(sizes) != len(sharding.axis_names) or min(sizes, default=1) < 1:
        return f"on a mesh of the axes {sharding.axis_names!r:.80} with the sizes {sizes!r:.80}"
    devices = math.prod(sizes)
    if devices > MAX_DEVICES or len(sharding.device_ids) not in (0, devices):
        return f"on a mesh of {devices} devices, of which {len(sharding.device_ids)} are listed"
    return None


def array_fault(shape: Shape, stored: ArrayRecord) -> str | None:
    """The fault of an array's chunks; None if they are those of its shape."""
    fault, outer, inner = _grid(shape, stored.outer, stored.inner)
    if fault:
        return fault
    # One digest or place for each outer chunk, one crc32c for each inner one.
    if len(stored.digests) != outer:
        return f"has {outer} outer chunks, but {len(stored.digests)} digests"
    if stored.places and (len(stored.places) != outer or stored.outer != stored.inner):
        return (
            f"is packed, but has places for {len(stored.places)} of {outer} chunks, or inner ones"
        )
    if stored.crcs and len(stored.crcs) != inner * CRC_BYTES:
        return f"has {inner} inner chunks, but {len(stored.crcs)} bytes of crc32c"
    return None


# Thousands of arrays have few shapes.
@functools.lru_cache(maxsize=1024)
def _grid(shape: Shape, outer: Shape, inner: Shape) -> tuple[str | None, int, int]:
    """The fault of chunks for arrays of a shape, or None; how many outer and inner ones there
    are.
    """
    if not len(outer) == len(inner) == len(shape):
        return f"has shape {shape}, but chunks of {outer} and {inner}", 0, 0
    if 0 in inner or any(o % i for o, i in zip(outer, inner, strict=True)):
        return f"has outer chunks of {outer}, which inner ones of {inner} do not divide", 0, 0
    if 0 in outer or math.prod(outer) > MAX_ARRAY_BYTES:
        return f"has outer chunks of {outer}", 0, 0
    return None, math.prod(grid_shape(shape, outer)), math.prod(grid_shape(shape, inner))


@functools.lru_cache(maxsize=256)
def is_dtype(name: str) -> bool:
    """Whether it is the name of a data type that numpy and TensorStore's zarr v3 driver have."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{1,30}", name):
        return False
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return False
    return dtype.name == name and storable(dtype)


@functools.cache
def storable(dtype: np.dtype) -> bool:
    """Whether TensorStore's zarr v3 driver has the data type."""
    if dtype.name in _EVERYWHERE:
        return True
    import tensorstore as ts

    try:
        ts.Spec(
            {
                "driver": "zarr3",
                "kvstore": "memory://",
                "metadata": {"shape": [1], "data_type": dtype.name},
            }
        )
    except ValueError:
        return False
    return True
