"""Parameters of slices: which layout each has, then what the importer is told of it.

Slices of tensor-parallel ranks (`tensor_parallel`), of the lowest pipeline stage that has them, and
of expert-parallel ranks (`moe`) form parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import Files, Stored
from jax_ucp.formats.deepspeed.slices import FROZEN, Slices, StateSlices
from jax_ucp.formats.deepspeed.tensor_parallel import BySpec, TensorParallel
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated
from jax_ucp.shard_spec.rules import Shard
from jax_ucp.sources.consolidated import Consolidated, same_bits

_UNPROVED = "a parameter, of which the optimizer has no second copy"
_OWN_NUMBER = (
    ", or it is a number that each rank has for itself; weights_only leaves the optimizer aside"
)

# A value that every rank has, with the file that says it.
Told = tuple[Stored, Any]


@dataclass(frozen=True)
class Joins:
    """How slices form parameters: by the files, for each pipeline stage, or by the user's spec."""

    files: Files
    stages: Sequence[TensorParallel | BySpec]

    @classmethod
    def of(cls, files: Files, options: Options) -> Joins:
        """Raises FormatError where the files of a stage's ranks say different things."""
        if options.spec:
            return cls(files, [BySpec(options.spec, options.sizes)] * files.pp)
        return cls(files, [_by_files(files, stage, options) for stage in range(files.pp)])

    @property
    def by_spec(self) -> BySpec | None:
        first = self.stages[0]
        return first if isinstance(first, BySpec) else None

    def bind(self, states: Mapping[tuple[str, str], StateSlices]) -> None:
        """Apply the user's rules to every parameter, and to the buffers that they name."""
        if not self.by_spec:
            return
        params: dict[str, list[Shard]] = {}
        for (state, name), slices in states.items():
            places = [(slices.stages[0], None, tp) for tp in range(self.files.tp)]
            named_buffer = state == "buffer" and self.by_spec.names(name)
            complete = slices.keys.keys() >= set(places)
            if complete and (state == "param" or named_buffer):
                params[name] = [Shard(slices.shapes[place], slices.keys[place]) for place in places]
        self.by_spec.bind(params)

    def stage_of(self, name: str, slices: StateSlices) -> int:
        """The pipeline stage whose slices are the parameter's. Raises FormatError if in doubt."""
        stage, *others = slices.stages
        if others and not self.stages[stage].stage_copy(name):
            raise FormatError(
                f"{self.files.folder}: {name} is on the pipeline stages {slices.stages}, but is"
                " neither a tied module nor listed in pipeline_replicated_parameter_patterns"
            )
        return stage

    def layout(self, state: str, name: str, slices: StateSlices) -> tuple[ParamLayout, list[str]]:
        """The layout of a parameter's state over its slices, and their keys in that order."""
        stage = slices.stages[0]
        places = slices.on(stage)
        experts = {ep: slices.shapes[stage, ep, tp] for _, ep, tp in places if ep is not None}
        if experts:
            layout = self._of_experts(name, stage, experts)
            return layout, [slices.keys[stage, ep, 0] for ep in sorted(experts)]
        places.sort(key=lambda place: place[2])
        ranks = [tp for _, _, tp in places]
        if ranks != list(range(self.files.tp)):
            raise FormatError(
                f"{self.files.folder}: {state} of {name} is on the tensor-parallel ranks {ranks} of"
                f" {self.files.tp}: the files of the others lack it, and are of another run, or"
                " were exchanged"
            )
        shapes = [slices.shapes[place] for place in places]
        return self._join(state, name, stage, shapes), [slices.keys[place] for place in places]

    def _of_experts(self, name: str, stage: int, shapes: Mapping[int, Shape]) -> ParamLayout:
        if self.files.tp > 1:
            raise FormatError(
                f"{self.files.folder}: {name} is cut over both expert- and tensor-parallel ranks,"
                " which is not read"
            )
        return moe.expert_layout(name, shapes, self.files.models[stage][0])

    def _join(self, state: str, name: str, stage: int, shapes: Sequence[Shape]) -> ParamLayout:
        patterns = self.stages[stage]
        # DeepSpeed has no patterns for buffers: those that nothing names are taken for copies, and
        # verify compares.
        if state == "buffer" and not patterns.names(name):
            return Replicated().join(shapes)
        return patterns.layout(name, shapes)


def _by_files(files: Files, stage: int, options: Options) -> TensorParallel:
    models = [files.models[stage * files.tp + tp][0] for tp in range(files.tp)]
    infos = [model.state.get("universal_checkpoint_info") for model in models]
    for model, info in zip(models, infos, strict=True):
        if info != infos[0]:
            raise FormatError(
                f"{model.file.path} has another universal_checkpoint_info than"
                f" {models[0].name}; the files are not of one run"
            )
    return TensorParallel(infos[0], files.tp, str(models[0].file.path), options.sizes)


def make_parameters(slices: Slices, joins: Joins) -> None:
    """Tell the importer of all parameters and their states."""
    unowned = FROZEN if any(slices.files.ranks) else _UNPROVED
    reasons = {"param": unowned, "buffer": "a buffer"}
    values = Values(slices.importer)
    for (state, name), own in slices.states.items():
        stage = joins.stage_of(name, own)
        if own.values:
            values.add(state, name, own.values[stage])
        if own.keys:
            layout, keys = joins.layout(state, name, own)
            reason = reasons.get(state, f"{state} of {name}")
            slices.importer.parameter(state, name, Consolidated(layout, keys), reason)
    copied = [name for name, own in slices.params().items() if own.stages[1:]]
    if copied:
        slices.importer.notes.append(
            f"{', '.join(copied)}: on several pipeline stages, of which the first one's was"
            " taken (what DeepSpeed ties stays in step there, the rest of the copies are"
            " stale)"
        )


class Values:
    """Adds values that every rank has to parameters; what several share is compared once."""

    def __init__(self, importer: Import):
        self._importer = importer
        self._agreed: dict[tuple[str, ...], Consolidated] = {}

    def add(self, state: str, name: str, told: Sequence[Told]) -> None:
        """Raises FormatError, naming the file, where one differs."""
        numbers = [value for _, value in told]
        if not all(isinstance(number, StoredTensor | bool | int | float) for number in numbers):
            for stored, value in told:
                self._importer.extra(stored.name, f"{state} of {name}", value)
        elif isinstance(numbers[0], StoredTensor):
            self._add_stored(state, name, told)
        else:
            files = [stored for stored, _ in told]
            number = _agreed(state, files, list(map(_plain_array, numbers)))
            file = f"{files[0].name}:optimizer_state_dict ({state})"
            self._importer.constant(state, name, number, file)

    def _add_stored(self, state: str, name: str, told: Sequence[Told]) -> None:
        """Add a tensor that every rank has, read once for all parameters that share it."""
        keys = tuple(stored.key(value) for stored, value in told)
        if keys not in self._agreed:
            values = [read_value(self._importer, stored, value) for stored, value in told]
            _agreed(state, [stored for stored, _ in told], values)
            layout = Replicated().join([value.shape for _, value in told])
            self._agreed[keys] = Consolidated(layout, keys)
        reason = f"{state} of every parameter of its group"
        self._importer.parameter(state, name, self._agreed[keys], reason)


def read_value(importer: Import, stored: Stored, value: Any) -> np.ndarray:
    """A number, or a tensor of a file, as an array."""
    if isinstance(value, StoredTensor):
        value = importer.shards.read(stored.key(value), Box.whole(value.shape))
    return np.asarray(value)


def _plain_array(number: Any) -> np.ndarray:
    # A Python int has no dtype; optax counts in int32.
    return np.asarray(number, np.int32 if isinstance(number, int) else None)


def _agreed(state: str, files: Sequence[Stored], values: Sequence[np.ndarray]) -> np.ndarray:
    for stored, value in zip(files, values, strict=True):
        if not same_bits(value, values[0]):
            own_number = "" if state == "step" else _OWN_NUMBER
            raise FormatError(
                f"{stored.file.path}: {state} is {value}, but {values[0]} in {files[0].name}; the"
                f" files are not of one step{own_number}"
            )
    return values[0]
