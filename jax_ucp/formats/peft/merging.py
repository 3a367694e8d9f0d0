"""A base checkpoint with adapters merged: its weights, and what they add, as expressions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jax_ucp.arrays.checks import Claims, passed_on
from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.arrays.dequantized import WeightPart, dequantized
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.merged import MAGNITUDE, WEIGHT, MergedWeight, Term
from jax_ucp.arrays.value import Array, users
from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.files.source_files import SourceFiles
from jax_ucp.formats.peft.config import CONFIG, LoraConfig
from jax_ucp.formats.peft.tensors import WeightChange, changes
from jax_ucp.tree import Key, Leaf, leaf_names

_DTYPES = ("float32", "bfloat16", "float16")
_CONFIG, _HEAD = "config.json", "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_UNTIED = ["tie_word_embeddings is false from here on: an adapter has an embedding and a head"]


@dataclass(frozen=True)
class _Adapter:
    """An opened adapter, its leaves by name, and its arrays by the names of leaves' arrays."""

    contents: Contents
    leaves: Mapping[str, Leaf]
    arrays: Mapping[str, Array]
    changes: Sequence[WeightChange]

    @property
    def name(self) -> str:
        return self.contents.path.rstrip("/").rpartition("/")[2]

    def part(self, tensor: str) -> WeightPart:
        """A stored tensor as a part of a weight."""
        leaf = self.leaves[tensor]
        return WeightPart(f"{leaf.name} of {self.name}", self.arrays[leaf.name], leaf.shape)


_Step = tuple[_Adapter, WeightChange]


def merged(base: Contents, adapters: Sequence[Contents]) -> Contents:
    """The base with adapters merged; only their metadata are read.

    Raises FormatError with all misfits, LayoutError for states or other dtypes than `_DTYPES`.
    """
    params = _parameters(base)
    shapes = {name: leaf.shape for name, leaf in params.items()}
    stored = expressions(base.arrays)
    read = [_adapter(contents, shapes) for contents in adapters]
    changed: dict[str, list[_Step]] = defaultdict(list)  # of each weight, in the adapters' order
    for adapter in read:
        for change in adapter.changes:
            changed[change.weight].append((adapter, change))
    extras = _untied(base, changed)
    made = {
        name: _merged_weight(params.get(name), stored, steps) for name, steps in changed.items()
    }
    # the leaves of the base, and those of new parameters, which come last
    leaves = list(base.leaves)
    for name, weight in made.items():
        if name not in params:
            path = Key("dict", "param"), Key("dict", name)
            leaves.append(Leaf(path, "", "array", weight.shape, weight.dtype.name))
    named = zip(leaves, leaf_names([leaf.path for leaf in leaves]), strict=True)
    leaves = [replace(leaf, name=name) for leaf, name in named]
    of_params = [leaf for leaf in leaves if leaf.path[0].name == "param"]
    names = {str(leaf.path[1]): leaf.name for leaf in of_params}
    arrays = {
        leaf.name: stored[before.name]
        for leaf, before in zip(leaves, base.leaves, strict=False)
        if leaf.has_array
    }
    for name, weight in made.items():
        arrays[names[name]] = dequantized(names[name], weight, weight.dtype)
    sources = [(base, stored), *((adapter.contents, adapter.arrays) for adapter in read)]
    resting = [passed_on(contents.claims, users(arrays, of)) for contents, of in sources]
    new = [name for name in made if name not in params]
    before = base.source.get("merged", ())
    return replace(
        base,
        leaves=leaves,
        arrays=Evaluated(arrays),
        extras=extras,
        inventory=[*base.inventory, *itertools.chain.from_iterable(map(_items, read))],
        notes=[*base.notes, *_notes(read, new), *_UNTIED * (extras is not base.extras)],
        source={**base.origin, "merged": [*before, *(adapter.name for adapter in read)]},
        claims=Claims(partial(itertools.chain.from_iterable, resting)),
        files=SourceFiles.together([base.files, *(a.contents.files for a in read)]),
    )


def _parameters(base: Contents) -> dict[str, Leaf]:
    """The parameters by name. Raises LayoutError for a tree with more than these."""
    params: dict[str, Leaf] = {}
    for leaf in base.leaves:
        if len(leaf.path) != 2 or not leaf.has_array:
            raise LayoutError(
                f"{base.path}: {leaf.label} is not a parameter by its name in a model of torch:"
                " merge adapters into the checkpoint before it is mapped"
            )
        state, name = (str(key.name) for key in leaf.path)
        if state == "param":
            params[name] = leaf
        elif state not in ("buffer", "other"):
            raise LayoutError(
                f"{base.path}: {leaf.label} is of weights that are not merged: open the base with"
                " weights_only (--weights-only)"
            )
    return params


def _adapter(contents: Contents, base: Mapping[str, tuple[int, ...]]) -> _Adapter:
    said = contents.extras.get(CONFIG, {}).get("config")
    if said is None:
        raise FormatError(
            f"{contents.path} has no {CONFIG}: it is not an adapter of peft, or not whole"
        )
    config = LoraConfig.of(said, f"{contents.path}/{CONFIG}")
    leaves = {
        str(leaf.path[1].name): leaf
        for leaf in contents.leaves
        if len(leaf.path) == 2 and leaf.path[0].name == "param"
    }
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    arrays = expressions(contents.arrays)
    return _Adapter(contents, leaves, arrays, changes(shapes, base, config))


def _untied(base: Contents, changed: Mapping[str, Sequence[_Step]]) -> Mapping[str, Any]:
    """The extras of what is merged; a config does not tie heads that adapters untie.

    Raises FormatError where an adapter has only the head, or replaces the embedding alone, beside a
    head that stays: a loader would take the embedding for the head.
    """
    config = base.extras.get(_CONFIG, {}).get("config")
    if not isinstance(config, Mapping) or not config.get("tie_word_embeddings"):
        return base.extras
    # `_untied`, of a config that ties them
    embedding = next((name for name in changed if name.endswith(_EMBEDDINGS)), "")
    steps = changed.get(embedding, ())
    # what is added to an embedding, peft adds to the head that is the same tensor
    is_replaced = bool(steps) and all(change.replaced for _, change in steps)
    if _HEAD not in changed and not is_replaced:
        return base.extras
    if _HEAD in changed and embedding:
        untied = {**config, "tie_word_embeddings": False}
        return {**base.extras, _CONFIG: {**base.extras[_CONFIG], "config": untied}}
    raise FormatError(
        f"{base.path}: an adapter changes {embedding or _HEAD} alone, and the base's config says"
        " that head and embedding are one (tie_word_embeddings): a merged model would be loaded"
        " with another head than it was trained with. Merge it with peft"
    )


def _merged_weight(
    leaf: Leaf | None, base: Mapping[str, Array], steps: Sequence[_Step]
) -> MergedWeight:
    """A weight, or a new one, with adapters' changes in order; a replacement comes first."""
    whole = [step for step in steps if step[1].replaced]
    adding = [step for step in steps if not step[1].replaced]
    name = steps[0][1].weight
    # raises FormatError where the changes of several adapters are not one sum
    if len(whole) > 1:
        raise FormatError(
            f"{name} is replaced by {' and by '.join(adapter.name for adapter, _ in whole)}"
        )
    for first, _ in whole:
        if any(adapter is not first for adapter, _ in adding):
            raise FormatError(
                f"{name} is replaced by {first.name}, and another adapter has factors for it,"
                " which are to be added to what that was trained with: merge them one after the"
                " other"
            )
    if len(adding) > 1 and any(change.magnitude for _, change in adding):
        raise FormatError(
            f"{name} has a DoRA among {len(adding)} adapters: merge them one after the other"
        )
    if len({(change.out_axis, change.experts) for _, change in adding}) > 1:
        raise FormatError(f"{name} has adapters that take its axes for different ones")
    if whole:
        adapter, change = whole[0]
        parts = {WEIGHT: adapter.part(change.replaced)}
    else:
        assert leaf is not None, "what is added to is in the base"
        parts = {WEIGHT: WeightPart(leaf.name, base[leaf.name], leaf.shape)}
    terms: list[Term] = []
    for i, (adapter, change) in enumerate(adding):
        a, b = f"A {i}" if change.a else "", f"B {i}"
        roles = {change.a: a, change.b: b, change.magnitude: MAGNITUDE}
        for tensor in filter(None, roles):
            part = adapter.part(tensor)
            parts[roles[tensor]] = replace(part, shape=change.shapes[tensor])
        terms.append(Term(change.scale, b, a))
    if leaf is None:  # new: of the form of what takes its place
        adapter, change = whole[0]
        leaf = adapter.leaves[change.replaced]
    dtype = np.dtype(leaf.dtype)
    if dtype.name not in _DTYPES:
        raise LayoutError(f"{name} has dtype {dtype}: only {', '.join(_DTYPES)} are merged")
    out_axis, experts = (adding[0][1].out_axis, adding[0][1].experts) if adding else (0, False)
    return MergedWeight(leaf.shape, dtype, parts, tuple(terms), out_axis, experts)


def _items(adapter: _Adapter) -> Iterator[Item]:
    """The inventory of an adapter, in which its tensors are what they do."""
    reasons: dict[str, str] = {}
    for change in adapter.changes:
        for tensor, role in change.tensors:
            for piece in adapter.contents.locate(adapter.leaves[tensor]):
                reasons[piece.name] = f"{role} of {change.weight}"
    for item in adapter.contents.inventory:
        reason = reasons.get(item.where, item.reason)
        yield replace(item, where=f"{adapter.name}/{item.where}", reason=reason)


def _notes(adapters: Sequence[_Adapter], new: Sequence[str]) -> Iterator[str]:
    for adapter in adapters:
        yield (
            f"{adapter.name} is merged into {len(adapter.changes)} weights, in float64, rounded"
            " once to the base's dtypes, as they are read"
        )
    if new:
        yield (
            f"{len(new)} parameters are new, the first {new[0]}: a config of the base says nothing"
            " of them"
        )
