"""Arrays of a source under other names, beside constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.sources.gather import read_into
from jax_ucp.sources.protocol import ArrayInfo, ArraySource


class Values:
    """An `ArraySource` in which a name stands for an array of `source`, or for a constant."""

    def __init__(self, source: ArraySource, named: Mapping[str, str | np.ndarray]):
        self._source, self._named = source, named
        stored = source.arrays()
        self._infos = {
            name: stored[value] if isinstance(value, str) else ArrayInfo(value.shape, value.dtype)
            for name, value in named.items()
        }

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._infos

    def read(self, key: str, box: Box) -> np.ndarray:
        value = self._named[key]
        return self._source.read(value, box) if isinstance(value, str) else value[box.index].copy()

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        value = self._named[key]
        if isinstance(value, str):
            read_into(self._source, value, boxes, outs)
        else:
            for box, out in zip(boxes, outs, strict=True):
                out[...] = value[box.index]
