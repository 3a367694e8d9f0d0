"""DeepSpeed checkpoints as its engine writes them: ZeRO stages 0 to 3, tensor and pipeline
parallelism, experts.

Two steps, and a view for each: stored partitions form slices, and slices form parameters
(`deepspeed_slices`). Masters are the parameters; the module's own tensors are copies of slices,
compared by verify (`deepspeed_modules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import touched
from jax_ucp.formats.deepspeed import moe
from jax_ucp.formats.deepspeed.facts import check_facts
from jax_ucp.formats.deepspeed.files import (
    Files,
    Rank,
    Stored,
    is_checkpoint,
    open_files,
    tag_folder,
)
from jax_ucp.formats.deepspeed.modules import (
    aliases,
    check_copies,
    check_expert,
    check_experts,
    check_layers,
    layer_names,
)
from jax_ucp.formats.deepspeed.slices import ASIDE, FROZEN, Slices
from jax_ucp.formats.deepspeed.stage0 import add_numbered_states, unwrapped
from jax_ucp.formats.deepspeed.zero import base_optimizer, group, param_shapes
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.file import StoredTensor
from jax_ucp.formats.torch_save.opaque import closed_tensors, tensor_holders
from jax_ucp.formats.torch_save.unpickle import known
from jax_ucp.layout.fragments import Shape
from jax_ucp.layout.patterns import flat_layouts
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import Contents

# Model-state entries that are the tensors of the tree, or describe them; everything else there is
# an extra.
_DESCRIBED = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "buffer_names",
    "shared_params",
)
# Optimizer-state entries that are the tensors of the tree, and those that say how they lie.
_PARTITIONS = (
    "base_optimizer_state",
    "single_partition_of_fp32_groups",
    "fp32_flat_groups",
    "optimizer_state_dict",
)
_LAYOUT = (
    "group_paddings",
    "partition_count",
    "param_slice_mappings",
    "param_alignment_paddings",
    "zero_stage",
    "ds_zero_partition_groups",
)


def recognise(path: FilePath) -> bool:
    return path.is_dir() and is_checkpoint(path)


def open_deepspeed(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a save directory (with `latest`), or in the folder of one tag.

    Raises FormatError, naming the file, for one that is missing or of another run, and where
    nothing in the files says how their tensors form parameters.
    """
    folder = tag_folder(path) or path
    if not folder.is_dir():
        raise NotACheckpoint(
            f"{path / 'latest'} names {folder.name}, but there is no such folder beside it"
        )
    files = open_files(folder, options.weights_only)
    if options.weights_only:
        files = _with_usable_masters(files)
    check_facts(files, options.weights_only)
    return Reader(files, options).contents()


def _with_usable_masters(files: Files) -> Files:
    """The files without those of the optimizer, if the masters in them do not fit the model:
    weights do not need them.

    Raises FormatError under ZeRO-3, which keeps the weights nowhere else.
    """
    try:
        for models, ranks in zip(files.models, files.ranks, strict=True):
            for index, shapes in enumerate(param_shapes(models[0], ranks) if ranks else ()):
                for _, team in moe.teams(index, ranks, models):
                    group(index, shapes, team, files.zero3, models[0].name, weights_only=True)
        check_facts(files, weights_only=True)
    except FormatError as error:
        if files.zero3:
            raise
        return replace(files, ranks=[[] for _ in files.ranks], unusable=str(error))
    return files


class Reader(Slices):
    """Puts the pieces of one checkpoint together; each method settles one kind of stored thing."""

    def contents(self) -> Contents:
        if not any(self.files.ranks):
            self._refuse_without_partitions()
        flat: dict[str, dict[str, tuple[int, int]]] = {}
        for mp, ranks in enumerate(self.files.ranks):
            flat |= self.add_partitions(mp, ranks)
        self.check_mappings(flat)
        self._copies()
        numbered = not any(self.files.ranks) and not self.options.weights_only
        if numbered:
            add_numbered_states(self)
        self.apply_spec()
        self._check_patterns()
        self.make_parameters()
        self._extras()
        self._unread()
        return self.found.contents()

    def _copies(self) -> None:
        """What the module holds. Raises FormatError where that is not all of what the optimizer
        owns.
        """
        owned = [name for state, name in self.slices if state == "param"]
        check_layers(self.files, owned)
        check_experts(self.files)
        for mp in range(len(self.files.models)):
            self._frozen_fragments(mp)
            self._module(mp)
        self._layers()
        self._experts()
        if not self.files.zero3:
            check_copies(self.files, owned, self.copied)

    def _check_patterns(self) -> None:
        names = {name for _, name in self.slices}
        names |= self._names("module")
        for patterns in self.patterns:
            patterns.check_used(names)

    def _refuse_without_partitions(self) -> None:
        files, first = self.files, self.files.models[0][0]
        stage = _zero_stage(first, files.zero3)
        lost = files.unusable or (f"{files.folder} has no *_optim_states.pt" if stage else "")
        if files.zero3 or (stage and not self.options.weights_only):
            remedy = "weights_only opens the module's"
            if files.zero3:
                remedy = "its weights are in no other file"
            raise FormatError(
                f"{files.folder} has no *_optim_states.pt, but {first.name} was written by"
                f" ZeRO-{stage}: masters and optimizer state are missing; {remedy}"
            )
        if files.layers:
            raise self._unnamed_layers(lost)
        if lost:
            self.found.notes.append(
                "the weights are the module's own, as the model computes with them, and no second"
                f" copy proves them: their masters were left aside, because {lost}"
            )

    def _unnamed_layers(self, lost: str) -> FormatError:
        """The error for layers of a pipeline without optimizer files, which `lost` says why."""
        files = self.files
        first_layer = min(layer.name for layer in files.layers.values())
        why, remedy = "of ZeRO-0", ". Save with ZeRO-1"
        if lost:
            why, remedy = f"without optimizer files ({lost})", ""
        return FormatError(
            f"{files.folder} has pipeline layers, as in {first_layer}, {why}: nothing else says"
            f" which parameters a pipeline stage has, nor the names of tied ones{remedy}"
        )

    # What the module holds.

    def _module(self, mp: int) -> None:
        for model in self.files.models[mp]:
            module = self._tensors(model, model.state.get("module") or {}, "module/")
            buffers = set(map(str, model.state.get("buffer_names") or ()))
            shared: dict[str, str] = {}
            for first, *_ in self.files.models:
                owners = first.state.get("shared_params") or {}
                shared |= {str(alias): str(owner) for alias, owner in owners.items()}
            owned = self._masters(mp)
            shared |= moe.router_aliases(module, owned, model)
            owner_of = aliases(module, owned - buffers, shared)
            for name in sorted(module, key=owner_of.__contains__):  # owners first
                key = model.key(module[name])
                if name in buffers:
                    self._buffer(mp, name, key, module[name])
                elif self.files.zero3:
                    self.found.skip(
                        key,
                        "placeholder",
                        "ZeRO-3 empties the module; the values are in the partitions",
                    )
                else:
                    self._module_tensor(mp, name, owner_of.get(name, name), key, module[name])

    def _names(self, key: str) -> set[str]:
        """The names under a key of the model states, on all model-parallel ranks."""
        return {str(name) for first, *_ in self.files.models for name in first.state.get(key) or ()}

    def _tensors(
        self, stored: Stored, values: Mapping[str, Any], prefix: str = ""
    ) -> dict[str, StoredTensor]:
        """The tensors among values, of which the others are extras. Raises FormatError for
        tensors that are hidden.
        """
        for name, value in values.items():
            if not isinstance(value, StoredTensor):
                for holder in tensor_holders(value):
                    raise FormatError(closed_tensors(holder))
                self.found.extra(stored.name, f"{prefix}{name}", value)
        return {name: value for name, value in values.items() if isinstance(value, StoredTensor)}

    def _masters(self, mp: int) -> set[str]:
        return {name for state, name in self.slices if state == "param" and self._held(mp, name)}

    def _held(self, mp: int, name: str) -> str | None:
        """The key of the parameter's slice on this rank."""
        slices = self.slices.get(("param", name))
        return slices.keys.get(self.place(mp, None)) if slices else None

    def _buffer(self, mp: int, name: str, key: str, tensor: StoredTensor) -> None:
        if self.place(mp, None) in self.slices["buffer", name].keys:
            self.found.skip(
                key, "buffer", "the buffer of another data-parallel rank; that of rank 0 is used"
            )
        else:
            self._add_whole(mp, "buffer", name, key, tensor)

    def _add_whole(self, mp: int, state: str, name: str, key: str, tensor: StoredTensor) -> None:
        """Add a slice that is a stored tensor."""
        place = self.place(mp, None)
        self.slices[state, name].keys[place] = key
        self.slices[state, name].shapes[place] = tensor.shape

    def _module_tensor(
        self, mp: int, name: str, owner: str, key: str, tensor: StoredTensor
    ) -> None:
        master = self._held(mp, owner)
        self.copied.add(owner)
        if master is None:
            self._add_whole(mp, "param", name, key, tensor)
        elif master != key:
            tied = "" if owner == name else f"tied to {owner}: "
            reason = (
                f"{tied}a copy of {owner}'s master in {tensor.dtype}, compared with it by verify"
            )
            self.found.slice_duplicate(master, key, reason)

    def _frozen_fragments(self, mp: int) -> None:
        """Frozen parameters: whole beside the module at stage 2, and at stage 3 only here, cut
        over the ranks.
        """
        models = self.files.models[mp]
        shapes = models[0].state.get("frozen_param_shapes") or {}
        for name, tensor in _frozen(models[0]).items():
            pieces: list[Any] = [_frozen(model).get(name) for model in models]
            for model, piece in zip(models, pieces, strict=True):
                if not isinstance(piece, StoredTensor):
                    raise FormatError(
                        f"{model.file.path} has no fragment of the frozen {name}, but"
                        f" {models[0].name} has"
                    )
            keys = [model.key(piece) for model, piece in zip(models, pieces, strict=True)]
            if not self.files.zero3:
                self._add_whole(mp, "param", name, keys[0], tensor)
                continue
            shape = tuple(map(int, shapes[name]))
            layouts = flat_layouts({name: shape}, [piece.shape[0] for piece in pieces])
            layout, used = touched(layouts[name])
            tensor = Consolidated(layout, [keys[i] for i in used])
            self.add(mp, None, "param", name, {name: shape}, tensor, FROZEN)

    def _layers(self) -> None:
        """Files of pipeline layers; which stage had one does not matter, for tied layers are in
        that of the lowest.
        """
        buffers = self._names("buffer_names")
        for (layer, tp), stored in self.files.layers.items():
            tensors = self._tensors(stored, stored.state)
            ranks, owned = self._layer_owners(tp)
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            for local, name in layer_names(layer, shapes, owned).items():
                key = stored.key(tensors[local])
                if name is None:
                    self.copied.update(other for other in owned if other.endswith(f".{local}"))
                    self.found.skip(
                        key, "copy", "tied: several tied parameters have its name and shape"
                    )
                elif name in buffers:
                    self._buffer(tp, name, key, tensors[local])
                elif name in owned or not any(self.files.ranks):
                    self._module_tensor(ranks.get(name, tp), name, name, key, tensors[local])
                else:
                    raise FormatError(
                        f"{stored.file.path} has {local}, but by the optimizer and the model states"
                        f" there is no {name}: the file was renamed, or belongs to another run"
                    )

    def _layer_owners(self, tp: int) -> tuple[dict[str, int], dict[str, Shape]]:
        """The model-parallel rank of each parameter on its lowest stage, and its slice there,
        for one `tp` rank.
        """
        ranks: dict[str, int] = {}
        shapes: dict[str, Shape] = {}
        parameters = {
            name: slices for (state, name), slices in self.slices.items() if state == "param"
        }
        for name, slices in parameters.items():
            stage, *_ = slices.stages or [None]
            if stage is not None and (stage, None, tp) in slices.shapes:
                ranks[name] = stage * self.files.tp + tp
                shapes[name] = slices.shapes[stage, None, tp]
        return ranks, shapes

    def _experts(self) -> None:
        """Files of single experts, by global number."""
        for (_, expert, mp), stored in self.files.experts.items():
            for name, tensor in self._tensors(stored, stored.state).items():
                fused, _, number = name.rpartition(".")
                slices = self.slices.get(("param", fused))
                if slices is None or not number.isdigit():
                    check_expert(stored, expert, moe.expert_number(name) or str(expert))
                    self._module_tensor(mp, name, name, stored.key(tensor), tensor)
                    continue
                check_expert(stored, expert, number)
                self.copied.add(fused)
                for ep, experts in moe.placement(fused, self.files.models[mp][0]).items():
                    key = slices.keys.get(self.place(mp, ep))
                    if int(number) in experts and key:
                        reason = f"a copy of an expert of {fused}, compared with it by verify"
                        self.found.slice_duplicate(
                            key, stored.key(tensor), reason, at=(experts.index(int(number)),)
                        )

    # The rest.

    def _unread(self) -> None:
        read = {file.name for file in self.files.all()}
        for path in sorted(self.files.folder.children()):
            if path.name in read:
                continue
            aside = self.options.weights_only and path.name.endswith("_optim_states.pt")
            reason = ASIDE if aside else "not one that DeepSpeed's engine reads"
            self.found.skip(path.name, "folder" if path.is_dir() else "file", reason)

    def _extras(self) -> None:
        """Everything else, by file: schedulers, counters, client state, loss scaler,
        hyper-parameters.
        """
        for model in self.files.all_models:
            self._model_extras(model)
        for stored in self.files.expert_optimizers.values():
            self._optimizer_extras(stored, stored.state.get("optimizer") or {})
        for rank in self.files.all_ranks:
            self._rank_extras(rank)

    def _model_extras(self, model: Stored) -> None:
        for name, value in model.state.items():
            if name == "optimizer" and isinstance(value, dict):
                self._optimizer_extras(model, value)
            elif name not in _DESCRIBED:
                self.found.extra(model.name, name, value)
            elif name != "module":
                what = "says which tensor is which; its content is in the tree's names and shapes"
                self.found.skip(f"{model.name}:{name}", "layout", what)

    def _rank_extras(self, rank: Rank) -> None:
        top = rank.file.tree if isinstance(rank.file.tree, dict) else {}
        values = {**top, **rank.state}
        base = base_optimizer(rank)
        if isinstance(base, dict) and "param_groups" in base:
            values["param_groups"] = base["param_groups"]
        for name, value in values.items():
            if name in _LAYOUT:
                what = "says how partitions lie; consolidated parameters have no such thing"
                self.found.skip(f"{rank.name}:{name}", "layout", what)
            elif name not in _PARTITIONS:
                self.found.extra(rank.name, name, value)

    def _optimizer_extras(self, stored: Stored, optimizer: Mapping[str, Any]) -> None:
        inner, masters = unwrapped(optimizer)
        values = dict(optimizer)
        if masters and isinstance(inner, dict):
            values |= inner
        tensors = {"state", masters, "optimizer_state_dict"} if masters else {"state"}
        for name, value in values.items():
            if name not in tensors:
                self.found.extra(stored.name, f"optimizer/{name}", value)
        if self.options.weights_only:
            for key in self.found.stored:
                if key.startswith(f"{stored.name}:optimizer/"):
                    self.found.leave(key, "state", ASIDE)


def _frozen(model: Stored) -> Mapping[str, Any]:
    return model.state.get("frozen_param_fragments") or {}


def _zero_stage(model: Stored, zero3: bool) -> int:
    """The stage that the files are of: with `zero3` that one, or what the run's configuration
    says, if it is there.
    """
    if zero3:
        return 3
    config = known(model.state.get("ds_config"))
    return (
        (config.get("zero_optimization") or {}).get("stage", 0) if isinstance(config, dict) else 0
    )
