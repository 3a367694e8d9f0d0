"""Which weights the optimizers of a nested state dict belong to: by names in the file, by proof, or by the user's word.

- Names: every state names a tensor of one dict, with a shape that fits. Where they fit two dicts (a copy of the model,
  another model of the same classes), nothing says whose optimizer it is.
- Proof: the numbered optimizers have as many parameters as there are tensors that could be one, and shapes leave one
  arrangement.
- The user's word, `optimizer_groups`: every group is in the order of the model, or the names of each group. Shapes are
  compared, and a second dict that fits as well must be excluded by full names.

All states of an optimizer are mapped, or none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_ucp.formats.optimizer_dicts import OptimizerDict, Owner, Steps, joined
from jax_ucp.formats.options import MODULE_ORDER, OptimizerGroups, remedy, word_note
from jax_ucp.formats.pairing import Undecided, candidates_by_shape, contradiction, only_division, only_pairing
from jax_ucp.layout.fragments import Shape

NUMBERS = "they go by numbers, and nothing stored says which parameter has which number"
Member = tuple[Steps, Owner]  # a parameter of an optimizer
Members = Mapping[Member, Mapping[str, Shape]]  # the shapes of its states


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a nested state dict. `trainable`: an optimizer could own it, as its dtype is floating or complex.

    Tensors with an equal `tie` are one under several names.
    """

    path: Steps
    shape: Shape = ()
    trainable: bool = True
    tie: Hashable = None


def is_trainable(dtype: np.dtype) -> bool:
    """Whether torch can have gradients of a tensor of this dtype: real or complex, of any precision."""
    return dtype.kind not in "biu"


@dataclass
class Pairs:
    """The place (state, parameter) of each state that is mapped, and what optimizers were told for parameters.

    `used`: there was an optimizer for which the user's word was needed.
    """

    at: dict[str, tuple[str, str]] = field(default_factory=dict)
    settings: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    used: bool = False


def pair_states(
    tensors: Mapping[str, Stored],
    optimizers: Sequence[OptimizerDict],
    outside: Mapping[str, Stored],
    model: Steps | None,
    weights: Mapping[str, str],
    groups: OptimizerGroups | None,
) -> Pairs:
    """The pairs of all optimizers. `outside` are the tensors in none; `weights` are those of the dict `model`, with the
    names of parameters.

    Raises Undecided where `groups`, the user's word, does not fit or leaves several ways.
    """
    pairing = _Pairing(tensors, optimizers, outside, model, weights)
    pairing.by_names()
    used = bool(pairing.open_optimizers())
    if groups is None:
        pairing.by_proof()
    elif groups == MODULE_ORDER:
        pairing.in_order(pairing.numbered())
    else:
        pairing.by_lists(groups)
    return pairing.pairs(groups if used else None)


class _Pairing:
    """The optimizers of one file; each method settles some of them: `owned` or `apart` has every one in the end."""

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        optimizers: Sequence[OptimizerDict],
        outside: Mapping[str, Stored],
        model: Steps | None,
        weights: Mapping[str, str],
    ):
        self.tensors, self.outside, self.model, self.weights = tensors, outside, model, weights
        self.optimizers = {optimizer.path: optimizer for optimizer in optimizers}
        self.owned: dict[Steps, dict[Owner, str]] = {}
        self.apart: dict[Steps, str] = {}
        self.elsewhere: set[Steps] = set()  # those that are of tensors outside the model
        # Of each dict that holds tensors, at any depth, the tensor of each name from there.
        self.dicts: dict[Steps, dict[str, str]] = defaultdict(dict)
        self.roots: dict[Owner, list[Steps]] = defaultdict(list)  # of each name, the dicts that have it
        for name, stored in outside.items():
            for root in (stored.path[:depth] for depth in range(len(stored.path))):
                if (inner := relative(stored.path, root)) is not None:
                    self.dicts[root][joined(inner)] = name
                    self.roots[joined(inner)].append(root)

    # Names.

    def by_names(self) -> None:
        """Settle the optimizers whose states have names."""
        for optimizer in self.optimizers.values():
            if not optimizer.numbered:
                owned, reason = self._named(optimizer)
                if reason:
                    self.apart[optimizer.path] = reason
                else:
                    self.owned[optimizer.path] = owned
        self._drop_shared()

    def _drop_shared(self) -> None:
        """Keep apart optimizers that have the same state of the same parameter."""
        owners: dict[tuple[str, str], set[Steps]] = defaultdict(set)
        for path in self.owned:
            for place in self.places(path).values():
                owners[place].add(path)
        for path in {path for paths in owners.values() if len(paths) > 1 for path in paths}:
            del self.owned[path]
            self.apart[path] = "another optimizer has states of the same parameters"

    def _named(self, optimizer: OptimizerDict) -> tuple[dict[Owner, str], str]:
        fitting = {root: owned for root in self._roots_of(optimizer) if (owned := self._in_dict(optimizer, root))}
        others = [root for root in fitting if root != self.model and not self._same_tensors(fitting, root)]
        if self.model is None:
            return {}, self._no_model()
        if self.model not in fitting:
            self.elsewhere |= {optimizer.path} if others else set()
            return {}, self._misfit(optimizer, self.model) + (f"; they fit {_names(others)}" if others else "")
        if others:
            return {}, (
                f"their names and shapes fit {_names([self.model, *others])} alike, and nothing stored says whose "
                "they are"
            )
        return fitting[self.model], ""

    def _no_model(self) -> str:
        return "nothing decides which dict is the model" if self.outside else "there are no weights in the file"

    def _roots_of(self, optimizer: OptimizerDict) -> list[Steps]:
        """The dicts that have what the first state names, or else what the first group names."""
        owners = [owner for readings in [*optimizer.states.values()][:1] for owner, _ in readings]
        owners = owners or [owner for group in optimizer.groups[:1] for owner in group.owners[:1]]
        return list(dict.fromkeys(root for owner in owners for root in self.roots[owner]))

    def _in_dict(self, optimizer: OptimizerDict, root: Steps) -> dict[Owner, str]:
        """The tensor of the dict that each owner of the optimizer names; empty if one names none, or does not fit."""
        names = self.dicts[root]
        states = self._states(optimizer, names)
        listed = {owner for group in optimizer.groups for owner in group.owners}
        owners = {owner for owner in listed if owner in names}
        if states.missing or not (states.shapes or owners == listed):
            return {}
        if any(contradiction(shapes, self._shape(root, owner)) for owner, shapes in states.shapes.items()):
            return {}
        return {owner: names[str(owner)] for owner in [*states.shapes, *(owners - states.shapes.keys())]}

    def _same_tensors(self, fitting: Mapping[Steps, Mapping[Owner, str]], root: Steps) -> bool:
        """Whether a dict holds the very tensors that the model holds under these names."""
        mine = fitting.get(self.model, {}) if self.model is not None else {}
        return bool(mine) and all(self._tie(mine.get(owner)) == self._tie(n) for owner, n in fitting[root].items())

    def _misfit(self, optimizer: OptimizerDict, root: Steps) -> str:
        """Why an optimizer with names is not of this dict."""
        states = self._states(optimizer, self.dicts[root])
        if states.missing:
            if not any(optimizer.states[name] for name in states.missing):
                return NUMBERS
            return f"{len(states.missing)} name no parameter of the model, the first {states.missing[0]}"
        for owner, shapes in states.shapes.items():
            if state := contradiction(shapes, self._shape(root, owner)):
                have = list(self._shape(root, owner))
                return f"{state} of {owner} has shape {list(shapes[state])}, but {owner} of the model has {have}"
        return "none names a parameter of the model"

    def _states(self, optimizer: OptimizerDict, names: Collection[Owner] = ()) -> _States:
        """The states by owner: a number, or one of `names`, of several that can be read the longest."""
        found = _States()
        for name, readings in optimizer.states.items():
            known = [reading for reading in readings if isinstance(reading[0], int) or reading[0] in names]
            if not known:
                found.missing.append(name)
                continue
            owner, state = known[0]
            found.shapes[owner][state] = self.tensors[name].shape
            found.places[name] = owner, state
        return found

    def _shape(self, root: Steps, owner: Owner) -> Shape:
        return self.outside[self.dicts[root][str(owner)]].shape

    def _tie(self, name: str | None) -> Hashable:
        stored = self.outside.get(name) if name is not None else None
        return name if stored is None or stored.tie is None else ("tie", stored.tie)

    # Numbers.

    def numbered(self) -> list[OptimizerDict]:
        return [optimizer for optimizer in self.optimizers.values() if optimizer.numbered]

    def by_proof(self) -> None:
        """Settle the optimizers with numbers by shapes, if those leave one arrangement of all tensors there are."""
        optimizers = self.numbered()
        members = self._members(optimizers)
        taken = {self._tie(name) for owned in self.owned.values() for name in owned.values()}
        free = [name for name in self._distinct(self.outside) if self._tie(name) not in taken]
        try:
            if self.model is None:
                raise Undecided(self._no_model())
            if len(members) != len(free):
                raise Undecided(f"there are {len(members)} of them for {len(free)} tensors")
            pairs = only_pairing(candidates_by_shape(members, self._shapes(free)))
        except Undecided as error:
            self.apart |= {optimizer.path: f"{NUMBERS} ({error})" for optimizer in optimizers}
            return
        owned: dict[Steps, dict[Owner, str]] = defaultdict(dict)
        for (path, owner), name in pairs.items():
            owned[path][owner] = name
        for optimizer in optimizers:
            self._settle(optimizer, owned[optimizer.path])

    def _settle(self, optimizer: OptimizerDict, owned: dict[Owner, str]) -> None:
        if stray := [name for name in owned.values() if name not in self.weights]:
            self.elsewhere.add(optimizer.path)
            self.apart[optimizer.path] = f"they are of {stray[0]}, which is not a parameter of the model"
        else:
            self.owned[optimizer.path] = owned
            self.apart.pop(optimizer.path, None)

    def _members(self, optimizers: Sequence[OptimizerDict]) -> dict[Member, dict[str, Shape]]:
        """The numbered parameters, in the order of the groups, and the shapes of their states. Raises Undecided."""
        found: dict[Member, dict[str, Shape]] = {}
        for optimizer in optimizers:
            listed = [owner for owners in optimizer.lists() for owner in owners]
            states = self._states(optimizer, listed).shapes
            found |= {(optimizer.path, owner): states.get(owner, {}) for owner in [*listed, *states]}
        return found

    def _distinct(self, names: Mapping[str, Stored]) -> list[str]:
        """Tensors that an optimizer could own, each once; of tied ones that of the model, the first of those."""
        first: dict[Hashable, str] = {}
        for name in sorted(names, key=lambda name: name not in self.weights):
            if names[name].trainable:
                first.setdefault(self._tie(name), name)
        kept = set(first.values())
        return [name for name in names if name in kept]

    def _shapes(self, names: Sequence[str]) -> dict[str, Shape]:
        return {name: self.outside[name].shape for name in names}

    # The user's word.

    def in_order(self, optimizers: Sequence[OptimizerDict]) -> None:
        """Settle the optimizers with numbers: every group lists its parameters in the order of the model."""
        if self.model is None:
            raise Undecided(self._no_model())
        if not optimizers and self.apart:
            raise Undecided(f"no optimizer goes by numbers, and of one with names {next(iter(self.apart.values()))}")
        members = self._members(optimizers)
        lists = [(optimizer, owners) for optimizer in optimizers for owners in optimizer.lists()]
        self._check_listed(optimizers)
        self._exclude_others(members)

        def fits(name: str, group: int, place: int) -> bool:
            optimizer, owners = lists[group]
            return not contradiction(members[optimizer.path, owners[place]], self.outside[name].shape)

        params = [name for name in self._distinct(self.outside) if name in self.weights]
        division = only_division(dict.fromkeys(params, 1), [len(owners) for _, owners in lists], fits)
        for optimizer in optimizers:
            self.owned[optimizer.path] = {}
            self.apart.pop(optimizer.path, None)
        for name, (group, place) in division.items():
            optimizer, owners = lists[group]
            self.owned[optimizer.path][owners[place]] = name

    def _check_listed(self, optimizers: Sequence[OptimizerDict]) -> None:
        for optimizer in optimizers:
            listed = {owner for owners in optimizer.lists() for owner in owners}
            states = self._states(optimizer, listed)
            if strays := [*states.missing, *sorted(map(str, states.shapes.keys() - listed))]:
                raise Undecided(f"{optimizer.where} has states of what no group of it lists, the first {strays[0]}")

    def _exclude_others(self, members: Members) -> None:
        """Raise Undecided if an optimizer could be that of tensors outside the model."""
        taken = {self._tie(name) for name in self.weights}
        others = [name for name in self._distinct(self.outside) if self._tie(name) not in taken]
        sizes = Counter(path for path, _ in members)
        candidates = candidates_by_shape(members, self._shapes(others))
        unfit = {path for (path, _), names in candidates.items() if not names}
        for path, count in sizes.items():
            if count <= len(others) and path not in unfit:
                raise Undecided(
                    f"{self.optimizers[path].where} could be the optimizer of other tensors than the model's, such as "
                    f"{others[0]}; say it with lists of full names"
                )

    def by_lists(self, groups: Sequence[Sequence[str]]) -> None:
        """Settle the optimizers that names in the file do not settle: `groups` are theirs, in order."""
        optimizers = self.open_optimizers()
        if optimizers and self.model is None:
            raise Undecided(self._no_model())
        lists = [owners for optimizer in optimizers for owners in optimizer.lists()]
        if optimizers and len(lists) != len(groups):
            raise Undecided(f"{len(groups)} lists for the groups of {sizes_of(optimizers)}")
        self._check_listed(optimizers)
        rest = list(groups)
        for optimizer in optimizers:
            mine, rest = rest[: len(optimizer.lists())], rest[len(optimizer.lists()) :]
            if any(mine):
                self._settle(optimizer, self._listed(optimizer, mine))
            else:
                self.apart[optimizer.path] = "optimizer_groups has no names for them"

    def open_optimizers(self) -> list[OptimizerDict]:
        """The optimizers for which there is something to say: those with numbers, and those that names leave apart."""
        return [o for o in self.optimizers.values() if o.states and o.path not in self.owned]

    def _listed(self, optimizer: OptimizerDict, lists: Sequence[Sequence[str]]) -> dict[Owner, str]:
        """The tensor of each owner, by the names that the user gave."""
        states = self._states(optimizer, [owner for owners in optimizer.lists() for owner in owners]).shapes
        tensors = self._tensors_of([name for names in lists for name in names])
        found: dict[Owner, str] = {}
        for i, (owners, names) in enumerate(zip(optimizer.lists(), lists, strict=True)):
            if len(owners) != len(names):
                raise Undecided(f"group {i} of {optimizer.where} has {len(owners)} parameters, but {len(names)} names")
            for owner, name in zip(owners, names, strict=True):
                if isinstance(owner, str) and not _agree(owner, name):
                    raise Undecided(f"{name} is said to be what {optimizer.where} itself calls {owner}")
                shape = self.outside[tensors[name]].shape
                if state := contradiction(states.get(owner, {}), shape):
                    raise Undecided(
                        f"{state} of {owner} in {optimizer.where} has shape {list(states[owner][state])}, but {name}, "
                        f"which is said to be it, has {list(shape)}"
                    )
                found[owner] = tensors[name]
        ties = [self._tie(tensor) for tensor in found.values()]
        if len(set(ties)) != len(ties):
            raise Undecided(f"two names for {optimizer.where} are one tensor")
        return found

    def _tensors_of(self, names: Sequence[str]) -> dict[str, str]:
        """The tensors of names: all of them from the top of the file, or all in the model."""
        mine = self.dicts[self.model] if self.model is not None else {}
        readings: list[dict[str, str]] = []
        if all(name in mine for name in names):
            readings.append({name: mine[name] for name in names})
        if all(name in self.outside for name in names):
            readings.append({name: name for name in names})
        if not readings:
            unknown = [name for name in names if name not in mine]
            lost = next((name for name in unknown if name not in self.outside), unknown[0])
            raise Undecided(f"{lost} is not a parameter of the model, which has {', '.join([*mine][:3])}, ...")
        if len(readings) > 1 and any(self._tie(readings[0][n]) != self._tie(readings[1][n]) for n in names):
            raise Undecided(f"{names[0]} can be read from the top of the file, and in the model")
        rivals = [] if len(readings) > 1 or readings[0] == {n: n for n in names} else self._rivals(names)
        if rivals and self.model is not None:
            dicts = _names([self.model, *rivals])
            raise Undecided(f"{dicts} have these names; say which is meant: {joined((*self.model, names[0]))}")
        return readings[0]

    def _rivals(self, names: Sequence[str]) -> list[Steps]:
        """The dicts beside the model that have all these names for other tensors."""
        mine = self.dicts[self.model] if self.model is not None else {}
        found = [root for root, inside in self.dicts.items() if root != self.model and all(n in inside for n in names)]
        return [r for r in found if any(self._tie(self.dicts[r][n]) != self._tie(mine.get(n)) for n in names)]

    # The result.

    def pairs(self, groups: OptimizerGroups | None) -> Pairs:
        """What was settled; `groups` are what the user said, if it was needed."""
        self._drop_shared()
        found = Pairs(used=groups is not None)
        for path in self.owned:
            found.at |= self.places(path)
        for path, reason in self.apart.items():
            optimizer = self.optimizers[path]
            if optimizer.states:
                count = f"{len(optimizer.states)} optimizer states in {optimizer.where}"
                found.notes.append(f"{count} are kept under `other`: {reason}")
        found.settings = list(self._settings())
        if found.notes and groups is None and self.model is not None:
            found.notes += self._remedy()
        if groups is not None:
            found.notes.append(word_note(groups))
        return found

    def places(self, path: Steps) -> dict[str, tuple[str, str]]:
        """(state, parameter) of each state of an optimizer that is settled."""
        owned = self.owned[path]
        places = self._states(self.optimizers[path], owned.keys()).places
        return {name: (state, self.weights[owned[owner]]) for name, (owner, state) in places.items()}

    def _settings(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """What mapped optimizers were told; of a parameter that two of them list, nothing."""
        told: dict[str, dict[Steps, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for path in self.owned:
            for group in self.optimizers[path].groups:
                for owner in group.owners:
                    if owner in self.owned[path]:
                        told[self.weights[self.owned[path][owner]]][path].append(group.settings)
        for name, by_optimizer in told.items():
            if len(by_optimizer) == 1:
                for some in by_optimizer.values():
                    yield from ((name, settings) for settings in some)

    def _remedy(self) -> Iterator[str]:
        """What to say so that states that are apart are mapped."""
        optimizers = self.open_optimizers()
        if not any(self._members([optimizer]) for optimizer in optimizers if optimizer.path not in self.elsewhere):
            return
        yield remedy(f"{sizes_of(optimizers)}; an empty list leaves a group apart", self._example(), self._ordered())

    def _ordered(self) -> bool:
        """Whether the order of the model would decide."""
        trial = _Pairing(self.tensors, [*self.optimizers.values()], self.outside, self.model, self.weights)
        if any(not optimizer.numbered for optimizer in self.open_optimizers()):
            return False
        try:
            trial.in_order(trial.numbered())
        except Undecided:
            return False
        return True

    def _example(self) -> str:
        """A name as a list must have it: a full one if a dict beside the model has it too."""
        tensor, name = next(iter(self.weights.items()), ("", ""))
        others = [root for root, names in self.dicts.items() if root != self.model and name in names]
        return tensor if others else name


@dataclass
class _States:
    """Of an optimizer the shapes of states by owner, the place of each state, and states that name no parameter."""

    shapes: dict[Owner, dict[str, Shape]] = field(default_factory=lambda: defaultdict(dict))
    places: dict[str, tuple[Owner, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def relative(path: Steps, root: Steps) -> Steps | None:
    """The path from the dict `root`, if it lies there; in the outermost dict only what lies in it directly does."""
    inside = path[: len(root)] == root if root else len(path) == 1 and isinstance(path[0], str)
    return path[len(root) :] if inside else None


def sizes_of(optimizers: Sequence[OptimizerDict]) -> str:
    """How many parameters each group of the optimizers has."""
    return ", ".join(f"{o.where} has {' + '.join(str(len(owners)) for owners in o.lists())}" for o in optimizers)


def _names(roots: Sequence[Steps]) -> str:
    return " and ".join(sorted(joined(root) or "the outermost dict" for root in roots))


def _agree(a: str, b: str) -> bool:
    """Whether two names can be of one parameter: one ends with the other, as with the prefix of a wrapper."""
    return a == b or a.endswith(f".{b}") or b.endswith(f".{a}")
