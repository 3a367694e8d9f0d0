"""The layout of a parameter: the places of its elements in shards, proved to be complete."""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax_ucp.errors import LayoutError
from jax_ucp.layout.box import Box, row_major_strides
from jax_ucp.layout.box_index import LEAF_BOXES, BoxIndex
from jax_ucp.layout.parts import Part, Shape, box_part, row_major


@dataclass(frozen=True)
class ParamLayout:
    """The place of each element of an array of `shape` in shards of the shapes `shards`.

    Parts tile the array; parts with equal boxes of it are replicas of one another. If `averaged`,
    the array is the mean of the replicas. If `padded`, elements that no part has are zero. Elements
    of a shard that no part has are padding.
    """

    shape: Shape
    shards: tuple[Shape, ...]
    parts: tuple[Part, ...]
    averaged: bool = False
    padded: bool = False

    @cached_property
    def replicas(self) -> dict[Box, list[Part]]:
        """The distinct blocks of the array, each with all parts that have it."""
        replicas: dict[Box, list[Part]] = defaultdict(list)
        for part in self.parts:
            replicas[part.target_box].append(part)
        return dict(replicas)

    @cached_property
    def _blocks(self) -> tuple[list[Box], BoxIndex]:
        boxes = list(self.replicas)
        return boxes, BoxIndex(boxes)

    def meeting(self, box: Box) -> list[list[Part]]:
        """The parts that may have elements of `box`, as a list of replicas for each block."""
        if len(self.parts) <= 1:
            return [[*self.parts]] if self.parts else []
        if len(self.parts) <= LEAF_BOXES:  # an index of so few would look at each as well
            return [parts for block, parts in self.replicas.items() if block.meets(box)]
        boxes, index = self._blocks
        return [self.replicas[boxes[i]] for i in sorted(index.meeting(box))]

    def clip(self, shape: Sequence[int]) -> ParamLayout:
        """The layout of the array's leading part of `shape`; other elements become padding."""
        if len(shape) != len(self.shape) or any(
            n > have for n, have in zip(shape, self.shape, strict=True)
        ):
            raise LayoutError(
                f"the shards hold {self.shape}, which has no leading part of shape {tuple(shape)}"
            )
        kept = tuple([cut for part in self.parts for cut in part.narrow(Box.whole(shape))])
        return replace(self, shape=tuple(shape), parts=kept)

    def check(self) -> None:
        """Prove that parts have every element once, and no shard element is claimed twice.

        Raises LayoutError with every hole, overlap and double claim.
        """
        if faults := self._faults:
            raise LayoutError(
                f"{len(self.shards)} shards do not form one array of shape {self.shape}:", faults
            )

    @cached_property
    def _faults(self) -> Sequence[str]:
        """The faults that `check` reports. Cached, because many arrays may share one layout."""
        if self.is_one_shard or self._is_grid or self._is_in_order:
            return ()
        if strays := list(self._strays()):
            return strays
        faults = list(self._overlaps())
        faults += [*self._holes(bool(faults)), *self._double_claims()]
        for box, parts in self.replicas.items() if self.averaged else ():
            if absent := sorted(set(range(len(self.shards))) - {part.input for part in parts}):
                faults.append(f"the mean of {box} lacks shards {absent}")
        return faults

    @property
    def is_one_shard(self) -> bool:
        """Whether the array is one shard, whole and as it is stored."""
        if self.shards != (self.shape,) or len(self.parts) != 1 or self.averaged:
            return False
        (only,) = self.parts
        return self._is_whole_shard(only) and only.target == only.source

    @property
    def _is_grid(self) -> bool:
        """Whether the parts are whole shards, each once, and are all blocks of a grid: they are
        distinct, and as many as combinations of the ranges on the axes.
        """
        if self.averaged or not all(map(self._is_whole_shard, self.parts)):
            return False
        blocks = {(part.target.offset, part.sizes) for part in self.parts}
        once = len({part.input for part in self.parts}) == len(blocks) == len(self.parts)
        axes = [
            {(start[axis], start[axis] + sizes[axis]) for start, sizes in blocks}
            for axis in range(len(self.shape))
        ]
        is_full = len(blocks) == math.prod(map(len, axes))
        return once and is_full and all(map(_tile, axes, self.shape))

    def _is_whole_shard(self, part: Part) -> bool:
        if not 0 <= part.input < len(self.shards) or part.sizes != self.shards[part.input]:
            return False
        source, target = part.source, part.target
        ndim = len(source.offset) == len(target.offset) == len(self.shape)
        return ndim and not any(source.offset) and source.is_box and target.is_box

    @property
    def _is_in_order(self) -> bool:
        """Whether the parts are runs of flat shards that follow one another in the array's
        row-major order, as in flat buffers, and runs of one shard follow one another in it.
        """
        free = [0] * len(self.shards)
        strides = row_major_strides(self.shape)
        at = 0
        for part in self.parts:
            shard = part.input
            if not 0 <= shard < len(free) or not _is_run(part, self.shards[shard], self.shape):
                return False
            (first,) = part.source.offset
            if first < free[shard] or sum(map(operator.mul, part.target.offset, strides)) != at:
                return False
            free[shard] = first + part.size
            at += part.size
        return at == math.prod(self.shape) and not self.averaged

    def _strays(self) -> Iterable[str]:
        """Faults: parts of no shard, outside of their shard or array, or with gaps."""
        whole = Box.whole(self.shape)
        for part in self.parts:
            shard, source, target = part.input, part.source_box, part.target_box
            if not 0 <= shard < len(self.shards):
                yield f"there is no shard {shard}"
            elif source.ndim != len(self.shards[shard]) or not source.within(
                Box.whole(self.shards[shard])
            ):
                yield f"{source} is not inside shard {shard} of shape {self.shards[shard]}"
            elif target.ndim != whole.ndim or not target.within(whole):
                yield f"shard {shard} claims {target}, which is outside the array"
            elif not part.source.fills(part.sizes) or not part.target.fills(part.sizes):
                yield f"shard {shard} has not all of {source}, or claims not all of {target}"

    def _overlaps(self) -> Iterable[str]:
        boxes, index = self._blocks
        blocks = list(self.replicas.values())
        for i, j in _meeting_pairs(boxes, index):
            shards = blocks[i][0].input, blocks[j][0].input
            yield f"overlap: {boxes[i]} of shard {shards[0]} and {boxes[j]} of shard {shards[1]}"

    def _holes(self, overlapping: bool) -> Iterable[str]:
        boxes, _ = self._blocks
        if sum(box.size for box in boxes) == math.prod(self.shape) and not overlapping:
            return
        holes = [Box.whole(self.shape)]
        for box in boxes:
            holes = list(itertools.chain.from_iterable(hole.minus(box) for hole in holes))
        yield from (f"hole: {hole} is in no shard" for hole in holes if hole.size)

    def _double_claims(self) -> Iterable[str]:
        claims: dict[int, list[Part]] = defaultdict(list)
        for part in self.parts:
            claims[part.input].append(part)
        for shard, parts in claims.items():
            if len(parts) == 1:
                continue
            sources = [part.source_box for part in parts]
            for i, j in _meeting_pairs(sources, BoxIndex(sources)):
                yield (
                    f"double claim: {sources[i]} and {sources[j]} of shard {shard} share elements,"
                    f" for {parts[i].target_box} and {parts[j].target_box}"
                )


def block_layout(shape: Sequence[int], boxes: Sequence[Box]) -> ParamLayout:
    """The layout of an array whose shards are these blocks of it; a block without elements is a
    shard, and has no part.

    >>> layout = block_layout((4, 2), [Box((0, 0), (3, 2)), Box((3, 0), (4, 2))])
    >>> layout.shards, [str(part.target_box) for part in layout.parts]
    (((3, 2), (1, 2)), ['[0:3, 0:2]', '[3:4, 0:2]'])
    """
    shards = tuple([box.shape for box in boxes])
    parts = [box_part(i, Box.whole(box.shape), box) for i, box in enumerate(boxes) if box.size]
    return ParamLayout(tuple(shape), shards, tuple(parts))


def _meeting_pairs(boxes: Sequence[Box], index: BoxIndex) -> Iterator[tuple[int, int]]:
    """The positions of each pair of boxes that overlap."""
    for i, box in enumerate(boxes):
        yield from ((i, j) for j in index.meeting(box) if i < j)


def _tile(ranges: Collection[tuple[int, int]], length: int) -> bool:
    """Whether ranges are not empty and follow one another from 0 to the length."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at or stop <= start:
            return False
        at = stop
    return at == length


def _is_run(part: Part, shard: Shape, shape: Shape) -> bool:
    """Whether a part is a range of a flat shard, and a range of the array in row-major order.

    The elements of a box are such a range only if it spans as many elements as it has.
    """
    sizes, source, target = part.sizes, part.source, part.target
    if not len(source.offset) == len(shard) == 1 or len(target.offset) != len(shape):
        return False
    if not target.is_box or source.steps != row_major(sizes):
        return False
    span = elements = 1
    for a, n, length in zip(target.offset, sizes, shape, strict=True):
        if not 0 <= a < a + n <= length:
            return False
        span = (span - 1) * length + n
        elements *= n
    return span == elements and 0 <= source.offset[0] <= shard[0] - elements
