"""The states of FSDP1's optimizer, given to parameters, or kept apart."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.dtensor_ranks.flat import (
    Range,
    concatenated,
    flat_layout,
    flat_parameters,
    original_parameters,
)
from jax_ucp.formats.nested import as_dict, as_list
from jax_ucp.formats.options import MODULE_ORDER, Options, word_note
from jax_ucp.formats.pairing import Undecided
from jax_ucp.formats.torch_save.optimizer_dicts import Steps, joined
from jax_ucp.layout.fragments import Shape
from jax_ucp.layout.patterns import Replicated
from jax_ucp.sources.consolidated import Consolidated


@dataclass(frozen=True, slots=True)
class Stored:
    """One rank's part of a state: the shard that it is of, its shape and its key."""

    shard: int
    shape: Shape
    key: str


@dataclass(frozen=True)
class FlatStates:
    """The states of an optimizer by number and name; `shards` are the ranks that share a flat
    parameter.
    """

    states: Mapping[int, Mapping[str, Sequence[Stored]]]
    groups: Sequence[Mapping[str, Any]]
    shards: int

    @classmethod
    def of(cls, states: Mapping[Steps, Sequence[Stored]], tree: Any, shards: int) -> FlatStates:
        """Of states by path, and the optimizer's dict of a rank."""
        by_number: dict[int, dict[str, Sequence[Stored]]] = defaultdict(dict)
        for path, parts in states.items():
            if len(path) != 4 or type(path[2]) is not int:
                raise FormatError(f"{joined(path)} is not a state of an optimizer with numbers")
            by_number[path[2]][str(path[3])] = parts
        groups = [as_dict(group) for group in as_list(as_dict(tree).get("param_groups"))]
        return cls(by_number, groups, shards)

    @property
    def numbers(self) -> list[list[int]]:
        return [[n for n in as_list(g.get("params")) if type(n) is int] for g in self.groups]

    def parts(self, number: int) -> list[Range] | None:
        """The parts of the flat parameter, or of the original one, with this number; None of one
        without states.
        """
        for stored in self.states.get(number, {}).values():
            if stored[0].shape:
                return concatenated(self._lengths(stored))
        return None

    def _lengths(self, stored: Sequence[Stored]) -> list[list[int]]:
        of_shard: dict[int, list[int]] = defaultdict(list)
        for part in stored:
            of_shard[part.shard].append(part.shape[0])
        if any(len(set(lengths)) != 1 for lengths in of_shard.values()):
            raise FormatError(f"{stored[0].key} has another length in a replica")
        return [of_shard[shard] for shard in sorted(of_shard)]

    @property
    def are_flat(self) -> bool:
        """Whether these are of flat parameters: all ranks have parts of each, of equal length."""
        for number in self.states:
            parts = self.parts(number)
            ranks = {part.shard for part in next(iter(self.states[number].values()))}
            if len(ranks) != self.shards:
                return False
            if parts is not None and len({part.length for part in parts}) != 1:
                return False
        return True


def place_flat(
    imported: Import, flat: FlatStates, shapes: Mapping[str, Shape], options: Options
) -> None:
    """Give the states to parameters of these names, in the order of the model, if the user says so;
    else keep them apart.

    Raises FormatError where that does not fit.
    """
    if options.optimizer_groups is None:
        _keep_apart(imported, flat)
        return
    if options.optimizer_groups != MODULE_ORDER:
        raise FormatError(
            f"{imported.path}: the optimizer is FSDP1's, of flat parameters: of these only"
            f" optimizer_groups={MODULE_ORDER!r} can be said"
        )
    try:
        starts = _starts(flat, shapes)
    except Undecided as error:
        raise FormatError(f"{imported.path}: optimizer_groups does not fit: {error}") from None
    for number, of_number in starts.items():
        for name, start in of_number.items():
            _place(imported, flat, number, name, (shapes[name], start))
    for numbers, group in zip(flat.numbers, flat.groups, strict=True):
        for name in (name for number in numbers for name in starts.get(number, {})):
            imported.hyperparameters(name, group)
    imported.said["optimizer_groups"] = MODULE_ORDER
    imported.notes.append(word_note(MODULE_ORDER))


def _starts(flat: FlatStates, shapes: Mapping[str, Shape]) -> dict[int, dict[str, int]]:
    """The parameters of each number, and where each starts in the flat one."""
    numbers = list(itertools.chain.from_iterable(flat.numbers))
    parts = {number: flat.parts(number) for number in numbers}
    if strays := sorted(flat.states.keys() - parts.keys()):
        raise Undecided(f"there are states of {strays[0]}, which no group lists")
    if not flat.are_flat:
        totals = [[_total(parts[number]) for number in group] for group in flat.numbers]
        named = itertools.chain.from_iterable(original_parameters(shapes, totals))
        return {number: {name: 0} for number, name in zip(numbers, named, strict=True)}
    lengths = [_length(parts[number]) for number in numbers]
    units = flat_parameters(shapes, flat.shards, lengths)
    return {number: _behind(unit, shapes) for number, unit in zip(numbers, units, strict=True)}


def _behind(names: Sequence[str], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Where each parameter starts that lie one behind the other."""
    sizes = [math.prod(shapes[name]) for name in names]
    return dict(zip(names, itertools.accumulate([0, *sizes]), strict=False))


def _length(parts: Sequence[Range] | None) -> int | None:
    """The length of every rank's part of a flat parameter; None of one without states."""
    return parts[0].length if parts else None


def _total(parts: Sequence[Range] | None) -> int | None:
    return max(part.start + part.length for part in parts) if parts else None


def _place(
    imported: Import, flat: FlatStates, number: int, name: str, at: tuple[Shape, int]
) -> None:
    """Give a parameter of this shape and start its states; what has no axes is all of them's."""
    shape, start = at
    for state, stored in flat.states.get(number, {}).items():
        if not stored[0].shape:
            layout = Replicated().join([part.shape for part in stored])
        else:
            stored = sorted(stored, key=lambda part: part.shard)
            layout = flat_layout(shape, start, flat.parts(number) or [])
        param = Consolidated(layout, [part.key for part in stored])
        imported.parameter(state, name, param, f"{state} of {name}, a part of a flat parameter")


def _keep_apart(imported: Import, flat: FlatStates) -> None:
    for number, states in flat.states.items():
        for state, stored in states.items():
            label = f"optim.state.{number}.{state}"
            if stored[0].shape:
                stored = sorted(stored, key=lambda part: part.shard)
                parts = flat.parts(number) or []
                layout = flat_layout((_total(parts) or 0,), 0, parts)
            else:
                layout = Replicated().join([part.shape for part in stored])
            param = Consolidated(layout, [part.key for part in stored])
            imported.parameter("other", label, param, "a state of a flat parameter")
    imported.notes.append(
        "the states of FSDP1's optimizer are kept under `other`, flat as they are: they go by"
        " numbers, and nothing stored says which parameters each has. To map them, say"
        f" optimizer_groups={MODULE_ORDER!r} (--optimizer-groups {MODULE_ORDER}) if the optimizer"
        " was made of model.parameters(), as verl does"
    )
