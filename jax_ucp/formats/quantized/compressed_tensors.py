"""compressed-tensors, as llm-compressor and many others write it: integers, packed or not, fp8, and
the four and six bits of NVFP4 and MX, and numbers that are yet to be rounded.

Rule: (code - zero point) * scale, in float32, rounded once; a global scale divides the scale first.
Source: compressed-tensors 0.20 `compressors/*/base.py`, `quantization/lifecycle/forward_helpers.py`
(`_dequantize`). That computes in the dtype of the scales, whose products of so few bits are exact
in float32, so that it gives the same bits where the result has that dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.arrays.dequantized import Dequantizer, WeightPart
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.formats.quantized.affine import Affine, Codes, Gathered, Grid, in_bytes, of_rows
from jax_ucp.formats.quantized.bits import FP4, FP6_E2M3, Packing
from jax_ucp.formats.quantized.stored import FLOATS, FP8, StoredWeight, as_groups
from jax_ucp.layout.box import Box
from jax_ucp.name_patterns import NamePatterns

_SHAPED = ("int64", "int32")
_MX_GROUP, _NVFP4_GROUP = 32, 16
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")


def weight(stored: StoredWeight) -> Dequantizer:
    """The weight, by the one group of the config that names it and fits what is stored."""
    # what changes weights otherwise than by codes and scales
    sparsity = stored.settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        stored.unknown(f"its zeros are left out ({sparsity.get('format')!r:.40})")
    if stored.settings.get("transform_config"):
        stored.unknown("the config has transforms, which turn weights; they are not undone")
    made: list[Dequantizer] = []
    faults: list[UCPError] = []
    for format, args in _groups(stored):
        try:
            affine = _FORMATS[format](stored, args)
            made.append(replace(affine, scheme=f"compressed-tensors {format}"))
        except UCPError as error:
            faults.append(error)
    if len(made) == 1:
        return made[0]
    if made:
        stored.unknown(f"{len(made)} groups of the config fit its parts, and mean other numbers")
    if faults:
        raise faults[0]
    stored.unknown("no group of the config has weights")


def _targeting(groups: Sequence[Mapping[str, Any]], module: str) -> Sequence[Mapping[str, Any]]:
    """The groups that name a module, or match its name; if none does, all of them.

    Other targets are classes of modules, which files do not have. Source: `match_targets` in
    compressed-tensors 0.20 `utils/match.py`, which prefers names too.
    """
    if len(groups) < 2:
        return groups
    said = [group.get("targets") for group in groups]
    targets = [[t for t in own if isinstance(t, str)] for own in said if isinstance(own, list)]
    if len(targets) < len(groups):
        return groups
    patterns = sorted({t.removeprefix("re:") for t in chain(*targets) if t.startswith("re:")})
    try:
        matching = _patterns(tuple(patterns)).matching(module)
    except FormatError:
        return groups  # a pattern that Python alone can match
    meant = {module, *(f"re:{pattern}" for pattern in matching)}
    named = [group for group, own in zip(groups, targets, strict=True) if meant.intersection(own)]
    return named or groups


@lru_cache(maxsize=8)
def _patterns(patterns: tuple[str, ...]) -> NamePatterns:
    return NamePatterns(patterns, "config.json")


def _groups(stored: StoredWeight) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The different settings for weights in the config, each with the format of its files."""
    groups = stored.settings.get("config_groups")
    common = stored.settings.get("format")
    seen: list[tuple[str, Mapping[str, Any]]] = []
    every = groups.values() if isinstance(groups, Mapping) else ()
    of_weights = [
        group
        for group in every
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    for group in _targeting(of_weights, stored.module):
        args = group["weights"]
        format = group.get("format") or common
        if not isinstance(format, str) or format not in _FORMATS:
            stored.unknown(f"the config has the format {format!r:.60}, which is not known here")
        means = format, {name: args.get(name) for name in _DECIDING}
        if means not in seen:
            seen.append(means)
            yield means


# Of the settings of a group those that decide what a number is.
_DECIDING = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")


def _plain(stored: StoredWeight, args: Mapping[str, Any]) -> Affine:
    """Codes of 8 bits as they are, and zero points of the same dtype."""
    stored.require_only("codes", "scale", "zero_point")
    shape = stored.info("codes").shape
    grid = _grid(stored, args, shape)
    dtypes = FP8 if args["type"] == "float" else ("int8",)
    parts = {
        "codes": stored.part("codes", shape, dtypes),
        "scale": stored.scale("scale", grid.shape(shape), _SCALES),
    }
    _check_symmetry(stored, args)
    if stored.has("zero_point"):
        parts["zero"] = stored.part("zero_point", grid.shape(shape), ("int8", *FP8))
    return Affine(stored.weight.scheme, shape, parts, Codes(), grid)


def _packed(stored: StoredWeight, args: Mapping[str, Any]) -> Affine:
    """Integers of 1 to 8 bits in words of 32, each larger by half its range."""
    stored.require_only("codes", "scale", "zero_point", "shape", "g_idx")
    # the shape of the weight, which is stored beside the words that hold it
    info, words = stored.info("shape"), stored.info("codes").shape
    label = stored.weight.parts["shape"]
    if info.dtype.name not in _SHAPED or len(info.shape) != 1:
        stored.fault(f"{label} is {info.dtype.name} {list(info.shape)}, and no shape")
    shape = tuple(int(n) for n in stored.read("shape"))
    if len(shape) != len(words) or len(shape) < 2 or shape[:-1] != words[:-1] or min(shape) < 1:
        stored.fault(f"{label} says {list(shape)}, and its words have shape {list(words)}")
    bits = args["num_bits"]
    if args["type"] != "int" or type(bits) is not int or not 1 <= bits <= 8:
        stored.unknown(f"packed codes are integers of 1 to 8 bits, and not {args['type']!r:.20}")
    codes = Codes(Packing(bits, 32, len(shape) - 1), offset=1 << (bits - 1))
    grid = _grid(stored, args, shape)
    parts = {"codes": stored.part("codes", _words(codes, shape), ("int32",))}
    if stored.has("g_idx"):
        groups = grid.shape(shape)[-1]
        grid = Gathered(len(shape) - 1, groups)
        parts["group"] = as_groups(stored, shape[-1], groups)
    small = grid.shape(shape)
    parts["scale"] = stored.scale("scale", small, FLOATS)
    zeros = Codes(Packing(bits, 32, len(shape) - 2), offset=1 << (bits - 1))
    _check_symmetry(stored, args)
    if stored.has("zero_point"):
        parts["zero"] = stored.part("zero_point", _words(zeros, small), ("int32",))
    return Affine(stored.weight.scheme, shape, parts, codes, grid, zero_codes=zeros)


def _few_bits(
    table: np.ndarray, bits: int, group: int, scales: Sequence[str], is_global: bool = False
) -> _Format:
    """The weight of floats of 4 or 6 bits, with a scale for each group and maybe a global one."""

    def make(stored: StoredWeight, args: Mapping[str, Any]) -> Affine:
        stored.require_only("codes", "scale", *["global_scale"] * is_global)
        if args["symmetric"] is False:
            stored.unknown("floats of few bits have no zero points")
        width = args["group_size"] or group
        shape, part, codes = in_bytes(stored, table, bits)
        grid = of_rows(stored, shape, width, f"group_size={width!r:.40} in the config")
        parts = {
            "codes": part,
            "scale": stored.scale("scale", grid.shape(shape), scales),
        }
        if is_global:
            parts["factor"] = stored.divisor("global_scale", (1,), ("float32",))
        return Affine(stored.weight.scheme, shape, parts, codes, grid, divides=is_global)

    return make


def _mx_fp8(stored: StoredWeight, args: Mapping[str, Any]) -> Affine:
    """The weight of fp8 codes with an exponent for each group of a row."""
    width = args["group_size"] or _MX_GROUP
    return _plain(stored, {**args, "type": "float", "strategy": "group", "group_size": width})


@dataclass(frozen=True)
class Rounded:
    """A weight that is stored as numbers beside its scales, and that the model rounds to codes
    whenever it computes: each element of what it computes with is (code - zero point) * scale,
    where the code is the number that is stored, divided by the scale, plus the zero point, clamped
    and rounded.

    `codes` are the numbers. With `bits` codes are integers of so many bits, else fp8. Quotients and
    sums are rounded to the dtype that numbers and scales have in common.
    """

    scheme: str
    shape: tuple[int, ...]
    parts: Mapping[str, WeightPart]
    grid: Grid
    bits: int = 0

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return {role: box if role == "codes" else self.grid.box(box) for role in self.parts}

    def values(self, box: Box, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        stored, scale = parts["codes"].dtype, parts["scale"].astype(np.float32)
        common = stored if stored == parts["scale"].dtype else np.dtype(np.float32)
        zero = parts["zero"].astype(np.float32) if "zero" in parts else None
        values = parts["codes"].astype(np.float32)
        self.grid.apply(np.divide, values, scale, box)
        values = values.astype(common).astype(np.float32)
        if zero is not None:
            self.grid.apply(np.add, values, zero, box)
            values = values.astype(common).astype(np.float32)
        if self.bits:
            half = 1 << (self.bits - 1)
            values = np.rint(np.clip(values, -half, half - 1))
        else:
            most = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
            codes = np.clip(values, -most, most).astype(ml_dtypes.float8_e4m3fn)
            values = codes.astype(np.float32)
        if zero is not None:
            self.grid.apply(np.subtract, values, zero, box)
        self.grid.apply(np.multiply, values, scale, box)
        return values


def _dense(stored: StoredWeight, args: Mapping[str, Any]) -> Rounded:
    """The weight of numbers that are not compressed (`save_compressed=False`), as the model
    computes with them: `fake_quantize` in `quantization/lifecycle/forward_helpers.py`.
    """
    stored.require_only("codes", "scale", "zero_point")
    shape, bits = stored.info("codes").shape, args["num_bits"]
    grid = _grid(stored, args, shape)
    is_integer = args["type"] == "int" and type(bits) is int and 1 <= bits <= 8
    if not is_integer and (args["type"], bits) != ("float", 8):
        stored.unknown(f"type={args['type']!r:.20} with num_bits={bits!r:.20} in the config")
    parts = {
        "codes": stored.part("codes", shape, FLOATS),
        "scale": stored.divisor("scale", grid.shape(shape), FLOATS),
    }
    _check_symmetry(stored, args)
    if stored.has("zero_point"):
        parts["zero"] = stored.part("zero_point", grid.shape(shape), ("int8", *FP8))
    return Rounded(stored.weight.scheme, shape, parts, grid, bits if is_integer else 0)


_Format = Callable[[StoredWeight, Mapping[str, Any]], Affine | Rounded]
_SCALES = (*FLOATS, "uint8", "float8_e8m0fnu")
_FORMATS: Mapping[str, _Format] = {
    **dict.fromkeys(_PLAIN, _plain),
    "pack-quantized": _packed,
    "nvfp4-pack-quantized": _few_bits(FP4, 4, _NVFP4_GROUP, ("float8_e4m3fn",), True),
    "mxfp4-pack-quantized": _few_bits(FP4, 4, _MX_GROUP, ("uint8", "float8_e8m0fnu")),
    "mxfp6-pack-quantized": _few_bits(FP6_E2M3, 6, _MX_GROUP, ("uint8", "float8_e8m0fnu")),
    "mxfp8-quantized": _mx_fp8,
    "dense": _dense,
}


def _grid(stored: StoredWeight, args: Mapping[str, Any], shape: Sequence[int]) -> Grid:
    if len(shape) < 2 or not all(shape):
        stored.fault(f"a weight of shape {list(shape)} is not a matrix")
    each = (1,) * (len(shape) - 2)
    meant = {None: "tensor", -1: "channel"}  # by the size of groups, where no strategy is named
    match args["strategy"] or meant.get(args["group_size"], "group"), args["group_size"]:
        case "tensor", _:
            return Grid((*each, *shape[-2:]))
        case "channel", _:
            return Grid((*each, 1, shape[-1]))
        case (("group" | "tensor_group"), int(width)) if width > 0:
            return of_rows(stored, shape, width, f"group_size={width} in the config")
        case "block", _:
            block = _block(stored, args["block_structure"])
            for length, side in zip(shape[-2:], block, strict=True):
                stored.require_block(length, side, f"block_structure={list(block)} in the config")
            return Grid((*each, *block))
    stored.unknown(
        f"strategy={args['strategy']!r:.40} with group_size={args['group_size']!r:.40} in the"
        " config is not known here"
    )


def _block(stored: StoredWeight, block: object) -> tuple[int, int]:
    """The rows and columns of `block_structure`, [128, 128] or "128x128"."""
    text = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", str(block))
    match [int(n) for n in text.groups()] if text else block:
        case [rows, columns] if type(rows) is type(columns) is int and min(rows, columns) > 0:
            return rows, columns
    stored.unknown(f"block_structure={block!r:.40} in the config is not a pair of lengths")


def _check_symmetry(stored: StoredWeight, args: Mapping[str, Any]) -> None:
    if args["symmetric"] is False and not stored.has("zero_point"):
        stored.fault("the config says that weights are not symmetric, and it has no zero_point")


def _words(codes: Codes, shape: Sequence[int]) -> tuple[int, ...]:
    assert codes.packing is not None
    return codes.packing.shape(shape)
