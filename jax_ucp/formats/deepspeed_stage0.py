"""ZeRO-0: which parameter each numbered optimizer state belongs to, where that can be told.

The optimizer is torch's own: states have numbers, groups list the numbers of their parameters, and nothing has a name
(unless torch was given named parameters: then groups have `param_names`). One thing is taken for granted: that each
group lists its parameters in the order of the module, as every grouping that filters `named_parameters()` does. Then
shapes decide, if they fit in one way only: two groups that share no shape always do. Otherwise we refuse. An optimizer
that DeepSpeed wraps for fp16 or bf16 is refused too (`runtime/fp16/fused_optimizer.py`, `unfused_optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.torch_file import StoredTensor
from jax_ucp.layout.fragments import Shape

# More ways to be part of the way through than this, and the shapes decide nothing.
_MAX_WAYS = 20_000


def numbered(optimizer: Any, where: str) -> tuple[Mapping[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """States by number, and groups. Raises FormatError where the optimizer is not torch's own, or is wrapped."""
    if isinstance(optimizer, dict) and isinstance(optimizer.get("param_groups"), list) and "state" in optimizer:
        return optimizer["state"], optimizer["param_groups"]
    if isinstance(optimizer, dict) and (wrapped := [k for k in ("fp32_groups", "fp32_groups_flat") if k in optimizer]):
        raise FormatError(
            f"{where} is of ZeRO-0 in fp16 or bf16, whose masters and states ({wrapped[0]}) are kept by group, without "
            "names; open with weights_only for the weights in half precision, or save with ZeRO-1"
        )
    raise FormatError(
        f"{where} has no optimizer state of torch's form, so that its parts cannot be told apart; "
        "open with weights_only to leave the optimizer aside"
    )


def names_of_numbers(
    shapes: Mapping[str, Shape],
    states: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    where: str,
) -> dict[int, str]:
    """The parameter that each number means; `shapes` has them in the order of the module.

    Raises FormatError where the shapes fit in no way, or in several.
    """
    if all("param_names" in group for group in groups):
        return {n: name for g in groups for n, name in zip(g["params"], g["param_names"], strict=True)}
    wanted = [[(number, _shape(states.get(number, {}))) for number in group["params"]] for group in groups]
    spare = len(shapes) - sum(map(len, wanted))
    ways: dict[tuple[int, ...], int] = {(0,) * len(wanted): 1}
    steps: list[dict[tuple[int, ...], tuple[tuple[int, ...], int | None]]] = []
    for done, shape in enumerate(shapes.values()):
        after: dict[tuple[int, ...], int] = {}
        came: dict[tuple[int, ...], tuple[tuple[int, ...], int | None]] = {}
        for at, count in ways.items():
            moves: list[tuple[tuple[int, ...], int | None]] = []
            if done - sum(at) < spare:
                moves.append((at, None))
            for g, place in enumerate(at):
                if place < len(wanted[g]) and wanted[g][place][1] in (None, shape):
                    moves.append(((*at[:g], place + 1, *at[g + 1 :]), wanted[g][place][0]))
            for to, number in moves:
                after[to] = min(2, after.get(to, 0) + count)
                came[to] = at, number
        ways = after
        steps.append(came)
        if len(ways) > _MAX_WAYS:
            break
    end = tuple(map(len, wanted))
    if len(ways) > _MAX_WAYS or ways.get(end, 0) != 1:
        many = "several ways" if ways.get(end) or len(ways) > _MAX_WAYS else "no way"
        raise FormatError(
            f"{where}: ZeRO-0 stores optimizer states by number, without names, and their shapes fit the "
            f"{len(shapes)} parameters in {many}; open with weights_only to leave the optimizer aside"
        )
    found: dict[int, str] = {}
    for name, came in zip(reversed(list(shapes)), reversed(steps), strict=True):
        end, number = came[end]
        if number is not None:
            found[number] = name
    return found


def _shape(state: Mapping[str, Any]) -> Shape | None:
    """The shape of a parameter with this state: that of its moments; None if it has none."""
    shapes = {v.shape for v in state.values() if isinstance(v, StoredTensor) and v.shape}
    return shapes.pop() if len(shapes) == 1 else None
