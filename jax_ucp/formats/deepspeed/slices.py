"""Slices: the tensors that each model-parallel rank of a DeepSpeed run had in memory.

Flat partitions of data-parallel ranks form slices (`partitions`), slices form parameters
(`parameters`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.protocol import ArraySource
from jax_ucp.arrays.value import Array, items_of, joined
from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import StateFile, TagFiles
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.options import Options

ASIDE = "left aside, as weights_only asks"
FROZEN = "a parameter that the optimizer does not own (frozen)"

# Where a slice was: pipeline stage, expert-parallel rank (None of all but fused experts),
# tensor-parallel rank.
Place = tuple[int, int | None, int]

# A value that every rank has, with the file that has it.
FileValue = tuple[StateFile, Any]


@dataclass
class StateSlices:
    """A state's slices by place, or a group's values by stage.

    `stored` are the places whose slice is a stored tensor that the inventory does not count yet.
    """

    arrays: dict[Place, Array] = field(default_factory=dict)
    stored: set[Place] = field(default_factory=set)
    values: dict[int, list[FileValue]] = field(default_factory=lambda: defaultdict(list))

    @property
    def stages(self) -> list[int]:
        return sorted({*self.values, *(stage for stage, _, _ in self.arrays)})


class Slices:
    """The slices of a checkpoint, by state and name. `builder` collects the inventory.

    `more` are files beside those of the engine.
    """

    def __init__(
        self, files: TagFiles, options: Options, more: Mapping[str, ArraySource] | None = None
    ):
        self.files, self.options = files, options
        own_files = {file.name: file.file for file in files.all()}
        stored = Combined.of_files({**own_files, **(more or {})})
        self.builder = ContentsBuilder("deepspeed", files.folder, stored, options.on_conflict)
        for file in own_files.values():
            self.builder.unknown.update(file.unknown)
        self.states: dict[tuple[str, str], StateSlices] = defaultdict(StateSlices)

    def place(self, mp: int, ep: int | None = None) -> Place:
        stage, tp = divmod(mp, self.files.tp)
        return stage, ep, tp

    def add(
        self,
        place: Place,
        state: str,
        name: str,
        layout: ParamLayout | None,
        inputs: Sequence[Array],
    ) -> None:
        """Add a slice of inputs by a layout, or one input. Raises FormatError for a second one."""
        stage, ep, tp = place
        if ep is not None and moe.expert_number(name):
            place = stage, None, tp
        slices, label = self.states[state, name], self._label(state, name, place)
        if place in slices.arrays:
            raise FormatError(f"{self.files.folder}: {label} is in two groups of parameters")
        slices.arrays[place] = inputs[0] if layout is None else joined(label, layout, inputs)

    def add_whole(self, mp: int, state: str, name: str, key: str) -> None:
        slices, place = self.states[state, name], self.place(mp)
        slices.arrays[place] = self.builder.array(key)
        slices.stored.add(place)

    def take(self, place: Place, state: str, name: str) -> Array:
        """Remove a slice and return it; another one is to take its place."""
        slices = self.states[state, name]
        slices.stored.discard(place)
        return slices.arrays.pop(place)

    def skip(self, keys: Iterable[str], what: str, reason: str) -> None:
        for key in keys:
            self.builder.skip(key, what, reason)

    def params(self) -> dict[str, StateSlices]:
        return {name: slices for (state, name), slices in self.states.items() if state == "param"}

    def shapes_on(self, mp: int) -> dict[str, Shape]:
        """The shape of each parameter's slice on a model-parallel rank, if it has one there."""
        place, params = self.place(mp), self.params()
        return {
            name: own.arrays[place].info.shape
            for name, own in params.items()
            if place in own.arrays
        }

    def array_on(self, place: Place, state: str, name: str) -> Array | None:
        slices = self.states.get((state, name))
        return slices.arrays.get(place) if slices else None

    def compare(
        self,
        place: Place,
        state: str,
        name: str,
        copy: Array,
        reason: str = "",
        at: Sequence[int] = (),
        cause: str = "",
    ) -> None:
        """Record that an array is a copy of a slice, or of its item `at`, for `verify`."""
        whole = self.states[state, name].arrays[place]
        label = self.label(place, state, name)
        self.builder.slice_duplicate(whole, label, copy, reason, at, cause)

    def label(self, place: Place, state: str, name: str) -> str:
        """The name of a slice in messages; a stored tensor goes by its own name."""
        slices = self.states[state, name]
        if place in slices.stored:
            return next(items_of(slices.arrays[place]))
        return self._label(state, name, place)

    def _label(self, state: str, name: str, place: Place) -> str:
        stage, ep, tp = place
        expert = "" if ep is None else f", expert-parallel rank {ep}"
        return f"{state} of {name} on mp_rank_{stage * self.files.tp + tp:02d}{expert}"
