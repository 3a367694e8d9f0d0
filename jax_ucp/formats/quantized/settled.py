"""A checkpoint in which quantised weights are the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jax_ucp.arrays import dequantized as dequantizing
from jax_ucp.arrays.checks import passed_on
from jax_ucp.arrays.contents import Contents, QuantizedWeight
from jax_ucp.arrays.dequantized import Dequantizer
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.value import Array, users
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.formats.quantized.names import ABOUT_ACTIVATIONS
from jax_ucp.formats.quantized.schemes import dequantizer
from jax_ucp.formats.quantized.stored import StoredWeight
from jax_ucp.tree import Key, Leaf, leaf_names
from jax_ucp.tree import Path as TreePath

Dtype = Literal["bfloat16", "float16", "float32"]

# How parts are called that mean nothing without codes. Others, such as `.scale`, norms have too.
_LEFT_ALONE = (
    *("_scale_inv", ".weight_scale", ".weight_packed", ".weight_zero_point", ".weight_shape"),
    *(".weight_global_scale", ".weight_g_idx", ".weight_scale_2", ".qweight", ".qzeros", ".g_idx"),
    *(".scales", ".biases"),
    *(".SCB", ".weight_format", ".absmax", ".quant_map", ".nested_absmax"),
)
_EXPONENTS = "float8_e8m0fnu"  # a dtype of scales alone


@dataclass(frozen=True)
class Declared:
    """The quantisation that a config declares: method, settings, and those of weights by name."""

    method: str
    settings: Mapping[str, Any]
    weights: Mapping[str, Mapping[str, Any]]


def dequantized(
    contents: Contents, weights: Sequence[QuantizedWeight], declared: Declared, dtype: Dtype
) -> Contents:
    """The checkpoint with weights for their parts. Raises QuantizedWeights or FormatError."""
    by_label = {leaf.label: leaf for leaf in contents.leaves}
    stored = expressions(contents.arrays)
    # how each weight is made; all of which that is not known are named
    made: list[Dequantizer] = []
    faults: list[UCPError] = []
    for weight in weights:
        arrays = {role: stored[by_label[label].name] for role, label in weight.parts.items()}
        said = declared.weights.get(weight.name.rpartition("/")[2], {})
        parts = StoredWeight(weight, arrays, declared.settings, said)
        try:
            made.append(dequantizer(declared.method, parts))
        except UCPError as error:
            faults.append(error)
    # parts of quantised weights that belong to none of the weights
    claimed = {label for weight in weights for label in weight.parts.values()}
    for label, leaf in by_label.items():
        is_part = label.endswith(_LEFT_ALONE) or leaf.dtype == _EXPONENTS
        if leaf.has_array and label not in claimed and is_part:
            faults.append(
                FormatError(
                    f"{label} is a part of a quantised weight, and no codes that it belongs to are"
                    " stored"
                )
            )
    # weights that a file's header describes as quantised, and whose codes are not there
    names = {weight.name.rpartition("/")[2] for weight in weights}
    for name, said in declared.weights.items():
        if said["_type"] != "Tensor" and name not in names:
            faults.append(
                FormatError(
                    f"{name} is a {said['_type']!r:.60} by the header of its file, and its codes"
                    " are not stored"
                )
            )
    if faults:
        raise type(faults[0])(
            f"{contents.path}: {len(faults)} of the quantised weights cannot be read:",
            list(map(str, faults)),
        )
    leaves, arrays = _leaves(contents, stored, weights, made, dtype)
    reasons: dict[str, str] = {}
    about_activations: set[str] = set()
    for weight in weights:
        for role, label in weight.parts.items():
            reasons[label] = f"{role} of {weight.name} ({weight.scheme}), dequantised"
            if role in ABOUT_ACTIVATIONS:
                about_activations.add(label)
                reasons[label] = (
                    f"{role} beside {weight.name}: about activations, it changes no weight"
                )
    schemes = dict.fromkeys(weight.scheme for weight in weights)
    note = (
        f"{len(weights)} weights are stored quantised ({', '.join(schemes)}), and are"
        f" dequantised to {dtype} as they are read"
    )
    return replace(
        contents,
        leaves=leaves,
        arrays=Evaluated(arrays),
        inventory=contents.with_reasons(reasons, about_activations),
        notes=[*contents.notes, note],
        source={**contents.first_source, "dequantize": dtype},
        claims=passed_on(contents.claims, users(arrays, stored)),
        quantized=(),
    )


def _leaves(
    contents: Contents,
    stored: Mapping[str, Array],
    weights: Sequence[QuantizedWeight],
    made: Sequence[Dequantizer],
    dtype: Dtype,
) -> tuple[list[Leaf], dict[str, Array]]:
    """The leaves, with weights where their codes were, and their arrays by name."""
    by_codes = {
        weight.parts["codes"]: (weight, make) for weight, make in zip(weights, made, strict=True)
    }
    parts = {label for weight in weights for label in weight.parts.values()}
    # leaves that stay, and codes of weights, with paths and how weights are made
    placed: list[tuple[TreePath, Leaf, Dequantizer | None]] = []
    for leaf in contents.leaves:
        if leaf.label in by_codes:
            weight, make = by_codes[leaf.label]
            placed.append((_path(weight, leaf), leaf, make))
        elif leaf.label not in parts:
            placed.append((leaf.path, leaf, None))
    paths = [path for path, _, _ in placed]
    seen: set[TreePath] = set()
    for path in paths:
        if path in seen:
            label = "/".join([str(key.name) for key in path])
            raise FormatError(
                f"{contents.path}: {label} is stored twice, quantised and as an array of its own"
            )
        seen.add(path)
    leaves: list[Leaf] = []
    arrays: dict[str, Array] = {}
    for name, (path, leaf, make) in zip(leaf_names(paths), placed, strict=True):
        if make is not None:
            arrays[name] = dequantizing.dequantized(name, make, np.dtype(dtype))
            leaves.append(Leaf(path, name, "array", make.shape, dtype))
            continue
        leaves.append(replace(leaf, name=name))
        if leaf.has_array:
            arrays[name] = stored[leaf.name]
    return leaves, arrays


def _path(weight: QuantizedWeight, codes: Leaf) -> TreePath:
    """The path of the codes with the weight's name in place of the last names."""
    steps = weight.name.split("/")
    if len(steps) != len(codes.path):
        raise FormatError(f"{weight.name} has no place in the tree beside {codes.label}")
    return tuple(
        key if str(key.name) == step else Key(key.kind, step)
        for key, step in zip(codes.path, steps, strict=True)
    )
