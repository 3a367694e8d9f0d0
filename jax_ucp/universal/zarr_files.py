"""The files of a zarr v3 array in a universal checkpoint: names of chunks, and `zarr.json`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.layout.blocks import Chunks
from jax_ucp.layout.fragments import Shape
from jax_ucp.universal.shard_codec import has_index

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC = {"name": "crc32c"}


def chunk_name(place: Sequence[int]) -> str:
    """The file of an outer chunk in its array's directory, by zarr v3's default encoding."""
    return ".".join(["c", *map(str, place)])


def zarr_metadata(info: ArrayInfo, chunks: Chunks) -> dict[str, Any]:
    """The zarr v3 metadata of an array in a universal checkpoint."""
    codecs = [_data_bytes(info.dtype), _CRC]
    if has_index(chunks):
        index = {"index_codecs": [_BYTES, _CRC]}  # at the end, the default
        inner = {"chunk_shape": chunks.inner, "codecs": codecs}
        codecs = [{"name": "sharding_indexed", "configuration": inner | index}]
    return _metadata(info, chunks.outer, codecs)


@functools.lru_cache(maxsize=1024)
def zarr_json(info: ArrayInfo, chunks: Chunks) -> bytes:
    return _json(info, zarr_metadata(info, chunks))


@functools.lru_cache(maxsize=1024)
def linked_json(info: ArrayInfo, chunk: Shape, order: Sequence[int]) -> bytes:
    """The `zarr.json` of an array of plain chunks with the axes in an order of their own."""
    codecs = [_data_bytes(info.dtype)]
    if list(order) != sorted(order):
        codecs.insert(0, {"name": "transpose", "configuration": {"order": order}})
    return _json(info, _metadata(info, chunk, codecs))


def _data_bytes(dtype: np.dtype) -> dict[str, Any]:
    return _BYTES if dtype.itemsize > 1 else {"name": "bytes"}  # one byte has no order


def _metadata(info: ArrayInfo, chunk: Shape, codecs: Sequence[Any]) -> dict[str, Any]:
    return {
        "shape": info.shape,
        "data_type": info.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": codecs,
    }


def _json(info: ArrayInfo, metadata: dict[str, Any]) -> bytes:
    fill = {"b": False, "c": [0.0, 0.0]}.get(info.dtype.kind, 0)
    return msgspec.json.encode(
        metadata | {"zarr_format": 3, "node_type": "array", "fill_value": fill}
    )
