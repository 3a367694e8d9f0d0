"""ZeRO-0: which parameter each number of an optimizer means, where that can be told.

States have numbers, groups list the numbers of their parameters, and nothing has a name, unless
torch was given named parameters: then groups have `param_names`. Which order a group has is the
training script's choice. A pairing is taken where names are stored, where shapes, or the bits of
masters, leave one, or where the user says it (`optimizer_groups`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.masters import Copies
from jax_ucp.formats.deepspeed.slices import Slices
from jax_ucp.formats.deepspeed.stage0_optimizers import (
    StageZero,
    is_of_experts,
    numbers_in,
    shapes_of_states,
    sizes_of,
)
from jax_ucp.formats.options import SaidGroups
from jax_ucp.formats.pairing import (
    Contradicted,
    Undecided,
    candidates_by_shape,
    contradiction,
    only_division,
    only_filling,
    only_pairing,
)
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Shape

# Of a parameter its number, and the elements of that number's tensors that are its own.
Places = dict[str, tuple[int, Box]]


def places_of(slices: Slices, one: StageZero, groups: SaidGroups | None) -> Places:
    """The place of each parameter, by names in the file before `groups`. Raises Undecided."""
    groups = None if one.named else groups
    if not one.masters:
        return _whole(one, _pairs(one, groups))
    if any(map(moe.is_native, one.shapes)):
        raise Undecided(
            "there are experts, whose masters are not told apart; ZeRO-1 stores them with names"
        )
    place = slices.place(one.mp)
    keys = {name: slices.states["param", name].keys[place] for name in one.shapes}
    copies = Copies(slices.importer.shards, keys, one.shapes)
    if one.flat:
        return _places_in_buffers(one, copies, groups)
    return _whole(one, _pairs_of_masters(one, copies, groups))


def _whole(one: StageZero, names: Mapping[int, str]) -> Places:
    return {name: (number, Box.whole(one.shapes[name])) for number, name in names.items()}


def _pairs(one: StageZero, order: SaidGroups | None) -> dict[int, str]:
    """The parameter of each number, of an optimizer of torch's own."""
    names: dict[int, str] = {}
    for i, (groups, shapes) in enumerate(one.kinds()):
        lists = _lists(one, order, experts=bool(i)) if isinstance(order, tuple) else order
        names |= _names_of_numbers(shapes, one.states, groups, lists)
    return names


def _lists(
    one: StageZero, lists: Sequence[Sequence[str]], experts: bool
) -> tuple[tuple[str, ...], ...]:
    """The user's lists for the groups of one kind; of experts those of this rank."""
    if len(lists) != len(one.groups):
        raise Undecided(f"{len(lists)} lists for {len(one.groups)} groups ({sizes_of(one)})")
    (_, dense), (_, mine) = one.kinds()
    own = dense | mine
    for name in itertools.chain.from_iterable(lists):
        if name not in one.shapes:
            raise Undecided(
                f"{name} is not a parameter here; the first are {', '.join([*one.shapes][:3])}"
            )
    listed = [tuple(filter(own.__contains__, names)) for names in lists]
    return tuple(
        itertools.compress(listed, [is_of_experts(group) == experts for group in one.groups])
    )


def _names_of_numbers(
    shapes: Mapping[str, Shape],
    states: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    order: SaidGroups | None = None,
) -> dict[int, str]:
    """The parameter that each number means; `shapes` has them in the order of the module.

    Raises Undecided where names, shapes and the user's `order` leave no way, or several.
    """
    numbers = numbers_in(groups)
    state_shapes = {number: shapes_of_states(states.get(number, {})) for number in numbers}
    if all("param_names" in group for group in groups):
        return _as_listed(shapes, state_shapes, groups, [group["param_names"] for group in groups])
    if isinstance(order, str):

        def orders(group: Mapping[str, Any]) -> list[list[int]]:
            return _orders(group, state_shapes)

        return _in_module_order(
            shapes,
            itertools.chain.from_iterable(map(orders, groups)),
            lambda name, number: not contradiction(state_shapes[number], shapes[name]),
        )
    if order is not None:
        return _as_listed(shapes, state_shapes, groups, order)
    if len(state_shapes) != len(shapes):
        raise Undecided(f"there are {len(state_shapes)} of them for {len(shapes)} parameters")
    return only_pairing(candidates_by_shape(state_shapes, shapes))


def _orders(
    group: Mapping[str, Any], state_shapes: Mapping[int, Mapping[str, Shape]]
) -> list[list[int]]:
    """The numbers of a group, in lists that each follow the order of the module.

    Muon sorts its parameters by shape, so that only those of one shape do
    (`runtime/zero/muon/original_muon.py`).
    """
    if not group.get("use_muon"):
        return [list(group["params"])]
    by_shape: dict[Shape | None, list[int]] = {}
    for number in group["params"]:
        by_shape.setdefault(state_shapes[number].get("momentum_buffer"), []).append(number)
    return list(by_shape.values())


def _in_module_order(
    names: Iterable[str], orders: Iterable[Sequence[int]], fits: Callable[[str, int], bool]
) -> dict[int, str]:
    """The parameter of each number, if each order is that of `names`. Raises Undecided."""
    numbers = list(orders)
    division = only_division(
        dict.fromkeys(names, 1),
        [*map(len, numbers)],
        lambda name, group, place: fits(name, numbers[group][place]),
    )
    return {numbers[group][place]: name for name, (group, place) in division.items()}


def _as_listed(
    shapes: Mapping[str, Shape],
    state_shapes: Mapping[int, Mapping[str, Shape]],
    groups: Sequence[Mapping[str, Any]],
    lists: Sequence[Sequence[str]],
) -> dict[int, str]:
    """The names of lists, one for each group. Raises Undecided if they do not fit."""
    names_by_number: dict[int, str] = {}
    for group, names in zip(groups, lists, strict=True):
        if (count := len(group["params"])) != len(names):
            first = f" from number {group['params'][0]} on" if count else ""
            raise Undecided(f"the group{first} has {count} parameters, but {len(names)} names")
        for number, name in zip(group["params"], names, strict=True):
            if name not in shapes:
                raise Undecided(f"{name} is not a parameter of the module")
            if state := contradiction(state_shapes[number], shapes[name]):
                have = (
                    f"{list(state_shapes[number][state])}, but {name}, which should be it, has"
                    f" {list(shapes[name])}"
                )
                raise Undecided(f"{state} of number {number} has shape {have}")
            names_by_number[number] = name
    if len(set(names_by_number.values())) != len(names_by_number):
        raise Undecided("one parameter has several numbers")
    return names_by_number


def _pairs_of_masters(one: StageZero, copies: Copies, order: SaidGroups | None) -> dict[int, str]:
    """The parameter of each number that has a master of its own."""
    keys = {number: one.stored.key(master) for number, master in one.masters.items()}

    def fits(name: str, number: int) -> bool:
        return one.masters[number].shape == one.shapes[name] and copies.begins(
            name, keys[number], 0
        )

    if one.named or isinstance(order, tuple):
        names = _pairs(one, order)
        for number, name in names.items():
            if not fits(name, number):
                raise Undecided(
                    f"the master of number {number} is not that of {name}, by its shape or bits"
                )
        return names
    if isinstance(order, str):
        return _in_module_order(one.shapes, [group["params"] for group in one.groups], fits)
    return _pairs_by_bits(one, copies, keys)


def _pairs_by_bits(one: StageZero, copies: Copies, keys: Mapping[int, str]) -> dict[int, str]:
    """The parameter of each number whose master, in the tensor `keys[number]`, has elements."""
    names_by_number: dict[int, str] = {}
    for number, master in one.masters.items():
        names = [
            name
            for name in copies.candidates_at(keys[number], 0)
            if one.shapes[name] == master.shape
        ]
        if math.prod(master.shape):
            names_by_number[number] = _one_of(names)
    if len(set(names_by_number.values())) != len(names_by_number):
        raise Contradicted("two of them are of one parameter")
    return names_by_number


def _places_in_buffers(one: StageZero, copies: Copies, order: SaidGroups | None) -> Places:
    """The place of each parameter in the flat buffers of masters, one for each group."""
    numbers = [*one.masters]
    keys = [one.stored.key(master) for master in one.masters.values()]
    lengths = [math.prod(master.shape) for master in one.masters.values()]
    sizes = copies.sizes
    if isinstance(order, tuple):
        starts = _listed_in_buffers(one, copies, keys, lengths, order)
    elif isinstance(order, str):
        starts = only_division(
            sizes, lengths, lambda name, group, at: copies.begins(name, keys[group], at)
        )
    else:
        starts = only_filling(
            sizes, lengths, lambda group, at: _candidates_at(copies, keys[group], at)
        )
    return {
        name: (numbers[group], Box((at,), (at + sizes[name],)))
        for name, (group, at) in starts.items()
    }


def _one_of(names: Sequence[str]) -> str:
    """The one parameter with the bits of a master. Raises Undecided for none or several."""
    if not names:
        raise Contradicted("one of them is of no parameter")
    if len(names) > 1:
        raise Undecided("the bits of masters fit the weights in several ways")
    return names[0]


def _candidates_at(copies: Copies, key: str, at: int) -> list[str]:
    """The parameters with the bits at a place. Raises Undecided if two have the same bits."""
    names = copies.candidates_at(key, at)
    if len({copies.sizes[name] for name in names}) != len(names):
        raise Undecided("the bits of masters fit the weights in several ways")
    return names


def _listed_in_buffers(
    one: StageZero,
    copies: Copies,
    keys: Sequence[str],
    lengths: Sequence[int],
    lists: Sequence[Sequence[str]],
) -> dict[str, tuple[int, int]]:
    if len(lists) != len(lengths):
        raise Undecided(f"{len(lists)} lists for {len(lengths)} groups ({sizes_of(one)})")
    places: dict[str, tuple[int, int]] = {}
    for group, names in enumerate(lists):
        at = 0
        for name in names:
            if name not in one.shapes:
                raise Undecided(f"{name} is not a parameter of the module")
            end = at + copies.sizes[name]
            if end > lengths[group] or not copies.begins(name, keys[group], at):
                raise Undecided(
                    f"group {group} does not have the master of {name} at {at} of its"
                    f" {lengths[group]}"
                )
            places[name] = group, at
            at = end
        if at != lengths[group]:
            raise Undecided(
                f"group {group} has {lengths[group]} elements, the parameters listed for it {at}"
            )
    return places
