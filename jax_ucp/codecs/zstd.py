"""Zstandard by Python's own library (3.14 and later) or the package zstandard."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from jax_ucp.errors import CorruptData, FormatError

# zstandard allocates all that a read may return before it inflates anything.
PIECE_BYTES = 4 << 20


def inflate(data: bytes, max_bytes: int) -> bytes:
    """The bytes that a zstd frame inflates to; of one that is cut short perhaps fewer.

    Raises CorruptData for no frame, or more than `max_bytes`, FormatError without a library.
    """
    for name in ("compression.zstd", "zstandard"):
        with suppress(ImportError):
            library = importlib.import_module(name)
            break
    else:
        raise FormatError("it is compressed with zstd: pip install 'jax_ucp[zstd]' to read it")
    try:
        if library.__name__ == "zstandard":
            inflated = _read(library.ZstdDecompressor().stream_reader(data), max_bytes + 1)
        else:
            inflated = library.ZstdDecompressor().decompress(data, max_bytes + 1)
    except library.ZstdError as error:
        raise CorruptData(f"it cannot be inflated: {error}") from error
    if len(inflated) > max_bytes:
        raise CorruptData(
            f"it inflates to more than the {max_bytes} bytes that its tensor can need"
        )
    return inflated


def _read(reader: Any, most: int) -> bytes:
    pieces: list[bytes] = []
    while most and (piece := reader.read(min(most, PIECE_BYTES))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)
