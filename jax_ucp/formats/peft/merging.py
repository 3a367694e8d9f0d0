"""A base checkpoint with adapters merged: a view of its weights, with what they add."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.files.source_files import SourceFiles
from jax_ucp.formats.peft.config import CONFIG, LoraConfig
from jax_ucp.formats.peft.tensors import Change, changes
from jax_ucp.sources.checks import Check, Extent, passed_on
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.contents import Contents, Item
from jax_ucp.sources.dequantized import DequantizedView, Part
from jax_ucp.sources.merged import MAGNITUDE, WEIGHT, MergedWeight, Term
from jax_ucp.sources.protocol import ArrayInfo, ArraySource
from jax_ucp.tree import Key, Leaf, leaf_names

_DTYPES = ("float32", "bfloat16", "float16")
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


@dataclass(frozen=True)
class _Adapter:
    """An opened adapter: `key` begins the names of its arrays here, `leaves` are by name."""

    key: str
    contents: Contents
    leaves: Mapping[str, Leaf]
    changes: Sequence[Change]

    @property
    def name(self) -> str:
        return self.contents.path.rstrip("/").rpartition("/")[2]


def merged(base: Contents, adapters: Sequence[Contents]) -> Contents:
    """The base with adapters merged; nothing is read but their metadata.

    Raises FormatError where one is no LoRA adapter, or does not fit the base, with everything that
    does not; LayoutError where the base has states of an optimizer, or weights of another dtype
    than float32, bfloat16 and float16.
    """
    params = _parameters(base)
    shapes = {name: leaf.shape for name, leaf in params.items()}
    read = [_adapter(f"adapter {i} ", contents, shapes) for i, contents in enumerate(adapters)]
    changed: dict[str, list[tuple[_Adapter, Change]]] = defaultdict(list)
    for adapter in read:
        for change in adapter.changes:
            changed[change.weight].append((adapter, change))
    _refuse_untied(base, changed)
    made = {name: _merged_weight(params.get(name), steps) for name, steps in changed.items()}
    paths = [leaf.path for leaf in base.leaves]
    new = [name for name in made if name not in params]
    paths += [(Key("dict", "param"), Key("dict", name)) for name in new]
    names = leaf_names(paths)
    leaves = [replace(leaf, name=name) for leaf, name in zip(base.leaves, names)]
    before = dict(zip(names, base.leaves))
    leaves += [
        Leaf(path, name, "array", made[new_name].shape, made[new_name].dtype.name)
        for path, name, new_name in zip(
            paths[len(leaves) :], names[len(leaves) :], new, strict=True
        )
    ]
    label = {str(leaf.path[1]): leaf.name for leaf in leaves if str(leaf.path[0]) == "param"}
    weights = {label[name]: weight for name, weight in made.items()}
    others = {
        name: f"base {leaf.name}"
        for name, leaf in before.items()
        if name not in weights and leaf.has_array
    }
    sources = {"base ": base.arrays} | {adapter.key: adapter.contents.arrays for adapter in read}
    view = DequantizedView(
        _together(sources), weights, others, {name: w.dtype for name, w in weights.items()}
    )
    users = view.users()

    def checks(extent: Extent) -> Iterator[Check]:
        for key, contents in {"base ": base, **{a.key: a.contents for a in read}}.items():
            mine = {
                name.removeprefix(key): leaf for name, leaf in users.items() if name.startswith(key)
            }
            yield from passed_on(contents.checks(extent), mine)

    return replace(
        base,
        leaves=leaves,
        arrays=view,
        inventory=[*base.inventory, *(item for adapter in read for item in _items(adapter))],
        notes=[*base.notes, *_notes(read, new)],
        source=_source(base, read),
        checks=checks,
        files=SourceFiles.together([base.files, *(a.contents.files for a in read)]),
    )


def _parameters(base: Contents) -> dict[str, Leaf]:
    """The parameters by name. Raises LayoutError where the tree is not that of an import, or has
    more than these.
    """
    params: dict[str, Leaf] = {}
    for leaf in base.leaves:
        if len(leaf.path) != 2 or not leaf.has_array:
            raise LayoutError(
                f"{base.path}: {leaf.label} is no parameter by its name in a model of torch: merge"
                " adapters into the checkpoint before it is mapped"
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


def _adapter(key: str, contents: Contents, base: Mapping[str, tuple[int, ...]]) -> _Adapter:
    said = contents.extras.get(CONFIG, {}).get("config")
    if said is None:
        raise FormatError(
            f"{contents.path} has no {CONFIG}: it is no adapter of peft, or not whole"
        )
    config = LoraConfig.of(said, f"{contents.path}/{CONFIG}")
    leaves = {
        str(leaf.path[1].name): leaf
        for leaf in contents.leaves
        if len(leaf.path) == 2 and leaf.path[0].name == "param"
    }
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    return _Adapter(key, contents, leaves, changes(shapes, base, config))


def _refuse_untied(base: Contents, changed: Mapping[str, object]) -> None:
    """Raises FormatError where only the head of a model is changed whose config says that it is the
    embedding: a loader would take the embedding for it.
    """
    config = base.extras.get("config.json", {}).get("config")
    if not isinstance(config, Mapping) or not config.get("tie_word_embeddings"):
        return
    if _HEAD in changed and not any(name.endswith(_EMBEDDINGS) for name in changed):
        raise FormatError(
            f"{base.path}: an adapter changes {_HEAD}, which is the embedding by the base's config"
            " (tie_word_embeddings): a merged model would be loaded without the change"
        )


def _merged_weight(leaf: Leaf | None, steps: Sequence[tuple[_Adapter, Change]]) -> MergedWeight:
    """A weight of the base, or a new one, with what adapters do to it one after the other.

    What replaces it comes first: the others add to that.
    """
    whole = [step for step in steps if step[1].replaced]
    adding = [step for step in steps if not step[1].replaced]
    name = steps[0][1].weight
    if len(whole) > 1:
        raise FormatError(
            f"{name} is replaced by {' and by '.join(adapter.name for adapter, _ in whole)}"
        )
    parts = {WEIGHT: _weight_part(leaf, whole)}
    terms: list[Term] = []
    for i, (adapter, change) in enumerate(adding):
        roles = {change.a: f"A {i}" if change.a else "", change.b: f"B {i}"}
        roles |= {change.magnitude: MAGNITUDE} if change.magnitude else {}
        for tensor, role in roles.items():
            if tensor:
                array = adapter.key + adapter.leaves[tensor].name
                parts[role] = Part(array, change.shapes[tensor])
        terms.append(Term(change.scale, f"B {i}", f"A {i}" if change.a else ""))
    if MAGNITUDE in parts and len(adding) > 1:
        raise FormatError(
            f"{name} has a DoRA among {len(adding)} adapters: merge them one after the other"
        )
    forms = {(change.out_axis, change.experts) for _, change in adding} or {(0, False)}
    if len(forms) > 1:
        raise FormatError(f"{name} has adapters that take its axes for different ones")
    ((out_axis, experts),) = forms
    shape, dtype = _form(leaf, whole)
    if dtype.name not in _DTYPES:
        raise LayoutError(f"{name} has dtype {dtype}: only {', '.join(_DTYPES)} are merged")
    return MergedWeight(shape, dtype, parts, tuple(terms), out_axis, experts)


def _weight_part(leaf: Leaf | None, whole: Sequence[tuple[_Adapter, Change]]) -> Part:
    if whole:
        adapter, change = whole[0]
        stored = adapter.leaves[change.replaced]
        return Part(adapter.key + stored.name, stored.shape)
    assert leaf is not None, "what is added to is in the base"
    return Part(f"base {leaf.name}", leaf.shape)


def _form(
    leaf: Leaf | None, whole: Sequence[tuple[_Adapter, Change]]
) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the dtype of a merged weight: those of the base, or of what is new."""
    if leaf is None:
        adapter, change = whole[0]
        leaf = adapter.leaves[change.replaced]
    return leaf.shape, np.dtype(leaf.dtype)


def _together(sources: Mapping[str, ArraySource]) -> Combined:
    """All arrays of sources that say themselves where these are stored."""
    arrays: dict[str, ArrayInfo] = {}
    places: dict[str, tuple[ArraySource, str]] = {}
    for prefix, source in sources.items():
        for key, info in source.arrays().items():
            arrays[prefix + key] = info
            places[prefix + key] = source, key
    return Combined(arrays, places, sources.values(), stored=False)


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


def _source(base: Contents, adapters: Sequence[_Adapter]) -> Mapping[str, Any]:
    before = list(base.source.get("merged", ()))
    return {**base.origin, "merged": [*before, *(adapter.name for adapter in adapters)]}
