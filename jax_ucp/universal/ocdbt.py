"""An index of keys over bytes that lie in other files: an OCDBT database, as TensorStore and stock
Orbax read it.

What is written is one version with one B+tree node. Values are ranges of files below the same
directory, or lie in the node itself, whose checksum then is theirs. Facts:
`tensorstore/kvstore/ocdbt/index.rst`; and after the uuid of a manifest there is its kind, a varint,
of which 0 is a single file (`tensorstore/kvstore/ocdbt/format/config_codec.cc`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import google_crc32c
import xxhash

MANIFEST_FILE = "manifest.ocdbt"

# More entries a node may not have (`kMaxNodeArity`, `tensorstore/kvstore/ocdbt/format/btree.h`).
MAX_ENTRIES = 1 << 20

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE


@dataclass(frozen=True, slots=True)
class Range:
    """`nbytes` bytes of a file, from `offset` on."""

    file: str
    offset: int
    nbytes: int


Value = Range | bytes


def node_bytes(entries: Mapping[str, Value]) -> bytes:
    """The B+tree node, a leaf, that has the value of each key or says where it is: of one key,
    to MAX_ENTRIES.
    """
    pairs = sorted((key.encode(), value) for key, value in entries.items())
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    files = sorted({value.file for value in values if isinstance(value, Range)})
    height = b"\x00"
    body = height + _file_table(files) + _key_table(keys) + _value_table(values, files)
    return _sealed(_NODE_MAGIC, body)


def manifest_bytes(node: Range, entries: Mapping[str, Value]) -> bytes:
    """The manifest of a database whose root is the node of these entries."""
    uuid = xxhash.xxh3_128_digest(repr(sorted(entries)).encode())
    # No value inline, nodes of 8 MiB, versions of 16, no compression: what a writer would go by,
    # and none does.
    config = uuid + _varints([0, 0, 8 << 20, 4, 0])
    in_files = sum(at.nbytes for at in entries.values() if isinstance(at, Range))
    statistics = [len(entries), node.nbytes, in_files]
    # One version: generation 1, of height 0, the place of its root in file 0, its statistics;
    # committed at no time.
    version = _varints([1, 1, 0, 0, node.offset, node.nbytes, *statistics]) + bytes(8)
    return _sealed(_MANIFEST_MAGIC, config + _file_table([node.file]) + version + b"\x00")


def _key_table(keys: Sequence[bytes]) -> bytes:
    """The keys, each without what it shares with the one before."""
    shared = [_shared(*pair) for pair in itertools.pairwise(keys)]
    suffixes = [key[n:] for key, n in zip(keys, [0, *shared], strict=True)]
    return b"".join([_varints([len(keys), *shared]), _varints(map(len, suffixes)), *suffixes])


def _value_table(values: Sequence[Value], files: Sequence[str]) -> bytes:
    """What the values are: where in the files they lie, or their bytes."""
    place = {file: i for i, file in enumerate(files)}
    ranges = [value for value in values if isinstance(value, Range)]
    inline = [value for value in values if isinstance(value, bytes)]
    return b"".join(
        [
            _varints(map(_nbytes, values)),
            bytes(isinstance(value, Range) for value in values),  # 0 is inline, 1 is out of line
            _varints(place[at.file] for at in ranges),
            _varints(at.offset for at in ranges),
            *inline,
        ]
    )


def _nbytes(value: Value) -> int:
    return value.nbytes if isinstance(value, Range) else len(value)


def _shared(a: bytes, b: bytes) -> int:
    """How many bytes at their beginnings are the same."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


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
