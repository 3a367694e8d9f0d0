"""Several sources as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.sources.checks import Check, Extent, checks_of, prefixed
from jax_ucp.sources.gather import read_into
from jax_ucp.sources.protocol import ArrayInfo, ArraySource


class Joined:
    """Several sources as one: array `key` of the source called `name` is `name:key`."""

    def __init__(self, sources: Mapping[str, ArraySource]):
        self._sources = sources
        self._arrays = {
            f"{name}:{key}": info for name, s in sources.items() for key, info in s.arrays().items()
        }

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read(self, key: str, box: Box) -> np.ndarray:
        source, inner = self._of(key)
        return source.read(inner, box)

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        source, inner = self._of(key)
        read_into(source, inner, boxes, outs)

    def _of(self, key: str) -> tuple[ArraySource, str]:
        name, _, inner = key.partition(":")
        return self._sources[name], inner

    def checks(self, extent: Extent) -> Iterator[Check]:
        """What every source that has checksums of its own can prove by them."""
        for name, source in self._sources.items():
            yield from prefixed(checks_of(source, extent), f"{name}:")
