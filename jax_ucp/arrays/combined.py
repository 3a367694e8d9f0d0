"""Several sources as one."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_ucp.arrays.checks import LeafClaim, passed_on
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, Piece, Want
from jax_ucp.layout.box import Box

if TYPE_CHECKING:
    from jax_ucp.arrays.extents import StoredArray


class Combined(ArraySource):
    """Arrays of several sources under names of its own: `places` say which array of which source
    each is. `sources` are all of them, each with what is before the names of its files, or `file:`
    of one file; nothing of a source whose names of files are those of the whole.

    Its claims are those of all sources, also of one that has no array here.
    """

    def __init__(
        self,
        arrays: Mapping[str, ArrayInfo],
        places: Mapping[str, tuple[ArraySource, str]],
        sources: Iterable[tuple[str, ArraySource]],
    ):
        self._arrays, self._places = arrays, places
        self._sources = list(sources)

    @cached_property
    def _prefixes(self) -> Mapping[int, str]:
        """The beginnings of the names of a source's files, by the identity of the source."""
        return {id(source): prefix for prefix, source in self._sources}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_prefixes"}

    @classmethod
    def prefixed(cls, sources: Mapping[str, ArraySource]) -> Combined:
        """All arrays of stored files: array `key` of a source is `prefix + key`. The prefix is that
        of the names of its files, or `file:`.
        """
        arrays: dict[str, ArrayInfo] = {}
        places: dict[str, tuple[ArraySource, str]] = {}
        for prefix, source in sources.items():
            for key, info in source.arrays().items():
                name = sys.intern(prefix + key)  # whoever has it too has the same text
                arrays[name], places[name] = info, (source, key)
        return cls(arrays, places, sources.items())

    @classmethod
    def of_files(cls, files: Mapping[str, ArraySource]) -> Combined:
        """All arrays of the files, called `file:key`."""
        return cls.prefixed({f"{name}:": file for name, file in files.items()})

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        source, inner = self._places[key]
        source.read_into(inner, boxes, outs)

    def read_each(self, wants: Sequence[Want]) -> None:
        """Read boxes of several arrays, of each source together."""
        groups: dict[int, tuple[ArraySource, list[Want]]] = {}
        for key, boxes, outs in wants:
            source, inner = self._places[key]
            groups.setdefault(id(source), (source, []))[1].append((inner, boxes, outs))
        for source, group in groups.values():
            source.read_each(group)

    def stored(self, key: str) -> StoredArray | np.ndarray | None:
        source, inner = self._places[key]
        return source.stored(inner)

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        source, inner = self._places[key]
        prefix = self._prefixes.get(id(source), "")
        if prefix.endswith(":"):
            file, _, inside = prefix[:-1].partition(":")
            yield Piece(file, f"{inside}:{inner}" if inside else inner, box, box)
            return
        for piece in source.locate(inner, box):
            yield replace(piece, file=prefix + piece.file) if prefix else piece

    def claims(self) -> Iterator[LeafClaim]:
        names: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, (source, inner) in self._places.items():
            names[id(source)][inner].append(name)
        for _, source in self._sources:
            yield from passed_on(source.claims(), names[id(source)])
