"""Packs: thousands of small arrays in a few files, their chunks one after the other; and an index.

A file and a directory for each small array would cost more than its bytes. We find a packed chunk
by `ucp.json`; stock Orbax and TensorStore find every array by the index, an OCDBT database. Every
`zarr.json` is in a node of it, whose checksum covers it: a flipped bit in a shape, which no chunk
contradicts, is an error for them too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.layout.blocks import SMALL_BYTES, Chunks, grid_shape
from jax_ucp.universal.ocdbt import MAX_ENTRIES
from jax_ucp.universal.shard_codec import has_index

INDEX_FILE = "ucp.index"

# With fewer small arrays than that, files of their own cost little, and any zarr reader finds them.
PACK_FROM = 1000

# Bytes of one pack of a save: while it is sent, the next one is made.
SAVED_PACK_BYTES = 4 << 20

# Size of one pack of a conversion: a worker's task, and the work that is repeated after a kill.
PACK_BYTES = 16 << 20
PACK_BLOCKS = 8192


def is_indexed(arrays: Mapping[str, ArrayInfo], chunks: Mapping[str, Chunks]) -> bool:
    """Whether the checkpoint has an index: not with no entries, nor with more than MAX_ENTRIES."""
    entries = len(arrays) + sum(
        math.prod(grid_shape(info.shape, chunks[key].outer)) for key, info in arrays.items()
    )
    return 0 < entries <= MAX_ENTRIES


def packed_arrays(arrays: Mapping[str, ArrayInfo], chunks: Mapping[str, Chunks]) -> frozenset[str]:
    """The arrays to pack: a thousand or more of at most 64 KiB, if there is an index."""
    small = [
        key
        for key, info in arrays.items()
        if info.nbytes <= SMALL_BYTES and not has_index(chunks[key])
    ]
    return (
        frozenset(small) if len(small) >= PACK_FROM and is_indexed(arrays, chunks) else frozenset()
    )


def pack_name(number: int) -> str:
    return f"ucp.pack_{number}"
