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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax_ucp.errors import FormatError, LayoutError, UnsafePickle
from jax_ucp.files.path import FilePath
from jax_ucp.formats.dcp.metadata import METADATA_FILE, DcpMetadata, read_metadata
from jax_ucp.formats.dcp.source import DcpSource, chunk_key
from jax_ucp.formats.megatron.dist_names import Run, Tensor, is_optimizers
from jax_ucp.formats.megatron.dist_run import run_fields
from jax_ucp.formats.megatron.dist_zarr import ARRAY_FILE, ZarrChunks, zarr_array
from jax_ucp.formats.megatron.files import Args, args_of, check_iteration, iteration_folder
from jax_ucp.formats.nested import as_dict
from jax_ucp.formats.torch_save.file import TorchFile
from jax_ucp.formats.torch_save.tensor_names import StoredTensor
from jax_ucp.formats.torch_save.unpickle import what_is
from jax_ucp.json_text import decode_json
from jax_ucp.layout.box import Box
from jax_ucp.sources.checks import Check, Extent, verdicts
from jax_ucp.sources.protocol import ArraySource

CONFIG_FILE, COMMON_FILE = "metadata.json", "common.pt"
TRAIN_STATE = "train_state.pt"  # of Megatron-Bridge
MAX_CONFIG_BYTES = 1 << 20
_NEMO_WEIGHTS = "weights"
COMMON_OBJECT = "common_state/shard_0_1"
_CHUNK = re.compile(r"\d+(\.\d+)*")
_SHARD = re.compile(r"shard_[\d.]*_[\d.]*")
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_(\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class StoredObject:
    """An object that is not a tensor, in `file`; from torch_dist a list of one item."""

    file: str
    open: Callable[[], TorchFile]


@dataclass(frozen=True)
class DistFiles:
    """Everything that is stored. `source` has the chunks of the tensors.

    `common_name` is where `common` lies, and `tree` what is in it. `left` names what is the
    optimizer's, where only weights were asked for: objects, and folders of zarr. `beside` names
    what lies in folders of zarr and is no part of it.
    """

    folder: FilePath
    args: Args
    common: TorchFile
    tree: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    objects: Mapping[str, StoredObject]
    source: ArraySource
    files: Sequence[str]
    left: Sequence[str] = ()
    beside: Sequence[str] = ()
    common_name: str = COMMON_FILE

    def object_checks(self, extent: Extent, arrays: Collection[str]) -> Iterator[Check]:
        """For each object, whether its bytes have the CRC recorded, where one is. No leaf rests
        on them; `arrays` are the prefixes of those whose tensors have checks of their own.
        """
        for key, stored in self.objects.items() if extent == "full" else ():
            if f"{stored.file}:{key}:" not in arrays:
                yield Check(key, frozenset(), 0, partial(_fault, stored))


# What a backend stores: the last six fields of `DistFiles`.
_Stored = tuple[
    Mapping[str, Tensor],
    Mapping[str, StoredObject],
    ArraySource,
    Sequence[str],
    Sequence[str],
    Sequence[str],
]


def _fault(stored: StoredObject) -> str | None:
    try:
        return next((fault for _, fault in verdicts(stored.open().checks("full")) if fault), None)
    except UnsafePickle:
        return None  # which is skipped, and says so
    except FormatError as error:
        return str(error)


def is_checkpoint(path: FilePath) -> bool:
    """Whether the directory, or its latest iteration, is a checkpoint of torch_dist or zarr."""
    folder = checkpoint_folder(path)
    if not folder.is_dir():  # which is refused, unless it is the legacy format's
        folder = path
    return _is_iteration(folder)


def checkpoint_folder(path: FilePath) -> FilePath:
    """The folder of the iteration in a save directory; of a checkpoint of NeMo, or of the only one
    in a folder of such, its `weights`; else the path itself.
    """
    folder = iteration_folder(path)
    if folder != path or _is_iteration(path):
        return folder
    inside = [child for child in path.children() if child.is_dir()]
    if not any(child.name == _NEMO_WEIGHTS for child in inside):
        path = inside[0] if len(inside) == 1 else path
    weights = path / _NEMO_WEIGHTS
    has_table = (weights / METADATA_FILE).is_file()  # whose it is, the formats ask
    return weights if has_table or (weights.is_dir() and _is_iteration(weights)) else folder


def _is_iteration(folder: FilePath) -> bool:
    """Whether `metadata.json` says so, or what lies there if that file is lost or damaged.

    What only the keys in `.metadata` say, `fsdp` asks, which reads that file.
    """
    if _backend(folder) is not None:
        return True
    has_table = (folder / METADATA_FILE).is_file()
    return _has_zarr_objects(folder) or (has_table and (folder / COMMON_FILE).is_file())


def _has_zarr_objects(folder: FilePath) -> bool:
    """Whether there is a folder with shards of an object, as the backend `zarr` has them."""
    names = ("rng_state", "._extra_state")
    objects = [child for child in folder.children() if child.name.endswith(names)]
    return any(
        path.name.startswith("shard_") for child in objects for path in child.matching(".pt")
    )


def without_backend(folder: FilePath) -> FormatError:
    """The error for a checkpoint of which nothing says that its save ended.

    Facts: `save` in `megatron/core/dist_checkpointing/serialization.py` of Megatron-LM
    core_v0.16.1 to core_v0.19.0, which calls `save_config` last.
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
    """The checkpoint of one iteration; with `weights_only` nothing of the optimizer is opened.

    Raises FormatError, naming the file, where one is missing or of another save.
    """
    backend = _backend(folder)
    if backend is None:
        raise without_backend(folder)
    read = {"torch_dist": _torch_dist, "zarr": _zarr}.get(backend)
    if read is None:
        raise FormatError(
            f"{folder / CONFIG_FILE} names the backend {backend!r:.80}; only torch_dist and zarr"
            " are read"
        )
    tensors, objects, source, names, left, beside = read(
        folder, is_optimizers if weights_only else _nothing
    )
    common_name, common, tree = _common(folder, objects)
    # Other trainers on Megatron-Core save no args.
    args = args_of(tree, common.path) if "args" in tree else run_fields(folder, tensors, objects)
    check_iteration(common.path, folder, tree.get("iteration"))
    _check_train_state(folder, tree.get("iteration"))
    own = {key: stored for key, stored in objects.items() if key != COMMON_OBJECT}
    _check_objects(folder, own)
    return DistFiles(
        *(folder, Args(args), common, tree, tensors, own),
        *(source, names, left, beside, common_name),
    )


def _check_train_state(folder: FilePath, iteration: Any) -> None:
    """Raise FormatError where Megatron-Bridge's own file is of another step."""
    path = folder / TRAIN_STATE
    if not path.is_file():
        return
    state = TorchFile(path)
    step = as_dict(state.tree).get("step")
    if isinstance(step, StoredTensor) and step.shape == ():
        step = state.read(step.key, Box((), ())).item()
        check_iteration(path, folder, step)
        if isinstance(iteration, int) and step != iteration:
            raise FormatError(
                f"{path} is of step {step}, what the ranks have in common of {iteration}: one of"
                " them is of another step or run"
            )


def _common(
    folder: FilePath, objects: Mapping[str, StoredObject]
) -> tuple[str, TorchFile, dict[str, Any]]:
    """What all ranks have in common: where it lies, its file, and the dict in it."""
    if COMMON_OBJECT in objects:  # a `common.pt` beside it is of another save
        stored = objects[COMMON_OBJECT]
        name, common = f"{stored.file}:{COMMON_OBJECT}", stored.open()
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
    if not isinstance(tree, dict):
        raise FormatError(f"{folder / name} should hold a dict, but holds {what_is(tree)}")
    return name, common, tree


def _nothing(key: str) -> bool:
    return False


def _backend(folder: FilePath) -> str | None:
    path = folder / CONFIG_FILE
    if not path.is_file() or path.size() > MAX_CONFIG_BYTES:
        return None
    try:
        config = decode_json(path.read_text())
    except ValueError:
        return None
    backend = as_dict(config).get("sharded_backend")
    return backend if isinstance(backend, str) else None


def _check_objects(folder: FilePath, objects: Iterable[str]) -> None:
    """Raise FormatError where `<name>/shard_<place>_<grid>` is not there for each place."""
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


def _torch_dist(folder: FilePath, leave: Callable[[str], bool]) -> _Stored:
    metadata = read_metadata(
        folder, lambda every: set(filter(leave, (fqn for fqn, _ in every.spans())))
    )
    source = DcpSource(metadata)
    # a weight and its states lie in equal chunks, of which one proof will do
    alike: dict[object, str] = {}
    for fqn in itertools.filterfalse(leave, metadata.tensors):
        entry = metadata.tensors[fqn]
        boxes = tuple((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
        alike.setdefault((entry.shape, boxes), fqn)
    for fqn in alike.values():
        _check_chunks(metadata, fqn)
    tensors: dict[str, Tensor] = {}
    for fqn, entry in metadata.tensors.items():
        runs = tuple(Run(chunk_key(fqn, chunk), 0, chunk.box) for chunk in entry.chunks)
        tensors[fqn] = Tensor(entry.shape, entry.dtype, runs)
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
    return tensors, objects, source, files, left, []


def _check_chunks(metadata: DcpMetadata, fqn: str) -> None:
    try:
        metadata.tensors[fqn].layout().check()
    except LayoutError as error:
        raise LayoutError(f"{metadata.folder / METADATA_FILE}: {fqn}: {error}") from None


def _zarr(folder: FilePath, leave: Callable[[str], bool]) -> _Stored:
    folders = sorted(path.name for path in folder.children() if path.is_dir())
    _check_case(folder, folders)
    names = list(itertools.filterfalse(leave, folders))
    for name in names:
        _check_described(folder / name)
    described = [name for name in names if (folder / name / ARRAY_FILE).exists()]
    arrays = {name: zarr_array(folder, name) for name in described}
    tensors = {
        name: Tensor(array.shape, array.dtype, array.runs()) for name, array in arrays.items()
    }
    chunks = ZarrChunks(folder, arrays)
    objects: dict[str, StoredObject] = {}
    beside = list(chunks.clutter)
    for name in itertools.filterfalse(arrays.__contains__, names):
        stored = dict(_zarr_objects(folder / name))
        objects |= stored
        beside += _files_beside(folder / name, stored)
    files = [*arrays, *{key.partition("/")[0] for key in objects}]
    return tensors, objects, chunks, files, list(filter(leave, folders)), beside


def _check_case(folder: FilePath, names: Sequence[str]) -> None:
    """Raise FormatError for a folder in capitals: its name is that of a tensor, and none of
    Megatron's is.
    """
    if changed := [name for name in names if name.isupper()]:
        raise FormatError(
            f"{folder / changed[0]} is in capitals, as a file system writes names that keeps no"
            " case: the name of its tensor is lost. Give it back its name"
        )


def _files_beside(folder: FilePath, stored: Mapping[str, StoredObject]) -> list[str]:
    """The files in a folder of objects that are none."""
    if not stored:
        return []
    read = {one.file for one in stored.values()}
    files = [f"{folder.name}/{path.name}" for path in folder.children()]
    return [file for file in files if file not in read]


def _zarr_objects(folder: FilePath) -> Iterator[tuple[str, StoredObject]]:
    """The objects in a folder, by their keys. Raises FormatError for one that Megatron never
    calls so, such as the second copy that a browser numbers.
    """
    for path in folder.matching(".pt"):
        if not path.name.startswith("shard_"):
            continue
        if not _SHARD.fullmatch(path.stem):
            raise FormatError(
                f"{path} is not a shard of {folder.name} by its name, which should be"
                " shard_<place>_<grid>.pt: it is a second copy, or was renamed. Move it away, or"
                " give it its name back"
            )
        file = f"{folder.name}/{path.name}"
        yield f"{folder.name}/{path.stem}", StoredObject(file, partial(TorchFile, path))


def _check_described(folder: FilePath) -> None:
    """Raise FormatError where a folder has chunks of a tensor that nothing describes."""
    path = folder / ARRAY_FILE
    if not path.exists() and any(_CHUNK.fullmatch(p.name) for p in folder.children()):
        raise FormatError(f"{path} is missing, but there are chunks of the tensor")
