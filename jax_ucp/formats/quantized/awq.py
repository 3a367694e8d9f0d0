"""AWQ (`version: gemm`), as AutoAWQ and GPTQModel write it: eight codes to a shuffled word.

Rule: (code - zero point) * scale, in float32, rounded once; the weight is that of a Linear, outputs
before inputs. Source: `dequantize_gemm` in AutoAWQ 0.2.9 `utils/packing_utils.py`.
"""

from __future__ import annotations

from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid, TurnedParts
from jax_ucp.formats.quantized.bits import Packing
from jax_ucp.formats.quantized.stored import FLOATS, StoredWeight

# Where in a word the code of each of eight outputs is.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_PACKING = Packing(4, 32, 0, order=_ORDER)


def weight(stored: StoredWeight) -> Dequantizer:
    stored.require_only("codes", "scales", "qzeros")
    settings = stored.settings
    version = settings.get("version") or settings.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        stored.unknown(f"version={version!r:.40} has another order, which is not known here")
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        stored.unknown(f"bits={bits!r:.20} in the config; AWQ has 4")
    words = stored.rows_and_columns()
    shape = words[1] * 8, words[0]
    size = settings.get("group_size", settings.get("q_group_size"))
    size = words[0] if size == -1 else size
    if type(size) is not int or size < 1 or words[0] % size:
        stored.fault(f"group_size={size!r:.20} in the config does not divide {words[0]} inputs")
    groups = words[0] // size
    parts = {
        "codes": stored.part("codes", words, ("int32",)),
        "scale": stored.scale("scales", (groups, shape[0]), FLOATS),
        "zero": stored.part("qzeros", (groups, words[1]), ("int32",)),
    }
    codes = Codes(_PACKING)
    affine = Affine("AWQ", shape, parts, codes, Grid((1, size)), zero_codes=codes)
    return TurnedParts(affine)
