"""ZeRO-0: optimizer states that have numbers, given to parameters or kept apart.

Where it cannot be told which parameter a number means (`stage0_pairing`), masters and states are
kept under `other`, and the parameters are the module's. Masters whose bits are those of no weights
of the module are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.formats.deepspeed.codes import (
    PARTS,
    Codes,
    meaning_of,
    note_codes,
    numbers_of_codes,
    plain_name,
)
from jax_ucp.formats.deepspeed.slices import Slices
from jax_ucp.formats.deepspeed.stage0_optimizers import (
    StageZero,
    optimizers_of,
    sizes_of,
    unwrapped,
)
from jax_ucp.formats.deepspeed.stage0_pairing import Places, places_of
from jax_ucp.formats.nested import group_with
from jax_ucp.formats.options import (
    DECODED,
    MODULE_ORDER,
    SaidGroups,
    remedy,
    said_of,
    word_note,
)
from jax_ucp.formats.pairing import Contradicted, Undecided
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.consolidated import Consolidated

_BY_SHAPE = (
    "ZeRO-0 stores optimizer states without names; their shapes fit the parameters in one way only"
)


_BY_BITS = (
    "ZeRO-0 in half precision stores masters without names; their bits fit the module's weights in"
    " one way only, and verify compares all of them"
)


def add_numbered_states(slices: Slices) -> None:
    """Add states by number: dense ones are equal on all expert-parallel ranks."""
    ranks = range(len(slices.files.models))
    optimizers = [one for mp in ranks for one in optimizers_of(slices, mp)]
    names = [*optimizers[0].shapes] if optimizers else []
    groups = said_of(slices.options.optimizer_groups, names)
    try:
        places = [places_of(slices, one, groups) for one in optimizers]
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


def _keep_undecided(slices: Slices, optimizers: Sequence[StageZero], error: Undecided) -> None:
    """Keep all apart. Raises where the user's groups do not fit, or masters contradict."""
    if slices.options.optimizer_groups is not None:
        path = optimizers[0].stored.file.path
        raise FormatError(f"{path}: optimizer_groups does not fit: {error}") from None
    if isinstance(error, Contradicted):
        _refuse_masters(optimizers, error)
    for one in optimizers:
        _keep_apart(slices, one, str(error))
    slices.importer.notes.append(_apart_note(slices, optimizers, str(error)))


def _refuse_masters(optimizers: Sequence[StageZero], error: Contradicted) -> NoReturn:
    names = ", ".join(one.stored.name for one in optimizers)
    raise CorruptData(
        f"{optimizers[0].stored.file.path}: the masters in {names}, rounded, are not the weights of"
        f" the module: by their bits {error}. One of them is damaged or of another step, or the"
        " optimizer has parameters that the module does not have; weights_only opens the module's"
        " weights"
    ) from None


def _add_states(slices: Slices, one: StageZero, places: Places) -> None:
    names = {number: name for name, (number, _) in places.items()}
    for group in one.groups:
        for number in group["params"]:
            if number in names:
                slices.importer.hyperparameters(names[number], group)
                _add_states_of(slices, one, names[number], number, group)


def _add_states_of(
    slices: Slices, one: StageZero, name: str, number: int, group: Mapping[str, Any]
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
    slices: Slices, one: StageZero, name: str, state: str, tensor: Any, codes: Codes
) -> None:
    key, file = one.stored.key(tensor), one.stored
    parts = key, file.key(codes.table), file.key(codes.scales)
    reason = f"what the codes of {state} mean"
    slices.importer.decoded(f"{key} decoded", *parts, codes.block, reason)
    whole = Consolidated(Unique().join([tensor.shape]), [f"{key} decoded"])
    slices.add(one.mp, None, state, name, whole, f"{state} of {name}")


def _add_state(slices: Slices, one: StageZero, name: str, state: str, value: Any) -> None:
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


def _add_masters(slices: Slices, one: StageZero, places: Places) -> None:
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


def _keep_apart(slices: Slices, one: StageZero, reason: str) -> None:
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


def _apart_note(slices: Slices, optimizers: Sequence[StageZero], reason: str) -> str:
    masters = bool(optimizers[0].masters)
    what = "masters and optimizer states" if masters else "optimizer states"
    weights = "; the parameters are the module's 16-bit weights" if masters else ""
    say = remedy(
        sizes_of(optimizers[0]), next(iter(optimizers[0].shapes), ""), _ordered(slices, optimizers)
    )
    return (
        f"ZeRO-0 stores {what} without names, and they are kept under `other`: {reason}{weights};"
        f" {say}"
    )


def _ordered(slices: Slices, optimizers: Sequence[StageZero]) -> list[str]:
    """The words that would decide."""
    if any(one.named for one in optimizers):
        return []
    try:
        for one in optimizers:
            places_of(slices, one, MODULE_ORDER)
    except Undecided:
        return []
    return [MODULE_ORDER]
