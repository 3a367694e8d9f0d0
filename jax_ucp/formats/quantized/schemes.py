"""The schemes that are known: by what a model's config calls its method, how a weight is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax_ucp.errors import QuantizedWeights
from jax_ucp.formats.quantized import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    ggml,
    gptq,
    mxfp4,
    narrow,
    torchao,
)
from jax_ucp.formats.quantized.stored import StoredWeight
from jax_ucp.sources.dequantized import Dequantizer

SCHEMES: Mapping[str, Callable[[StoredWeight], Dequantizer]] = {
    "awq": awq.interleaved,
    "bitsandbytes": bitsandbytes.rows_or_runs,
    "compressed-tensors": compressed_tensors.compressed,
    "fbgemm_fp8": fp8.row_fp8,
    "fp8": fp8.block_fp8,
    "gptq": gptq.grouped,
    "mxfp4": mxfp4.blocks,
    "torchao": torchao.tensor,
}

# What is told by the dtype alone.
_FP4 = "F4, several to a byte"


def dequantizer(method: str, stored: StoredWeight) -> Dequantizer:
    """How a weight is made of its parts.

    Raises QuantizedWeights where that is not known, and FormatError where the parts are not those
    of the method.
    """
    if stored.weight.fault:
        raise QuantizedWeights(f"{stored.weight}")
    if stored.weight.scheme.startswith(ggml.SCHEME):
        return ggml.blocks(stored)
    if not method and stored.weight.scheme == _FP4:
        return narrow.fp4(stored)
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
