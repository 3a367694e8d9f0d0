"""What `.metadata` says: the table of contents of PyTorch's distributed checkpoints (DCP).

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. It has each tensor's
shape, dtype and chunks, and for each chunk, found by the tensor's name and the chunk's offsets, the
bytes of a file that hold it. With `use_collectives=False` every rank writes `__<rank>.metadata`
instead, which describes what that rank wrote; together they say the same, and a tensor that every
rank had is stored once per rank: as replicas.

Facts: `torch/distributed/checkpoint/metadata.py`, `filesystem.py` and `default_planner.py` of torch
2.13; torch 1.13 has the same classes in `torch.distributed._shard.checkpoint`.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.in_flight import stat_all
from jax_ucp.files.path import FilePath
from jax_ucp.files.source_files import note
from jax_ucp.formats.huggingface.stand_ins import stand_in
from jax_ucp.formats.torch_save import unpickle as safe_pickle
from jax_ucp.formats.torch_save.tensor_names import NAMES as TORCH_NAMES
from jax_ucp.formats.torch_save.unpickle import Name, Record, inert, known, table, what_is
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout, Shape

METADATA_FILE = ".metadata"
# Of what was put through zstd, a byte may hold so many: a block has 4 at least, and inflates to 128
# KiB at most.
MAX_RATIO = 1 << 15
MIN_CODE_BITS = 4  # of an element, where torchao's optimizers store codes
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_RANK_DATA = re.compile(r"__(\d+)_\d+\.distcp$")
_MAX_NDIM, _MAX_ELEMENTS = 32, 1 << 62
_NOT_IN_NAMES = frozenset("/\\:\0")

_CLASSES = (
    "metadata.Metadata",
    "metadata.MetadataIndex",
    "metadata.StorageMeta",
    "metadata.TensorProperties",
    "metadata.TensorStorageMetadata",
    "metadata.BytesStorageMetadata",
    "metadata.ChunkStorageMetadata",
    "metadata._MEM_FORMAT_ENCODING",
    "filesystem._StorageInfo",
    "planner.SavePlan",
    "planner.WriteItem",
    "planner.WriteItemType",
    "planner.TensorWriteData",
)
_NAMES: dict[str, object] = {
    **TORCH_NAMES,
    **table(
        *(inert(f"torch.distributed.checkpoint.{name}") for name in _CLASSES),
        *(inert(f"torch.distributed._shard.checkpoint.{name}") for name in _CLASSES),
        inert("torch.distributed._shard.sharded_tensor.metadata.TensorProperties"),
        inert("torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING"),
        # Megatron-LM core 0.15 writes subclasses that add nothing a reader needs.
        inert("megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"),
        inert("megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan"),
    ),
}


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of one item: `length` of them from `offset` of `file`, put through `transforms`
    when written.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(map(operator.add, self.offsets, self.sizes)))


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint and its chunks, of which equal boxes are replicas."""

    shape: Shape
    dtype: np.dtype
    chunks: tuple[Chunk, ...]

    def layout(self) -> ParamLayout:
        """Where the chunks lie. A rank that had nothing of the tensor wrote a chunk of no
        elements.
        """
        fragments = [
            Fragment(i, Box.whole(c.sizes), c.box)
            for i, c in enumerate(self.chunks)
            if 0 not in c.sizes
        ]
        return ParamLayout(
            self.shape, tuple(chunk.sizes for chunk in self.chunks), tuple(fragments)
        )


@dataclass(frozen=True)
class DcpMetadata:
    """Everything that a DCP checkpoint says it holds.

    `tensors` and `objects` go by flattened name (fqn). `paths[fqn]` is the path in the nested state
    dict that was saved, where the planner recorded it; names contain dots, so only the path tells
    where a key ends. `files` are those of the metadata itself. `short` are chunks whose items have
    fewer bytes than their elements: codes, or damaged.
    """

    folder: FilePath
    files: tuple[str, ...]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, tuple[Span, ...]]
    paths: Mapping[str, tuple[str | int, ...]]
    short: Sequence[tuple[str, Chunk]] = ()

    def spans(self) -> Iterable[tuple[str, Span]]:
        """Every item that is stored, with the name of what it holds."""
        for fqn, tensor in self.tensors.items():
            yield from ((fqn, chunk.span) for chunk in tensor.chunks)
        for fqn, spans in self.objects.items():
            yield from ((fqn, span) for span in spans)


def metadata_files(folder: FilePath) -> list[FilePath]:
    """`.metadata`, or without it one `__<rank>.metadata` per rank, in order."""
    if (folder / METADATA_FILE).is_file():
        return [folder / METADATA_FILE]
    ranks: dict[int, FilePath] = {}
    for path in folder.children():
        if match := _RANK_METADATA.fullmatch(path.name):
            ranks[int(match[1])] = path
    return [ranks[rank] for rank in sorted(ranks)]


def read_metadata(
    folder: FilePath, leave: Callable[[DcpMetadata], Collection[str]] | None = None
) -> DcpMetadata:
    """The table of contents of the checkpoint in `folder`, every span of it proved to lie in a file
    that is there.

    `leave` says of which items that need not be so, because nobody will read them.

    Raises FormatError, naming the file and the tensor, for metadata that contradicts itself or the
    files.
    """
    files = metadata_files(folder)
    if not files:
        raise FormatError(f"{folder} has neither {METADATA_FILE} nor __<rank>.metadata")
    _require_ranks(folder, [path.name for path in files])
    tables = _Tables(folder)
    for path in files:
        _add(tables, path)
    try:
        metadata = tables.metadata(tuple(path.name for path in files))
    except FormatError as error:
        raise type(error)(f"{files[0] if len(files) == 1 else folder}: {error}") from error
    left = leave(metadata) if leave else ()
    _check_spans(metadata, left)
    return replace(metadata, short=[*_short(metadata, left)])


def _require_ranks(folder: FilePath, names: Sequence[str]) -> None:
    """Raise FormatError where ranks wrote metadata, and that of one is missing."""
    if METADATA_FILE in names:
        return
    data = filter(None, (_RANK_DATA.match(path.name) for path in folder.children()))
    wrote = {f"__{match[1]}.metadata" for match in data}
    wanted = wrote | {f"__{rank}.metadata" for rank in range(len(names))}
    if absent := sorted(wanted - set(names)):
        raise FormatError(
            f"{folder}/{absent[0]} is missing: {names[-1]} is there, and each rank wrote one"
        )


def _add(tables: _Tables, path: FilePath) -> None:
    try:
        tables.add(path)
    except FormatError as error:
        if why := stand_in(path):
            raise FormatError(f"{path}: {why}") from error
        raise type(error)(f"{path}: {error}") from error


class _Tables:
    """The tables of one or several metadata files, merged."""

    def __init__(self, folder: FilePath):
        self.folder = folder
        self.tensors: dict[str, tuple[Shape, np.dtype]] = {}
        self.declared: dict[str, set[tuple[Shape, Shape]]] = defaultdict(set)
        self.chunks: dict[str, dict[Chunk, None]] = defaultdict(dict)
        self.objects: dict[str, dict[Span, None]] = defaultdict(dict)
        self.paths: dict[str, tuple[str | int, ...]] = {}

    def add(self, path: FilePath) -> None:
        top = _fields(safe_pickle.load(path.read_bytes(), _NAMES), "Metadata", "the file")
        spans = _spans(_dict(top.get("storage_data"), "storage_data"))
        used: set[tuple[str, Shape | None]] = set()
        for fqn, entry in _dict(top.get("state_dict_metadata"), "state_dict_metadata").items():
            if not isinstance(fqn, str):
                raise FormatError(
                    f"state_dict_metadata has the key {fqn!r:.80}, which is not a name"
                )
            used |= self._add_entry(fqn, entry, spans)
        if both := self.objects.keys() & self.tensors.keys():
            raise FormatError(f"{min(both)!r} is a tensor and an object at once")
        for fqn, offset in spans.keys() - used:
            raise FormatError(
                f"storage_data has bytes of {fqn!r:.200} at {offset}, where it has no chunk"
            )
        # Some are None (torch 1.13, flatten_state_dict=False), or a planner's own kind of data.
        if "planner_data" not in top:
            raise FormatError("the Metadata has no planner_data, which every version of it has")
        paths = known(top["planner_data"])
        if isinstance(paths, dict):
            self.paths |= {fqn: steps for fqn, steps in paths.items() if _is_path(steps)}

    def _add_entry(
        self, fqn: str, entry: Any, spans: Mapping[tuple[str, Shape | None], Span]
    ) -> set[tuple[str, Shape | None]]:
        """Add a tensor or an object; returns the items that are bytes of it."""
        if isinstance(entry, Record) and entry.type.endswith(".BytesStorageMetadata"):
            if (fqn, None) not in spans:
                raise FormatError(f"the object {fqn} is in no file by storage_data")
            self.objects[fqn][spans[fqn, None]] = None
            return {(fqn, None)}
        declared = self._tensor(fqn, _fields(entry, "TensorStorageMetadata", fqn))
        self.declared[fqn].update(declared)
        self.chunks[fqn].update(dict.fromkeys(_stored(fqn, declared, spans)))
        return {(fqn, offsets) for offsets, _ in declared}

    def _tensor(self, fqn: str, entry: Mapping[str, Any]) -> list[tuple[Shape, Shape]]:
        """The chunks that are said to be of a tensor: (offsets, sizes), each once."""
        shape, dtype = _shape(entry.get("size"), fqn), _dtype(entry.get("properties"), fqn)
        if self.tensors.setdefault(fqn, (shape, dtype)) != (shape, dtype):
            raise FormatError(
                f"{fqn} is {dtype} {list(shape)} here, but {self.tensors[fqn][1]}"
                f" {list(self.tensors[fqn][0])} by the metadata of an earlier rank; files of"
                " different saves are in the folder, or one is damaged"
            )
        chunks = entry.get("chunks")
        if not isinstance(chunks, list):
            raise FormatError(f"{fqn}: its chunks should be a list, but are {what_is(chunks)}")
        declared: dict[tuple[Shape, Shape], None] = {}
        for chunk in chunks:
            fields = _fields(chunk, "ChunkStorageMetadata", fqn)
            offsets, sizes = _shape(fields.get("offsets"), fqn), _shape(fields.get("sizes"), fqn)
            if not len(offsets) == len(sizes) == len(shape):
                raise FormatError(
                    f"{fqn} has shape {list(shape)}, but a chunk of {list(sizes)} at"
                    f" {list(offsets)}"
                )
            declared[offsets, sizes] = None
        return list(declared)

    def metadata(self, files: tuple[str, ...]) -> DcpMetadata:
        for fqn, (shape, _) in self.tensors.items():
            if 0 in shape:
                _check_ends(fqn, shape, self.declared[fqn])
        tensors = {
            fqn: TensorEntry(*about, tuple(self.chunks[fqn])) for fqn, about in self.tensors.items()
        }
        objects = {fqn: tuple(spans) for fqn, spans in self.objects.items()}
        return DcpMetadata(self.folder, files, tensors, objects, self.paths)


def _check_ends(fqn: str, shape: Shape, chunks: Collection[tuple[Shape, Shape]]) -> None:
    """Raise FormatError where chunks, if there are any, do not end where a tensor does.

    A tensor with elements is proved to be tiled; of one without, only this says that its shape is
    right.
    """
    if not chunks:
        return
    for axis, n in enumerate(shape):
        end = max(offsets[axis] + sizes[axis] for offsets, sizes in chunks)
        if n and n != end:
            raise FormatError(
                f"{fqn} has shape {list(shape)}, but its chunks end elsewhere on axis {axis}"
            )


def _stored(
    fqn: str,
    declared: Sequence[tuple[Shape, Shape]],
    spans: Mapping[tuple[str, Shape | None], Span],
) -> Iterable[Chunk]:
    """The chunks of a tensor with their bytes. One without elements may share its offsets with
    another.
    """
    with_elements = {offsets for offsets, sizes in declared if 0 not in sizes}
    for offsets, sizes in declared:
        is_stored = (fqn, offsets) in spans
        if 0 in sizes and (offsets in with_elements or not is_stored):
            continue
        if not is_stored:
            raise FormatError(
                f"{fqn}: the chunk {list(sizes)} at {list(offsets)} is in no file by storage_data; "
                "the metadata of a rank is missing, or damaged"
            )
        yield Chunk(offsets, sizes, spans[fqn, offsets])


def _spans(storage_data: Mapping[Any, Any]) -> dict[tuple[str, Shape | None], Span]:
    """Where the items are: of an object, or of the chunk of a tensor at an offset."""
    spans: dict[tuple[str, Shape | None], Span] = {}
    for index, info in storage_data.items():
        key, span = _index(index), _span(info)
        if spans.setdefault(key, span) != span:
            raise FormatError(
                f"{key[0]} at {key[1]} is said to be in two places: {spans[key]} and {span}"
            )
    return spans


def _is_path(steps: object) -> bool:
    if not isinstance(steps, tuple) or not steps:
        return False
    return all(type(step) in (str, int) for step in steps)


def _is_file_name(file: str) -> bool:
    return file not in ("", ".", "..") and _NOT_IN_NAMES.isdisjoint(file)


def _fields(value: Any, kind: str, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Record) or not value.type.endswith(kind):
        raise FormatError(f"{what} should be a {kind}, but is {what_is(value)}")
    return value.fields


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} should be a dict, but is {what_is(value)}")
    return value


def _shape(value: Any, fqn: str) -> Shape:
    if not _is_shape(value):
        raise FormatError(f"{fqn}: {value!r:.80} is not a shape or position in a tensor")
    return value


def _is_shape(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) > _MAX_NDIM:
        return False
    if not all(type(n) is int and n >= 0 for n in value):
        return False
    return math.prod(n or 1 for n in value) <= _MAX_ELEMENTS


def _dtype(properties: Any, fqn: str) -> np.dtype:
    """The dtype is the first of the tuple that is the properties' state; what follows differs
    between versions.
    """
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if isinstance(dtype, np.dtype):
        return dtype
    if isinstance(dtype, Name):
        raise FormatError(f"{fqn} has dtype {dtype}, which has no numpy equivalent")
    raise FormatError(f"{fqn}: its properties do not begin with a dtype")


def _index(value: Any) -> tuple[str, Shape | None]:
    fields = _fields(value, "MetadataIndex", "a key of storage_data")
    fqn, offset = fields.get("fqn"), fields.get("offset")
    if not isinstance(fqn, str):
        raise FormatError("a key of storage_data has no name")
    return fqn, None if offset is None else _shape(offset, fqn)


def _span(value: Any) -> Span:
    fields = _fields(value, "_StorageInfo", "a value of storage_data")
    file, transforms = fields.get("relative_path"), fields.get("transform_descriptors") or ()
    if not isinstance(file, str) or not _is_file_name(file):
        raise FormatError(
            f"storage_data names the file {file!r:.80}, which is not a plain file name"
        )
    offset, length = _extent(file, fields.get("offset"), fields.get("length"))
    if not isinstance(transforms, list | tuple) or not all(isinstance(t, str) for t in transforms):
        raise FormatError(f"storage_data has the transforms {transforms!r:.80} for {file}")
    return Span(file, offset, length, tuple(transforms))


def _extent(file: str, offset: Any, length: Any) -> tuple[int, int]:
    """Which bytes of a file an item is: the first, and how many, which are some."""
    are_integers = type(offset) is int and type(length) is int
    if are_integers and offset >= 0 and length > 0:
        return offset, length
    raise FormatError(
        f"storage_data has {length!r:.40} bytes from {offset!r:.40} of {file}, which cannot be"
    )


def _check_spans(metadata: DcpMetadata, left: Collection[str]) -> None:
    """Every span lies in a regular file beside the metadata, no two share a byte, and each chunk
    fits its span.

    Items that are `left` may lie anywhere.
    """
    folder = metadata.folder.folder()
    by_file: dict[str, list[tuple[Span, str]]] = defaultdict(list)
    for fqn, span in metadata.spans():
        if fqn not in left:
            by_file[span.file].append((span, fqn))
    files = stat_all(folder, list(by_file))
    for (name, spans), file in zip(by_file.items(), files, strict=True):
        path, first = metadata.folder / name, spans[0][1]
        if file is None:
            raise FormatError(
                f"{path} is missing: by the table {len(spans)} items lie in it, the first of"
                f" {first}"
            )
        if file.kind != "file":
            raise FormatError(f"{path}, in which {first} should lie, is not a file")
        note(folder, file)
        _check_apart(path, file.size, spans)


def _short(metadata: DcpMetadata, left: Collection[str]) -> Iterator[tuple[str, Chunk]]:
    """The chunks whose elements their bytes cannot hold. Raises CorruptData where codes of them
    cannot be there either: nothing is allocated for such a one.
    """
    for fqn, tensor in metadata.tensors.items():
        for chunk in tensor.chunks if fqn not in left else ():
            if _check_size(metadata.folder, fqn, tensor.dtype, chunk):
                yield fqn, chunk


def _check_apart(path: FilePath, size: int, spans: Sequence[tuple[Span, str]]) -> None:
    """Raise where spans of a file run past its end, or share a byte."""
    free, before = 0, ""
    for span, fqn in sorted(spans, key=lambda item: item[0].offset):
        end = span.offset + span.length
        if end > size:
            if why := stand_in(path):
                raise FormatError(f"{path}: {why}")
            raise CorruptData(
                f"{path} has {size} bytes, but {fqn} should end at byte {end}: the file is"
                " truncated, or belongs to another save"
            )
        if span.offset < free:
            if why := of_another_serialisation(path):
                raise FormatError(why)
            raise FormatError(
                f"{path}: the bytes of {fqn}, from {span.offset}, overlap those of {before}"
            )
        free, before = end, fqn


def of_another_serialisation(path: FilePath) -> str:
    """Why a file of items cannot be read, if it is not of torch.save's but of safetensors."""
    head = path.read_range(0, 10)
    if head[8:] != b'{"' or int.from_bytes(head[:8], "little") > path.size():
        return ""
    return (
        f"{path} has its items in safetensors (FileSystemWriter with"
        " serialization_format=SerializationFormat.SAFETENSORS), which is not read. Save without"
        " serialization_format, or with HuggingFaceStorageWriter"
    )


def _check_size(folder: FilePath, fqn: str, dtype: np.dtype, chunk: Chunk) -> bool:
    """Whether the bytes of a chunk are too few for its elements, and may be codes of them. Raises
    CorruptData where they are too few for that too.
    """
    elements, room = math.prod(chunk.sizes), chunk.span.length
    room *= MAX_RATIO if chunk.span.transforms else 1
    if elements * MIN_CODE_BITS > 8 * room:
        raise too_short(folder, fqn, dtype, chunk)
    return elements * dtype.itemsize > room


def too_short(folder: FilePath, fqn: str, dtype: np.dtype, chunk: Chunk) -> CorruptData:
    """The error for a chunk whose bytes cannot hold its elements."""
    nbytes = math.prod(chunk.sizes) * dtype.itemsize
    return CorruptData(
        f"{folder / METADATA_FILE}: {fqn} has a chunk of {dtype} {list(chunk.sizes)}, {nbytes}"
        f" bytes, but the item of it in {chunk.span.file} has {chunk.span.length}"
    )
