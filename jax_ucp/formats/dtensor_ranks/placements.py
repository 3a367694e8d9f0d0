"""The block of a distributed tensor that each rank of a mesh has. Integers only.

A placement for each axis of the mesh says what its ranks have: all of them the same, or each its
part of an axis of the tensor. They apply from the left to the right, each to what those before have
left. A part is as `torch.chunk` cuts: every part as long as the first, until nothing is left.

FSDP2 over tensor parallelism cuts the other way round, and says so by a `split_factor`: into how
many parts those to the right have cut the axis before. Cutting each of so many parts, from the left
to the right, is the same where all is even; else it may not be, and the shapes of the shards tell.

Facts: `Shard`, `_StridedShard` and `_compute_local_shape_and_global_offset` in
`torch/distributed/tensor` of torch 2.13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape

Runs = list[tuple[int, int]]  # indices along an axis: half-open ranges, in the order of the shard


@dataclass(frozen=True, slots=True)
class Split:
    """The ranks along an axis of a mesh have parts of an axis of the tensor."""

    axis: int
    split_factor: int = 1


Placement = Split | None  # None: each has the same


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """The part of a tensor on a rank: its shape, and blocks by place in shard and tensor."""

    shape: Shape
    blocks: tuple[tuple[Box, Box], ...]


def shard_at(
    shape: Shape, mesh: Shape, coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[PlacedShard, PlacedShard]:
    """The shard at a coordinate: cut from the left to the right, and in the order of split factors.

    >>> shard, _ = shard_at((5, 3), (2, 2), (1, 1), (None, Split(0)))
    >>> shard.shape, [str(target) for _, target in shard.blocks]
    ((2, 3), ['[3:5, 0:3]'])
    """
    splits = [
        (placement, ranks, rank)
        for placement, ranks, rank in zip(placements, mesh, coordinate, strict=True)
        if placement is not None
    ]
    runs: list[Runs] = [[(0, n)] for n in shape]
    for split, ranks, rank in splits:
        # of each of `split_factor` parts, its part
        factor, whole = split.split_factor, runs[split.axis]
        parts = [_part(_part(whole, factor, i), ranks, rank) for i in range(factor)]
        runs[split.axis] = _joined(itertools.chain.from_iterable(parts))
    ordered: list[Runs] = [[(0, n)] for n in shape]
    for split, ranks, rank in sorted(splits, key=lambda item: item[0].split_factor):
        ordered[split.axis] = _part(ordered[split.axis], ranks, rank)
    return _shard(runs), _shard(ordered)


def _shard(runs: Sequence[Runs]) -> PlacedShard:
    shape = tuple(_length(of_axis) for of_axis in runs)
    blocks: list[tuple[Box, Box]] = []
    if math.prod(shape):
        # of each axis the runs, with where each starts in the shard
        lengths = [[stop - start for start, stop in of_axis] for of_axis in runs]
        starts = [itertools.accumulate([0, *own]) for own in lengths]
        ranges = [list(zip(*pair, strict=False)) for pair in zip(starts, runs, strict=True)]
        for place in itertools.product(*ranges):
            target = Box(tuple(a for _, (a, _) in place), tuple(b for _, (_, b) in place))
            blocks.append((Box.whole(target.shape).shift([at for at, _ in place]), target))
    return PlacedShard(shape, tuple(blocks))


def _part(runs: Runs, parts: int, part: int) -> Runs:
    """Part number `part` of the runs if they are cut into `parts` as `torch.chunk` cuts.

    >>> [_part([(0, 5)], 4, part) for part in range(4)]
    [[(0, 2)], [(2, 4)], [(4, 5)], []]
    """
    length = _length(runs)
    size = -(-length // parts)
    start, stop = min(size * part, length), min(size * (part + 1), length)
    taken: Runs = []
    at = 0
    for first, last in runs:
        a, b = max(start - at, 0), min(stop - at, last - first)
        if a < b:
            taken.append((first + a, first + b))
        at += last - first
    return taken


def _joined(runs: Iterator[tuple[int, int]]) -> Runs:
    joined: Runs = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)
