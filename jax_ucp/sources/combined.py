"""Several sources as one, and arrays in memory as a source."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jax_ucp.layout.box import Box
from jax_ucp.sources.checks import Check, Extent, passed_on
from jax_ucp.sources.protocol import ArrayInfo, ArraySource, Piece
from jax_ucp.sources.watched import Watched


class MemorySource(ArraySource):
    """Arrays in memory; `pieces` say what of the files they were made of, where that is known."""

    def __init__(
        self, data: Mapping[str, np.ndarray], pieces: Mapping[str, Sequence[Piece]] | None = None
    ):
        self._data, self._pieces = data, pieces or {}
        self._arrays = {key: ArrayInfo(array.shape, array.dtype) for key, array in data.items()}

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        for box, out in zip(boxes, outs, strict=True):
            out[...] = self._data[key][box.index]

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        yield from self._pieces.get(key, ())


class Combined(Watched):
    """Arrays of several sources under names of its own: `places` say which array of which source
    each is. With `stored` these names say where arrays are stored, `file:item`; else the sources
    do.

    Its checks are those of all `sources`, also of one that has no array here.
    """

    def __init__(
        self,
        arrays: Mapping[str, ArrayInfo],
        places: Mapping[str, tuple[ArraySource, str]],
        sources: Iterable[ArraySource],
        stored: bool,
    ):
        super().__init__()
        self._stored = stored
        self._arrays, self._places = arrays, places
        self._sources = list(sources)

    @classmethod
    def prefixed(cls, sources: Mapping[str, ArraySource]) -> Combined:
        """All arrays of stored files: array `key` of a source is `prefix + key`."""
        arrays: dict[str, ArrayInfo] = {}
        places: dict[str, tuple[ArraySource, str]] = {}
        for prefix, source in sources.items():
            for key, info in source.arrays().items():
                name = sys.intern(prefix + key)  # whoever has it too has the same text
                arrays[name], places[name] = info, (source, key)
        return cls(arrays, places, sources.values(), stored=True)

    @classmethod
    def of_files(cls, files: Mapping[str, ArraySource]) -> Combined:
        """All arrays of the files, called `file:key`."""
        return cls.prefixed({f"{name}:": file for name, file in files.items()})

    @classmethod
    def named(
        cls,
        source: ArraySource,
        values: Mapping[str, str | np.ndarray],
        pieces: Mapping[str, Sequence[Piece]] | None = None,
    ) -> Combined:
        """For each name the array of `source` that is called so there, or one in memory, of which
        `pieces` say what it was made of.
        """
        in_memory = {key: value for key, value in values.items() if not isinstance(value, str)}
        stored, memory = source.arrays(), MemorySource(in_memory, pieces)
        arrays: dict[str, ArrayInfo] = {}
        places: dict[str, tuple[ArraySource, str]] = {}
        for key, value in values.items():
            if isinstance(value, str):
                arrays[key], places[key] = stored[value], (source, value)
            else:
                arrays[key], places[key] = memory.arrays()[key], (memory, key)
        return cls(arrays, places, [source], stored=False)

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        source, inner = self._places[key]
        source.read_into(inner, boxes, outs)
        self._show(key, boxes, outs)

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        if self._stored:
            yield from super().locate(key, box)
        else:
            source, inner = self._places[key]
            yield from source.locate(inner, box)

    def checks(self, extent: Extent) -> Iterator[Check]:
        names: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, (source, inner) in self._places.items():
            names[id(source)][inner].append(name)
        for source in self._sources:
            yield from passed_on(source.checks(extent), names[id(source)])
