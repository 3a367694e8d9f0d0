"""torchao's tensors, as its safetensors support and transformers write them: `_weight_qdata`,
`_weight_scale`, and in the file's header the class of each tensor with its attributes.

Rules, in float32 and rounded once: (qdata - zero_point) * scale; of NVFP4 fp4 * (per_tensor_scale *
scale); of MX fp * 2 ** (scale - 127). Source: `dequantize` of each class in torchao 0.18. Where
torchao computes in the dtype of the result, products of so few bits are exact before they are
rounded, so that the bits are the same. Scales may be in the order of a GPU's tiles (`to_blocked` in
`prototype/mx_formats/utils.py`). Int4Tensor is refused: its rule is in the kernels of another
library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer, WeightPart
from jax_ucp.formats.quantized.affine import Affine, Codes, Grid, Wrapping, in_bytes, of_rows
from jax_ucp.formats.quantized.bits import FP4, FP6_E2M3, FP6_E3M2
from jax_ucp.formats.quantized.stored import FLOATS, FP8, StoredWeight, leading
from jax_ucp.layout.box import Box

_ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")


def weight(stored: StoredWeight) -> Dequantizer:
    """The weight, by its class and its parts, which the header of its file names."""
    kind = stored.said.get("_type")
    attributes = stored.said.get("_data")
    if kind is None or not isinstance(attributes, Mapping):
        stored.unknown("the header of its file does not say which of torchao's tensors it is")
    if kind not in _CLASSES:
        known = ", ".join(_CLASSES)
        stored.unknown(f"torchao's {kind!r:.60} is not dequantised here; known are {known}")
    named = stored.said.get("_tensor_data_names")
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        stored.fault(f"the header names its parts as {named!r:.80}")
    roles = {"codes" if name == "qdata" else name for name in named}
    if missing := sorted(roles - stored.arrays.keys()):
        stored.fault(f"the header names the parts {', '.join(missing)}, which are not stored")
    if more := sorted(stored.arrays.keys() - roles):
        stored.fault(f"it has {', '.join(more)}, which the header does not name")
    if stored.has("act_pre_scale"):
        stored.unknown("it has act_pre_scale, which activations are multiplied by first")
    return _CLASSES[kind](stored, attributes)


def _scaled(
    stored: StoredWeight, attributes: Mapping[str, Any], dtypes: Sequence[str], more: str = ""
) -> Dequantizer:
    """The weight of codes of these dtypes; `more` is a part that may be there beside the scale."""
    stored.require_only("codes", "scale", more, *_ACTIVATIONS)
    shape = stored.info("codes").shape
    grid = Grid(_block(stored, attributes.get("block_size"), shape))
    small = grid.shape(shape)
    parts = {
        "codes": stored.part("codes", shape, dtypes),
        "scale": stored.scale("scale", small, FLOATS),
    }
    if stored.has("zero_point"):
        parts["zero"] = stored.part("zero_point", small, ("int8", "int32"))
    return Affine(_name(stored), shape, parts, Codes(), grid)


def _block(stored: StoredWeight, said: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a block with one scale, as the header says it; -1 there is all of an axis.
    Raises FormatError if it does not divide the weight.
    """
    lengths = said if isinstance(said, list) and len(said) == len(shape) and all(shape) else None
    block = tuple(n if size == -1 else size for size, n in zip(lengths or (), shape, strict=False))
    if lengths is None or not all(type(length) is int and length > 0 for length in block):
        stored.fault(f"block_size={said!r:.80} in the header is not a block of {list(shape)}")
    if any(n % size for size, n in zip(block, shape, strict=True)):
        stored.fault(f"block_size={said!r:.80} in the header does not divide {list(shape)}")
    return block


def _nvfp4(stored: StoredWeight, attributes: Mapping[str, Any]) -> Dequantizer:
    stored.require_only("codes", "scale", "per_tensor_scale", *_ACTIVATIONS)
    shape, part, codes = in_bytes(stored, FP4)
    grid = _groups(stored, attributes, shape)
    parts = {
        "codes": part,
        "scale": _scale(stored, attributes, grid.shape(shape), ("float8_e4m3fn",)),
    }
    if stored.has("per_tensor_scale"):
        parts["factor"] = stored.scale("per_tensor_scale", (1,), ("float32",))
    return _in_order(attributes, Affine(_name(stored), shape, parts, codes, grid))


def _mx(stored: StoredWeight, attributes: Mapping[str, Any]) -> Dequantizer:
    stored.require_only("codes", "scale", *_ACTIVATIONS)
    element = attributes.get("elem_dtype")
    if isinstance(element, Mapping):
        element = element.get("_data")
    shape = stored.info("codes").shape
    if element == "float4_e2m1fn_x2":
        shape, part, codes = in_bytes(stored, FP4)
    elif element in _FP6:
        # One code to a byte.
        part, codes = stored.part("codes", shape, ("uint8",)), Codes(table=_FP6[element])
    elif element in FP8:
        part, codes = stored.part("codes", shape, (element,)), Codes()
    else:
        stored.unknown(f"elem_dtype={element!r:.60} in the header is not known here")
    grid = _groups(stored, attributes, shape)
    parts = {
        "codes": part,
        "scale": _scale(stored, attributes, grid.shape(shape), ("uint8", "float8_e8m0fnu")),
    }
    return _in_order(attributes, Affine(_name(stored), shape, parts, codes, grid))


def _groups(stored: StoredWeight, attributes: Mapping[str, Any], shape: tuple[int, ...]) -> Grid:
    size = attributes.get("block_size")
    return of_rows(stored, shape, size, f"block_size={size!r:.40} in the header")


_TILE = 128, 4  # rows and columns of scales that are stored together


def _scale(
    stored: StoredWeight,
    attributes: Mapping[str, Any],
    small: tuple[int, ...],
    dtypes: Sequence[str],
) -> WeightPart:
    if not attributes.get("is_swizzled_scales"):
        return stored.scale("scale", small, dtypes)
    if len(small) != 2:
        stored.unknown(f"scales of shape {list(small)} in the order of a GPU's tiles")
    tiles = Grid(_TILE).shape(small)
    stored_shape = stored.info("scale").shape
    scale, shape = stored.scale("scale", stored_shape, dtypes), (*tiles, math.prod(_TILE))
    if leading(stored_shape) not in ([math.prod(shape)], [32 * tiles[0], 16 * tiles[1]]):
        label = stored.weight.parts["scale"]
        stored.fault(
            f"{label} has shape {list(stored_shape)}, and should have {list(tiles)} tiles of 512"
        )
    return replace(scale, shape=shape)


@dataclass(frozen=True)
class Tiled(Wrapping):
    """A weight whose scales are stored in tiles: in each, four columns of four runs of 32 rows."""

    def boxes(self, box: Box) -> Mapping[str, Box]:
        boxes = self.inner.boxes(box)
        tiles = Grid(_TILE).box(boxes["scale"])
        whole = Box((*tiles.start, 0), (*tiles.stop, math.prod(_TILE)))
        return {**boxes, "scale": whole}

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        wanted = self.inner.boxes(box)["scale"]
        rows, columns = parts["scale"].shape[:2]
        # tile row, tile column, 32 rows, 4 runs of them, 4 columns
        tiles = parts["scale"].reshape(rows, columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)
        plain = tiles.reshape(rows * _TILE[0], columns * _TILE[1])
        first = [start % n for start, n in zip(wanted.start, _TILE, strict=True)]
        within = Box.whole(wanted.shape).shift(first)
        return self.inner.values(box, {**parts, "scale": plain[within.index]})


def _in_order(attributes: Mapping[str, Any], plain: Affine) -> Dequantizer:
    return Tiled(plain) if attributes.get("is_swizzled_scales") else plain


def _name(stored: StoredWeight) -> str:
    return f"torchao {stored.said['_type']}"


_FP6 = {"fp6_e2m3": FP6_E2M3, "fp6_e3m2": FP6_E3M2}
_INT8 = partial(_scaled, dtypes=("int8",), more="zero_point")
_CLASSES: Mapping[str, Callable[[StoredWeight, Mapping[str, Any]], Dequantizer]] = {
    "Float8Tensor": partial(_scaled, dtypes=FP8),
    "Int8Tensor": _INT8,
    "IntxUnpackedToInt8Tensor": _INT8,
    "NVFP4Tensor": _nvfp4,
    "MXTensor": _mx,
}
