"""safetensors: one file, or the files that an index names; whole tensors, or parts. `weight_folder`
has folders.

Facts: the format's README and `Metadata::validate` (`safetensors/src/tensor.rs`) of safetensors
0.8. The header is read here, because the package reads no fp8 through numpy.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import Contents, QuantizedWeight
from jax_ucp.arrays.extents import ExtentTable, StoredArray, StoredFile
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.in_flight import opened_files
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.ranges import FileRange
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.facts import COUNTS, Facts
from jax_ucp.formats.safetensors.rank_files import require_every_rank, require_total
from jax_ucp.formats.weight_files import (
    index_save,
    keep_configs,
    keep_index,
    refuse_part,
    refuse_stand_in,
)
from jax_ucp.formats.weight_names import model_of_index
from jax_ucp.json_text import decode_json
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import ParamLayout, block_layout
from jax_ucp.options import Options, Sizes

# In the `__metadata__` of a file of parts of tensors, as the Hugging Face storage of PyTorch DCP
# writes them, one set per rank: the offset of each tensor in the whole one. Source:
# `torch/distributed/checkpoint/hf_storage.py` and `filesystem.py` of torch 2.13. Neither the shape
# of the whole nor the number of ranks is recorded: a tensor ends where its last part does, as it
# does for torch. A file that is missing is seen by the hole it leaves, but that of the last rank
# leaves none: `rank_files` has what proves that it is there.
MARK = "DCP_SHARDING_INFO"
WHOLE_FILE = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_MAX_OFFSET = 1 << 62


def boxes(
    path: FilePath, metadata: Mapping[str, str], arrays: Mapping[str, ArrayInfo]
) -> dict[str, Box]:
    """The block of its tensor that each array of a file is; without a mark, all of it."""
    if MARK not in metadata:
        return {name: Box.whole(info.shape) for name, info in arrays.items()}
    try:
        offsets: Any = decode_json(metadata[MARK])
    except ValueError as error:
        raise FormatError(f"{path}: {MARK} is not JSON: {error}") from None
    if not isinstance(offsets, dict) or offsets.keys() != arrays.keys():
        raise FormatError(f"{path}: {MARK} does not name just the tensors of the file")
    blocks: dict[str, Box] = {}
    for name, info in arrays.items():
        start = _start(offsets[name], len(info.shape))
        if start is None:
            raise FormatError(
                f"{path}: {name} of shape {list(info.shape)} should have offsets, but has"
                f" {offsets[name]!r:.80}"
            )
        blocks[name] = Box.whole(info.shape).shift(start)
    return blocks


def _start(entry: Any, ndim: int) -> tuple[int, ...] | None:
    """The offsets in an entry of the mark; None if it does not have one for each axis."""
    match entry:
        case {"saved_offsets": list(start)} if len(start) == ndim:
            are_offsets = all(type(n) is int and 0 <= n < _MAX_OFFSET for n in start)
            return tuple(start) if are_offsets else None
    return None


def layout_of(name: str, parts: Sequence[tuple[str, Box]]) -> ParamLayout:
    """The layout of a tensor over its parts by key. The tensor ends where the last of them does."""
    keys, blocks = zip(*parts, strict=True)
    if len({box.ndim for box in blocks}) > 1:
        raise FormatError(
            f"{name} has another number of axes in {keys[0]} than in others of {len(parts)} files"
        )
    first: dict[Box, str] = {}
    for key, box in parts:
        if box.size and first.setdefault(box, key) != key:
            raise FormatError(
                f"{name} is stored twice: {box} of it is in {first[box]} and in {key}"
            )
    return block_layout([*map(max, zip(*(box.stop for box in blocks), strict=True))], blocks)


SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, type] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "C64": np.complex64, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "BOOL": np.bool_, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def recognise(path: FilePath) -> bool:
    index = model_of_index(path.name)
    is_index = index is not None and index.kind == "safetensors"
    return path.is_file() and (is_index or path.name.endswith(SUFFIX))


def parse(path: FilePath, options: Options) -> Contents:
    """The weights in a file, or in the files of an index, all under `param`.

    Raises FormatError, naming the file, LayoutError where parts overlap or leave a hole.
    """
    if path.name.endswith(SUFFIX):
        refuse_part(path)
        builder = read_weights(path, path.parent, [path.name], options.sizes)
    else:
        index, names = index_save(path)
        builder = read_weights(path, path.parent, names, options.sizes, index)
        keep_index(builder, path, index)
    keep_configs(builder, path.parent)
    return builder.contents()


def _opened(path: FilePath) -> SafetensorsFile:
    refuse_stand_in(path)
    return SafetensorsFile(path)


def read_weights(
    path: FilePath,
    folder: FilePath,
    names: Sequence[str],
    sizes: Sizes,
    index: Mapping[str, Any] | None = None,
) -> ContentsBuilder:
    """The tensors of files as weights of `path`, headers as extras. Raises FormatError."""
    files = opened_files(folder, names, _opened)
    builder = ContentsBuilder("safetensors", path, Combined.of_files(files))
    facts = Facts(folder)
    parts: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for name, file in files.items():
        if MARK in file.metadata:
            # raise FormatError for a file with parts of tensors that is opened alone, or is packed
            if path.is_file() and not WHOLE_FILE.fullmatch(name):
                raise FormatError(
                    f"{path} holds one rank's parts of tensors (torch DCP): open its folder"
                )
            if file.packed:
                dtypes = ", ".join({*file.packed.values()})
                raise FormatError(f"{file.path} has parts of tensors of {dtypes}")
        for key, box in boxes(file.path, file.metadata, file.arrays()).items():
            parts[key].append((name, box))
        for key in file.metadata.keys() & {*COUNTS}:
            facts.state(name, key, file.metadata[key])
        for key, value in file.metadata.items():
            if key == MARK:
                reason = "says which part is where; its content is in the tree's shapes"
                builder.skip(f"{name}:__metadata__/{key}", "metadata", reason)
            else:
                builder.extra(name, key, value, above="__metadata__/")
        for key, dtype in file.packed.items():
            label, scheme = f"param/{key}", f"{dtype}, several to a byte"
            fault = "" if key in file.packed_rows else "a byte has elements of two of its rows"
            builder.quantized.append(QuantizedWeight(scheme, label, {"codes": label}, fault))
    if any(MARK in file.metadata for file in files.values()):
        require_total(path, index or {}, files)
    if note := require_every_rank(folder, parts, sizes):
        builder.notes.append(note)
    for key, stored in parts.items():
        several = f", one of {len(stored)} parts" if len(stored) > 1 else ""
        keyed = [(f"{name}:{key}", box) for name, box in stored]
        whole = builder.joined(f"param.{key}", layout_of(key, keyed), [part for part, _ in keyed])
        builder.parameter("param", key, whole, f"the parameter {key}{several}")
    return builder


@dataclass(frozen=True, slots=True)
class _HeaderEntry:
    """A tensor in the header: bytes `begin` to `end`; `has_rows`: rows are whole bytes."""

    name: str
    dtype: str
    info: ArrayInfo
    begin: int
    end: int
    has_rows: bool


class SafetensorsFile(ExtentTable):
    """The tensors of a file. Opening reads the header.

    Tensors of less than 8 bits an element are bytes; `packed` has their dtypes by name, and
    `packed_rows` those with whole bytes in each row.
    """

    def __init__(self, path: str | os.PathLike[str] | FilePath):
        self.path = file_path(path)
        data = FileRange(self.path, file=self.path.file())
        header, begin = _header(self.path, data.size)
        self.metadata = _metadata(self.path, header.pop("__metadata__", {}))
        entries = [_entry(self.path, name, entry) for name, entry in header.items()]
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        # tensors follow one another, and fill the file
        end = begin
        for entry in entries:
            if begin + entry.begin != end:
                raise FormatError(
                    f"{self.path}: {entry.name} begins at byte {entry.begin} of the data, but"
                    f" {end - begin} is the next one free"
                )
            end = begin + entry.end
        if end != data.size:
            cut = ": it is cut short, its download or its save has not ended"
            raise CorruptData(
                f"{self.path} has {data.size} bytes, but its header describes"
                f" {end}{cut * (end > data.size)}"
            )
        file = StoredFile(self.path, data)
        super().__init__(
            {entry.name: entry.info for entry in entries},
            {entry.name: StoredArray(file, begin + entry.begin) for entry in entries},
        )
        packed = [entry for entry in entries if entry.dtype in _PACKED_BITS]
        self.packed = {entry.name: entry.dtype for entry in packed}
        self.packed_rows = {entry.name for entry in packed if entry.has_rows}


def _header(path: FilePath, size: int) -> tuple[dict[str, Any], int]:
    head = path.read_range(0, 8)
    length = int.from_bytes(head, "little") if len(head) == 8 else -1
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        claim = f"its first 8 bytes say that the header has {length} bytes, of {size} in all"
        raise FormatError(f"{path}: {claim}: it is cut short, or no safetensors")
    data = path.read_range(8, 8 + length)
    try:
        header = decode_json(data, unique_names=True) if data[:1] == b"{" else None
    except ValueError as error:
        raise FormatError(f"{path}: the header is not as the format has it: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is not a JSON object")
    return header, 8 + length


def _metadata(path: FilePath, metadata: Any) -> dict[str, str]:
    match metadata:
        case dict(values) if {*map(type, values.values())} <= {str}:
            return values
    raise FormatError(f"{path}: __metadata__ should map strings to strings")


def _entry(path: FilePath, name: str, entry: Any) -> _HeaderEntry:
    match entry:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [int(begin), int(end)],
        } if len(entry) == 3:
            pass
        case _:
            raise FormatError(
                f"{path}: {name} should have dtype, shape and data_offsets, but has {entry!r:.80}"
            )
    if dtype not in DTYPES and dtype not in _PACKED_BITS:
        raise FormatError(
            f"{path}: {name} has dtype {dtype}, which numpy and ml_dtypes do not have"
        )
    # numpy makes no array with other sizes
    are_lengths = all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    if not are_lengths or math.prod(n or 1 for n in shape) > 1 << 58:
        raise FormatError(f"{path}: {name} has shape {shape!r:.80}")
    info = _info(shape, dtype)
    if info is None or end - begin != info.nbytes or begin < 0:
        raise FormatError(
            f"{path}: {name} of {dtype} {shape} lies at bytes {begin} to {end}, which is not its"
            " size"
        )
    return _HeaderEntry(name, dtype, info, begin, end, _has_rows(shape, dtype))


def _info(shape: Sequence[int], dtype: str) -> ArrayInfo | None:
    """The array of a tensor. If its elements are less than a byte, it is of bytes, and keeps its
    rows if each has whole bytes; None if all elements together fill no whole bytes.
    """
    if dtype in DTYPES:
        return ArrayInfo(tuple(shape), np.dtype(DTYPES[dtype]))
    bits = _PACKED_BITS[dtype]
    if _has_rows(shape, dtype):
        return ArrayInfo((*shape[:-1], shape[-1] * bits // 8), np.dtype(np.uint8))
    whole = math.prod(shape) * bits
    return None if whole % 8 else ArrayInfo((whole // 8,), np.dtype(np.uint8))


def _has_rows(shape: Sequence[int], dtype: str) -> bool:
    return bool(shape) and shape[-1] * _PACKED_BITS.get(dtype, 8) % 8 == 0
