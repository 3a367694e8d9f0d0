"""Patterns, which say how shards form a parameter, for specs in Python.

    >>> from jax_ucp import Spec, patterns
    >>> spec = Spec.of({"*.weight": patterns.Sharded(0), "*.bias": patterns.Replicated()})
    >>> str(spec)
    'of 2 rules'

`jax_ucp.open(path, spec=spec)` reads a checkpoint by them. The `join` of a pattern gives the layout
of a parameter for the shapes of its shards.

The UCP paper (arXiv 2406.18820, section 5.3.1) calls these Unique, Replicate, Partial (`Averaged`),
Shard-V and Shard-H (`Sharded` on one axis), Shard-Hy (`Sharded` on several) and Shard-NC (`Fused`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from jax_ucp.errors import LayoutError
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, block_layout
from jax_ucp.layout.parts import Part, Place, Shape, box_part, range_parts

__all__ = ["Averaged", "Fused", "Padded", "Pattern", "Replicated", "Sharded", "Unique"]


@dataclass(frozen=True, slots=True)
class Unique:
    """A parameter that one shard holds whole."""

    def join(self, shards: Sequence[Shape]) -> ParamLayout:
        if len(shards) != 1:
            raise LayoutError(
                f"Unique needs 1 shard, found {len(shards)}; declare Replicated if all are copies"
            )
        return _copies(shards)


@dataclass(frozen=True, slots=True)
class Replicated:
    """A parameter that every shard holds whole, and equal in all bits."""

    def join(self, shards: Sequence[Shape]) -> ParamLayout:
        return _copies(shards)


@dataclass(frozen=True, slots=True)
class Averaged:
    """A parameter that is the mean of all shards, each of which has its shape."""

    def join(self, shards: Sequence[Shape]) -> ParamLayout:
        return replace(_copies(shards), averaged=True)


@dataclass(frozen=True, slots=True)
class Sharded:
    """A parameter whose shards lie side by side along `axes`; their sizes may differ.

    On several axes the ranks form `grid`, in row-major order.

    Example:
        >>> Sharded(0).join([(51, 16), (50, 16)]).shape
        (101, 16)
        >>> Sharded(0, 1, grid=(2, 2)).join([(2, 3), (2, 3), (2, 3), (2, 3)]).shape
        (4, 6)
    """

    axes: tuple[int, ...]
    grid: tuple[int, ...] | None

    def __init__(self, *axes: int, grid: tuple[int, ...] | None = None):
        if len(set(axes)) != len(axes) or not axes:
            raise LayoutError(f"Sharded needs one or several different axes, not {axes}")
        if (grid is None and len(axes) > 1) or (grid is not None and len(grid) != len(axes)):
            raise LayoutError(
                f"Sharded on axes {axes} needs a grid of {len(axes)} sizes, not {grid}"
            )
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "grid", grid)

    def join(self, shards: Sequence[Shape]) -> ParamLayout:
        grid = self.grid or (len(shards),)
        if math.prod(grid) != len(shards) or not shards:
            needed = math.prod(grid) or "some"
            raise LayoutError(f"{self} needs {needed} shards, found {len(shards)}")
        if max(self.axes) >= len(shards[0]):
            raise LayoutError(
                f"{self} does not fit shards of shape {shards[0]}: there is no axis"
                f" {max(self.axes)}"
            )
        places = list(itertools.product(*map(range, grid)))
        sizes = [[0] * n for n in grid]
        for place, shard in zip(places, shards, strict=True):
            for k, axis in enumerate(self.axes):
                sizes[k][place[k]] = shard[axis]
        # for each of `axes` where the ranks' parts of it begin, and where the last one ends
        edges = [[0, *accumulate(row)] for row in sizes]
        shape = list(shards[0])
        for axis, ends in zip(self.axes, edges, strict=True):
            shape[axis] = ends[-1]
        blocks: list[Box] = []
        for rank, (place, shard) in enumerate(zip(places, shards, strict=True)):
            target = Box.whole(shape)
            for axis, ends, i in zip(self.axes, edges, place, strict=True):
                target = _on_axis(target, axis, ends[i], ends[i + 1])
            if target.shape != shard:
                raise LayoutError(
                    f"{self}: shard {rank} has shape {shard} where its neighbours leave"
                    f" {target.shape}"
                )
            blocks.append(target)
        return block_layout(shape, blocks)


@dataclass(frozen=True)
class Fused:
    """A parameter of several arrays, `parts`, side by side along `axis`, each cut by itself.

    `parts` maps a name to the part's rows in the whole parameter, or to its rows on each rank if
    these differ. Each shard holds its share of every part, in order:

        # parameter: q q q q k k v v     two ranks: q q k v | q q k v

    A part named in `whole` is not cut: every rank holds all of it (k and v, if there are fewer KV
    heads than ranks). With `groups`, shards are contiguous ranges of Megatron's order, q..q k v for
    each query group, and may end inside a group; the parameter still has all q, then all k, then
    all v:

        # groups=2: q q k v q q k v      three ranks: q q k | v q | q k v

    Example:
        >>> Fused(0, {"q": 4, "k": 2, "v": 2}).join([(4, 8), (4, 8)]).shape
        (8, 8)
    """

    axis: int
    parts: Mapping[str, int | tuple[int, ...]]
    whole: frozenset[str] = field(default=frozenset())
    groups: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "whole", frozenset(self.whole))
        if stray := self.whole - set(self.parts):
            raise LayoutError(
                f"Fused: whole names {sorted(stray)}, but the parts are {list(self.parts)}"
            )
        if self.groups is not None and (
            self.whole or any(not isinstance(n, int) for n in self.parts.values())
        ):
            raise LayoutError(
                "Fused: parts that are whole, or have a size per rank, cannot be interleaved by"
                " groups"
            )

    def __repr__(self) -> str:  # the same in every process, in which sets have orders of their own
        whole, groups = sorted(self.whole), self.groups
        return f"Fused(axis={self.axis}, parts={dict(self.parts)}, whole={whole}, groups={groups})"

    def join(self, shards: Sequence[Shape]) -> ParamLayout:
        runs_of = [list(self._runs(rank, shards)) for rank in range(len(shards))]
        shape = _resized(shards[0], self.axis, sum(self._rows.values()))
        whole = Box.whole(shape)
        parts: list[Part] = []
        for rank, (shard, runs) in enumerate(zip(shards, runs_of, strict=True)):
            lengths = [stop - start for start, stop in runs]
            if _resized(shard, self.axis, 0) != _resized(shards[0], self.axis, 0):
                raise LayoutError(
                    f"{self}: shard {rank} has shape {shard}, shard 0 has {shards[0]}"
                )
            if sum(lengths) != shard[self.axis]:
                raise LayoutError(
                    f"{self} over {len(shards)} shards needs {sum(lengths)} rows on axis"
                    f" {self.axis} of shard {rank}, which has shape {shard}. If a part is not cut"
                    " on this axis, name it in `whole`."
                )
            offsets = accumulate(lengths, initial=0)
            for offset, (start, stop) in zip(offsets, runs, strict=False):
                source = _on_axis(Box.whole(shard), self.axis, offset, offset + stop - start)
                if source.size:
                    target = _on_axis(whole, self.axis, start, stop)
                    parts.append(box_part(rank, source, target))
        return ParamLayout(shape, tuple(shards), tuple(parts))

    @property
    def _rows(self) -> dict[str, int]:
        return {name: n if isinstance(n, int) else sum(n) for name, n in self.parts.items()}

    def _runs(self, rank: int, shards: Sequence[Shape]) -> Iterator[tuple[int, int]]:
        """The ranges of the parameter's rows that lie one after another in the shard of `rank`."""
        if self.groups is not None:
            ends = [0, *accumulate(shard[self.axis] for shard in shards)]
            yield from self._interleaved(ends[rank], ends[rank + 1])
            return
        first, ranks = 0, len(shards)
        for name, rows in self._rows.items():
            size = self.parts[name]
            if name in self.whole:
                yield first, first + rows
            elif isinstance(size, int):
                if size % ranks:
                    raise LayoutError(
                        f"{self}: {size} rows of {name} cannot be cut evenly over {ranks} ranks; "
                        "give its rows on each rank, or name it in `whole`"
                    )
                yield first + rank * size // ranks, first + (rank + 1) * size // ranks
            elif len(size) != ranks:
                raise LayoutError(
                    f"{self}: {name} has rows for {len(size)} ranks, but there are {ranks} shards"
                )
            else:
                yield first + sum(size[:rank]), first + sum(size[: rank + 1])
            first += rows

    def _interleaved(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The ranges of the parameter's rows that are the rows [start, stop) of Megatron's order,
        which has a share of each part for each group. Raises LayoutError if parts do not divide
        into groups, or have too few rows.
        """
        groups, rows = self.groups or 1, self._rows
        if ragged := [name for name, n in rows.items() if n % groups]:
            raise LayoutError(f"{self}: the rows of {ragged} do not divide into {groups} groups")
        firsts = dict(zip(rows, accumulate(rows.values(), initial=0), strict=False))
        at = 0
        for group in range(groups):
            for name, n in rows.items():
                size = n // groups
                a, b = max(start, at), min(stop, at + size)
                if a < b:
                    first = firsts[name] + group * size - at
                    yield first + a, first + b
                at += size
        if stop > at:
            raise LayoutError(f"{self}: the shards have {stop} rows or more, the parts {at}")


@dataclass(frozen=True, slots=True)
class Padded:
    """A parameter whose shards form, by `pattern`, an array that is longer on `axis`.

    The parameter has the leading `size` rows; the rest, up to `padded`, is padding (the rows by
    which Megatron makes a vocabulary divisible). `padded` may be left out.

    Example:
        >>> Padded(Sharded(0), axis=0, size=101, padded=112).join([(56, 16), (56, 16)]).shape
        (101, 16)
    """

    pattern: Pattern
    axis: int
    size: int
    padded: int | None = None

    def join(self, shards: Sequence[Shape]) -> ParamLayout:
        layout = self.pattern.join(shards)
        if self.padded not in (None, layout.shape[self.axis]):
            raise LayoutError(
                f"{self}: the shards have {layout.shape[self.axis]} rows on axis {self.axis}"
            )
        return layout.clip(_resized(layout.shape, self.axis, self.size))


Pattern = Unique | Replicated | Averaged | Sharded | Fused | Padded


def flat_layouts(
    shapes: Mapping[str, Shape], partitions: Sequence[int], gaps: Mapping[str, int] | None = None
) -> dict[str, ParamLayout]:
    """The layouts of parameters that follow one another in a flat buffer cut into `partitions`.

    `partitions` are lengths in elements, one per rank; `gaps[name]` elements of padding follow that
    parameter, and the end of the buffer may be padding too. A ZeRO-1/2 group is such a buffer.

    >>> layouts = flat_layouts({"w": (5, 7), "b": (7,)}, [24, 24])
    >>> for f in layouts["w"].parts:
    ...     print(f.input, f.source_box, f.target_box)
    0 [0:21] [0:3, 0:7]
    0 [21:24] [3:4, 0:3]
    1 [0:4] [3:4, 3:7]
    1 [4:11] [4:5, 0:7]
    """
    edges = [0, *accumulate(partitions)]
    shards = tuple((n,) for n in partitions)
    layouts: dict[str, ParamLayout] = {}
    at = 0
    for name, shape in shapes.items():
        first, end = at, at + math.prod(shape)
        if end > edges[-1]:
            raise LayoutError(
                f"{name}: ends at element {end} of the flat buffer, but the {len(partitions)}"
                f" partitions hold {edges[-1]}; a partition is missing, or belongs to another run"
            )
        parts: list[Part] = []
        rank = max(0, bisect_right(edges, at) - 1)
        while at < end:
            stop = min(end, edges[rank + 1])
            if stop > at:
                parts += range_parts(rank, at - edges[rank], shape, at - first, stop - first)
                at = stop
            rank += 1
        layouts[name] = ParamLayout(tuple(shape), shards, tuple(parts))
        at = end + (gaps or {}).get(name, 0)
    return layouts


def flat_layout(shape: Shape, start: int, parts: Sequence[range]) -> ParamLayout:
    """The layout of an array whose elements are those of a flat array from `start` on, which shards
    hold in these ranges.

    >>> layout = flat_layout((2, 2), 3, [range(0, 4), range(4, 8)])
    >>> [(f.input, str(f.source_box), str(f.target_box)) for f in layout.parts]
    [(0, '[3:4]', '[0:1, 0:1]'), (1, '[0:1]', '[0:1, 1:2]'), (1, '[1:3]', '[1:2, 0:2]')]
    """
    inside: list[Part] = []
    stop = start + math.prod(shape)
    for i, part in enumerate(parts):
        first, last = max(start, part.start), min(stop, part.stop)
        if first < last:
            inside += range_parts(i, first - part.start, shape, first - start, last - start)
    return ParamLayout(shape, tuple((len(part),) for part in parts), tuple(inside))


def partitioned_layouts(shapes: Mapping[str, Shape], ranks: int) -> dict[str, ParamLayout]:
    """The layouts of parameters that are each cut into `ranks` equal flat pieces, with padding.

    Every rank's shard has its piece of each parameter, one after another. A ZeRO-3 sub-group is
    such a set of shards.

    >>> layouts = partitioned_layouts({"w": (5, 7), "b": (1,)}, 3)
    >>> layouts["w"].shards, [(f.input, str(f.source_box),
    ...     str(f.target_box)) for f in layouts["b"].parts]
    (((13,), (13,), (13,)), [(0, '[12:13]', '[0:1]')])
    """
    pieces = {name: -(-math.prod(shape) // ranks) for name, shape in shapes.items()}
    shards = ((sum(pieces.values()),),) * ranks
    layouts: dict[str, ParamLayout] = {}
    of_shape: dict[Shape, list[Part]] = {}  # of many layers few, whose targets they share
    at = 0
    for name, shape in shapes.items():
        size, piece = math.prod(shape), pieces[name]
        if shape not in of_shape:
            ends = [min(size, rank * piece) for rank in range(ranks + 1)]
            each = enumerate(itertools.pairwise(ends))
            parts = (range_parts(rank, 0, shape, first, stop) for rank, (first, stop) in each)
            of_shape[shape] = list(itertools.chain.from_iterable(parts))
        moved = [
            Part(rank, sizes, Place((source.offset[0] + at,), source.steps), target)
            for rank, sizes, source, target in of_shape[shape]
        ]
        layouts[name] = ParamLayout(tuple(shape), shards, tuple(moved))
        at += piece
    return layouts


def _copies(shards: Sequence[Shape]) -> ParamLayout:
    """The layout of a parameter of which every shard is a copy."""
    for rank, shard in enumerate(shards):
        if shard != shards[0]:
            raise LayoutError(
                f"shard {rank} has shape {shard}, but its replica, shard 0, has {shards[0]}"
            )
    if not shards:
        raise LayoutError("there are no shards")
    return block_layout(shards[0], [Box.whole(shards[0])] * len(shards))


def _resized(shape: Shape, axis: int, n: int) -> Shape:
    return (*shape[:axis], n, *shape[axis + 1 :])


def _on_axis(box: Box, axis: int, start: int, stop: int) -> Box:
    return Box(_resized(box.start, axis, start), _resized(box.stop, axis, stop))
