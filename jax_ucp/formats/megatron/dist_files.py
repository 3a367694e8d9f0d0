"""The files of a torch_dist checkpoint: tensors in chunks, objects, and what ranks have in common.

`metadata.json` names the backend that wrote the tensors: `torch_dist` is PyTorch's distributed
checkpoint, `zarr` (up to core 0.15) has a folder for each tensor. What ranks have in common, such
as args, is in `common.pt`; from core 0.19 on it is an object like others.

Facts: `megatron/core/dist_checkpointing/` of Megatron-LM core_v0.13.0 to core_v0.19.0.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax_ucp.arrays.checks import Check, Extent, checks_of, verdicts
from jax_ucp.arrays.protocol import ArraySource
from jax_ucp.codecs.tensor_names import StoredTensor
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import FormatError, UnsafePickle, naming
from jax_ucp.files.path import FilePath
from jax_ucp.formats.dcp.marks import METADATA_FILE
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.formats.dcp.source import DcpSource, chunk_key
from jax_ucp.formats.megatron.dist_names import DistTensor, is_optimizers
from jax_ucp.formats.megatron.dist_run import run_fields
from jax_ucp.formats.megatron.dist_zarr import ARRAY_FILE, ZarrArray, ZarrChunks, zarr_array
from jax_ucp.formats.megatron.marks import COMMON_FILE, CONFIG_FILE, backend_of
from jax_ucp.formats.megatron.model import StoredRun
from jax_ucp.formats.megatron.run import Args, args_of, check_iteration
from jax_ucp.formats.nested import as_dict, require_dict

TRAIN_STATE = "train_state.pt"  # of Megatron-Bridge
COMMON_OBJECT = "common_state/shard_0_1"
_CHUNK = re.compile(r"\d+(\.\d+)*")
_SHARD = re.compile(r"shard_[\d.]*_[\d.]*")
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_(\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class StoredObject:
    """An object that is not a tensor, in `file`. In torch_dist it is a list of one item."""

    file: str
    load: Callable[[], TorchFile]


@dataclass(frozen=True)
class ObjectSums:
    """The claim that the bytes of an object have the CRC that is recorded, if one is."""

    label: str
    stored: StoredObject

    def checks(self, leaves: frozenset[str], extent: Extent) -> Iterable[Check]:
        return [Check(self.label, leaves, 0, self._fault)] if extent == "full" else []

    def _fault(self) -> str | None:
        try:
            found = verdicts(checks_of(self.stored.load().claims(), "full"))
            return next((fault for _, fault in found if fault), None)
        except UnsafePickle:
            return None  # which is skipped, and says so
        except FormatError as error:
            return str(error)


@dataclass(frozen=True)
class StoredItems:
    """The tensors and objects that a backend stores; `source` has the chunks of the tensors.

    `files` are the names of the files or folders that hold them. `left` names the objects and
    folders of the optimizer that are not read because only weights were asked for. `beside` names
    unknown files in folders of zarr.
    """

    tensors: Mapping[str, DistTensor]
    objects: Mapping[str, StoredObject]
    source: ArraySource
    files: Sequence[str]
    left: Sequence[str] = ()
    beside: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class DistFiles(StoredItems):
    """Everything that is stored. `common` is the file or object with the values that all ranks have
    in common, `common_name` its name and `tree` its content.
    """

    folder: FilePath
    args: Args
    common: TorchFile
    tree: Mapping[str, Any]
    common_name: str = COMMON_FILE


def without_backend(folder: FilePath) -> FormatError:
    """The error for a checkpoint without the file that is written when a save has ended.

    Facts: `save` in `megatron/core/dist_checkpointing/serialization.py` of Megatron-LM core_v0.16.1
    to core_v0.19.0, which calls `save_config` last.
    """
    path = folder / CONFIG_FILE
    state = "does not name the backend: it is cut or damaged" if path.exists() else "is missing"
    backend = "torch_dist" if (folder / METADATA_FILE).is_file() else "zarr"
    return FormatError(
        f"{path} {state}. Megatron writes it when a save has ended, so this one did not end, or the"
        " file was lost: copy it again; if you know that the save ended, write"
        f' {{"sharded_backend": "{backend}"}} into it'
    )


def open_files(folder: FilePath, weights_only: bool = False) -> DistFiles:
    """The checkpoint of one iteration. Raises FormatError, naming the file."""
    backend = backend_of(folder)
    if backend is None:
        raise without_backend(folder)
    read = {"torch_dist": _torch_dist, "zarr": _zarr}.get(backend)
    if read is None:
        raise FormatError(
            f"{folder / CONFIG_FILE} names the backend {backend!r:.80}; only torch_dist and zarr"
            " are read"
        )
    items = read(folder, is_optimizers if weights_only else lambda key: False)

    # the values that ranks have in common; a `common.pt` beside such an object is of another save
    objects = dict(items.objects)
    if stored := objects.pop(COMMON_OBJECT, None):
        name, common = f"{stored.file}:{COMMON_OBJECT}", stored.load()
        tree = common.tree[0] if isinstance(common.tree, list) and common.tree else common.tree
    elif (folder / COMMON_FILE).is_file():
        name, common = COMMON_FILE, TorchFile(folder / COMMON_FILE)
        tree = common.tree
    else:
        raise FormatError(
            f"{folder / COMMON_FILE} is missing, and there is no object common_state, which"
            " megatron-core has in its place from 0.19 on: it holds args, steps and param groups of"
            " all ranks"
        )
    tree = require_dict(tree, f"{folder / name}")
    # Other trainers on Megatron-Core save no args.
    if "args" in tree:
        args = args_of(tree, common.path)
    else:
        args = run_fields(folder, items.tensors, objects)
    iteration = tree.get("iteration")
    check_iteration(common.path, folder, iteration)
    _check_train_state(folder, iteration)
    _check_objects(folder, objects)
    own: dict[str, Any] = {**vars(items), "objects": objects}
    return DistFiles(
        **own, folder=folder, args=Args(args), common=common, tree=tree, common_name=name
    )


def _check_train_state(folder: FilePath, iteration: Any) -> None:
    """Raise FormatError if Megatron-Bridge's own file is of another step."""
    path = folder / TRAIN_STATE
    if not path.is_file():
        return
    state = TorchFile(path)
    step = as_dict(state.tree).get("step")
    if isinstance(step, StoredTensor) and step.shape == ():
        step = state.tensor(step).item()
        check_iteration(path, folder, step)
        if isinstance(iteration, int) and step != iteration:
            raise FormatError(
                f"{path} is of step {step}, what the ranks have in common of {iteration}: one of"
                " them is of another step or run"
            )


def _check_objects(folder: FilePath, objects: Iterable[str]) -> None:
    """Raise FormatError unless `<name>/shard_<place>_<grid>` is there for every place of a grid."""
    grids: dict[tuple[str, str], set[str]] = {}
    for match in filter(None, map(_OBJECT.fullmatch, objects)):
        grids.setdefault((match[1], match[3]), set()).add(match[2])
    for (name, grid), places in grids.items():
        sizes = [int(n) for n in grid.split(".")]
        if math.prod(sizes) <= len(places):
            continue
        every = (".".join(map(str, place)) for place in itertools.product(*map(range, sizes)))
        missing = next(place for place in every if place not in places)
        raise FormatError(
            f"{folder}: {name}/shard_{missing}_{grid} is missing, though other shards of it are"
            " there"
        )


def _torch_dist(folder: FilePath, leave: Callable[[str], bool]) -> StoredItems:
    metadata = read_metadata(
        folder, lambda every: set(filter(leave, (fqn for fqn, _ in every.spans())))
    )
    source = DcpSource(metadata)
    tensors: dict[str, DistTensor] = {}
    proved: set[object] = set()
    for fqn, entry in metadata.tensors.items():
        # a weight and its states lie in equal chunks, of which one proof will do
        boxes = entry.shape, tuple((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
        if boxes not in proved and not leave(fqn):
            proved.add(boxes)
            with naming(folder / METADATA_FILE, fqn):
                entry.layout().check()
        runs = tuple(StoredRun(chunk_key(fqn, chunk), 0, chunk.box) for chunk in entry.chunks)
        tensors[fqn] = DistTensor(entry.shape, entry.dtype, runs)
    left: list[str] = []
    objects: dict[str, StoredObject] = {}
    for fqn, spans in metadata.objects.items():
        if leave(fqn):
            left += [f"{span.file}:{fqn}" for span in spans]
            continue
        span, *others = spans
        if others:
            raise FormatError(
                f"{folder / METADATA_FILE}: the object {fqn} is in {len(others) + 1} places"
            )
        objects[fqn] = StoredObject(span.file, partial(source.object, fqn, span))
    files = sorted({span.file for _, span in metadata.spans()})
    return StoredItems(tensors, objects, source, files, left)


def _zarr(folder: FilePath, leave: Callable[[str], bool]) -> StoredItems:
    """The items of the zarr backend. Raises FormatError for names that a file system or a browser
    changed.
    """
    folders = sorted(path.name for path in folder.children() if path.is_dir())
    if changed := [name for name in folders if name.isupper()]:
        raise FormatError(
            f"{folder / changed[0]} is in capitals, as a file system writes names that keeps no"
            " case: the name of its tensor is lost. Give it back its name"
        )
    arrays: dict[str, ZarrArray] = {}
    objects: dict[str, StoredObject] = {}
    files: list[str] = []
    beside: list[str] = []
    for own in [folder / name for name in folders if not leave(name)]:
        if (own / ARRAY_FILE).exists():
            arrays[own.name] = zarr_array(folder, own.name)
            continue
        stored: dict[str, StoredObject] = {}
        others: list[str] = []
        for path in own.children():
            if _CHUNK.fullmatch(path.name):
                raise FormatError(
                    f"{own / ARRAY_FILE} is missing, but there are chunks of the tensor"
                )
            file = f"{own.name}/{path.name}"
            if not (path.name.startswith("shard_") and path.name.endswith(".pt")):
                others.append(file)
                continue
            if not _SHARD.fullmatch(path.stem):
                raise FormatError(
                    f"{path} is not a shard of {own.name} by its name, which should be"
                    " shard_<place>_<grid>.pt: it is a second copy, or was renamed. Move it away,"
                    " or give it its name back"
                )
            stored[f"{own.name}/{path.stem}"] = StoredObject(file, partial(TorchFile, path))
        if stored:
            objects |= stored
            files.append(own.name)
            beside += others
    tensors = {
        name: DistTensor(array.shape, array.dtype, array.runs()) for name, array in arrays.items()
    }
    chunks = ZarrChunks(folder, arrays)
    left = list(filter(leave, folders))
    beside = [*chunks.clutter, *beside]
    return StoredItems(tensors, objects, chunks, [*arrays, *files], left, beside)
