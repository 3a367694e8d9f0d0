"""Whose state is it: the one decision, for the optimizers of all formats. Integers only.

A format prepares the slots of its optimizers and the parameters that they may be. Then decide, in
this order: lists of names, which the file has or the user gives; the user's word, that each group
is in the order of the model; equal bits; shapes that leave one arrangement. Else Undecided is
raised, and the format keeps the states apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from jax_ucp.layout.fragments import Shape
from jax_ucp.options import HF_DECAY, SaidGroups, rule_of
from jax_ucp.states.pairing import (
    Contradicted,
    Undecided,
    candidates_by_shape,
    contradiction,
    only_division,
    only_pairing,
)

Key = TypeVar("Key", bound=Hashable)
Name = Any  # hashable: what the format calls a parameter, mostly a str
Orders = Mapping[tuple[Name, ...], Sequence[str]]

# What transformers' Trainer decays (`get_decay_parameter_names`): nothing with these words in its
# name. Before release 4.50, and for LayerNorm of torch always, it went by classes.
_BIAS = re.compile("bias")
_NORM = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


@dataclass(frozen=True, slots=True)
class Slot(Generic[Key]):
    """A parameter in an optimizer: its number or name, its states' shapes, a label for messages."""

    key: Key
    shapes: Mapping[str, Shape]
    label: str


@dataclass(frozen=True, slots=True)
class SlotGroup(Generic[Key]):
    """The slots that an optimizer lists together, in its order."""

    label: str
    slots: Sequence[Slot[Key]]


@dataclass(frozen=True, slots=True)
class Assignment(Generic[Key]):
    """The parameter of each slot; `classes` of models whose order the user's word rests on."""

    names: Mapping[Key, Name]
    classes: Sequence[str] = ()


Unfit = Callable[[Slot[Key], Name], str]


def assign(
    groups: Sequence[SlotGroup[Key]],
    params: Mapping[Name, Shape],
    said: SaidGroups | None,
    *,
    orders: Orders | None = None,
    unfit: Unfit[Key] = lambda slot, name: "",
    bits: Callable[[Slot[Key]], Sequence[Name]] | None = None,
) -> Assignment[Key]:
    """The parameter of each slot: by lists of names, by an order that the user names, or by proof.

    Args:
        params: The parameters with their shapes, in the order of the model.
        said: A list of names for each group; or a text, the user's word that slots are in the
            model's order; or None to prove it. Lists and orders are checked against shapes too.
        orders: Possible orders of the model's parameters, each with the classes of models that
            have it. Default: the order of `params`. Used only with the user's word.
        unfit: The reason why a slot cannot be a parameter although its shapes fit, which is then
            the error's text; empty if it can.
        bits: The parameters that have the bits of a slot. If given, a proof compares these and
            not shapes.

    Raises Undecided if nothing fits, several assignments fit, or (by shapes) slots and parameters
    differ in number; Contradicted if no bits fit. The result is in no particular order.

    >>> slots = [Slot(0, {"exp_avg": (2,)}, "number 0"), Slot(1, {"exp_avg": (3,)}, "number 1")]
    >>> assign([SlotGroup("group 0", slots)], {"a": (3,), "b": (2,)}, None).names
    {1: 'a', 0: 'b'}
    """
    slots = [slot for group in groups for slot in group.slots]
    match said:
        case tuple():
            return Assignment(_listed(groups, params, said, unfit))
        case str():
            return _ordered(groups, params, said, orders or {tuple(params): ()}, unfit)
        case None if bits is not None:
            by_bits: dict[Key, Name] = {}
            for slot in slots:
                match bits(slot):
                    case []:
                        raise Contradicted("one of them is of no parameter")
                    case [name]:
                        by_bits[slot.key] = name
                    case _:
                        raise Undecided(SAME_BITS)
            if len(set(by_bits.values())) != len(by_bits):
                raise Contradicted("two of them are of one parameter")
            return Assignment(by_bits)
    if len(slots) != len(params):
        raise Undecided(f"there are {len(slots)} of them for {len(params)} tensors")
    candidates = candidates_by_shape({slot.key: slot.shapes for slot in slots}, params)
    return Assignment(only_pairing(candidates))


def _listed(
    groups: Sequence[SlotGroup[Key]],
    params: Mapping[Name, Shape],
    lists: Sequence[Sequence[Name]],
    unfit: Unfit[Key],
) -> dict[Key, Name]:
    names: dict[Key, Name] = {}
    for group, listed in zip(groups, lists, strict=True):
        if len(group.slots) != len(listed):
            raise Undecided(
                f"{group.label} has {len(group.slots)} parameters, but {len(listed)} names"
            )
        for slot, name in zip(group.slots, listed, strict=True):
            if name not in params:
                raise Undecided(f"{name} is not a parameter of the module")
            if why := unfit(slot, name):
                raise Undecided(why)
            if state := contradiction(slot.shapes, params[name]):
                raise Undecided(
                    f"{state} of {slot.label} has shape {list(slot.shapes[state])}, but {name},"
                    f" which is said to be it, has {list(params[name])}"
                )
            names[slot.key] = name
    if len(set(names.values())) != len(names):
        raise Undecided("one parameter has several numbers")
    return names


def _ordered(
    groups: Sequence[SlotGroup[Key]],
    params: Mapping[Name, Shape],
    word: str,
    orders: Orders,
    unfit: Unfit[Key],
) -> Assignment[Key]:
    """The one assignment in which every group lists its parameters in an order of the model."""

    @cache  # a search asks of each place millions of times
    def fits(name: Name, group: int, place: int) -> bool:
        slot, shape = groups[group].slots[place], params[name]
        misfit = contradiction(slot.shapes, shape) or unfit(slot, name)
        return not misfit and admits(word, str(name), shape, group % 2)

    decided: dict[tuple[Name, ...], dict[Key, Name]] = {}
    why = Undecided("")
    lengths = [len(group.slots) for group in groups]
    for order in orders:
        try:
            division = only_division(dict.fromkeys(order, 1), lengths, fits)
        except Undecided as error:
            why = error
            continue
        decided[order] = {groups[i].slots[at].key: name for name, (i, at) in division.items()}
    if not decided:
        raise why
    ways = list(decided.values())
    if any(way != ways[0] for way in ways):
        classes = [orders[order][0] for order in decided]
        raise Undecided(
            f"the classes of transformers with these names ({', '.join(classes)}) have them in"
            f" several orders; say which is meant: '{rule_of(word)}:{classes[0]}'"
        )
    return Assignment(ways[0], [name for order in decided for name in orders[order]])


SAME_BITS = "the bits of masters fit the weights in several ways"


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


def deciding(words: Iterable[str], decide: Callable[[str], object]) -> list[str]:
    """The words with which `decide` raises no Undecided; the user is offered no others."""
    useful: list[str] = []
    for word in words:
        with suppress(Undecided):
            decide(word)
            useful.append(word)
    return useful
