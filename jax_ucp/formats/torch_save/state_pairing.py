"""Which weights the optimizers of a nested state dict belong to: by names in the file, by proof, or
by the user's word.

- Names: every state names a tensor of one dict, with a shape that fits. Where they fit two dicts (a
  copy of the model, another model of the same classes), nothing says whose optimizer it is.
- Proof: the numbered optimizers have as many parameters as there are tensors that could be one, and
  shapes leave one arrangement.
- The user's word, `optimizer_groups`: every group is in the order of the model, or the names of
  each group. Shapes are compared, and a second dict that fits as well must be excluded by full
  names, or by naming the model.

All states of an optimizer are mapped, or none.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jax_ucp.formats.options import (
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
from jax_ucp.formats.pairing import (
    Undecided,
    candidates_by_shape,
    contradiction,
    only_division,
    only_pairing,
)
from jax_ucp.formats.torch_save.optimizer_dicts import (
    OptimizerDict,
    Owner,
    Steps,
    dict_name,
    joined,
    prefixes,
)
from jax_ucp.layout.fragments import Shape

_WORD = re.compile(r"[^\W_]+")
NUMBERS = "they go by numbers, and nothing stored says which parameter has which number"
Member = tuple[Steps, Owner]  # a parameter of an optimizer
Members = Mapping[Member, Mapping[str, Shape]]  # the shapes of its states

# What transformers' Trainer decays (`get_decay_parameter_names`): nothing with these words in its
# name. Before release 4.50, and for LayerNorm of torch always, it went by classes.
_BIAS = re.compile("bias")
_NORM = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class Model(Protocol):
    """The dict that is the model, if one is decided; its tensors with their parameters' names;
    whether the user said so.
    """

    @property
    def path(self) -> Steps | None: ...
    @property
    def weights(self) -> Mapping[str, str]: ...
    @property
    def is_said(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a nested state dict. `trainable`: an optimizer could own it, as its dtype is
    floating or complex.

    Tensors with an equal `tie` are one under several names.
    """

    path: Steps
    shape: Shape = ()
    trainable: bool = True
    tie: Hashable = None


def is_trainable(dtype: np.dtype) -> bool:
    """Whether torch can have gradients of a tensor of this dtype: real or complex, of any
    precision.
    """
    return dtype.kind not in "biu"


@dataclass
class Pairs:
    """The place (state, parameter) of each state that is mapped, and the settings of parameters.

    `said` is the user's word, if there was an optimizer for which it was needed.
    """

    at: dict[str, tuple[str, str]] = field(default_factory=dict)
    settings: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    said: SaidGroups | None = None


def pair_states(
    tensors: Mapping[str, Stored],
    optimizers: Sequence[OptimizerDict],
    outside: Mapping[str, Stored],
    model: Model,
    groups: OptimizerGroups | None,
    words: Callable[[], Sequence[str] | None] | None = None,
) -> Pairs:
    """The pairs of all optimizers. `outside` are the tensors in none; `words` are those that would
    decide, where the tensors are not in the order of the model.

    Raises Undecided where `groups`, the user's word, does not fit or leaves several ways.
    """
    pairing = _Pairing(tensors, optimizers, outside, model, words)
    pairing.by_names()
    if not pairing.open_optimizers():
        return pairing.pairs(None)
    said = said_of(groups, list(model.weights.values()))
    match said:
        case None:
            pairing.by_proof()
        case str():
            pairing.in_order(said)
        case _:
            pairing.by_lists(said)
    return pairing.pairs(said)


def admits(word: str, name: str, shape: Shape, group: int) -> bool:
    """Whether a parameter can be in a group by the word alone. Of what has one axis, or is called a
    norm, the Trainer goes by classes too, which no file has: that may be in either group.

    >>> [admits("hf-decay", name, (4, 4), 0) for name in ("fc.weight", "fc.bias")]
    [True, False]
    """
    if rule_of(word) != HF_DECAY:
        return True
    if _BIAS.search(name.lower()):
        return group == 1
    return group == 0 or len(shape) < 2 or bool(_NORM.search(name.lower()))


class _Pairing:
    """The optimizers of one file; each method settles some of them: `owned` or `apart` has every
    one in the end.
    """

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        optimizers: Sequence[OptimizerDict],
        outside: Mapping[str, Stored],
        model: Model,
        words: Callable[[], Sequence[str] | None] | None = None,
    ):
        self.tensors, self.outside, self.words = tensors, outside, words
        self.model, self.weights, self.model_is_said = model.path, model.weights, model.is_said
        self._of_model = model
        self.optimizers = {optimizer.path: optimizer for optimizer in optimizers}
        self.owned: dict[Steps, dict[Owner, str]] = {}
        self.apart: dict[Steps, str] = {}
        self.called_after_model: list[str] = []
        self.elsewhere: set[Steps] = set()  # those that are of tensors outside the model
        # Of each dict that holds tensors, at any depth, the tensor of each name from there.
        self.dicts: dict[Steps, dict[str, str]] = defaultdict(dict)
        # of each name, the dicts that have it
        self.roots: dict[Owner, list[Steps]] = defaultdict(list)
        for name, stored in outside.items():
            for root, inner in names_by_dict(stored.path):
                self.dicts[root][inner] = name
                self.roots[inner].append(root)

    # Names.

    def by_names(self) -> None:
        """Settle the optimizers whose states have names."""
        for path, optimizer in self.optimizers.items():
            if optimizer.numbered:
                continue
            try:
                self.owned[path] = self._named(optimizer)
            except Undecided as error:
                self.apart[path] = str(error)
        self._drop_shared()

    def _drop_shared(self) -> None:
        """Keep apart optimizers that have the same state of the same parameter."""
        optimizers: dict[tuple[str, str], set[Steps]] = defaultdict(set)
        for path in self.owned:
            for place in self.places(path).values():
                optimizers[place].add(path)
        sharing = [paths for paths in optimizers.values() if len(paths) > 1]
        for path in set[Steps]().union(*sharing):
            del self.owned[path]
            self.apart[path] = "another optimizer has states of the same parameters"

    def _named(self, optimizer: OptimizerDict) -> dict[Owner, str]:
        """The tensors of the model that an optimizer with names is of. Raises Undecided."""
        if self.model is None:
            raise Undecided(self._no_model())
        candidates = {root: self._in_dict(optimizer, root) for root in self._roots_of(optimizer)}
        owned = candidates.pop(self.model, {})
        others: list[Steps] = []
        for root, names in candidates.items():
            if names and not self._same_tensors(names, owned):
                others.append(root)
        if not owned:
            raise Undecided(self._misfit_with(optimizer, self.model, others))
        if others and not self._is_called_after_model(optimizer, others):
            raise Undecided(
                f"their names and shapes fit {_names([self.model, *others])} alike, and nothing"
                " stored says whose they are"
            )
        return owned

    def _is_called_after_model(self, optimizer: OptimizerDict, others: Sequence[Steps]) -> bool:
        """Whether the optimizer's own name has that of the model, which the user said, as a word,
        and of no other dict that it fits.
        """
        if not self.model_is_said or not self.model:
            return False
        words = set(_WORD.findall(joined(optimizer.path)))
        called = {str(root[-1]) for root in (self.model, *others) if root} & words
        if called != {str(self.model[-1])}:
            return False
        self.called_after_model.append(optimizer.name)
        return True

    def _misfit_with(self, optimizer: OptimizerDict, model: Steps, others: Sequence[Steps]) -> str:
        """Why an optimizer with names is not the model's, and the `others` that it fits."""
        misfit = self._misfit(optimizer, model)
        if not others:
            return misfit
        self.elsewhere.add(optimizer.path)
        return f"{misfit}; they fit {_names(others)}"

    def _no_model(self) -> str:
        if not self.outside:
            return "there are no weights in the file"
        return "nothing decides which dict is the model"

    def _roots_of(self, optimizer: OptimizerDict) -> list[Steps]:
        """The dicts that have what the first state names, or else what the first group names."""
        first_state = next(iter(optimizer.states.values()), ())
        owners: Sequence[Owner] = [owner for owner, _ in first_state]
        if not owners and optimizer.groups:
            owners = optimizer.groups[0].owners[:1]
        roots = itertools.chain.from_iterable(self.roots[owner] for owner in owners)
        return list(dict.fromkeys(roots))

    def _in_dict(self, optimizer: OptimizerDict, root: Steps) -> dict[Owner, str]:
        """The tensor of the dict that each owner of the optimizer names; empty if one names
        none, or does not fit.
        """
        names = self.dicts[root]
        states = self._states(optimizer, names)
        listed = set(optimizer.listed())
        owners = listed & names.keys()
        names_any = bool(states.shapes) or owners == listed
        if states.missing or not names_any:
            return {}
        for owner, shapes in states.shapes.items():
            if contradiction(shapes, self._shape(root, owner)):
                return {}
        with_state = [*states.shapes, *(owners - states.shapes.keys())]
        return {owner: names[str(owner)] for owner in with_state}

    def _same_tensors(self, tensors: Mapping[Any, str], others: Mapping[Any, str]) -> bool:
        """Whether each of these tensors is the one that goes by the same key in `others`."""
        if not tensors.keys() <= others.keys():
            return False
        return all(self._tie(tensor) == self._tie(others[key]) for key, tensor in tensors.items())

    def _misfit(self, optimizer: OptimizerDict, root: Steps) -> str:
        """Why an optimizer with names is not of this dict."""
        states = self._states(optimizer, self.dicts[root])
        if states.missing:
            if not any(optimizer.states[name] for name in states.missing):
                return NUMBERS
            return (
                f"{len(states.missing)} name no parameter of the model, the first"
                f" {states.missing[0]}"
            )
        for owner, shapes in states.shapes.items():
            shape = self._shape(root, owner)
            if state := contradiction(shapes, shape):
                return (
                    f"{state} of {owner} has shape {list(shapes[state])}, but {owner} of the model"
                    f" has {list(shape)}"
                )
        return "none names a parameter of the model"

    def _states(self, optimizer: OptimizerDict, names: Collection[Owner] = ()) -> _States:
        """The states by owner: a number, or one of `names`, of several that can be read the
        longest.
        """
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

    def _shape(self, root: Steps, owner: Owner) -> Shape:
        return self.outside[self.dicts[root][str(owner)]].shape

    def _tie(self, name: str) -> Hashable:
        """What is equal of two names of one tensor."""
        tie = self.outside[name].tie
        return name if tie is None else ("tie", tie)

    # Numbers.

    def numbered(self) -> list[OptimizerDict]:
        return [optimizer for optimizer in self.optimizers.values() if optimizer.numbered]

    def by_proof(self) -> None:
        """Settle the optimizers with numbers by shapes, if those leave one arrangement of all
        tensors there are.
        """
        optimizers = self.numbered()
        try:
            pairs = self._proved(optimizers)
        except Undecided as error:
            self.apart |= {optimizer.path: f"{NUMBERS} ({error})" for optimizer in optimizers}
            return
        owned: dict[Steps, dict[Owner, str]] = defaultdict(dict)
        for (path, owner), name in pairs.items():
            owned[path][owner] = name
        for optimizer in optimizers:
            self._settle(optimizer, owned[optimizer.path])

    def _proved(self, optimizers: Sequence[OptimizerDict]) -> dict[Member, str]:
        """The tensor of each numbered parameter, by shapes, of those that no optimizer has.
        Raises Undecided.
        """
        members = self._members(optimizers)
        ties = {self._tie(name) for owned in self.owned.values() for name in owned.values()}
        free = self._not_tied(ties)
        if self.model is None:
            raise Undecided(self._no_model())
        if len(members) != len(free):
            raise Undecided(f"there are {len(members)} of them for {len(free)} tensors")
        return only_pairing(candidates_by_shape(members, self._shapes(free)))

    def _settle(self, optimizer: OptimizerDict, owned: dict[Owner, str]) -> None:
        strays = [name for name in owned.values() if name not in self.weights]
        if strays:
            self.elsewhere.add(optimizer.path)
            self.apart[optimizer.path] = (
                f"they are of {strays[0]}, which is not a parameter of the model"
            )
            return
        self.owned[optimizer.path] = owned
        self.apart.pop(optimizer.path, None)

    def _members(self, optimizers: Sequence[OptimizerDict]) -> dict[Member, dict[str, Shape]]:
        """The numbered parameters, in the order of the groups, and the shapes of their states."""
        members: dict[Member, dict[str, Shape]] = {}
        for optimizer in optimizers:
            listed = optimizer.listed()
            states = self._states(optimizer, listed).shapes
            for owner in (*listed, *states):
                members[optimizer.path, owner] = states.get(owner, {})
        return members

    def _distinct(self) -> list[str]:
        """Tensors that an optimizer could own, each once; of tied ones that of the model, the
        first of those.
        """
        trainable = [name for name, stored in self.outside.items() if stored.trainable]
        trainable.sort(key=lambda name: name not in self.weights)
        first: dict[Hashable, str] = {}
        for name in trainable:
            first.setdefault(self._tie(name), name)
        kept = set(first.values())
        return [name for name in self.outside if name in kept]

    def _not_tied(self, ties: Container[Hashable]) -> list[str]:
        """Tensors that an optimizer could own, without those of these ties."""
        return [name for name in self._distinct() if self._tie(name) not in ties]

    def _shapes(self, names: Sequence[str]) -> dict[str, Shape]:
        return {name: self.outside[name].shape for name in names}

    # The user's word.

    def in_order(self, word: str) -> None:
        """Settle the optimizers with numbers: every group lists its parameters in the order of
        the model, which are those that the word says.
        """
        if self.model is None:
            raise Undecided(self._no_model())
        if self.model_is_said:
            self._settle_said(word)
            return
        optimizers = self.numbered()
        if not optimizers and self.apart:
            raise Undecided(
                "no optimizer goes by numbers, and of one with names"
                f" {next(iter(self.apart.values()))}"
            )
        self._exclude_others(self._members(optimizers))
        for path, owned in self._divided(optimizers, word).items():
            self._settle(self.optimizers[path], owned)

    def _settle_said(self, word: str) -> None:
        """Settle the one optimizer that can be of the model that the user names."""
        fits: dict[Steps, dict[Owner, str]] = {}
        why: list[str] = []
        for optimizer in self.open_optimizers():
            try:
                fits |= self._divided([optimizer], word)
            except Undecided as error:
                why.append(f"of {optimizer.name} {error}")
        if len(fits) != 1:
            several = f"{_names([*fits])} could each be its optimizer; say it with lists"
            raise Undecided(several if fits else "; ".join(why) or "no optimizer is left for it")
        for path, owned in fits.items():
            self._settle(self.optimizers[path], owned)

    def _divided(
        self, optimizers: Sequence[OptimizerDict], word: str
    ) -> dict[Steps, dict[Owner, str]]:
        """The tensor of each owner of some optimizers, whose groups list parameters in the order of
        the model. Raises Undecided.
        """
        members = self._members(optimizers)
        self._check_listed(optimizers)
        groups = list(itertools.chain.from_iterable(map(_groups_of, optimizers)))
        _check_groups(optimizers, word)

        def fits(tensor: str, group: int, place: int) -> bool:
            member, name = groups[group][place], self.weights[tensor]
            shape = self.outside[tensor].shape
            is_other = contradiction(members[member], shape) or not _agree(member[1], name)
            return not is_other and admits(word, name, shape, group % 2)

        params = [name for name in self._distinct() if name in self.weights]
        division = only_division(dict.fromkeys(params, 1), [*map(len, groups)], fits)
        owned: dict[Steps, dict[Owner, str]] = {optimizer.path: {} for optimizer in optimizers}
        for name, (group, place) in division.items():
            path, owner = groups[group][place]
            owned[path][owner] = name
        return owned

    def _check_listed(self, optimizers: Sequence[OptimizerDict]) -> None:
        for optimizer in optimizers:
            listed = set(optimizer.listed())
            states = self._states(optimizer, listed)
            not_listed = sorted(map(str, states.shapes.keys() - listed))
            strays = [*states.missing, *not_listed]
            if strays:
                raise Undecided(
                    f"{optimizer.name} has states of what no group of it lists, the first"
                    f" {strays[0]}"
                )

    def _exclude_others(self, members: Members) -> None:
        """Raise Undecided if an optimizer could be that of tensors outside the model."""
        others = self._not_tied({self._tie(name) for name in self.weights})
        counts = Counter(path for path, _ in members)
        candidates = candidates_by_shape(members, self._shapes(others))
        unfit = {path for (path, _), names in candidates.items() if not names}
        for path, count in counts.items():
            if count <= len(others) and path not in unfit:
                raise Undecided(
                    f"{self.optimizers[path].name} could be the optimizer of other tensors than"
                    f" the model's, such as {others[0]}; say it with lists of full names"
                )

    def by_lists(self, groups: Lists) -> None:
        """Settle the optimizers that names in the file do not settle: `groups` are theirs, in
        order.
        """
        optimizers = self.open_optimizers()
        if self.model is None:
            raise Undecided(self._no_model())
        if sum(len(optimizer.lists()) for optimizer in optimizers) != len(groups):
            raise Undecided(f"{len(groups)} lists for the groups of {sizes_of(optimizers)}")
        self._check_listed(optimizers)
        rest = iter(groups)
        for optimizer in optimizers:
            lists = list(itertools.islice(rest, len(optimizer.lists())))
            if any(lists):
                self._settle(optimizer, self._listed(optimizer, lists))
            else:
                self.apart[optimizer.path] = "optimizer_groups has no names for them"

    def open_optimizers(self) -> list[OptimizerDict]:
        """The optimizers for which there is something to say: those with numbers, and those that
        names leave apart.
        """
        return [o for o in self.optimizers.values() if o.states and o.path not in self.owned]

    def _listed(self, optimizer: OptimizerDict, lists: Sequence[Sequence[str]]) -> dict[Owner, str]:
        """The tensor of each owner, by the names that the user gave."""
        states = self._states(optimizer, optimizer.listed()).shapes
        tensors = self._tensors_of(list(itertools.chain(*lists)))
        owned: dict[Owner, str] = {}
        for i, (owners, names) in enumerate(zip(optimizer.lists(), lists, strict=True)):
            if len(owners) != len(names):
                raise Undecided(
                    f"group {i} of {optimizer.name} has {len(owners)} parameters, but {len(names)}"
                    " names"
                )
            for owner, name in zip(owners, names, strict=True):
                owned[owner] = tensors[name]
                self._check_word(optimizer, owner, name, states.get(owner, {}), tensors[name])
        ties = set(map(self._tie, owned.values()))
        if len(ties) != len(owned):
            raise Undecided(f"two names for {optimizer.name} are one tensor")
        return owned

    def _check_word(
        self,
        optimizer: OptimizerDict,
        owner: Owner,
        name: str,
        shapes: Mapping[str, Shape],
        tensor: str,
    ) -> None:
        """Raise Undecided where an owner cannot be what the user calls `name`, by its name and
        its states' shapes.
        """
        if not _agree(owner, name):
            raise Undecided(f"{name} is said to be what {optimizer.name} itself calls {owner}")
        shape = self.outside[tensor].shape
        if state := contradiction(shapes, shape):
            raise Undecided(
                f"{state} of {owner} in {optimizer.name} has shape {list(shapes[state])}, but"
                f" {name}, which is said to be it, has {list(shape)}"
            )

    def _tensors_of(self, names: Sequence[str]) -> dict[str, str]:
        """The tensors of names: all of them from the top of the file, or all in the model."""
        assert self.model is not None, "without a model no lists are taken"
        in_model = self.dicts[self.model]
        in_file = {name: name for name in names}
        all_in_file = in_file.keys() <= self.outside.keys()
        if not in_file.keys() <= in_model.keys():
            if all_in_file:
                return in_file
            raise self._no_parameter(names, in_model)
        tensors = {name: in_model[name] for name in names}
        if all_in_file:
            self._refuse_two_readings(tensors, in_file)
        elif not self.model_is_said:
            self._refuse_rivals(self.model, tensors)
        return tensors

    def _refuse_two_readings(self, in_model: Mapping[str, str], in_file: Mapping[str, str]) -> None:
        """Raise Undecided where names are of other tensors in the model than from the top."""
        if not self._same_tensors(in_model, in_file):
            name = next(iter(in_model))
            raise Undecided(f"{name} can be read from the top of the file, and in the model")

    def _no_parameter(self, names: Sequence[str], in_model: Mapping[str, str]) -> Undecided:
        """The error for a name that the model has not: one that nothing has, if there is one."""
        unknown = [name for name in names if name not in in_model]
        lost = next((name for name in unknown if name not in self.outside), unknown[0])
        first = ", ".join([*in_model][:3])
        return Undecided(f"{lost} is not a parameter of the model, which has {first}, ...")

    def _refuse_rivals(self, model: Steps, tensors: Mapping[str, str]) -> None:
        """Raise Undecided where dicts beside the model have all these names for other tensors."""
        rivals: list[Steps] = []
        for root, names in self.dicts.items():
            has_all_names = tensors.keys() <= names.keys()
            if has_all_names and not self._same_tensors(tensors, names):
                rivals.append(root)
        if rivals:
            example = joined((*model, next(iter(tensors))))
            raise Undecided(
                f"{_names([model, *rivals])} have these names; say which is meant: {example}"
            )

    # The result.

    def pairs(self, groups: SaidGroups | None) -> Pairs:
        """What was settled; `groups` are what the user said, if it was needed."""
        self._drop_shared()
        pairs = Pairs(settings=list(self._settings()), said=groups)
        for path in self.owned:
            pairs.at |= self.places(path)
        for name in self.called_after_model:
            pairs.notes.append(f"{name} is taken for the optimizer of the model by its name")
        for path, reason in self.apart.items():
            optimizer = self.optimizers[path]
            if optimizer.states:
                count = f"{len(optimizer.states)} optimizer states in {optimizer.name}"
                pairs.notes.append(f"{count} are kept under `other`: {reason}")
        if groups is not None:
            pairs.notes.append(word_note(groups))
        elif pairs.notes and self.model is not None:
            pairs.notes += self._remedy()
        return pairs

    def places(self, path: Steps) -> dict[str, tuple[str, str]]:
        """(state, parameter) of each state of an optimizer that is settled."""
        owned = self.owned[path]
        places = self._states(self.optimizers[path], owned.keys()).places
        return {
            name: (state, self.weights[owned[owner]]) for name, (owner, state) in places.items()
        }

    def _settings(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The settings of mapped optimizers; none of a parameter that two of them list."""
        listing: dict[str, list[tuple[Steps, Mapping[str, Any]]]] = defaultdict(list)
        for path, owned in self.owned.items():
            for group in self.optimizers[path].groups:
                for owner in filter(owned.__contains__, group.owners):
                    listing[self.weights[owned[owner]]].append((path, group.settings))
        for name, listed in listing.items():
            if len({path for path, _ in listed}) == 1:
                yield from ((name, settings) for _, settings in listed)

    def _remedy(self) -> Iterator[str]:
        """What to say so that states that are apart are mapped."""
        optimizers = self.open_optimizers()
        of_model = [optimizer for optimizer in optimizers if optimizer.path not in self.elsewhere]
        if self._members(of_model):
            sizes = f"{sizes_of(optimizers)}; an empty list leaves a group apart"
            words = (self.words or self._ordered)()
            if words is not None:
                yield remedy(sizes, self._example(), words)

    def _ordered(self) -> list[str]:
        """The words that would decide, of tensors in the order of the model."""
        optimizers = [*self.optimizers.values()]
        trial = _Pairing(self.tensors, optimizers, self.outside, self._of_model)
        trial.by_names()
        numbered = all(optimizer.numbered for optimizer in trial.open_optimizers())
        if not numbered and not self.model_is_said:
            return []
        try:
            trial.in_order(MODULE_ORDER)
        except Undecided:
            return []
        return [MODULE_ORDER]

    def _example(self) -> str:
        """A name as a list must have it: a full one if a dict beside the model has it too."""
        tensor, name = next(iter(self.weights.items()), ("", ""))
        return tensor if set(self.roots.get(name, ())) - {self.model} else name


def _groups_of(optimizer: OptimizerDict) -> Iterator[list[Member]]:
    """The parameters of each group of an optimizer."""
    for owners in optimizer.lists():
        yield [(optimizer.path, owner) for owner in owners]


@dataclass
class _States:
    """Of an optimizer the shapes of states by owner, the place of each state, and states that
    name no parameter.
    """

    shapes: dict[Owner, dict[str, Shape]] = field(default_factory=lambda: defaultdict(dict))
    places: dict[str, tuple[Owner, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def relative(path: Steps, root: Steps) -> Steps | None:
    """The path from the dict `root`, if it lies there; in the outermost dict only what lies in
    it directly does.
    """
    inside = path[: len(root)] == root if root else len(path) == 1 and isinstance(path[0], str)
    return path[len(root) :] if inside else None


def names_by_dict(path: Steps) -> Iterator[tuple[Steps, str]]:
    """The dicts in which a path lies, the outermost first, and the name that it has from there."""
    for root in prefixes(path):
        if (inner := relative(path, root)) is not None:
            yield root, joined(inner)


def sizes_of(optimizers: Sequence[OptimizerDict]) -> str:
    """How many parameters each group of the optimizers has."""
    return ", ".join(f"{o.name} has {_sizes(o)}" for o in optimizers)


def _sizes(optimizer: OptimizerDict) -> str:
    return " + ".join(str(len(owners)) for owners in optimizer.lists())


def _names(roots: Sequence[Steps]) -> str:
    return " and ".join(sorted(map(dict_name, roots)))


def _check_groups(optimizers: Sequence[OptimizerDict], word: str) -> None:
    """Raise Undecided where there are not the two groups that the word is of."""
    counts = {len(optimizer.lists()) for optimizer in optimizers}
    if rule_of(word) == HF_DECAY and counts - {2}:
        raise Undecided(f"{HF_DECAY} is of two groups, but {sizes_of(optimizers)}")


def _agree(a: Owner, b: str) -> bool:
    """Whether two names can be of one parameter: one ends with the other, as with the prefix of
    a wrapper. A number can be of any.
    """
    if isinstance(a, int):
        return True
    return a == b or a.endswith(f".{b}") or b.endswith(f".{a}")
