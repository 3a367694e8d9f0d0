"""Stacks: arrays of one shape, dtype and sharding in one zarr array, whose first axis numbers them.

A file for each host's kilobytes of each of thousands of arrays is a request for each. In a stack
one file has the pieces of hundreds of arrays, and the elements at one place of all of them are
together: a host of another mesh reads a few long ranges.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.layout.blocks import SMALL_BYTES, Chunks, grid_shape, stack_chunks
from jax_ucp.layout.fragments import Shape
from jax_ucp.universal.ocdbt import MAX_ENTRIES
from jax_ucp.universal.shard_codec import chunk_bytes

# With fewer arrays, separate files cost a host some seconds of requests; any zarr reader finds
# them, and `ucp.json` has every crc32c.
STACK_FROM = 10_000

# Pieces of more bytes are worth a request each.
STACK_CELL_BYTES = 1 << 20

# The crc32c of a stack with more inner chunks are not in `ucp.json`, which every host reads.
MAX_RECORDED = 1 << 20

Stacks = Mapping[str, Sequence[str]]


def stacks_of(pieces: Mapping[str, tuple[ArrayInfo, Shape, Hashable]]) -> dict[str, list[str]]:
    """The names of the arrays of each stack, by the name of the stack, in the order given.

    `pieces` has for each array its info, the shape of a writer's piece, and a value that the arrays
    of a stack have in common. There are none for fewer than STACK_FROM arrays, or if only stacks
    would give too many keys for the index by which stock Orbax finds arrays.
    """
    alike: dict[tuple[ArrayInfo, Shape, Hashable], list[str]] = defaultdict(list)
    for name, piece in pieces.items():
        alike[piece].append(name)
    groups: dict[tuple[ArrayInfo, Shape, Hashable], list[str]] = {}
    for piece, names in alike.items():
        info, cell, _ = piece
        is_packed = info.nbytes <= SMALL_BYTES
        has_small_pieces = math.prod(cell) * info.dtype.itemsize <= STACK_CELL_BYTES
        if len(names) > 1 and has_small_pieces and not is_packed:
            groups[piece] = names
    if sum(map(len, groups.values())) < STACK_FROM:
        return {}
    alone = sum(math.prod(grid_shape(info.shape, cell)) for info, cell, _ in pieces.values())
    more = sum(len(names) * _more_keys(info, cell) for (info, cell, _), names in groups.items())
    if alone + len(pieces) <= MAX_ENTRIES < alone + more + len(pieces):
        return {}
    return {stack_name(i): names for i, names in enumerate(groups.values())}


def _more_keys(info: ArrayInfo, cell: Shape) -> int:
    """The number of additional chunks that stock readers see of an array if it is stacked."""
    inner = stack_chunks(2, info.shape, info.dtype.itemsize, cell).inner[1:]
    return math.prod(grid_shape(info.shape, inner)) - math.prod(grid_shape(info.shape, cell))


def stack_name(i: int) -> str:
    return f"ucp.stack_{i}"


def stack_info(info: ArrayInfo, count: int) -> ArrayInfo:
    return ArrayInfo((count, *info.shape), info.dtype)


def member_info(stack: ArrayInfo) -> ArrayInfo:
    return ArrayInfo(stack.shape[1:], stack.dtype, stack.chunk and stack.chunk[1:])


def homes_of(stacks: Stacks) -> dict[str, tuple[str, int]]:
    """The stack of each array that is in one, and its number there, by the array's name."""
    return {name: (stack, i) for stack, names in stacks.items() for i, name in enumerate(names)}


def as_leaves(
    arrays: Mapping[str, ArrayInfo], chunks: Mapping[str, Chunks], stacks: Stacks
) -> tuple[dict[str, ArrayInfo], dict[str, Chunks]]:
    """The info and the chunks of each array of a checkpoint, those of a stack separately."""
    infos = {key: info for key, info in arrays.items() if key not in stacks}
    cut = {key: chunks[key] for key in infos}
    for stack, names in stacks.items():
        infos |= dict.fromkeys(names, member_info(arrays[stack]))
        cut |= dict.fromkeys(names, member_chunks(chunks[stack]))
    return infos, cut


def is_recorded(shape: Shape, chunks: Chunks) -> bool:
    """Whether `ucp.json` has the crc32c of each inner chunk of an array."""
    return not chunks.is_stack or math.prod(grid_shape(shape, chunks.inner)) <= MAX_RECORDED


def member_chunks(chunks: Chunks) -> Chunks:
    """The inner chunks of one array of a stack, without the stack's axis, as Orbax sees them."""
    return Chunks(chunks.inner[1:], chunks.inner[1:])


def member_places(info: ArrayInfo, chunks: Chunks, i: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Each inner chunk's place in the i-th array, its outer chunk's, and its byte in that."""
    first, within = divmod(i, chunks.outer[0])
    count = min(chunks.outer[0], info.shape[0] - first * chunks.outer[0])
    parts = [o // n for o, n in zip(chunks.outer[1:], chunks.inner[1:], strict=True)]
    for place in itertools.product(*map(range, grid_shape(info.shape[1:], chunks.inner[1:]))):
        number = 0
        for p, n in zip(place, parts, strict=True):
            number = number * n + p % n
        outer = (first, *(p // n for p, n in zip(place, parts, strict=True)))
        yield place, outer, (number * count + within) * chunk_bytes(chunks, info.dtype)
