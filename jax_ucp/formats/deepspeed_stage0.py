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
from jax_ucp.formats import deepspeed_moe as moe
from jax_ucp.formats.deepspeed_files import Stored
from jax_ucp.formats.deepspeed_slices import Place, Slices
from jax_ucp.formats.torch_file import StoredTensor
from jax_ucp.layout.box import Box, range_boxes
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.storage.consolidated import Consolidated, same_bits

# So many elements at the most tell a parameter in a flat buffer of masters.
_SAMPLE = 64
# More ways to be part of the way through than this, and nothing is decided.
_MAX_WAYS = 20_000


def add_numbered_states(reader: Slices) -> None:
    """Add optimizer states by number: dense ones are the same on all expert-parallel ranks, experts each one's own."""
    for mp, models in enumerate(reader.files.models):
        expp = {ep: stored for (ep, rank), stored in reader.files.expert_optimizers.items() if rank == mp}
        for ep, stored in [*sorted(expp.items()), (0, models[0])]:
            if stored.state.get("optimizer") is not None:
                _numbered(reader, mp, ep, len(expp), stored)


def _numbered(reader: Slices, mp: int, ep: int, ranks: int, stored: Stored) -> None:
    where = str(stored.file.path)
    inner, masters = unwrapped(stored.state["optimizer"])
    states, groups = numbered(inner, where)
    here = reader.place(mp, None)
    shapes = {n: f.shapes[here] for (s, n), f in reader.slices.items() if s == "param" and here in f.shapes}
    total = sum(moe.expert_number(n) is not None for n in shapes)
    if total > ranks * (local := sum(len(g["params"]) for g in groups if g.get("moe"))) and local:
        lost = f"expp_rank_{ranks}_mp_rank_{mp:02d}_optim_states.pt"
        raise FormatError(
            f"{reader.files.folder}/{lost} is missing: {ranks} ranks have {local} of {total} experts' states"
        )
    if masters:
        if total:
            raise FormatError(
                f"{where} is of ZeRO-0 in half precision with experts, whose masters are stored without names; "
                "open with weights_only for the weights, or save with ZeRO-1"
            )
        _wrapped(reader, mp, stored, states, groups, shapes)
        return
    numbers: dict[int, str] = {}
    for experts in (False, True):
        mine = {
            n: shape
            for n, shape in shapes.items()
            if moe.expert_rank(n, shapes, max(1, ranks)) in ((ep,) if experts else (None,))
        }
        some = [g for g in groups if bool(g.get("moe")) == experts]
        numbers |= names_of_numbers(mine, states, some, where)
    note = "ZeRO-0 stores optimizer states without names; they were told by shape and by the order of the module"
    if note not in reader.found.notes and not all("param_names" in g for g in groups):
        reader.found.notes.append(note)
    for hyper in groups:
        for number in hyper["params"]:
            reader.found.hyperparameters(numbers[number], hyper)
    for number, name in numbers.items():
        for state, value in states.get(number, {}).items():
            found = reader.slices[state, name]
            if not isinstance(value, StoredTensor) or value.shape != shapes[name]:
                found.values[here[0]].append((stored, value))
            elif here in found.keys:
                reason = "the same state on another expert-parallel rank, compared by verify"
                reader.found.slice_twin(found.keys[here], stored.key(value), reason)
            else:
                found.keys[here], found.shapes[here] = stored.key(value), value.shape


def _wrapped(
    reader: Slices,
    mp: int,
    stored: Stored,
    states: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, Shape],
) -> None:
    """Masters and states of the optimizers that DeepSpeed wraps for half precision."""
    optimizer, where, here = stored.state["optimizer"], str(stored.file.path), reader.place(mp, None)
    numbers = [number for said in groups for number in said["params"]]
    held: dict[str, tuple[int, Box]] = {}  # of a parameter its number, and the elements of the tensors of that
    if "fp32_groups" in optimizer:
        masters = dict(zip(numbers, [m for some in optimizer["fp32_groups"] for m in some], strict=True))
        shaped = {n: {"param": master} for n, master in masters.items()}

        def same(name: str, number: int) -> bool:
            return _begins(reader, name, here, stored.key(masters[number]), 0)

        for number, name in names_of_numbers(shapes, shaped, groups, where, same).items():
            held[name] = number, Box.whole(shapes[name])
    else:
        masters = dict(zip(numbers, optimizer["fp32_groups_flat"], strict=True))
        lengths = [master.shape[0] for master in masters.values()]

        def holds(name: str, group: int, offset: int) -> bool:
            return _begins(reader, name, here, stored.key(masters[numbers[group]]), offset)

        for name, (group, at) in places_in_buffers(shapes, lengths, holds, where).items():
            held[name] = numbers[group], Box((at,), (at + math.prod(shapes[name]),))
    reader.found.notes.append(
        "ZeRO-0 in half precision stores masters without names; they were told by their first elements and by the "
        "order of the module, and verify compares all of them with the module"
    )
    for name, (number, part) in held.items():
        copy = reader.slices["param", name].keys.pop(here)
        for state, value in {**states.get(number, {}), "param": masters[number]}.items():
            if isinstance(value, StoredTensor) and value.shape == masters[number].shape:
                layout = ParamLayout(shapes[name], (value.shape,), (Fragment(0, part, Box.whole(shapes[name])),))
                tensor = Consolidated(layout, [stored.key(value)])
                reader.add(mp, None, state, name, shapes, tensor, f"{state} of {len(held)} parameters")
            else:
                reader.slices[state, name].values[here[0]].append((stored, value))
        reason = f"a copy of {name}'s master, compared with it by verify"
        reader.found.slice_twin(reader.slices["param", name].keys[here], copy, reason)
        reader.found.hyperparameters(name, next(said for said in groups if number in said["params"]))


def _begins(reader: Slices, name: str, place: Place, key: str, offset: int) -> bool:
    """Whether a tensor of masters has at `offset` what the module has first of a parameter, when rounded."""
    shape = reader.slices["param", name].shapes[place]
    if not math.prod(shape):
        return True
    first = range_boxes(shape, 0, min(_SAMPLE, math.prod(shape)))[0]
    copy = reader.found.shards.read(reader.slices["param", name].keys[place], first)
    flat = reader.found.stored[key].shape != shape
    part = Box((offset,), (offset + copy.size,)) if flat else first
    master = reader.found.shards.read(key, part).reshape(copy.shape)
    return same_bits(master.astype(copy.dtype), copy)


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
