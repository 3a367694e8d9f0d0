"""States of 8-bit optimizers (bitsandbytes): codes as they are stored, or the numbers they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_ucp.formats.assemble import Import
from jax_ucp.formats.deepspeed.files import Stored
from jax_ucp.formats.options import DECODED
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.layout.patterns import Unique
from jax_ucp.sources.consolidated import Consolidated

PART_OF_CODES = "kept apart: what codes of an 8-bit optimizer mean"
_AS_STORED = (
    "states of an 8-bit optimizer are codes, as stored: each is qmap[code] * absmax of its block,"
    " which are beside them; dequantize='float32' (--dequantize float32) gives these numbers"
)
_AS_MEANT = (
    "states of an 8-bit optimizer are the numbers that their codes mean, in float32, as asked"
)
# bitsandbytes' names of the moments of its Adam and LAMB, which have an eps beside two betas.
_MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}


def plain_name(state: str, settings: Mapping[str, Any]) -> str:
    """What torch's optimizers call a state of bitsandbytes' Adam; others keep their name.

    >>> plain_name("state2", {"betas": (0.9, 0.999), "eps": 1e-8})
    'exp_avg_sq'
    """
    betas = settings.get("betas")
    adam = isinstance(betas, list | tuple) and len(betas) == 2 and settings.get("eps")
    return _MOMENTS.get(state, state) if adam else state


def keep_apart(importer: Import, stored: Stored, tensor: StoredTensor, reason: str) -> None:
    """Keep a stored tensor under `other`, by its file and place."""
    label = f"{stored.name.removesuffix('.pt')}.{tensor.key.replace('/', '.')}"
    layout = Unique().join([tensor.shape])
    importer.parameter("other", label, Consolidated(layout, [stored.key(tensor)]), reason)


def note_codes(importer: Import, decoded: bool) -> None:
    """Say once how codes were taken; what was asked for is part of the result."""
    note = _AS_MEANT if decoded else _AS_STORED
    if note not in importer.notes:
        importer.notes.append(note)
    if decoded:
        importer.said["dequantize"] = DECODED
