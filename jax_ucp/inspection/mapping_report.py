"""A mapping compared with a checkpoint and a model: leaves, faults and suggestions; and the list of
the package's mappings, with those that fit a checkpoint.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_ucp.errors import LayoutError
from jax_ucp.inspection.report import Report
from jax_ucp.layout.fragments import Shape
from jax_ucp.mapping.binding import bind, outcomes, takes_buffer, unclaimed
from jax_ucp.mapping.model_config import given_config, joined
from jax_ucp.mapping.names import name_regex
from jax_ucp.mapping.rules import Mapping as LeafMapping
from jax_ucp.mapping.rules import expression, shipped

if TYPE_CHECKING:
    from jax_ucp.checkpoint import Checkpoint

Shapes = Mapping[str, Shape]
Families = dict[str, list[Shape]]

# The keys of a report, beside `mapping`.
_LISTS = ("requires", "leaves", "skipped", "notes", "faults", "suggestions")

# The most axes of which all orders are tried.
MOST_PERMUTED = 6

# The bonus in likeness for a leaf that holds all parameters of a family.
WHOLE_BONUS = 0.05

# Below this likeness a name is not suggested.
NEAR = 0.3

_HUB_NAMES = "Hugging Face's names"


def mapping_report(
    checkpoint: Checkpoint,
    mapping: LeafMapping,
    target: Shapes | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    assume: Sequence[str] = (),
    params: str | None = None,
) -> Report:
    """Leaves beside their parameters, faults and suggestions, as `jax-ucp map --json` prints them.

    Args:
        checkpoint: the checkpoint whose parameters the mapping should turn into leaves.
        mapping: the mapping to check.
        target: the shapes of the model's parameters by name, as `tree_shapes` gives them.

    The other arguments are those of `Checkpoint.map`.

    Returns:
        The mapping's name, and lists under `requires`, `leaves`, `skipped`, `notes`, `faults` and
        `suggestions`. What does not fit is in `faults`, and is not raised.
    """
    targets = target or {}
    report: Report = {"mapping": mapping.name, **{name: [] for name in _LISTS}}
    try:
        known = joined(checkpoint.config, given_config(config or {}), mapping.config_keys)
        report["requires"] = [
            {
                "name": outcome.requirement.name,
                "that": outcome.requirement.that,
                "state": outcome.state,
                "found": outcome.values,
            }
            for outcome in outcomes(mapping, known, assume)
        ]
        options = {"sizes": sizes, "config": config, "assume": assume, "params": params}
        mapped = checkpoint.map(mapping, **options)
    except LayoutError as error:
        report["faults"] = error.faults or [str(error)]
        formed: set[str] = set()
        for rule in mapping.rules:
            formed |= _named_by(rule.leaves, targets)
    else:
        before = set(checkpoint.inventory)
        skipped = [item for item in mapped.inventory if item not in before]
        report["leaves"] = [_row(mapped, name, targets) for name in mapped.params]
        report["skipped"] = [[item.where, item.reason] for item in skipped]
        report["notes"] = [note for note in mapped.notes if note not in checkpoint.notes]
        if target is not None:
            report["faults"] = list(_differences(mapping, _shapes(mapped), target))
        formed = set(mapped.params)
    missing = {name: shape for name, shape in targets.items() if name not in formed}
    report["suggestions"] = list(_suggestions(_shapes(checkpoint), missing, mapping))
    return report


def tree_shapes(tree: Any) -> dict[str, Shape]:
    """The shapes of the arrays in a pytree, by their names with slashes between keys.

    Args:
        tree: arrays or `jax.ShapeDtypeStruct`s in any containers, Flax's modules included.

    Returns:
        Shapes by name. The array of a Flax variable has the variable's name.
    """
    from jax_ucp.sharding.trees import walk  # brings in jax, which the maker of the tree has too

    arrays = {
        node.label: node.value
        for node in walk(tree)
        if hasattr(node.value, "shape") and hasattr(node.value, "dtype")
    }
    return {label.removesuffix("/value"): tuple(array.shape) for label, array in arrays.items()}


def _shapes(checkpoint: Checkpoint) -> Shapes:
    return {name: param.shape for name, param in checkpoint.params.items()}


def _row(mapped: Checkpoint, name: str, targets: Shapes) -> Report:
    """A leaf of the mapped checkpoint, its rule and files, and the target's shape."""
    param = mapped.params[name]
    pieces = param.where()
    return {
        "leaf": name,
        "shape": list(param.shape),
        "dtype": str(param.dtype),
        "states": list(param.states),
        "rule": pieces[0].rule if pieces else "",
        "stored": sorted({f"{piece.file}:{piece.item}" for piece in pieces}),
        "target": list(targets[name]) if name in targets else None,
    }


def _differences(mapping: LeafMapping, shapes: Shapes, targets: Shapes) -> Iterator[str]:
    """Faults: leaves that only the mapping or the target has, or that differ in shape."""
    for name, shape in targets.items():
        if name not in shapes:
            yield f"{name} {list(shape)}: in the target, but no rule forms it"
    for name, shape in shapes.items():
        if name not in targets:
            yield f"{name} {list(shape)}: formed, but not in the target"
    for name in filter(targets.__contains__, shapes):
        if shapes[name] != targets[name]:
            order = _order(mapping, name, shapes[name], targets[name])
            hint = f"; `{order}` would fit" if order else ""
            yield (
                f"{name}: the rule gives {list(shapes[name])}, the target has"
                f" {list(targets[name])}{hint}"
            )


def _order(mapping: LeafMapping, leaf: str, shape: Shape, target: Shape) -> str | None:
    """The axes of a leaf in the only order that gives the target's shape, or None."""
    # by the first rule that forms the leaf
    patterns = itertools.chain.from_iterable(rule.leaves.items() for rule in mapping.rules)
    axes = next(
        expression(axes) for pattern, axes in patterns if name_regex(pattern).fullmatch(leaf)
    )
    if axes.rest or len(axes.dims) != len(target) or len(axes.dims) > MOST_PERMUTED:
        return None
    orders = itertools.permutations(range(len(target)))
    fitting = [order for order in orders if tuple(shape[i] for i in order) == target]
    return " ".join(str(axes.dims[i]) for i in fitting[0]) if len(fitting) == 1 else None


def _named_by(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    regexes = [name_regex(pattern) for pattern in patterns]
    return {name for name in names for regex in regexes if regex.fullmatch(name)}


def _suggestions(params: Shapes, missing: Shapes, mapping: LeafMapping) -> Iterator[str]:
    """Suggestions for unclaimed parameters: a missing leaf or an unused rule that may be meant."""
    patterns = itertools.chain.from_iterable(rule.params for rule in mapping.rules)
    unused = [pattern for pattern in patterns if not _named_by([pattern], params)]
    families = _families({name: params[name] for name in unclaimed(mapping, list(params))})
    # the missing leaf that each family could be, the likeliest pairs first
    pairs: list[tuple[float, str, str]] = []
    for (family, shapes), (name, shape) in itertools.product(families.items(), missing.items()):
        if math.prod(shape) in (sum(map(math.prod, shapes)), math.prod(shapes[0])):
            likeness = _likeness(family, shapes, name, shape)
            pairs.append((likeness, family, name))
    leaf_of: dict[str, str] = {}
    for likeness, family, name in sorted(pairs, reverse=True):
        if likeness < NEAR:
            break
        if family not in leaf_of and name not in leaf_of.values():
            leaf_of[family] = name
    for family, shapes in families.items():
        count = f"({len(shapes)} of {list(shapes[0])})" if len(shapes) > 1 else list(shapes[0])
        if leaf := leaf_of.get(family):
            meant = f"{leaf} {list(missing[leaf])}, which has as many elements"
        elif near := difflib.get_close_matches(family, unused, n=1, cutoff=NEAR):
            meant = f"the rule for {near[0]}, which finds nothing, is meant for it"
        else:
            continue
        yield f"{family} {count} -> perhaps {meant}"


def _likeness(family: str, shapes: Sequence[Shape], name: str, shape: Shape) -> float:
    """The likeness of the names of a family and a leaf, from 0 to 1, with a bonus if the leaf has
    the shape of all parameters of the family together.
    """
    role = "kernel" if len(shapes[0]) > 1 else "scale"  # what torch calls `weight`
    words = re.sub(r"\W+", " ", re.sub(r"\bweight$", role, family)), re.sub(r"\W+", " ", name)
    stacked = [len(shapes)] if len(shapes) > 1 else []
    holds_all = sorted(shape) == sorted((*shapes[0], *stacked))
    return min(1, difflib.SequenceMatcher(None, *words).ratio() + WHOLE_BONUS * holds_all)


def _families(shapes: Shapes) -> Families:
    """Parameters grouped by name, with numbers replaced: layers of one model are one family."""
    families: Families = {}
    for name, shape in shapes.items():
        families.setdefault(re.sub(r"(?<![^./])\d+(?![^./])", "{n}", name), []).append(shape)
    return families


def mapping_list(
    checkpoint: Checkpoint | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> list[Report]:
    """The mappings that come with the package, as `jax-ucp mappings --json` prints them.

    Args:
        checkpoint: if given, only mappings for its model are listed, and whether they fit.
        config: the model's config, as for `Checkpoint.map`.

    Returns:
        For each mapping its `name`, `model`, `target` and `variants` (with layouts), and with a
        checkpoint `fits`, and `why` it does not.
    """
    mappings = [LeafMapping.load(name) for name in shipped()]
    if checkpoint is None:
        return [_entry(mapping) for mapping in mappings]
    return list(_entries(checkpoint, given_config(config or {}), mappings))


def _entries(
    checkpoint: Checkpoint, given: Mapping[str, Any], mappings: Sequence[LeafMapping]
) -> Iterator[Report]:
    """The mappings that fit the checkpoint, and the others for its model's class, each with the
    first reason why it does not fit.

    A mapping that fits and leads to Hugging Face's names is followed by those that go on from
    there, as `FIRST,SECOND`.
    """
    weights = {name: param.shape for name, param in checkpoint.params.items()}
    buffers = {leaf.param: leaf.shape for leaf in checkpoint.leaves if leaf.state == "buffer"}
    for mapping in mappings:
        known = joined(checkpoint.config, given, mapping.config_keys)
        is_for_it = mapping.about["model"] in known.get("architectures", ())
        if not is_for_it and any(one.state == "unmet" for one in outcomes(mapping, known)):
            continue
        named = {name: shape for name, shape in buffers.items() if takes_buffer(mapping, name)}
        try:
            bind(mapping, weights | named, {}, known)
            leads_on = mapping.about["target"] == _HUB_NAMES
            mapped = checkpoint.map(mapping, config=given or None) if leads_on else None
        except LayoutError as error:
            if is_for_it:
                why = error.faults[0] if error.faults else str(error)
                yield {**_entry(mapping), "fits": False, "why": why}
            continue
        yield {**_entry(mapping), "fits": True, "why": ""}
        further = {} if mapping.config else given
        for entry in _entries(mapped, further, mappings) if mapped else ():
            yield {**entry, "name": f"{_entry(mapping)['name']},{entry['name']}"}


def _entry(mapping: LeafMapping) -> Report:
    name = mapping.name.removesuffix(".yaml")
    return {"name": name, **mapping.about, "variants": [*mapping.variants, *mapping.layouts]}
