"""States of 8-bit optimizers (bitsandbytes) in DeepSpeed's files, and what lies beside codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.nested import as_dict

PART_OF_CODES = "kept apart: codes of an 8-bit optimizer, or what they mean"
# Where bitsandbytes keeps the codes of a state, its table and scales, and their names there
# (`bitsandbytes/optim/optimizer.py` of 0.50).
_QUANTIZED = "__bnb_optimizer_quant_state__"
BESIDE_CODES = re.compile(r"(qmap|absmax|max|new_max)\d|gnorm_vec|unorm_vec")


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter, with the parts of bitsandbytes' codes beside the other states."""
    plain = {name: value for name, value in state.items() if name != _QUANTIZED}
    return plain | as_dict(state.get(_QUANTIZED))


def keep_apart(builder: ContentsBuilder, key: str, reason: str) -> None:
    """Keep a stored tensor, `file:item`, under `other`, by its file and place."""
    file, _, item = key.partition(":")
    label = f"{file.removesuffix('.pt')}.{item.replace('/', '.')}"
    builder.parameter("other", label, builder.array(key), reason)
