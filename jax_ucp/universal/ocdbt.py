"""An index of keys over bytes in other files: an OCDBT database, as TensorStore and stock Orbax
read it.

The database has one version: a B+tree of one node, or of one node over others if there are more
keys. A value is a range of a file below the same directory, or is inside a node, whose checksum
covers it. Facts: `tensorstore/kvstore/ocdbt/index.rst`; and after the uuid of a manifest there is
its kind, a varint, of which 0 is a single file
(`tensorstore/kvstore/ocdbt/format/config_codec.cc`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import xxhash

MANIFEST_FILE = "manifest.ocdbt"

# A node of so many keys has about the 8 MiB of TensorStore's own; it could have 1 << 20
# (`kMaxNodeArity`, `tensorstore/kvstore/ocdbt/format/btree.h`).
NODE_ENTRIES = 1 << 15

# No planned checkpoint has more keys; a tree of two levels could hold far more.
MAX_ENTRIES = 1 << 24

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE


class ValueRange(NamedTuple):
    """`nbytes` bytes of a file, from `offset` on."""

    file: str
    offset: int
    nbytes: int


Value = ValueRange | bytes


@dataclass(frozen=True)
class _Node:
    """A written node; and the counts of keys, node bytes and value bytes at and below it."""

    first: bytes
    height: int
    data: bytes
    keys: int
    tree_bytes: int
    value_bytes: int


def index_parts(file: str, entries: Iterable[tuple[bytes, Value]]) -> tuple[list[bytes], bytes]:
    """The bytes of the index, in parts, and the manifest of a database whose index is `file`.

    `entries`, 1 to MAX_ENTRIES, are sorted keys, each with its value or the range that holds it.
    """
    nodes = [_leaf(some) for some in _runs(entries, NODE_ENTRIES)]
    if len(nodes) > 1:
        # The node above the leaves, which follow one another in the file. No prefix is removed from
        # all keys of a node below it.
        sizes = [len(child.data) for child in nodes]
        keys, tree_bytes, value_bytes = zip(
            *((child.keys, child.tree_bytes, child.value_bytes) for child in nodes), strict=True
        )
        no_prefixes = in_one_file = bytes(len(nodes))
        body = b"".join(
            [
                b"\x01",
                _file_table([file]),
                _key_table([child.first for child in nodes], no_prefixes),
                in_one_file,
                _varints(itertools.accumulate(sizes[:-1], initial=0)),
                *map(_varints, (sizes, keys, tree_bytes, value_bytes)),
            ]
        )
        data = _sealed(_NODE_MAGIC, body)
        in_nodes = sum(tree_bytes) + len(data)
        nodes.append(_Node(nodes[0].first, 1, data, sum(keys), in_nodes, sum(value_bytes)))
    parts = [node.data for node in nodes]
    root = nodes[-1]
    at = ValueRange(file, sum(map(len, parts[:-1])), len(root.data))
    hasher = xxhash.xxh3_128()
    for data in parts:
        hasher.update(data)
    # No value inline, nodes of 8 MiB, versions of 16, no compression: options that only a later
    # writer would use.
    config = hasher.digest() + _varints([0, 0, 8 << 20, 4, 0])
    statistics = [root.keys, root.tree_bytes, root.value_bytes]
    # One version: generation 1, its height, the place of its root in file 0, its statistics;
    # committed at no time.
    place = [1, 1, root.height, 0, at.offset, at.nbytes]
    version = _varints([*place, *statistics]) + bytes(8)
    return parts, _sealed(_MANIFEST_MAGIC, config + _file_table([at.file]) + version + b"\x00")


def _runs(entries: Iterable[tuple[bytes, Value]], most: int) -> Iterator[list[tuple[bytes, Value]]]:
    every = iter(entries)
    while some := list(itertools.islice(every, most)):
        yield some


def _leaf(entries: Sequence[tuple[bytes, Value]]) -> _Node:
    """A node that has the value of each key, or the range that holds it."""
    keys, values = [key for key, _ in entries], [value for _, value in entries]
    files = sorted({value.file for value in values if isinstance(value, ValueRange)})
    place = {file: i for i, file in enumerate(files)}
    ranges = [value for value in values if isinstance(value, ValueRange)]
    inline = [value for value in values if isinstance(value, bytes)]
    body = b"".join(
        [
            b"\x00",
            _file_table(files),
            _key_table(keys),
            _varints(map(_nbytes, values)),
            # 0 is inline, 1 is out of line
            bytes(isinstance(value, ValueRange) for value in values),
            _varints(place[at.file] for at in ranges),
            _varints(at.offset for at in ranges),
            *inline,
        ]
    )
    data = _sealed(_NODE_MAGIC, body)
    in_files = sum(value.nbytes for value in values if isinstance(value, ValueRange))
    return _Node(keys[0], 0, data, len(keys), len(data), in_files)


def _key_table(keys: Sequence[bytes], between: bytes = b"") -> bytes:
    """The encoded keys, each without the prefix that it shares with the one before; `between`
    follows the lengths.
    """
    shared = [_shared(*pair) for pair in itertools.pairwise(keys)]
    suffixes = [key[n:] for key, n in zip(keys, [0, *shared], strict=True)]
    lengths = _varints(map(len, suffixes))
    return b"".join([_varints([len(keys), *shared]), lengths, between, *suffixes])


def _nbytes(value: Value) -> int:
    return value.nbytes if isinstance(value, ValueRange) else len(value)


def _shared(a: bytes, b: bytes) -> int:
    """The number of bytes at their beginnings that are the same.

    >>> _shared(b"layers.0/c", b"layers.10/c"), _shared(b"a", b"b"), _shared(b"a", b"ab")
    (7, 0, 1)
    """
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return n - (differing.bit_length() + 7) // 8


def _file_table(files: Sequence[str]) -> bytes:
    paths = [file.encode() for file in files]
    no_prefixes, no_bases = bytes(max(0, len(paths) - 1)), bytes(len(paths))
    return b"".join(
        [_varints([len(paths)]), no_prefixes, _varints(map(len, paths)), no_bases, *paths]
    )


def _sealed(magic: int, body: bytes) -> bytes:
    """Header (magic, length, version 0, no compression), body, crc32c of both."""
    length = 4 + 8 + 2 + len(body) + 4
    data = magic.to_bytes(4, "big") + length.to_bytes(8, "little") + b"\x00\x00" + body
    return data + google_crc32c.value(data).to_bytes(4, "little")


def _varints(values: Iterable[int]) -> bytes:
    """Each value in groups of 7 bits, the lowest first, all but the last with the high bit set."""
    out = bytearray()
    for value in values:
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)
