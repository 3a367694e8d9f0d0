"""Tensor parallelism as DeepSpeed writes it down: `universal_checkpoint_info` says how slices form parameters.

Its patterns match a name with `re.match`, so a prefix is enough; RE2 matches them, as `name_patterns` says. A parameter
that no list names is cut on its first axis: that is DeepSpeed's rule, and the only way it has to say "column parallel".
A list that says nothing, or a pattern that meets no name, is therefore refused: what it was meant for would be joined
wrongly, without a word. A spec in the universal checkpoint language takes the place of all of it.

Facts: `merge_tp_slices` in `checkpoint/ds_to_universal.py`, `checkpoint/affine.py`; DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.options import Sizes
from jax_ucp.formats.safe_pickle import Record, known
from jax_ucp.language.notation import load
from jax_ucp.language.rules import Shard, layouts, regex_of
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.layout.patterns import Averaged, Fused, Padded, Pattern, Replicated, Sharded, Unique
from jax_ucp.name_patterns import NamePatterns, pattern_list

_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROWS = "parameter_with_row_parallelism_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_VOCABULARY = "vocabulary_parameter_patterns"
_PIPELINE = "pipeline_replicated_parameter_patterns"
_LISTS = (_REPLICATED, _AVERAGED, _ROWS, _HALVES, _VOCABULARY)

_SPEC = "Say how slices form parameters in a spec (spec=, --spec)"

# What this reader knows; newer versions may say things it would overlook.
_VERSION, _AFFINE_VERSION = 0.4, 1


class TensorParallel:
    """How the slices of the `tp` ranks form parameters, by the info in the file `where`.

    Raises FormatError where the info is missing and needed, says nothing, or is of a newer version.
    """

    def __init__(self, info: Any, tp: int, where: str, sizes: Mapping[str, int]):
        self.info: Mapping[str, Any] = info if isinstance(known(info), dict) else {}
        self.tp, self.where = tp, where
        self.sizes = sizes
        self.maps: Mapping[str, Any] = (self.info.get("affine_map") or {}).get("params") or {}
        self.sub_params = [_sub_param(entry) for entry in self.info.get("parameter_with_sub_params") or ()]
        self._lists = {key: pattern_list(self.info, key, where) for key in (*_LISTS, _PIPELINE)}
        self._unsupported: Mapping[str, Any] = dict(self.info.get("autotp_unsupported_parameter_patterns") or {})
        in_subs = [pattern for patterns, _, _ in self.sub_params for pattern in patterns]
        in_lists = [pattern for patterns in self._lists.values() for pattern in patterns]
        self._patterns = NamePatterns([*in_lists, *in_subs, *self.maps, *self._unsupported], where)
        version = self.info.get("universal_checkpoint_version", 0.0)
        affine = (self.info.get("affine_map") or {}).get("version", _AFFINE_VERSION)
        if version > _VERSION or affine > _AFFINE_VERSION:
            raise FormatError(
                f"{where}: universal_checkpoint_info has version {version} and affine maps of version {affine}; "
                f"{_VERSION} and {_AFFINE_VERSION} are the newest known here. {_SPEC}"
            )
        self.widths_recorded = version >= 0.4
        if tp > 1 and not (self.maps or self.sub_params or any(self.info.get(key) for key in _LISTS)):
            raise FormatError(
                f"{where} was written by {tp} tensor-parallel ranks, but has no universal_checkpoint_info with "
                f"patterns: nothing says how their slices form parameters. {_SPEC}, or save with that info in "
                "client_state (Megatron-DeepSpeed's --universal-checkpoint does)."
            )

    def layout(self, name: str, slices: Sequence[Shape]) -> ParamLayout:
        """The parameter that the slices form. Raises LayoutError, with the declaration, where they do not fit it."""
        if (affine := self._hit(self.maps, name, "affine_map")) is not None:
            return affine_layout(self.maps[affine], slices, f"{self.where}: the affine map of {name}")
        pattern = self._pattern(name, slices)
        try:
            return pattern.join(slices)
        except LayoutError as error:
            vocab = f" with vocab={pattern.size!s:.40}" if isinstance(pattern, Padded) else ""
            what = f"{self.where}: {name} by its universal_checkpoint_info{vocab}"
            raise LayoutError(f"{what}: {error}. {_SPEC}") from error

    def says(self, name: str) -> bool:
        """Whether any list or map names the parameter."""
        lists = [*(self._lists[key] for key in _LISTS), self.maps, *(p for p, _, _ in self.sub_params)]
        return any(not self._patterns.matching(name).isdisjoint(patterns) for patterns in lists)

    def stage_copy(self, name: str) -> bool:
        """Whether pipeline stages may hold copies of the parameter, of which the first is the one in use."""
        return name.startswith("tied_modules.") or self._hit(self._lists[_PIPELINE], name, _PIPELINE) is not None

    def check_used(self, names: Iterable[str]) -> None:
        """Raise FormatError for patterns that match no name, and for parameters that DeepSpeed says it cannot join."""
        names = list(names)
        if self.tp == 1:
            return
        for pattern, why in self._unsupported.items():
            if hit := next((name for name in names if pattern in self._patterns.matching(name)), None):
                raise FormatError(
                    f"{self.where}: DeepSpeed says that the slices of {hit} cannot be joined: {why}. {_SPEC}"
                )
        patterns = [p for key in _LISTS for p in self._lists[key]]
        patterns += [p for patterns, _, _ in self.sub_params for p in patterns]
        used = frozenset[str]().union(*map(self._patterns.matching, names))
        if idle := [pattern for pattern in patterns if pattern not in used]:
            raise FormatError(
                f"{self.where}: universal_checkpoint_info has patterns that match no parameter: {idle}. "
                f"What they were meant for would be joined on its first axis. {_SPEC}"
            )

    def _pattern(self, name: str, slices: Sequence[Shape]) -> Pattern:
        listed = {key for key in _LISTS if self._hit(self._lists[key], name, key) is not None}
        pattern: Pattern
        if len(slices) == 1:
            pattern = Unique()
        elif _REPLICATED in listed:
            pattern = Replicated()
        elif _AVERAGED in listed:
            pattern = Averaged()
        elif _HALVES in listed:
            halves = tuple(shape[0] // 2 for shape in slices)
            pattern = Fused(0, {"first": halves, "second": halves})
        elif (sub := self._sub_params(name, slices)) is not None:
            pattern = sub
        else:
            pattern = Sharded(1 if _ROWS in listed else 0)
        if _VOCABULARY in listed:
            vocab = self.sizes.get("vocab", self.info.get("original_vocab_size"))
            if not isinstance(vocab, int):
                raise FormatError(
                    f"{self.where} calls {name} a vocabulary, but has no original_vocab_size; give it: "
                    'sizes={"vocab": N}, --size vocab=N'
                )
            pattern = Padded(pattern, axis=0, size=vocab)
        return pattern

    def _sub_params(self, name: str, slices: Sequence[Shape]) -> Pattern | None:
        """Several arrays side by side, each cut by itself: their widths on each rank; before 0.4 even ones."""
        matching = self._patterns.matching(name)
        hits = [(hit, *entry) for entry in self.sub_params for hit in entry[0] if hit in matching]
        if not hits:
            return None
        hit, _, shape, axis = hits[0]
        found, what = len(slices[0]), f"{self.where}: the sub-parameters {shape} of {name}"
        if not 0 <= axis < found or any(n not in (-1, 1) for n in shape[found:]):
            raise FormatError(f"{what} do not fit its slices, which have shape {slices[0]}")
        for k, n in enumerate(shape[:found]):
            if k != axis and n not in (-1, slices[0][k]):
                raise FormatError(f"{what} have {n} on axis {k}, but its slices have shape {slices[0]}")
        rows = sum(shard[axis] for shard in slices)
        sizes = shape[axis]
        if isinstance(sizes, int):
            if sizes < 1 or rows % sizes:
                raise FormatError(f"{what} are {sizes} equal parts of {rows} rows")
            sizes = (rows // sizes,) * sizes
        widths = (self.info.get("sub_param_shard_widths") or {}).get(hit) if self.widths_recorded else None
        if self.widths_recorded and widths is None:
            raise FormatError(f"{what} have no sub_param_shard_widths, which version {_VERSION} needs. {_SPEC}")
        if widths is None:
            return Fused(axis, {str(k): n for k, n in enumerate(sizes)})
        if [sum(row) for row in widths] != list(sizes):
            raise FormatError(f"{what} have the shard widths {widths}, which do not add up to them")
        return Fused(axis, {str(k): tuple(row) for k, row in enumerate(widths)})

    def _hit(self, patterns: Iterable[str], name: str, what: str) -> str | None:
        matching = self._patterns.matching(name)
        hits = [pattern for pattern in patterns if pattern in matching]
        if len(hits) > 1:
            raise FormatError(f"{self.where}: {name} matches several patterns of {what}: {hits}. {_SPEC}")
        return hits[0] if hits else None


class BySpec:
    """How slices form parameters, by a spec of the user's: all of them, whatever the files say."""

    def __init__(self, spec: Path, sizes: Sizes):
        self.spec = load(spec)
        self.sizes = sizes.of(self.spec.lengths, self.spec.switches)
        self.layouts: Mapping[str, ParamLayout] = {}

    def says(self, name: str) -> bool:
        """Whether a rule of the spec itself claims the parameter."""
        return any(re.fullmatch(regex_of(sentence.param), name) for sentence in self.spec.own)

    def bind(self, params: Mapping[str, Sequence[Shard]]) -> None:
        """Apply the rules to all parameters. Raises LayoutError with everything that does not fit."""
        self.layouts = layouts(self.spec, params, self.sizes)

    def layout(self, name: str, slices: Sequence[Shape]) -> ParamLayout:
        found = self.layouts[name]
        if found.shards != tuple(slices):
            raise LayoutError(
                f"{name}: a state has slices of shapes {list(slices)}, the parameter {list(found.shards)}"
            )
        return found

    def stage_copy(self, name: str) -> bool:
        return name.startswith("tied_modules.")

    def check_used(self, names: Iterable[str]) -> None:
        """Nothing: `bind` has refused rules without a parameter."""


def affine_layout(entry: Mapping[str, Any], slices: Sequence[Shape], what: str) -> ParamLayout:
    """The parameter that slices form by an affine map of DeepSpeed, where all its pieces are boxes on both sides.

    A piece is (shape, source in the parameter, dest in the slice), both ends an offset and strides in elements.
    Raises FormatError where a piece is no box (a transposition, a stride over rows), or is scaled.
    """
    shape = tuple(map(int, entry["logical_shape"]))
    ranks = {int(rank): value for rank, value in entry["ranks"].items()}
    if sorted(ranks) != list(range(len(slices))):
        raise FormatError(f"{what} is for the ranks {sorted(ranks)}, but there are {len(slices)} slices")
    fragments: list[Fragment] = []
    for rank, found in enumerate(slices):
        pieces = ranks[rank]["pieces"]
        if tuple(ranks[rank]["shard_shape"]) != found or sum(math.prod(p["shape"]) for p in pieces) != math.prod(found):
            raise FormatError(
                f"{what} has a slice {ranks[rank]['shard_shape']} on rank {rank}, in {len(pieces)} pieces that should "
                f"make it up, but the file has {found}"
            )
        for piece in pieces:
            target, source = _box(piece["shape"], piece["source"], shape), _box(piece["shape"], piece["dest"], found)
            if target is None or source is None or piece.get("scale", 1.0) != 1.0:
                raise FormatError(
                    f"{what} has a piece on rank {rank} that is no box, or is scaled: {dict(piece)}. {_SPEC}"
                )
            if target.size:
                fragments.append(Fragment(rank, source, target))
    return ParamLayout(shape, tuple(slices), tuple(fragments))


def _box(shape: Sequence[int], at: Sequence[Any], whole: Shape) -> Box | None:
    """The block of an array of shape `whole` at `at`, an offset and strides; None if that is no block."""
    offset, strides = at
    if not len(shape) == len(strides) == len(whole):
        return None
    steps = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    if any(n > 1 and stride != step for n, stride, step in zip(shape, strides, steps, strict=True)):
        return None
    if 0 in shape:
        return Box((0,) * len(shape), tuple(map(int, shape)))
    start = tuple(offset // step % n for step, n in zip(steps, whole, strict=True))
    box = Box(start, tuple(a + int(n) for a, n in zip(start, shape, strict=True)))
    return box if 0 <= offset < max(1, math.prod(whole)) and box.within(Box.whole(whole)) else None


def _sub_param(entry: Any) -> tuple[list[str], tuple[Any, ...], int]:
    """The patterns, shape and axis of a `SubparamShape`, which is a dict, or an instance in a pickle."""
    fields: Any = entry.fields if isinstance(entry, Record) else entry
    shape = tuple(tuple(n) if isinstance(n, list | tuple) else n for n in fields["shape"])
    patterns = pattern_list({"patterns": fields["patterns"]}, "patterns", "parameter_with_sub_params")
    return list(patterns), shape, int(fields["partition_dim"])
