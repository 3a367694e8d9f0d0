"""A checkpoint in which quantised weights are the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jax_ucp.errors import FormatError, UCPError, fault_lines
from jax_ucp.formats.quantized.schemes import dequantizer
from jax_ucp.formats.quantized.stored import ABOUT_ACTIVATIONS, StoredWeight
from jax_ucp.sources.checks import Check, Extent, passed_on
from jax_ucp.sources.contents import Contents, Item, QuantizedWeight
from jax_ucp.sources.dequantized import DequantizedView, Dequantizer
from jax_ucp.tree import Key, Leaf, leaf_names
from jax_ucp.tree import Path as TreePath

Dtype = Literal["bfloat16", "float16", "float32"]

# How parts are called that mean nothing without codes. Others, such as `.scale`, norms have too.
_LEFT_ALONE = (
    *("_scale_inv", ".weight_scale", ".weight_packed", ".weight_zero_point", ".weight_shape"),
    *(".weight_global_scale", ".weight_g_idx", ".weight_scale_2", ".qweight", ".qzeros", ".g_idx"),
    *(".SCB", ".weight_format", ".absmax", ".quant_map", ".nested_absmax"),
)


@dataclass(frozen=True)
class Declared:
    """What a config says of quantisation: its method, empty if it says none, all of its settings,
    and what files say of single weights by name.
    """

    method: str
    settings: Mapping[str, Any]
    weights: Mapping[str, Mapping[str, Any]]


def dequantized(
    contents: Contents, weights: Sequence[QuantizedWeight], declared: Declared, dtype: Dtype
) -> Contents:
    """The checkpoint with each quantised weight in place of its parts; other arrays stay as they
    are.

    Raises QuantizedWeights where it is not known how one is meant, and FormatError where parts are
    missing, have no use, or do not fit; with all that is wrong.
    """
    by_label = {leaf.label: leaf for leaf in contents.leaves}
    made = _dequantizers(contents, weights, declared, by_label)
    leaves, others, names = _leaves(contents, weights, made, dtype)
    view = DequantizedView(contents.arrays, names, others, np.dtype(dtype))
    users = view.users()

    def checks(extent: Extent) -> Iterator[Check]:
        yield from passed_on(contents.checks(extent), users)

    note = (
        f"{len(weights)} weights are stored quantised ({', '.join(_schemes(weights))}), and are"
        f" dequantised to {dtype} as they are read"
    )
    name = contents.path.rpartition("/")[2]
    source = dict(contents.source) or {"format": contents.format, "name": name}
    return replace(
        contents,
        leaves=leaves,
        arrays=view,
        inventory=_inventory(contents, weights, by_label),
        notes=[*contents.notes, note],
        source={**source, "dequantize": dtype},
        checks=checks,
        quantized=(),
    )


def _dequantizers(
    contents: Contents,
    weights: Sequence[QuantizedWeight],
    declared: Declared,
    leaves: Mapping[str, Leaf],
) -> list[Dequantizer]:
    """How each weight is made. Raises with every weight of which that is not known."""
    made: list[Dequantizer] = []
    faults: list[UCPError] = []
    for weight in weights:
        arrays = {role: leaves[label].name for role, label in weight.parts.items()}
        said = declared.weights.get(weight.name.rpartition("/")[2], {})
        stored = StoredWeight(weight, contents.arrays, arrays, declared.settings, said)
        try:
            made.append(dequantizer(declared.method, stored))
        except UCPError as error:
            faults.append(error)
    faults += _left_alone(weights, leaves)
    faults += _not_stored(weights, declared)
    if faults:
        lines = fault_lines([str(fault) for fault in faults])
        raise type(faults[0])(
            f"{contents.path}: {len(faults)} of the quantised weights cannot be read:\n  {lines}"
        )
    return made


def _left_alone(
    weights: Sequence[QuantizedWeight], leaves: Mapping[str, Leaf]
) -> Iterator[FormatError]:
    """Parts of quantised weights that belong to none of the weights."""
    claimed = {label for weight in weights for label in weight.parts.values()}
    for label, leaf in leaves.items():
        if leaf.has_array and label not in claimed and label.endswith(_LEFT_ALONE):
            yield FormatError(
                f"{label} is a part of a quantised weight, and no codes that it belongs to are"
                " stored"
            )


def _not_stored(weights: Sequence[QuantizedWeight], declared: Declared) -> Iterator[FormatError]:
    """Weights that a file's header describes as quantised, and whose codes are not there."""
    names = {weight.name.rpartition("/")[2] for weight in weights}
    for name, said in declared.weights.items():
        if said["_type"] != "Tensor" and name not in names:
            yield FormatError(
                f"{name} is a {said['_type']!r:.60} by the header of its file, and its codes are"
                " not stored"
            )


def _leaves(
    contents: Contents,
    weights: Sequence[QuantizedWeight],
    made: Sequence[Dequantizer],
    dtype: Dtype,
) -> tuple[list[Leaf], dict[str, str], dict[str, Dequantizer]]:
    """The leaves, with weights where their codes were; by name the arrays that stay, and the
    weights.
    """
    placed = list(_placed(contents, weights, made))
    paths = [path for path, _, _ in placed]
    _refuse_twice(contents, paths)
    leaves: list[Leaf] = []
    others: dict[str, str] = {}
    named: dict[str, Dequantizer] = {}
    for name, (path, leaf, make) in zip(leaf_names(paths), placed, strict=True):
        if make is not None:
            named[name] = make
            leaves.append(Leaf(path, name, "array", make.shape, dtype))
            continue
        leaves.append(replace(leaf, name=name))
        if leaf.has_array:
            others[name] = leaf.name
    return leaves, others, named


def _placed(
    contents: Contents, weights: Sequence[QuantizedWeight], made: Sequence[Dequantizer]
) -> Iterator[tuple[TreePath, Leaf, Dequantizer | None]]:
    """The leaves that stay, with their paths, and the codes of weights, with the weights' paths and
    how these are made. Other parts are gone.
    """
    by_codes = {
        weight.parts["codes"]: (weight, make) for weight, make in zip(weights, made, strict=True)
    }
    parts = {label for weight in weights for label in weight.parts.values()}
    for leaf in contents.leaves:
        if leaf.label in by_codes:
            weight, make = by_codes[leaf.label]
            yield _path(weight, leaf), leaf, make
        elif leaf.label not in parts:
            yield leaf.path, leaf, None


def _path(weight: QuantizedWeight, codes: Leaf) -> TreePath:
    """The path of the codes, in which the last names are those of the weight."""
    steps = weight.name.split("/")
    if len(steps) != len(codes.path):
        raise FormatError(f"{weight.name} has no place in the tree beside {codes.label}")
    return tuple(
        key if str(key.name) == step else Key(key.kind, step)
        for key, step in zip(codes.path, steps, strict=True)
    )


def _refuse_twice(contents: Contents, paths: Sequence[TreePath]) -> None:
    met: set[TreePath] = set()
    for path in paths:
        if path in met:
            label = "/".join([str(key.name) for key in path])
            raise FormatError(
                f"{contents.path}: {label} is stored twice, quantised and as an array of its own"
            )
        met.add(path)


def _schemes(weights: Sequence[QuantizedWeight]) -> list[str]:
    return list(dict.fromkeys(weight.scheme for weight in weights))


def _inventory(
    contents: Contents, weights: Sequence[QuantizedWeight], leaves: Mapping[str, Leaf]
) -> list[Item]:
    """The inventory, in which parts are mapped as what they are of a weight; what is about
    activations is left out.
    """
    said: dict[str, tuple[str, bool]] = {}
    for weight in weights:
        for role, label in weight.parts.items():
            what = f"{role} of {weight.name} ({weight.scheme}), dequantised"
            about = role in ABOUT_ACTIVATIONS
            if about:
                what = f"{role} beside {weight.name}: about activations, it changes no weight"
            for piece in contents.locate(leaves[label]):
                said[f"{piece.file}:{piece.item}"] = what, about
    items: list[Item] = []
    for item in contents.inventory:
        if item.where in said:
            reason, about = said[item.where]
            status = "skipped" if about else item.status
            item = replace(item, status=status, reason=reason)
        items.append(item)
    return items
