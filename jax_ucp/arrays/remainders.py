"""Masters that are stored as 16-bit weights and the bits that these lack.

TransformerEngine's precision-aware optimizer keeps of each fp32 master the low 16 bits, beside the
bfloat16 weight, which it rounds to nearest, halves up (`AdamFunctorMasterParamRemainder` in
`transformer_engine/common/multi_tensor/adam.cu`, v2.18). Any two such halves are a master that
rounds so to the weight: nothing in them shows whether they belong together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_ucp.arrays.evaluate import locate
from jax_ucp.arrays.proof import Proof
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.arrays.value import Array, Computed, Rule
from jax_ucp.layout.box import Box

_MASTER = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Halves(Rule):
    """fp32 masters of their low 16 bits, `low`, whole numbers with a sign, and their bfloat16
    `weights`: a negative remainder is that of a weight which was rounded up.

    >>> import ml_dtypes
    >>> masters = np.array([0.1, -3.0000002, 1.00390625], np.float32)
    >>> bits = masters.view(np.uint32)
    >>> weights = ((bits + 0x8000) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    >>> parts = {"weights": weights, "low": bits.astype(np.uint16).view(np.int16)}
    >>> bool((Halves().values(Box((0,), (3,)), parts) == masters).all())
    True
    """

    @property
    def elementwise(self) -> Sequence[str]:
        return ["low", "weights"]

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        low = parts["low"].astype(np.int32)
        high = parts["weights"].view(np.uint16).astype(np.int32) - (low < 0)
        return (high << 16 | low & 0xFFFF).view(_MASTER)


def masters(low: Array, weights: Array) -> Computed:
    """The fp32 masters of their low 16 bits and their weights."""
    return Computed(Halves(), {"low": low, "weights": weights}, ArrayInfo(low.info.shape, _MASTER))


@dataclass(frozen=True)
class WholeNumbers(Proof):
    """Remainders that were widened: whole numbers of 16 bits."""

    label: str
    array: Array

    def fault_in(self, boxes: Sequence[Box], elements: np.ndarray) -> str | None:
        with np.errstate(invalid="ignore"):  # no 16-bit number is NaN
            if np.array_equal(elements.astype(np.int16), elements):
                return None
        where = next(locate(self.array, boxes[0])).name
        return (
            f"{self.label}: by the run's args what is at {where} are the low 16 bits of masters,"
            " but these are not whole numbers of 16 bits: args or tensors are of another step or"
            " run, or damaged. weights_only opens the weights alone"
        )
