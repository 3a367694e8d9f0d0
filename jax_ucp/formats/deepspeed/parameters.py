"""Parameters of slices: the layout of each, and the values that all its ranks share.

Slices of tensor-parallel ranks (`tensor_parallel`), of the lowest pipeline stage that has them, and
of expert-parallel ranks (`moe`) form parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.value import Array, joined
from jax_ucp.codecs.torch_file import StoredTensor
from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import StateFile, TagFiles
from jax_ucp.formats.deepspeed.slices import FROZEN, FileValue, Place, Slices, StateSlices
from jax_ucp.formats.deepspeed.tensor_parallel import BySpec, TensorParallel
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated
from jax_ucp.options import Options
from jax_ucp.shard_spec.rules import SpecShard

_UNPROVED = "a parameter, of which the optimizer has no second copy"
_OWN_NUMBER = (
    ", or it is a number that each rank has for itself; weights_only leaves the optimizer aside"
)


@dataclass(frozen=True)
class Joins:
    """The rules by which slices form parameters: each pipeline stage's own, or the user's spec."""

    files: TagFiles
    stages: Sequence[TensorParallel | BySpec]

    @classmethod
    def of(cls, files: TagFiles, options: Options) -> Joins:
        """The rules for a run's files. Raises FormatError if the ranks of a stage differ."""
        if options.spec:
            return cls(files, [BySpec(options.spec, options.sizes)] * files.pp)
        stages: list[TensorParallel] = []
        for stage in range(files.pp):
            models = [files.models[stage * files.tp + tp][0] for tp in range(files.tp)]
            infos = [model.state.get("universal_checkpoint_info") for model in models]
            for model, info in zip(models, infos, strict=True):
                if info != infos[0]:
                    raise FormatError(
                        f"{model.file.path} has another universal_checkpoint_info than"
                        f" {models[0].name}; the files are not of one run"
                    )
            path = str(models[0].file.path)
            stages.append(TensorParallel(infos[0], files.tp, path, options.sizes))
        return cls(files, stages)

    @property
    def by_spec(self) -> BySpec | None:
        first = self.stages[0]
        return first if isinstance(first, BySpec) else None

    def bind(self, slices: Slices) -> None:
        """Match the user's rules with every parameter, and with the buffers that they name."""
        if not self.by_spec:
            return
        params: dict[str, list[SpecShard]] = {}
        for (state, name), own in slices.states.items():
            places: list[Place] = [(own.stages[0], None, tp) for tp in range(self.files.tp)]
            named_buffer = state == "buffer" and self.by_spec.names(name)
            if own.arrays.keys() >= set(places) and (state == "param" or named_buffer):
                params[name] = [
                    SpecShard(own.arrays[place].info.shape, slices.label(place, state, name))
                    for place in places
                ]
        self.by_spec.bind(params)

    def places(self, state: str, name: str, slices: StateSlices) -> list[Place]:
        """The places of a parameter's slices, in order. Raises FormatError if one is missing."""
        stage = slices.stages[0]
        places = [place for place in slices.arrays if place[0] == stage]
        experts: list[Place] = [(stage, ep, 0) for _, ep, _ in places if ep is not None]
        if experts:
            if self.files.tp > 1:
                raise moe.cut_twice(self.files, name)
            return sorted(experts, key=lambda place: place[1] or 0)
        places.sort(key=lambda place: place[2])
        ranks = [tp for _, _, tp in places]
        if ranks != list(range(self.files.tp)):
            raise FormatError(
                f"{self.files.folder}: {state} of {name} is on the tensor-parallel ranks {ranks} of"
                f" {self.files.tp}: the files of the others lack it, and are of another run, or"
                " were exchanged"
            )
        return places

    def layout(self, state: str, name: str, shapes: Mapping[Place, Shape]) -> ParamLayout:
        """The layout of a parameter's state over its slices."""
        stage, expert, _ = next(iter(shapes))
        if expert is not None:
            by_rank = {ep: shape for (_, ep, _), shape in shapes.items() if ep is not None}
            return moe.expert_layout(name, by_rank, self.files.models[stage][0])
        patterns = self.stages[stage]
        # DeepSpeed has no patterns for buffers: those that nothing names are taken for copies, and
        # verify compares.
        if state == "buffer" and not patterns.names(name):
            return Replicated().join([*shapes.values()])
        return patterns.layout(name, [*shapes.values()])


def make_parameters(slices: Slices, joins: Joins) -> None:
    """Add parameters and states, from the lowest stage that has them. Raises FormatError."""
    builder = slices.builder
    unowned = FROZEN if any(slices.files.ranks) else _UNPROVED
    reasons = {"param": unowned, "buffer": "a buffer"}
    values = Values(builder)
    for (state, name), own in slices.states.items():
        stage, *others = own.stages
        if others and not joins.stages[stage].stage_copy(name):
            raise FormatError(
                f"{slices.files.folder}: {name} is on the pipeline stages {own.stages}, but is"
                " neither a tied module nor listed in pipeline_replicated_parameter_patterns"
            )
        if own.values:
            values.add(state, name, own.values[stage])
        if own.arrays:
            places = joins.places(state, name, own)
            arrays = [own.arrays[place] for place in places]
            shapes = {place: own.arrays[place].info.shape for place in places}
            labels = [slices.label(place, state, name) for place in places]
            layout = joins.layout(state, name, shapes)
            builder.parameter(state, name, joined(f"{state}.{name}", layout, arrays, labels))
            stored = [own.arrays[place] for place in places if place in own.stored]
            builder.mapped(stored, reasons.get(state, f"{state} of {name}"))
    copied = [name for name, own in slices.params().items() if own.stages[1:]]
    if copied:
        builder.notes.append(
            f"{', '.join(copied)}: on several pipeline stages, of which the first one's was"
            " taken (what DeepSpeed ties stays in step there, the rest of the copies are"
            " stale)"
        )


class Values:
    """Adds values that every rank has to parameters; a shared value is compared once."""

    def __init__(self, builder: ContentsBuilder):
        self._builder = builder
        self._agreed: dict[tuple[str, ...], Array] = {}

    def add(self, state: str, name: str, values: Sequence[FileValue]) -> None:
        """Add a state's values. Raises FormatError, naming the file, if one differs."""
        files, numbers = [stored for stored, _ in values], [value for _, value in values]
        if not all(isinstance(number, StoredTensor | bool | int | float) for number in numbers):
            for stored, value in values:
                self._builder.extra(stored.name, f"{state} of {name}", value)
        elif not isinstance(numbers[0], StoredTensor):
            # A Python int has no dtype; optax counts in int32.
            plain = [np.asarray(n, np.int32 if isinstance(n, int) else None) for n in numbers]
            file = f"{files[0].name}:optimizer_state_dict ({state})"
            self._builder.constant(state, name, _agreed(state, files, plain), file)
        else:
            keys = tuple(stored.key(value) for stored, value in values)
            if keys not in self._agreed:
                _agreed(state, files, [read_value(self._builder, *value) for value in values])
                layout = Replicated().join([tensor.shape for tensor in numbers])
                arrays = [self._builder.array(key) for key in keys]
                self._agreed[keys] = joined(f"{state}.{name}", layout, arrays)
                self._builder.mapped(arrays, f"{state} of every parameter of its group")
            self._builder.parameter(state, name, self._agreed[keys])


def read_value(builder: ContentsBuilder, stored: StateFile, value: Any) -> np.ndarray:
    """A number, or a tensor of a file, as an array."""
    if isinstance(value, StoredTensor):
        value = builder.shards.read(stored.key(value), Box.whole(value.shape))
    return np.asarray(value)


def _agreed(state: str, files: Sequence[StateFile], values: Sequence[np.ndarray]) -> np.ndarray:
    for stored, value in zip(files, values, strict=True):
        if not same_bits(value, values[0]):
            own_number = "" if state == "step" else _OWN_NUMBER
            raise FormatError(
                f"{stored.file.path}: {state} is {value}, but {values[0]} in {files[0].name}; the"
                f" files are not of one step{own_number}"
            )
    return values[0]
