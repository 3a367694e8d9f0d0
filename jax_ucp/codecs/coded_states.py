"""The states of torchao's low-bit optimizers, as their tensor subclasses are pickled.

A block of elements in row-major order has one scale. `OptimState8bit` has a code of 8 bits for each
element and `OptimState4bit` two of 4 bits in a byte, the first in the high bits, both with a table
`qmap` of what codes mean; the codes of `OptimStateFp8` are float8_e4m3fn. Values are computed in
float32, as torchao does. Source: `dequantize` of each class in `torchao/optim` of torchao 0.18; in
older releases the folder is `torchao/prototype/low_bit_optim`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jax_ucp.codecs.unpickle import Name, ObjectNode

if TYPE_CHECKING:
    from jax_ucp.codecs.tensor_names import StoredTensor

# By class: the dtype of codes, how many are in one of them, and the length of the table.
_KINDS = {
    "subclass_8bit.OptimState8bit": (np.dtype(np.uint8), 1, 256),
    "subclass_4bit.OptimState4bit": (np.dtype(np.uint8), 2, 16),
    "subclass_fp8.OptimStateFp8": (np.dtype(ml_dtypes.float8_e4m3fn), 1, 0),
}
_BY_NAME = {
    f"{folder}.{name}": kind
    for folder in ("torchao.optim", "torchao.prototype.low_bit_optim")
    for name, kind in _KINDS.items()
}
CODED_TYPES = frozenset(map(Name, _BY_NAME))


@dataclass(frozen=True, slots=True, eq=False)
class CodedState(ObjectNode):
    """A state as codes: `parts` are the tensors `codes`, `scale` and, if there is one, `qmap`."""

    type: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Mapping[str, StoredTensor]

    def children(self) -> Iterable[tuple[object, object]]:
        return self.parts.items()

    def values(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The decoded elements, in the dtype that the state has outwards."""
        codes, scale = parts["codes"].reshape(-1), parts["scale"]
        if _BY_NAME[self.type][1] == 2:
            codes = np.stack([codes >> 4, codes & 15], axis=-1)
        plain = parts["qmap"][codes] if "qmap" in parts else codes.astype(np.float32)
        scaled = plain.reshape(len(scale), -1) * scale[:, None]
        return scaled.reshape(self.shape).astype(self.dtype)


def coded_state(
    kind: Name, shape: tuple, dtype: object, parts: Mapping[str, StoredTensor]
) -> CodedState | None:
    """The state, or None if its tensors are not those of its class."""
    of_codes, per_code, table = _BY_NAME[kind.name]
    names = {"codes", "scale", "qmap"} if table else {"codes", "scale"}
    if parts.keys() != names or not isinstance(dtype, np.dtype):
        return None
    codes, scale = parts["codes"], parts["scale"]
    if codes.dtype != of_codes or any(parts[n].dtype != np.float32 for n in names - {"codes"}):
        return None
    if table and parts["qmap"].shape != (table,):
        return None
    elements, coded = math.prod(shape), math.prod(codes.shape) * per_code
    (blocks,) = scale.shape if len(scale.shape) == 1 else (0,)
    if elements != coded or not blocks or elements % blocks:
        return None
    return CodedState(kind.name, shape, dtype, parts)
