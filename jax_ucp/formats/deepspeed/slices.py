"""Slices: what each model-parallel rank of a DeepSpeed run had in memory, and the parameters that
slices form.

Flat partitions of data-parallel ranks form slices (`deepspeed_zero`). Slices of tensor-parallel
ranks (`deepspeed_tp`), of the lowest pipeline stage that has them, and of expert-parallel ranks
(`deepspeed_moe`) form parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import Import, touched
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.files import Files, Rank, Stored
from jax_ucp.formats.deepspeed.tensor_parallel import BySpec, TensorParallel
from jax_ucp.formats.deepspeed.zero import Group, group, param_group, param_shapes
from jax_ucp.formats.listing import listed
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.file import StoredTensor, TorchFile
from jax_ucp.formats.torch_save.unpickle import Opaque
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated
from jax_ucp.shard_spec.rules import Shard
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated, same_bits

ASIDE = "left aside, as weights_only asks"
FROZEN = "a parameter that the optimizer does not own (frozen)"

# Where a slice was: pipeline stage, expert-parallel rank (None for what is no fused expert),
# tensor-parallel rank.
Place = tuple[int, int | None, int]


@dataclass
class StateSlices:
    """One state of a parameter, as slices: their keys and shapes by place; or as values of whole
    groups.
    """

    keys: dict[Place, str] = field(default_factory=dict)
    shapes: dict[Place, Shape] = field(default_factory=dict)
    values: dict[int, list[tuple[Stored, Any]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def stages(self) -> list[int]:
        return sorted({*self.values, *(stage for stage, _, _ in self.keys)})

    def on(self, stage: int) -> list[Place]:
        return [place for place in self.keys if place[0] == stage]


class Slices:
    """The slices of one checkpoint, by state, name and place; methods add them, and then make
    parameters of them.
    """

    def __init__(self, files: Files, options: Options, more: Mapping[str, TorchFile] | None = None):
        self.files, self.options = files, options
        stored = Combined.of_files(
            {**{file.name: file.file for file in files.all()}, **(more or {})}
        )
        self.found = Import("deepspeed", files.folder, stored, options.on_conflict)
        self.found.unknown |= {name for file in files.all() for name in file.file.unknown}
        self.slices: dict[tuple[str, str], StateSlices] = defaultdict(StateSlices)
        self.unowned = (
            FROZEN if any(files.ranks) else "a parameter, of which the optimizer has no second copy"
        )
        self.copied: set[str] = set()
        self.agreed: dict[tuple[str, ...], np.ndarray] = {}
        self.by_spec = BySpec(options.spec, options.sizes) if options.spec else None
        self.patterns = [self.by_spec or self._patterns(stage) for stage in range(files.pp)]

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

    def add_partitions(
        self, mp: int, ranks: Sequence[Rank]
    ) -> dict[str, dict[str, tuple[int, int]]]:
        """Slices of one model-parallel rank; (start, length) of each parameter in each file's
        partition.
        """
        flat: dict[str, dict[str, tuple[int, int]]] = {rank.name: {} for rank in ranks}
        models = self.files.models[mp]
        groups = param_shapes(models[0], ranks) if ranks else []
        if self.options.weights_only:
            self._leave(ranks)
        for model in models[1:]:
            if param_shapes(model, ()) != groups:
                raise FormatError(
                    f"{model.file.path} has another param_shapes than {models[0].name}; the files"
                    " are not of one run"
                )
        for index, shapes in enumerate(groups):
            for ep, team in moe.teams(index, ranks, models):
                part = group(
                    index, shapes, team, self.files.zero3, models[0].name, self.options.weights_only
                )
                self._add_group(mp, ep, index, part)
                _add_addresses(flat, part)
        return flat

    def _leave(self, ranks: Sequence[Rank]) -> None:
        """Say of all tensors that they are left aside; those of the masters are mapped later."""
        for rank in ranks:
            for key in rank.file.arrays():
                self.found.leave(f"{rank.name}:{key}", "state", ASIDE)

    def _add_group(self, mp: int, ep: int | None, index: int, part: Group) -> None:
        hyper = param_group(part.ranks[0], index)
        if not self.options.weights_only:
            for name in part.layouts:
                self.found.hyperparameters(moe.global_name(name, ep, part.shapes), hyper)
        self._flat_states(mp, ep, part, hyper)
        self._values(mp, ep, index, part)

    def _flat_states(self, mp: int, ep: int | None, part: Group, hyper: Mapping[str, Any]) -> None:
        # States whose partitions have the same lengths share layouts, which are checked once then.
        layouts: dict[tuple[Shape, ...], dict[str, tuple[ParamLayout, list[int]]]] = {}
        for state, tensors in part.flat.items():
            keys = [rank.key(tensor) for rank, tensor in zip(part.ranks, tensors, strict=True)]
            # No Adam divides by a second moment without an eps.
            if state == "exp_avg_sq" and "betas" in hyper and "eps" not in hyper:
                why = "Lion has one moment; CPULion writes a second one and never reads it"
                self._skip(keys, "state", why)
                continue
            self._skip(keys, "padding", "padding alone: the group is shorter than its ranks")
            stored = tuple(tensor.shape for tensor in tensors)
            if stored not in layouts:
                layouts[stored] = _touched_layouts(part, stored)
            reason = f"{state} of {len(part.shapes)} parameters"
            for local, (layout, used) in layouts[stored].items():
                tensor = Consolidated(layout, [keys[i] for i in used])
                self.add(mp, ep, state, local, part.shapes, tensor, reason)

    def _skip(self, keys: Iterable[str], what: str, reason: str) -> None:
        for key in keys:
            self.found.skip(key, what, reason)

    def add(
        self,
        mp: int,
        ep: int | None,
        state: str,
        local: str,
        group: Mapping[str, Shape],
        tensor: Consolidated,
        reason: str,
    ) -> None:
        name = moe.global_name(local, ep, group)
        place = self.place(mp, None if moe.is_native(name) else ep)
        where = f"mp_rank_{mp:02d}" + ("" if place[1] is None else f", expert-parallel rank {ep}")
        key = f"{state} of {name} on {where}"
        if place in self.slices[state, name].keys:
            raise FormatError(f"{self.files.folder}: {key} is in two groups of parameters")
        self.found.slice(key, tensor, reason)
        self.slices[state, name].keys[place] = key
        self.slices[state, name].shapes[place] = tensor.layout.shape

    def place(self, mp: int, ep: int | None) -> Place:
        stage, tp = divmod(mp, self.files.tp)
        return stage, ep, tp

    def _values(self, mp: int, ep: int | None, index: int, part: Group) -> None:
        """Values that a group has once, such as its step: every parameter of the group gets
        them, if ranks agree.
        """
        for state, (values, why) in part.aside.items():
            self._keep_aside(index, part, state, values, why)
        for state, values in part.scalars.items():
            if state != "step" and self._differ(part.ranks, values):
                self._keep_aside(
                    index,
                    part,
                    state,
                    values,
                    "each rank has its own, so that it is of its partition",
                )
                continue
            for local in part.shapes:
                name = moe.global_name(local, ep, part.shapes)
                self.slices[state, name].values[mp // self.files.tp] += zip(
                    part.ranks, values, strict=True
                )

    def _differ(self, ranks: Sequence[Rank], values: Sequence[Any]) -> bool:
        first, *others = map(self._read, ranks, values)
        return not all(same_bits(first, other) for other in others)

    def _read(self, file: Stored, value: Any) -> np.ndarray:
        """A number, or a stored tensor, as an array."""
        if isinstance(value, StoredTensor):
            value = self.found.shards.read(file.key(value), Box.whole(value.shape))
        return np.asarray(value)

    def _keep_aside(
        self, index: int, part: Group, state: str, values: Sequence[Any], why: str
    ) -> None:
        """Keep what an optimizer has of a group, but not of its parameters, as each rank has it."""
        for rank, value in zip(part.ranks, values, strict=True):
            self.found.extra(rank.name, f"{state} of group {index}", value)
        names = listed([*part.shapes], 1)
        self.found.notes.append(
            f"the optimizer's {state} of group {index} ({names}) is no state of a parameter here,"
            f" but an extra of each rank's file: {why}"
        )

    def check_mappings(self, flat: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
        """Compare each file's `param_slice_mappings` with the walk over `param_shapes`, and note
        where they differ.

        Raises FormatError where a file's mappings are those of another rank: it was renamed.
        """
        differ: list[str] = []
        for rank in self.files.all_ranks:
            addresses = _addresses(rank.state.get("param_slice_mappings") or [])
            if addresses is None:
                self.found.notes.append(
                    f"param_slice_mappings of {rank.name} were not compared: they are of a class"
                    " that is not known here"
                )
            elif addresses and addresses != flat[rank.name]:
                _check_not_renamed(rank, addresses, flat)
                differ.append(rank.name)
        if differ:
            self.found.notes.append(
                f"param_slice_mappings of {', '.join(differ)} describe another order than the flat"
                " buffers have (DeepSpeed writes them so under round_robin_gradients); the order"
                " of param_shapes was used"
            )

    def apply_spec(self) -> None:
        """The user's rules, applied to every parameter, and to the buffers that they name."""
        if not self.by_spec:
            return
        params: dict[str, list[Shard]] = {}
        for (state, name), slices in self.slices.items():
            stage = slices.stages[0]
            places = [(stage, None, tp) for tp in range(self.files.tp)]
            named = state == "param" or (state == "buffer" and self.by_spec.says(name))
            if named and slices.keys.keys() >= set(places):
                params[name] = [Shard(slices.shapes[place], slices.keys[place]) for place in places]
        self.by_spec.bind(params)

    def make_parameters(self) -> None:
        for (state, name), slices in self.slices.items():
            self._make_parameter(state, name, slices)
        copies = [
            name
            for (state, name), slices in self.slices.items()
            if state == "param" and slices.stages[1:]
        ]
        if copies:
            self.found.notes.append(
                f"{', '.join(copies)}: on several pipeline stages, of which the first one's was"
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
            self.value(state, name, slices.values[stage])
        if slices.keys:
            layout, keys = self._layout(state, name, stage, slices)
            reason = {"param": self.unowned, "buffer": "a buffer"}.get(state, f"{state} of {name}")
            self.found.parameter(state, name, Consolidated(layout, keys), reason)

    def _layout(
        self, state: str, name: str, stage: int, slices: StateSlices
    ) -> tuple[ParamLayout, list[str]]:
        here = slices.on(stage)
        experts = {ep: slices.shapes[stage, ep, tp] for _, ep, tp in here if ep is not None}
        if experts:
            return self._expert_layout(name, stage, slices, experts)
        ranks = sorted(tp for _, _, tp in here)
        if ranks != list(range(self.files.tp)):
            raise FormatError(
                f"{self.files.folder}: {state} of {name} is on the tensor-parallel ranks {ranks} of"
                f" {self.files.tp}: the files of the others lack it, and are of another run, or"
                " were exchanged"
            )
        here.sort(key=lambda place: place[2])
        shapes = [slices.shapes[place] for place in here]
        return self._join(state, name, stage, shapes), [slices.keys[place] for place in here]

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
        if state == "buffer" and not patterns.says(name):
            return Replicated().join(shapes)
        return patterns.layout(name, shapes)

    def value(self, state: str, name: str, values: Sequence[tuple[Stored, Any]]) -> None:
        """A value that every rank has alike. Raises FormatError, naming the file, where one has
        another.
        """
        if not all(isinstance(value, StoredTensor | bool | int | float) for _, value in values):
            for stored, value in values:
                self.found.extra(stored.name, f"{state} of {name}", value)
            return
        file, first = values[0]
        if isinstance(first, StoredTensor):
            self._stored_value(state, name, values)
            return
        # A Python int has no dtype; optax counts in int32.
        numbers = [
            np.asarray(value, np.int32 if isinstance(value, int) else None) for _, value in values
        ]
        value = _agreed(state, [stored for stored, _ in values], numbers)
        self.found.constant(state, name, value, f"{file.name}:optimizer_state_dict ({state})")

    def _stored_value(self, state: str, name: str, values: Sequence[tuple[Stored, Any]]) -> None:
        """A value that every rank has in a tensor. It is read once for all parameters that share
        the tensors.
        """
        keys = tuple(stored.key(value) for stored, value in values)
        if keys not in self.agreed:
            arrays = [self._read(stored, value) for stored, value in values]
            self.agreed[keys] = _agreed(state, [stored for stored, _ in values], arrays)
        layout = Replicated().join([value.shape for _, value in values])
        self.found.parameter(
            state, name, Consolidated(layout, keys), f"{state} of every parameter of its group"
        )


def _touched_layouts(
    part: Group, stored: tuple[Shape, ...]
) -> dict[str, tuple[ParamLayout, list[int]]]:
    """How each parameter of a group lies in partitions of these shapes, and in which of them."""
    return {
        local: touched(replace(layout, shards=stored)) for local, layout in part.layouts.items()
    }


def _add_addresses(flat: Mapping[str, dict[str, tuple[int, int]]], part: Group) -> None:
    """Add where the parameters of a group lie in each file's partition."""
    for name, layout in part.layouts.items():
        for fragment in layout.fragments:
            addresses = flat[part.ranks[fragment.shard].name]
            start, numel = addresses.get(name, (fragment.source.start[0], 0))
            addresses[name] = start, numel + fragment.source.size


def _check_not_renamed(
    rank: Rank, addresses: object, flat: Mapping[str, Mapping[str, tuple[int, int]]]
) -> None:
    """Raise FormatError where the addresses that a file says are those of another rank."""
    for other, others_addresses in flat.items():
        if others_addresses == addresses:
            number = re.sub(r".*zero_pp_rank_(\d+)_mp_rank_(\d+)_.*", r"\1", other)
            raise FormatError(
                f"{rank.file.path} holds what rank {number} should hold ({other}), by its own "
                "param_slice_mappings: the file was renamed, or belongs to another run"
            )


def _addresses(mappings: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]] | None:
    """(start, length) of each parameter in a rank's partition; None where their class is not
    known here.
    """
    places = {str(name): at for mapping in mappings for name, at in mapping.items()}
    if any(isinstance(at, Opaque) for at in places.values()):
        return None
    return {name: (at.fields["start"], at.fields["numel"]) for name, at in places.items()}


def _agreed(state: str, files: Sequence[Stored], values: Sequence[np.ndarray]) -> np.ndarray:
    for stored, value in zip(files, values, strict=True):
        if not same_bits(value, values[0]):
            why = "the files are not of one step"
            if state != "step":
                why += (
                    ", or it is a number that each rank has for itself; weights_only leaves the"
                    " optimizer aside"
                )
            raise FormatError(
                f"{stored.file.path}: {state} is {value}, but {values[0]} in {files[0].name}; {why}"
            )
    return values[0]
