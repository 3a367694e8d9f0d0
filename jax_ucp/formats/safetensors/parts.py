"""Parts of tensors in safetensors files, as the Hugging Face storage of PyTorch DCP writes them,
one set per rank.

`DCP_SHARDING_INFO` in a header's `__metadata__` has the offsets at which each tensor of the file
begins in the whole one (`torch/distributed/checkpoint/hf_storage.py` and `filesystem.py` of torch
2.13). Neither the shape of the whole nor the number of ranks is recorded: a tensor ends where its
last part does, as it does for torch. A file that is missing is seen by the hole it leaves, but that
of the last rank leaves none: `rank_files` has what proves that it is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.json_text import decode_json
from jax_ucp.layout.box import Box
from jax_ucp.layout.fragments import Fragment, ParamLayout

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
    """The offsets in an entry of the mark; None if it has none for so many axes."""
    match entry:
        case {"saved_offsets": list(start)} if len(start) == ndim:
            are_offsets = all(type(n) is int and 0 <= n < _MAX_OFFSET for n in start)
            return tuple(start) if are_offsets else None
    return None


def layout_of(name: str, parts: Sequence[tuple[str, Box]]) -> ParamLayout:
    """The layout of a tensor over its parts by key; it ends where the last of them does."""
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
    shape = tuple(map(max, zip(*(box.stop for box in blocks), strict=True)))
    fragments = [Fragment(i, Box.whole(box.shape), box) for i, box in enumerate(blocks) if box.size]
    shapes = tuple(box.shape for box in blocks)
    return ParamLayout(shape, shapes, tuple(fragments))
