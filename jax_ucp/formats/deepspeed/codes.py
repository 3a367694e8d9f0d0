"""States of 8-bit optimizers (bitsandbytes): codes as they are stored, or the numbers they mean."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_ucp.arrays.decoded import block_of
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.nested import as_dict
from jax_ucp.options import DECODED

PART_OF_CODES = "kept apart: what codes of an 8-bit optimizer mean"
_AS_STORED = (
    "states of an 8-bit optimizer are codes, as stored: each is qmap[code] * absmax of its block,"
    " which are beside them; dequantize='float32' (--dequantize float32) gives these numbers"
)
_AS_MEANT = (
    "states of an 8-bit optimizer are the numbers that their codes mean, in float32, as asked"
)
# Where bitsandbytes keeps the codes of a state, its table and scales, and their names there
# (`bitsandbytes/optim/optimizer.py` of 0.50).
_QUANTIZED = "__bnb_optimizer_quant_state__"
PARTS = ("state", "qmap", "absmax")
_PART = re.compile(r"(state|qmap|absmax|max|new_max)\d|gnorm_vec|unorm_vec")
# bitsandbytes' names of the moments of its Adam and LAMB, which have an eps beside two betas.
_MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}


@dataclass(frozen=True)
class RankCodes:
    """The meaning of one rank's codes of eight bits: entries of a table, times scales of blocks."""

    table: StoredTensor
    scales: StoredTensor
    block: int


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter, with the parts of bitsandbytes' codes beside the other states."""
    plain = {name: value for name, value in state.items() if name != _QUANTIZED}
    return plain | as_dict(state.get(_QUANTIZED))


def numbers_of_codes(states: Iterable[str]) -> list[str]:
    """The numbers of the states that are codes: those with a table, as `state1` has `qmap1`."""
    return [name.removeprefix("qmap") for name in states if name.startswith("qmap")]


def split_codes(
    states: Mapping[str, list[Any]],
) -> tuple[dict[str, list[RankCodes]], dict[str, list[StoredTensor]], dict[str, list[Any]]]:
    """Each rank's states without codes; the codes, by state; and tensors of codes that are not of
    elements.

    Codes that are not understood on one rank stay among the states, as they are, with their parts.
    """
    codes: dict[str, list[RankCodes]] = {}
    for number in numbers_of_codes(states):
        tensors = [states.get(f"{part}{number}", []) for part in PARTS]
        meanings = list(itertools.starmap(meaning_of, zip(*tensors, strict=False)))
        understood = list(filter(None, meanings))
        if understood and len(understood) == len(meanings):
            codes[f"state{number}"] = understood
    if not numbers_of_codes(states):
        return {}, {}, dict(states)
    parts = {name: states[name] for name in filter(_PART.fullmatch, states) if name not in codes}
    return codes, parts, {name: states[name] for name in states if name not in parts}


def meaning_of(codes: Any, table: Any, scales: Any) -> RankCodes | None:
    """The rule that codes follow; None if they are not codes of blocks of one row of elements."""
    if not all(isinstance(tensor, StoredTensor) for tensor in (codes, table, scales)):
        return None
    dtypes = [tensor.dtype.name for tensor in (codes, table, scales)]
    if dtypes != ["uint8", "float32", "float32"] or table.shape != (256,):
        return None
    block = block_of(math.prod(codes.shape), *scales.shape) if len(scales.shape) == 1 else None
    return RankCodes(table, scales, block) if block else None


def plain_name(state: str, settings: Mapping[str, Any]) -> str:
    """The name that torch's optimizers give a state of bitsandbytes' Adam, or the same name.

    >>> plain_name("state2", {"betas": (0.9, 0.999), "eps": 1e-8})
    'exp_avg_sq'
    """
    betas = settings.get("betas")
    adam = isinstance(betas, list | tuple) and len(betas) == 2 and settings.get("eps")
    return _MOMENTS.get(state, state) if adam else state


def keep_apart(builder: ContentsBuilder, key: str, reason: str) -> None:
    """Keep a stored tensor, `file:item`, under `other`, by its file and place."""
    file, _, item = key.partition(":")
    label = f"{file.removesuffix('.pt')}.{item.replace('/', '.')}"
    builder.parameter("other", label, builder.array(key), reason)


def note_codes(builder: ContentsBuilder, decoded: bool) -> None:
    """Add one note on how codes were read; if decoded, the result records that choice."""
    note = _AS_MEANT if decoded else _AS_STORED
    if note not in builder.notes:
        builder.notes.append(note)
    if decoded:
        builder.said["dequantize"] = DECODED
