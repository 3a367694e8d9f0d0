"""ZeRO-0: which parameter each optimizer state belongs to, where that can be told.

In fp32 the optimizer is torch's own: states have numbers, groups list the numbers of their
parameters, and nothing has a name (unless torch was given named parameters: then groups have
`param_names`). In fp16 and bf16 DeepSpeed wraps it: the unfused wrapper keeps a list of masters for
each group, the fused one a flat buffer of them, and of each state
(`runtime/fp16/unfused_optimizer.py`, `fused_optimizer.py`, 0.19.8).

Which order a group has is the training script's choice. A pairing is taken where names are stored,
where shapes, or the bits of masters, leave one, or where the user says it (`optimizer_groups`).
Otherwise masters and states are kept under `other`, and the parameters are the module's. Masters
whose bits are those of no weights of the module are refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.codes import (
    PARTS,
    Codes,
    flattened,
    meaning_of,
    note_codes,
    numbers_of_codes,
    plain_name,
)
from jax_ucp.formats.deepspeed.files import Stored
from jax_ucp.formats.deepspeed.masters import Copies
from jax_ucp.formats.deepspeed.slices import Slices
from jax_ucp.formats.nested import group_with
from jax_ucp.formats.options import (
    DECODED,
    MODULE_ORDER,
    SaidGroups,
    remedy,
    said_of,
    word_note,
)
from jax_ucp.formats.pairing import (
    Contradicted,
    Undecided,
    candidates_by_shape,
    contradiction,
    only_division,
    only_filling,
    only_pairing,
)
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.decoded import Coded

_BY_SHAPE = (
    "ZeRO-0 stores optimizer states without names; their shapes fit the parameters in one way only"
)
_BY_BITS = (
    "ZeRO-0 in half precision stores masters without names; their bits fit the module's weights in"
    " one way only, and verify compares all of them"
)


_OTHER_RUN = (
    "it is of another run, or was saved before the first step. Put that rank's own file in its"
    " place; weights_only opens the module's weights"
)


@dataclass(frozen=True)
class _Optimizer:
    """The optimizer in one file, and the parameters it may have; `masters` by number."""

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

    def kinds(self) -> list[_Kind]:
        """The groups of dense parameters and those of experts, and parameters that fit each."""
        return [self._kind(experts=False), self._kind(experts=True)]

    def _kind(self, experts: bool) -> _Kind:
        owner = self.ep if experts else None
        ranks = max(1, self.ranks)
        owners = {name: moe.expert_rank(name, self.shapes, ranks) for name in self.shapes}
        shapes = {name: shape for name, shape in self.shapes.items() if owners[name] == owner}
        return [group for group in self.groups if _of_experts(group) == experts], shapes


# Groups, and the parameters that may be in them.
_Kind = tuple[list[Mapping[str, Any]], dict[str, Shape]]

# Of a parameter its number, and the elements of that number's tensors that are its own.
Places = dict[str, tuple[int, Box]]


def add_numbered_states(slices: Slices) -> None:
    """Add states by number: dense ones are equal on all expert-parallel ranks."""
    optimizers = [one for mp in range(len(slices.files.models)) for one in _optimizers(slices, mp)]
    names = [*optimizers[0].shapes] if optimizers else []
    groups = said_of(slices.options.optimizer_groups, names)
    try:
        places = [_places(slices, one, groups) for one in optimizers]
    except Undecided as error:
        _keep_undecided(slices, optimizers, error)
        return
    for one, its_places in zip(optimizers, places, strict=True):
        add = _add_masters if one.masters else _add_states
        add(slices, one, its_places)
    if not all(one.named for one in optimizers):
        _note_pairing(slices, groups, bool(optimizers[0].masters))


def _note_pairing(slices: Slices, groups: SaidGroups | None, masters: bool) -> None:
    """Say by what parameters without names were told apart."""
    if groups is not None:
        slices.importer.said["optimizer_groups"] = groups
        slices.importer.notes.append(word_note(groups))
    else:
        slices.importer.notes.append(_BY_BITS if masters else _BY_SHAPE)


def _keep_undecided(slices: Slices, optimizers: Sequence[_Optimizer], error: Undecided) -> None:
    """Keep all apart. Raises where the user's groups do not fit, or masters contradict."""
    if slices.options.optimizer_groups is not None:
        path = optimizers[0].stored.file.path
        raise FormatError(f"{path}: optimizer_groups does not fit: {error}") from None
    if isinstance(error, Contradicted):
        _refuse_masters(optimizers, error)
    for one in optimizers:
        _keep_apart(slices, one, str(error))
    slices.importer.notes.append(_apart_note(slices, optimizers, str(error)))


def _refuse_masters(optimizers: Sequence[_Optimizer], error: Contradicted) -> NoReturn:
    names = ", ".join(one.stored.name for one in optimizers)
    raise CorruptData(
        f"{optimizers[0].stored.file.path}: the masters in {names}, rounded, are not the weights of"
        f" the module: by their bits {error}. One of them is damaged or of another step, or the"
        " optimizer has parameters that the module does not have; weights_only opens the module's"
        " weights"
    ) from None


def _optimizers(slices: Slices, mp: int) -> list[_Optimizer]:
    """The optimizers of a model-parallel rank: those of experts, then of the model states."""
    by_experts = slices.files.expert_optimizers.items()
    files = sorted((ep, stored) for (ep, rank), stored in by_experts if rank == mp)
    shapes, ranks = slices.shapes_on(mp), len(files)
    _require_optimizers([stored for _, stored in files])
    files.append((0, slices.files.models[mp][0]))
    optimizers = [
        _optimizer(slices, stored, mp, ep, ranks, shapes)
        for ep, stored in files
        if stored.state.get("optimizer") is not None
    ]
    _check_alike(optimizers)
    return optimizers


def _require_optimizers(files: Sequence[Stored]) -> None:
    for stored in files:
        if not isinstance(stored.state.get("optimizer"), dict):
            raise FormatError(
                f"{stored.file.path} has no optimizer, which expert-parallel ranks save in such a"
                f" file without ZeRO: {_OTHER_RUN}"
            )


def _check_alike(optimizers: Sequence[_Optimizer]) -> None:
    """Raise FormatError where expert-parallel ranks have other states than the first: each has all
    of the dense parameters, and as many experts.
    """
    for one in optimizers[1:]:
        first = optimizers[0]
        if _form(one) != _form(first):
            raise FormatError(
                f"{one.stored.file.path} has an optimizer with {len(one.states)} states in"
                f" {_sizes(one)}, which in their shapes are not those of {first.stored.name}:"
                f" {_OTHER_RUN}"
            )


def _form(one: _Optimizer) -> tuple[object, ...]:
    groups = [list(group["params"]) for group in one.groups]
    return groups, {number: _shapes(state) for number, state in one.states.items()}


def _optimizer(
    slices: Slices, stored: Stored, mp: int, ep: int, ranks: int, shapes: Mapping[str, Shape]
) -> _Optimizer:
    optimizer = stored.state["optimizer"]
    inner, masters = unwrapped(optimizer)
    states, groups = numbered(inner, str(stored.file.path))
    experts = list(filter(moe.is_native, shapes))
    local = len(_numbers(filter(_of_experts, groups)))
    if local and len(experts) > ranks * local:
        lost = f"expp_rank_{ranks}_mp_rank_{mp:02d}_optim_states.pt"
        raise FormatError(
            f"{slices.files.folder}/{lost} is missing: {ranks} ranks have {local} of {len(experts)}"
            " experts' states"
        )
    by_number: dict[int, StoredTensor] = {}
    if masters:
        parts = optimizer[masters]
        tensors = itertools.chain.from_iterable(parts) if masters == "fp32_groups" else parts
        by_number = dict(zip(_numbers(groups), tensors, strict=True))
    flat = masters == "fp32_groups_flat"
    return _Optimizer(stored, mp, ep, ranks, states, groups, shapes, by_number, flat)


def _of_experts(group: Mapping[str, Any]) -> bool:
    return bool(group.get("moe"))


def _numbers(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [number for group in groups for number in group["params"]]


def _places(slices: Slices, one: _Optimizer, groups: SaidGroups | None) -> Places:
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


def _whole(one: _Optimizer, names: Mapping[int, str]) -> Places:
    return {name: (number, Box.whole(one.shapes[name])) for number, name in names.items()}


def _pairs(one: _Optimizer, order: SaidGroups | None) -> dict[int, str]:
    """The parameter of each number, of an optimizer of torch's own."""
    names: dict[int, str] = {}
    for i, (groups, shapes) in enumerate(one.kinds()):
        lists = _lists(one, order, experts=bool(i)) if isinstance(order, tuple) else order
        names |= names_of_numbers(shapes, one.states, groups, lists)
    return names


def _lists(
    one: _Optimizer, lists: Sequence[Sequence[str]], experts: bool
) -> tuple[tuple[str, ...], ...]:
    """The user's lists for the groups of one kind; of experts those of this rank."""
    if len(lists) != len(one.groups):
        raise Undecided(f"{len(lists)} lists for {len(one.groups)} groups ({_sizes(one)})")
    (_, dense), (_, mine) = one.kinds()
    own = dense | mine
    for name in itertools.chain.from_iterable(lists):
        if name not in one.shapes:
            raise Undecided(
                f"{name} is not a parameter here; the first are {', '.join([*one.shapes][:3])}"
            )
    listed = [tuple(filter(own.__contains__, names)) for names in lists]
    return tuple(
        itertools.compress(listed, [_of_experts(group) == experts for group in one.groups])
    )


def names_of_numbers(
    shapes: Mapping[str, Shape],
    states: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    order: SaidGroups | None = None,
) -> dict[int, str]:
    """The parameter that each number means; `shapes` has them in the order of the module.

    Raises Undecided where names, shapes and the user's `order` leave no way, or several.
    """
    state_shapes = {number: _shapes(states.get(number, {})) for number in _numbers(groups)}
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


def _pairs_of_masters(one: _Optimizer, copies: Copies, order: SaidGroups | None) -> dict[int, str]:
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


def _pairs_by_bits(one: _Optimizer, copies: Copies, keys: Mapping[int, str]) -> dict[int, str]:
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


def _places_in_buffers(one: _Optimizer, copies: Copies, order: SaidGroups | None) -> Places:
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
    one: _Optimizer,
    copies: Copies,
    keys: Sequence[str],
    lengths: Sequence[int],
    lists: Sequence[Sequence[str]],
) -> dict[str, tuple[int, int]]:
    if len(lists) != len(lengths):
        raise Undecided(f"{len(lists)} lists for {len(lengths)} groups ({_sizes(one)})")
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


def _shapes(state: Mapping[str, Any]) -> dict[str, Shape]:
    shapes = {
        str(name): value.shape for name, value in state.items() if isinstance(value, StoredTensor)
    }
    # Of bitsandbytes the second moment, or the only one, has the parameter's shape.
    if moment := shapes.get("state2", shapes.get("state1")):
        shapes["exp_avg"] = moment
    return shapes


# States whose parameters are known are added; the others are kept apart.


def _add_states(slices: Slices, one: _Optimizer, places: Places) -> None:
    names = {number: name for name, (number, _) in places.items()}
    for group in one.groups:
        for number in group["params"]:
            if number in names:
                slices.importer.hyperparameters(names[number], group)
                _add_states_of(slices, one, names[number], number, group)


def _add_states_of(
    slices: Slices, one: _Optimizer, name: str, number: int, group: Mapping[str, Any]
) -> None:
    states = dict(one.states.get(number, {}))
    decode = slices.options.dequantize == DECODED
    for digit in numbers_of_codes(states):
        codes = meaning_of(*(states.get(f"{part}{digit}") for part in PARTS))
        note_codes(slices.importer, decode and codes is not None)
        if decode and codes is not None:
            tensor, _, _ = [states.pop(f"{part}{digit}") for part in PARTS]
            _add_decoded(slices, one, name, plain_name(f"state{digit}", group), tensor, codes)
    for state, value in states.items():
        _add_state(slices, one, name, plain_name(state, group) if decode else state, value)


def _add_decoded(
    slices: Slices, one: _Optimizer, name: str, state: str, tensor: Any, codes: Codes
) -> None:
    key, file = one.stored.key(tensor), one.stored
    coded = Coded(key, file.key(codes.table), file.key(codes.scales), codes.block)
    slices.importer.decoded(f"{key} decoded", coded, f"what the codes of {state} mean")
    whole = Consolidated(Unique().join([tensor.shape]), [f"{key} decoded"])
    slices.add(one.mp, None, state, name, whole, f"{state} of {name}")


def _add_state(slices: Slices, one: _Optimizer, name: str, state: str, value: Any) -> None:
    place = slices.place(one.mp)
    own = slices.states[state, name]
    if not _is_tensor(value, one.shapes[name]):
        own.values[place[0]].append((one.stored, value))
    elif place in own.keys:
        reason = "the same state on another expert-parallel rank, compared by verify"
        slices.importer.slice_duplicate(own.keys[place], one.stored.key(value), reason)
    else:
        own.add(place, one.stored.key(value), value.shape)


def _is_tensor(value: Any, shape: Shape) -> bool:
    return isinstance(value, StoredTensor) and value.shape == shape


def _add_masters(slices: Slices, one: _Optimizer, places: Places) -> None:
    """Masters and states of the optimizers that DeepSpeed wraps for half precision."""
    place = slices.place(one.mp)
    for name, (number, part) in places.items():
        master, shape = one.masters[number], one.shapes[name]
        copy = slices.states["param", name].keys.pop(place)
        for state, value in {**one.states.get(number, {}), "param": master}.items():
            if not _is_tensor(value, master.shape):
                slices.states[state, name].values[place[0]].append((one.stored, value))
                continue
            layout = ParamLayout(shape, (value.shape,), (Fragment(0, part, Box.whole(shape)),))
            tensor = Consolidated(layout, [one.stored.key(value)])
            slices.add(one.mp, None, state, name, tensor, f"{state} of {len(places)} parameters")
        reason = f"a copy of {name}'s master, compared with it by verify"
        slices.importer.slice_duplicate(slices.states["param", name].keys[place], copy, reason)
        slices.importer.hyperparameters(name, group_with(one.groups, number))


def _keep_apart(slices: Slices, one: _Optimizer, reason: str) -> None:
    """Keep the optimizer's tensors under `other`, by their places, the rest as an extra."""
    inner, masters = unwrapped(one.stored.state["optimizer"])
    states = "optimizer/optimizer_state_dict/state" if masters else "optimizer/state"
    items = (f"{states}/", f"optimizer/{masters}/") if masters else (f"{states}/",)
    begins = tuple(f"{one.stored.name}:{item}" for item in items)
    for key, info in slices.importer.stored.items():
        if key.startswith(begins):
            file, _, item = key.partition(":")
            label = f"{file.removesuffix('.pt')}.{item.replace('/', '.')}"
            why = f"kept apart, because nothing says which parameter it is of: {reason}"
            slices.importer.parameter(
                "other", label, Consolidated(Unique().join([info.shape]), [key]), why
            )
    values = {number: _values(state) for number, state in inner["state"].items()}
    if any(values.values()):
        kept = {number: state for number, state in values.items() if state}
        slices.importer.extra(one.stored.name, states, kept)


def _values(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has beside tensors."""
    return {name: value for name, value in state.items() if not isinstance(value, StoredTensor)}


def _apart_note(slices: Slices, optimizers: Sequence[_Optimizer], reason: str) -> str:
    masters = bool(optimizers[0].masters)
    what = "masters and optimizer states" if masters else "optimizer states"
    weights = "; the parameters are the module's 16-bit weights" if masters else ""
    say = remedy(
        _sizes(optimizers[0]), next(iter(optimizers[0].shapes), ""), _ordered(slices, optimizers)
    )
    return (
        f"ZeRO-0 stores {what} without names, and they are kept under `other`: {reason}{weights};"
        f" {say}"
    )


def _ordered(slices: Slices, optimizers: Sequence[_Optimizer]) -> list[str]:
    """The words that would decide."""
    if any(one.named for one in optimizers):
        return []
    try:
        for one in optimizers:
            _places(slices, one, MODULE_ORDER)
    except Undecided:
        return []
    return [MODULE_ORDER]


def _sizes(one: _Optimizer) -> str:
    if one.flat:
        elements = [str(math.prod(master.shape)) for master in one.masters.values()]
        return f"groups of {' + '.join(elements)} elements"
    experts = (
        ", those of experts on each rank, with all ranks' experts in one list" if one.ranks else ""
    )
    counts = [str(len(group["params"])) for group in one.groups]
    return f"groups of {' + '.join(counts)} parameters{experts}"


def unwrapped(optimizer: Any) -> tuple[Any, str]:
    """Torch's own optimizer, and the name of the masters that DeepSpeed keeps, if any."""
    if isinstance(optimizer, dict):
        for masters in ("fp32_groups", "fp32_groups_flat"):
            if masters in optimizer:
                return optimizer.get("optimizer_state_dict"), masters
    return optimizer, ""


def numbered(
    optimizer: Any, file: str
) -> tuple[Mapping[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """States by number, and groups. Raises FormatError where the optimizer is not torch's own."""
    match optimizer:
        case {"state": states, "param_groups": list(groups)}:
            return {number: flattened(state) for number, state in states.items()}, groups
    raise FormatError(
        f"{file} has no optimizer state of torch's form, so that its parts cannot be told apart; "
        "open with weights_only to leave the optimizer aside"
    )
