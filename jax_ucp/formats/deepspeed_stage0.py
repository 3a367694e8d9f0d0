"""ZeRO-0: which parameter each optimizer state belongs to, where that can be told.

In fp32 the optimizer is torch's own: states have numbers, groups list the numbers of their parameters, and nothing has
a name (unless torch was given named parameters: then groups have `param_names`). In fp16 and bf16 DeepSpeed wraps it:
the unfused wrapper keeps a list of masters for each group, the fused one a flat buffer of them, and of each state
(`runtime/fp16/unfused_optimizer.py`, `fused_optimizer.py`, 0.19.8).

Which order a group has is the training script's choice. A pairing is taken where names are stored, where shapes, or the
bits of masters, leave one, or where the user says it (`optimizer_groups`). Otherwise masters and states are kept under
`other`, and the parameters are the module's. Masters whose bits are those of no weights of the module are refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.formats import deepspeed_moe as moe
from jax_ucp.formats.deepspeed_files import Stored
from jax_ucp.formats.deepspeed_masters import Copies
from jax_ucp.formats.deepspeed_slices import Slices
from jax_ucp.formats.options import MODULE_ORDER, OptimizerGroups, remedy, word_note
from jax_ucp.formats.pairing import (
    Contradicted,
    Undecided,
    candidates_by_shape,
    contradiction,
    only_division,
    only_filling,
    only_pairing,
)
from jax_ucp.formats.torch_file import StoredTensor
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.layout.patterns import Unique
from jax_ucp.storage.consolidated import Consolidated

_BY_SHAPE = "ZeRO-0 stores optimizer states without names; their shapes fit the parameters in one way only"
_BY_BITS = (
    "ZeRO-0 in half precision stores masters without names; their bits fit the module's weights in one way only, and "
    "verify compares all of them"
)


@dataclass
class _Optimizer:
    """The optimizer in one file, and the parameters that could be its own; `masters` by number, if it has any."""

    stored: Stored
    mp: int
    ep: int
    ranks: int
    states: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    shapes: Mapping[str, Shape]
    masters: Mapping[int, StoredTensor]
    flat: bool

    @property
    def named(self) -> bool:
        return all("param_names" in group for group in self.groups)

    def kinds(self) -> list[tuple[list[Mapping[str, Any]], dict[str, Shape]]]:
        """The groups of dense parameters and those of experts, each with the parameters that may be in them."""
        found: list[tuple[list[Mapping[str, Any]], dict[str, Shape]]] = []
        for experts in (False, True):
            owner = self.ep if experts else None
            rank_of = {name: moe.expert_rank(name, self.shapes, max(1, self.ranks)) for name in self.shapes}
            mine = {name: shape for name, shape in self.shapes.items() if rank_of[name] == owner}
            found.append(([group for group in self.groups if bool(group.get("moe")) == experts], mine))
        return found


# Of a parameter its number, and the elements of that number's tensors that are its own.
Held = dict[str, tuple[int, Box]]


def add_numbered_states(reader: Slices) -> None:
    """Add optimizer states by number: dense ones are the same on all expert-parallel ranks, experts each one's own."""
    optimizers = [one for mp in range(len(reader.files.models)) for one in _optimizers(reader, mp)]
    groups, notes = reader.options.optimizer_groups, reader.found.notes
    if not optimizers:
        return
    try:
        held = [_held(reader, one, None if one.named else groups) for one in optimizers]
    except Undecided as error:
        if groups is not None:
            where = optimizers[0].stored.file.path
            raise FormatError(f"{where}: optimizer_groups does not fit: {error}") from None
        if isinstance(error, Contradicted):
            _refuse_masters(optimizers, error)
        for one in optimizers:
            _keep_apart(reader, one, str(error))
        notes.append(_apart_note(reader, optimizers, str(error)))
        return
    for one, places in zip(optimizers, held, strict=True):
        (_add_masters if one.masters else _add_states)(reader, one, places)
    if all(one.named for one in optimizers):
        return
    if groups is not None:
        reader.found.said["optimizer_groups"] = groups
        notes.append(word_note(groups))
    else:
        notes.append(_BY_BITS if optimizers[0].masters else _BY_SHAPE)


def _refuse_masters(optimizers: Sequence[_Optimizer], error: Contradicted) -> NoReturn:
    names = ", ".join(one.stored.name for one in optimizers)
    raise CorruptData(
        f"{optimizers[0].stored.file.path}: the masters in {names}, rounded, are not the weights of the module: by "
        f"their bits {error}. One of them is damaged or of another step, or the optimizer has parameters that the "
        "module does not have; weights_only opens the module's weights"
    ) from None


def _optimizers(reader: Slices, mp: int) -> list[_Optimizer]:
    """The optimizers of one model-parallel rank: that of its model states last, after those of experts."""
    expp = {ep: stored for (ep, rank), stored in reader.files.expert_optimizers.items() if rank == mp}
    here = reader.place(mp, None)
    shapes = {n: f.shapes[here] for (s, n), f in reader.slices.items() if s == "param" and here in f.shapes}
    found: list[_Optimizer] = []
    for ep, stored in [*sorted(expp.items()), (0, reader.files.models[mp][0])]:
        if stored.state.get("optimizer") is None:
            continue
        where = str(stored.file.path)
        inner, masters = unwrapped(stored.state["optimizer"])
        states, groups = numbered(inner, where)
        total = sum(moe.expert_number(name) is not None for name in shapes)
        local = sum(len(group["params"]) for group in groups if group.get("moe"))
        if local and total > len(expp) * local:
            lost = f"expp_rank_{len(expp)}_mp_rank_{mp:02d}_optim_states.pt"
            raise FormatError(
                f"{reader.files.folder}/{lost} is missing: {len(expp)} ranks have {local} of {total} experts' states"
            )
        kept = stored.state["optimizer"][masters] if masters else []
        several = kept if masters != "fp32_groups" else itertools.chain.from_iterable(kept)
        numbers = [number for group in groups for number in group["params"]]
        by_number = dict(zip(numbers, several, strict=True)) if masters else {}
        flat = masters == "fp32_groups_flat"
        found.append(_Optimizer(stored, mp, ep, len(expp), states, groups, shapes, by_number, flat))
    return found


def _held(reader: Slices, one: _Optimizer, groups: OptimizerGroups | None) -> Held:
    """The place of each parameter that the optimizer has. Raises Undecided."""
    if not one.masters:
        found = _pairs(one, groups)
        return {name: (number, Box.whole(one.shapes[name])) for number, name in found.items()}
    if any(moe.expert_number(name) is not None for name in one.shapes):
        raise Undecided("there are experts, whose masters are not told apart; ZeRO-1 stores them with names")
    here = reader.place(one.mp, None)
    keys = {name: reader.slices["param", name].keys[here] for name in one.shapes}
    copies = Copies(reader.found.shards, keys, one.shapes)
    if one.flat:
        return _held_in_buffers(one, copies, groups)
    found = _pairs_of_masters(one, copies, groups)
    return {name: (number, Box.whole(one.shapes[name])) for number, name in found.items()}


def _pairs(one: _Optimizer, said: OptimizerGroups | None) -> dict[int, str]:
    """The parameter of each number, of an optimizer of torch's own."""
    found: dict[int, str] = {}
    for i, (groups, shapes) in enumerate(one.kinds()):
        lists = _lists(one, said, experts=bool(i)) if isinstance(said, tuple) else None
        found |= names_of_numbers(shapes, one.states, groups, said if lists is None else lists)
    return found


def _lists(one: _Optimizer, said: Sequence[Sequence[str]], experts: bool) -> tuple[tuple[str, ...], ...]:
    """The user's lists for the groups of one kind; of experts those of this rank."""
    if len(said) != len(one.groups):
        raise Undecided(f"{len(said)} lists for {len(one.groups)} groups ({_sizes(one)})")
    (_, dense), (_, mine) = one.kinds()
    own = dense | mine
    for name in itertools.chain.from_iterable(said):
        if name not in one.shapes:
            raise Undecided(f"{name} is not a parameter here; the first are {', '.join([*one.shapes][:3])}")
    listed = [tuple(name for name in names if name in own) for names in said]
    return tuple(names for names, group in zip(listed, one.groups, strict=True) if bool(group.get("moe")) == experts)


def names_of_numbers(
    shapes: Mapping[str, Shape],
    states: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    said: OptimizerGroups | None = None,
) -> dict[int, str]:
    """The parameter that each number means; `shapes` has them in the order of the module.

    Raises Undecided where names, shapes and what the user `said` leave no way, or several.
    """
    held = {number: _shapes(states.get(number, {})) for group in groups for number in group["params"]}
    if all("param_names" in group for group in groups):
        return _as_listed(shapes, held, groups, [group["param_names"] for group in groups])
    if said == MODULE_ORDER:
        numbers = [list(group["params"]) for group in groups]
        division = only_division(
            dict.fromkeys(shapes, 1),
            [*map(len, numbers)],
            lambda name, group, place: not contradiction(held[numbers[group][place]], shapes[name]),
        )
        return {numbers[group][place]: name for name, (group, place) in division.items()}
    if said is not None:
        return _as_listed(shapes, held, groups, said)
    if len(held) != len(shapes):
        raise Undecided(f"there are {len(held)} of them for {len(shapes)} parameters")
    return only_pairing(candidates_by_shape(held, shapes))


def _as_listed(
    shapes: Mapping[str, Shape],
    held: Mapping[int, Mapping[str, Shape]],
    groups: Sequence[Mapping[str, Any]],
    lists: Sequence[Sequence[str]],
) -> dict[int, str]:
    """The names of lists, one for each group. Raises Undecided where one has no parameter, or another shape."""
    found: dict[int, str] = {}
    for group, names in zip(groups, lists, strict=True):
        if (count := len(group["params"])) != len(names):
            first = f" from number {group['params'][0]} on" if count else ""
            raise Undecided(f"the group{first} has {count} parameters, but {len(names)} names")
        for number, name in zip(group["params"], names, strict=True):
            if name not in shapes:
                raise Undecided(f"{name} is not a parameter of the module")
            if state := contradiction(held[number], shapes[name]):
                have = f"{list(held[number][state])}, but {name}, which should be it, has {list(shapes[name])}"
                raise Undecided(f"{state} of number {number} has shape {have}")
            found[number] = name
    if len(set(found.values())) != len(found):
        raise Undecided("one parameter has several numbers")
    return found


def _pairs_of_masters(one: _Optimizer, copies: Copies, said: OptimizerGroups | None) -> dict[int, str]:
    """The parameter of each number that has a master of its own."""
    keys = {number: one.stored.key(master) for number, master in one.masters.items()}

    def fits(name: str, number: int) -> bool:
        return one.masters[number].shape == one.shapes[name] and copies.begins(name, keys[number], 0)

    if one.named or isinstance(said, tuple):
        found = _pairs(one, said)
        if wrong := [number for number, name in found.items() if not fits(name, number)]:
            raise Undecided(f"the master of number {wrong[0]} is not that of {found[wrong[0]]}, by its shape or bits")
        return found
    if said == MODULE_ORDER:
        numbers = [list(group["params"]) for group in one.groups]
        division = only_division(
            dict.fromkeys(one.shapes, 1),
            [*map(len, numbers)],
            lambda name, group, place: fits(name, numbers[group][place]),
        )
        return {numbers[group][place]: name for name, (group, place) in division.items()}
    found: dict[int, str] = {}
    for number, master in one.masters.items():
        names = [name for name in copies.found_at(keys[number], 0) if one.shapes[name] == master.shape]
        if math.prod(master.shape):
            found[number] = _one_of(names)
    if len(set(found.values())) != len(found):
        raise Contradicted("two of them are of one parameter")
    return found


def _held_in_buffers(one: _Optimizer, copies: Copies, said: OptimizerGroups | None) -> Held:
    """The place of each parameter in the flat buffers of masters, one for each group."""
    numbers = [*one.masters]
    keys = [one.stored.key(master) for master in one.masters.values()]
    lengths = [math.prod(master.shape) for master in one.masters.values()]
    sizes = copies.sizes
    if isinstance(said, tuple):
        found = _listed_in_buffers(one, copies, keys, lengths, said)
    elif said == MODULE_ORDER:
        found = only_division(sizes, lengths, lambda name, group, at: copies.begins(name, keys[group], at))
    else:
        found = only_filling(sizes, lengths, lambda group, at: _candidates_at(copies, keys[group], at))
    return {name: (numbers[group], Box((at,), (at + sizes[name],))) for name, (group, at) in found.items()}


def _one_of(names: Sequence[str]) -> str:
    """The one parameter with the bits of a master. Raises Undecided: several with the same bits can be exchanged."""
    if not names:
        raise Contradicted("one of them is of no parameter")
    if len(names) > 1:
        raise Undecided("the bits of masters fit the weights in several ways")
    return names[0]


def _candidates_at(copies: Copies, key: str, at: int) -> list[str]:
    """The parameters with the bits that a buffer has at a place. Raises Undecided where two have the same bits."""
    names = copies.found_at(key, at)
    if len({copies.sizes[name] for name in names}) != len(names):
        raise Undecided("the bits of masters fit the weights in several ways")
    return names


def _listed_in_buffers(
    one: _Optimizer, copies: Copies, keys: Sequence[str], lengths: Sequence[int], lists: Sequence[Sequence[str]]
) -> dict[str, tuple[int, int]]:
    if len(lists) != len(lengths):
        raise Undecided(f"{len(lists)} lists for {len(lengths)} groups ({_sizes(one)})")
    found: dict[str, tuple[int, int]] = {}
    for group, names in enumerate(lists):
        at = 0
        for name in names:
            if name not in one.shapes:
                raise Undecided(f"{name} is not a parameter of the module")
            if at + copies.sizes[name] > lengths[group] or not copies.begins(name, keys[group], at):
                raise Undecided(f"group {group} does not have the master of {name} at {at} of its {lengths[group]}")
            found[name] = group, at
            at += copies.sizes[name]
        if at != lengths[group]:
            raise Undecided(f"group {group} has {lengths[group]} elements, the parameters listed for it {at}")
    return found


def _shapes(state: Mapping[str, Any]) -> dict[str, Shape]:
    return {str(name): value.shape for name, value in state.items() if isinstance(value, StoredTensor)}


# What is told is added, and what is not is kept apart.


def _add_states(reader: Slices, one: _Optimizer, held: Held) -> None:
    here = reader.place(one.mp, None)
    names = {number: name for name, (number, _) in held.items()}
    for hyper in one.groups:
        for number in hyper["params"]:
            if number in names:
                reader.found.hyperparameters(names[number], hyper)
    for number, name in names.items():
        for state, value in one.states.get(number, {}).items():
            found = reader.slices[state, name]
            if not isinstance(value, StoredTensor) or value.shape != one.shapes[name]:
                found.values[here[0]].append((one.stored, value))
            elif here in found.keys:
                reason = "the same state on another expert-parallel rank, compared by verify"
                reader.found.slice_twin(found.keys[here], one.stored.key(value), reason)
            else:
                found.keys[here], found.shapes[here] = one.stored.key(value), value.shape


def _add_masters(reader: Slices, one: _Optimizer, held: Held) -> None:
    """Masters and states of the optimizers that DeepSpeed wraps for half precision."""
    here = reader.place(one.mp, None)
    for name, (number, part) in held.items():
        master = one.masters[number]
        copy = reader.slices["param", name].keys.pop(here)
        for state, value in {**one.states.get(number, {}), "param": master}.items():
            if isinstance(value, StoredTensor) and value.shape == master.shape:
                fragment = Fragment(0, part, Box.whole(one.shapes[name]))
                layout = ParamLayout(one.shapes[name], (value.shape,), (fragment,))
                tensor = Consolidated(layout, [one.stored.key(value)])
                reader.add(one.mp, None, state, name, one.shapes, tensor, f"{state} of {len(held)} parameters")
            else:
                reader.slices[state, name].values[here[0]].append((one.stored, value))
        reason = f"a copy of {name}'s master, compared with it by verify"
        reader.found.slice_twin(reader.slices["param", name].keys[here], copy, reason)
        reader.found.hyperparameters(name, next(group for group in one.groups if number in group["params"]))


def _keep_apart(reader: Slices, one: _Optimizer, reason: str) -> None:
    """Keep the optimizer's tensors under `other`, by their places in the file, and the rest as an extra."""
    optimizer = one.stored.state["optimizer"]
    inner, masters = unwrapped(optimizer)
    at = "optimizer/optimizer_state_dict/state/" if masters else "optimizer/state/"
    begins = tuple(f"{one.stored.name}:{prefix}" for prefix in (at, *([f"optimizer/{masters}/"] if masters else [])))
    for key, info in reader.found.stored.items():
        if key.startswith(begins):
            file, _, item = key.partition(":")
            label = f"{file.removesuffix('.pt')}.{item.replace('/', '.')}"
            why = f"kept apart, because nothing says which parameter it is of: {reason}"
            reader.found.parameter("other", label, Consolidated(Unique().join([info.shape]), [key]), why)
    rest = {
        number: kept
        for number, some in inner["state"].items()
        if (kept := {name: value for name, value in some.items() if not isinstance(value, StoredTensor)})
    }
    if rest:
        reader.found.extra(one.stored.name, at.removesuffix("/"), rest)


def _apart_note(reader: Slices, optimizers: Sequence[_Optimizer], reason: str) -> str:
    masters = bool(optimizers[0].masters)
    what = "masters and optimizer states" if masters else "optimizer states"
    weights = "; the parameters are the module's 16-bit weights" if masters else ""
    say = remedy(_sizes(optimizers[0]), next(iter(optimizers[0].shapes), ""), _ordered(reader, optimizers))
    return f"ZeRO-0 stores {what} without names, and they are kept under `other`: {reason}{weights}; {say}"


def _ordered(reader: Slices, optimizers: Sequence[_Optimizer]) -> bool:
    """Whether the order of the module would decide."""
    try:
        for one in optimizers:
            _held(reader, one, MODULE_ORDER)
    except Undecided:
        return False
    return not any(one.named for one in optimizers)


def _sizes(one: _Optimizer) -> str:
    if one.flat:
        return f"groups of {' + '.join(str(math.prod(master.shape)) for master in one.masters.values())} elements"
    experts = ", those of experts on each rank, with all ranks' experts in one list" if one.ranks else ""
    return f"groups of {' + '.join(str(len(group['params'])) for group in one.groups)} parameters{experts}"


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
