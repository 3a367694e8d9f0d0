"""Searches for the one pairing of numbered optimizer states with parameters. Integers only.

`torch.optim` numbers parameters as a script lists them: in the module's order, sorted, reversed,
split by weight decay, or layer by layer; so an order is a guess. A proof is that the shapes leave
one arrangement. Anything else raises Undecided: the states stay apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from jax_ucp.layout.fragments import Shape

Number = TypeVar("Number", bound=Hashable)
Name = TypeVar("Name", bound=Hashable)

# More steps of a search than this, some seconds, and nothing is decided.
MAX_STEPS = 1_000_000
_TOO_MANY = "there are too many ways to try them all"
_SEVERAL = "they fit the parameters in several ways"
_NO_WAY = "they fit the parameters in no way"

# States with an element for each element of the parameter: of `torch.optim`, and of the optimizers
# of DeepSpeed and transformers.
_ELEMENTWISE = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("grad_avg", "acc_delta", "sum", "prev", "step_size", "ax", "variance"),
    *("state1", "state2"),  # of bitsandbytes, in 8 bits or 32
)
# The shape of a state by its name, from that of the parameter. Adafactor factors a matrix:
# transformers' `optimization.py` names the factors exp_avg_sq_row and exp_avg_sq_col, torch's
# `_adafactor.py` row_var and col_var.
_SHAPES: Mapping[str, Callable[[Shape], Shape]] = {
    **dict.fromkeys(_ELEMENTWISE, lambda shape: shape),
    "exp_avg_sq_row": lambda shape: shape[:-1],
    "exp_avg_sq_col": lambda shape: shape[:-2] + shape[-1:],
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, *shape[-1:]),
}


class Undecided(ValueError):
    """Nothing decides whose the states are. The text is a clause about "their" shapes."""


class Contradicted(Undecided):
    """The bits of masters prove that they belong to none of these parameters."""


def contradiction(states: Mapping[str, Shape], shape: Shape) -> str | None:
    """The first state that a parameter of this shape cannot have; states of unknown names can have
    any shape.

    >>> contradiction({"step": (), "exp_avg": (2, 3)}, (3, 2))
    'exp_avg'
    >>> contradiction({"exp_avg_sq_row": (4,), "exp_avg_sq_col": (4,)}, (4,))
    'exp_avg_sq_row'
    """
    for name, state_shape in states.items():
        if name == "state1" and has_two_first_moments(states):
            continue  # the second moment has the parameter's shape
        if name in _SHAPES and _SHAPES[name](shape) != state_shape:
            return name
    return None


def has_two_first_moments(states: Mapping[str, Shape]) -> bool:
    """Whether states are those of bitsandbytes' AdEMAMix, by their shapes: `state1` has the fast
    and the slow first moment, one after the other.
    """
    return "state2" in states and states.get("state1") == (2, *states["state2"])


def tells_shape(states: Mapping[str, Shape]) -> bool:
    """Whether states fix the shape of their parameter: one has it, and the others are known by
    name.

    An unknown optimizer may keep a smaller `exp_avg` beside its own states (GaLore's, of low rank).
    """
    with_axes = {name for name, shape in states.items() if shape}
    return not with_axes - _SHAPES.keys() and not _SHAPES.keys().isdisjoint(states)


def candidates_by_shape(
    members: Mapping[Number, Mapping[str, Shape]], shapes: Mapping[Name, Shape]
) -> dict[Number, Sequence[Name]]:
    """The names that each number could have, by the shapes of its states; those without states
    could have any.

    >>> candidates_by_shape({0: {"exp_avg": (2,)}, 1: {}, 2: {"z": (2,)}}, {"a": (2,), "b": (3,)})
    {0: ['a'], 2: ['a', 'b']}
    """
    by_kind: dict[frozenset[tuple[str, Shape]], Sequence[Name]] = {}
    candidates: dict[Number, Sequence[Name]] = {}
    for number, states in members.items():
        if not states:
            continue
        kind = frozenset(states.items())
        if kind not in by_kind:
            fits = partial(contradiction, states) if tells_shape(states) else lambda shape: None
            by_kind[kind] = [name for name, shape in shapes.items() if not fits(shape)]
        candidates[number] = by_kind[kind]
    return candidates


def only_pairing(candidates: Mapping[Number, Collection[Name]]) -> dict[Number, Name]:
    """A different name for each number, chosen from its candidates, if only one choice is possible.

    If there is only one choice, some number has one candidate left: otherwise one could go from any
    number to another candidate, from there to the number that has it, and so on, until a free name
    or a cycle gives a second choice.

    >>> only_pairing({0: ["a", "b"], 1: ["a"]})
    {1: 'a', 0: 'b'}
    """
    # two numbers with the same names to choose from can be exchanged
    kinds = [kind for kind in map(frozenset, candidates.values()) if len(kind) > 1]
    if len(set(kinds)) != len(kinds):
        raise Undecided(_SEVERAL)
    left = {number: set(names) for number, names in candidates.items()}
    numbers_of: dict[Name, set[Number]] = defaultdict(set)
    for number, names in left.items():
        for name in names:
            numbers_of[name].add(number)
    pairs: dict[Number, Name] = {}
    single = [number for number, names in left.items() if len(names) <= 1]
    while single:
        number = single.pop()
        if not left[number]:
            raise Undecided(_NO_WAY)
        (name,) = left.pop(number)
        pairs[number] = name
        for other in numbers_of.pop(name) - {number}:
            left[other].discard(name)
            if len(left[other]) <= 1:
                single.append(other)
    if left:
        raise Undecided(_SEVERAL)
    return pairs


def only_division(
    sizes: Mapping[Name, int], ends: Sequence[int], fits: Callable[[Name, int, int], bool]
) -> dict[Name, tuple[int, int]]:
    """(group, place) of each name that is in a group, where names in order fill all groups in one
    way only.

    A name of size n is in no group, or takes the next n places of one if it `fits(name, group,
    place)`; `ends` are the groups' sizes. The order of the names is taken for granted: callers have
    the user's word for it.

    >>> only_division({"w": 1, "b": 1, "v": 1}, [2, 1], lambda name, group,
    ...     place: (name == "b") == (group == 1))
    {'v': (0, 1), 'b': (1, 0), 'w': (0, 0)}
    """
    left, tried = sum(sizes.values()), 0
    ways: dict[tuple[int, ...], int] = {(0,) * len(ends): 1}
    steps: list[dict[tuple[int, ...], tuple[tuple[int, ...], int | None]]] = []
    for name, size in sizes.items():
        left -= size
        needed = sum(ends) - left  # places taken by now, if all can be
        after: dict[tuple[int, ...], int] = {}
        came: dict[tuple[int, ...], tuple[tuple[int, ...], int | None]] = {}
        for at, count in ways.items():
            # where the groups are full to if the name is in none of them, or in one that it fits
            moves: list[tuple[tuple[int, ...], int | None]] = [(at, None)]
            for group, place in enumerate(at):
                if place + size <= ends[group] and fits(name, group, place):
                    moves.append(((*at[:group], place + size, *at[group + 1 :]), group))
            for to, group in moves:
                if sum(to) >= needed:
                    after[to] = min(2, after.get(to, 0) + count)
                    came[to] = at, group
        ways = after
        steps.append(came)
        tried += len(ways)
        if tried > MAX_STEPS:
            raise Undecided(_TOO_MANY)
    end = tuple(ends)
    count = ways.get(end, 0)
    if count != 1:
        if count:
            raise Undecided("in the order of the model they fit it in several ways")
        raise Undecided(
            "in the order of the model they fit it in no way: they have another, or states of other"
            " shapes than their parameters, or a file is another rank's"
        )
    places: dict[Name, tuple[int, int]] = {}
    for name, came in zip(reversed(list(sizes)), reversed(steps), strict=True):
        at, group = came[end]
        if group is not None:
            places[name] = group, at[group]
        end = at
    return places


def only_filling(
    sizes: Mapping[Name, int],
    lengths: Sequence[int],
    candidates: Callable[[int, int], Collection[Name]],
) -> dict[Name, tuple[int, int]]:
    """(buffer, offset) of each name that is in one, where names in some order fill all buffers in
    one way only.

    `candidates(buffer, offset)` are names that may begin there; `lengths` are the buffers' sizes.
    Names of size 0 leave no trace and are in none. Raises Contradicted where there is no way.

    >>> only_filling({"a": 2, "b": 3}, [5], lambda buffer, offset: {0: "b", 3: "a"}.get(offset, ""))
    {'b': (0, 0), 'a': (0, 3)}
    """
    starts = [(buffer, 0) for buffer, length in enumerate(lengths) if length]
    if not starts:
        return {}
    places: dict[Name, tuple[int, int]] = {}  # of the names placed so far, in the order of places

    def choices(at: tuple[int, int]) -> tuple[tuple[int, int], list[Name]]:
        """A place, and the names that fit there: not placed yet, and not too long."""
        room = lengths[at[0]] - at[1]
        free = [name for name in candidates(*at) if name not in places]
        return at, [name for name in free if 0 < sizes[name] <= room]

    solutions: list[dict[Name, tuple[int, int]]] = []
    open_choices = [choices(starts[0])]
    steps = 0
    while open_choices and len(solutions) < 2:
        steps += 1 + len(places)
        if steps > MAX_STEPS:
            raise Undecided(_TOO_MANY)
        at, names = open_choices[-1]
        # forget the choice that was tried here, and all after it
        while places and next(reversed(places.values())) >= at:
            places.popitem()
        if not names:
            open_choices.pop()
            continue
        name = names.pop()
        places[name] = at
        # the next name begins in this buffer, or in the next one
        (buffer, offset), size = at, sizes[name]
        following = next((start for start in starts if start[0] > buffer), None)
        if offset + size < lengths[buffer]:
            following = buffer, offset + size
        if following is None:
            solutions.append(dict(places))
        else:
            open_choices.append(choices(following))
    if not solutions:
        raise Contradicted(_NO_WAY)
    if len(solutions) > 1:
        raise Undecided(_SEVERAL)
    return solutions[0]
