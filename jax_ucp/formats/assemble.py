"""What every importer does with what it found: consolidate it, compare what is stored twice,
account for the rest.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats import json_values as extras
from jax_ucp.formats.json_values import as_json
from jax_ucp.formats.options import NOTHING_TWICE, Options
from jax_ucp.formats.pairing import Undecided
from jax_ucp.formats.torch_save import state_pairing
from jax_ucp.formats.torch_save.opaque import unknown_notes
from jax_ucp.formats.torch_save.optimizer_dicts import Steps
from jax_ucp.formats.torch_save.state_paths import Places, UnknownModel, places
from jax_ucp.formats.torch_save.tensor_names import StoredTensor
from jax_ucp.formats.torch_save.unpickle import walk
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.checks import Check, Extent, passed_on
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import About, Contents, Item, QuantizedWeight, Status
from jax_ucp.sources.decoded import decoded
from jax_ucp.sources.dtypes import holds_every
from jax_ucp.sources.duplicates import Duplicate, Mean, Replicas
from jax_ucp.sources.evaluate import Evaluated, Reader
from jax_ucp.sources.optimizer_groups import groups_of, plain_settings
from jax_ucp.sources.protocol import ArrayInfo, ArraySource
from jax_ucp.sources.remainders import WholeNumbers, masters
from jax_ucp.sources.value import Array, Computed, Constant, Cut, Stored, joined, stored
from jax_ucp.text import is_encodable
from jax_ucp.tree import Key, Leaf, leaf_names
from jax_ucp.tree import Path as TreePath

_NO_MASTER = (
    "TransformerEngine's precision-aware optimizer keeps the low 16 bits of each master in its"
    " place, or masters of less precision; they are not put together here. Open with weights_only"
    " for the weights of the model"
)


class Import:
    """A checkpoint on its way to being `Contents`; an opener tells it what each stored thing is.

    `shards` has the stored tensors, named `file:item`. The tree is `{state: {parameter: array}}`. A
    tensor of which the opener says nothing is accounted for as not understood. With `on_conflict`,
    what is stored twice is not compared: the `master` is the parameter, or the `copy` where there
    is one of all of it. `unknown` are names of classes in the files that nobody here knows,
    `quantized` the weights that the opener knows to be codes.
    """

    def __init__(
        self, format: str, path: FilePath, shards: ArraySource, on_conflict: str | None = None
    ):
        self.format, self.path, self.shards, self.on_conflict = format, path, shards, on_conflict
        self.stored = shards.arrays()
        self.params: dict[TreePath, Consolidated] = {}
        self.extras: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.quantized: list[QuantizedWeight] = []
        self.companions: dict[str, FilePath] = {}
        self.about = About()
        # what the user said that is part of the result, for its `source`
        self.said: dict[str, Any] = {}
        self._constants: dict[TreePath, Constant] = {}
        self._arrays: dict[str, Array] = {}  # stored ones, cuts, decoded ones and slices
        self._slices: dict[str, Consolidated] = {}
        self._duplicates: list[_StoredTwice] = []
        self._places: list[tuple[str, Consolidated, Consolidated, str, bool]] = []
        self._means: list[tuple[TreePath, Sequence[str]]] = []
        # of a parameter that is remainders, its weights, and how a copy of it may differ
        self._weights: dict[TreePath, Consolidated] = {}
        self._statuses: dict[str, tuple[Status, str]] = {}
        self._skipped: dict[str, tuple[Status, str]] = {}  # of many things for one reason
        self._items: list[Item] = []
        self._mentioned = extras.MentionedTensors()
        self._settings: dict[str, dict[str, Any]] = defaultdict(dict)
        self.unknown: set[str] = set()
        # of parameters what is equal of two names of one tensor, where the opener knows it
        self.ties: dict[str, Hashable] = {}
        # what is likely where a copy differs of which nobody said more
        self.cause = ""
        self._left: set[str] = set()

    def add_files(self, files: Mapping[str, ArraySource]) -> None:
        """Further stored files, by name: their tensors are named `file:item` too."""
        sources = {f"{name}:": source for name, source in files.items()}
        self.shards = Combined.prefixed({"": self.shards, **sources})
        self.stored = self.shards.arrays()

    def weight_files(self) -> set[str]:
        """The files that hold parameters."""
        keys = itertools.chain.from_iterable(
            param.keys for path, param in self.params.items() if str(path[0]) == "param"
        )
        arrays = itertools.chain.from_iterable(stored(self.array(key)) for key in keys)
        return {array.item.partition(":")[0] for array in arrays}

    def parameter(self, state: str, name: str, param: Consolidated, reason: str) -> None:
        """One state of a parameter, made of stored tensors. Raises FormatError if it is there
        already.
        """
        self.params[self._new(state, name)] = param
        self._mapped(param.keys, reason)

    def remainders(self, name: str, low: Consolidated, weight: Consolidated, reason: str) -> None:
        """A parameter of which the low 16 bits are stored, perhaps widened, beside the bfloat16
        weight (see `sources.remainders`). Raises as `parameter`.
        """
        self.parameter("param", name, low, reason)
        self._weights[Key("dict", "param"), Key("dict", name)] = weight
        self._mapped(weight.keys, reason)

    def dtype(self, param: Consolidated) -> np.dtype:
        """The dtype in which a parameter is stored."""
        return self.stored[next(self._stored_keys(param.keys))].dtype

    def cut(
        self, key: str, whole: str, start: int, shape: tuple[int, ...], transposed: bool = False
    ) -> None:
        """Define the tensor `key`: elements of the stored tensor `whole`, in row-major order from
        `start` on, in `shape`, and perhaps transposed. Parameters, slices and duplicates may be
        made of it. Raises LayoutError if it is not inside.
        """
        cut = self._arrays[key] = Cut(self.array(whole), start, shape, transposed)
        cut.check(key)

    def decoded(
        self, key: str, codes: str, table: str, scales: str, block: int, reason: str
    ) -> None:
        """Define the tensor `key`: 8-bit codes decoded by a table and scales, which are names of
        stored tensors. The inventory gives the codes the reason of what is made of it.
        """
        parts = self.array(codes), self.array(table), self.array(scales)
        self._arrays[key] = decoded(*parts, block)
        for part in (table, scales):
            self._statuses[part] = "mapped", reason

    def array(self, key: str) -> Array:
        """The tensor called `key`: stored, cut out, decoded or put together."""
        if key not in self._arrays:
            tensor = self._slices.get(key)
            self._arrays[key] = (
                self._joined(key, tensor) if tensor else Stored(key, self.stored[key])
            )
        return self._arrays[key]

    def _joined(self, name: str, param: Consolidated) -> Array:
        return joined(name, param.layout, param.keys, [self.array(key) for key in param.keys])

    def slice(self, key: str, tensor: Consolidated, reason: str) -> None:
        """A tensor that one rank had in memory, made of stored ones; parameters are made of it
        by `key`.
        """
        self._slices[key] = tensor
        self._mapped(tensor.keys, reason)

    def _mapped(self, keys: Iterable[str], reason: str) -> None:
        for key in keys:
            if key not in self._slices:
                self._statuses[self._stored(key)] = "mapped", reason

    def _stored(self, key: str) -> str:
        """The name of the stored tensor that a tensor is, lies in, or has its codes in."""
        array = self.array(key)
        while not isinstance(array, Stored):
            assert isinstance(array, Cut | Computed), "slices are made of these"
            array = array.whole if isinstance(array, Cut) else array.inputs["codes"]
        return array.item

    def constant(self, state: str, name: str, value: np.ndarray, where: str) -> None:
        """One state of a parameter that is no tensor in the file; `where` is `file:item`. Raises
        as `parameter`.
        """
        self._constants[self._new(state, name)] = Constant(value, where)

    def _new(self, state: str, name: str) -> TreePath:
        path = Key("dict", state), Key("dict", name)
        if path in self.params or path in self._constants:
            known = self.params.get(path)
            where = known.keys[0] if known else self._constants[path].where
            raise FormatError(f"{self.path}: {state} of {name} is stored twice, in {where} too")
        return path

    def duplicate(
        self,
        state: str,
        name: str,
        duplicate: str | Consolidated,
        reason: str,
        cause: str = "",
        near: bool = False,
    ) -> None:
        """Stored tensors that must be a state of a parameter, rounded to their dtype; `verify`
        compares them, and says what is the likely `cause` where they differ.

        One tensor that is the whole of it is named by its key. With `near` both were rounded, each
        in its way.
        """
        key = duplicate if isinstance(duplicate, str) else f"copy {len(self._duplicates)} of {name}"
        if isinstance(duplicate, Consolidated):
            self._slices[key] = duplicate
        stored = list(self._stored_keys([key]))
        self._duplicates.append(
            _StoredTwice(
                (Key("dict", state), Key("dict", name)),
                key,
                ", ".join(dict.fromkeys(stored)),
                cause=cause,
                near=near,
            )
        )
        for name_in_file in stored:
            self._statuses.setdefault(name_in_file, ("skipped", reason))

    def slice_duplicate(
        self, whole: str, key: str, reason: str, at: Sequence[int] = (), cause: str = ""
    ) -> None:
        """A stored tensor that must be the slice `whole`, or what it has at the leading indices
        `at`, rounded; `cause` as in `duplicate`.
        """
        self._duplicates.append(_StoredTwice(whole, key, key, tuple(at), cause))
        self._statuses[key] = "skipped", reason

    def prove_place(
        self,
        name: str,
        master: Consolidated,
        weight: Consolidated,
        cause: str,
        near: bool = False,
    ) -> None:
        """A parameter whose states lie where they are thought to only if its master is its weight:
        a sample of that is compared whatever the user says of conflicts.
        """
        self._places.append((name, master, weight, cause, near))

    def mean(self, state: str, name: str, keys: Sequence[str]) -> None:
        """Stored tensors of which a state of a parameter is the mean, before they were rounded;
        `verify` looks.
        """
        self._means.append(((Key("dict", state), Key("dict", name)), keys))

    def extra(self, file: str, name: str, value: Any, source: ArraySource | None = None) -> None:
        """Something beside the arrays, kept as JSON, with the tensors in it: those of `source`, if
        it has its own.

        What holds more of them than a setting does is left out, with a note.
        """
        stored_in = file if source is None else f"{file}:{name}"
        if refusal := self._mentioned.refusal(stored_in, value):
            self._leave_out(file, name, value, refusal)
            return

        def read(key: str, box: Box) -> np.ndarray:
            if source is not None:
                return source.read(key.removeprefix(f"{file}:"), box)
            self._statuses[key] = "extra", f"in the extra {name}"
            return self.shards.read(key, box)

        self.extras.setdefault(file, {})[name] = as_json(value, file, read)
        if f"{file}:{name}" not in self._statuses:
            self._items.append(
                Item(f"{file}:{name}", type(value).__name__, "extra", "kept as JSON")
            )

    def companion(self, file: FilePath, reason: str) -> None:
        """A file that goes with the model, whose bytes are kept under its name in the folder."""
        self.companions[file.key] = file
        self._items.append(Item(file.key, "file", "extra", reason))

    def _leave_out(self, file: str, name: str, value: Any, reason: str) -> None:
        self.skip(f"{file}:{name}", type(value).__name__, reason)
        for key in [
            f"{file}:{node.key}" for _, node in walk(value) if isinstance(node, StoredTensor)
        ]:
            if key in self.stored:
                self._statuses.setdefault(key, ("skipped", reason))
        self.notes.append(f"{name} in {file} was left out: {reason}")

    def hyperparameters(self, name: str, settings: Mapping[str, Any]) -> None:
        """What the trainer's optimizer was told for a parameter. Raises FormatError where two
        files differ in it.
        """
        known = self._settings[name]
        for key, value in plain_settings(settings).items():
            if known.setdefault(key, value) != value:
                raise FormatError(
                    f"{self.path}: for {name} some param_groups have {key}={known[key]}, others"
                    f" {value}: they are of different steps or runs, or of two optimizers that"
                    " share the parameter. weights_only leaves the optimizer aside"
                )

    def placed(
        self,
        tensors: Mapping[str, state_pairing.Stored],
        objects: Mapping[Steps, Any],
        options: Options,
        words: Callable[[], Sequence[str] | None] | None = None,
    ) -> Places:
        """The place of each tensor of nested dicts, as `places` has it; what optimizers were told,
        and the user's word, are kept.

        Raises FormatError where that word does not fit.
        """
        try:
            result = places(tensors, objects, options, words)
        except Undecided as error:
            raise FormatError(f"{self.path}: optimizer_groups does not fit: {error}") from None
        except UnknownModel as error:
            raise FormatError(f"{self.path}: {error}") from None
        if result.said is not None:
            self.said["optimizer_groups"] = result.said
        if options.model is not None:
            self.said["model"] = options.model
        for name, settings in result.settings:
            self.hyperparameters(name, settings)
        return result

    def skip(self, where: str, what: str, reason: str) -> None:
        """Something that is stored and has no place in the tree."""
        if where in self.stored:
            self._statuses[where] = self._skipped.setdefault(reason, ("skipped", reason))
        else:
            self._items.append(Item(where, what, "skipped", reason))

    def leave(self, where: str, what: str, reason: str) -> None:
        """Something that was not asked for, and so is not read, not even to verify it."""
        self.skip(where, what, reason)
        self._left.add(where)

    def _require_text(self, keys: Iterable[Key]) -> None:
        """Raise FormatError for a name of a parameter or an extra that no file can hold."""
        extras = itertools.chain.from_iterable(self.extras.values())
        for name in {*map(str, keys), *extras}:
            if not is_encodable(name):
                raise FormatError(
                    f"{self.path} has the name {name!a:.80}, half of a surrogate pair in it, which"
                    " no file in UTF-8 can hold: rename it, and save it again"
                )

    def contents(self) -> Contents:
        """The checkpoint. Raises LayoutError where shards do not form a parameter."""
        self.notes += unknown_notes(self.unknown)
        self._settle_copies()
        paths = [*self.params, *self._constants]
        self._require_text(itertools.chain.from_iterable(paths))
        names = dict(zip(paths, leaf_names(paths), strict=True))
        for key in self._slices:
            self.array(key)
        params = {names[path]: self._joined(names[path], p) for path, p in self.params.items()}
        values = dict(params)
        for path, weight in self._weights.items():
            whole = self._joined(f"weight of {names[path]}", weight)
            values[names[path]] = masters(params[names[path]], whole)
        values |= {names[path]: constant for path, constant in self._constants.items()}
        reader = Reader(self.shards)
        arrays = Evaluated(reader, values)
        views = _Views(reader, Evaluated(reader, params), names)
        return Contents(
            self.format,
            str(self.path),
            _leaves(names, arrays.arrays()),
            arrays,
            inventory=list(self._inventory()),
            extras=self.extras,
            groups=groups_of(dict(filter(self._is_of_parameter, self._settings.items()))),
            notes=self.notes,
            source=(
                {"format": self.format, "name": self.path.name, **self.said} if self.said else {}
            ),
            checks=partial(self._checks, views),
            quantized=self.quantized,
            about=self.about,
            companions=self.companions,
        )

    def _settle_copies(self) -> None:
        """Decide which copies are compared: all of them, or, with `on_conflict`, none."""
        self._join_copies()
        if self.on_conflict != "copy":
            self._refuse_false_masters()
        if not self.on_conflict:
            return
        if self._duplicates or any(map(_replicated, self.params.values())):
            self._settle_conflicts()
        else:
            self.notes.append(NOTHING_TWICE.format(self.on_conflict))

    def _checks(self, views: _Views, extent: Extent) -> Iterator[Check]:
        """The proofs of all leaves."""
        resting, parts = self._resting(views.names), self._compared(views.reader)
        yield from passed_on(self._shard_checks(extent), resting)
        if not self.on_conflict:
            yield from self._replica_checks(views, resting, extent)
        for duplicate in self._duplicates:
            proof = self._proof(duplicate, views, parts)
            stored = proof.key if proof.key in resting else self._stored(proof.key)
            yield proof.check(resting[stored], extent)
        for name, master, weight, cause, near in self._places:
            masters, weights = self.view({name: master}), self.view({name: weight})
            at = weight.keys[0]
            place = Duplicate(name, masters, name, weights, name, (), at, cause, near)
            of_parameter = views.names[Key("dict", "param"), Key("dict", name)]
            yield place.check(resting[of_parameter], "sample")
        for path in self._weights:
            name = views.names[path]
            if self.dtype(self.params[path]).itemsize > 2:
                proof = WholeNumbers(_label(path), views.params, name)
                yield proof.check(resting[name], extent)
        for path, keys in self._means if not self.on_conflict else ():
            name = views.names[path]
            stored = ", ".join(dict.fromkeys(self._stored_keys(self.params[path].keys)))
            mean = Mean(_label(path), views.params, name, parts, keys, stored)
            yield mean.check(resting[name], extent)

    def _compared(self, reader: Reader) -> Evaluated:
        """The second copies, and the slices and stored tensors that they are copies of."""
        keys = {key for _, copies in self._means for key in copies}
        for duplicate in self._duplicates:
            keys |= {key for key in (duplicate.key, duplicate.of) if isinstance(key, str)}
        return Evaluated(reader, {key: self.array(key) for key in sorted(keys)})

    def _proof(self, duplicate: _StoredTwice, views: _Views, parts: Evaluated) -> Duplicate:
        """What compares a second copy with a parameter or a slice."""
        is_part = isinstance(duplicate.of, str)
        return Duplicate(
            _label(duplicate.of),
            parts if is_part else views.params,
            duplicate.of if isinstance(duplicate.of, str) else views.names[duplicate.of],
            parts,
            duplicate.key,
            duplicate.at,
            duplicate.stored,
            duplicate.cause or self.cause,
            duplicate.near,
        )

    def _shard_checks(self, extent: Extent) -> Iterator[Check]:
        """The checks that the files have of themselves, but for tensors that were not asked for."""
        left = {key for key in self._left if self._statuses[key][0] == "skipped"}
        for check in self.shards.checks(extent):
            if not check.leaves or not check.leaves <= left:
                yield check

    def _replica_checks(
        self, views: _Views, resting: Mapping[str, frozenset[str]], extent: Extent
    ) -> Iterator[Check]:
        """That replicas are equal: once for parameters of the same tensors, as the steps of a
        group are.
        """
        paths_by_tensors: dict[tuple[object, ...], list[TreePath]] = defaultdict(list)
        for path, param in self.params.items():
            if _replicated(param):
                paths_by_tensors[(*param.keys, param.layout.fragments)].append(path)
        for paths in paths_by_tensors.values():
            first = views.names[paths[0]]
            leaves = _union([resting[views.names[path]] for path in paths])
            yield Replicas(_label(paths[0]), views.params, first).check(leaves, extent)

    def _resting(self, names: Mapping[TreePath, str]) -> dict[str, frozenset[str]]:
        """By the name of a leaf, slice or stored tensor, the leaves that rest on it.

        The states of a parameter rest on the parameter too: they were stored with it, and most have
        no copy.
        """
        states: dict[str, list[str]] = defaultdict(list)
        for path, name in names.items():
            states[str(path[-1])].append(name)
        all_of = {parameter: frozenset(leaves) for parameter, leaves in states.items()}
        resting: dict[str, list[frozenset[str]]] = defaultdict(list)
        for path, name in names.items():
            leaves = all_of[str(path[-1])] if str(path[0]) == "param" else frozenset([name])
            keys = [
                *(self.params[path].keys if path in self.params else ()),
                *(self._weights[path].keys if path in self._weights else ()),
            ]
            for key in (name, *self._keys_below(keys)):
                resting[key].append(leaves)
        return {key: _union(leaves) for key, leaves in resting.items()}

    def _keys_below(self, keys: Iterable[str]) -> Iterator[str]:
        """Keys, those that they are made of, and the stored tensors that these lie in."""
        for key in keys:
            yield key
            if key in self._slices:
                yield from self._keys_below(self._slices[key].keys)
            elif not isinstance(array := self.array(key), Stored):
                yield from (inner.item for inner in stored(array))

    def _is_of_parameter(self, settings: tuple[str, dict[str, Any]]) -> bool:
        return (Key("dict", "param"), Key("dict", settings[0])) in self.params

    def view(self, params: Mapping[str, Consolidated]) -> Evaluated:
        """Arrays made of what this import has heard of so far."""
        values = {name: self._joined(name, param) for name, param in params.items()}
        return Evaluated(Reader(self.shards), values)

    def _join_copies(self) -> None:
        """A copy of a copy, as ZeRO-0's module has of a tied weight whose other name has the
        master, is one of both.
        """
        wholes = {duplicate.key: duplicate.of for duplicate in self._duplicates if not duplicate.at}

        def first(whole: str | TreePath) -> str | TreePath:
            while isinstance(whole, str) and whole in wholes:
                whole = wholes[whole]
            return whole

        self._duplicates = [
            replace(duplicate, of=first(duplicate.of)) for duplicate in self._duplicates
        ]

    def _refuse_false_masters(self) -> None:
        """A master has more digits than its copy, or as many: an integer, or what is narrower,
        is none.
        """
        for duplicate in self._duplicates:
            whole = (
                duplicate.of if isinstance(duplicate.of, str) else self.params[duplicate.of].keys[0]
            )
            master, copy = (next(self._stored_keys([key])) for key in (whole, duplicate.key))
            dtype, narrow = self.stored[master].dtype, self.stored[copy].dtype
            if not holds_every(dtype, narrow):
                raise FormatError(
                    f"{self.path}: {_label(duplicate.of)} at {master} has dtype {dtype}, which"
                    f" cannot be a master of the {narrow} at {copy}: {self.cause or _NO_MASTER}"
                )

    def _settle_conflicts(self) -> None:
        """Take the copies for the parameters, if they are taken; compare nothing."""
        note = f"what is stored twice was not compared: the {self.on_conflict} is taken, as asked"
        if self.on_conflict == "copy":
            note += f"; {self._take_copies()} parameters are their copies, the others have none"
        self._duplicates = []
        self.notes.append(note)

    def _take_copies(self) -> int:
        """Put copies in the place of parameters that have one of all of them; returns how many."""
        copy_of = {
            duplicate.of: duplicate.key
            for duplicate in reversed(self._duplicates)
            if not duplicate.at
        }
        copies: dict[TreePath, Consolidated] = {}
        for path, param in self.params.items():
            if path in copy_of:
                key = copy_of[path]
                copies[path] = Consolidated(Unique().join([self._shape(key)]), [key])
            elif all(key in copy_of for key in param.keys):
                copies[path] = Consolidated(param.layout, [copy_of[key] for key in param.keys])
        for path, copy in copies.items():
            self._take(path, copy)
        return len(copies)

    def _take(self, path: TreePath, copy: Consolidated) -> None:
        for key in self._stored_keys(self.params[path].keys):
            self._statuses[key] = (
                "skipped",
                "a master that is not taken: its copy is taken, as asked",
            )
        self.params[path] = copy
        for key in self._stored_keys(copy.keys):
            self._statuses[key] = "mapped", f"the copy of {path[-1]}, which is taken, as asked"

    def _stored_keys(self, keys: Iterable[str]) -> Iterator[str]:
        for key in keys:
            if key in self._slices:
                yield from self._stored_keys(self._slices[key].keys)
            else:
                yield self._stored(key)

    def _shape(self, key: str) -> tuple[int, ...]:
        return self.array(key).info.shape

    def _inventory(self) -> Iterator[Item]:
        for key, info in self.stored.items():
            status, reason = self._statuses.get(key, ("skipped", "not understood"))
            yield Item(key, _type_of(info), status, reason)
        yield from self._items


@dataclass(frozen=True)
class _Views:
    """The parameters by the names of their leaves, and what reads them."""

    reader: Reader
    params: Evaluated
    names: Mapping[TreePath, str]


@dataclass(frozen=True)
class _StoredTwice:
    """A second copy: `key` is what the parameter or slice `of` has at the leading indices `at`;
    `stored` says where.
    """

    of: TreePath | str
    key: str
    stored: str
    at: tuple[int, ...] = ()
    cause: str = ""
    near: bool = False


@lru_cache
def _type_of(info: ArrayInfo) -> str:
    """The dtype and the shape of a stored array, for people."""
    return f"{info.dtype} {list(info.shape)}"


def _leaves(names: Mapping[TreePath, str], infos: Mapping[str, ArrayInfo]) -> list[Leaf]:
    leaves: list[Leaf] = []
    for path, name in names.items():
        info = infos[name]
        leaves.append(Leaf(path, name, "array", info.shape, info.dtype.name))
    return leaves


def _union(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    return sets[0] if len(sets) == 1 else frozenset().union(*sets)


def touched(layout: ParamLayout) -> tuple[ParamLayout, list[int]]:
    """The layout with only those shards that hold a part of the parameter, and which they are."""
    used = sorted({fragment.shard for fragment in layout.fragments}) or [0]
    if len(used) == len(layout.shards):
        return layout, used
    place = {shard: i for i, shard in enumerate(used)}
    fragments = tuple([replace(f, shard=place[f.shard]) for f in layout.fragments])
    shards = tuple([layout.shards[i] for i in used])
    return replace(layout, shards=shards, fragments=fragments), used


def _label(path: str | Iterable[Key]) -> str:
    return path if isinstance(path, str) else "/".join(map(str, path))


def _replicated(param: Consolidated) -> bool:
    layout = param.layout
    return (
        len(layout.fragments) > 1
        and len(layout.replicas) < len(layout.fragments)
        and not layout.averaged
    )
