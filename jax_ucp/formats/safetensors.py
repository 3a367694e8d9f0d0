"""safetensors: one file, a folder with an index, or a folder of files without one; whole tensors, or parts of them.

Facts: the format's README and `Metadata::validate` (`safetensors/src/tensor.rs`) of safetensors 0.8. The header is read
here, because the package reads no fp8 through numpy.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.errors import CorruptData, FormatError, LayoutError
from jax_ucp.formats.facts import COUNTS, Facts
from jax_ucp.formats.importing import Import
from jax_ucp.formats.options import Options
from jax_ucp.formats.safetensors_parts import MARK, WHOLE_FILE, boxes, joined, unproved
from jax_ucp.formats.weight_files import keep_config, keep_index, read_index, skip_others
from jax_ucp.layout.box import Box
from jax_ucp.storage.contents import Contents
from jax_ucp.storage.joined import Joined
from jax_ucp.storage.source import ArrayInfo

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
# Where torch DCP leaves the ranks' parts of what it consolidated (`torch/distributed/checkpoint/_hf_utils.py`).
SHARDED = "sharded"
_SHARDED_REASON = "parts of the same tensors, as each rank wrote them; it opens by itself"
MAX_HEADER_BYTES = 100_000_000

_DTYPES: dict[str, type] = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "C64": np.complex64},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_},
    **{"U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu},
    **{"F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz},
}


def recognise(path: Path) -> bool:
    if path.is_dir():
        return (path / INDEX).is_file() or any(path.glob(f"*{SUFFIX}"))
    return path.name.endswith((SUFFIX, f"{SUFFIX}.index.json"))


def open_safetensors(path: Path, options: Options) -> Contents:
    """The weights in a file, or in the files of a folder or an index; all of them are under `param`.

    Raises FormatError, naming the file, where a header breaks a rule of the format, or index and files disagree, and
    LayoutError where parts of a tensor overlap or leave a hole.
    """
    index, names = _files(path)
    folder = path if path.is_dir() else path.parent
    files = {name: SafetensorsFile(folder / name) for name in names}
    found = Import("safetensors", path, Joined(files))
    facts = Facts(folder)
    parts: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for name, file in files.items():
        if path.is_file() and index is None and MARK in file.metadata and not WHOLE_FILE.fullmatch(name):
            raise FormatError(f"{path} holds one rank's parts of tensors (torch DCP): open its folder")
        for key, box in boxes(file.path, file.metadata, file.arrays()).items():
            parts[key].append((f"{name}:{key}", box))
        for key, value in file.metadata.items():
            if key in COUNTS:
                facts.state(name, key, value)
            if key == MARK:
                found.skip(f"{name}:{key}", "metadata", "says which part is where; its content is in the tree's shapes")
            else:
                found.extra(name, key, value)
    for key, where in parts.items():
        reason = f"the parameter {key}" + (f", one of {len(where)} parts" if len(where) > 1 else "")
        found.parameter("param", key, joined(key, where), reason)
    if index is not None:
        there = [(name, key) for name, file in files.items() for key in file.arrays()]
        keep_index(found, path / INDEX if path.is_dir() else path, index, there)
    keep_config(found, folder)
    if path.is_dir():
        skip_others(found, {*files, INDEX}, SUFFIX, {SHARDED: _SHARDED_REASON})
    if note := unproved(files):
        found.notes.append(note)
    try:
        return found.contents()
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from None


class SafetensorsFile:
    """One file, as an ArraySource of its tensors. Opening reads the header; reading maps the tensor's bytes."""

    def __init__(self, path: Path):
        self.path = path
        size = os.path.getsize(path)
        with path.open("rb") as file:
            length = int.from_bytes(head, "little") if len(head := file.read(8)) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise FormatError(f"{path}: its first 8 bytes say that the header has {length} bytes, of {size} in all")
            header = _header(path, file.read(length))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not all(isinstance(v, str) for v in self.metadata.values()):
            raise FormatError(f"{path}: __metadata__ should map strings to strings")
        self._begin = 8 + length
        self._arrays: dict[str, ArrayInfo] = {}
        self._offsets: dict[str, int] = {}
        at = 0
        for name, (info, begin, end) in sorted(
            ((name, _entry(path, name, entry)) for name, entry in header.items()), key=lambda item: item[1][1:]
        ):
            if begin != at:
                raise FormatError(f"{path}: {name} begins at byte {begin} of the data, but {at} is the next one free")
            self._arrays[name], self._offsets[name], at = info, begin, end
        if self._begin + at != size:
            raise CorruptData(f"{path} has {size} bytes, but its header describes {self._begin + at}")

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read(self, key: str, box: Box) -> np.ndarray:
        info = self._arrays[key]
        if box.size == 0:
            return np.empty(box.shape, info.dtype)
        mapped = np.memmap(self.path, np.uint8, "r", self._begin + self._offsets[key], (info.nbytes,))
        array = mapped.view(np.ndarray).view(info.dtype).reshape(info.shape)[(*box.index, ...)]
        return array if array.flags.aligned else array.copy()


def _files(path: Path) -> tuple[Mapping[str, Any] | None, list[str]]:
    """The index, if there is one, and the names of the files."""
    index_path = path / INDEX if path.is_dir() else path
    if path.is_dir() and not index_path.is_file():
        return None, sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    return (None, [index_path.name]) if index_path.name.endswith(SUFFIX) else read_index(index_path)


def _header(path: Path, data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        header = json.loads(data.decode(), object_pairs_hook=unique) if data[:1] == b"{" else None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not as the format has it: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is no JSON object")
    return header


def _entry(path: Path, name: str, entry: Any) -> tuple[ArrayInfo, int, int]:
    """Shape and dtype of a tensor, and the first and last byte of it in the data."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if len(entry) == 3:
            pass
        case _:
            raise FormatError(f"{path}: {name} should have dtype, shape and data_offsets, but has {entry!r:.80}")
    if dtype not in _DTYPES:
        raise FormatError(f"{path}: {name} has dtype {dtype}, which numpy and ml_dtypes do not have byte by byte")
    # numpy makes no array without elements whose other axes are beyond any array.
    if not all(type(n) is int and 0 <= n < 1 << 40 for n in shape) or math.prod(n or 1 for n in shape) > 1 << 58:
        raise FormatError(f"{path}: {name} has shape {shape!r:.80}")
    info = ArrayInfo(tuple(shape), np.dtype(_DTYPES[dtype]))
    if end - begin != math.prod(shape) * info.dtype.itemsize or begin < 0:
        raise FormatError(f"{path}: {name} of {dtype} {shape} lies at bytes {begin} to {end}, which is not its size")
    return info, begin, end
