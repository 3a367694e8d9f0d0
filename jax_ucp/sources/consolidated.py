"""Shards and layouts seen as whole parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_ucp.errors import CorruptData, LayoutError
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment, ParamLayout
from jax_ucp.sources.protocol import ArrayInfo, ArraySource, Piece
from jax_ucp.sources.watched import Watched


@dataclass(frozen=True)
class Consolidated:
    """A parameter made of shards: `keys[i]` names, in the source, the array that is shard i of
    `layout`.
    """

    layout: ParamLayout
    keys: Sequence[str]


class ConsolidatedView(Watched):
    """An `ArraySource` of whole parameters over an `ArraySource` of their shards.

    Views nest: ZeRO partitions are tensor-parallel shards to a first view, and those parameters to
    a second. Layouts are proved when the view is made, so reading finds nothing out.

    Raises LayoutError, naming the parameter and its shards, where shapes or dtypes do not fit.
    """

    def __init__(self, shards: ArraySource, params: Mapping[str, Consolidated]):
        super().__init__()
        self._shards = shards
        self._params = params
        infos = shards.arrays()
        self._arrays = {name: _checked(name, param, infos) for name, param in params.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        """Read each box into its array: every shard is asked once for all that they want of it."""
        param = self._params[key]
        reads: dict[int, list[tuple[Box, np.ndarray]]] = defaultdict(list)
        for box, out in zip(boxes, outs, strict=True):
            for replicas in param.layout.narrow(box):
                first, hit = replicas[0], _hit(replicas[0], box)
                block = out if hit == box else out[(*hit.relative_to(box).index, ...)]
                if param.layout.averaged:
                    block[...] = _mean([self._read(param, fragment, hit) for fragment in replicas])
                elif (place := _place(first, hit, block)) is not None:
                    reads[first.shard].append((first.source, place))
                else:
                    self._copy(param, first, hit, block)
        for shard, parts in reads.items():
            sources, places = zip(*parts, strict=True)
            self._shards.read_into(param.keys[shard], sources, places)
        self._show(key, boxes, outs)

    def _copy(self, param: Consolidated, fragment: Fragment, hit: Box, block: np.ndarray) -> None:
        """Read what cannot be read into the block itself, and copy it there."""
        if fragment.target != hit:
            block[...] = self._read(param, fragment, hit)
            return
        run = np.empty(fragment.source.shape, block.dtype)
        self._shards.read_into(param.keys[fragment.shard], [fragment.source], [run])
        block[...] = run.reshape(hit.shape)

    def compare_replicas(self, key: str, box: Box, data: np.ndarray) -> None:
        """Read the other copies of what was read of `box`, and raise CorruptData where one differs
        in any bit.
        """
        param = self._params[key]
        for replicas in param.layout.narrow(box) if not param.layout.averaged else []:
            hit = _hit(replicas[0], box)
            first = data[hit.relative_to(box).index]
            for other in replicas[1:]:
                if not same_bits(first, self._read(param, other, hit)):
                    raise CorruptData(
                        f"{key}: {hit} differs between {param.keys[replicas[0].shard]} and"
                        f" {param.keys[other.shard]}, which should be replicas"
                    )

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        param = self._params[key]
        for outer in _pieces(param, box):
            for inner in self._shards.locate(param.keys[outer.shard], outer.source):
                for part in _through(Fragment(outer.shard, inner.source, inner.target), outer):
                    yield replace(inner, source=part.source, target=part.target)

    def tiles(self, key: str, box: Box) -> Iterator[Box]:
        """The blocks of what a box of a parameter is made of: each is a part of one shard, and of
        one shard of that if the source is such a view too.
        """
        param = self._params[key]
        for outer in _pieces(param, box):
            if not isinstance(self._shards, ConsolidatedView):
                yield outer.target
                continue
            for tile in self._shards.tiles(param.keys[outer.shard], outer.source):
                inner = Fragment(outer.shard, tile, tile)
                yield from (part.target for part in _through(inner, outer))

    def _read(self, param: Consolidated, fragment: Fragment, box: Box) -> np.ndarray:
        narrow = fragment.narrow(box)
        assert narrow is not None, "read() only asks a fragment for elements it holds"
        data = self._shards.read(param.keys[fragment.shard], narrow.source).reshape(
            narrow.target.shape
        )
        return data[box.relative_to(narrow.target).index]


def _pieces(param: Consolidated, box: Box) -> Iterator[Fragment]:
    """What every fragment, each replica too, has of a box."""
    for fragment in param.layout.fragments:
        yield from fragment.pieces(box)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have one dtype, one shape and the same bytes; NaNs and signed zeros
    included.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unit = np.uint64 if a.nbytes % 8 == 0 else np.uint8
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).view(unit) for x in (a, b))
    return np.array_equal(first, second)


def _place(fragment: Fragment, hit: Box, block: np.ndarray) -> np.ndarray | None:
    """The memory that a fragment can be read into; None where it does not fill the block as it
    is stored.
    """
    if not fragment.is_flat:
        return block
    # A flat shard gives whole rows, of which some elements may be wanted, and a run of it may have
    # gaps where it goes.
    fills_run = fragment.target == hit and block.flags.c_contiguous
    return block.reshape(-1) if fills_run else None


def _through(inner: Fragment, outer: Fragment) -> Iterator[Fragment]:
    """What `inner` is of a parameter, where `outer` says what of its shard the parameter holds.

    Of a flat shard it is a range, which may be several boxes of the parameter.
    """
    if not outer.is_flat:
        by = [t - s for s, t in zip(outer.source.start, outer.target.start, strict=True)]
        yield Fragment(inner.shard, inner.source, inner.target.shift(by))
        return
    inside = inner.target.relative_to(outer.source)
    at = inner.source.start[0]
    for box in range_boxes(outer.target.shape, inside.start[0], inside.stop[0]):
        yield Fragment(inner.shard, Box((at,), (at + box.size,)), box.shift(outer.target.start))
        at += box.size


def _hit(fragment: Fragment, box: Box) -> Box:
    if not fragment.is_flat:  # which narrow() cuts to just what the box has of it
        return fragment.target
    hit = fragment.target.intersect(box)
    assert hit is not None, "narrow() returns fragments that meet the box"
    return hit


def _mean(copies: Sequence[np.ndarray]) -> np.ndarray:
    # DeepSpeed's order and precision: the copies are summed as they are stored, then divided
    # (`sum(slices) / len(slices)`, merge_tp_slices in deepspeed/checkpoint/ds_to_universal.py).
    return sum(copies[1:], copies[0]) / np.asarray(len(copies), copies[0].dtype)


def _checked(name: str, param: Consolidated, infos: Mapping[str, ArrayInfo]) -> ArrayInfo:
    layout, keys = param.layout, param.keys
    if len(keys) != len(layout.shards):
        raise LayoutError(
            f"{name}: the layout has {len(layout.shards)} shards, but {len(keys)} are named: {keys}"
        )
    for key, shape in zip(keys, layout.shards, strict=True):
        if infos[key].shape != shape:
            raise LayoutError(
                f"{name}: {key} was declared with shape {shape}, but has {infos[key].shape}"
            )
    dtypes = {key: infos[key].dtype for key in keys}
    if len(set(dtypes.values())) != 1:
        raise LayoutError(f"{name}: the shards differ in dtype: {dtypes}")
    try:
        layout.check()
    except LayoutError as error:
        raise LayoutError(f"{name}: {error} (shards: {', '.join(keys)})") from None
    return ArrayInfo(layout.shape, infos[keys[0]].dtype)
