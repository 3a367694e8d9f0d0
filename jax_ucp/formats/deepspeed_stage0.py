"""ZeRO-0: which parameter each optimizer state belongs to, where that can be told.

In fp32 the optimizer is torch's own: states have numbers, groups list the numbers of their parameters, and nothing has
a name (unless torch was given named parameters: then groups have `param_names`). In fp16 and bf16 DeepSpeed wraps it:
the unfused wrapper keeps a list of masters for each group, the fused one a flat buffer of them, and of each state
(`runtime/fp16/unfused_optimizer.py`, `fused_optimizer.py`, 0.19.8).

One thing is taken for granted: that each group has its parameters in the order of the module, as every grouping that
filters `named_parameters()` does. Then shapes decide, and where there are masters their first elements, which must be
those of the module when rounded; if they fit in one way only. Otherwise we refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.torch_file import StoredTensor
from jax_ucp.layout.fragments import Shape

# More ways to be part of the way through than this, and nothing is decided.
_MAX_WAYS = 20_000


def unwrapped(optimizer: Any) -> tuple[Any, str]:
    """Torch's own optimizer, and the name of the masters beside it, if DeepSpeed has wrapped it for half precision."""
    for masters in ("fp32_groups", "fp32_groups_flat"):
        if isinstance(optimizer, dict) and masters in optimizer:
            return optimizer.get("optimizer_state_dict"), masters
    return optimizer, ""


def numbered(optimizer: Any, where: str) -> tuple[Mapping[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """States by number, and groups. Raises FormatError where the optimizer is not torch's own."""
    if isinstance(optimizer, dict) and isinstance(optimizer.get("param_groups"), list) and "state" in optimizer:
        return optimizer["state"], optimizer["param_groups"]
    raise FormatError(
        f"{where} has no optimizer state of torch's form, so that its parts cannot be told apart; "
        "open with weights_only to leave the optimizer aside"
    )


def names_of_numbers(
    shapes: Mapping[str, Shape],
    states: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    where: str,
    same: Callable[[str, int], bool] = lambda name, number: True,
) -> dict[int, str]:
    """The parameter that each number means; `shapes` has them in the order of the module.

    `same(name, number)` says whether the number's master can be that of the parameter. Raises FormatError where the
    shapes fit in no way, or in several.
    """
    if all("param_names" in group for group in groups):
        return {n: name for g in groups for n, name in zip(g["params"], g["param_names"], strict=True)}
    wanted = [[(number, _shape(states.get(number, {}))) for number in group["params"]] for group in groups]
    found = _only_way(
        dict.fromkeys(shapes, 1),
        [*map(len, wanted)],
        lambda name, g, place: wanted[g][place][1] in (None, shapes[name]) and same(name, wanted[g][place][0]),
        f"{where}: ZeRO-0 stores optimizer states by number, without names, and their shapes fit the "
        f"{len(shapes)} parameters",
    )
    return {wanted[g][place][0]: name for name, (g, place) in found.items()}


def places_in_buffers(
    shapes: Mapping[str, Shape], lengths: Sequence[int], same: Callable[[str, int, int], bool], where: str
) -> dict[str, tuple[int, int]]:
    """(group, offset of its first element in the group's flat buffer) of each parameter that one holds.

    `same(name, group, offset)` says whether the buffer has there what the module has of the parameter. Raises
    FormatError where they fit in no way, or in several.
    """
    return _only_way(
        {name: math.prod(shape) for name, shape in shapes.items()},
        lengths,
        same,
        f"{where}: ZeRO-0 in half precision stores masters by group, without names, and they fit the "
        f"{len(shapes)} parameters",
    )


def _only_way(
    sizes: Mapping[str, int], ends: Sequence[int], fits: Callable[[str, int, int], bool], what: str
) -> dict[str, tuple[int, int]]:
    """(group, place) of each name that is in a group, where names in order fill all groups in one way only.

    A name of size n is in no group, or takes the next n places of one if it fits there; `ends` are the groups' sizes.
    """
    left = sum(sizes.values())
    ways: dict[tuple[int, ...], int] = {(0,) * len(ends): 1}
    steps: list[dict[tuple[int, ...], tuple[tuple[int, ...], int | None]]] = []
    for name, size in sizes.items():
        left -= size
        after: dict[tuple[int, ...], int] = {}
        came: dict[tuple[int, ...], tuple[tuple[int, ...], int | None]] = {}
        for at, count in ways.items():
            moves: list[tuple[tuple[int, ...], int | None]] = [(at, None)]
            for g, place in enumerate(at):
                if place + size <= ends[g] and fits(name, g, place):
                    moves.append(((*at[:g], place + size, *at[g + 1 :]), g))
            for to, group in moves:
                if sum(ends) - sum(to) <= left:
                    after[to] = min(2, after.get(to, 0) + count)
                    came[to] = at, group
        ways = after
        steps.append(came)
        if len(ways) > _MAX_WAYS:
            break
    end = tuple(ends)
    if len(ways) > _MAX_WAYS or ways.get(end, 0) != 1:
        many = "several ways" if ways.get(end) or len(ways) > _MAX_WAYS else "no way"
        raise FormatError(f"{what} in {many}; open with weights_only to leave the optimizer aside")
    found: dict[str, tuple[int, int]] = {}
    for name, came in zip(reversed(list(sizes)), reversed(steps), strict=True):
        at, group = came[end]
        if group is not None:
            found[name] = group, at[group]
        end = at
    return found


def _shape(state: Mapping[str, Any]) -> Shape | None:
    """The shape of a parameter with this state: that of its moments; None if it has none."""
    shapes = {v.shape for v in state.values() if isinstance(v, StoredTensor) and v.shape}
    return shapes.pop() if len(shapes) == 1 else None
