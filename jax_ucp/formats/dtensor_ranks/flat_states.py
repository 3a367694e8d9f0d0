"""FSDP1's optimizer: its states are ranges of flat parameters, by number, and each rank has a part.

FSDP1 puts the parameters of a module that it wraps, without those of wrapped modules inside, one
behind the other into a flat parameter; each rank has as long a part of that, the last one padded.
With `use_orig_params=False` these are the optimizer's parameters, the outer module's before those
inside. With `use_orig_params=True` each parameter is one of the optimizer's, and a rank has of it
what lies in its part of the flat one: nothing, often. Files say neither which modules were wrapped
nor which number is what. The user says that the optimizer had `model.parameters()`; then sizes must
leave one way, in which states are given to parameters; else they are kept apart.

Facts: `FlatParamHandle` in `torch/distributed/fsdp/_flat_param.py` of torch 2.13.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated, flat_layout
from jax_ucp.options import MODULE_ORDER, Options, remedy, word_note
from jax_ucp.states.assign import Slot, SlotGroup, assign
from jax_ucp.states.optimizer_dicts import Steps, joined
from jax_ucp.states.pairing import Undecided

MAX_WAYS = 1 << 16
_NUMBER = re.compile(r"\d+")
Units = list[list[str]]  # the names of the parameters in each flat one, in order


@dataclass(frozen=True, slots=True)
class FlatShard:
    """The part of a state that one rank has: the number of the shard, its shape and its key."""

    shard: int
    shape: Shape
    key: str


@dataclass(frozen=True)
class FlatStates:
    """The states of an optimizer by number; `parts` are parameters' ranges on `shards` ranks."""

    states: Mapping[int, Mapping[str, Sequence[FlatShard]]]
    groups: Sequence[tuple[Sequence[int], Mapping[str, Any]]]
    parts: Mapping[int, Sequence[range] | None]
    shards: int

    @classmethod
    def of(cls, states: Mapping[Steps, Sequence[FlatShard]], tree: Any, shards: int) -> FlatStates:
        """The states, from those by path and one rank's dict of the optimizer."""
        by_number: dict[int, dict[str, Sequence[FlatShard]]] = defaultdict(dict)
        for path, stored in states.items():
            if len(path) != 4 or type(path[2]) is not int:
                raise FormatError(f"{joined(path)} is not a state of an optimizer with numbers")
            in_order = sorted(stored, key=lambda part: part.shard)
            by_number[path[2]][str(path[3])] = in_order if stored[0].shape else stored
        settings = [as_dict(group) for group in as_list(as_dict(tree).get("param_groups"))]
        groups = [([n for n in as_list(g.get("params")) if type(n) is int], g) for g in settings]
        parts = {number: _parts(of_number) for number, of_number in by_number.items()}
        return cls(by_number, groups, parts, shards)

    @property
    def are_flat(self) -> bool:
        """Whether the states are of flat parameters: all ranks have an equally long part of
        each.
        """
        for number, of_number in self.states.items():
            ranks = {part.shard for part in next(iter(of_number.values()))}
            lengths = {len(part) for part in self.parts[number] or ()}
            if len(ranks) != self.shards or len(lengths) > 1:
                return False
        return True


def _parts(states: Mapping[str, Sequence[FlatShard]]) -> list[range] | None:
    """The ranges of the parameter with these states. Raises FormatError for unlike replicas."""
    stored = next((stored for stored in states.values() if stored[0].shape), None)
    if stored is None:
        return None
    of_shard: dict[int, list[int]] = defaultdict(list)
    for part in stored:
        of_shard[part.shard].append(part.shape[0])
    if any(len(set(lengths)) != 1 for lengths in of_shard.values()):
        raise FormatError(f"{stored[0].key} has another length in a replica")
    # the parts lie one behind the other
    ranges: list[range] = []
    start = 0
    for shard in sorted(of_shard):
        ranges += [range(start, start + length) for length in of_shard[shard]]
        start += of_shard[shard][0]
    return ranges


def place_flat(
    builder: ContentsBuilder, flat: FlatStates, shapes: Mapping[str, Shape], options: Options
) -> None:
    """Add states to parameters in the model's order, or keep them apart. Raises FormatError."""
    if options.optimizer_groups is None:
        for number, states in flat.states.items():
            whole = (_total(flat.parts[number]) or 0,)
            for state, stored in states.items():
                label, keys = f"optim.state.{number}.{state}", [part.key for part in stored]
                layout = _layout(stored, whole, 0, flat.parts[number])
                array = builder.joined(label, layout, keys)
                builder.parameter("other", label, array, "a state of a flat parameter")
        builder.notes.append(
            "the states of FSDP1's optimizer are kept under `other`, flat as they are: they go by"
            " numbers, and nothing stored says which parameters each has;"
            f" {remedy([MODULE_ORDER])},"
            " as verl makes it"
        )
        return
    if options.optimizer_groups != MODULE_ORDER:
        raise FormatError(
            f"{builder.path}: the optimizer is FSDP1's, of flat parameters: of these only"
            f" optimizer_groups={MODULE_ORDER!r} can be said"
        )
    try:
        starts = _starts(flat, shapes)
    except Undecided as error:
        raise FormatError(f"{builder.path}: optimizer_groups does not fit: {error}") from None
    for numbers, settings in flat.groups:
        for number, (name, start) in ((n, at) for n in numbers for at in starts[n].items()):
            for state, stored in flat.states.get(number, {}).items():
                layout = _layout(stored, shapes[name], start, flat.parts[number])
                array = builder.joined(f"{state}.{name}", layout, [part.key for part in stored])
                reason = f"{state} of {name}, a part of a flat parameter"
                builder.parameter(state, name, array, reason)
            builder.hyperparameters(name, settings)
    builder.said["optimizer_groups"] = MODULE_ORDER
    builder.notes.append(word_note(MODULE_ORDER))


def _starts(flat: FlatStates, shapes: Mapping[str, Shape]) -> dict[int, dict[str, int]]:
    """Each number's parameters, and where they start in its flat one. Raises Undecided."""
    numbers = [number for of_group, _ in flat.groups for number in of_group]
    if strays := sorted(flat.states.keys() - set(numbers)):
        raise Undecided(f"there are states of {strays[0]}, which no group lists")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if flat.are_flat:
        parts = [flat.parts.get(number) for number in numbers]
        units = flat_parameters(shapes, flat.shards, [len(p[0]) if p else None for p in parts])
        starts = [itertools.accumulate([0, *map(sizes.__getitem__, unit)]) for unit in units]
        of_unit = [dict(zip(*pair, strict=False)) for pair in zip(units, starts, strict=True)]
        return dict(zip(numbers, of_unit, strict=True))
    # Each parameter is one of the optimizer's, of which the number of elements is known, or not.
    totals = {number: _total(flat.parts.get(number)) for number in numbers}
    groups = [
        SlotGroup(f"group {i}", [Slot(number, {}, f"number {number}") for number in of_group])
        for i, (of_group, _) in enumerate(flat.groups)
    ]

    def unfit(slot: Slot[int], name: str) -> str:
        fits = totals[slot.key] in (None, sizes[name])
        return "" if fits else f"{slot.label} has another number of elements than {name}"

    names = assign(groups, shapes, MODULE_ORDER, unfit=unfit).names
    return {number: {name: 0} for number, name in names.items()}


def _total(parts: Sequence[range] | None) -> int | None:
    """The number of elements of a parameter with these parts; None if it has no states."""
    return max(part.stop for part in parts) if parts else None


def _layout(
    stored: Sequence[FlatShard], shape: Shape, start: int, parts: Sequence[range] | None
) -> ParamLayout:
    """The layout of a state of the parameter that starts at `start` of its flat one."""
    if stored[0].shape:
        return flat_layout(shape, start, parts or [])
    return Replicated().join([part.shape for part in stored])


def flat_parameters(
    shapes: Mapping[str, Shape], parts: int, lengths: Sequence[int | None]
) -> Units:
    """The names of the parameters in each flat one: those of an outer module before those inside.

    `shapes` are in the order of the model. `lengths` has for each flat parameter the length of one
    of its `parts` parts, or None if it is not known. Modules whose names differ only in numbers are
    wrapped all or none, as a policy of classes does. Where no way fits, one parameter may be left
    out, as tied to an earlier one of its shape. Raises Undecided where no way fits, or several, or
    where there are too many to try.

    >>> shapes = {"e.w": (4,), "l.0.w": (3,), "l.1.w": (3,)}
    >>> flat_parameters(shapes, 2, [2, 2, 2])
    [['e.w'], ['l.0.w'], ['l.1.w']]
    """
    ways = _ways(shapes, parts, lengths)
    seen: set[Shape] = set()
    for name, shape in shapes.items() if not ways else ():
        if shape in seen:
            rest = {other: shape for other, shape in shapes.items() if other != name}
            ways += [way for way in _ways(rest, parts, lengths) if way not in ways]
        seen.add(shape)
    if len(ways) != 1:
        how = "several ways" if ways else "no way"
        raise Undecided(
            f"{len(lengths)} flat parameters of FSDP1 can be those of the model in {how}"
        )
    return ways[0]


def _ways(shapes: Mapping[str, Shape], parts: int, lengths: Sequence[int | None]) -> list[Units]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    ways: list[Units] = []
    for wrapped in _wrappings([*shapes], len(lengths)):
        # the parameters of each wrapped module without those of wrapped ones inside; outer first
        by_module: dict[str, list[str]] = {"": []}
        for name in shapes:
            path = name.split(".")[:-1]
            inside = [".".join(path[:depth]) for depth in range(1, len(path) + 1)]
            around = ["", *filter(wrapped.__contains__, inside)]
            for module in around:
                by_module.setdefault(module, [])
            by_module[around[-1]].append(name)
        units = list(filter(None, by_module.values()))
        if len(units) != len(lengths) or units in ways:
            continue
        computed = [-(-sum(map(sizes.__getitem__, unit)) // parts) for unit in units]
        if all(stored in (None, length) for length, stored in zip(computed, lengths, strict=True)):
            ways.append(units)
    return ways


def _wrappings(names: Sequence[str], count: int) -> Iterator[set[str]]:
    """Sets of `count` modules that may be wrapped, or one more if that has no parameters."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for name in names:
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            module = ".".join(path[:depth])
            kinds[_NUMBER.sub("*", module)].add(module)
    sizes = {kind: len(modules) for kind, modules in kinds.items() if len(modules) <= count}
    for tried, chosen in enumerate(subsets([*sizes.items()], count)):
        if tried >= MAX_WAYS:
            raise Undecided("there are too many ways to try them all")
        yield set().union(*(kinds[kind] for kind in chosen))


def subsets(sizes: Sequence[tuple[str, int]], most: int) -> Iterator[list[str]]:
    """The choices of kinds with `most` or `most - 1` modules in all."""
    rest = [*itertools.accumulate((size for _, size in reversed(sizes)), initial=0)][::-1]

    def choose(i: int, left: int) -> Iterator[list[str]]:
        if rest[i] < left - 1:
            return
        if i == len(sizes):
            yield []
            return
        kind, size = sizes[i]
        if size <= left:
            yield from ([kind, *others] for others in choose(i + 1, left - size))
        yield from choose(i + 1, left)

    yield from choose(0, most)
