"""Several sources as one, and arrays in memory as a source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.sources.checks import Check, Extent, passed_on
from jax_ucp.sources.protocol import ArrayInfo, ArraySource
from jax_ucp.sources.watched import Watched


class MemorySource(ArraySource):
    """Arrays in memory."""

    def __init__(self, data: Mapping[str, np.ndarray]):
        self._data = data
        self._arrays = {key: ArrayInfo(array.shape, array.dtype) for key, array in data.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        for box, out in zip(boxes, outs, strict=True):
            out[...] = self._data[key][box.index]


class Combined(Watched):
    """Arrays of several sources under names of its own: `places` say which array of which source
    each is.

    Its checks are those of all `sources`, also of one that has no array here.
    """

    def __init__(
        self,
        arrays: Mapping[str, ArrayInfo],
        places: Mapping[str, tuple[ArraySource, str]],
        sources: Iterable[ArraySource],
    ):
        super().__init__()
        self._arrays, self._places = arrays, places
        self._sources = list(sources)

    @classmethod
    def prefixed(cls, sources: Mapping[str, ArraySource]) -> Combined:
        """All arrays of the sources: array `key` of a source is `prefix + key`."""
        arrays: dict[str, ArrayInfo] = {}
        places: dict[str, tuple[ArraySource, str]] = {}
        for prefix, source in sources.items():
            for key, info in source.arrays().items():
                arrays[prefix + key] = info
                places[prefix + key] = source, key
        return cls(arrays, places, sources.values())

    @classmethod
    def of_files(cls, files: Mapping[str, ArraySource]) -> Combined:
        """All arrays of the files, called `file:key`."""
        return cls.prefixed({f"{name}:": file for name, file in files.items()})

    @classmethod
    def named(cls, source: ArraySource, values: Mapping[str, str | np.ndarray]) -> Combined:
        """For each name the array of `source` that is called so there, or one in memory."""
        held = {key: value for key, value in values.items() if not isinstance(value, str)}
        stored, memory = source.arrays(), MemorySource(held)
        arrays: dict[str, ArrayInfo] = {}
        places: dict[str, tuple[ArraySource, str]] = {}
        for key, value in values.items():
            if isinstance(value, str):
                arrays[key], places[key] = stored[value], (source, value)
            else:
                arrays[key], places[key] = memory.arrays()[key], (memory, key)
        return cls(arrays, places, [source])

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        source, inner = self._places[key]
        source.read_into(inner, boxes, outs)
        self._show(key, boxes, outs)

    def checks(self, extent: Extent) -> Iterator[Check]:
        names: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, (source, inner) in self._places.items():
            names[id(source)][inner].append(name)
        for source in self._sources:
            yield from passed_on(source.checks(extent), names[id(source)])
