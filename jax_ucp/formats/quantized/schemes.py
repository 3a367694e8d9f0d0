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
    modelopt,
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
    "modelopt": modelopt.scaled,
    "mxfp4": mxfp4.blocks,
    "torchao": torchao.tensor,
}
# Where `hf_quant_config.json` alone declares a method, it is called by its algorithm.
_BY_ALGORITHM = dict.fromkeys(modelopt.ALGOS, modelopt.scaled)

# What is told by the dtype alone.
_FP4 = "F4, several to a byte"


def dequantizer(method: str, stored: StoredWeight) -> Dequantizer:
    """How a weight is made of its parts.

    Raises QuantizedWeights where that is not known, and FormatError where the parts are not those
    of the method.
    """
    make = SCHEMES.get(method) or _BY_ALGORITHM.get(method)
    if method and make is None:
        known = ", ".join(sorted(SCHEMES))
        raise QuantizedWeights(
            f"{stored.weight}: the config declares {method}, which is not dequantised here; known"
            f" are {known}"
        )
    if stored.weight.fault:
        raise QuantizedWeights(f"{stored.weight}")
    if make is not None:
        return make(stored)
    if stored.weight.scheme.startswith(ggml.SCHEME):
        return ggml.blocks(stored)
    if stored.weight.scheme == _FP4:
        return narrow.fp4(stored)
    raise QuantizedWeights(
        f"{stored.weight}: names alone do not say how its numbers are meant. Put the config.json of"
        " the model, with its quantization_config, beside the weights"
    )
