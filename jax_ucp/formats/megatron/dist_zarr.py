"""The zarr backend of Megatron-Core up to 0.15: a folder a tensor, a file a chunk.

It is zarr v2 as `zarr.open(..., compressor=None, fill_value=None)` writes it: chunks are the shards
of the ranks, uncompressed and in C order, and there is one for every place. bfloat16 has the dtype
`bfloat16`, unknown to zarr v2. Objects are `<name>/shard_*.pt`, files of torch.save.

Facts: `megatron/core/dist_checkpointing/strategies/zarr.py` of Megatron-LM core_v0.15.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.arrays.beside import is_clutter
from jax_ucp.arrays.extents import ExtentTable, StoredArray, StoredFile
from jax_ucp.arrays.protocol import ArrayInfo, Piece
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.ranges import FileRange
from jax_ucp.formats.megatron.model import StoredRun
from jax_ucp.json_text import decode_json
from jax_ucp.layout.blocks import grid_boxes, grid_place
from jax_ucp.layout.box import Box

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

    def runs(self) -> tuple[StoredRun, ...]:
        """Every chunk, under the name of its file."""
        boxes = grid_boxes(self.shape, self.chunk)
        places = ((box, ".".join(map(str, grid_place(box, self.chunk)))) for box in boxes)
        return tuple([StoredRun(f"{self.name}/{place or '0'}", 0, box) for box, place in places])


class ZarrChunks(ExtentTable):
    """The table of chunk files. `clutter` names what file managers left beside them."""

    def __init__(self, folder: FilePath, arrays: Mapping[str, ZarrArray]):
        """Raises FormatError, naming the file, where a chunk is missing or has another size."""
        infos: dict[str, ArrayInfo] = {}
        stored: dict[str, StoredArray] = {}
        self.clutter: list[str] = []
        for name, array in arrays.items():
            info = ArrayInfo(array.chunk, array.dtype)
            chunks = {run.key: folder / run.key for run in array.runs()}
            infos |= dict.fromkeys(chunks, info)
            for path in sorted((folder / name).children()):
                key = f"{name}/{path.name}"
                if path.name == ARRAY_FILE or key in chunks:
                    continue
                if not is_clutter(path.name):
                    raise FormatError(
                        f"{path} is not a chunk of {name} by its {ARRAY_FILE}, which is damaged, or"
                        " belongs to another checkpoint"
                    )
                self.clutter.append(key)
            for key, path in chunks.items():
                if not path.is_file():
                    raise FormatError(f"{path} is missing: it is a chunk of {name}")
                file = path.file()
                if file.size != info.nbytes:
                    raise CorruptData(
                        f"{path} has {file.size} bytes, but a chunk of {info.dtype}"
                        f" {list(info.shape)} {info.nbytes}"
                    )
                stored[key] = StoredArray(StoredFile(path, FileRange(path, file=file)), 0)
        super().__init__(infos, stored)

    def locate(self, key: str, box: Box) -> Iterator[Piece]:
        yield Piece(key, "", box, box)


def zarr_array(folder: FilePath, name: str) -> ZarrArray:
    """The tensor in the folder `name`. Raises FormatError for what Megatron does not write."""
    path = folder / name / ARRAY_FILE
    text = path.read_text(MAX_ARRAY_BYTES)
    try:
        metadata: Any = _DEFAULTS | decode_json(text)
        shape, chunk = tuple(metadata["shape"]), tuple(metadata["chunks"])
        is_bfloat16 = metadata["dtype"] == "bfloat16"
        dtype = np.dtype(ml_dtypes.bfloat16 if is_bfloat16 else metadata["dtype"])
        settings = {key: metadata[key] for key in _SETTINGS}
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} does not describe an array of zarr v2 ({type(error).__name__}: {error})"
        ) from error
    if settings != _SETTINGS or dtype.byteorder == ">" or dtype.hasobject:
        raise FormatError(
            f"{path} describes an array that is compressed, or not as Megatron writes them"
        )
    are_lengths = len(shape) == len(chunk) <= 32 and all(
        type(n) is int and n > 0 for n in (*shape, *chunk)
    )
    if not are_lengths or any(n % c for n, c in zip(shape, chunk, strict=True)):
        raise FormatError(f"{path}: chunks of shape {list(chunk)} do not tile {list(shape)}")
    array = ZarrArray(name, shape, chunk, dtype)
    chunks, files = math.prod(array.grid), len(path.parent.children())
    if chunks > files + MAX_MISSING:
        raise FormatError(
            f"{path} describes {chunks} chunks, but there are {files} files beside it"
        )
    return array
