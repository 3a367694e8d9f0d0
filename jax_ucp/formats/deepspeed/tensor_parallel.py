"""How slices form parameters, by DeepSpeed's `universal_checkpoint_info`.

Its patterns match a name with `re.match`, so a prefix is enough; RE2 matches them, as
`name_patterns` says. A parameter that no list names is cut on its first axis: that is DeepSpeed's
rule, and the only way it has to say "column parallel". A list that says nothing, or a pattern that
meets no name, is therefore refused: what it was meant for would be joined wrongly, without a word.
A spec in the universal checkpoint language takes the place of all of it.

Facts: `merge_tp_slices` in `checkpoint/ds_to_universal.py`, `checkpoint/affine.py`; DeepSpeed
0.19.8.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from jax_ucp.codecs.unpickle import Record, known
from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import Part, Shape, box_part
from jax_ucp.layout.patterns import Averaged, Fused, Padded, Pattern, Replicated, Sharded, Unique
from jax_ucp.name_patterns import NamePatterns, pattern_list
from jax_ucp.options import Sizes
from jax_ucp.shard_spec.rules import Spec, SpecShard, layouts, regex_of

# The lists of `universal_checkpoint_info` that say how parameters are cut.
REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
VOCABULARY = "vocabulary_parameter_patterns"
_PIPELINE = "pipeline_replicated_parameter_patterns"
EXPERTS = "expert_parameter_patterns"  # which decides how atoms are written, and none is read by it
SUB_PARAMS = "parameter_with_sub_params"
LISTS = (REPLICATED, AVERAGED, ROWS, HALVES, VOCABULARY)

_SPEC = "Say how slices form parameters in a spec (spec=, --spec)"

# What this reader knows; newer versions may say things it would overlook.
_VERSION, _AFFINE_VERSION = 0.4, 1


@dataclass(frozen=True)
class _SubParams:
    """Arrays side by side along `axis`, whose lengths are `shape[axis]`; if that is a number, it is
    the number of arrays of equal length.

    A length of -1 on another axis stands for any length.
    """

    patterns: Sequence[str]
    shape: tuple[Any, ...]
    axis: int

    @classmethod
    def of(cls, entry: Any) -> _SubParams:
        """The arrays that a `SubparamShape` describes: a dict, or an instance in a pickle."""
        fields: Any = entry.fields if isinstance(entry, Record) else entry
        shape = tuple(tuple(n) if isinstance(n, list | tuple) else n for n in fields["shape"])
        named = {"patterns": fields["patterns"]}
        patterns = pattern_list(named, "patterns", SUB_PARAMS)
        return cls(patterns, shape, int(fields["partition_dim"]))

    def lengths(self, slices: Sequence[Shape], what: str) -> Sequence[int]:
        """The lengths of the arrays. Raises FormatError, naming `what`, for other slices."""
        shape, rank = slices[0], len(slices[0])
        past_the_end = [length for length in self.shape[rank:] if length not in (-1, 1)]
        if not 0 <= self.axis < rank or past_the_end:
            raise FormatError(f"{what} do not fit its slices, which have shape {shape}")
        for axis, (want, length) in enumerate(zip(self.shape, shape, strict=False)):
            if axis != self.axis and want not in (-1, length):
                raise FormatError(
                    f"{what} have {want} on axis {axis}, but its slices have shape {shape}"
                )
        lengths, total = self.shape[self.axis], sum(shape[self.axis] for shape in slices)
        if not isinstance(lengths, int):
            return lengths
        if lengths < 1 or total % lengths:
            raise FormatError(f"{what} are {lengths} equal parts of {total} rows")
        return (total // lengths,) * lengths


class TensorParallel:
    """The rules by which slices of `tp` ranks form parameters, by the info in the file `path`.

    Raises FormatError if the info is needed and missing, is empty, or is of a newer version.
    """

    def __init__(self, info: Any, tp: int, path: str, sizes: Mapping[str, int]):
        self.info: Mapping[str, Any] = info if isinstance(known(info), dict) else {}
        self.tp, self.path = tp, path
        self.sizes = sizes
        affine_map = self.info.get("affine_map") or {}
        self.maps: Mapping[str, Any] = affine_map.get("params") or {}
        self.sub_params: dict[str, tuple[int, _SubParams]] = {}  # the first come first
        for sub in map(_SubParams.of, self.info.get(SUB_PARAMS) or ()):
            for pattern in sub.patterns:
                self.sub_params.setdefault(pattern, (len(self.sub_params), sub))
        self._lists = {
            key: dict.fromkeys(pattern_list(self.info, key, path))
            for key in (*LISTS, EXPERTS, _PIPELINE)
        }
        self._cutting = dict.fromkeys(chain(*map(self._lists.__getitem__, LISTS), self.sub_params))
        self._unsupported: Mapping[str, Any] = dict(
            self.info.get("autotp_unsupported_parameter_patterns") or {}
        )
        others = (self._lists[EXPERTS], self._lists[_PIPELINE], self.maps, self._unsupported)
        self._patterns = NamePatterns(list(chain(self._cutting, *others)), path)
        version = self.info.get("universal_checkpoint_version", 0.0)
        affine = affine_map.get("version", _AFFINE_VERSION)
        if version > _VERSION or affine > _AFFINE_VERSION:
            raise FormatError(
                f"{path}: universal_checkpoint_info has version {version} and affine maps of"
                f" version {affine}; {_VERSION} and {_AFFINE_VERSION} are the newest known here."
                f" {_SPEC}"
            )
        self.widths_recorded = version >= 0.4
        if tp > 1 and not any((self.maps, self.sub_params, *map(self._lists.get, LISTS))):
            raise FormatError(
                f"{path} was written by {tp} tensor-parallel ranks, but has no"
                " universal_checkpoint_info with patterns: nothing says how their slices form"
                f" parameters. {_SPEC}, or save with that info in client_state"
                " (Megatron-DeepSpeed's --universal-checkpoint does)."
            )

    def layout(self, name: str, slices: Sequence[Shape]) -> ParamLayout:
        """The layout of the parameter over the slices. Raises LayoutError if they do not fit."""
        if (affine := self._hit(self.maps, name, "affine_map")) is not None:
            return affine_layout(
                self.maps[affine], slices, f"{self.path}: the affine map of {name}"
            )
        for key in LISTS:
            self._hit(self._lists[key], name, key)  # raises FormatError for several patterns of one
        pattern = self._cut(name, slices)
        if VOCABULARY in self.lists_of(name):
            vocab = self.sizes.get("vocab", self.info.get("original_vocab_size"))
            if not isinstance(vocab, int):
                raise FormatError(
                    f"{self.path} calls {name} a vocabulary, but has no original_vocab_size; give"
                    ' it: sizes={"vocab": N}, --size vocab=N'
                )
            pattern = Padded(pattern, axis=0, size=vocab)
        try:
            return pattern.join(slices)
        except LayoutError as error:
            vocab = f" with vocab={pattern.size!s:.40}" if isinstance(pattern, Padded) else ""
            what = f"{self.path}: {name} by its universal_checkpoint_info{vocab}"
            raise LayoutError(f"{what}: {error}. {_SPEC}") from error

    def names(self, name: str) -> bool:
        matching = self._patterns.matching(name)
        return any(pattern in self._cutting or pattern in self.maps for pattern in matching)

    def stage_copy(self, name: str) -> bool:
        """Whether several pipeline stages may hold the parameter; the first one's is used."""
        return (
            name.startswith("tied_modules.")
            or self._hit(self._lists[_PIPELINE], name, _PIPELINE) is not None
        )

    def check_used(self, names: Iterable[str]) -> None:
        """Raise FormatError for unused patterns, or what DeepSpeed says it cannot join."""
        if self.tp == 1:
            return
        matching = {name: self._patterns.matching(name) for name in names}
        for name, patterns in matching.items():
            if pattern := next(filter(self._unsupported.__contains__, patterns), None):
                raise FormatError(
                    f"{self.path}: DeepSpeed says that the slices of {name} cannot be joined:"
                    f" {self._unsupported[pattern]}. {_SPEC}"
                )
        used = frozenset[str]().union(*matching.values())
        if unused := [pattern for pattern in self._cutting if pattern not in used]:
            raise FormatError(
                f"{self.path}: universal_checkpoint_info has patterns that match no parameter:"
                f" {unused}. What they were meant for would be joined on its first axis. {_SPEC}"
            )

    def lists_of(self, name: str) -> set[str]:
        """The lists that a parameter is in."""
        matching = self._patterns.matching(name)
        lists = self._lists.items()
        return {key for key, patterns in lists if not patterns.keys().isdisjoint(matching)}

    def sub_params_of(self, name: str) -> tuple[str, _SubParams | None]:
        """The first pattern of sub-parameters that a parameter matches, and the sub-parameters."""
        matching = [p for p in self._patterns.matching(name) if p in self.sub_params]
        pattern = min(matching, key=lambda pattern: self.sub_params[pattern][0], default="")
        return pattern, self.sub_params[pattern][1] if pattern else None

    def _cut(self, name: str, slices: Sequence[Shape]) -> Pattern:
        """The pattern by which a parameter is cut, in DeepSpeed's order of precedence."""
        if len(slices) == 1:
            return Unique()
        listed = self.lists_of(name)
        if REPLICATED in listed:
            return Replicated()
        if AVERAGED in listed:
            return Averaged()
        if HALVES in listed:
            halves = tuple(shape[0] // 2 for shape in slices)
            return Fused(0, {"first": halves, "second": halves})
        pattern, sub = self.sub_params_of(name)
        if sub:
            return self._fused(name, slices, sub, pattern)
        return Sharded(1 if ROWS in listed else 0)

    def _fused(self, name: str, slices: Sequence[Shape], sub: _SubParams, pattern: str) -> Pattern:
        """The pattern of several arrays, each cut by itself: into the recorded widths on each rank,
        or before version 0.4 evenly.
        """
        what = f"{self.path}: the sub-parameters {sub.shape} of {name}"
        lengths = sub.lengths(slices, what)
        if not self.widths_recorded:
            return Fused(sub.axis, {str(number): length for number, length in enumerate(lengths)})
        widths = (self.info.get("sub_param_shard_widths") or {}).get(pattern)
        if widths is None:
            raise FormatError(
                f"{what} have no sub_param_shard_widths, which version {_VERSION} needs. {_SPEC}"
            )
        if list(map(sum, widths)) != list(lengths):
            raise FormatError(f"{what} have the shard widths {widths}, which do not add up to them")
        return Fused(sub.axis, {str(number): tuple(row) for number, row in enumerate(widths)})

    def _hit(self, patterns: Collection[str], name: str, what: str) -> str | None:
        hits = sorted(pattern for pattern in self._patterns.matching(name) if pattern in patterns)
        if len(hits) > 1:
            raise FormatError(
                f"{self.path}: {name} matches several patterns of {what}: {hits}. {_SPEC}"
            )
        return hits[0] if hits else None


class BySpec:
    """The rules of a spec that the user gives; they hold whatever the files record."""

    def __init__(self, spec: Path | Spec, sizes: Sizes):
        from jax_ucp.shard_spec.notation import load  # brings in YAML

        self.spec = load(spec)
        self.sizes = sizes.of(self.spec.lengths, self.spec.switches)
        self.layouts: Mapping[str, ParamLayout] = {}

    def names(self, name: str) -> bool:
        return any(re.fullmatch(regex_of(sentence.param), name) for sentence in self.spec.own)

    def bind(self, params: Mapping[str, Sequence[SpecShard]]) -> None:
        self.layouts = layouts(self.spec, params, self.sizes)

    def layout(self, name: str, slices: Sequence[Shape]) -> ParamLayout:
        layout = self.layouts[name]
        if layout.shards != tuple(slices):
            raise LayoutError(
                f"{name}: a state has slices of shapes {list(slices)}, the parameter"
                f" {list(layout.shards)}"
            )
        return layout

    def stage_copy(self, name: str) -> bool:
        return name.startswith("tied_modules.")

    def check_used(self, names: Iterable[str]) -> None:
        """Do nothing: `bind` has refused rules that match no parameter."""


def affine_layout(entry: Mapping[str, Any], slices: Sequence[Shape], what: str) -> ParamLayout:
    """The layout of a parameter by an affine map whose pieces are blocks of it and of slices.

    A piece is (shape, source in the parameter, dest in the slice), each end an offset and strides
    in elements. Raises FormatError for a transposed, strided or scaled piece.
    """
    shape = tuple(map(int, entry["logical_shape"]))
    ranks = {int(rank): value for rank, value in entry["ranks"].items()}
    if sorted(ranks) != list(range(len(slices))):
        raise FormatError(
            f"{what} is for the ranks {sorted(ranks)}, but there are {len(slices)} slices"
        )
    parts: list[Part] = []
    for rank, slice_shape in enumerate(slices):
        pieces = ranks[rank]["pieces"]
        elements = sum(math.prod(piece["shape"]) for piece in pieces)
        if tuple(ranks[rank]["shard_shape"]) != slice_shape or elements != math.prod(slice_shape):
            raise FormatError(
                f"{what} has a slice {ranks[rank]['shard_shape']} on rank {rank}, in {len(pieces)}"
                f" pieces that should make it up, but the file has {slice_shape}"
            )
        for piece in pieces:
            target = _box(piece["shape"], piece["source"], shape)
            source = _box(piece["shape"], piece["dest"], slice_shape)
            if target is None or source is None or piece.get("scale", 1.0) != 1.0:
                raise FormatError(
                    f"{what} has a piece on rank {rank} that is not a box, or is scaled:"
                    f" {dict(piece)}. {_SPEC}"
                )
            parts.append(box_part(rank, source, target))
    return ParamLayout(shape, tuple(slices), tuple(part for part in parts if part.size))


def _box(shape: Sequence[int], at: Sequence[Any], whole: Shape) -> Box | None:
    """The block of an array of shape `whole` at (offset, strides); None if not a block."""
    offset, strides = at
    if not len(shape) == len(strides) == len(whole):
        return None
    steps = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    if any(n > 1 and stride != step for n, stride, step in zip(shape, strides, steps, strict=True)):
        return None
    if 0 in shape:
        return Box((0,) * len(shape), tuple(map(int, shape)))
    if not 0 <= offset < max(1, math.prod(whole)):
        return None
    start = tuple(offset // step % n for step, n in zip(steps, whole, strict=True))
    box = Box(start, tuple(map(operator.add, start, map(int, shape))))
    return box if box.within(Box.whole(whole)) else None
