"""Folders in which each rank saved its shards by torch.save, as verl and SkyRL do.

A tensor of the model is a DTensor: its mesh and placements say which part of the whole the file of
a rank has. What is no DTensor (buffers, steps) each rank has whole, and the copies are compared.
The optimizer's states go by numbers. FSDP2 has a DTensor for each; FSDP1's optimizer knows flat
parameters, of which `flat` tells more. The ranks' files are of one save where meshes agree with the
files' names, and counters and learning rates with one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jax_ucp.errors import CorruptData, FormatError, LayoutError
from jax_ucp.files.in_flight import opened_files
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import Import
from jax_ucp.formats.dtensor_ranks import flat_states
from jax_ucp.formats.dtensor_ranks.files import (
    FSDP_CONFIG,
    RankFiles,
    has_rank_files,
    is_rank_file,
    rank_files,
)
from jax_ucp.formats.dtensor_ranks.flat_states import FlatStates, place_flat
from jax_ucp.formats.dtensor_ranks.placements import Shard, shard_at
from jax_ucp.formats.dtensor_ranks.specs import Mesh, Spec, spec_of
from jax_ucp.formats.facts import COUNTS, RATES, Facts
from jax_ucp.formats.huggingface.weight_files import CONFIG, read_json
from jax_ucp.formats.options import Options
from jax_ucp.formats.torch_save.file import TorchFile
from jax_ucp.formats.torch_save.optimizer_dicts import Steps, joined
from jax_ucp.formats.torch_save.state_pairing import Stored, is_trainable
from jax_ucp.formats.torch_save.tensor_names import DTensor, StoredTensor, unreadable
from jax_ucp.formats.torch_save.tree import GONE, nested_leaves, without_tensors
from jax_ucp.formats.torch_save.unpickle import walk
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape
from jax_ucp.layout.patterns import Replicated
from jax_ucp.sources.combined import Combined
from jax_ucp.sources.consolidated import Consolidated
from jax_ucp.sources.contents import About, Contents

HUGGINGFACE = "huggingface"


def recognise(path: FilePath) -> bool:
    return has_rank_files(path)


def open_dtensor_ranks(path: FilePath, options: Options) -> Contents:
    """The checkpoint that the files of all ranks in a folder form.

    Raises FormatError, naming the file, where one is missing or of another save, or where a tensor
    cannot be put together.
    """
    ranks = rank_files(path)
    files = _opened(ranks, options)
    imported = Import("dtensors", path, Combined.of_files(files), options.on_conflict)
    saved = _Saved(ranks, files)
    _check_facts(saved)
    model = _wholes(saved, _parts(saved, "model"))
    _require_sharded(saved, model)
    of_optimizer = _parts(saved, "optim")
    if _is_flat(saved, of_optimizer):
        _place(imported, model, {}, replace(options, optimizer_groups=None))
        _place_flat(imported, saved, model, of_optimizer, options)
    else:
        optimizer = _wholes(saved, of_optimizer)
        _place(imported, {**model, **optimizer}, _objects(saved), options)
    _keep_rest(imported, saved, options)
    imported.notes.insert(0, _written_by(ranks, model))
    imported.about = About(f"{ranks.writer}, DTensors of {ranks.world_size} ranks")
    try:
        return imported.contents()
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from None


def _opened(ranks: RankFiles, options: Options) -> dict[str, TorchFile]:
    kinds = [kind for kind in ranks.names if kind != "optim" or not options.weights_only]
    names = [name for kind in kinds for name in ranks.names[kind]]
    return opened_files(ranks.folder, names, partial(TorchFile, lenient=True))


@dataclass(frozen=True, slots=True)
class Part:
    """What the file of one rank has of a tensor: `node` is a DTensor, or all of it."""

    rank: int
    file: str
    node: StoredTensor | DTensor

    @property
    def local(self) -> StoredTensor:
        return self.node.local if isinstance(self.node, DTensor) else self.node

    @property
    def key(self) -> str:
        return f"{self.file}:{self.local.key}"


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor at a path of nested dicts, put together of the parts that the ranks have."""

    path: Steps
    shape: Shape
    param: Consolidated
    parts: Sequence[Part]
    specs: Sequence[Spec] = ()

    @property
    def with_specs(self) -> list[tuple[Part, Spec]]:
        return list(zip(self.parts, self.specs, strict=True))

    def described(self) -> Stored:
        local = self.parts[0].local
        tie = self.parts[0].file, local.storage, local.offset, local.shape, local.strides
        return Stored(self.path, self.shape, is_trainable(local.dtype), tie)


class _Saved:
    """The files of all ranks, opened."""

    def __init__(self, ranks: RankFiles, files: Mapping[str, TorchFile]):
        self.ranks, self.files = ranks, files

    def of(self, kind: str) -> Iterator[tuple[int, str, TorchFile]]:
        for rank, name in enumerate(self.ranks.names.get(kind, ())):
            if name in self.files:
                yield rank, name, self.files[name]

    def read(self, name: str, tensor: StoredTensor) -> np.ndarray:
        return self.files[name].read(tensor.key, Box.whole(tensor.shape))


Parts = Mapping[Steps, Sequence[Part]]


def _parts(saved: _Saved, kind: str) -> Parts:
    """What the files of a kind have of each tensor, by path. Raises FormatError for one that cannot
    be read.
    """
    parts: dict[Steps, list[Part]] = defaultdict(list)
    for rank, name, file in saved.of(kind):
        for path, node in nested_leaves(file.tree, (kind,)):
            if isinstance(node, StoredTensor | DTensor):
                parts[path].append(Part(rank, name, node))
            elif reason := _unreadable(node):
                raise FormatError(f"{file.path}: {joined(path)}: {reason}")
    return parts


def _wholes(saved: _Saved, parts: Parts) -> dict[str, _Whole]:
    """The tensors by label. Raises FormatError where a rank lacks one, or has another."""
    return {joined(path): _whole(saved, path, of_path) for path, of_path in parts.items()}


def _unreadable(node: object) -> str:
    return next(filter(None, (unreadable(inner) for _, inner in walk(node))), "")


def _spec(saved: _Saved, part: Part, label: str) -> Spec:
    assert isinstance(part.node, DTensor), "that has one"
    try:
        return spec_of(part.node, part.rank, lambda tensor: saved.read(part.file, tensor))
    except FormatError as error:
        folder = saved.ranks.folder
        raise type(error)(f"{folder / part.file}: {label}: {error}") from error


def _whole(saved: _Saved, path: Steps, parts: Sequence[Part]) -> _Whole:
    """A tensor of the parts that the ranks have. Raises FormatError where they do not fit."""
    label, folder = joined(path), saved.ranks.folder
    _check_alike(folder, label, parts)
    first = parts[0]
    found = {part.rank for part in parts}
    if isinstance(first.node, StoredTensor):
        _require_ranks(saved, label, range(saved.ranks.world_size), found, first)
        layout = Replicated().join([part.node.shape for part in parts])
        return _Whole(path, first.node.shape, Consolidated(layout, [p.key for p in parts]), parts)
    of_parts = [_spec(saved, part, label) for part in parts]
    for spec in of_parts:
        _require_ranks(saved, label, spec.mesh.ranks, found, first)
    layout = _layout(folder, label, parts, of_parts)
    param = Consolidated(layout, [part.key for part in parts])
    return _Whole(path, first.node.shape, param, parts, of_parts)


def _check_alike(folder: FilePath, label: str, parts: Sequence[Part]) -> None:
    """Raise FormatError where two ranks have parts of tensors of another kind, shape or dtype."""
    first = parts[0]
    for part in parts:
        if _kind(part) != _kind(first):
            raise FormatError(
                f"{folder / part.file}: {label} is {_what(part)}, but {_what(first)} in"
                f" {first.file}; the files are not of one save"
            )


def _kind(part: Part) -> tuple[type, Shape, object]:
    return type(part.node), part.node.shape, part.node.dtype


def _what(part: Part) -> str:
    kind = "a part of" if isinstance(part.node, DTensor) else "all of"
    return f"{kind} {part.node.dtype} {list(part.node.shape)}"


def _require_ranks(
    saved: _Saved, label: str, wanted: Sequence[int], found: set[int], first: Part
) -> None:
    if missing := sorted(set(wanted) - found):
        file = first.file.replace(f"_rank_{first.rank}.pt", f"_rank_{missing[0]}.pt")
        raise FormatError(
            f"{saved.ranks.folder / file} has no part of {label}, which is in {first.file}; the"
            " files are not of one save"
        )


def _layout(
    folder: FilePath, label: str, parts: Sequence[Part], specs: Sequence[Spec]
) -> ParamLayout:
    """Where the parts lie, by their specs. Raises FormatError where a part has another shape."""
    shape = parts[0].node.shape
    ways = list(zip(*(_shards(shape, spec) for spec in specs), strict=True))
    stored = tuple(part.local.shape for part in parts)
    fitting = {way for way in ways if tuple(shard.shape for shard in way) == stored}
    if not fitting:
        raise _misfit(folder, label, parts, ways[0])
    if len(fitting) > 1:
        raise FormatError(f"{folder}: {label} can be put together in two ways, by its placements")
    (way,) = fitting
    fragments = [
        Fragment(i, source, target)
        for i, shard in enumerate(way)
        for source, target in shard.blocks
    ]
    return ParamLayout(shape, stored, tuple(fragments))


def _misfit(
    folder: FilePath, label: str, parts: Sequence[Part], shards: Sequence[Shard]
) -> FormatError:
    """The error for the first part that has another shape than the shard that it should be."""
    pairs = zip(parts, shards, strict=True)
    part, shard = next((p, s) for p, s in pairs if p.local.shape != s.shape)
    return FormatError(
        f"{folder / part.file}: {label} of shape {list(part.node.shape)} has a part of"
        f" {list(part.local.shape)}, but by its placements it should be {list(shard.shape)}"
    )


def _shards(shape: Shape, spec: Spec) -> tuple[Shard, Shard]:
    return shard_at(shape, spec.mesh.shape, spec.mesh.coordinate, spec.placements)


def _require_sharded(saved: _Saved, model: Mapping[str, _Whole]) -> None:
    """Raise FormatError where files of several ranks have plain tensors alone: copies or parts."""
    if saved.ranks.world_size > 1 and not any(whole.specs for whole in model.values()):
        raise FormatError(
            f"{saved.ranks.folder} has the files of {saved.ranks.world_size} ranks, in which no"
            " tensor of the model is a DTensor: nothing says whether they are copies of the whole"
            " or parts of it"
        )


def _check_facts(saved: _Saved) -> None:
    """Raise FormatError where ranks say that they are of different steps, or were told different
    things.
    """
    facts = Facts(saved.ranks.folder)
    for _, name, file in saved.of("optim"):
        tree = file.tree if isinstance(file.tree, dict) else {}
        facts.state_all(file, name, "param_groups", tree.get("param_groups"))
        states = tree.get("state")
        first = next(iter(states.values()), None) if isinstance(states, dict) else None
        if isinstance(first, dict):
            facts.state_all(file, name, "step", first.get("step"))
    for _, name, file in saved.of("extra_state"):
        facts.state_all(file, name, "extra_state", file.tree, only=(*COUNTS, *RATES))


def _place(
    imported: Import,
    wholes: Mapping[str, _Whole],
    objects: Mapping[Steps, Any],
    options: Options,
) -> None:
    stored = {label: whole.described() for label, whole in wholes.items()}
    places = imported.placed(stored, objects, options)
    for label, whole in wholes.items():
        state, name = places.at[label]
        what = f"{state} of {name}" if state != "other" else "a tensor beside the model"
        if len(whole.param.layout.replicas) > 1:
            what += ", a shard"
        imported.parameter(state, name, whole.param, what)
    imported.notes += places.notes
    for key in imported.stored:
        if "/_spec/" in key:
            imported.skip(key, "mesh", "says which rank is where in the mesh of a DTensor")


# FSDP1's optimizer.


def _is_flat(saved: _Saved, parts: Parts) -> bool:
    """Whether the optimizer is FSDP1's: it knows no DTensor, and its states have one axis."""
    ndims = {len(part.node.shape) for of_path in parts.values() for part in of_path}
    are_plain = not any(isinstance(p.node, DTensor) for of_path in parts.values() for p in of_path)
    return are_plain and 1 in ndims and ndims <= {0, 1} and saved.ranks.fsdp_version != 2


def _place_flat(
    imported: Import,
    saved: _Saved,
    model: Mapping[str, _Whole],
    parts: Parts,
    options: Options,
) -> None:
    sharded = [whole for whole in model.values() if whole.specs]
    meshes = {part.rank: spec.mesh for whole in sharded for part, spec in whole.with_specs}
    params = sharded or [whole for whole in model.values() if whole.described().trainable]
    shapes = {joined(whole.path[1:]): whole.shape for whole in params}
    place_flat(imported, _flat_states(saved, parts, meshes), shapes, options)


def _flat_states(saved: _Saved, parts: Parts, meshes: Mapping[int, Mesh]) -> FlatStates:
    """The states by number; the last axis of the mesh of each rank says which shard it has."""
    shards = {rank: mesh.coordinate[-1] for rank, mesh in meshes.items()}
    shard_count = next(iter(meshes.values())).shape[-1] if meshes else 1
    states: dict[Steps, list[flat_states.Stored]] = defaultdict(list)
    for path, of_path in parts.items():
        for part in of_path:
            shard = shards.get(part.rank, 0)
            states[path].append(flat_states.Stored(shard, part.node.shape, part.key))
    _, _, first = next(saved.of("optim"))
    return FlatStates.of(states, first.tree, shard_count)


def _objects(saved: _Saved) -> dict[Steps, Any]:
    """What is no tensor in the optimizer's file of the first rank; all others say the same."""
    objects: dict[Steps, Any] = {}
    for _, _, file in list(saved.of("optim"))[:1]:
        for path, node in nested_leaves(file.tree, ("optim",)):
            if not isinstance(node, StoredTensor | DTensor):
                objects[path] = node
    return objects


def _keep_rest(imported: Import, saved: _Saved, options: Options) -> None:
    """Extras: what is no tensor in the files of weights and optimizers, and all of the extra state
    of each rank.
    """
    for kind in ("model", "optim"):
        for rank, name, file in saved.of(kind):
            rest = without_tensors(file.tree)
            if rank == 0 and isinstance(rest, dict) and rest is not GONE:
                for key, value in rest.items():
                    imported.extra(name, str(key), value)
    for _, name, file in saved.of("extra_state"):
        for fault in filter(None, (check.run() for check in file.checks("full"))):
            raise CorruptData(f"{fault}; weights_only leaves the trainer's state aside")
        tree = file.tree if isinstance(file.tree, dict) else {"object": file.tree}
        for key, value in tree.items():
            imported.extra(name, str(key), value)
        imported.unknown |= file.unknown
    _account_for_files(imported, saved, options)


def _account_for_files(imported: Import, saved: _Saved, options: Options) -> None:
    for child in sorted(imported.path.children()):
        if child.name == FSDP_CONFIG:
            imported.extra(child.name, "config", dict(saved.ranks.fsdp_config))
        elif child.name == HUGGINGFACE and child.is_dir():
            _keep_huggingface(imported, child)
        elif child.name in saved.files:
            continue
        elif is_rank_file(child.name) and options.weights_only:
            imported.skip(child.name, f"{child.size()} bytes", "only weights were asked for")
        else:
            imported.skip(child.name, "file", "lies beside the ranks' files; not read")


def _keep_huggingface(imported: Import, folder: FilePath) -> None:
    """The model's config, which makes the folder beside the shards complete for transformers."""
    if (folder / CONFIG).is_file():
        imported.extra(CONFIG, "config", read_json(folder / CONFIG))
    weights = [child.name for child in folder.children() if child.suffix == ".safetensors"]
    for child in sorted(folder.children()):
        if child.name != CONFIG:
            imported.skip(f"{HUGGINGFACE}/{child.name}", "file", "not read; it opens by itself")
    if weights:
        imported.notes.append(
            f"not read: {HUGGINGFACE}/ has the weights too, as the writer exports them; open it by"
            " its path"
        )


def _written_by(ranks: RankFiles, model: Mapping[str, _Whole]) -> str:
    """What the folder is, for whoever looks at it."""
    meshes: dict[str, None] = {}
    for whole in model.values():
        meshes |= dict.fromkeys(_mesh_text(spec.mesh) for spec in whole.specs[:1])
    return (
        f"written by {ranks.writer}: torch.save of the DTensors of {ranks.world_size} ranks"
        f"{', mesh ' * bool(meshes)}{', '.join(meshes)}"
    )


def _mesh_text(mesh: Mesh) -> str:
    if len(mesh.axes) != len(mesh.shape):
        return " x ".join(map(str, mesh.shape))
    return " x ".join(f"{name}={n}" for name, n in zip(mesh.axes, mesh.shape, strict=True))
