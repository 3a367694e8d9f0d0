"""Numbers that a source has as codes of eight bits: an entry of a table, times the scale of its
block.

That is how bitsandbytes' optimizers keep their states, and the product in float32 is what they
compute with (`csrc/kernels.cu`, `kOptimizerStatic8bit2StateBlockwise`, and
`dequantize_blockwise` in `csrc/cpu_ops.cpp`, of 0.50).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.sources.checks import Check, Extent
from jax_ucp.sources.protocol import ArrayInfo, ArraySource, MakesArrays, Piece

_MAX_BYTES = 1 << 22  # of codes that are decoded at once; their indices take eight times that
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Coded:
    """Element i, in row-major order, is `table[codes[i]] * scales[i // block]`; all are keys."""

    codes: str
    table: str
    scales: str
    block: int


class WithDecoded(MakesArrays):
    """A source with some more arrays, decoded from its own."""

    def __init__(self, source: ArraySource, coded: Mapping[str, Coded]):
        self._source, self._coded = source, coded
        infos = source.arrays()
        decoded = {key: ArrayInfo(infos[one.codes].shape, _FLOAT32) for key, one in coded.items()}
        self._arrays = {**infos, **decoded}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        if key not in self._coded:
            self._source.read_into(key, boxes, outs)
            return
        for box, out in zip(boxes, outs, strict=True):
            for block in self._arrays[key].blocks([box], _MAX_BYTES):
                part = block.intersect(box)
                if part is not None:
                    out[part.relative_to(box).index] = self.read(key, part)

    def read(self, key: str, box: Box) -> np.ndarray:
        coded = self._coded.get(key)
        if coded is None:
            return self._source.read(key, box)
        codes = self._source.read(coded.codes, box)
        table = self._whole(coded.table)
        blocks = _places(self._arrays[key].shape, box) // coded.block
        if not blocks.size:
            return np.empty(box.shape, _FLOAT32)
        first, last = int(blocks.min()), int(blocks.max())
        scales = self._source.read(coded.scales, Box((first,), (last + 1,)))
        return table[codes] * scales[blocks - first]

    def _whole(self, key: str) -> np.ndarray:
        return self._source.read(key, Box.whole(self._arrays[key].shape))

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        coded = self._coded.get(key)
        yield from self._source.locate(coded.codes if coded else key, box)

    def checks(self, extent: Extent) -> Iterable[Check]:
        return self._source.checks(extent)


def _places(shape: Sequence[int], box: Box) -> np.ndarray:
    """The place of each element of a box in the row-major order of the whole array.

    >>> _places((4, 3), Box((1, 1), (3, 3)))
    array([[4, 5],
           [7, 8]])
    """
    places = np.zeros((1,) * len(shape), np.int64)
    for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        step = math.prod(shape[axis + 1 :])
        along = np.arange(start, stop, dtype=np.int64) * step
        places = places + along.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return places


def block_of(count: int, scales: int) -> int | None:
    """How many of `count` codes share one of so many scales: 256, or 2048 in old versions."""
    return next((block for block in (256, 2048) if -(-count // block) == scales), None)
