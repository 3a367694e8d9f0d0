"""The moments in what bitsandbytes' optimizers keep of a parameter, numbers or codes of 8 bits.

`state1` and `state2` are numbers in float32, or codes of blocks, with the table `qmap1` and the
scales `absmax1`. AdEMAMix has two first moments, the fast and the slow one, one after the other in
`state1`; scales are of each. (`init_state` in `bitsandbytes/optim/ademamix.py` and `optimizer.py`
of 0.50; blocks of each moment in `csrc/kernels.cu`, `kOptimizerStatic8bit2StateBlockwise`.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ucp.arrays.decoded import block_of, decoded
from jax_ucp.arrays.value import Array, cut
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.layout.fragments import Shape
from jax_ucp.options import DECODED, Options
from jax_ucp.states.pairing import has_two_first_moments

_PARTS = ("state", "qmap", "absmax")
_AS_STORED = (
    "states of an 8-bit optimizer are codes, as stored: each is qmap[code] * absmax of its block,"
    " which are beside them; dequantize='float32' (--dequantize float32) gives these numbers"
)
_AS_MEANT = (
    "states of an 8-bit optimizer are the numbers that their codes mean, in float32, as asked"
)
# The moments of bitsandbytes' Adam and LAMB, which have an eps beside two betas, and of AdEMAMix,
# as the paper's authors call them.
_OF_ADAM = {"state1": ("exp_avg",), "state2": ("exp_avg_sq",)}
_OF_ADEMAMIX = {"state1": ("exp_avg_fast", "exp_avg_slow"), "state2": ("exp_avg_sq",)}


def moments_of(
    builder: ContentsBuilder, states: Mapping[str, Array], settings: Mapping[str, Any], decode: bool
) -> tuple[dict[str, Array], set[str]]:
    """The moments among a parameter's states by name, and the names of the states that hold them.

    Codes are moments only if they are to be decoded, and understood; a note says which. Numbers are
    if codes would be, or if there are two moments in one array.
    """
    names = _names({name: array.info.shape for name, array in states.items()}, settings)
    moments: dict[str, Array] = {}
    used: set[str] = set()
    for number in ("1", "2"):
        state, table, scales = (f"{part}{number}" for part in _PARTS)
        if state not in states:
            continue
        held = names.get(state, (state,))
        arrays = _each(state, states[state], held)
        if table in states:
            block = _block(states, state, table, scales, held)
            _note(builder, decode and block is not None)
            if not decode or block is None:
                continue
            of_each = _each(scales, states[scales], held)
            pairs = zip(arrays, of_each, strict=True)
            arrays = [decoded(codes, states[table], scale, block) for codes, scale in pairs]
            builder.mapped([states[table], states[scales]], f"what the codes of {state} mean")
            used |= {table, scales}
        elif not decode and names is not _OF_ADEMAMIX:
            continue
        used.add(state)
        moments |= zip(held, arrays, strict=True)
    return moments, used


def settle_moments(builder: ContentsBuilder, options: Options) -> None:
    """Put moments in the place of the states of parameters that hold them, as `moments_of` does."""
    decode = options.dequantize == DECODED
    held: dict[str, dict[str, Array]] = defaultdict(dict)
    for (state, name), array in builder.params.items():
        held[str(name)][str(state)] = array
    for name, states in held.items():
        moments, used = moments_of(builder, states, builder.settings.get(name, {}), decode)
        for state in used:
            builder.take(state, name)
        for state, array in moments.items():
            builder.parameter(state, name, array, f"{state} of {name}")


def _names(
    states: Mapping[str, Shape], settings: Mapping[str, Any]
) -> Mapping[str, tuple[str, ...]]:
    """The moments in each state, by the names that other optimizers give them, if they are known.

    >>> _names({"state2": (2, 3)}, {"betas": (0.9, 0.999), "eps": 1e-8})["state2"]
    ('exp_avg_sq',)
    """
    if has_two_first_moments(states):
        return _OF_ADEMAMIX
    betas = settings.get("betas")
    adam = isinstance(betas, list | tuple) and len(betas) == 2 and settings.get("eps")
    return _OF_ADAM if adam else {}


def _block(
    states: Mapping[str, Array], state: str, table: str, scales: str, held: Sequence[str]
) -> int | None:
    """How many codes share a scale; None if they are not codes of blocks of one row of elements, or
    of one for each moment.
    """
    if scales not in states:
        return None
    infos = [states[name].info for name in (state, table, scales)]
    dtypes = [info.dtype.name for info in infos]
    if dtypes != ["uint8", "float32", "float32"] or infos[1].shape != (256,):
        return None
    *moments, blocks = infos[2].shape or (0,)
    if moments != ([len(held)] if len(held) > 1 else []):
        return None
    return block_of(math.prod(infos[0].shape) // len(held), blocks)


def _each(name: str, array: Array, held: Sequence[str]) -> list[Array]:
    """The array of each moment in one that holds some, one after the other; that of one is all."""
    if len(held) == 1:
        return [array]
    shape = array.info.shape[1:]
    return [cut(name, array, i * math.prod(shape), shape) for i in range(len(held))]


def _note(builder: ContentsBuilder, decoded: bool) -> None:
    """Add one note on how codes were read; if decoded, the result records that choice."""
    note = _AS_MEANT if decoded else _AS_STORED
    if note not in builder.notes:
        builder.notes.append(note)
    if decoded:
        builder.said["dequantize"] = DECODED
