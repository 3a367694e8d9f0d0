"""GPTQ, as AutoGPTQ, GPTQModel and optimum write it: codes of 2, 3, 4 or 8 bits down the inputs,
zero points across the outputs, and `g_idx`, the group of each input.

Rule: scale * (code - zero point), in float32, rounded once; the weight is that of a Linear, outputs
before inputs. Files of `checkpoint_format: gptq` (v1) have zero points less one, those of `gptq_v2`
as they are. Sources: `TorchLinear.dequantize_weight` in GPTQModel 7.7
`nn_modules/qlinear/__init__.py`; `qlinear_cuda.py` of AutoGPTQ 0.7. The two differ where a stored
zero point of v1 has all bits set: AutoGPTQ makes it 0, as here, and GPTQModel lets it carry into
its neighbour.
"""

from __future__ import annotations

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized.affine import Affine, Codes, Gathered, Grid, TurnedParts
from jax_ucp.formats.quantized.bits import Packing
from jax_ucp.formats.quantized.stored import FLOATS, StoredWeight, as_groups

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


def weight(stored: StoredWeight) -> Dequantizer:
    stored.require_only("codes", "scales", "qzeros", "g_idx")
    # the first releases of AutoGPTQ do not name the layout
    format = stored.settings.get("checkpoint_format") or stored.settings.get("format") or "gptq"
    if format not in _FORMATS:
        stored.unknown(f"checkpoint_format={format!r:.40} is not known here: {_FORMATS} are")
    rows, outputs = stored.rows_and_columns()
    groups, _ = stored.rows_and_columns("scales")
    bits, inputs = _bits(stored, rows)
    packing = Packing(bits, 32, 0)
    grid = _grid(stored, inputs, groups)
    small = (groups, outputs)
    parts = {
        "codes": stored.part("codes", packing.shape((inputs, outputs)), ("int32",)),
        "scale": stored.scale("scales", small, FLOATS),
        "zero": stored.part("qzeros", Packing(bits, 32, 1).shape(small), ("int32",)),
    }
    if isinstance(grid, Gathered):
        parts["group"] = as_groups(stored, inputs, groups)
    scheme, shape = f"GPTQ, {bits} bits", (outputs, inputs)
    codes = Codes(Packing(bits, 32, 1))
    # of v1 each stored zero point stands for one more, and for 0 after the largest
    one_more = ((np.arange(1 << bits) + 1) % (1 << bits)).astype(np.float32)
    zeros = Codes(packing, table=None if format == "gptq_v2" else one_more)
    return TurnedParts(Affine(scheme, shape, parts, codes, grid, zero_codes=zeros))


def _bits(stored: StoredWeight, rows: int) -> tuple[int, int]:
    """The bits of a code, and the number of inputs that so many rows of words hold.

    With `dynamic` in a config, modules differ, and `g_idx`, which has each input, decides.
    """
    declared = stored.settings.get("bits")
    if stored.has("g_idx"):
        inputs = next(iter(stored.info("g_idx").shape), 0)
        fits = [bits for bits in _BITS if Packing(bits, 32, 0).length(inputs) == rows]
    else:
        fits = [bits for bits in _BITS if bits == declared]
        inputs = rows * 32 // fits[0] if fits else 0
    is_dynamic = len(fits) == 1 and stored.settings.get("dynamic")
    if fits != [declared] and not is_dynamic:
        stored.fault(
            f"{stored.weight.parts['codes']} has {rows} rows of words for {inputs} inputs, which is"
            f" not bits={declared!r:.20}, as the config says"
        )
    return fits[0], inputs


def _grid(stored: StoredWeight, inputs: int, groups: int) -> Grid | Gathered:
    if stored.has("g_idx"):
        return Gathered(1, groups)
    size = stored.settings.get("group_size")
    size = inputs if size == -1 else size
    if type(size) is not int or size < 1 or -(-inputs // size) != groups:
        stored.fault(f"group_size={size!r:.20} in the config does not give {groups} groups")
    stored.require_block(inputs, size, f"group_size={size} in the config")
    return Grid((1, size))
