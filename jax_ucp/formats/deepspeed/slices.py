"""Slices: what each model-parallel rank of a DeepSpeed run had in memory, and parameters of slices.

Flat partitions of data-parallel ranks form slices (`partitions`). Slices of tensor-parallel ranks
(`tensor_parallel`), of the lowest pipeline stage that has them, and of expert-parallel ranks
(`moe`) form parameters.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import Files, Stored
from jax_ucp.formats.deepspeed.tensor_parallel import BySpec, TensorParallel
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.file import StoredTensor, TorchFile
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated
from jax_ucp.shard_spec.rules import Shard
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated, same_bits

ASIDE = "left aside, as weights_only asks"
FROZEN = "a parameter that the optimizer does not own (frozen)"
_UNPROVED = "a parameter, of which the optimizer has no second copy"
_OWN_NUMBER = (
    ", or it is a number that each rank has for itself; weights_only leaves the optimizer aside"
)

# Where a slice was: pipeline stage, expert-parallel rank (None for what is no fused expert),
# tensor-parallel rank.
Place = tuple[int, int | None, int]


@dataclass
class StateSlices:
    """One state of a parameter: slices, by place, or values of whole groups, by pipeline stage."""

    keys: dict[Place, str] = field(default_factory=dict)
    shapes: dict[Place, Shape] = field(default_factory=dict)
    values: dict[int, list[tuple[Stored, Any]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def stages(self) -> list[int]:
        return sorted({*self.values, *(stage for stage, _, _ in self.keys)})

    def add(self, place: Place, key: str, shape: Shape) -> None:
        self.keys[place] = key
        self.shapes[place] = shape

    def on(self, stage: int) -> list[Place]:
        return [place for place in self.keys if place[0] == stage]


class Slices:
    """The slices of one checkpoint, by state and name: first added, then made into parameters.

    `importer` is told what each stored tensor is; `more` are files beside those of the engine.
    """

    def __init__(self, files: Files, options: Options, more: Mapping[str, TorchFile] | None = None):
        self.files, self.options = files, options
        own_files = {file.name: file.file for file in files.all()}
        stored = Combined.of_files({**own_files, **(more or {})})
        self.importer = Import("deepspeed", files.folder, stored, options.on_conflict)
        for file in own_files.values():
            self.importer.unknown.update(file.unknown)
        self.states: dict[tuple[str, str], StateSlices] = defaultdict(StateSlices)
        self.by_spec = BySpec(options.spec, options.sizes) if options.spec else None
        self.patterns = [self.by_spec or self._patterns(stage) for stage in range(files.pp)]
        self._agreed: dict[tuple[str, ...], np.ndarray] = {}

    def _patterns(self, stage: int) -> TensorParallel:
        models = [self.files.models[stage * self.files.tp + tp][0] for tp in range(self.files.tp)]
        infos = [model.state.get("universal_checkpoint_info") for model in models]
        for model, info in zip(models, infos, strict=True):
            if info != infos[0]:
                raise FormatError(
                    f"{model.file.path} has another universal_checkpoint_info than"
                    f" {models[0].name}; the files are not of one run"
                )
        return TensorParallel(infos[0], self.files.tp, str(models[0].file.path), self.options.sizes)

    # Slices are added.

    def place(self, mp: int, ep: int | None = None) -> Place:
        stage, tp = divmod(mp, self.files.tp)
        return stage, ep, tp

    def add(
        self, mp: int, ep: int | None, state: str, name: str, tensor: Consolidated, reason: str
    ) -> None:
        """Add a slice made of stored tensors. Raises FormatError where its place has one."""
        place = self.place(mp, None if moe.is_native(name) else ep)
        rank = "" if place[1] is None else f", expert-parallel rank {ep}"
        key = f"{state} of {name} on mp_rank_{mp:02d}{rank}"
        slices = self.states[state, name]
        if place in slices.keys:
            raise FormatError(f"{self.files.folder}: {key} is in two groups of parameters")
        self.importer.slice(key, tensor, reason)
        slices.add(place, key, tensor.layout.shape)

    def add_whole(self, mp: int, state: str, name: str, key: str, shape: Shape) -> None:
        """Add a slice that is a stored tensor."""
        self.states[state, name].add(self.place(mp), key, shape)

    def skip(self, keys: Iterable[str], what: str, reason: str) -> None:
        for key in keys:
            self.importer.skip(key, what, reason)

    # What was added.

    def params(self) -> dict[str, StateSlices]:
        return {name: slices for (state, name), slices in self.states.items() if state == "param"}

    def shapes_on(self, mp: int) -> dict[str, Shape]:
        """The parameters that have a slice on a model-parallel rank, each with its shape."""
        place, params = self.place(mp), self.params()
        return {name: own.shapes[place] for name, own in params.items() if place in own.shapes}

    def key_on(self, mp: int, name: str) -> str | None:
        """The key of a parameter's slice on a model-parallel rank."""
        slices = self.states.get(("param", name))
        return slices.keys.get(self.place(mp)) if slices else None

    def read(self, stored: Stored, value: Any) -> np.ndarray:
        """A number, or a tensor of a file, as an array."""
        if isinstance(value, StoredTensor):
            value = self.importer.shards.read(stored.key(value), Box.whole(value.shape))
        return np.asarray(value)

    # Slices become parameters.

    def apply_spec(self) -> None:
        """Apply the user's rules to every parameter, and to the buffers that they name."""
        if not self.by_spec:
            return
        params: dict[str, list[Shard]] = {}
        for (state, name), slices in self.states.items():
            stage = slices.stages[0]
            places = [(stage, None, tp) for tp in range(self.files.tp)]
            named_buffer = state == "buffer" and self.by_spec.names(name)
            complete = slices.keys.keys() >= set(places)
            if complete and (state == "param" or named_buffer):
                params[name] = [Shard(slices.shapes[place], slices.keys[place]) for place in places]
        self.by_spec.bind(params)

    def make_parameters(self) -> None:
        for (state, name), slices in self.states.items():
            self._make_parameter(state, name, slices)
        copied = [name for name, slices in self.params().items() if slices.stages[1:]]
        if copied:
            self.importer.notes.append(
                f"{', '.join(copied)}: on several pipeline stages, of which the first one's was"
                " taken (what DeepSpeed ties stays in step there, the rest of the copies are"
                " stale)"
            )

    def _make_parameter(self, state: str, name: str, slices: StateSlices) -> None:
        stage, *others = slices.stages
        if others and not self.patterns[stage].stage_copy(name):
            raise FormatError(
                f"{self.files.folder}: {name} is on the pipeline stages {slices.stages}, but is"
                " neither a tied module nor listed in pipeline_replicated_parameter_patterns"
            )
        if slices.values:
            self.add_value(state, name, slices.values[stage])
        if slices.keys:
            layout, keys = self._layout(state, name, stage, slices)
            unowned = FROZEN if any(self.files.ranks) else _UNPROVED
            reasons = {"param": unowned, "buffer": "a buffer"}
            reason = reasons.get(state, f"{state} of {name}")
            self.importer.parameter(state, name, Consolidated(layout, keys), reason)

    def _layout(
        self, state: str, name: str, stage: int, slices: StateSlices
    ) -> tuple[ParamLayout, list[str]]:
        places = slices.on(stage)
        experts = {ep: slices.shapes[stage, ep, tp] for _, ep, tp in places if ep is not None}
        if experts:
            return self._expert_layout(name, stage, slices, experts)
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

    def _expert_layout(
        self, name: str, stage: int, slices: StateSlices, shapes: Mapping[int, Shape]
    ) -> tuple[ParamLayout, list[str]]:
        if self.files.tp > 1:
            raise FormatError(
                f"{self.files.folder}: {name} is cut over both expert- and tensor-parallel ranks,"
                " which is not read"
            )
        layout = moe.expert_layout(name, shapes, self.files.models[stage][0])
        return layout, [slices.keys[stage, ep, 0] for ep in sorted(shapes)]

    def _join(self, state: str, name: str, stage: int, shapes: Sequence[Shape]) -> ParamLayout:
        patterns = self.patterns[stage]
        # DeepSpeed has no patterns for buffers: those that nothing names are taken for copies, and
        # verify compares.
        if state == "buffer" and not patterns.names(name):
            return Replicated().join(shapes)
        return patterns.layout(name, shapes)

    def add_value(self, state: str, name: str, values: Sequence[tuple[Stored, Any]]) -> None:
        """Add a value that every rank has. Raises FormatError, naming the file, if one differs."""
        files, numbers = zip(*values, strict=True)
        if not all(isinstance(number, StoredTensor | bool | int | float) for number in numbers):
            for stored, value in values:
                self.importer.extra(stored.name, f"{state} of {name}", value)
        elif isinstance(numbers[0], StoredTensor):
            self._add_stored_value(state, name, values)
        else:
            number = _agreed(state, files, list(map(_plain_array, numbers)))
            file = f"{files[0].name}:optimizer_state_dict ({state})"
            self.importer.constant(state, name, number, file)

    def _add_stored_value(
        self, state: str, name: str, values: Sequence[tuple[Stored, Any]]
    ) -> None:
        """Add a tensor that every rank has, read once for all parameters that share it."""
        keys = tuple(stored.key(value) for stored, value in values)
        if keys not in self._agreed:
            files, _ = zip(*values, strict=True)
            arrays = list(itertools.starmap(self.read, values))
            self._agreed[keys] = _agreed(state, files, arrays)
        layout = Replicated().join([value.shape for _, value in values])
        reason = f"{state} of every parameter of its group"
        self.importer.parameter(state, name, Consolidated(layout, keys), reason)


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
