"""A mapping compared with a checkpoint and a model: what fits, what does not, suggestions."""

from __future__ import annotations

import difflib
import importlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax_ucp
from jax_ucp.arguments import local_path
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import LayoutError, NotACheckpoint, TreeMismatch
from jax_ucp.inspection.report import Report
from jax_ucp.layout.axes import Expression
from jax_ucp.mapping.binding import outcomes, unclaimed
from jax_ucp.mapping.model_config import given_config, joined
from jax_ucp.mapping.rules import Mapping as LeafMapping
from jax_ucp.mapping.rules import expression, name_regex

Shapes = dict[str, tuple[int, ...]]
Families = dict[str, list[tuple[int, ...]]]

# What a report has, beside the mapping's name.
_LISTS = ("requires", "leaves", "skipped", "notes", "faults", "suggestions")

# The orders of more axes are too many to try.
MOST_PERMUTED = 6

# What is added to the likeness of a leaf that holds all parameters of a family.
WHOLE_BONUS = 0.05

# Below this likeness a name is no suggestion.
NEAR = 0.3


def target_shapes(target: str) -> Shapes:
    """The parameters of a model, by their names with slashes.

    `target` is `module:function`, which returns a tree of arrays or `ShapeDtypeStruct`s; what
    `inspect --json` printed of a checkpoint; or a checkpoint. Of a tree with `param` at the top,
    that part is meant.

    Raises TreeMismatch where it is none of these.
    """
    path = local_path(target)
    if path.suffix == ".json" and path.is_file():
        shapes = _inspected_shapes(path, target)
    elif path.exists():
        shapes = {leaf.label: leaf.shape for leaf in jax_ucp.open(path).leaves if leaf.has_array}
    else:
        shapes = _imported_shapes(target)
    params = [name for name in shapes if name.startswith("param/")]
    return {name.removeprefix("param/"): shapes[name] for name in params} or shapes


def _inspected_shapes(path: Path, target: str) -> Shapes:
    """The shapes of arrays in what `inspect --json` printed."""
    try:
        leaves = json.loads(path.read_bytes())["leaves"]
        return {leaf["leaf"]: tuple(leaf["shape"]) for leaf in leaves if "shape" in leaf}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TreeMismatch(f"{target} is not what `inspect --json` prints: {error}") from error


def imported(target: str, what: str) -> Any:
    """What the function `module:function` returns, of which `what` is expected.

    Raises NotACheckpoint where it is no name of a function, TreeMismatch where the function cannot
    be called.
    """
    local_path(target)
    module, colon, function = target.partition(":")
    if not colon:
        raise NotACheckpoint(f"{target} is neither there nor a function; write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise TreeMismatch(f"{target} gives no {what}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)


def _imported_shapes(target: str) -> Shapes:
    """The shapes of the tree that a function returns."""
    tree = imported(target, "tree")
    from jax_ucp.sharding.trees import (
        walk,  # brings in jax, which the module of the user's has brought in already
    )

    # The array of a Flax variable is its attribute `value`, which is no part of its name.
    return {
        node.label.removesuffix("/value"): tuple(node.value.shape)
        for node in walk(tree)
        if _is_array(node.value)
    }


def mapping_report(
    checkpoint: Checkpoint, mapping: LeafMapping, arguments: Mapping[str, Any], target: str | None
) -> Report:
    """Each leaf beside the parameters that form it and the target's leaf of its name; what is
    wrong, and suggestions.

    `arguments` are those of `Checkpoint.map`.
    """
    wanted = target_shapes(target) if target else None
    targets = wanted or {}
    report: Report = {"mapping": mapping.name, **{name: [] for name in _LISTS}}
    try:
        report["requires"] = _requirements(checkpoint, mapping, arguments)
        mapped = checkpoint.map(mapping, **arguments)
    except LayoutError as error:
        title, *faults = str(error).split("\n  ")
        report["faults"] = faults or [title]
        missing = _unformed(targets, mapping)
    else:
        report |= _mapped_report(checkpoint, mapped, mapping, wanted)
        missing = {name: shape for name, shape in targets.items() if name not in mapped.params}
    report["suggestions"] = _suggestions(_shapes(checkpoint), missing, mapping)
    return report


def _mapped_report(
    checkpoint: Checkpoint, mapped: Checkpoint, mapping: LeafMapping, wanted: Shapes | None
) -> Report:
    """The leaves of a mapped checkpoint, what it leaves out, and how it differs from a target."""
    before = set(checkpoint.inventory)
    skipped = [item for item in mapped.inventory if item not in before]
    return {
        "leaves": [_row(mapped, name, wanted) for name in mapped.params],
        "skipped": [[item.where, item.reason] for item in skipped],
        "notes": [note for note in mapped.notes if note not in checkpoint.notes],
        "faults": [] if wanted is None else _differences(mapping, _shapes(mapped), wanted),
    }


def _shapes(checkpoint: Checkpoint) -> Shapes:
    return {name: param.shape for name, param in checkpoint.params.items()}


def _requirements(
    checkpoint: Checkpoint, mapping: LeafMapping, arguments: Mapping[str, Any]
) -> list[Report]:
    """What became of each requirement: met, unmet, or assumed."""
    given = given_config(arguments["config"] or {})
    config = joined(checkpoint.config, given, mapping.config_keys)
    return [
        {
            "name": one.requirement.name,
            "that": one.requirement.that,
            "state": one.state,
            "found": one.found,
        }
        for one in outcomes(mapping, config, arguments["assume"])
    ]


def _row(mapped: Checkpoint, name: str, wanted: Shapes | None) -> Report:
    param = mapped.params[name]
    pieces = param.where()
    return {
        "leaf": name,
        "shape": list(param.shape),
        "dtype": str(param.dtype),
        "states": list(param.states),
        "rule": pieces[0].rule if pieces else "",
        "stored": sorted({f"{piece.file}:{piece.item}" for piece in pieces}),
        "target": None if wanted is None or name not in wanted else list(wanted[name]),
    }


def _differences(mapping: LeafMapping, shapes: Shapes, wanted: Shapes) -> list[str]:
    absent = [item for item in wanted.items() if item[0] not in shapes]
    extra = [item for item in shapes.items() if item[0] not in wanted]
    common = [name for name in shapes if name in wanted]
    return [
        *(f"{name} {list(shape)}: in the target, but no rule forms it" for name, shape in absent),
        *(f"{name} {list(shape)}: formed, but not in the target" for name, shape in extra),
        *_shape_faults(mapping, common, shapes, wanted),
    ]


def _shape_faults(
    mapping: LeafMapping, names: Sequence[str], shapes: Shapes, wanted: Shapes
) -> Iterator[str]:
    """A fault for each leaf whose shape is not the target's, with the axis order that fits."""
    for name in names:
        if shapes[name] == wanted[name]:
            continue
        order = _order(mapping, name, shapes[name], wanted[name])
        hint = f"; `{order}` would fit" if order else ""
        yield (
            f"{name}: the rule gives {list(shapes[name])}, the target has"
            f" {list(wanted[name])}{hint}"
        )


def _order(
    mapping: LeafMapping, leaf: str, shape: Sequence[int], wanted: Sequence[int]
) -> str | None:
    """The axes of a leaf in the one order that gives the wanted shape, or None."""
    axes = _leaf_axes(mapping, leaf)
    if axes.rest or len(axes.dims) != len(wanted) or len(axes.dims) > MOST_PERMUTED:
        return None
    orders = itertools.permutations(range(len(wanted)))
    fitting = [order for order in orders if [shape[i] for i in order] == list(wanted)]
    return " ".join(str(axes.dims[i]) for i in fitting[0]) if len(fitting) == 1 else None


def _leaf_axes(mapping: LeafMapping, leaf: str) -> Expression:
    """What the first rule that forms a leaf says of its axes."""
    patterns = [item for rule in mapping.rules for item in rule.leaves.items()]
    return next(
        expression(axes) for pattern, axes in patterns if name_regex(pattern).fullmatch(leaf)
    )


def _unformed(targets: Shapes, mapping: LeafMapping) -> Shapes:
    """The leaves of the target that no rule forms."""
    regexes = [name_regex(pattern) for rule in mapping.rules for pattern in rule.leaves]
    return {
        name: shape
        for name, shape in targets.items()
        if not any(regex.fullmatch(name) for regex in regexes)
    }


def _suggestions(params: Shapes, missing: Shapes, mapping: LeafMapping) -> list[str]:
    """For unclaimed parameters, the leaf or the unused rule that could be meant."""
    unused = [pattern for rule in mapping.rules for pattern in _unused(rule.params, params)]
    families = _families({name: params[name] for name in unclaimed(mapping, list(params))})
    meant = _likely_leaves(families, missing)
    suggestions: list[str] = []
    for family, shapes in families.items():
        what = (
            f"{family} ({len(shapes)} of {list(shapes[0])})"
            if len(shapes) > 1
            else f"{family} {list(shapes[0])}"
        )
        if name := meant.get(family):
            suggestions.append(
                f"{what} -> perhaps {name} {list(missing[name])}, which has as many elements"
            )
        elif near := difflib.get_close_matches(family, unused, n=1, cutoff=NEAR):
            suggestions.append(
                f"{what} -> perhaps the rule for {near[0]}, which finds nothing, is meant for it"
            )
    return suggestions


def _unused(patterns: Collection[str], names: Collection[str]) -> list[str]:
    """The patterns that stand for none of the names."""
    regexes = {pattern: name_regex(pattern) for pattern in patterns}
    return [pattern for pattern, regex in regexes.items() if not any(map(regex.fullmatch, names))]


def _likely_leaves(families: Families, missing: Shapes) -> dict[str, str]:
    """For families of parameters the missing leaf that each could be, the likeliest pairs first."""
    pairs: list[tuple[float, str, str]] = []
    for (family, shapes), (name, shape) in itertools.product(families.items(), missing.items()):
        if math.prod(shape) in (sum(map(math.prod, shapes)), math.prod(shapes[0])):
            pairs.append((_likeness(family, shapes, name, shape), family, name))
    meant: dict[str, str] = {}
    for likeness, family, name in sorted(pairs, reverse=True):
        if likeness < NEAR:
            break
        if family not in meant and name not in meant.values():
            meant[family] = name
    return meant


def _likeness(
    family: str, shapes: Sequence[tuple[int, ...]], name: str, shape: tuple[int, ...]
) -> float:
    """How much alike two names are, from 0 to 1; what torch calls weight has other names in JAX."""
    role = "kernel" if len(shapes[0]) > 1 else "scale"
    words = re.sub(r"\W+", " ", re.sub(r"\bweight$", role, family)), re.sub(r"\W+", " ", name)
    # Some parameters of one family may be wanted layer by layer, but a leaf that holds all of them
    # is the likelier.
    stacked = [len(shapes)] if len(shapes) > 1 else []
    holds_all = sorted(shape) == sorted((*shapes[0], *stacked))
    return min(1, difflib.SequenceMatcher(None, *words).ratio() + WHOLE_BONUS * holds_all)


def _families(shapes: Shapes) -> Families:
    """Parameters grouped by name, with numbers replaced: layers of one model are one family."""
    families: Families = {}
    for name, shape in shapes.items():
        families.setdefault(re.sub(r"(?<![^./])\d+(?![^./])", "{n}", name), []).append(shape)
    return families


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
