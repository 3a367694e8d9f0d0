"""The schemes that are known: by what a model's config calls its method, how a weight is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax_ucp.errors import QuantizedWeights
from jax_ucp.formats.quantized.fp8 import block_fp8, row_fp8
from jax_ucp.formats.quantized.stored import StoredWeight
from jax_ucp.sources.dequantized import Dequantizer

SCHEMES: Mapping[str, Callable[[StoredWeight], Dequantizer]] = {
    "fp8": block_fp8,
    "fbgemm_fp8": row_fp8,
}


def dequantizer(method: str, stored: StoredWeight) -> Dequantizer:
    """How a weight is made of its parts.

    Raises QuantizedWeights where that is not known, and FormatError where the parts are not those
    of the method.
    """
    if stored.weight.fault:
        raise QuantizedWeights(f"{stored.weight}")
    if not method:
        raise QuantizedWeights(
            f"{stored.weight}: names alone do not say how its numbers are meant. Put the"
            " config.json of the model, with its quantization_config, beside the weights"
        )
    if method not in SCHEMES:
        known = ", ".join(sorted(SCHEMES))
        raise QuantizedWeights(
            f"{stored.weight}: the config declares {method}, which is not dequantised here; known"
            f" are {known}"
        )
    return SCHEMES[method](stored)
