"""What every importer does with what it found: consolidate it, compare what is stored twice, account for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.formats.extras import as_json
from jax_ucp.layout.blocks import row_boxes
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.patterns import Unique
from jax_ucp.metadata import Key, Leaf, leaf_names
from jax_ucp.metadata import Path as TreePath
from jax_ucp.storage.consolidated import Consolidated, ConsolidatedView, same_bits
from jax_ucp.storage.contents import Contents, Fate, Item, Piece
from jax_ucp.storage.cuts import Cut, WithCuts
from jax_ucp.storage.source import ArrayInfo, ArraySource

VERIFY_BYTES = 16 << 20


class Import:
    """A checkpoint on its way to being `Contents`; an opener tells it what each stored thing is.

    `shards` has the stored tensors, named `file:item`. The tree is `{state: {parameter: array}}`. A tensor of
    which the opener says nothing is accounted for as not understood.
    """

    def __init__(self, format: str, path: Path, shards: ArraySource):
        self.format, self.path, self.shards = format, path, shards
        self.params: dict[TreePath, Consolidated] = {}
        self.extras: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self._constants: dict[TreePath, tuple[np.ndarray, str]] = {}
        self._cuts: dict[str, Cut] = {}
        self._twins: list[tuple[TreePath, str | Consolidated]] = []
        self._fates: dict[str, tuple[Fate, str]] = {}
        self._items: list[Item] = []

    def cut(self, key: str, cut: Cut) -> None:
        """A tensor called `key` that lies inside a stored one; parameters and twins may be made of it."""
        self._cuts[key] = cut

    def parameter(self, state: str, name: str, param: Consolidated, reason: str) -> None:
        """One state of a parameter, made of stored tensors. Raises FormatError if it is there already."""
        path = Key("dict", state), Key("dict", name)
        if path in self.params or path in self._constants:
            raise FormatError(f"{self.path}: {state} of {name} is stored twice, in {self.params[path].keys[0]} too")
        self.params[path] = param
        for key in param.keys:
            self._fates[self._stored(key)] = "mapped", reason

    def constant(self, state: str, name: str, value: np.ndarray, where: str) -> None:
        """One state of a parameter that is no tensor in the file; `where` is `file:item`."""
        self._constants[Key("dict", state), Key("dict", name)] = value, where

    def twin(self, state: str, name: str, twin: str | Consolidated, reason: str) -> None:
        """Stored tensors that must be a state of a parameter, rounded to their dtype; `verify` compares them.

        One tensor that is the whole of it is named by its key.
        """
        self._twins.append(((Key("dict", state), Key("dict", name)), twin))
        for key in [twin] if isinstance(twin, str) else twin.keys:
            self._fates.setdefault(self._stored(key), ("skipped", reason))

    def leave(self, key: str, reason: str) -> None:
        """A stored tensor that has no place in the tree."""
        self._fates[key] = "skipped", reason

    def extra(self, file: str, name: str, value: Any) -> None:
        """Something beside the arrays, kept as JSON, with the tensors in it."""

        def read(key: str, box: Box) -> np.ndarray:
            self._fates[key] = "extra", f"in the extra {name}"
            return self.shards.read(key, box)

        self.extras.setdefault(file, {})[name] = as_json(value, file, read)
        if f"{file}:{name}" not in self._fates:
            self._items.append(Item(f"{file}:{name}", type(value).__name__, "extra", "kept as JSON"))

    def skip(self, where: str, what: str, reason: str) -> None:
        """Something that is stored and has no place in the tree."""
        self._items.append(Item(where, what, "skipped", reason))

    def contents(self) -> Contents:
        """The checkpoint. Raises LayoutError where shards do not form a parameter."""
        paths = [*self.params, *self._constants]
        names = dict(zip(paths, leaf_names(paths), strict=True))
        shards = WithCuts(self.shards, self._cuts) if self._cuts else self.shards
        view = ConsolidatedView(shards, {names[path]: param for path, param in self.params.items()})
        arrays = _WithConstants(view, {names[path]: value for path, (value, _) in self._constants.items()})
        infos = arrays.arrays()
        twins = ConsolidatedView(shards, self._twin_layouts())

        def where(leaf: Leaf) -> list[Piece]:
            if leaf.path in self._constants:
                file, _, item = self._constants[leaf.path][1].partition(":")
                return [Piece(file, item, Box((), ()), Box((), ()))]
            found: list[Piece] = []
            for key, fragment in view.where(leaf.name):
                file, _, item = self._stored(key).partition(":")
                if key not in self._cuts:
                    found.append(Piece(file, item, fragment.source, fragment.target))
                    continue
                cut = self._cuts[key]
                to = [t - s for s, t in zip(fragment.source.start, fragment.target.start, strict=True)]
                found += [Piece(file, item, part.source, part.target.shift(to)) for part in cut.pieces(fragment.source)]
            return found

        def verify() -> Iterator[tuple[str, str | None]]:
            for path, param in self.params.items():
                if len(param.layout.replicas) < len(param.layout.fragments) and not param.layout.averaged:
                    yield _label(path), _replicas_differ(view, names[path])
            for i, (path, _) in enumerate(self._twins):
                yield _label(path), _differs_from_twin(_label(path), arrays, names[path], twins, str(i))

        return Contents(
            self.format,
            str(self.path),
            [Leaf(path, name, "array", infos[name].shape, infos[name].dtype.name) for path, name in names.items()],
            arrays,
            account=list(self._account()),
            extras=self.extras,
            notes=self.notes,
            verify=verify,
            where=where,
        )

    def _stored(self, key: str) -> str:
        return self._cuts[key].key if key in self._cuts else key

    def _twin_layouts(self) -> dict[str, Consolidated]:
        infos = self.shards.arrays()

        def layout(twin: str | Consolidated) -> Consolidated:
            if isinstance(twin, Consolidated):
                return twin
            return Consolidated(Unique().join([infos[twin].shape]), [twin])

        return {str(i): layout(twin) for i, (_, twin) in enumerate(self._twins)}

    def _account(self) -> Iterator[Item]:
        for key, info in self.shards.arrays().items():
            fate, reason = self._fates.get(key, ("skipped", "not understood"))
            yield Item(key, f"{info.dtype} {list(info.shape)}", fate, reason)
        yield from self._items


def touched(layout: ParamLayout, keys: Sequence[str]) -> Consolidated:
    """The parameter with only those shards that hold a part of it."""
    used = sorted({fragment.shard for fragment in layout.fragments})
    place = {shard: i for i, shard in enumerate(used)}
    fragments = tuple(replace(f, shard=place[f.shard]) for f in layout.fragments)
    shards = tuple(layout.shards[i] for i in used)
    return Consolidated(replace(layout, shards=shards, fragments=fragments), [keys[i] for i in used])


@dataclass(frozen=True)
class _WithConstants:
    """A source with some more arrays that are in memory."""

    source: ArraySource
    constants: Mapping[str, np.ndarray]

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {**self.source.arrays(), **{key: ArrayInfo(a.shape, a.dtype) for key, a in self.constants.items()}}

    def read(self, key: str, box: Box) -> np.ndarray:
        if key in self.constants:
            return self.constants[key][box.index].copy()
        return self.source.read(key, box)


def _label(path: Iterable[Key]) -> str:
    return "/".join(map(str, path))


def _replicas_differ(view: ConsolidatedView, name: str) -> str | None:
    info = view.arrays()[name]
    for box in row_boxes(info.shape, info.dtype.itemsize, VERIFY_BYTES):
        try:
            view.compare_replicas(name, box)
        except CorruptData as error:
            return str(error)
    return None


def _differs_from_twin(label: str, arrays: ArraySource, name: str, twins: ConsolidatedView, twin: str) -> str | None:
    info, copy = arrays.arrays()[name], twins.arrays()[twin]
    keys = ", ".join(dict.fromkeys(key for key, _ in twins.where(twin)))
    if copy.shape != info.shape:
        return f"{label} has shape {info.shape}, but the copy at {keys} has {copy.shape}"
    for box in row_boxes(info.shape, info.dtype.itemsize, VERIFY_BYTES):
        if not same_bits(arrays.read(name, box).astype(copy.dtype), twins.read(twin, box)):
            return f"{label}: the master, rounded to {copy.dtype}, is not the copy at {keys} in {box}"
    return None
