"""PyTorch's distributed checkpoints (DCP), of FSDP, FSDP2, HSDP, tensor parallelism and torchtitan.

Every chunk says which block of its tensor it is, so that nothing about the parallelism has to be
known. Which tensor is a weight and which a state of it follows from the paths that the planner
recorded (`state_paths`). Other objects are extras.

An item is opened when it is first read, `verify` opens them all: each must have the dtype and sizes
of its chunk and the CRC of its bytes. What no reader can prove: an item does not say its name, its
rank or its save (the `save_id` of the metadata is in no item), so a file in which all items have
the same lengths and shapes, of another rank or another step, is taken for the right one. A name
that the metadata has in one place only may be changed there.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import About, Contents
from jax_ucp.codecs.json_values import MAX_EXTRA_BYTES, tensor_bytes
from jax_ucp.errors import FormatError, UnsafePickle
from jax_ucp.files.path import FilePath
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.dcp.marks import require_metadata
from jax_ucp.formats.dcp.metadata import (
    DcpMetadata,
    Span,
    read_metadata,
)
from jax_ucp.formats.dcp.source import DcpSource, chunk_key
from jax_ucp.formats.facts import COUNTS, RATES, Facts
from jax_ucp.formats.state_dicts import keep_beside
from jax_ucp.options import Options
from jax_ucp.states.opaque import in_optimizer
from jax_ucp.states.optimizer_dicts import Steps, optimizer_paths
from jax_ucp.states.state_pairing import StateTensor, is_trainable

_CODED = (
    "{} tensors, such as {}, are states of torchao's low-bit optimizers: they are read as the"
    " numbers that their codes stand for, in the dtype that each has in .metadata"
)
LIGHTNING = "meta.pt"  # what Lightning's trainer saves besides, in the same folder


def parse(path: FilePath, options: Options) -> Contents:
    """The checkpoint in a folder with `.metadata`, or with one `__<rank>.metadata` per rank.

    Raises FormatError, naming file and tensor; NotACheckpoint without metadata, written last.
    """
    return open_saves(path, [path], options)


def open_saves(path: FilePath, folders: Sequence[FilePath], options: Options) -> Contents:
    """The one checkpoint of several saves, in `folders`. Raises as `parse`, or for twins."""
    saves = [DcpSave.opened(path, folder, options) for folder in folders]
    source = saves[0].source
    if saves[0].prefix or len(saves) > 1:
        source = Combined.prefixed({save.prefix: save.source for save in saves})
    builder = ContentsBuilder("dcp", path, source, options.on_conflict)
    builder.about = About("PyTorch's distributed checkpoint (DCP)")
    objects: dict[Steps, Any] = {}
    for save in saves:
        save.open_ahead()
        for fqn, spans in save.metadata.objects.items():
            path_of = save.metadata.paths.get(fqn, (fqn,))
            for span in spans:
                objects[path_of] = read_object(builder, fqn, span, save)
        check_facts(save)
    _tensors(builder, saves, objects, options)
    for save in saves:
        account_for_files(builder, save)
    return builder.contents()


@dataclass(frozen=True)
class DcpSave:
    """The files of one call of `save` below `prefix`; items `left` are not to be read."""

    prefix: str
    metadata: DcpMetadata
    source: DcpSource
    left: frozenset[str]

    @classmethod
    def opened(cls, path: FilePath, folder: FilePath, options: Options) -> DcpSave:
        require_metadata(folder)
        prefix = "" if folder == path else f"{folder.below(path)}/"
        metadata = read_metadata(folder, _of_optimizers if options.weights_only else None)
        left = _of_optimizers(metadata) if options.weights_only else frozenset[str]()
        return cls(prefix, metadata, DcpSource(metadata), left)

    def open_ahead(self) -> None:
        self.source.open_ahead(itertools.chain.from_iterable(self.metadata.objects.values()))


def check_facts(save: DcpSave) -> None:
    """Raise FormatError if ranks' objects are of different steps; those left are not read."""
    facts = Facts(save.metadata.folder)
    for fqn, spans in save.metadata.objects.items():
        if len(spans) == 1 or "data" in fqn or fqn in save.left:
            continue
        for span in spans:
            try:
                file = save.source.object(fqn, span)
            except UnsafePickle:
                continue  # which is left out, and says so
            facts.state_all(file, span.file, fqn, file.tree, only=(*COUNTS, *RATES))


def _of_optimizers(metadata: DcpMetadata) -> frozenset[str]:
    paths = {fqn: metadata.paths.get(fqn, (fqn,)) for fqn in (*metadata.tensors, *metadata.objects)}
    roots = optimizer_paths(paths.values())
    return frozenset(
        fqn for fqn, path in paths.items() if any(in_optimizer(path, root) for root in roots)
    )


def _tensors(
    builder: ContentsBuilder,
    saves: Sequence[DcpSave],
    objects: Mapping[Steps, Any],
    options: Options,
) -> None:
    stored: dict[str, StateTensor] = {}
    for save in saves:
        paths, tensors = _paths(save.metadata), save.metadata.tensors
        # The paths are in the order of the state dict, the tensors in that of the ranks that wrote
        # them.
        of_save = {
            fqn: StateTensor(paths[fqn], tensors[fqn].shape, is_trainable(tensors[fqn].dtype))
            for fqn in paths
            if fqn in tensors
        }
        if twice := stored.keys() & of_save.keys():
            raise FormatError(f"{builder.path}: {min(twice)} is in two of the saves")
        stored |= of_save
    places = builder.placed(stored, objects, options)
    for save in saves:
        for fqn, tensor in save.metadata.tensors.items():
            keys = [save.prefix + chunk_key(fqn, chunk) for chunk in tensor.chunks]
            if keys:
                chunks = f", one of {len(keys)} chunks" if len(keys) > 1 else ""
                builder.place(places, fqn, keys, tensor.layout(), chunks)
            elif fqn in places.left:
                continue
            elif math.prod(tensor.shape):
                raise FormatError(
                    f"{builder.path}: {fqn} has shape {list(tensor.shape)}, but by the metadata no"
                    " chunk of it is in any file: that of a rank is missing, or it is damaged"
                )
            else:  # a tensor without elements, of which no rank wrote a chunk
                empty = np.empty(tensor.shape, tensor.dtype)
                table = save.prefix + save.metadata.files[0]
                builder.constant(*places.at[fqn], empty, f"{table}:{fqn}")
    builder.notes += places.notes
    if coded := [fqn for save in saves for fqn, _ in save.metadata.short]:
        builder.notes.append(_CODED.format(len({*coded}), min(coded)))
    # torch 1.13 saved flat dicts only, and flatten_state_dict=False takes a dict as it is
    if not any(save.metadata.paths for save in saves):
        builder.notes.append(
            "no paths were recorded, so nothing tells weights from other tensors: all tensors of"
            " the flat state dict are under `param`, by the names it had"
        )


def _paths(metadata: DcpMetadata) -> Mapping[str, Steps]:
    """The path of everything stored. Raises FormatError for planner_data of other names."""
    if not metadata.paths:
        return {fqn: (fqn,) for fqn in (*metadata.tensors, *metadata.objects)}
    file = metadata.folder / metadata.files[0]
    # Planners of torch that store objects of the first rank only record the paths of all ranks'
    # objects.
    stored = metadata.tensors.keys() | metadata.objects.keys()
    lost = sorted(stored - metadata.paths.keys())
    if lost:
        raise FormatError(
            f"{file}: {lost[0]!r} is not in planner_data, which has others; "
            "the metadata is damaged, or of a planner not known here"
        )
    for fqn, path in metadata.paths.items():
        if ".".join(map(str, path)) != fqn:
            raise FormatError(
                f"{file}: planner_data says that {fqn!r} was at {path}, which has another "
                "flattened name; the metadata is damaged, or of a planner not known here"
            )
    return metadata.paths


def read_object(builder: ContentsBuilder, fqn: str, span: Span, save: DcpSave) -> Any:
    """The value of an object, for extras; None of code, of data, and of damage where it is left."""
    in_file = save.prefix + span.file
    item = f"{in_file}:{fqn}"
    try:
        file = save.source.object(fqn, span)
    except (FormatError, OSError) as error:
        if fqn in save.left:
            reason = f"only weights were asked for; it could not be read either: {error}"
            builder.skip(item, "object", reason)
            return None
        if not isinstance(error, UnsafePickle):
            raise
        builder.leave_out(item, f"the object {fqn}", error)
        return None
    nbytes = tensor_bytes(file.tree)
    if nbytes > MAX_EXTRA_BYTES:
        reason = f"an object with {nbytes} bytes of tensors inside, which is data and no setting"
        builder.skip(item, "object", reason)
        builder.notes.append(
            f"{fqn} in {in_file} was left out: {reason}; save it with flatten_state_dict=True"
        )
        return None
    builder.unknown |= file.unknown
    builder.extra(in_file, fqn, file.tree, file)
    return file.tree


def account_for_files(builder: ContentsBuilder, save: DcpSave) -> None:
    """Note every file of a save that no tensor or object uses, or not all of it."""
    metadata, prefix = save.metadata, save.prefix
    used: Counter[str] = Counter()
    for _, span in metadata.spans():
        used[span.file] += span.length
    table = metadata.files[0]
    for path in sorted(metadata.folder.children()):
        name = prefix + path.name
        if path.name in metadata.files:
            reason = "says which chunk is where; its content is in the tree's names and shapes"
            builder.skip(name, "metadata", reason)
            continue
        if path.name == LIGHTNING and not save.left:
            keep_beside(builder, name, path, Facts(metadata.folder))
            continue
        size = path.size()
        rest = size - used[path.name]
        if path.name not in used:
            builder.skip(name, f"{size} bytes", f"no item of {table} lies in it")
            if size and path.suffix == ".distcp":
                builder.notes.append(
                    f"{name} belongs to no tensor of this checkpoint: it is left from another save"
                )
        elif rest:
            # A replica that another rank wrote too, or a file of another save: the table of
            # contents cannot tell.
            reason = f"bytes between or after the items that {table} names"
            builder.skip(name, f"{rest} bytes", reason)
            builder.notes.append(f"{name} has {rest} bytes that are not items of this checkpoint")
