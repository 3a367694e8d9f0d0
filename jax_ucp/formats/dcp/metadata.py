"""The table of contents of PyTorch's distributed checkpoints (DCP), `.metadata`.

It is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: each tensor's shape, dtype and
chunks, and by the tensor's name and the chunk's offsets the bytes of a file that hold it. With
`use_collectives=False` every rank writes `__<rank>.metadata` of what it wrote; together they say
the same, and a tensor that every rank had is stored once per rank: as replicas.

Facts: `torch/distributed/checkpoint/metadata.py`, `filesystem.py` and `default_planner.py` of torch
2.13; torch 1.13 has the same classes in `torch.distributed._shard.checkpoint`.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_ucp.codecs import unpickle as safe_pickle
from jax_ucp.codecs.tensor_names import NAMES as TORCH_NAMES
from jax_ucp.codecs.unpickle import Name, Record, inert, known, table, what_is
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.in_flight import stat_all
from jax_ucp.files.path import FilePath
from jax_ucp.files.placeholders import stand_in
from jax_ucp.files.source_files import note
from jax_ucp.formats.dcp.marks import METADATA_FILE, metadata_files
from jax_ucp.formats.nested import require_dict
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, block_layout
from jax_ucp.layout.parts import Shape

# Of what was put through zstd, a byte may hold so many: a block has 4 at least, and inflates to 128
# KiB at most.
MAX_RATIO = 1 << 15
MIN_CODE_BITS = 4  # of an element, where torchao's optimizers store codes
_RANK_DATA = re.compile(r"__(\d+)_\d+\.distcp$")
_MAX_NDIM, _MAX_ELEMENTS = 32, 1 << 62
_NOT_IN_NAMES = frozenset("/\\:\0")

_OF_STORAGE = ("Tensor", "Bytes", "Chunk")
_CLASSES = (
    *("metadata.Metadata", "metadata.MetadataIndex", "metadata.StorageMeta"),
    *("metadata.TensorProperties", "metadata._MEM_FORMAT_ENCODING", "filesystem._StorageInfo"),
    *(f"metadata.{kind}StorageMetadata" for kind in _OF_STORAGE),
    *(f"planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
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


# The offsets and the sizes of a chunk.
_Block = tuple[Shape, Shape]


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of an item: `length` bytes from `offset` of `file`, which `transforms` encoded."""

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
    """A tensor of the checkpoint and its chunks. Chunks of equal boxes are replicas."""

    shape: Shape
    dtype: np.dtype
    chunks: tuple[Chunk, ...]

    def layout(self) -> ParamLayout:
        """The layout of the tensor over its chunks; a rank that had nothing wrote one without
        elements.
        """
        return block_layout(self.shape, [chunk.box for chunk in self.chunks])


@dataclass(frozen=True)
class DcpMetadata:
    """Everything that a DCP checkpoint says it holds.

    `tensors` and `objects` go by flattened name (fqn). `paths[fqn]` is the path in the nested state
    dict that was saved, where the planner recorded it. `files` are those of the metadata. `short`
    are chunks whose items have fewer bytes than their elements: codes, or damaged.
    """

    folder: FilePath
    files: tuple[str, ...]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, tuple[Span, ...]]
    paths: Mapping[str, tuple[str | int, ...]]
    short: Sequence[tuple[str, Chunk]] = ()

    def spans(self) -> Iterable[tuple[str, Span]]:
        for fqn, tensor in self.tensors.items():
            yield from ((fqn, chunk.span) for chunk in tensor.chunks)
        for fqn, spans in self.objects.items():
            yield from ((fqn, span) for span in spans)


def read_metadata(
    folder: FilePath, leave: Callable[[DcpMetadata], Collection[str]] | None = None
) -> DcpMetadata:
    """The table of contents of `folder`, every span of it proved to lie in a file.

    Items for which `leave` is true may lie nowhere. Raises FormatError, naming file and tensor.
    """
    files = metadata_files(folder)
    if not files:
        raise FormatError(f"{folder} has neither {METADATA_FILE} nor __<rank>.metadata")
    names = [path.name for path in files]
    if METADATA_FILE not in names:
        data = filter(None, (_RANK_DATA.match(path.name) for path in folder.children()))
        wrote = {f"__{match[1]}.metadata" for match in data}
        wanted = wrote | {f"__{rank}.metadata" for rank in range(len(names))}
        if absent := sorted(wanted - set(names)):
            raise FormatError(
                f"{folder}/{absent[0]} is missing: {names[-1]} is there, and each rank wrote one"
            )
    tables = _Tables()
    for path in files:
        try:
            _add_table(tables, path.read_bytes())
        except FormatError as error:
            if why := stand_in(path):
                raise FormatError(f"{path}: {why}") from error
            error.at(path)
            raise
    for fqn, (shape, _) in tables.tensors.items():
        if fault := _misfit(shape, tables.declared[fqn]):
            raise FormatError(f"{fqn} {fault}", path=files[0] if len(files) == 1 else folder)
    metadata = DcpMetadata(
        folder,
        tuple(names),
        {fqn: TensorEntry(*own, tuple(tables.chunks[fqn])) for fqn, own in tables.tensors.items()},
        {fqn: tuple(spans) for fqn, spans in tables.objects.items()},
        tables.paths,
    )
    left = leave(metadata) if leave else ()
    _check_spans(metadata, left)
    return replace(metadata, short=_short(metadata, left))


@dataclass(frozen=True)
class _Tables:
    """The tables of metadata files, merged; `chunks` are those of `declared` with bytes."""

    tensors: dict[str, tuple[Shape, np.dtype]] = field(default_factory=dict)
    declared: dict[str, set[_Block]] = field(default_factory=lambda: defaultdict(set))
    chunks: dict[str, dict[Chunk, None]] = field(default_factory=lambda: defaultdict(dict))
    objects: dict[str, dict[Span, None]] = field(default_factory=lambda: defaultdict(dict))
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)


def _add_table(tables: _Tables, data: bytes) -> None:
    top = _fields(safe_pickle.load(data, _NAMES), "Metadata", "the file")
    spans = _spans(require_dict(top.get("storage_data"), "storage_data"))
    used: set[tuple[str, Shape | None]] = set()
    entries = require_dict(top.get("state_dict_metadata"), "state_dict_metadata")
    for fqn, entry in entries.items():
        if not isinstance(fqn, str):
            raise FormatError(f"state_dict_metadata has the key {fqn!r:.80}, which is not a name")
        if isinstance(entry, Record) and entry.type.endswith(".BytesStorageMetadata"):
            if (fqn, None) not in spans:
                raise FormatError(f"the object {fqn} is in no file by storage_data")
            tables.objects[fqn][spans[fqn, None]] = None
            used.add((fqn, None))
            continue
        declared = _declared(tables, fqn, _fields(entry, "TensorStorageMetadata", fqn))
        tables.declared[fqn].update(declared)
        tables.chunks[fqn].update(dict.fromkeys(_stored(fqn, declared, spans)))
        used |= {(fqn, offsets) for offsets, _ in declared}
    if both := tables.objects.keys() & tables.tensors.keys():
        raise FormatError(f"{min(both)!r} is a tensor and an object at once")
    for fqn, offset in spans.keys() - used:
        raise FormatError(
            f"storage_data has bytes of {fqn!r:.200} at {offset}, where it has no chunk"
        )
    # Some are None (torch 1.13, flatten_state_dict=False), or a planner's own kind of data.
    if "planner_data" not in top:
        raise FormatError("the Metadata has no planner_data, which every version of it has")
    paths = known(top["planner_data"])
    for fqn, steps in paths.items() if isinstance(paths, dict) else ():
        if isinstance(steps, tuple) and steps and all(type(step) in (str, int) for step in steps):
            tables.paths[fqn] = steps


def _declared(tables: _Tables, fqn: str, entry: Mapping[str, Any]) -> list[_Block]:
    """The chunks that the metadata declare for a tensor, each once."""
    shape, dtype = _shape(entry.get("size"), fqn), _dtype(entry.get("properties"), fqn)
    first = tables.tensors.setdefault(fqn, (shape, dtype))
    if first != (shape, dtype):
        raise FormatError(
            f"{fqn} is {dtype} {list(shape)} here, but {first[1]} {list(first[0])} by the metadata"
            " of an earlier rank; files of different saves are in the folder, or one is damaged"
        )
    chunks = entry.get("chunks")
    if not isinstance(chunks, list):
        raise FormatError(f"{fqn}: its chunks should be a list, but are {what_is(chunks)}")
    declared: dict[_Block, None] = {}
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata", fqn)
        offsets, sizes = _shape(fields.get("offsets"), fqn), _shape(fields.get("sizes"), fqn)
        if not len(offsets) == len(sizes) == len(shape):
            raise FormatError(
                f"{fqn} has shape {list(shape)}, but a chunk of {list(sizes)} at {list(offsets)}"
            )
        declared[offsets, sizes] = None
    return list(declared)


def _misfit(shape: Shape, chunks: Collection[_Block]) -> str:
    """The fault in chunks of a tensor without elements, which tiling does not prove."""
    for axis, n in enumerate(shape if chunks and 0 in shape else ()):
        if n and n != max(offsets[axis] + sizes[axis] for offsets, sizes in chunks):
            return f"has shape {list(shape)}, but its chunks end elsewhere on axis {axis}"
    return ""


def _stored(
    fqn: str, declared: Sequence[_Block], spans: Mapping[tuple[str, Shape | None], Span]
) -> Iterable[Chunk]:
    """The chunks with their bytes; one without elements may share its offsets with another."""
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
    spans: dict[tuple[str, Shape | None], Span] = {}
    for index, info in storage_data.items():
        fields = _fields(index, "MetadataIndex", "a key of storage_data")
        fqn, place = fields.get("fqn"), fields.get("offset")
        if not isinstance(fqn, str):
            raise FormatError("a key of storage_data has no name")
        key = fqn, None if place is None else _shape(place, fqn)
        fields = _fields(info, "_StorageInfo", "a value of storage_data")
        file, offset, length = (fields.get(x) for x in ("relative_path", "offset", "length"))
        is_plain = file not in ("", ".", "..")
        if not isinstance(file, str) or not is_plain or not _NOT_IN_NAMES.isdisjoint(file):
            raise FormatError(
                f"storage_data names the file {file!r:.80}, which is not a plain file name"
            )
        if type(offset) is not int or type(length) is not int or offset < 0 or length <= 0:
            raise FormatError(
                f"storage_data has {length!r:.40} bytes from {offset!r:.40} of {file}, which cannot"
                " be"
            )
        transforms = fields.get("transform_descriptors") or ()
        if not isinstance(transforms, list | tuple) or not all(
            isinstance(name, str) for name in transforms
        ):
            raise FormatError(f"storage_data has the transforms {transforms!r:.80} for {file}")
        span = Span(file, offset, length, tuple(transforms))
        if spans.setdefault(key, span) != span:
            raise FormatError(
                f"{key[0]} at {key[1]} is said to be in two places: {spans[key]} and {span}"
            )
    return spans


def _fields(value: Any, kind: str, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Record) or not value.type.endswith(kind):
        raise FormatError(f"{what} should be a {kind}, but is {what_is(value)}")
    return value.fields


def _shape(value: Any, fqn: str) -> Shape:
    is_shape = (
        isinstance(value, tuple)
        and len(value) <= _MAX_NDIM
        and all(type(n) is int and n >= 0 for n in value)
        and math.prod(n or 1 for n in value) <= _MAX_ELEMENTS
    )
    if not is_shape:
        raise FormatError(f"{fqn}: {value!r:.80} is not a shape or position in a tensor")
    return value


def _dtype(properties: Any, fqn: str) -> np.dtype:
    """The dtype in the properties: the first of their state. The rest differs between versions."""
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if isinstance(dtype, np.dtype):
        return dtype
    if isinstance(dtype, Name):
        raise FormatError(f"{fqn} has dtype {dtype}, which has no numpy equivalent")
    raise FormatError(f"{fqn}: its properties do not begin with a dtype")


def _check_spans(metadata: DcpMetadata, left: Collection[str]) -> None:
    """Raise an error unless spans, but those `left`, are in files, share no byte, and fit."""
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
        free, before = 0, ""
        for span, fqn in sorted(spans, key=lambda item: item[0].offset):
            end = span.offset + span.length
            if end > file.size:
                if why := stand_in(path):
                    raise FormatError(f"{path}: {why}")
                raise CorruptData(
                    f"{path} has {file.size} bytes, but {fqn} should end at byte {end}: the file is"
                    " truncated, or belongs to another save"
                )
            if span.offset < free:
                if why := of_another_serialisation(path):
                    raise FormatError(why)
                raise FormatError(
                    f"{path}: the bytes of {fqn}, from {span.offset}, overlap those of {before}"
                )
            free, before = end, fqn


def _short(metadata: DcpMetadata, left: Collection[str]) -> list[tuple[str, Chunk]]:
    """The chunks that have bytes for codes alone. Raises CorruptData for fewer bytes."""
    short: list[tuple[str, Chunk]] = []
    for fqn, tensor in metadata.tensors.items():
        for chunk in tensor.chunks if fqn not in left else ():
            elements, room = math.prod(chunk.sizes), chunk.span.length
            room *= MAX_RATIO if chunk.span.transforms else 1
            if elements * MIN_CODE_BITS > 8 * room:
                raise too_short(metadata.folder, fqn, tensor.dtype, chunk)
            if elements * tensor.dtype.itemsize > room:
                short.append((fqn, chunk))
    return short


def of_another_serialisation(path: FilePath) -> str:
    """The reason why a file of items cannot be read, if it is of safetensors, not of torch.save."""
    head = path.read_range(0, 10)
    if head[8:] != b'{"' or int.from_bytes(head[:8], "little") > path.size():
        return ""
    return (
        f"{path} has its items in safetensors (FileSystemWriter with"
        " serialization_format=SerializationFormat.SAFETENSORS), which is not read. Save without"
        " serialization_format, or with HuggingFaceStorageWriter"
    )


def too_short(folder: FilePath, fqn: str, dtype: np.dtype, chunk: Chunk) -> CorruptData:
    """The error for a chunk whose bytes cannot hold its elements."""
    nbytes = math.prod(chunk.sizes) * dtype.itemsize
    return CorruptData(
        f"{folder / METADATA_FILE}: {fqn} has a chunk of {dtype} {list(chunk.sizes)}, {nbytes}"
        f" bytes, but the item of it in {chunk.span.file} has {chunk.span.length}"
    )
