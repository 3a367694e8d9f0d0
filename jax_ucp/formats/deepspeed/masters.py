"""The 16-bit weights of ZeRO-0's module, matched by the bits of rounded masters.

A weight of 16 bits is its master, rounded, so a master's parameter is among those with these bits.
Their first elements tell nearly always; where several have the same, all elements are compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import xxhash

from jax_ucp.formats.pairing import Undecided
from jax_ucp.layout.box import range_boxes
from jax_ucp.layout.fragments import Shape
from jax_ucp.sources.protocol import ArraySource

# So many elements at the most are compared first.
SAMPLE = 64
# Elements of masters that are rounded at once.
_BLOCK = 1 << 20


class Copies:
    """The module's weights on one rank, by parameter; `shards` has them, and the masters."""

    def __init__(self, shards: ArraySource, keys: Mapping[str, str], shapes: Mapping[str, Shape]):
        self._shards, self._keys, self._shapes = shards, keys, shapes
        self._dtypes = {name: shards.arrays()[key].dtype for name, key in keys.items()}
        self.sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._starts: dict[tuple[np.dtype, int], dict[bytes, list[str]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for name, size in self.sizes.items():
            length = min(SAMPLE, size)
            if length:
                self._starts[self._dtypes[name], length][self._start(name)].append(name)
        self._digests: dict[tuple[object, ...], bytes] = {}
        # Whole comparisons together may read the masters a few times, and no more.
        self._left = 4 * sum(self.sizes.values()) + _BLOCK

    def candidates_at(self, key: str, offset: int) -> list[str]:
        """The parameters that the tensor of masters `key` can have at `offset`, by their bits."""
        shape = self._shards.arrays()[key].shape
        room = math.prod(shape) - offset
        candidates: list[str] = []
        for (dtype, length), names in self._starts.items():
            if length <= room:
                bits = self._bits(key, shape, offset, length, dtype)
                candidates += [n for n in names.get(bits, ()) if self.sizes[n] <= room]
        if len(candidates) <= 1:
            return candidates
        return [name for name in candidates if self._agrees(name, key, offset)]

    def begins(self, name: str, key: str, offset: int) -> bool:
        """Whether the masters have at `offset` the first elements of the module's parameter."""
        length = min(SAMPLE, self.sizes[name])
        if not length:
            return True
        shape = self._shards.arrays()[key].shape
        return self._bits(key, shape, offset, length, self._dtypes[name]) == self._start(name)

    def _start(self, name: str) -> bytes:
        length = min(SAMPLE, self.sizes[name])
        return self._bits(self._keys[name], self._shapes[name], 0, length, self._dtypes[name])

    def _agrees(self, name: str, key: str, offset: int) -> bool:
        size, dtype = self.sizes[name], self._dtypes[name]
        copy = self._digest(self._keys[name], self._shapes[name], 0, size, dtype)
        return copy == self._digest(key, self._shards.arrays()[key].shape, offset, size, dtype)

    def _digest(self, key: str, shape: Shape, start: int, size: int, dtype: np.dtype) -> bytes:
        asked = key, start, size, dtype
        if asked not in self._digests:
            self._left -= size
            if self._left < 0:
                raise Undecided("too many parameters have the same bits to compare them all")
            digest = xxhash.xxh3_128()
            for at in range(start, start + size, _BLOCK):
                digest.update(self._bits(key, shape, at, min(_BLOCK, start + size - at), dtype))
            self._digests[asked] = digest.digest()
        return self._digests[asked]

    def _bits(self, key: str, shape: Shape, start: int, count: int, dtype: np.dtype) -> bytes:
        """Elements in row-major order, rounded to a dtype; they may overflow, as in the module."""
        parts = [
            np.asarray(self._shards.read(key, box))
            for box in range_boxes(shape, start, start + count)
        ]
        with np.errstate(all="ignore"):
            return b"".join(part.astype(dtype).tobytes() for part in parts)
