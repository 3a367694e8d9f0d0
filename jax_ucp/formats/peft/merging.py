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
from jax_ucp.arrays.value import joined as array_of
from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.files.source_files import SourceFiles
from jax_ucp.formats.nested import config_in
from jax_ucp.formats.packed_experts import PackedParameter
from jax_ucp.formats.peft.config import CONFIG, LoraConfig
from jax_ucp.formats.peft.names import Memory
from jax_ucp.formats.peft.tensors import EMBEDDINGS, HEAD, MERGED_BY_PEFT, WeightChange, changes
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import Part, Place, Shape, straight
from jax_ucp.tree import Key, Leaf, leaf_names

_DTYPES = ("float32", "bfloat16", "float16")
_CONFIG = "config.json"
# Of models for masked tokens the head has other names than `HEAD`, as they say in these places.
_MASKED, _OF_MASKED = ".embeddings.word_embeddings.weight", ("ForMaskedLM", "ForPreTraining")
_OF_NEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_HEADS = (HEAD, "embed_out.weight")
_UNTIED = ["tie_word_embeddings is false from here on: the head is another than the embedding now"]


@dataclass(frozen=True)
class _Adapter:
    """An opened adapter, its leaves by name, and its arrays by the names of leaves' arrays."""

    contents: Contents
    leaves: Mapping[str, Leaf]
    arrays: Mapping[str, Array]
    changes: Sequence[WeightChange]
    memory: Memory

    @classmethod
    def of(cls, contents: Contents, base: Mapping[str, Shape], model_type: str) -> _Adapter:
        """The adapter of a base of these shapes. Raises FormatError if it does not fit."""
        said = contents.extras.get(CONFIG, {}).get("config")
        if said is None:
            raise FormatError(
                f"{contents.path} has no {CONFIG}: it is not an adapter of peft, or not whole"
            )
        config = LoraConfig.of(said, f"{contents.path}/{CONFIG}")
        params = [leaf for leaf in contents.leaves if len(leaf.path) == 2]
        leaves = {str(leaf.path[1].name): leaf for leaf in params if leaf.path[0].name == "param"}
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        arrays = expressions(contents.arrays)
        return cls(contents, leaves, arrays, *changes(shapes, base, config, model_type))

    @property
    def name(self) -> str:
        return self.contents.path.rstrip("/").rpartition("/")[2]

    def part(self, tensor: str) -> WeightPart:
        """A stored tensor as a part of a weight."""
        leaf = self.leaves[tensor]
        return WeightPart(f"{leaf.name} of {self.name}", self.arrays[leaf.name], leaf.shape)


_Step = tuple[_Adapter, WeightChange]


def merged(base: Contents, adapters: Sequence[Contents]) -> Contents:
    """The base with adapters merged, its config made to fit; only their metadata are read.

    Raises FormatError for adapters that do not fit it, alone or together, LayoutError for a base
    with states or mapped leaves, or a changed weight of other dtypes than `_DTYPES`.
    """
    params = _parameters(base)
    shapes = {name: leaf.shape for name, leaf in params.items()}
    stored = expressions(base.arrays)
    config = config_in(base.extras)
    embedding = _embedding(config, params)
    has_head = any(name.endswith(_HEADS) for name in params)
    if embedding and not has_head:
        shapes[HEAD] = params[embedding].shape  # which is not stored
    model_type = str(config.get("model_type"))
    read = [_Adapter.of(contents, shapes, model_type) for contents in adapters]
    changed: dict[str, list[_Step]] = defaultdict(list)  # of each weight, in the adapters' order
    for adapter in read:
        for change in adapter.changes:
            changed[change.weight].append((adapter, change))
    _require_known_ties(config, changed, bool(embedding) or has_head)
    if HEAD in params and config.get("tie_word_embeddings"):
        _require_one_head(base.path, embedding, changed)
    if HEAD not in params or config.get("tie_word_embeddings"):
        _require_own_rows(changed.get(embedding, ()), changed.get(HEAD, ()))
    extras = base.extras
    if _is_untied(embedding, changed):
        extras = _untied(extras)
        if HEAD in shapes and HEAD not in params:
            changed[HEAD] = changed.get(HEAD, [])
    is_untied = extras is not base.extras
    repacked = _Repacked.of(read, changed)
    own, of_base = repacked.weights(params, stored)
    if HEAD in shapes and embedding:
        own.setdefault(HEAD, params[embedding])
    made = {
        name: _merged_weight(name, own.get(name), of_base, steps) for name, steps in changed.items()
    }
    remade = repacked.stored(made, of_base)
    resized = {
        name: weight.shape[0]
        for name, weight in made.items()
        if name in params and weight.shape != params[name].shape
    }
    for tokens in resized.values():  # there is one size, for embedding and head
        extras = _with_vocabulary(extras, tokens)
    leaves = _leaves(base, params, made)
    of_params = [leaf for leaf in leaves if leaf.path[0].name == "param"]
    names = {str(leaf.path[1]): leaf.name for leaf in of_params}
    arrays = {
        leaf.name: stored[before.name]
        for leaf, before in zip(leaves, base.leaves, strict=False)
        if leaf.has_array
    }
    for name, weight in made.items():
        arrays[names[name]] = dequantized(names[name], weight, weight.dtype)
    for name, array in remade.items():
        arrays[names[name]] = array
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
        notes=[*base.notes, *_notes(read, new, resized), *_UNTIED * is_untied],
        source={**base.origin, "merged": [*before, *(adapter.name for adapter in read)]},
        claims=Claims(partial(itertools.chain.from_iterable, resting)),
        files=SourceFiles.together([base.files, *(a.contents.files for a in read)]),
    )


@dataclass(frozen=True)
class _Repacked:
    """The weights that adapters change as parts of others, or that consist of those that they
    change: parameters that are `packed`, and stored ones that are `apart`, named as in `Memory`.
    """

    packed: Mapping[str, PackedParameter]
    apart: Mapping[str, PackedParameter]

    @classmethod
    def of(cls, adapters: Sequence[_Adapter], changed: Mapping[str, Sequence[_Step]]) -> _Repacked:
        """The packed weights of all adapters. Raises FormatError if adapters differ in them."""
        memories = [adapter.memory for adapter in adapters]
        packed = {
            name: param
            for memory in memories
            for name, param in memory.packed.items()
            if name in changed
        }
        apart = {
            name: param
            for memory in memories
            for name, param in memory.apart.items()
            if any(part.name in changed for part in param.parts)
        }
        parts = [part.name for param in packed.values() for part in param.parts]
        if twice := sorted({*parts, *apart} & changed.keys()):
            raise FormatError(
                f"{twice[0]} is changed by an adapter that was trained on experts one by one, and"
                " by one that was trained on all in one parameter: merge them one after the other"
            )
        return cls(packed, apart)

    def weights(
        self, params: Mapping[str, Leaf], stored: Mapping[str, Array]
    ) -> tuple[dict[str, Leaf], dict[str, Array]]:
        """The leaves of the base, and those of weights in memory, by name; and their arrays."""
        leaves, arrays = dict(params), dict(stored)
        for name, param in self.packed.items():
            of_parts = [params[part.name] for part in param.parts]
            leaves[name] = replace(of_parts[0], name=name, shape=param.shape)
            arrays[name] = param.of(name, [stored[leaf.name] for leaf in of_parts])
        for name, param in self.apart.items():
            for part in param.parts:
                leaves[part.name] = replace(params[name], name=part.name, shape=part.shape)
                arrays[part.name] = part.of(stored[params[name].name])
        return leaves, arrays

    def stored(
        self, made: dict[str, MergedWeight], weights: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The arrays of stored weights, from merged ones that are not stored; `made` loses them."""
        names = {
            *self.packed,
            *(part.name for param in self.apart.values() for part in param.parts),
        }
        merged = {name: made.pop(name) for name in names & made.keys()}
        arrays = {name: dequantized(name, one, one.dtype) for name, one in merged.items()}
        parts_by_name = {
            part.name: part.of(arrays[name])
            for name, param in self.packed.items()
            for part in param.parts
        }
        for name, param in self.apart.items():
            parts = [arrays.get(part.name, weights[part.name]) for part in param.parts]
            parts_by_name[name] = param.of(name, parts)
        return parts_by_name


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


def _embedding(config: Mapping[str, Any], params: Mapping[str, Leaf]) -> str:
    """The name of the embedding to which `HEAD` is tied where it is not stored, or empty: configs
    leave out what is the default of their release, as those of Gemma and GPT-2 do.
    """
    if config.get("tie_word_embeddings") is False or config.get("is_encoder_decoder"):
        return ""
    names = (name for name in params if name.endswith(EMBEDDINGS) and not name.endswith(_MASKED))
    return next(names, "")


def _is_untied(embedding: str, changed: Mapping[str, Sequence[_Step]]) -> bool:
    """Whether a head that is tied to the embedding differs from it after merging: only one of them
    is changed, or each in another way.
    """
    steps = changed.get(embedding, ())
    # what is added to an embedding, or takes the place of rows, is so in the head, the same tensor
    is_replaced = bool(steps) and all(_is_whole(change) for _, change in steps)
    return bool(embedding) and (HEAD in changed or is_replaced)


def _require_one_head(path: str, embedding: str, changed: Mapping[str, Sequence[_Step]]) -> None:
    """Raise FormatError if an embedding is changed, but not replaced, and a stored head is not."""
    if embedding in changed and HEAD not in changed and not _is_untied(embedding, changed):
        raise FormatError(
            f"{path} has {HEAD} beside {embedding}, to which its config ties it, and only this is"
            f" changed: nothing tells whether it was one tensor in training; {MERGED_BY_PEFT}"
        )


def _require_own_rows(embedding: Sequence[_Step], head: Sequence[_Step]) -> None:
    """Raise FormatError if rows of an embedding, which are of a tied head too unless their adapter
    has rows of its own for that, are beside other changes of the head.
    """
    for adapter, change in embedding:
        if change.rows and any(not one.replaced or of is not adapter for of, one in head):
            raise FormatError(
                f"{adapter.name} has rows of {change.weight} for its tokens, which are of the tied"
                f" {HEAD} too, and something else changes that: peft does not merge them either"
            )


def _require_known_ties(
    config: Mapping[str, Any], changed: Mapping[str, Sequence[_Step]], has_known_head: bool
) -> None:
    """Raise FormatError for a new table of tokens in a model that ties its tables, or its head,
    under other names than those that are known here.
    """
    named = config.get("architectures")
    kind = str(named[0]) if isinstance(named, list) and named else ""
    is_apart = config.get("tie_word_embeddings") is False
    is_unknown = kind.endswith(_OF_NEXT) and not (is_apart or has_known_head)
    if not (is_unknown or config.get("is_encoder_decoder") or kind.endswith(_OF_MASKED)):
        return
    for name, steps in changed.items():
        shapes = [change.shapes[change.replaced] for _, change in steps if _is_whole(change)]
        tables = [shape for shape in shapes if shape[:1] == (config.get("vocab_size"),)]
        if len(tables) == len(steps) and len(tables[0]) == 2 and not (is_apart and name == HEAD):
            raise FormatError(
                f"{name} is replaced by {steps[0][0].name}, and what {kind or 'the model'} ties to"
                f" it is not known here; {MERGED_BY_PEFT}"
            )


def _is_whole(change: WeightChange) -> bool:
    return bool(change.replaced) and not change.rows


def _with_config(extras: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**extras, _CONFIG: {**extras[_CONFIG], "config": config}}


def _untied(extras: Mapping[str, Any]) -> Mapping[str, Any]:
    """Extras whose config, if there is one, ties no head to an embedding."""
    config = config_in(extras)
    if not config:
        return extras
    of_text = config.get("text_config")
    apart = {"tie_word_embeddings": False}
    nested = {"text_config": {**of_text, **apart}} if isinstance(of_text, Mapping) else {}
    return _with_config(extras, {**config, **nested, **apart})


def _with_vocabulary(extras: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    """Extras whose config, if there is one, has a vocabulary of so many tokens."""
    config = dict(config_in(extras))
    of_text = config.get("text_config")
    if not config:
        return extras
    if "vocab_size" not in config and isinstance(of_text, Mapping):
        return _with_config(extras, {**config, "text_config": {**of_text, "vocab_size": tokens}})
    return _with_config(extras, {**config, "vocab_size": tokens})


def _leaves(
    base: Contents, params: Mapping[str, Leaf], made: Mapping[str, MergedWeight]
) -> list[Leaf]:
    """The leaves of the base in their order, of the shapes of merged weights, and then those of
    new parameters.
    """
    shapes = {params[name].name: weight.shape for name, weight in made.items() if name in params}
    leaves = [replace(leaf, shape=shapes.get(leaf.name, leaf.shape)) for leaf in base.leaves]
    for name, weight in made.items():
        if name not in params:
            path = Key("dict", "param"), Key("dict", name)
            leaves.append(Leaf(path, "", "array", weight.shape, weight.dtype.name))
    named = zip(leaves, leaf_names([leaf.path for leaf in leaves]), strict=True)
    return [replace(leaf, name=name) for leaf, name in named]


def _merged_weight(
    name: str, leaf: Leaf | None, base: Mapping[str, Array], steps: Sequence[_Step]
) -> MergedWeight:
    """A weight, or a new one, with the adapters' changes in order, a replacement first."""
    whole = [step for step in steps if step[1].replaced]
    adding = [step for step in steps if not step[1].replaced]
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
        if leaf is not None and not change.rows:
            leaf = replace(leaf, shape=parts[WEIGHT].shape)  # tokens may have been added
        if change.rows:
            assert leaf is not None, "rows are of a weight of the base"
            parts = {WEIGHT: _with_rows(leaf, base[leaf.name], parts[WEIGHT], change.rows)}
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


def _with_rows(leaf: Leaf, base: Array, new: WeightPart, rows: Sequence[int]) -> WeightPart:
    """A weight of the base with some of its rows replaced."""
    dtype, (count, *row) = base.info.dtype, leaf.shape
    cast = dequantized(new.name, MergedWeight(new.shape, dtype, {WEIGHT: new}), dtype)

    def part(input: int, first: int, stop: int, at: int) -> Part:
        places = [Place((i, *(0 for _ in row)), straight(len(leaf.shape))) for i in (first, at)]
        return Part(input, (stop - first, *row), *places)

    parts = [part(1, i, i + 1, at) for i, at in enumerate(rows)]
    ends = [-1, *sorted(rows), count]
    parts += [part(0, a + 1, b, a + 1) for a, b in itertools.pairwise(ends) if a + 1 < b]
    layout = ParamLayout(leaf.shape, (leaf.shape, new.shape), tuple(parts))
    return WeightPart(leaf.name, array_of(leaf.name, layout, [base, cast]), leaf.shape)


def _items(adapter: _Adapter) -> Iterator[Item]:
    """The inventory of an adapter, in which each tensor has the reason what it changes."""
    reasons = {
        adapter.leaves[tensor].label: f"{role} of {change.weight}"
        for change in adapter.changes
        for tensor, role in change.tensors
    }
    for item in adapter.contents.with_reasons(reasons):
        yield replace(item, where=f"{adapter.name}/{item.where}")


def _notes(
    adapters: Sequence[_Adapter], new: Sequence[str], resized: Mapping[str, int]
) -> Iterator[str]:
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
    for name, tokens in [*resized.items()][:1]:
        yield (
            f"{name} has {tokens} tokens now, as in the adapter: a tokenizer of the base is of as"
            " many as that had"
        )
