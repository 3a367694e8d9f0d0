"""The weights that the optimizers of a nested state dict belong to.

- Names: every state names a tensor of one dict, with a shape that fits. Where they fit two dicts (a
  copy of the model, another model of the same classes), nothing says whose optimizer it is.
- Numbers: `assign` decides, of all tensors that could be a parameter. Where the user's word decides
  (`optimizer_groups`), a second dict that fits as well must be excluded by full names, or by naming
  the model.

All states of an optimizer are mapped, or none.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_ucp.layout.fragments import Shape
from jax_ucp.options import (
    HF_DECAY,
    MODULE_ORDER,
    Lists,
    OptimizerGroups,
    SaidGroups,
    remedy,
    rule_of,
    said_of,
    word_note,
)
from jax_ucp.states.assign import Orders, Slot, SlotGroup, assign, deciding
from jax_ucp.states.optimizer_dicts import (
    OptimizerDict,
    Owner,
    Steps,
    dict_name,
    joined,
    prefixes,
)
from jax_ucp.states.pairing import Undecided, candidates_by_shape, contradiction

_WORD = re.compile(r"[^\W_]+")
_SHOWN_CLASSES = 4
NUMBERS = "they go by numbers, and nothing stored says which parameter has which number"
_Key = tuple[Steps, Owner]  # a parameter of an optimizer, at its path


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a nested dict. An optimizer owns `trainable` ones; tied ones have equal `tie`."""

    path: Steps
    shape: Shape = ()
    trainable: bool = True
    tie: Hashable = None


def is_trainable(dtype: np.dtype) -> bool:
    """Whether torch can compute gradients of this dtype: real or complex, of any precision."""
    return dtype.kind not in "biu"


@dataclass(frozen=True, slots=True)
class ModelDict:
    """The model dict, if decided; names of its tensors; notes; whether the user said it."""

    path: Steps | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    is_said: bool = False


@dataclass(frozen=True, slots=True)
class ModelOrders:
    """The orders of a model whose file may not have its order.

    `of(word)` are those in which the model may have its tensors; it raises Undecided. `words` are
    what the user can be offered, likeliest first: the first word of each rule that decides.
    """

    of: Callable[[str], Orders]
    words: Callable[[], Sequence[Sequence[str]] | None]


@dataclass
class Places:
    """The place of each tensor: `at[name]` is (state, parameter).

    `in_optimizers` are the tensors in an optimizer's dict, mapped or not; `left` are those of them
    that were not asked for. `settings` are pairs: a parameter's name, and its optimizer's settings.
    `said` is the user's word, if it was needed.
    """

    at: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    in_optimizers: Collection[str] = ()
    left: Collection[str] = ()
    settings: Sequence[tuple[str, Mapping[str, Any]]] = ()
    said: SaidGroups | None = None


def pair_states(
    tensors: Mapping[str, StateTensor],
    optimizers: Sequence[OptimizerDict],
    outside: Mapping[str, StateTensor],
    model: ModelDict,
    groups: OptimizerGroups | None,
    orders: ModelOrders | None = None,
) -> Places:
    """The places of all states that are mapped. `outside` are the tensors in no optimizer.

    `orders` are the model's. Raises Undecided if `groups`, the user's word, does not decide.
    """
    weights = _Weights(outside, model)
    orders = orders or ModelOrders(lambda word: {}, lambda: [[MODULE_ORDER]])
    pairing = _Pairing(tensors, optimizers, weights, orders)
    if not pairing.open_optimizers():
        return pairing.places(None)
    said = said_of(groups, list(model.weights.values()))
    match said:
        case None:
            pairing.by_proof()
        case str():
            pairing.in_order(said)
        case _:
            pairing.by_lists(said)
    return pairing.places(said)


class _Weights:
    """The tensors in no optimizer, by the dicts in which they lie; `model` is one of the dicts."""

    def __init__(self, tensors: Mapping[str, StateTensor], model: ModelDict):
        self.tensors, self.model = tensors, model
        # of each dict that holds tensors, at any depth, the tensor of each name from there
        self.dicts: dict[Steps, dict[str, str]] = defaultdict(dict)
        # of each name, the dicts that have it
        self.roots: dict[Owner, list[Steps]] = defaultdict(list)
        for tensor, stored in tensors.items():
            for root, name in names_by_dict(stored.path):
                self.dicts[root][name] = tensor
                self.roots[name].append(root)

    def model_path(self) -> Steps:
        if self.model.path is None:
            why = "nothing decides which dict is the model"
            raise Undecided(why if self.tensors else "there are no weights beside optimizers")
        return self.model.path

    def tie(self, tensor: str) -> Hashable:
        """A value that is equal for tensors that are names of one tensor."""
        tie = self.tensors[tensor].tie
        return tensor if tie is None else ("tie", tie)

    def are_same(self, tensors: Mapping[Any, str], others: Mapping[Any, str]) -> bool:
        """Whether each of these tensors is the one in `others` with the same key."""
        if not tensors.keys() <= others.keys():
            return False
        return all(self.tie(tensor) == self.tie(others[key]) for key, tensor in tensors.items())

    def params(self, aside: Collection[Hashable] = ()) -> dict[str, Shape]:
        """The shapes of what an optimizer could own; of tied tensors the model's, or the first."""
        trainable = [tensor for tensor, stored in self.tensors.items() if stored.trainable]
        first: dict[Hashable, str] = {}
        for tensor in sorted(trainable, key=lambda tensor: tensor not in self.model.weights):
            first.setdefault(self.tie(tensor), tensor)
        kept = {tensor for tie, tensor in first.items() if tie not in aside}
        return {tensor: self.tensors[tensor].shape for tensor in trainable if tensor in kept}

    def listed(self, names: Sequence[str]) -> dict[str, str]:
        """The tensor of each name that the user lists: all are names in the model, or all in the
        file. Raises Undecided where neither has all, or other dicts have them for other tensors.
        """
        model = self.model_path()
        in_model, in_file = self.dicts[model], dict(zip(names, names, strict=True))
        are_in_file = in_file.keys() <= self.tensors.keys()
        if unknown := [name for name in names if name not in in_model]:
            if are_in_file:
                return in_file
            lost = next((name for name in unknown if name not in self.tensors), unknown[0])
            first = ", ".join([*in_model][:3])
            raise Undecided(f"{lost} is not a parameter of the model, which has {first}, ...")
        tensors = {name: in_model[name] for name in names}
        if are_in_file and not self.are_same(tensors, in_file):
            raise Undecided(
                f"{next(iter(names))} can be read from the top of the file, and in the model"
            )
        if are_in_file or self.model.is_said:
            return tensors
        # dicts beside the model may have all these names for other tensors
        having = [root for root, inside in self.dicts.items() if tensors.keys() <= inside.keys()]
        rivals = [root for root in having if not self.are_same(tensors, self.dicts[root])]
        if rivals:
            raise Undecided(
                f"{_names([model, *rivals])} have these names; say which is meant:"
                f" {joined((*model, names[0]))}"
            )
        return tensors


class _Pairing:
    """The optimizers of one file; those with names are settled at once, others by a method."""

    def __init__(
        self,
        tensors: Mapping[str, StateTensor],
        optimizers: Sequence[OptimizerDict],
        weights: _Weights,
        orders: ModelOrders,
    ):
        self.tensors, self.weights, self.orders = tensors, weights, orders
        self.optimizers = {optimizer.path: optimizer for optimizer in optimizers}
        self.owned: dict[Steps, dict[Owner, str]] = {}
        self.apart: dict[Steps, str] = {}
        self.called_after_model: list[str] = []
        self.elsewhere: set[Steps] = set()  # those that are of tensors outside the model
        self.classes: Sequence[str] = ()
        for path, optimizer in self.optimizers.items():
            if not optimizer.numbered:
                try:
                    self.owned[path] = self._named(optimizer)
                except Undecided as error:
                    self.apart[path] = str(error)
        self._drop_shared()

    def _drop_shared(self) -> None:
        """Keep apart optimizers that have the same state of the same parameter."""
        optimizers: dict[tuple[str, str], set[Steps]] = defaultdict(set)
        for path in self.owned:
            for place in self._placed(path).values():
                optimizers[place].add(path)
        sharing = [paths for paths in optimizers.values() if len(paths) > 1]
        for path in set[Steps]().union(*sharing):
            del self.owned[path]
            self.apart[path] = "another optimizer has states of the same parameters"

    # Names.

    def _named(self, optimizer: OptimizerDict) -> dict[Owner, str]:
        """The tensors of the model that an optimizer with names is of. Raises Undecided."""
        model = self.weights.model_path()
        owned: dict[Owner, str] = {}
        misfit = ""
        try:
            owned = self._in_dict(optimizer, model)
        except Undecided as error:
            misfit = str(error)
        # Other dicts may have what the first state names, or else what the first group names.
        first_state = next(iter(optimizer.states.values()), ())
        owners: Sequence[Owner] = [owner for owner, _ in first_state]
        if not owners and optimizer.groups:
            owners = optimizer.groups[0].owners[:1]
        having = itertools.chain.from_iterable(self.weights.roots.get(name, ()) for name in owners)
        others: list[Steps] = []
        for root in dict.fromkeys(having):
            if root == model:
                continue
            try:
                names = self._in_dict(optimizer, root)
            except Undecided:
                continue
            if not self.weights.are_same(names, owned):
                others.append(root)
        if misfit and others:
            self.elsewhere.add(optimizer.path)
            raise Undecided(f"{misfit}; they fit {_names(others)}")
        if misfit:
            raise Undecided(misfit)
        if others and not self._is_called_after_model(optimizer, others):
            raise Undecided(
                f"their names and shapes fit {_names([model, *others])} alike, and nothing"
                " stored says whose they are"
            )
        return owned

    def _in_dict(self, optimizer: OptimizerDict, root: Steps) -> dict[Owner, str]:
        """The dict's tensor that each owner names. Raises Undecided if a shape does not fit."""
        names = self.weights.dicts[root]
        states = self._states(optimizer, names)
        if states.missing:
            if not any(optimizer.states[name] for name in states.missing):
                raise Undecided(NUMBERS)
            raise Undecided(
                f"{len(states.missing)} name no parameter of the model, the first"
                f" {states.missing[0]}"
            )
        for owner, shapes in states.shapes.items():
            shape = self.weights.tensors[names[str(owner)]].shape
            if state := contradiction(shapes, shape):
                raise Undecided(
                    f"{state} of {owner} has shape {list(shapes[state])}, but {owner} of the model"
                    f" has {list(shape)}"
                )
        listed = set(optimizer.listed())
        owners = listed & names.keys()
        with_state = [*states.shapes, *(owners - states.shapes.keys())]
        if not with_state or (not states.shapes and owners != listed):
            raise Undecided("none names a parameter of the model")
        return {owner: names[str(owner)] for owner in with_state}

    def _is_called_after_model(self, optimizer: OptimizerDict, others: Sequence[Steps]) -> bool:
        """Whether the optimizer's name has the chosen model's as a word, and no other dict's."""
        model = self.weights.model
        if not model.is_said or not model.path:
            return False
        words = set(_WORD.findall(joined(optimizer.path)))
        called = {str(root[-1]) for root in (model.path, *others) if root} & words
        if called != {str(model.path[-1])}:
            return False
        self.called_after_model.append(optimizer.name)
        return True

    def _states(self, optimizer: OptimizerDict, names: Collection[Owner] = ()) -> _States:
        """The states by owner: a number, or one of `names`, the longest of several."""
        states = _States()
        for name, readings in optimizer.states.items():
            numbered_or_named = (
                (owner, state)
                for owner, state in readings
                if isinstance(owner, int) or owner in names
            )
            reading = next(numbered_or_named, None)
            if reading is None:
                states.missing.append(name)
                continue
            owner, state = reading
            states.places[name] = reading
            states.shapes[owner][state] = self.tensors[name].shape
        return states

    # Numbers, and names that leave an optimizer apart.

    def open_optimizers(self) -> list[OptimizerDict]:
        """The optimizers with numbers, and those whose names do not decide."""
        return [o for o in self.optimizers.values() if o.states and o.path not in self.owned]

    def _numbered(self) -> list[OptimizerDict]:
        return [optimizer for optimizer in self.optimizers.values() if optimizer.numbered]

    def _slots(self, optimizer: OptimizerDict) -> dict[Owner, Slot[_Key]]:
        """The parameters of an optimizer: those that its groups list, then others with states."""
        listed = optimizer.listed()
        shapes = self._states(optimizer, listed).shapes
        return {
            owner: Slot(
                (optimizer.path, owner), shapes.get(owner, {}), f"{owner} in {optimizer.name}"
            )
            for owner in (*listed, *shapes)
        }

    def _slot_groups(self, optimizers: Iterable[OptimizerDict]) -> list[SlotGroup[_Key]]:
        """The groups of optimizers. Raises Undecided if a parameter in no group has states."""
        groups: list[SlotGroup[_Key]] = []
        for optimizer in optimizers:
            slots, listed = self._slots(optimizer), set(optimizer.listed())
            missing = self._states(optimizer, listed).missing
            strays = [*missing, *sorted(str(owner) for owner in slots if owner not in listed)]
            if strays:
                raise Undecided(
                    f"{optimizer.name} has states of what no group of it lists, the first"
                    f" {strays[0]}"
                )
            for i, owners in enumerate(optimizer.lists()):
                label = f"group {i} of {optimizer.name}"
                groups.append(SlotGroup(label, [slots[owner] for owner in owners]))
        return groups

    def _settle(self, optimizers: Iterable[OptimizerDict], names: Mapping[_Key, str]) -> None:
        """Record the tensors of optimizers, if all of those are the model's."""
        owned: dict[Steps, dict[Owner, str]] = defaultdict(dict)
        for (path, owner), tensor in names.items():
            owned[path][owner] = tensor
        for optimizer in optimizers:
            path, tensors = optimizer.path, owned[optimizer.path]
            strays = [
                tensor for tensor in tensors.values() if tensor not in self.weights.model.weights
            ]
            if strays:
                self.elsewhere.add(path)
                self.apart[path] = f"they are of {strays[0]}, which is not a parameter of the model"
            else:
                self.owned[path] = tensors
                self.apart.pop(path, None)

    def by_proof(self) -> None:
        """Settle numbered optimizers by shapes, if those leave one arrangement of all tensors."""
        optimizers = self._numbered()
        slots = [slot for o in optimizers for slot in self._slots(o).values()]
        owned = itertools.chain.from_iterable(names.values() for names in self.owned.values())
        free = self.weights.params(aside=set(map(self.weights.tie, owned)))
        try:
            self.weights.model_path()
            names = assign([SlotGroup("", slots)], free, None).names
        except Undecided as error:
            self.apart |= {optimizer.path: f"{NUMBERS} ({error})" for optimizer in optimizers}
        else:
            self._settle(optimizers, names)

    def in_order(self, word: str) -> None:
        """Settle numbered optimizers by the user's word that groups are in the model's order."""
        self.weights.model_path()
        orders = self.orders.of(word)
        if self.weights.model.is_said:
            # the one optimizer that can be of the model that the user names
            fits: dict[Steps, Mapping[_Key, str]] = {}
            why: list[str] = []
            for optimizer in self.open_optimizers():
                try:
                    fits[optimizer.path] = self._ordered([optimizer], word, orders)
                except Undecided as error:
                    why.append(f"of {optimizer.name} {error}")
            if len(fits) != 1:
                several = f"{_names([*fits])} could each be its optimizer; say it with lists"
                raise Undecided(
                    several if fits else "; ".join(why) or "no optimizer is left for it"
                )
            ((path, names),) = fits.items()
            self._settle([self.optimizers[path]], names)
            return
        optimizers = self._numbered()
        if not optimizers and self.apart:
            raise Undecided(
                "no optimizer goes by numbers, and of one with names"
                f" {next(iter(self.apart.values()))}"
            )
        # an optimizer may be that of tensors outside the model
        others = self.weights.params(aside=set(map(self.weights.tie, self.weights.model.weights)))
        for optimizer in optimizers:
            slots = self._slots(optimizer)
            shapes = {owner: slot.shapes for owner, slot in slots.items()}
            fit = all(candidates_by_shape(shapes, others).values())
            if slots and len(slots) <= len(others) and fit:
                raise Undecided(
                    f"{optimizer.name} could be the optimizer of other tensors than"
                    f" the model's, such as {next(iter(others))}; say it with lists of full names"
                )
        self._settle(optimizers, self._ordered(optimizers, word, orders))

    def _ordered(
        self, optimizers: Sequence[OptimizerDict], word: str, orders: Orders
    ) -> dict[_Key, str]:
        """The tensor of each parameter of optimizers in the model's order. Raises Undecided."""
        groups = self._slot_groups(optimizers)
        if rule_of(word) == HF_DECAY and {len(o.lists()) for o in optimizers} - {2}:
            raise Undecided(f"{HF_DECAY} is of two groups, but {sizes_of(optimizers)}")
        weights = self.weights.model.weights
        distinct: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for order, classes in (orders or {tuple(self.weights.params()): ()}).items():
            # of tied tensors the first in this order
            first: dict[Hashable, str] = {}
            for tensor in filter(weights.__contains__, order):
                first.setdefault(self.weights.tie(tensor), weights[tensor])
            distinct[tuple(first.values())] += classes
        tensors = {name: tensor for tensor, name in weights.items()}
        shapes = {name: self.weights.tensors[tensor].shape for name, tensor in tensors.items()}
        decided = assign(groups, shapes, word, orders=distinct, unfit=_unlike)
        self.classes = decided.classes
        return {key: tensors[name] for key, name in decided.names.items()}

    def by_lists(self, lists: Lists) -> None:
        """Settle optimizers without names by `lists` of each group's parameters, in order."""
        optimizers = self.open_optimizers()
        self.weights.model_path()
        if sum(len(optimizer.lists()) for optimizer in optimizers) != len(lists):
            raise Undecided(f"{len(lists)} lists for the groups of {sizes_of(optimizers)}")
        groups, rest = iter(self._slot_groups(optimizers)), iter(lists)
        for optimizer in optimizers:
            count = len(optimizer.lists())
            own_groups, own = (
                list(itertools.islice(groups, count)),
                [*itertools.islice(rest, count)],
            )
            if not any(own):
                self.apart[optimizer.path] = "optimizer_groups has no names for them"
                continue
            tensors = self.weights.listed(list(itertools.chain(*own)))
            shapes = {name: self.weights.tensors[tensor].shape for name, tensor in tensors.items()}
            names = assign(own_groups, shapes, tuple(own), unfit=_unlike).names
            if len(set(map(self.weights.tie, tensors.values()))) != len(names):
                raise Undecided(f"two names for {optimizer.name} are one tensor")
            self._settle([optimizer], {key: tensors[name] for key, name in names.items()})

    # The result.

    def places(self, said: SaidGroups | None) -> Places:
        """The places of the settled states; `said` is the user's word, if it was needed."""
        self._drop_shared()
        places = Places(settings=list(self._settings()), said=said)
        for path in self.owned:
            places.at |= self._placed(path)
        for name in self.called_after_model:
            places.notes.append(f"{name} is taken for the optimizer of the model by its name")
        for path, reason in self.apart.items():
            optimizer = self.optimizers[path]
            if optimizer.states:
                count = f"{len(optimizer.states)} optimizer states in {optimizer.name}"
                places.notes.append(f"{count} are kept under `other`: {reason}")
        if said is not None:
            places.notes.append(word_note(said))
        elif places.notes and self.weights.model.path is not None:
            places.notes += self._remedy()
        if self.classes:
            shown, more = (
                ", ".join(self.classes[:_SHOWN_CLASSES]),
                len(self.classes) - _SHOWN_CLASSES,
            )
            shown += f" and {more} more" if more > 0 else ""
            places.notes.append(
                f"the order of the model is that of transformers' class for {shown}"
            )
        return places

    def _placed(self, path: Steps) -> dict[str, tuple[str, str]]:
        """The (state, parameter) of each state of a settled optimizer."""
        owned, weights = self.owned[path], self.weights.model.weights
        places = self._states(self.optimizers[path], owned.keys()).places
        return {name: (state, weights[owned[owner]]) for name, (owner, state) in places.items()}

    def _settings(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The settings of mapped optimizers, but for a parameter that two optimizers list."""
        listing: dict[str, list[tuple[Steps, Mapping[str, Any]]]] = defaultdict(list)
        for path, owned in self.owned.items():
            for group in self.optimizers[path].groups:
                for owner in filter(owned.__contains__, group.owners):
                    name = self.weights.model.weights[owned[owner]]
                    listing[name].append((path, group.settings))
        for name, listed in listing.items():
            if len({path for path, _ in listed}) == 1:
                yield from ((name, settings) for _, settings in listed)

    def _remedy(self) -> Iterator[str]:
        """Advice to the user how states that are kept apart can be mapped."""
        optimizers = self.open_optimizers()
        if not any(self._slots(o) for o in optimizers if o.path not in self.elsewhere):
            return
        words = self.orders.words()
        if words is None:
            return

        def decide(word: str) -> None:
            trial = _Pairing(self.tensors, [*self.optimizers.values()], self.weights, self.orders)
            trial.in_order(word)

        useful = [
            word for of_rule in words for word in itertools.islice(deciding(of_rule, decide), 1)
        ]
        # a name as a list must have it: a full one if a dict beside the model has it too
        model = self.weights.model
        tensor, name = next(iter(model.weights.items()), ("", ""))
        example = tensor if set(self.weights.roots.get(name, ())) - {model.path} else name
        sizes = f"{sizes_of(optimizers)}; an empty list leaves a group apart"
        yield remedy(useful, sizes, example)


@dataclass
class _States:
    """The shapes and places of an optimizer's states by owner, and those without one."""

    shapes: dict[Owner, dict[str, Shape]] = field(default_factory=lambda: defaultdict(dict))
    places: dict[str, tuple[Owner, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def relative(path: Steps, root: Steps) -> Steps | None:
    """The path below `root`, or None; below the outermost dict only what lies in it directly."""
    inside = path[: len(root)] == root if root else len(path) == 1 and isinstance(path[0], str)
    return path[len(root) :] if inside else None


def names_by_dict(path: Steps) -> Iterator[tuple[Steps, str]]:
    """The dicts in which a path lies, the outermost first, and the name that it has from there."""
    for root in prefixes(path):
        if (inner := relative(path, root)) is not None:
            yield root, joined(inner)


def sizes_of(optimizers: Sequence[OptimizerDict]) -> str:
    counts = [" + ".join(str(len(owners)) for owners in o.lists()) for o in optimizers]
    return ", ".join(f"{o.name} has {count}" for o, count in zip(optimizers, counts, strict=True))


def _names(roots: Sequence[Steps]) -> str:
    return " and ".join(sorted(map(dict_name, roots)))


def _unlike(slot: Slot[_Key], name: str) -> str:
    """The reason why a parameter is not called like the slot: neither name ends with the other."""
    (path, owner) = slot.key
    if isinstance(owner, int) or owner == name:
        return ""
    if owner.endswith(f".{name}") or name.endswith(f".{owner}"):
        return ""
    return f"{name} is said to be what {dict_name(path)} itself calls {owner}"
