"""The last step of every importer: parameters, what is stored twice, and an account of the rest."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from jax_ucp.arrays.checks import Claims, LeafClaim, passed_on
from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import About, Contents, Item, QuantizedWeight, Status
from jax_ucp.arrays.dtypes import holds_every
from jax_ucp.arrays.evaluate import Evaluated
from jax_ucp.arrays.optimizer_groups import groups_of, plain_settings
from jax_ucp.arrays.proof import Duplicate, Mean, Replicas, SampleOnly
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource
from jax_ucp.arrays.remainders import WholeNumbers, masters
from jax_ucp.arrays.value import (
    Array,
    Constant,
    Joined,
    Stored,
    items_of,
    joined,
    label,
    nodes,
    start_of,
    stated,
)
from jax_ucp.codecs.json_values import MentionedTensors, as_json
from jax_ucp.codecs.tensor_names import StoredTensor
from jax_ucp.codecs.unpickle import each_node
from jax_ucp.errors import FormatError, UnsafePickle, naming
from jax_ucp.files.path import FilePath
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.options import NOTHING_TWICE, Options
from jax_ucp.states import state_pairing
from jax_ucp.states.optimizer_dicts import Steps
from jax_ucp.states.pairing import Undecided
from jax_ucp.states.state_paths import Places, UnknownModel, places
from jax_ucp.text import is_encodable, listed
from jax_ucp.tree import Key, Leaf, leaf_names
from jax_ucp.tree import Path as TreePath

_NAMES_SHOWN = 8
_NO_MASTER = (
    "TransformerEngine's precision-aware optimizer keeps the low 16 bits of each master in its"
    " place, or masters of less precision; they are not put together here. Open with weights_only"
    " for the weights of the model"
)


class ContentsBuilder:
    """Makes the `Contents` of a checkpoint; an importer says what each stored tensor is.

    `shards` has the stored tensors, named `file:item`. The tree is `{state: {parameter: array}}`.
    A stored tensor is mapped, kept as an extra, or skipped with a reason; the inventory has every
    other one as not understood. With `on_conflict`, what is stored twice is not compared: the
    `master` is the parameter, or the `copy` where there is one of all of it. `unknown` are names of
    classes in the files that are not known here, `quantized` the weights that are stored as codes,
    `ties` by parameter what is equal of two names of one tensor, `cause` the likely reason why
    copies differ, `said` the user's words that are part of the result, `settings` those of the
    optimizer by parameter.
    """

    def __init__(
        self, format: str, path: FilePath, shards: ArraySource, on_conflict: str | None = None
    ):
        self.format, self.path, self.shards, self.on_conflict = format, path, shards, on_conflict
        self.stored = shards.arrays()
        self.params: dict[TreePath, Array] = {}
        self.extras: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.quantized: list[QuantizedWeight] = []
        self.companions: dict[str, FilePath] = {}
        self.about = About()
        self.said: dict[str, Any] = {}
        self.unknown: set[str] = set()
        self.ties: dict[str, Hashable] = {}
        self.cause = ""
        self._arrays: dict[str, Stored] = {}
        self._twice: list[_Twice] = []
        self._places: list[tuple[str, Array, Array, str, bool]] = []
        self._means: list[tuple[TreePath, Sequence[str]]] = []
        self._weights: dict[TreePath, Array] = {}  # of a parameter that is remainders
        self._statuses: dict[str, tuple[Status, str]] = {}
        self._skipped: dict[str, tuple[Status, str]] = {}  # one tuple for each reason
        self._items: list[Item] = []
        self._left: set[str] = set()
        self._mentioned = MentionedTensors()
        self.settings: dict[str, dict[str, Any]] = defaultdict(dict)

    def add_files(self, files: Mapping[str, ArraySource]) -> None:
        """Add stored files, by name: their tensors are named `file:item` too."""
        sources = {f"{name}:": source for name, source in files.items()}
        self.shards = Combined.prefixed({"": self.shards, **sources})
        self.stored = self.shards.arrays()

    # Arrays.

    def array(self, key: str) -> Array:
        """The stored tensor of this name."""
        if key not in self._arrays:
            self._arrays[key] = Stored(self.shards, key, self.stored[key])
        return self._arrays[key]

    def joined(self, name: str, layout: ParamLayout, keys: Sequence[str]) -> Array:
        """The array `name`, whose shards are the stored tensors `keys`. Raises LayoutError if their
        shapes or dtypes do not fit the layout.
        """
        with naming(self.path):
            return joined(name, layout, list(map(self.array, keys)))

    # The tree.

    def parameter(self, state: str, name: str, param: Array, reason: str = "") -> None:
        """Add one state of a parameter. Its stored tensors are mapped, with the reason if there is
        one. Raises FormatError if the state is there already.
        """
        path = _path(state, name)
        if path in self.params:
            known = self.params[path]
            where = label(known)
            raise FormatError(f"{self.path}: {state} of {name} is stored twice, in {where} too")
        self.params[path] = param
        if reason:
            self.mapped([param], reason)

    def take(self, state: str, name: str) -> None:
        """Remove a state of a parameter; another one is to take its place."""
        del self.params[_path(state, name)]

    def constant(self, state: str, name: str, value: np.ndarray, where: str) -> None:
        """Add one state of a parameter that is not a tensor in the file; `where` is `file:item`.
        Raises as `parameter`.
        """
        self.parameter(state, name, stated(value, where))

    def remainders(self, name: str, low: Array, weight: Array, reason: str) -> None:
        """Add a parameter of which the low 16 bits are stored, perhaps widened, beside the bfloat16
        weight (see `arrays.remainders`). Raises as `parameter`.
        """
        self.parameter("param", name, low, reason)
        self._weights[_path("param", name)] = weight
        self.mapped([weight], reason)

    def place(
        self, places: Places, label: str, keys: Sequence[str], layout: ParamLayout, shards: str = ""
    ) -> None:
        """Add the tensor `label` of nested dicts where `places` has it, or leave it out if it was
        not asked for. `shards` are words on how it is stored. Raises as `joined` and `parameter`.
        """
        state, name = places.at[label]
        reason = f"{state} of {name}"
        if label in places.left:
            for key in keys:
                self.leave(key, "", f"{reason}: only weights were asked for")
            return
        if state == "other":
            reason = "a tensor beside the model"
        self.parameter(state, name, self.joined(f"{state}.{name}", layout, keys), reason + shards)

    def mapped(self, arrays: Iterable[Array], reason: str) -> None:
        """The stored tensors of these arrays are parts of parameters."""
        for item in itertools.chain.from_iterable(map(items_of, arrays)):
            self._statuses[item] = "mapped", reason

    # What is stored twice.

    def duplicate(
        self,
        state: str,
        name: str,
        copy: Array,
        reason: str,
        cause: str = "",
        near: bool = False,
    ) -> None:
        """An array must be a state of a parameter, rounded to its dtype; `verify` compares them,
        and says what is the likely `cause` where they differ. With `near` both were rounded, each
        in its way.
        """
        path = _path(state, name)
        self._add_twice(_Twice(path, _label(path), copy, (), cause, near), reason)

    def slice_duplicate(
        self,
        whole: Array,
        label: str,
        copy: Array,
        reason: str = "",
        at: Sequence[int] = (),
        cause: str = "",
    ) -> None:
        """An array must be the slice `whole`, called `label`, or what that has at the leading
        indices `at`, rounded; `cause` as in `duplicate`. Without a reason its status stays.
        """
        self._add_twice(_Twice(whole, label, copy, tuple(at), cause), reason)

    def _add_twice(self, twice: _Twice, reason: str) -> None:
        self._twice.append(twice)
        for item in items_of(twice.copy) if reason else ():
            self._statuses.setdefault(item, ("skipped", reason))

    def prove_place(
        self, name: str, master: Array, weight: Array, cause: str, near: bool = False
    ) -> None:
        """The states of a parameter are only where they are thought to be if its master is its
        weight: a sample of that is compared whatever the user says of conflicts.
        """
        self._places.append((name, master, weight, cause, near))

    def mean(self, state: str, name: str, keys: Sequence[str]) -> None:
        """A state of a parameter is the mean of stored tensors, before they were rounded; `verify`
        compares them.
        """
        self._means.append((_path(state, name), keys))

    # What is beside the tree.

    def extra(
        self, file: str, name: str, value: Any, source: ArraySource | None = None, above: str = ""
    ) -> None:
        """Keep a value beside the arrays as JSON, with the tensors in it: those of `source`, if it
        has its own. `above` is where in the file it has its name, if not beside the tensors.

        A value with more of them than a setting has is left out, with a note.
        """
        place = f"{file}:{above}{name}"
        if refusal := self._mentioned.refusal(file if source is None else place, value):
            self.skip(place, type(value).__name__, refusal)
            tensors = [node for node in each_node(value) if isinstance(node, StoredTensor)]
            for key in (f"{file}:{tensor.key}" for tensor in tensors):
                if key in self.stored:
                    self._statuses.setdefault(key, ("skipped", refusal))
            self.notes.append(f"{name} in {file} was left out: {refusal}")
            return

        def read(key: str, box: Box) -> np.ndarray:
            if source is not None:
                return source.read(key.removeprefix(f"{file}:"), box)
            self._statuses[key] = "extra", f"in the extra {name}"
            return self.shards.read(key, box)

        self.extras.setdefault(file, {})[name] = as_json(value, file, read)
        if place not in self._statuses:
            self._items.append(Item(place, type(value).__name__, "extra", "kept as JSON"))

    def companion(self, file: FilePath, reason: str) -> None:
        """Keep the bytes of a file that goes with the model, under its name in the folder."""
        self.companions[file.key] = file
        self._items.append(Item(file.key, "file", "extra", reason))

    def hyperparameters(self, name: str, settings: Mapping[str, Any]) -> None:
        """Add the settings that the trainer's optimizer has for a parameter. Raises FormatError
        where two files differ in them.
        """
        known = self.settings[name]
        for key, value in plain_settings(settings).items():
            if known.setdefault(key, value) != value:
                raise FormatError(
                    f"{self.path}: for {name} some param_groups have {key}={known[key]}, others"
                    f" {value}: they are of different steps or runs, or of two optimizers that"
                    " share the parameter. weights_only leaves the optimizer aside"
                )

    def placed(
        self,
        tensors: Mapping[str, state_pairing.StateTensor],
        objects: Mapping[Steps, Any],
        options: Options,
        orders: state_pairing.ModelOrders | None = None,
        stored: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> Places:
        """The places of tensors of nested dicts. What the user said is noted in `said`, and
        optimizers' settings for the weights `stored[parameter]` of each parameter, or for itself.

        Raises FormatError where `optimizer_groups` or `model` does not fit, or settings differ.
        """
        try:
            result = places(tensors, objects, options, orders)
        except Undecided as error:
            raise FormatError(f"{self.path}: optimizer_groups does not fit: {error}") from None
        except UnknownModel as error:
            raise FormatError(f"{self.path}: {error}") from None
        if result.said is not None:
            self.said["optimizer_groups"] = result.said
        if options.model is not None:
            self.said["model"] = options.model
        for name, settings in result.settings:
            for one in stored.get(name, [name]):
                self.hyperparameters(one, settings)
        return result

    def skip(self, where: str, what: str, reason: str) -> None:
        """Skip something that is stored and has no place in the tree."""
        if where in self.stored:
            self._statuses[where] = self._skipped.setdefault(reason, ("skipped", reason))
        else:
            self._items.append(Item(where, what, "skipped", reason))

    def leave(self, where: str, what: str, reason: str) -> None:
        """Skip something that was not asked for: it is not read, not even to verify it."""
        self.skip(where, what, reason)
        self._left.add(where)

    def leave_out(self, where: str, what: str, error: UnsafePickle) -> None:
        """Skip an object whose pickle asks for more than data, with a note on `what` it is."""
        self.skip(where, "object", f"not read, because it asks for more than data: {error}")
        self.notes.append(f"{what} was left out: {error}")

    # The result.

    def contents(self) -> Contents:
        """The checkpoint."""
        if self.unknown:
            self.notes.append(
                "the files name classes that are not known here:"
                f" {listed(sorted(self.unknown), _NAMES_SHOWN)}. Nothing was imported; their"
                " objects are kept closed, as extras, and decide nothing"
            )
        self._settle_copies()
        paths = sorted(self.params, key=lambda path: isinstance(self.params[path], Constant))
        names = dict(zip(paths, leaf_names(paths), strict=True))
        keys = map(str, itertools.chain.from_iterable(self.params))
        for name in {*keys, *itertools.chain.from_iterable(self.extras.values())}:
            if not is_encodable(name):
                raise FormatError(
                    f"{self.path} has the name {name!a:.80}, half of a surrogate pair in it, which"
                    " no file in UTF-8 can hold: rename it, and save it again"
                )
        params = {name: self.params[path] for path, name in names.items()}
        weights = {names[path]: weight for path, weight in self._weights.items()}
        values = params | {name: masters(params[name], weights[name]) for name in weights}
        settings = {name: of for name, of in self.settings.items() if _path("param", name) in names}
        infos = {name: array.info for name, array in values.items()}
        leaves = [
            Leaf(path, name, "array", infos[name].shape, infos[name].dtype.name)
            for path, name in names.items()
        ]
        unknown = "skipped", "not understood"
        items = [
            Item(key, _type_of(info), *self._statuses.get(key, unknown))
            for key, info in self.stored.items()
        ]
        return Contents(
            self.format,
            str(self.path),
            leaves,
            Evaluated(values),
            inventory=[*items, *self._items],
            extras=self.extras,
            groups=groups_of(settings),
            notes=self.notes,
            source=(
                {"format": self.format, "name": self.path.name, **self.said} if self.said else {}
            ),
            claims=Claims(partial(self._claims, names)),
            quantized=self.quantized,
            about=self.about,
            companions=self.companions,
        )

    def _settle_copies(self) -> None:
        """Decide which copies are compared: all of them, or, with `on_conflict`, none.

        Raises FormatError for a master of fewer digits than its copy, or for an integer.
        """
        # A copy of a copy, as ZeRO-0's module has of a tied weight whose other name has the master,
        # is a copy of the first whole.
        by_copy: dict[Any, _Twice] = {twice.copy: twice for twice in self._twice if not twice.at}
        for i, twice in enumerate(self._twice):
            first = twice
            while first.of in by_copy:
                first = by_copy[first.of]
            if first is not twice:
                self._twice[i] = replace(twice, of=first.of, label=first.label)
        for twice in self._twice if self.on_conflict != "copy" else ():
            master, copy = (next(items_of(array)) for array in (self._whole(twice), twice.copy))
            dtype, narrow = self.stored[master].dtype, self.stored[copy].dtype
            if not holds_every(dtype, narrow):
                raise FormatError(
                    f"{self.path}: {twice.label} at {master} has dtype {dtype}, which cannot be a"
                    f" master of the {narrow} at {copy}: {self.cause or _NO_MASTER}"
                )
        if not self.on_conflict:
            return
        if not self._twice and not any(map(_is_replicated, self.params.values())):
            self.notes.append(NOTHING_TWICE.format(self.on_conflict))
            return
        note = f"what is stored twice was not compared: the {self.on_conflict} is taken, as asked"
        if self.on_conflict == "copy":
            note += f"; {self._take_copies()} parameters are their copies, the others have none"
        self._twice = []
        self.notes.append(note)

    def _whole(self, twice: _Twice) -> Array:
        return self.params[twice.of] if isinstance(twice.of, tuple) else twice.of

    def _take_copies(self) -> int:
        """Replace the parameters that have a copy of all of them; returns how many."""
        twice = [twice for twice in reversed(self._twice) if not twice.at]
        copy_of: dict[Array | TreePath, Array] = {one.of: one.copy for one in twice}
        copies: dict[TreePath, Array] = {}
        for path, param in self.params.items():
            if copy := copy_of.get(path, copy_of.get(param)):
                copies[path] = copy
            elif isinstance(param, Joined) and all(part in copy_of for part in param.inputs):
                parts = [copy_of[part] for part in param.inputs]
                copies[path] = joined(f"{path[0]}.{path[-1]}", param.layout, parts)
        for path, copy in copies.items():
            aside = "a master that is not taken: its copy is taken, as asked"
            for item in items_of(self.params[path]):
                self._statuses[item] = "skipped", aside
            self.params[path] = copy
            self.mapped([copy], f"the copy of {path[-1]}, which is taken, as asked")
        return len(copies)

    def _claims(self, names: Mapping[TreePath, str]) -> Iterator[LeafClaim]:
        """The claims about all leaves, which have these names."""
        resting = self._resting(names)
        # What files state of themselves, but for tensors that were not asked for.
        left = {key for key in self._left if self._statuses[key][0] == "skipped"}
        claims = self.shards.claims()
        of_files = (one for one in claims if not one.leaves or not one.leaves <= left)
        yield from passed_on(of_files, resting)
        # That replicas are equal: once for parameters of the same tensors, as the steps of a group
        # are.
        replicated: dict[Hashable, list[TreePath]] = defaultdict(list)
        for path, param in self.params.items() if not self.on_conflict else ():
            if isinstance(param, Joined) and _is_replicated(param):
                replicated[param.inputs, param.layout.parts].append(path)
        for paths in replicated.values():
            leaves = _union([resting[names[path]] for path in paths])
            yield LeafClaim(Replicas(_label(paths[0]), self.params[paths[0]]), leaves)
        for one in self._twice:
            whole = self._whole(one)
            leaves = resting.get(_node(whole)) or resting[next(items_of(whole))]
            if isinstance(one.of, tuple):
                leaves = resting[names[one.of]]
            at, cause = _where(one.copy), one.cause or self.cause
            yield LeafClaim(
                Duplicate(one.label, whole, one.copy, one.at, at, cause, one.near), leaves
            )
        for name, master, weight, cause, near in self._places:
            place = Duplicate(name, master, weight, (), next(items_of(weight)), cause, near)
            yield LeafClaim(SampleOnly(place), resting[names[_path("param", name)]])
        for path in self._weights:
            if self.params[path].info.dtype.itemsize > 2:
                yield LeafClaim(WholeNumbers(_label(path), self.params[path]), resting[names[path]])
        for path, keys in self._means if not self.on_conflict else ():
            whole, copies = self.params[path], {key: self.array(key) for key in keys}
            yield LeafClaim(Mean(_label(path), whole, copies, _where(whole)), resting[names[path]])

    def _resting(self, names: Mapping[TreePath, str]) -> dict[Any, frozenset[str]]:
        """The leaves that rest on a leaf or a stored tensor, by its name, or on another array.

        The states of a parameter rest on the parameter too: they were stored with it, and most have
        no copy.
        """
        states: dict[str, list[str]] = defaultdict(list)
        for path, name in names.items():
            states[str(path[-1])].append(name)
        all_of = {parameter: frozenset(leaves) for parameter, leaves in states.items()}
        resting: dict[Any, list[frozenset[str]]] = defaultdict(list)
        for path, name in names.items():
            leaves = all_of[str(path[-1])] if str(path[0]) == "param" else frozenset([name])
            resting[name].append(leaves)
            for array in filter(None, (self.params[path], self._weights.get(path))):
                for node in nodes(array):
                    resting[_node(node)].append(leaves)
        return {key: _union(leaves) for key, leaves in resting.items()}


@dataclass(frozen=True)
class _Twice:
    """A second copy: `copy` is what the parameter or slice `of`, called `label`, has at the leading
    indices `at`; `cause` and `near` as in `ContentsBuilder.duplicate`.
    """

    of: TreePath | Array
    label: str
    copy: Array
    at: tuple[int, ...] = ()
    cause: str = ""
    near: bool = False


@lru_cache
def _type_of(info: ArrayInfo) -> str:
    """The dtype and the shape of a stored array, for people."""
    return f"{info.dtype} {list(info.shape)}"


def _path(state: str, name: str) -> TreePath:
    return Key("dict", state), Key("dict", name)


def _label(path: TreePath) -> str:
    return "/".join(map(str, path))


def _node(array: Array) -> Any:
    """The key of an array: the name of a stored one, which may be there several times."""
    return array.item if isinstance(array, Stored) else array


def _where(array: Array) -> str:
    """The places in files that have an array, for people."""
    start = start_of(array)
    return ", ".join(dict.fromkeys(items_of(array))) + (f", from {start}" if start else "")


def _union(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    return sets[0] if len(sets) == 1 else frozenset().union(*sets)


def _is_replicated(param: Array) -> bool:
    layout = param.layout if isinstance(param, Joined) else None
    if layout is None or layout.averaged or len(layout.parts) == 1:
        return False
    return len(layout.replicas) < len(layout.parts)
