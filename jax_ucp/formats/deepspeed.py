"""DeepSpeed checkpoints as its engine writes them: ZeRO stages 0 to 3, tensor and pipeline parallelism, experts.

Two steps, and a view for each. Flat partitions of data-parallel ranks form slices: what one model-parallel rank had in
memory (`deepspeed_zero`). Slices of tensor-parallel ranks (`deepspeed_tp`), of the lowest pipeline stage that has them,
and of expert-parallel ranks (`deepspeed_moe`) form parameters. Masters are the parameters; the module's own tensors are
copies of slices, compared by verify (`deepspeed_modules`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.formats import deepspeed_moe as moe
from jax_ucp.formats.deepspeed_files import Files, Rank, Stored, is_checkpoint, open_files, tag_folder
from jax_ucp.formats.deepspeed_modules import aliases, check_experts, check_layers, layer_names
from jax_ucp.formats.deepspeed_stage0 import names_of_numbers, numbered
from jax_ucp.formats.deepspeed_tp import TensorParallel
from jax_ucp.formats.deepspeed_zero import Group, base_optimizer, group, param_group, param_shapes
from jax_ucp.formats.importing import Import, touched
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_file import StoredTensor, TorchFile
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated, flat_layouts
from jax_ucp.storage.consolidated import Consolidated, same_bits
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.source import Joined

# Model-state entries that are the tensors of the tree, or describe them; everything else there is an extra.
_DESCRIBED = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "buffer_names",
    "shared_params",
)
# Optimizer-state entries that are the tensors of the tree, and those that say how they lie.
_PARTITIONS = ("base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups", "optimizer_state_dict")
_LAYOUT = (
    "group_paddings",
    "partition_count",
    "param_slice_mappings",
    "param_alignment_paddings",
    "zero_stage",
    "ds_zero_partition_groups",
)

_FROZEN = "a parameter that the optimizer does not own (frozen)"
_ASIDE = "left aside, as weights_only asks"


def recognise(path: Path) -> bool:
    return path.is_dir() and is_checkpoint(path)


def open_deepspeed(path: Path, options: Options) -> Contents:
    """The checkpoint in a save directory (with `latest`), or in the folder of one tag.

    Raises FormatError, naming the file, for one that is missing or of another run, and where nothing in the files says
    how their tensors form parameters.
    """
    folder = tag_folder(path) or path
    if not folder.is_dir():
        raise NotACheckpoint(f"{path / 'latest'} names {folder.name}, but there is no such folder beside it")
    return Reader(open_files(folder), options).contents()


# Where a slice was: pipeline stage, expert-parallel rank (None for what is no fused expert), tensor-parallel rank.
_Place = tuple[int, int | None, int]


@dataclass
class _Slices:
    """One state of a parameter, as slices: their keys and shapes by place; or as values of whole groups."""

    keys: dict[_Place, str] = field(default_factory=dict)
    shapes: dict[_Place, Shape] = field(default_factory=dict)
    values: dict[int, list[tuple[Stored, Any]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def stages(self) -> list[int]:
        return sorted({*self.values, *(stage for stage, _, _ in self.keys)})


class Reader:
    """Puts the pieces of one checkpoint together; each method settles one kind of stored thing."""

    def __init__(self, files: Files, options: Options, more: Mapping[str, TorchFile] | None = None):
        self.files, self.options = files, options
        stored = Joined({**{file.name: file.file for file in files.all()}, **(more or {})})
        self.found = Import("deepspeed", files.folder, stored)
        self.slices: dict[tuple[str, str], _Slices] = defaultdict(_Slices)
        self.unowned = _FROZEN if any(files.ranks) else "a parameter, of which the optimizer has no second copy"
        self.agreed: dict[tuple[str, ...], np.ndarray] = {}
        self.patterns = [self._patterns(stage) for stage in range(files.pp)]

    def contents(self) -> Contents:
        if not any(self.files.ranks):
            self._refuse_without_partitions()
        flat: dict[str, dict[str, tuple[int, int]]] = {}
        for mp, ranks in enumerate(self.files.ranks):
            flat |= self._partitions(mp, ranks)
        self._check_mappings(flat)
        owned = [name for state, name in self.slices if state == "param"]
        check_layers(self.files, owned)
        check_experts(self.files)
        for mp in range(len(self.files.models)):
            self._frozen_fragments(mp)
            self._module(mp)
        self._layers()
        self._experts()
        if not any(self.files.ranks) and not self.options.weights_only:
            self._numbered_states()
        names = {name for _, name in self.slices}
        names |= {str(n) for models in self.files.models for n in models[0].state.get("module") or ()}
        for patterns in self.patterns:
            patterns.check_used(names)
        self._parameters()
        self._extras()
        return self.found.contents()

    def _patterns(self, stage: int) -> TensorParallel:
        models = [self.files.models[stage * self.files.tp + tp][0] for tp in range(self.files.tp)]
        infos = [model.state.get("universal_checkpoint_info") for model in models]
        for model, info in zip(models, infos, strict=True):
            if info != infos[0]:
                raise FormatError(
                    f"{model.file.path} has another universal_checkpoint_info than {models[0].name}; "
                    "the files are not of one run"
                )
        return TensorParallel(infos[0], self.files.tp, str(models[0].file.path), self.options.sizes)

    def _refuse_without_partitions(self) -> None:
        first = self.files.models[0][0]
        config = first.state.get("ds_config")
        stage = (config.get("zero_optimization") or {}).get("stage", 0) if isinstance(config, dict) else 0
        if self.files.zero3 or (stage and not self.options.weights_only):
            raise FormatError(
                f"{self.files.folder} has no *_optim_states.pt, but {first.name} was written by ZeRO-{stage}: "
                "masters and optimizer state are missing"
                + ("" if self.files.zero3 else "; open with weights_only for what the model states hold")
            )
        if self.files.layers:
            raise FormatError(
                f"{self.files.folder} has pipeline layers and no *_optim_states.pt: ZeRO-0 does not store which "
                "parameters a pipeline stage has, nor the names of tied ones. Save with ZeRO-1."
            )

    # Slices from partitions.

    def _partitions(self, mp: int, ranks: Sequence[Rank]) -> dict[str, dict[str, tuple[int, int]]]:
        """Slices of one model-parallel rank; (start, length) of each parameter in each file's partition."""
        flat: dict[str, dict[str, tuple[int, int]]] = {rank.name: {} for rank in ranks}
        models = self.files.models[mp]
        groups = param_shapes(models[0], ranks) if ranks else []
        for model in models[1:]:
            if param_shapes(model, ()) != groups:
                raise FormatError(
                    f"{model.file.path} has another param_shapes than {models[0].name}; the files are not of one run"
                )
        for index, shapes in enumerate(groups):
            for ep, team in moe.teams(index, ranks, models):
                part = group(index, shapes, team, self.files.zero3, models[0].name)
                self._flat_states(mp, ep, part)
                self._values(mp, ep, part)
                self._note_dummy_moment(index, part)
                for name, layout in part.layouts.items():
                    for fragment in layout.fragments:
                        mine = flat[team[fragment.shard].name]
                        start, numel = mine.get(name, (fragment.source.start[0], 0))
                        mine[name] = start, numel + fragment.source.size
        return flat

    def _flat_states(self, mp: int, ep: int | None, part: Group) -> None:
        for state, tensors in part.flat.items():
            keys = [rank.key(tensor) for rank, tensor in zip(part.ranks, tensors, strict=True)]
            if state != "param" and self.options.weights_only:
                for key in keys:
                    self.found.skip(key, "state", _ASIDE)
                continue
            for key in keys:
                self.found.skip(key, "padding", "padding alone: the group is shorter than its ranks")
            stored = tuple(tensor.shape for tensor in tensors)
            for local, layout in part.layouts.items():
                tensor = touched(replace(layout, shards=stored), keys)
                self._slice(mp, ep, state, local, part.shapes, tensor, f"{state} of {len(part.shapes)} parameters")

    def _slice(
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
        place = self._place(mp, None if moe.is_native(name) else ep)
        where = f"mp_rank_{mp:02d}" + ("" if place[1] is None else f", expert-parallel rank {ep}")
        key = f"{state} of {name} on {where}"
        if place in self.slices[state, name].keys:
            raise FormatError(f"{self.files.folder}: {key} is in two groups of parameters")
        self.found.slice(key, tensor, reason)
        self.slices[state, name].keys[place] = key
        self.slices[state, name].shapes[place] = tensor.layout.shape

    def _place(self, mp: int, ep: int | None) -> _Place:
        stage, tp = divmod(mp, self.files.tp)
        return stage, ep, tp

    def _values(self, mp: int, ep: int | None, part: Group) -> None:
        """Values that a group has once, such as its step: every parameter of the group gets them."""
        for state, values in part.scalars.items():
            for rank, value in zip(part.ranks, values, strict=True):
                if self.options.weights_only:
                    if isinstance(value, StoredTensor):
                        self.found.skip(rank.key(value), "state", _ASIDE)
                    continue
                for local in part.shapes:
                    name = moe.global_name(local, ep, part.shapes)
                    self.slices[state, name].values[mp // self.files.tp].append((rank, value))

    def _note_dummy_moment(self, index: int, part: Group) -> None:
        hyper = param_group(part.ranks[0], index)
        note = (
            "exp_avg_sq is kept although its group has no eps, without which no Adam divides by it: "
            "CPULion writes such a moment of zeros and never reads it"
        )
        if "exp_avg_sq" in part.flat and "betas" in hyper and "eps" not in hyper and note not in self.found.notes:
            self.found.notes.append(note)

    def _check_mappings(self, flat: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
        """Compare each file's `param_slice_mappings` with the walk over `param_shapes`, and note where they differ.

        Raises FormatError where a file's mappings are those of another rank: it was renamed.
        """
        differ = []
        for rank in [rank for ranks in self.files.ranks for rank in ranks]:
            addresses = {}
            for mapping in rank.state.get("param_slice_mappings") or []:
                addresses |= {str(name): (at.fields["start"], at.fields["numel"]) for name, at in mapping.items()}
            if addresses and addresses != flat[rank.name]:
                if other := next((name for name, mine in flat.items() if mine == addresses), None):
                    who = re.sub(r".*zero_pp_rank_(\d+)_mp_rank_(\d+)_.*", r"\1", other)
                    raise FormatError(
                        f"{rank.file.path} holds what rank {who} should hold ({other}), by its own "
                        "param_slice_mappings: the file was renamed, or belongs to another run"
                    )
                differ.append(rank.name)
        if differ:
            self.found.notes.append(
                f"param_slice_mappings of {', '.join(differ)} describe another order than the flat buffers have "
                "(DeepSpeed writes them so under round_robin_gradients); the order of param_shapes was used"
            )

    # What the module holds.

    def _module(self, mp: int) -> None:
        for model in self.files.models[mp]:
            module = {n: t for n, t in (model.state.get("module") or {}).items() if isinstance(t, StoredTensor)}
            buffers = set(map(str, model.state.get("buffer_names") or ()))
            shared = {
                str(alias): str(owner)
                for other in self.files.models
                for alias, owner in (other[0].state.get("shared_params") or {}).items()
            }
            held = self._masters(mp)
            shared |= moe.router_aliases(module, held, model)
            alias = aliases(module, held - buffers, shared)
            for name, tensor in sorted(module.items(), key=lambda item: item[0] in alias):  # owners first
                key = model.key(tensor)
                if self.files.zero3 and name not in buffers:
                    self.found.skip(key, "placeholder", "ZeRO-3 empties the module; the values are in the partitions")
                elif name in buffers:
                    self._buffer(mp, name, key, tensor)
                else:
                    self._module_tensor(mp, name, alias.get(name) or name, key, tensor)

    def _masters(self, mp: int) -> set[str]:
        return {name for state, name in self.slices if state == "param" and self._held(mp, name)}

    def _held(self, mp: int, name: str) -> str | None:
        found = self.slices.get(("param", name))
        return found.keys.get(self._place(mp, None)) if found else None

    def _buffer(self, mp: int, name: str, key: str, tensor: StoredTensor) -> None:
        found = self.slices["buffer", name]
        if self._place(mp, None) in found.keys:
            self.found.skip(key, "buffer", "the buffer of another data-parallel rank; that of rank 0 is used")
        else:
            found.keys[self._place(mp, None)] = key
            found.shapes[self._place(mp, None)] = tensor.shape

    def _module_tensor(self, mp: int, name: str, owner: str, key: str, tensor: StoredTensor) -> None:
        whole = self._held(mp, owner)
        if whole == key:
            return
        if whole is not None:
            tied = "" if owner == name else f"tied to {owner}: "
            reason = f"{tied}a copy of {owner}'s master in {tensor.dtype}, compared with it by verify"
            self.found.slice_twin(whole, key, reason)
        else:
            self.slices["param", name].keys[self._place(mp, None)] = key
            self.slices["param", name].shapes[self._place(mp, None)] = tensor.shape

    def _frozen_fragments(self, mp: int) -> None:
        """Frozen parameters: whole beside the module at stage 2, and at stage 3 only here, cut over the ranks."""
        models = self.files.models[mp]
        shapes = models[0].state.get("frozen_param_shapes") or {}
        for name, tensor in (models[0].state.get("frozen_param_fragments") or {}).items():
            pieces: list[StoredTensor] = []
            for model in models:
                piece = (model.state.get("frozen_param_fragments") or {}).get(name)
                if not isinstance(piece, StoredTensor):
                    raise FormatError(
                        f"{model.file.path} has no fragment of the frozen {name}, but {models[0].name} has"
                    )
                pieces.append(piece)
            keys = [model.key(piece) for model, piece in zip(models, pieces, strict=True)]
            if not self.files.zero3:
                self.slices["param", name].keys[self._place(mp, None)] = keys[0]
                self.slices["param", name].shapes[self._place(mp, None)] = tensor.shape
                continue
            shape = tuple(map(int, shapes[name]))
            layout = flat_layouts({name: shape}, [piece.shape[0] for piece in pieces])[name]
            self._slice(mp, None, "param", name, {name: shape}, touched(layout, keys), _FROZEN)

    def _layers(self) -> None:
        """Files of pipeline layers; which stage had one does not matter, for tied layers are in that of the lowest."""
        for (layer, tp), stored in self.files.layers.items():
            tensors = {n: t for n, t in stored.state.items() if isinstance(t, StoredTensor)}
            shapes = {n: t.shape for n, t in tensors.items()}
            mine = {
                name: (mp * self.files.tp + tp, found.shapes[mp, None, tp])
                for (state, name), found in self.slices.items()
                for mp in found.stages[:1]
                if state == "param" and (mp, None, tp) in found.shapes
            }
            buffers = {str(n) for models in self.files.models for n in models[0].state.get("buffer_names") or ()}
            for local, name in layer_names(layer, shapes, {n: shape for n, (_, shape) in mine.items()}).items():
                key = stored.key(tensors[local])
                if name is None:
                    self.found.skip(key, "copy", "tied: several tied parameters have its name and shape")
                elif name in buffers:
                    self._buffer(tp, name, key, tensors[local])
                else:
                    self._module_tensor(mine.get(name, (tp, ()))[0], name, name, key, tensors[local])

    def _experts(self) -> None:
        """Files of single experts, by global number."""
        for (_, _, mp), stored in self.files.experts.items():
            for name, tensor in stored.state.items():
                if not isinstance(tensor, StoredTensor):
                    continue
                fused, _, number = name.rpartition(".")
                slices = self.slices.get(("param", fused))
                if slices is None or not number.isdigit():
                    self._module_tensor(mp, name, name, stored.key(tensor), tensor)
                    continue
                for ep, experts in moe.placement(fused, self.files.models[mp][0]).items():
                    key = slices.keys.get(self._place(mp, ep))
                    if int(number) in experts and key:
                        reason = f"a copy of an expert of {fused}, compared with it by verify"
                        self.found.slice_twin(key, stored.key(tensor), reason, at=(experts.index(int(number)),))

    # ZeRO-0.

    def _numbered_states(self) -> None:
        """Optimizer states by number: dense ones are the same on all expert-parallel ranks, experts each one's own."""
        for mp, models in enumerate(self.files.models):
            expp = {ep: stored for (ep, rank), stored in self.files.expert_optimizers.items() if rank == mp}
            for ep, stored in [*sorted(expp.items()), (0, models[0])]:
                if stored.state.get("optimizer") is not None:
                    self._numbered(mp, ep, len(expp), stored)

    def _numbered(self, mp: int, ep: int, ranks: int, stored: Stored) -> None:
        where = str(stored.file.path)
        states, groups = numbered(stored.state["optimizer"], where)
        here = self._place(mp, None)
        shapes = {n: f.shapes[here] for (s, n), f in self.slices.items() if s == "param" and here in f.shapes}
        numbers: dict[int, str] = {}
        for experts in (False, True):
            mine = {
                n: shape
                for n, shape in shapes.items()
                if moe.expert_rank(n, shapes, max(1, ranks)) in ((ep,) if experts else (None,))
            }
            some = [g for g in groups if bool(g.get("moe")) == experts]
            numbers |= names_of_numbers(mine, states, some, where)
        note = "ZeRO-0 stores optimizer states without names; they were told by shape and by the order of the module"
        if note not in self.found.notes and not all("param_names" in g for g in groups):
            self.found.notes.append(note)
        for number, name in numbers.items():
            for state, value in states.get(number, {}).items():
                found = self.slices[state, name]
                if not isinstance(value, StoredTensor) or value.shape != shapes[name]:
                    found.values[here[0]].append((stored, value))
                elif here in found.keys:
                    reason = "the same state on another expert-parallel rank, compared by verify"
                    self.found.slice_twin(found.keys[here], stored.key(value), reason)
                else:
                    found.keys[here], found.shapes[here] = stored.key(value), value.shape

    # Parameters from slices.

    def _parameters(self) -> None:
        copies = []
        for (state, name), slices in self.slices.items():
            stage, *others = slices.stages
            if others and not self.patterns[stage].stage_copy(name):
                raise FormatError(
                    f"{self.files.folder}: {name} is on the pipeline stages {slices.stages}, but is neither a tied "
                    "module nor listed in pipeline_replicated_parameter_patterns"
                )
            copies += [name] if others and state == "param" else []
            if slices.values:
                self._value(state, name, slices.values[stage])
            if slices.keys:
                layout, keys = self._layout(state, name, stage, slices)
                reason = f"{state} of {name}" if state != "param" else self.unowned
                self.found.parameter(
                    state, name, Consolidated(layout, keys), "a buffer" if state == "buffer" else reason
                )
        if copies:
            self.found.notes.append(
                f"{', '.join(copies)}: on several pipeline stages, of which the first one's was taken "
                "(what DeepSpeed ties stays in step there, the rest of the copies are stale)"
            )

    def _layout(self, state: str, name: str, stage: int, slices: _Slices) -> tuple[ParamLayout, list[str]]:
        here = {place[1:]: key for place, key in slices.keys.items() if place[0] == stage}
        shapes = {at: slices.shapes[stage, *at] for at in here}
        fused = {ep: shape for (ep, _), shape in shapes.items() if ep is not None}
        if fused and self.files.tp > 1:
            raise FormatError(f"{self.files.folder}: {name} is cut over both expert- and tensor-parallel ranks")
        if fused:
            layout = moe.expert_layout(name, fused, self.files.models[stage][0])
            return layout, [here[ep, 0] for ep in sorted(fused)]
        order = [(None, tp) for tp in range(self.files.tp)]
        if sorted(here) != order:
            raise FormatError(
                f"{self.files.folder}: {state} of {name} is on the tensor-parallel ranks "
                f"{[tp for _, tp in sorted(here)]} of {self.files.tp}"
            )
        patterns = self.patterns[stage]
        cut = [shapes[at] for at in order]
        # DeepSpeed has no patterns for buffers: those that nothing names are taken for copies, and verify compares.
        free = state == "buffer" and not patterns.says(name)
        return (Replicated().join(cut) if free else patterns.layout(name, cut)), [here[at] for at in order]

    def _value(self, state: str, name: str, values: Sequence[tuple[Stored, Any]]) -> None:
        """A value that every rank has alike. Raises FormatError, naming the file, where one has another."""
        first = values[0]
        if isinstance(first[1], StoredTensor):
            keys = tuple(stored.key(value) for stored, value in values)
            if keys not in self.agreed:
                read = [
                    self.found.shards.read(key, Box.whole(v.shape)) for key, (_, v) in zip(keys, values, strict=True)
                ]
                self.agreed[keys] = _agreed(state, [stored for stored, _ in values], read)
            layout = Replicated().join([value.shape for _, value in values])
            self.found.parameter(state, name, Consolidated(layout, keys), f"{state} of every parameter of its group")
        else:
            # A Python int has no dtype; optax counts in int32.
            read = [np.asarray(value, np.int32 if isinstance(value, int) else None) for _, value in values]
            value = _agreed(state, [stored for stored, _ in values], read)
            self.found.constant(state, name, value, f"{first[0].name}:optimizer_state_dict ({state})")

    # The rest.

    def _extras(self) -> None:
        """Everything else, by file: schedulers, counters, client state, loss scaler, hyper-parameters."""
        for model in [model for models in self.files.models for model in models]:
            for name, value in model.state.items():
                if name == "optimizer" and isinstance(value, dict):
                    self._optimizer_extras(model, value)
                elif name not in _DESCRIBED:
                    self.found.extra(model.name, name, value)
                elif name != "module":
                    what = "says which tensor is which; its content is in the tree's names and shapes"
                    self.found.skip(f"{model.name}:{name}", "layout", what)
        for stored in self.files.expert_optimizers.values():
            self._optimizer_extras(stored, stored.state.get("optimizer") or {})
        for rank in [rank for ranks in self.files.ranks for rank in ranks]:
            top = rank.file.tree if isinstance(rank.file.tree, dict) else {}
            base = base_optimizer(rank)
            groups = {"param_groups": base["param_groups"]} if isinstance(base, dict) and "param_groups" in base else {}
            for name, value in {**top, **rank.state, **groups}.items():
                if name in _LAYOUT:
                    what = "says how partitions lie; consolidated parameters have no such thing"
                    self.found.skip(f"{rank.name}:{name}", "layout", what)
                elif name not in _PARTITIONS:
                    self.found.extra(rank.name, name, value)

    def _optimizer_extras(self, stored: Stored, optimizer: Mapping[str, Any]) -> None:
        for name, value in optimizer.items():
            if name != "state":
                self.found.extra(stored.name, f"optimizer/{name}", value)
        if self.options.weights_only:
            for key in self.found.stored:
                if key.startswith(f"{stored.name}:optimizer/"):
                    self.found.skip(key, "state", _ASIDE)


def _agreed(state: str, files: Sequence[Stored], values: Sequence[np.ndarray]) -> np.ndarray:
    for stored, value in zip(files, values, strict=True):
        if not same_bits(np.asarray(value), np.asarray(values[0])):
            raise FormatError(
                f"{stored.file.path}: {state} is {value}, but {values[0]} in {files[0].name}; "
                "the files are not of one step"
            )
    return values[0]
