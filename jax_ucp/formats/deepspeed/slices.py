"""Slices: what each model-parallel rank of a DeepSpeed run had in memory.

Flat partitions of data-parallel ranks form slices (`partitions`), slices form parameters
(`parameters`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import Files, Stored
from jax_ucp.formats.options import Options
from jax_ucp.layout.fragments import Shape
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.protocol import ArraySource

ASIDE = "left aside, as weights_only asks"
FROZEN = "a parameter that the optimizer does not own (frozen)"

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
    """The slices of one checkpoint, by state and name.

    `importer` is told what each stored tensor is; `more` are files beside those of the engine.
    """

    def __init__(
        self, files: Files, options: Options, more: Mapping[str, ArraySource] | None = None
    ):
        self.files, self.options = files, options
        own_files = {file.name: file.file for file in files.all()}
        stored = Combined.of_files({**own_files, **(more or {})})
        self.importer = Import("deepspeed", files.folder, stored, options.on_conflict)
        for file in own_files.values():
            self.importer.unknown.update(file.unknown)
        self.states: dict[tuple[str, str], StateSlices] = defaultdict(StateSlices)

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
