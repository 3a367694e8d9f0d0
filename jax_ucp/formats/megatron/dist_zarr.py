"""The zarr backend of Megatron-Core up to 0.15: a folder a tensor, a file a chunk.

It is zarr v2 as `zarr.open(..., compressor=None, fill_value=None)` writes it: chunks are the shards
of the ranks, uncompressed and in C order, and there is one for every place. bfloat16 has the dtype
`bfloat16`, unknown to zarr v2. Objects are `<name>/shard_*.pt`, files of torch.save.

Facts: `megatron/core/dist_checkpointing/strategies/zarr.py` of Megatron-LM core_v0.15.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import FileRange
from jax_ucp.files.strided import read_strided, row_major_strides
from jax_ucp.formats.megatron.dist_names import Run
from jax_ucp.json_text import decode_json
from jax_ucp.layout.box import Box
from jax_ucp.sources.beside import is_clutter
from jax_ucp.sources.protocol import ArrayInfo, ArraySource

ARRAY_FILE = ".zarray"
MAX_ARRAY_BYTES = 1 << 20
# With so many chunks missing nobody wants them named one by one.
MAX_MISSING = 1 << 10
# The settings with which Megatron writes; those that may be missing then have their defaults.
_DEFAULTS = {"filters": None, "dimension_separator": "."}
_SETTINGS = {"zarr_format": 2, "order": "C", "compressor": None, **_DEFAULTS}


@dataclass(frozen=True)
class ZarrArray:
    """A tensor by its `.zarray`: `grid` chunks of shape `chunk` on each axis."""

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(n // c for n, c in zip(self.shape, self.chunk, strict=True))

    def runs(self) -> tuple[Run, ...]:
        """Every chunk, under the name of its file."""
        runs: list[Run] = []
        for place in itertools.product(*map(range, self.grid)):
            start = tuple(i * n for i, n in zip(place, self.chunk, strict=True))
            stop = tuple(a + n for a, n in zip(start, self.chunk, strict=True))
            runs.append(Run(f"{self.name}/{'.'.join(map(str, place)) or '0'}", 0, Box(start, stop)))
        return tuple(runs)


class ZarrChunks(ArraySource):
    """An ArraySource of chunk files. `clutter` names what file managers left beside them."""

    def __init__(self, folder: FilePath, arrays: Mapping[str, ZarrArray]):
        """Raises FormatError, naming the file, where a chunk is missing or has another size."""
        self._arrays: dict[str, ArrayInfo] = {}
        for array in arrays.values():
            info = ArrayInfo(array.chunk, array.dtype)
            self._arrays |= dict.fromkeys([run.key for run in array.runs()], info)
        self.clutter: list[str] = []
        for name in arrays:
            self._check_files(folder / name)
        self._chunks = {key: _chunk_file(folder / key, info) for key, info in self._arrays.items()}

    def _check_files(self, folder: FilePath) -> None:
        for path in sorted(folder.children()):
            name = f"{folder.name}/{path.name}"
            if path.name == ARRAY_FILE or name in self._arrays:
                continue
            if not is_clutter(path.name):
                raise FormatError(
                    f"{path} is not a chunk of {folder.name} by its {ARRAY_FILE}, which is"
                    " damaged, or belongs to another checkpoint"
                )
            self.clutter.append(name)

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return self._arrays

    def read_into(self, key: str, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> None:
        strides = row_major_strides(self._arrays[key].shape)
        read_strided(self._chunks[key], 0, strides, boxes, outs)


def _chunk_file(path: FilePath, info: ArrayInfo) -> FileRange:
    if not path.is_file():
        raise FormatError(f"{path} is missing: it is a chunk of {path.parent.name}")
    file = path.file()
    if file.size != info.nbytes:
        raise CorruptData(
            f"{path} has {file.size} bytes, but a chunk of {info.dtype} {list(info.shape)}"
            f" {info.nbytes}"
        )
    return FileRange(path, file=file)


def zarr_array(folder: FilePath, name: str) -> ZarrArray:
    """The tensor in the folder `name`. Raises FormatError for what Megatron does not write."""
    path = folder / name / ARRAY_FILE
    text = path.read_text(MAX_ARRAY_BYTES)
    try:
        metadata: Any = decode_json(text)
        array = _parse(name, _DEFAULTS | metadata)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} does not describe an array of zarr v2 ({type(error).__name__}: {error})"
        ) from error
    if array is None:
        raise FormatError(
            f"{path} describes an array that is compressed, or not as Megatron writes them"
        )
    chunk, shape = array.chunk, array.shape
    if not _tiles(chunk, shape):
        raise FormatError(f"{path}: chunks of shape {list(chunk)} do not tile {list(shape)}")
    chunks, files = math.prod(array.grid), len(path.parent.children())
    if chunks > files + MAX_MISSING:
        raise FormatError(
            f"{path} describes {chunks} chunks, but there are {files} files beside it"
        )
    return array


def _parse(name: str, metadata: Mapping[str, Any]) -> ZarrArray | None:
    """The array of a `.zarray`; None where its settings are not those that Megatron writes."""
    shape, chunk = tuple(metadata["shape"]), tuple(metadata["chunks"])
    bfloat16 = metadata["dtype"] == "bfloat16"
    dtype = np.dtype(ml_dtypes.bfloat16 if bfloat16 else metadata["dtype"])
    settings = {key: metadata[key] for key in _SETTINGS}
    if settings != _SETTINGS or dtype.byteorder == ">" or dtype.hasobject:
        return None
    return ZarrArray(name, shape, chunk, dtype)


def _tiles(chunk: tuple[Any, ...], shape: tuple[Any, ...]) -> bool:
    if len(shape) != len(chunk) or len(shape) > 32:
        return False
    if not all(type(n) is int and n > 0 for n in (*shape, *chunk)):
        return False
    return not any(n % c for n, c in zip(shape, chunk, strict=True))
