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
from jax_ucp.storage.source import ArrayInfo, ArraySource, Joined

VERIFY_BYTES = 16 << 20


class Import:
    """A checkpoint on its way to being `Contents`; an opener tells it what each stored thing is.

    `shards` has the stored tensors, named `file:item`. The tree is `{state: {parameter: array}}`. A tensor of
    which the opener says nothing is accounted for as not understood.
    """

    def __init__(self, format: str, path: Path, shards: ArraySource):
        self.format, self.path, self.shards = format, path, shards
        self.stored = shards.arrays()
        self.params: dict[TreePath, Consolidated] = {}
        self.extras: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self._constants: dict[TreePath, tuple[np.ndarray, str]] = {}
        self._cuts: dict[str, Cut] = {}
        self._slices: dict[str, Consolidated] = {}
        self._twins: list[_Twin] = []
        self._fates: dict[str, tuple[Fate, str]] = {}
        self._items: list[Item] = []

    def parameter(self, state: str, name: str, param: Consolidated, reason: str) -> None:
        """One state of a parameter, made of stored tensors. Raises FormatError if it is there already."""
        path = Key("dict", state), Key("dict", name)
        if path in self.params or path in self._constants:
            raise FormatError(f"{self.path}: {state} of {name} is stored twice, in {self.params[path].keys[0]} too")
        self.params[path] = param
        self._mapped(param.keys, reason)

    def cut(self, key: str, cut: Cut) -> None:
        """A tensor called `key` that lies inside a stored one; parameters, slices and twins may be made of it."""
        self._cuts[key] = cut

    def slice(self, key: str, tensor: Consolidated, reason: str) -> None:
        """A tensor that one rank had in memory, made of stored ones; parameters are made of it by `key`."""
        self._slices[key] = tensor
        self._mapped(tensor.keys, reason)

    def _mapped(self, keys: Iterable[str], reason: str) -> None:
        for key in keys:
            if key not in self._slices:
                self._fates[self._stored(key)] = "mapped", reason

    def _stored(self, key: str) -> str:
        return self._cuts[key].key if key in self._cuts else key

    def constant(self, state: str, name: str, value: np.ndarray, where: str) -> None:
        """One state of a parameter that is no tensor in the file; `where` is `file:item`."""
        self._constants[Key("dict", state), Key("dict", name)] = value, where

    def twin(self, state: str, name: str, twin: str | Consolidated, reason: str) -> None:
        """Stored tensors that must be a state of a parameter, rounded to their dtype; `verify` compares them.

        One tensor that is the whole of it is named by its key.
        """
        key = twin if isinstance(twin, str) else f"copy {len(self._twins)} of {name}"
        if isinstance(twin, Consolidated):
            self._slices[key] = twin
        stored = [self._stored(k) for k in ([key] if isinstance(twin, str) else twin.keys)]
        self._twins.append(_Twin((Key("dict", state), Key("dict", name)), key, ", ".join(dict.fromkeys(stored))))
        for name_in_file in stored:
            self._fates.setdefault(name_in_file, ("skipped", reason))

    def slice_twin(self, whole: str, key: str, reason: str, at: Sequence[int] = ()) -> None:
        """A stored tensor that must be the slice `whole`, or what it has at the leading indices `at`, rounded."""
        self._twins.append(_Twin(whole, key, key, tuple(at)))
        self._fates[key] = "skipped", reason

    def extra(self, file: str, name: str, value: Any, source: ArraySource | None = None) -> None:
        """Something beside the arrays, kept as JSON, with the tensors in it: those of `source`, if it has its own."""

        def read(key: str, box: Box) -> np.ndarray:
            if source is not None:
                return source.read(key.removeprefix(f"{file}:"), box)
            self._fates[key] = "extra", f"in the extra {name}"
            return self.shards.read(key, box)

        self.extras.setdefault(file, {})[name] = as_json(value, file, read)
        if f"{file}:{name}" not in self._fates:
            self._items.append(Item(f"{file}:{name}", type(value).__name__, "extra", "kept as JSON"))

    def skip(self, where: str, what: str, reason: str) -> None:
        """Something that is stored and has no place in the tree."""
        if where in self.stored:
            self._fates[where] = "skipped", reason
        else:
            self._items.append(Item(where, what, "skipped", reason))

    def contents(self) -> Contents:
        """The checkpoint. Raises LayoutError where shards do not form a parameter."""
        paths = [*self.params, *self._constants]
        names = dict(zip(paths, leaf_names(paths), strict=True))
        shards = WithCuts(self.shards, self._cuts) if self._cuts else self.shards
        below = self._slice_view(shards) or shards
        view = ConsolidatedView(below, {names[path]: param for path, param in self.params.items()})
        arrays = _WithConstants(view, {names[path]: value for path, (value, _) in self._constants.items()})
        infos = arrays.arrays()

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
                to = [t - s for s, t in zip(fragment.source.start, fragment.target.start, strict=True)]
                parts = self._cuts[key].pieces(fragment.source)
                found += [Piece(file, item, part.source, part.target.shift(to)) for part in parts]
            return found

        def verify() -> Iterator[tuple[str, str | None]]:
            if isinstance(self.shards, Joined):
                yield from self.shards.verify()
            for path, param in self.params.items():
                if len(param.layout.replicas) < len(param.layout.fragments) and not param.layout.averaged:
                    yield _label(path), _replicas_differ(view, names[path])
            for twin in self._twins:
                if isinstance(twin.of, str):
                    yield twin.of, _differs_from_twin(twin.of, below, twin.of, below, twin)
                else:
                    yield _label(twin.of), _differs_from_twin(_label(twin.of), arrays, names[twin.of], below, twin)

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

    def view(self, params: Mapping[str, Consolidated]) -> ConsolidatedView:
        """Arrays made of what this import has heard of so far: all of slices, or none."""
        shards = WithCuts(self.shards, self._cuts) if self._cuts else self.shards
        slices = {key: self._slices[key] for param in params.values() for key in param.keys if key in self._slices}
        return ConsolidatedView(ConsolidatedView(shards, slices) if slices else shards, params)

    def _slice_view(self, shards: ArraySource) -> ConsolidatedView | None:
        """The slices, and stored tensors that are whole slices; None where parameters are made of nothing but those."""
        if not self._slices:
            return None
        # A copy of a parameter that is itself in slices is one level above them.
        above = {key: held for key, held in self._slices.items() if any(part in self._slices for part in held.keys)}
        slices = {key: held for key, held in self._slices.items() if key not in above}
        used = {key for param in self.params.values() for key in param.keys}
        used |= {key for twin in self._twins for key in (twin.of, twin.key) if isinstance(key, str)}
        view = ConsolidatedView(shards, {**slices, **_whole(shards, used - self._slices.keys())})
        return ConsolidatedView(view, {**above, **_whole(view, view.arrays().keys())}) if above else view

    def _account(self) -> Iterator[Item]:
        for key, info in self.stored.items():
            fate, reason = self._fates.get(key, ("skipped", "not understood"))
            yield Item(key, f"{info.dtype} {list(info.shape)}", fate, reason)
        yield from self._items


@dataclass(frozen=True)
class _Twin:
    """A second copy: `key` is what the parameter or slice `of` has at the leading indices `at`; `stored` says where."""

    of: TreePath | str
    key: str
    stored: str
    at: tuple[int, ...] = ()


def _whole(source: ArraySource, keys: Iterable[str]) -> dict[str, Consolidated]:
    """Arrays of a source as they are."""
    infos = source.arrays()
    return {key: Consolidated(Unique().join([infos[key].shape]), [key]) for key in keys}


def touched(layout: ParamLayout, keys: Sequence[str]) -> Consolidated:
    """The parameter with only those shards that hold a part of it."""
    used = sorted({fragment.shard for fragment in layout.fragments}) or [0]
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


def _differs_from_twin(label: str, view: ArraySource, name: str, shards: ArraySource, twin: _Twin) -> str | None:
    info = shards.arrays()[twin.key]
    if view.arrays()[name].shape[len(twin.at) :] != info.shape:
        return f"{label} has shape {view.arrays()[name].shape}, but the copy at {twin.stored} has {info.shape}"
    for box in row_boxes(info.shape, info.dtype.itemsize, VERIFY_BYTES):
        copy = np.asarray(shards.read(twin.key, box))
        whole = Box((*twin.at, *box.start), (*(i + 1 for i in twin.at), *box.stop))
        if not same_bits(view.read(name, whole).reshape(box.shape).astype(copy.dtype), copy):
            return f"{label}: the master, rounded to {copy.dtype}, is not the copy at {twin.stored} in {box}"
    return None
