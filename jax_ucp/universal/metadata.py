"""The file `ucp.json`, which describes a universal checkpoint.

`docs/format.md` states the format as numbered invariants; the functions here check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import xxhash

from jax_ucp.arrays.optimizer_groups import Group
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.tree import (
    MAX_AXES,
    MAX_LENGTH,
    MAX_TREE_DEPTH,
    Axes,
    Key,
    Leaf,
    LeafKind,
    SavedSharding,
)

# Stacks came with the second version, links with the third; a file without any has the first.
VERSION, STACKED, LATEST = 1, 2, 3


# Values in `extras` and `source` are walked recursively too. Pickles may be 100 deep, a level of
# which becomes three.
MAX_VALUE_DEPTH = 320

_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]

_Lengths = Annotated[tuple[_Length, ...], msgspec.Meta(max_length=MAX_AXES)]


class ArrayRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An array on disk: the shapes of its outer and inner chunks, and a digest of each outer chunk.

    A digest is the xxh3_64 of the chunk's elements inside the array, row-major and little-endian,
    in hex; chunks are in row-major order. `places` has for each outer chunk of a packed array the
    number of its pack and the offset in it. `crcs` has the crc32c of each inner chunk, four
    little-endian bytes, in row-major order of the array's grid of inner chunks; or nothing.
    """

    outer: _Lengths
    inner: _Lengths
    digests: tuple[str, ...]
    places: tuple[tuple[_Length, _Length], ...] = ()
    crcs: bytes = b""


class SourceFile(msgspec.Struct, frozen=True, gc=False):
    """A file with linked elements: its name below the folder, bytes and version when linked."""

    name: str
    size: _Length
    version: str


class LinkedArray(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An array in other files: the shape of its chunks, which divides the array, a chunk's axes
    from slowest to fastest, and for each chunk, in row-major order, the file and the byte it
    begins at.

    A chunk is one run of little-endian elements. `crcs` has the CRC-32 of each, or nothing.
    """

    chunk: _Lengths
    order: _Lengths
    places: tuple[tuple[_Length, _Length], ...]
    crcs: bytes = b""


@dataclass(frozen=True)
class Metadata:
    """The content of `ucp.json`.

    `files` maps every other file that is not array data to the digest of its bytes; `source`
    describes the checkpoint that this one was imported from. `stacks` has the names of the arrays
    of each stack, in order; `arrays` then has the stack, and not its arrays. `linked` has the
    arrays that lie in the files `sources`; `arrays` does not have them.
    """

    leaves: tuple[Leaf, ...]
    arrays: dict[str, ArrayRecord]
    files: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    linked: dict[str, LinkedArray] = field(default_factory=dict)
    sources: tuple[SourceFile, ...] = ()

    @property
    def version(self) -> Literal[1, 2, 3]:
        """The first version of the format that can say this."""
        return LATEST if self.linked else STACKED if self.stacks else VERSION


class _FileLeaf(msgspec.Struct, omit_defaults=True, gc=False):
    """A leaf in `ucp.json`: dict keys are plain texts in `path`; `sharding` is an index."""

    path: Annotated[tuple[str | Key, ...], msgspec.Meta(max_length=MAX_TREE_DEPTH)]
    name: str
    kind: LeafKind
    shape: _Lengths = ()
    dtype: str = ""
    value: str | None = None
    key_impl: str = ""
    sharding: _Length | None = None
    axes: tuple[Axes, ...] | None = None


class _MetadataFile(msgspec.Struct):
    """The encoded form of `ucp.json`, each sharding once; `digest` is of it with "" there."""

    leaves: list[_FileLeaf]
    shardings: list[SavedSharding]
    arrays: dict[str, ArrayRecord]
    files: dict[str, str]
    source: dict[str, Any]
    extras: dict[str, Any]
    groups: tuple[Group, ...]
    stacks: dict[str, tuple[str, ...]] | msgspec.UnsetType = msgspec.UNSET
    linked: dict[str, LinkedArray] | msgspec.UnsetType = msgspec.UNSET
    sources: tuple[SourceFile, ...] | msgspec.UnsetType = msgspec.UNSET
    format: Literal["jax-ucp"] = "jax-ucp"
    version: Literal[1, 2, 3] = VERSION
    digest: str = ""


class _Seal(msgspec.Struct):
    """The fields of `ucp.json` that are read before its digest is known to be right."""

    version: int = VERSION
    digest: str = ""


def encode(metadata: Metadata) -> bytes:
    """The bytes of `ucp.json`."""
    shardings: dict[SavedSharding | None, int | None] = {None: None}
    leaves: list[_FileLeaf] = []
    for leaf in metadata.leaves:
        path = tuple(
            key.name if key.kind == "dict" and isinstance(key.name, str) else key
            for key in leaf.path
        )
        place = shardings.setdefault(leaf.sharding, len(shardings) - 1)
        about = leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.value, leaf.key_impl
        leaves.append(_FileLeaf(path, *about, place, leaf.axes))
    distinct = [sharding for sharding in shardings if sharding is not None]
    bare = msgspec.json.encode(
        _MetadataFile(
            leaves,
            distinct,
            metadata.arrays,
            metadata.files,
            metadata.source,
            metadata.extras,
            metadata.groups,
            metadata.stacks or msgspec.UNSET,
            metadata.linked or msgspec.UNSET,
            metadata.sources or msgspec.UNSET,
            version=metadata.version,
        )
    )
    return bare.removesuffix(_seal("")) + _seal(digest(bare))


def decode(data: bytes, where: str) -> Metadata:
    """The metadata in a `ucp.json`. Raises CorruptData, or FormatError for no writer's."""
    try:
        seal = msgspec.json.decode(data, type=_Seal)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptData(
            f"{where} is damaged ({error}); restore it from a copy of the checkpoint"
        ) from None
    if seal.version > LATEST:
        raise FormatError(
            f"{where} has format version {seal.version}; this jax_ucp reads up to {LATEST}."
            " Upgrade it."
        )
    # The digest is of the bytes, not of the decoded values: a flipped bit in a key would just make
    # the decoder ignore it.
    recorded = _seal(seal.digest)
    if (
        not data.endswith(recorded)
        or digest(data.removesuffix(recorded) + _seal("")) != seal.digest
    ):
        raise CorruptData(f"{where} is damaged: its content does not have the digest it records")
    try:
        file = msgspec.json.decode(data, type=_MetadataFile)
        keys = _Keys()
        leaves = tuple([_leaf(leaf, keys, file.shardings) for leaf in file.leaves])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{where} says what jax_ucp does not write, though its digest is right: {error}"
        ) from None
    about = file.files, file.source, file.extras, file.groups
    also = file.stacks or {}, file.linked or {}, file.sources or ()
    metadata = Metadata(leaves, file.arrays, *about, *also)
    if metadata.version != file.version:
        raise FormatError(
            f"{where} has version {file.version}, and the content of {metadata.version}"
        )
    return metadata


class _Keys(dict[str | Key, Key]):
    """The keys of paths, by their form in the file: one object for all leaves that have a key."""

    def __missing__(self, name: str | Key) -> Key:
        self[name] = key = Key("dict", name) if isinstance(name, str) else name
        return key


def _leaf(leaf: _FileLeaf, keys: _Keys, shardings: Sequence[SavedSharding]) -> Leaf:
    path = tuple(map(keys.__getitem__, leaf.path))
    if leaf.sharding is not None and leaf.sharding >= len(shardings):
        raise msgspec.ValidationError(
            f"{leaf.name!r:.80} has sharding {leaf.sharding} of {len(shardings)}"
        )
    sharding = None if leaf.sharding is None else shardings[leaf.sharding]
    about = leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.value, leaf.key_impl
    return Leaf(path, *about, sharding, leaf.axes)


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _seal(recorded: str) -> bytes:
    """The last bytes of `ucp.json`, with its digest."""
    return f'"digest":"{recorded}"}}'.encode()
