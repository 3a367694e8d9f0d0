"""The schemes that are known: by what a model's config calls its method, how a weight is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax_ucp.arrays.contents import QuantizedWeight
from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.errors import QuantizedWeights
from jax_ucp.formats.quantized import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    ggml,
    gptq,
    mlx,
    modelopt,
    mxfp4,
    torchao,
)
from jax_ucp.formats.quantized.names import GGML
from jax_ucp.formats.quantized.stored import StoredWeight

SCHEMES: Mapping[str, Callable[[StoredWeight], Dequantizer]] = {
    "MLX": mlx.weight,
    "awq": awq.weight,
    "bitsandbytes": bitsandbytes.weight,
    "compressed-tensors": compressed_tensors.weight,
    "fbgemm_fp8": fp8.row_fp8,
    "fp8": fp8.block_fp8,
    "gptq": gptq.weight,
    "modelopt": modelopt.weight,
    "mxfp4": mxfp4.blocks,
    "torchao": torchao.weight,
}
# Where `hf_quant_config.json` alone declares a method, it is called by its algorithm.
_BY_ALGORITHM = dict.fromkeys((*modelopt.ALGOS, modelopt.MIXED), modelopt.weight)

# What is told by the dtype alone.
_FP4 = "F4, several to a byte"


def dequantizer(method: str, stored: StoredWeight) -> Dequantizer:
    """The weight that the parts stand for. Raises QuantizedWeights or FormatError."""
    if why := why_unread(method, stored.weight):
        is_said = why == stored.weight.fault
        raise QuantizedWeights(f"{stored.weight}" if is_said else f"{stored.weight}: {why}")
    make = _maker(method, stored.weight)
    assert make is not None
    return make(stored)


def why_unread(method: str, weight: QuantizedWeight) -> str:
    """The reason why no rule is known for a weight's parts; empty if one is known."""
    is_known = _maker(method, weight) is not None
    if method and not is_known:
        known = ", ".join(sorted(SCHEMES, key=str.lower))
        return f"the config declares {method}, which is not dequantised here; known are {known}"
    if weight.fault or is_known:
        return weight.fault
    return (
        "names alone do not say how its numbers are meant. Put the config.json of the model, with"
        " its quantization_config, beside the weights"
    )


def _maker(method: str, weight: QuantizedWeight) -> Callable[[StoredWeight], Dequantizer] | None:
    if method:
        return SCHEMES.get(method) or _BY_ALGORITHM.get(method)
    if weight.scheme.startswith(GGML):
        return ggml.blocks
    return mxfp4.fp4 if weight.scheme == _FP4 else None
