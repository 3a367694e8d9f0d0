"""bitsandbytes: int8 with a scale for each row (`SCB`), and nf4 or fp4 with one for each run of
elements, which may be quantised themselves.

Rules, in float32 and rounded once: int8 * SCB * (1 / 127, as the library has it); for 4 bits
quant_map[code] * absmax, where a nested absmax is nested_quant_map[code] * nested_absmax + offset.
Sources: bitsandbytes 0.50 `functional.py` (`QuantState`, `dequantize_4bit`,
`int8_vectorwise_dequant`) and `backends/default/ops.py`. Its CPU kernels may round otherwise where
they use AVX-512; the rule of `default/ops.py`, which is that of CUDA, is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer, WeightPart
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid, Wrapping
from jax_ucp.formats.quantized.bits import Packing
from jax_ucp.formats.quantized.stored import StoredWeight
from jax_ucp.json_text import decode_json
from jax_ucp.layout.box import Box

_INT8_STEP = 7.874015718698502e-3
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_NESTED = ("nested_absmax", "nested_quant_map")
_CODES, _NESTED_CODES = 16, 256
_PACKING = Packing(4, 8, 1, is_high_first=True)


def weight(stored: StoredWeight) -> Dequantizer:
    return _rows(stored) if stored.has("SCB") else _runs(stored)


def _rows(stored: StoredWeight) -> Dequantizer:
    """int8 with a scale for each row, in the order of rows."""
    stored.require_only("codes", "SCB", "weight_format")
    shape = stored.rows_and_columns()
    if stored.has("weight_format"):
        order = stored.read("weight_format").reshape(-1).tolist()
        if order != [0]:
            stored.unknown(f"weight_format {order} is another order than that of rows")
    grid = Grid((1, shape[1]))
    parts = {
        "codes": stored.part("codes", shape, ("int8",)),
        "scale": stored.scale("SCB", grid.shape(shape), ("float32",)),
    }
    return Affine(stored.weight.scheme, shape, parts, Codes(), grid, constant=_INT8_STEP)


@dataclass(frozen=True)
class Runs:
    """A matrix of 4-bit codes with one scale for each run of `block` elements of a row.

    The last run of a row may be cut short. A stored element of codes has `width` bytes. With
    `nested`, scales are codes: `nested` of them in order have one scale, and `offset` is added.
    """

    scheme: str
    shape: tuple[int, ...]
    parts: Mapping[str, WeightPart]
    block: int
    width: int
    nested: int = 0
    offset: float = 0.0

    def boxes(self, box: Box) -> Mapping[str, Box]:
        rows = box.start[0], box.stop[0]
        first, last = self._bytes(box)
        runs = self._runs(box)
        boxes = {
            "codes": Box.spanning([rows, (first // self.width, -(-last // self.width))]),
            "absmax": runs,
            "quant_map": Box((0,), (_CODES,)),
        }
        if self.nested:
            boxes["nested_absmax"] = Box.spanning([self._nested_span(runs)])
            boxes["nested_quant_map"] = Box((0,), (_NESTED_CODES,))
        return boxes

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        first, last = self._bytes(box)
        stored = np.ascontiguousarray(parts["codes"]).view(np.uint8)
        skipped = first % self.width
        words = stored[:, skipped : skipped + last - first]
        values = _PACKING.numbers(words, box, parts["quant_map"])
        if self.nested:
            runs = self._runs(box)
            rows = np.arange(runs.start[0], runs.stop[0])[:, None] * self.parts["absmax"].shape[1]
            of_nested = (rows + np.arange(runs.start[1], runs.stop[1])) // self.nested
            of_nested -= self._nested_span(runs)[0]
            scales = np.take(parts["nested_quant_map"], parts["absmax"])
            scales *= np.take(parts["nested_absmax"], of_nested)
            scales += np.float32(self.offset)
        else:
            scales = parts["absmax"].astype(np.float32)
        Grid((1, self.block)).apply(np.multiply, values, scales, box)
        return values

    def _bytes(self, box: Box) -> tuple[int, int]:
        return box.start[1] // 2, -(-box.stop[1] // 2)

    def _runs(self, box: Box) -> Box:
        return Grid((1, self.block)).box(box)

    def _nested_span(self, runs: Box) -> tuple[int, int]:
        """The scales of the scales in a box, in the order of rows."""
        per_row = self.parts["absmax"].shape[1]
        first = runs.start[0] * per_row + runs.start[1]
        last = (runs.stop[0] - 1) * per_row + runs.stop[1]
        return first // self.nested, -(-last // self.nested)


@dataclass(frozen=True)
class Reshaped(Wrapping):
    """A weight of any shape that `inner` has as one row; a box needs all of that row."""

    own: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.own

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return self.inner.boxes(self._rows(box))

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        rows = self.inner.values(self._rows(box), parts)
        whole = rows.reshape(-1, *self.shape[1:])
        return whole[(slice(None), *box.index[1:])]

    def _rows(self, box: Box) -> Box:
        size = math.prod(self.shape[1:])
        return Box((0, box.start[0] * size), (1, box.stop[0] * size))


def _runs(stored: StoredWeight) -> Dequantizer:
    """Codes of 4 bits, by what `quant_state` says of them."""
    stored.require_only("codes", "absmax", "quant_map", *_NESTED, *_STATES)
    state = _state(stored)
    shape, block = _shape(stored, state), _length(stored, state, "blocksize")
    codes = stored.info("codes")
    width = codes.dtype.itemsize
    is_matrix = len(shape) == 2 and shape[1] % block == 0 and shape[1] % (2 * width) == 0
    rows, columns = shape if is_matrix else (1, math.prod(shape))
    if columns % (2 * width) and columns + 1 != math.prod(codes.shape) * 2 * width:
        stored.fault(f"{stored.weight.parts['codes']} does not hold {columns} codes in whole bytes")
    small = rows, -(-columns // block)
    stored_codes = rows, -(-columns // (2 * width))
    parts = {
        "codes": _flat(stored, "codes", stored_codes, (codes.dtype.name,)),
        "quant_map": _flat(stored, "quant_map", (_CODES,), ("float32",)),
    }
    scheme = f"bitsandbytes {state['quant_type']}"
    if not stored.has("nested_absmax"):
        parts["absmax"] = _flat(stored, "absmax", small, ("float32",))
        made = Runs(scheme, (rows, columns), parts, block, width)
    else:
        nested = _length(stored, state, "nested_blocksize")
        parts["absmax"] = _flat(stored, "absmax", small, ("uint8",))
        runs = -(-math.prod(small) // nested)
        parts["nested_absmax"] = _flat(stored, "nested_absmax", (runs,), ("float32",))
        parts["nested_quant_map"] = _flat(
            stored, "nested_quant_map", (_NESTED_CODES,), ("float32",)
        )
        offset = state.get("nested_offset")
        if not isinstance(offset, float | int) or not math.isfinite(offset):
            stored.fault(f"its quant_state says nested_offset={offset!r:.40}")
        made = Runs(scheme, (rows, columns), parts, block, width, nested, float(offset))
    return made if is_matrix else Reshaped(made, shape)


def _flat(
    stored: StoredWeight, role: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> WeightPart:
    """A part with so many elements, which is stored flat. Its numbers must be finite."""
    # Codes of shape (1, n) are those of a weight that `dequantize_4bit` turns.
    flat, is_codes = (math.prod(shape),), role == "codes" or dtypes == ("uint8",)
    part = (stored.part if is_codes else stored.scale)(role, flat, dtypes)
    return replace(part, shape=shape)


def _state(stored: StoredWeight) -> Mapping[str, Any]:
    """The state of a weight that is stored as bytes of JSON beside its tensors."""
    roles = [role for role in _STATES if stored.has(role)]
    if len(roles) != 1:
        stored.fault(f"has {len(roles)} parts quant_state, and needs one")
    label = stored.weight.parts[roles[0]]
    try:
        state = decode_json(stored.read(roles[0]).tobytes())
    except ValueError as error:
        stored.fault(f"{label} is not JSON: {error}")
    kind = roles[0].rpartition("__")[2]
    if not isinstance(state, dict) or state.get("quant_type") != kind:
        stored.fault(f"{label} says {str(state)!r:.80}, and not that its quant_type is {kind}")
    return state


def _shape(stored: StoredWeight, state: Mapping[str, Any]) -> tuple[int, ...]:
    match state.get("shape"):
        case [*lengths] if lengths and all(type(n) is int and 0 < n < 1 << 40 for n in lengths):
            return tuple(lengths)
    stored.fault(f"its quant_state says the shape {state.get('shape')!r:.80}")


def _length(stored: StoredWeight, state: Mapping[str, Any], name: str) -> int:
    length = state.get(name)
    if type(length) is not int or not 0 < length < 1 << 20:
        stored.fault(f"its quant_state says {name}={length!r:.40}")
    return length
