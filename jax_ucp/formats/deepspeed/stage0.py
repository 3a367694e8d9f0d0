"""ZeRO-0: optimizer states that have numbers, given to parameters or kept apart.

Where it cannot be told which parameter a number means (`stage0_pairing`), masters and states are
kept under `other`, and the parameters are the module's. Masters whose bits are those of no weights
of the module are refused.
"""

from __future__ import annotations

from typing import Any

from jax_ucp.arrays.value import Stored
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.formats.deepspeed.codes import keep_apart
from jax_ucp.formats.deepspeed.slices import Slices
from jax_ucp.formats.deepspeed.stage0_pairing import (
    Places,
    StageZero,
    optimizers_of,
    places_of,
    sizes_of,
    unwrapped,
)
from jax_ucp.formats.moments import moments_of
from jax_ucp.formats.nested import group_with
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import box_part
from jax_ucp.options import (
    DECODED,
    MODULE_ORDER,
    remedy,
    said_of,
    word_note,
)
from jax_ucp.states.assign import deciding
from jax_ucp.states.pairing import Contradicted, Undecided

_BY_SHAPE = (
    "ZeRO-0 stores optimizer states without names; their shapes fit the parameters in one way only"
)


_BY_BITS = (
    "ZeRO-0 in half precision stores masters without names; their bits fit the module's weights in"
    " one way only, and verify compares all of them"
)


def add_numbered_states(slices: Slices) -> None:
    """Add the states that optimizers store by number; if nothing decides their parameters, under
    `other`, with a note.

    Raises FormatError if the user's lists do not fit, CorruptData if masters contradict weights.
    """
    builder, options = slices.builder, slices.options
    ranks = range(len(slices.files.models))
    optimizers = [one for mp in ranks for one in optimizers_of(slices, mp)]
    names = [*optimizers[0].shapes] if optimizers else []
    said = said_of(options.optimizer_groups, names)
    if not optimizers:
        return
    first, is_named = optimizers[0], [one.named for one in optimizers]
    try:
        places = [places_of(slices, one, said) for one in optimizers]
    except Undecided as error:
        path = first.stored.file.path
        if options.optimizer_groups is not None:
            raise FormatError(f"{path}: optimizer_groups does not fit: {error}") from None
        if isinstance(error, Contradicted):
            files = ", ".join(one.stored.name for one in optimizers)
            raise CorruptData(
                f"{path}: the masters in {files}, rounded, are not the weights of the module: by"
                f" their bits {error}. One of them is damaged or of another step, or the optimizer"
                " has parameters that the module does not have; weights_only opens the module's"
                " weights"
            ) from None
        for one in optimizers:
            _keep_apart(slices, one, str(error))
        what = "masters and optimizer states" if first.masters else "optimizer states"
        weights = "; the parameters are the module's 16-bit weights" if first.masters else ""
        words = [] if any(is_named) else [MODULE_ORDER]
        words = deciding(words, lambda word: [places_of(slices, one, word) for one in optimizers])
        builder.notes.append(
            f"ZeRO-0 stores {what} without names, and they are kept under `other`: {error}{weights}"
            f"; {remedy(words, sizes_of(first), next(iter(first.shapes), ''))}"
        )
        return
    for one, its_places in zip(optimizers, places, strict=True):
        add = _add_masters if one.masters else _add_states
        add(slices, one, its_places)
    if all(is_named):
        return
    if said is not None:
        builder.said["optimizer_groups"] = said
        builder.notes.append(word_note(said))
    else:
        builder.notes.append(_BY_BITS if first.masters else _BY_SHAPE)


def _add_states(slices: Slices, one: StageZero, places: Places) -> None:
    """Add the states of torch's own optimizer; 8-bit ones are decoded if the user asks for it."""
    builder, place = slices.builder, slices.place(one.mp)
    names = {number: name for name, (number, _) in places.items()}
    decode = slices.options.dequantize == DECODED
    numbered = [(number, group) for group in one.groups for number in group["params"]]
    for number, group in numbered:
        if number not in names:
            continue
        name, states = names[number], one.states.get(number, {})
        builder.hyperparameters(name, group)
        arrays = {
            state: builder.array(one.stored.key(value))
            for state, value in states.items()
            if isinstance(value, StoredTensor)
        }
        moments, used = moments_of(builder, arrays, group, decode)
        for state, value in states.items():
            if state in used:
                continue
            if state in arrays and arrays[state].info.shape == one.shapes[name]:
                moments[state] = arrays[state]
            else:
                slices.states[state, name].values[place[0]].append((one.stored, value))
        for state, array in moments.items():
            if slices.array_on(place, state, name):
                reason = "the same state on another expert-parallel rank, compared by verify"
                slices.compare(place, state, name, array, reason)
            elif isinstance(array, Stored):
                slices.add_whole(one.mp, state, name, array.item)
            else:
                slices.add(place, state, name, None, [array])
                builder.mapped([array], f"{state} of {name}")


def _add_masters(slices: Slices, one: StageZero, places: Places) -> None:
    """Add masters and states of the optimizers that DeepSpeed wraps for half precision."""
    place, builder = slices.place(one.mp), slices.builder
    for name, (number, part) in places.items():
        master, shape = one.masters[number], one.shapes[name]
        copy = slices.take(place, "param", name)
        for state, value in {**one.states.get(number, {}), "param": master}.items():
            if not (isinstance(value, StoredTensor) and value.shape == master.shape):
                slices.states[state, name].values[place[0]].append((one.stored, value))
                continue
            layout = ParamLayout(shape, (value.shape,), (box_part(0, part, Box.whole(shape)),))
            array = builder.array(one.stored.key(value))
            slices.add(place, state, name, layout, [array])
            builder.mapped([array], f"{state} of {len(places)} parameters")
        reason = f"a copy of {name}'s master, compared with it by verify"
        slices.compare(place, "param", name, copy, reason)
        builder.hyperparameters(name, group_with(one.groups, number))


def _keep_apart(slices: Slices, one: StageZero, reason: str) -> None:
    """Keep an optimizer's tensors under `other`, by their paths, and other values as an extra."""
    inner, masters = unwrapped(one.stored.state["optimizer"])
    states = "optimizer/optimizer_state_dict/state" if masters else "optimizer/state"
    items = (f"{states}/", f"optimizer/{masters}/") if masters else (f"{states}/",)
    begins = tuple(f"{one.stored.name}:{item}" for item in items)
    why = f"kept apart, because nothing says which parameter it is of: {reason}"
    for key in slices.builder.stored:
        if key.startswith(begins):
            keep_apart(slices.builder, key, why)
    values: dict[Any, dict[str, Any]] = {}
    for number, state in inner["state"].items():
        others = {n: value for n, value in state.items() if not isinstance(value, StoredTensor)}
        if others:
            values[number] = others
    if values:
        slices.builder.extra(one.stored.name, states, values)
