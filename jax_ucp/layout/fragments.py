"""How the shards of a parameter lie in it, whatever pattern declared it."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax_ucp.errors import LayoutError
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.box_index import BoxIndex

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A block of a shard and the same block in the parameter.

    Both boxes hold the same elements in the same row-major order. Their shapes are equal, or the
    shard is flat: then `source` is a range of its one axis.
    """

    shard: int
    source: Box
    target: Box

    @property
    def is_flat(self) -> bool:
        """Whether `source` is a range of a flat shard, and not a block of the shape of `target`."""
        return len(self.source.start) != len(self.target.start)

    def narrow(self, box: Box) -> Fragment | None:
        """The smallest fragment with this one's elements in `box`, or None if there are none.

        Of a flat shard that is one contiguous range: whole rows, of which `box` may want only a
        part.
        """
        hit = self.target.intersect(box)
        if hit is None:
            return None
        if self.is_flat:
            # The smallest block of `within` around `hit` that is one row-major run of its elements.
            start, stop = list(self.target.start), list(self.target.stop)
            for axis in range(hit.ndim):
                start[axis], stop[axis] = hit.start[axis], hit.stop[axis]
                if stop[axis] - start[axis] > 1:
                    break
            hit = Box(tuple(start), tuple(stop))
        return Fragment(self.shard, self._source(hit), hit)

    def pieces(self, box: Box) -> list[Fragment]:
        """Fragments of exactly the elements in `box`; of a flat shard, one for each run."""
        hit = self.target.intersect(box)
        if hit is None:
            return []
        runs = _runs(hit, self.target) if self.is_flat else [hit]
        return [Fragment(self.shard, self._source(run), run) for run in runs]

    def _source(self, hit: Box) -> Box:
        """Where a part of the target lies in the shard; of a flat shard it must be one run."""
        if not self.is_flat:
            by = [s - t for s, t in zip(self.source.start, self.target.start, strict=True)]
            return hit.shift(by) if any(by) else hit
        offset = self.source.start[0] + _row_major(
            hit.relative_to(self.target).start, self.target.shape
        )
        return Box((offset,), (offset + hit.size,))


@dataclass(frozen=True)
class ParamLayout:
    """Where each element of a parameter of `shape` is, among shards of the shapes `shards`.

    Fragments tile the parameter; those with equal `target` boxes are replicas of one another. If
    `averaged`, the replicas differ and the parameter is their mean. Elements of a shard that no
    fragment claims are padding.
    """

    shape: Shape
    shards: tuple[Shape, ...]
    fragments: tuple[Fragment, ...]
    averaged: bool = False

    @cached_property
    def replicas(self) -> dict[Box, list[Fragment]]:
        """Each distinct block of the parameter, with every fragment that holds it."""
        replicas: dict[Box, list[Fragment]] = defaultdict(list)
        for fragment in self.fragments:
            replicas[fragment.target].append(fragment)
        return dict(replicas)

    @cached_property
    def _blocks(self) -> tuple[list[Box], BoxIndex]:
        boxes = list(self.replicas)
        return boxes, BoxIndex(boxes)

    def narrow(self, box: Box) -> list[list[Fragment]]:
        """The fragments with elements of `box`, cut to it: a list of replicas per block."""
        candidates: Iterable[Iterable[Fragment]] = [self.fragments]
        if len(self.fragments) > 1:
            boxes, index = self._blocks
            candidates = (self.replicas[boxes[i]] for i in sorted(index.meeting(box)))
        narrowed = [_narrowed(replicas, box) for replicas in candidates]
        return list(filter(None, narrowed))  # a box without elements has no fragments

    def clip(self, shape: Sequence[int]) -> ParamLayout:
        """The layout of the leading `shape` elements; what lies past them becomes padding."""
        if len(shape) != len(self.shape) or any(
            n > have for n, have in zip(shape, self.shape, strict=True)
        ):
            raise LayoutError(
                f"the shards hold {self.shape}, which has no leading part of shape {tuple(shape)}"
            )
        inside = Box.whole(shape)
        kept = tuple(_narrowed(self.fragments, inside))
        if any(not fragment.target.within(inside) for fragment in kept):
            raise LayoutError(
                f"flat shards of {self.shape} cannot be clipped to {tuple(shape)}: clip the view"
                " over them"
            )
        return replace(self, shape=tuple(shape), fragments=kept)

    def check(self) -> None:
        """Prove that fragments hold every element once, and no shard element is claimed twice.

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
        if strays := list(self._stray_fragments()):
            return strays
        overlaps = list(self._overlaps())
        return [
            *overlaps,
            *self._holes(bool(overlaps)),
            *self._double_claims(),
            *self._missing_replicas(),
        ]

    @property
    def is_one_shard(self) -> bool:
        """Whether the parameter is one shard, whole and as it is stored."""
        if self.shards != (self.shape,) or len(self.fragments) != 1 or self.averaged:
            return False
        whole = Box.whole(self.shape)
        (only,) = self.fragments
        return only.shard == 0 and only.source == only.target == whole

    @property
    def _is_grid(self) -> bool:
        """Whether the fragments are whole shards, each once, and all the blocks of a grid: distinct
        ones, as many as the ranges of the axes have combinations.
        """
        if self.averaged or not all(map(self._is_whole_shard, self.fragments)):
            return False
        blocks = {(f.target.start, f.target.stop) for f in self.fragments}
        once = len({f.shard for f in self.fragments}) == len(blocks) == len(self.fragments)
        axes = [
            {(start[axis], stop[axis]) for start, stop in blocks} for axis in range(len(self.shape))
        ]
        is_full = len(blocks) == math.prod(map(len, axes))
        return once and is_full and all(map(_tile, axes, self.shape))

    def _is_whole_shard(self, fragment: Fragment) -> bool:
        if not 0 <= fragment.shard < len(self.shards):
            return False
        source, target, shard = fragment.source, fragment.target, self.shards[fragment.shard]
        return (
            len(shard) == len(self.shape)
            and source.start == (0,) * len(shard)
            and (source.stop == target.shape == shard)
        )

    @property
    def _is_in_order(self) -> bool:
        """Whether the fragments are runs of flat shards, one after another in row-major order of
        all elements, as those of flat buffers are; a run of a shard is behind its others.
        """
        free = [0] * len(self.shards)
        at = 0
        for f in self.fragments:
            if not 0 <= f.shard < len(free) or not _is_run(f, self.shards[f.shard], self.shape):
                return False
            if f.source.start[0] < free[f.shard] or _row_major(f.target.start, self.shape) != at:
                return False
            (free[f.shard],) = f.source.stop
            at += f.target.size
        return at == math.prod(self.shape) and not self.averaged

    def _stray_fragments(self) -> Iterable[str]:
        whole = Box.whole(self.shape)
        for f in self.fragments:
            if not 0 <= f.shard < len(self.shards):
                yield f"there is no shard {f.shard}"
            elif f.source.ndim != len(self.shards[f.shard]) or not f.source.within(
                Box.whole(self.shards[f.shard])
            ):
                yield f"{f.source} is not inside shard {f.shard} of shape {self.shards[f.shard]}"
            elif f.target.ndim != whole.ndim or not f.target.within(whole):
                yield f"shard {f.shard} claims {f.target}, which is outside the array"
            elif not _same_elements(f.source, f.target):
                yield (
                    f"{f.source} of shard {f.shard} cannot be {f.target} of the array: the shapes"
                    " differ"
                )

    def _overlaps(self) -> Iterable[str]:
        boxes, index = self._blocks
        blocks = list(self.replicas.values())
        for i, j in _meeting_pairs(boxes, index):
            shards = blocks[i][0].shard, blocks[j][0].shard
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
        claims: dict[int, list[Fragment]] = defaultdict(list)
        for fragment in self.fragments:
            claims[fragment.shard].append(fragment)
        for shard, fragments in claims.items():
            if len(fragments) == 1:
                continue
            sources = [fragment.source for fragment in fragments]
            for i, j in _meeting_pairs(sources, BoxIndex(sources)):
                yield (
                    f"double claim: {sources[i]} and {sources[j]} of shard {shard} share elements,"
                    f" for {fragments[i].target} and {fragments[j].target}"
                )

    def _missing_replicas(self) -> Iterable[str]:
        if self.averaged:
            for box, fragments in self.replicas.items():
                absent = sorted(set(range(len(self.shards))) - {f.shard for f in fragments})
                if absent:
                    yield f"the mean of {box} lacks shards {absent}"


def range_fragments(
    shard: int, offset: int, shape: Shape, first: int, stop: int
) -> Iterator[Fragment]:
    """The fragments of a flat shard that has from `offset` on the elements `first` to `stop` of a
    parameter, in row-major order.

    >>> [str(f.target) for f in range_fragments(0, 5, (2, 3), 1, 5)]
    ['[0:1, 1:3]', '[1:2, 0:2]']
    """
    for box in range_boxes(shape, first, stop):
        yield Fragment(shard, Box((offset,), (offset + box.size,)), box)
        offset += box.size


def _narrowed(fragments: Iterable[Fragment], box: Box) -> list[Fragment]:
    """The fragments that have elements of `box`, cut to it."""
    return list(filter(None, [fragment.narrow(box) for fragment in fragments]))


def _meeting_pairs(boxes: Sequence[Box], index: BoxIndex) -> Iterator[tuple[int, int]]:
    """The positions of each two boxes that have an element in common."""
    for i, box in enumerate(boxes):
        yield from ((i, j) for j in index.meeting(box) if i < j)


def _tile(ranges: Collection[tuple[int, int]], length: int) -> bool:
    """Whether ranges, none of them empty, lie one after another from 0 to the length."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at or stop <= start:
            return False
        at = stop
    return at == length


def _is_run(fragment: Fragment, shard: Shape, shape: Shape) -> bool:
    """Whether a fragment is a range of a flat shard, and of as many elements of an array, one after
    another in row-major order.

    A box spans as many elements as it has only where these are one run.
    """
    source = fragment.source
    if not len(source.start) == len(source.stop) == len(shard) == 1:
        return False
    first, end = source.start[0], source.stop[0]
    if not 0 <= first < end <= shard[0]:
        return False
    start, stop = fragment.target.start, fragment.target.stop
    if not len(start) == len(stop) == len(shape):
        return False
    span = elements = 1
    for a, b, n in zip(start, stop, shape, strict=True):
        if not 0 <= a < b <= n:
            return False
        span = (span - 1) * n + b - a
        elements *= b - a
    return span == elements == end - first


def _same_elements(source: Box, target: Box) -> bool:
    """Whether a shard's box can be a parameter's box: equal shape, or a flat range of its size."""
    is_flat_range = source.ndim == 1 and source.size == target.size
    return source.shape == target.shape or is_flat_range


def _runs(hit: Box, within: Box) -> Iterable[Box]:
    """The elements of `hit` as the runs in which `within` has them in row-major order."""
    full = [a == b for a, b in zip(hit.shape, within.shape, strict=True)]
    axis = max((axis for axis, whole in enumerate(full) if not whole), default=0)
    for place in itertools.product(
        *(range(a, b) for a, b in list(zip(hit.start, hit.stop, strict=True))[:axis])
    ):
        yield Box((*place, *hit.start[axis:]), (*(i + 1 for i in place), *hit.stop[axis:]))


def _row_major(position: Sequence[int], shape: Sequence[int]) -> int:
    offset = 0
    for p, n in zip(position, shape, strict=True):
        offset = offset * n + p
    return offset
