"""Folders in which each rank saved its shards by torch.save, as verl, SkyRL, torch_checkpointing
and `torch.distributed.checkpoint._experimental` do.

A DTensor's mesh and placements say which part of the whole a rank has. What is no DTensor (buffers,
steps) each rank has whole, and the copies are compared. The optimizer's states go by numbers: FSDP2
has a DTensor for each, FSDP1's flat parameters are in `flat_states`. Files are of one save where
meshes agree with their names, and counters and learning rates with one another.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import About, Contents
from jax_ucp.codecs.tensor_names import DTensor, StoredTensor, unreadable
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.codecs.unpickle import each_node
from jax_ucp.errors import FormatError, naming
from jax_ucp.files.in_flight import opened_files
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.dtensor_ranks.files import (
    FSDP_CONFIG,
    METADATA,
    MODEL,
    OPTIM,
    RankFiles,
    is_rank_file,
    of_rank,
    rank_files,
)
from jax_ucp.formats.dtensor_ranks.flat_states import FlatShard, FlatStates, place_flat
from jax_ucp.formats.dtensor_ranks.placements import shard_at
from jax_ucp.formats.dtensor_ranks.specs import Mesh, TensorSpec, spec_of
from jax_ucp.formats.facts import COUNTS, RATES, Facts
from jax_ucp.formats.nested import as_dict
from jax_ucp.formats.state_dicts import GONE, keep_proved, nested_leaves, without_tensors
from jax_ucp.formats.weight_files import CONFIG, read_json
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import Shape, box_part
from jax_ucp.layout.patterns import Replicated
from jax_ucp.options import Options
from jax_ucp.states.optimizer_dicts import Steps, joined
from jax_ucp.states.state_pairing import StateTensor, is_trainable

HUGGINGFACE = "huggingface"


def parse(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a folder of ranks' files. Raises FormatError, naming the file."""
    ranks = rank_files(path)
    kinds = [kind for kind in ranks.names if kind != OPTIM or not options.weights_only]
    names = [name for kind in kinds for name in ranks.names[kind]]
    files = opened_files(path, names, partial(TorchFile, lenient=True))
    builder = ContentsBuilder("dtensors", path, Combined.of_files(files), options.on_conflict)
    saved = _Saved(ranks, files)
    _check_facts(saved)
    by_kind = {kind: _parts(saved, kind) for kind in saved.states}
    of_optimizer = by_kind.get(OPTIM, {})
    is_flat = _is_flat(saved, of_optimizer)
    wholes: dict[str, _Whole] = {}
    for kind, of_kind in by_kind.items():
        if kind != OPTIM or not is_flat:
            wholes |= {joined(path): _whole(saved, path, parts) for path, parts in of_kind.items()}
    if ranks.world_size > 1 and not any(whole.specs for whole in wholes.values()):
        raise FormatError(
            f"{path} has the files of {ranks.world_size} ranks, in which no tensor of the model is"
            " a DTensor: nothing says whether they are copies of the whole or parts of it"
        )
    # objects beside the tensors: the first rank's, as all others say the same
    objects = {
        steps: node
        for kind in saved.states
        if kind != MODEL
        for _, _, file in itertools.islice(saved.of(kind), 1)
        for steps, node in nested_leaves(file.tree, ranks.steps_of(kind))
        if not isinstance(node, StoredTensor | DTensor)
    }
    if is_flat:
        _place(builder, wholes, {}, replace(options, optimizer_groups=None))
        _place_flat(builder, saved, wholes, of_optimizer, options)
    else:
        _place(builder, wholes, objects, options)
    _keep_rest(builder, saved, options)
    meshes: dict[str, None] = {}
    for mesh in (whole.specs[0].mesh for whole in wholes.values() if whole.specs):
        axes = list(map(str, mesh.shape))
        if len(mesh.axes) == len(mesh.shape):
            axes = [f"{name}={n}" for name, n in zip(mesh.axes, mesh.shape, strict=True)]
        meshes[" x ".join(axes)] = None
    wrote = f"DTensors of {ranks.world_size} ranks" if meshes else "one process"
    builder.notes.insert(
        0,
        f"written by {ranks.writer}: torch.save of {'the ' * bool(meshes)}{wrote}"
        f"{', mesh ' * bool(meshes)}{', '.join(meshes)}",
    )
    step = next((file.tree for _, _, file in saved.of("step")), None)
    builder.about = About(
        f"{ranks.writer}, {wrote}",
        step if isinstance(step, int) else None,
    )
    return builder.contents()


@dataclass(frozen=True, slots=True)
class RankPart:
    """A tensor in the file of one rank; of a DTensor, `node` says which part it is."""

    rank: int
    file: str
    node: StoredTensor | DTensor

    @property
    def local(self) -> StoredTensor:
        return self.node.local if isinstance(self.node, DTensor) else self.node

    @property
    def key(self) -> str:
        return f"{self.file}:{self.local.key}"

    @property
    def words(self) -> str:
        kind = "a part of" if isinstance(self.node, DTensor) else "all of"
        return f"{kind} {self.node.dtype} {list(self.node.shape)}"


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor at a path of nested dicts, which is joined from the parts of the ranks."""

    path: Steps
    shape: Shape
    layout: ParamLayout
    parts: Sequence[RankPart]
    specs: Sequence[TensorSpec] = ()

    def described(self) -> StateTensor:
        local = self.parts[0].local
        tie = self.parts[0].file, local.storage, local.offset, local.shape, local.strides
        return StateTensor(self.path, self.shape, is_trainable(local.dtype), tie)


class _Saved:
    """The files of all ranks, opened."""

    def __init__(self, ranks: RankFiles, files: Mapping[str, TorchFile]):
        self.ranks, self.files = ranks, files
        self.states = ranks.states
        for kind in ranks.names if not ranks.states else ():
            nodes = (node for _, _, file in self.of(kind) for node in each_node(file.tree))
            if any(isinstance(node, DTensor) for node in nodes):
                self.states = [*self.states, kind]
        if not self.states and ranks.world_size == 1:
            self.states = [*ranks.names]

    def of(self, kind: str) -> Iterator[tuple[int, str, TorchFile]]:
        for rank, name in enumerate(self.ranks.names.get(kind, ())):
            if name in self.files:
                yield rank, name, self.files[name]


_Parts = Mapping[Steps, Sequence[RankPart]]


def _parts(saved: _Saved, kind: str) -> _Parts:
    """Each tensor's parts by the tensor's path. Raises FormatError for an unreadable one."""
    parts: dict[Steps, list[RankPart]] = defaultdict(list)
    for rank, name, file in saved.of(kind):
        for path, node in nested_leaves(file.tree, saved.ranks.steps_of(kind)):
            reason = next(filter(None, (unreadable(inner) for inner in each_node(node))), "")
            if isinstance(node, StoredTensor | DTensor):
                parts[path].append(RankPart(rank, name, node))
            elif reason:
                raise FormatError(f"{file.path}: {joined(path)}: {reason}")
    return parts


def _whole(saved: _Saved, path: Steps, parts: Sequence[RankPart]) -> _Whole:
    """The tensor that the ranks' parts form. Raises FormatError if they do not fit together."""
    label, folder, first = joined(path), saved.ranks.folder, parts[0]
    for part in parts:
        if type(part.node) is not type(first.node) or part.words != first.words:
            raise FormatError(
                f"{folder / part.file}: {label} is {part.words}, but {first.words} in"
                f" {first.file}; the files are not of one save"
            )

    # A plain tensor is in the files of all ranks, a DTensor in those of its mesh.
    specs: list[TensorSpec] = []
    for part in parts:
        if isinstance(part.node, DTensor):
            with naming(folder / part.file, label):
                specs.append(spec_of(part.node, part.rank, saved.files[part.file].tensor))
    ranks = {part.rank for part in parts}
    for wanted in [spec.mesh.ranks for spec in specs] or [range(saved.ranks.world_size)]:
        if missing := sorted(set(wanted) - ranks):
            file = of_rank(first.file, missing[0])
            raise FormatError(
                f"{folder / file} is missing, or has no part of {label}, which is in"
                f" {first.file}; the files are not of one save"
            )
    if specs:
        layout = _layout(folder, label, parts, specs)
    else:
        layout = Replicated().join([part.node.shape for part in parts])
    return _Whole(path, first.node.shape, layout, parts, specs)


def _layout(
    folder: FilePath, label: str, parts: Sequence[RankPart], specs: Sequence[TensorSpec]
) -> ParamLayout:
    """The layout over parts, by their specs. Raises FormatError for a part of another shape."""
    shape = parts[0].node.shape
    both = (
        shard_at(shape, spec.mesh.shape, spec.mesh.coordinate, spec.placements) for spec in specs
    )
    ways = list(zip(*both, strict=True))
    stored = tuple(part.local.shape for part in parts)
    fitting = {way for way in ways if tuple(shard.shape for shard in way) == stored}
    if not fitting:
        pairs = zip(parts, ways[0], strict=True)
        part, shard = next((p, s) for p, s in pairs if p.local.shape != s.shape)
        raise FormatError(
            f"{folder / part.file}: {label} of shape {list(part.node.shape)} has a part of"
            f" {list(part.local.shape)}, but by its placements it should be {list(shard.shape)}"
        )
    if len(fitting) > 1:
        raise FormatError(f"{folder}: {label} can be put together in two ways, by its placements")
    (way,) = fitting
    placed = [
        box_part(i, source, target)
        for i, shard in enumerate(way)
        for source, target in shard.blocks
    ]
    return ParamLayout(shape, stored, tuple(placed))


def _check_facts(saved: _Saved) -> None:
    """Raise FormatError if ranks are of different steps, or have different settings."""
    facts = Facts(saved.ranks.folder)
    for _, name, file in saved.of(OPTIM):
        tree = as_dict(file.tree)
        facts.state_all(file, name, "param_groups", tree.get("param_groups"))
        first = next(iter(as_dict(tree.get("state")).values()), None)
        facts.state_all(file, name, "step", as_dict(first).get("step"))
    for kind in [kind for kind in saved.ranks.names if kind not in (MODEL, OPTIM)]:
        for _, name, file in saved.of(kind):
            facts.state_all(file, name, kind, file.tree, only=(*COUNTS, *RATES, "step"))


def _place(
    builder: ContentsBuilder,
    wholes: Mapping[str, _Whole],
    objects: Mapping[Steps, Any],
    options: Options,
) -> None:
    stored = {label: whole.described() for label, whole in wholes.items()}
    places = builder.placed(stored, objects, options)
    for label, whole in wholes.items():
        shards = ", a shard" if len(whole.layout.replicas) > 1 else ""
        builder.place(places, label, [part.key for part in whole.parts], whole.layout, shards)
    builder.notes += places.notes
    for key in builder.stored:
        if "/_spec/" in key:
            builder.skip(key, "mesh", "says which rank is where in the mesh of a DTensor")


# FSDP1's optimizer.


def _is_flat(saved: _Saved, parts: _Parts) -> bool:
    """Whether the optimizer is FSDP1's: none of its states is a DTensor, and all have one axis."""
    nodes = [part.node for of_path in parts.values() for part in of_path]
    ndims = {len(node.shape) for node in nodes}
    are_plain = not any(isinstance(node, DTensor) for node in nodes)
    is_flat = are_plain and 1 in ndims and ndims <= {0, 1}
    return is_flat and saved.ranks.fsdp_config.get("FSDP_version") != 2


def _place_flat(
    builder: ContentsBuilder,
    saved: _Saved,
    model: Mapping[str, _Whole],
    parts: _Parts,
    options: Options,
) -> None:
    """Add the states of FSDP1's optimizer; the last axis of a mesh says which shard a rank has."""
    sharded = [whole for whole in model.values() if whole.specs]
    params = sharded or [whole for whole in model.values() if whole.described().trainable]
    shapes = {joined(whole.path[1:]): whole.shape for whole in params}
    meshes: dict[int, Mesh] = {}
    for whole in sharded:
        of_parts = zip(whole.parts, whole.specs, strict=True)
        meshes |= {part.rank: spec.mesh for part, spec in of_parts}
    shards = {rank: mesh.coordinate[-1] for rank, mesh in meshes.items()}
    shard_count = next(iter(meshes.values())).shape[-1] if meshes else 1
    states = {
        path: [FlatShard(shards.get(part.rank, 0), part.node.shape, part.key) for part in of_path]
        for path, of_path in parts.items()
    }
    _, _, first = next(saved.of(OPTIM))
    place_flat(builder, FlatStates.of(states, first.tree, shard_count), shapes, options)


def _keep_rest(builder: ContentsBuilder, saved: _Saved, options: Options) -> None:
    for kind in saved.states:
        for rank, name, file in saved.of(kind):
            rest = without_tensors(file.tree)
            if rank == 0 and isinstance(rest, dict) and rest is not GONE:
                for key, value in rest.items():
                    builder.extra(name, str(key), value)
    for kind in [kind for kind in saved.ranks.names if kind not in saved.states]:
        for _, name, file in saved.of(kind):
            keep_proved(builder, name, file)
            builder.unknown |= file.unknown
    for child in sorted(builder.path.children()):
        if child.name == METADATA:
            builder.skip(child.name, "file", "says of each tensor what its DTensors say")
        elif child.name == FSDP_CONFIG:
            builder.extra(child.name, "config", dict(saved.ranks.fsdp_config))
        elif child.name == HUGGINGFACE and child.is_dir():
            # the config makes the folder beside the shards complete for transformers
            if (child / CONFIG).is_file():
                builder.extra(CONFIG, "config", read_json(child / CONFIG))
            beside = sorted(child.children())
            for name in (file.name for file in beside if file.name != CONFIG):
                builder.skip(f"{HUGGINGFACE}/{name}", "file", "not read; it opens by itself")
            if any(file.suffix == ".safetensors" for file in beside):
                builder.notes.append(
                    f"not read: {HUGGINGFACE}/ has the weights too, as the writer exports them;"
                    " open it by its path"
                )
        elif child.name in saved.files:
            continue
        elif is_rank_file(child.name) and options.weights_only:
            builder.skip(child.name, f"{child.size()} bytes", "only weights were asked for")
        else:
            builder.skip(child.name, "file", "lies beside the ranks' files; not read")
