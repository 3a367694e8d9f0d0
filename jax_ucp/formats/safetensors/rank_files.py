"""Whether the files of all ranks are there, where each rank wrote its parts of tensors
(`HuggingFaceStorageWriter(save_distributed=True)` of PyTorch DCP).

Files are called `shard-<rank>-model-<file>-of-<files>`, and no number of ranks is stored. Tensors
show it, by how DTensor cuts an axis of `n` over `m` ranks: `torch.chunk`, so that each part has
`ceil(n / m)`, the last one what is left, and those after it nothing (torch 2.13
`distributed/tensor/placement_types.py`, `Shard._split_tensor`; an empty part is written too). A
rank more would have made the parts shorter, unless an axis is so short that it gets nothing.
Tensors that ranks share are on one mesh, so that one tensor proves the files of all of them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jax_ucp.arrays.protocol import ArraySource
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.weight_files import CONFIG, read_json
from jax_ucp.layout.box import Box
from jax_ucp.options import Sizes
from jax_ucp.text import listed

Parts = Sequence[tuple[str, Box]]

_SHARD_FILE = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")

# Names of tensors with an axis of the model's width: the embedding and the first projection of a
# layer on their second, norms of the residual stream on their only one. Those of transformers'
# decoders, of torchtitan and of Llama's originals.
_EMBEDDING = re.compile(r"(model\.)?(embed_tokens|tok_embeddings)\.weight")
_PROJECTION = re.compile(r"(model\.)?layers\.\d+\.(self_attn\.q_proj|attention\.wq)\.weight")
_NORM = re.compile(
    r"(model\.)?(layers\.\d+\.(input_layernorm|post_attention_layernorm|attention_norm|ffn_norm)"
    r"|norm)\.weight"
)


def require_every_rank(folder: FilePath, tensors: Mapping[str, Parts], sizes: Sizes) -> str | None:
    """A note on what shows that all ranks' files are there, or None. Raises FormatError."""
    files = {file for parts in tensors.values() for file, _ in parts}
    ranks = ranks_of(files)
    if not ranks:
        return None
    names = list(filter(None, map(_SHARD_FILE.fullmatch, sorted(files))))
    counted = max(int(name[3]) for name in names)
    present = {int(name[2]) for name in names}
    if missing := next((part for part in range(1, counted + 1) if part not in present), None):
        raise FormatError(
            f"{folder}: {names[0][0]} says by its name that ranks have {counted} files, but none"
            f" has one called model-{missing:05}-of-{counted:05}: the model is not whole without it"
        )
    said = sizes.of(["ranks"]).get("ranks")
    if said not in (None, len(ranks)):
        shown = listed([str(rank) for rank in ranks])
        raise FormatError(
            f"{folder}: sizes says ranks={said}, and there are files of {len(ranks)}: {shown}."
            f" Copy the others; if those had nothing to write, such as replicas, say"
            f" ranks={len(ranks)}"
        )
    if said is not None:
        return f"{said} ranks wrote parts of tensors, as sizes says: nothing in the files proves it"
    gap = next((rank for rank, one in enumerate(ranks, start=1) if rank != one), None)
    if gap is not None:
        file = f"shard-{gap:05}-model-*.safetensors"
        _refuse(folder, len(ranks), f"that of rank {gap} is not there ({file})")
    cuts = {
        name: [
            (int(match[1]), box) for file, box in parts if (match := _SHARD_FILE.fullmatch(file))
        ]
        for name, parts in tensors.items()
    }
    width = _width(folder, cuts, len(ranks))
    for group in _groups(tensors):
        if not any(_shows_ranks(name, cuts[name], group.ranks, width) for name in group.names):
            why = (
                f"{group.names[0]} and what is stored with it, last in {max(group.files)}, are cut"
                " as they would be in the first files of more ranks"
            )
            _refuse(folder, len(ranks), why)
    return (
        f"{len(ranks)} ranks wrote parts of tensors; that there were no more is shown by how the"
        " tensors are cut"
    )


def ranks_of(files: Iterable[str]) -> list[int]:
    """The ranks whose files these are, from 1 on.

    >>> ranks_of(["shard-00002-model-00001-of-00001.safetensors", "model.safetensors"])
    [2]
    """
    return sorted({int(name[1]) for name in map(_SHARD_FILE.fullmatch, files) if name})


def require_total(
    path: FilePath, index: Mapping[str, Any], files: Mapping[str, ArraySource]
) -> None:
    """Raise FormatError where the index of torch's writer counts other bytes than the files have.

    Without `save_distributed` ranks overwrite each other's files, and the index sums what all of
    them wrote (`HuggingFaceStorageWriter.finish`).
    """
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    stored = sum(info.nbytes for file in files.values() for info in file.arrays().values())
    if type(total) is int and total != stored:
        raise FormatError(
            f"{path}: the index says total_size {total}, and its files have {stored} bytes of"
            " tensors: one of them is of another save, or several ranks wrote files of the same"
            " names (torch's HuggingFaceStorageWriter without save_distributed), so that parts of"
            " one rank are left. Copy the folder again, or save again with save_distributed=True,"
            " or from whole tensors"
        )


def _refuse(folder: FilePath, ranks: int, why: str) -> NoReturn:
    raise FormatError(
        f"{folder} has files of {ranks} ranks with parts of tensors, and a file may be missing:"
        f" {why}. Neither the number of ranks nor the shapes of tensors are stored. If {ranks}"
        f" ranks wrote files, say sizes={{'ranks': {ranks}}} (--size ranks={ranks}); else copy the"
        " others"
    )


@dataclass(frozen=True)
class _Group:
    """Files with parts of the same tensors, and the names of all tensors in them."""

    files: frozenset[str]
    ranks: tuple[int, ...]
    names: tuple[str, ...]


def _groups(tensors: Mapping[str, Parts]) -> Iterator[_Group]:
    """Each rank's file with those that have other parts of its tensors."""
    group_of: dict[str, set[str]] = {}
    for parts in tensors.values():
        files = {file for file, _ in parts}
        joined = set.union(files, *[group_of[file] for file in files if file in group_of])
        group_of |= dict.fromkeys(joined, joined)
    names: dict[frozenset[str], list[str]] = defaultdict(list)
    for name, parts in tensors.items():
        names[frozenset(group_of[parts[0][0]])].append(name)
    for files, of_files in names.items():
        matches = filter(None, map(_SHARD_FILE.fullmatch, files))
        ranks = tuple(sorted({int(match[1]) for match in matches}))
        if ranks and any(box.ndim for name in of_files for _, box in tensors[name]):
            yield _Group(files, ranks, tuple(of_files))


def _shows_ranks(
    name: str, parts: Sequence[tuple[int, Box]], ranks: Sequence[int], width: int | None
) -> bool:
    """Whether the parts of a tensor show that exactly these ranks wrote it."""
    # the one axis on which the blocks differ, of a single one the first
    edges = zip(*[zip(box.start, box.stop, strict=True) for _, box in parts], strict=True)
    axes = [axis for axis, of_axis in enumerate(edges) if len({*of_axis}) > 1]
    if len(parts) == 1 and parts[0][1].ndim:
        axes = [0]
    if len(axes) != 1 or len(parts) != len(ranks) or ranks[-1] - ranks[0] + 1 != len(ranks):
        return False
    (axis,) = axes
    ordered = sorted(parts, key=lambda part: (part[1].start[axis], part[0]))
    lengths = [box.shape[axis] for _, box in ordered]
    order = [rank - ranks[0] for rank, _ in ordered]
    if order != [*range(len(ranks))]:
        # whether tensor parallelism cuts an axis first, so that FSDP within leaves strides
        stride = order[1]
        if stride < 2:
            return False
        rows = len(order) // stride
        expected = [column + stride * row for column in range(stride) for row in range(rows)]
        if rows < 2 or list(order) != expected:
            return False
        runs = [lengths[at : at + rows] for at in range(0, len(lengths), rows)]
        return runs.count(runs[0]) == len(runs) and _is_of(runs[0])
    # a norm has the width of the model, so that no part of it is missing
    last = max(box.stop for _, box in parts)
    is_wide = axis == 0 and last == (width,) and bool(_NORM.fullmatch(name))
    is_whole = lengths[-1] < lengths[0] or is_wide
    return is_whole and _is_of(lengths)


def _is_of(lengths: Sequence[int]) -> bool:
    """Whether parts of these lengths can only be of so many ranks, and not of one more."""
    whole, ranks = sum(lengths), len(lengths)
    return math.ceil(whole / (ranks + 1)) < lengths[0] == math.ceil(whole / ranks)


def _width(
    folder: FilePath, cuts: Mapping[str, Sequence[tuple[int, Box]]], ranks: int
) -> int | None:
    """The width of the model, by the config or uncut columns, or None. Raises FormatError."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    said = config if isinstance(config, Mapping) else {}
    hidden, vocab = said.get("hidden_size"), said.get("vocab_size")
    for name, parts in cuts.items():
        if not _EMBEDDING.fullmatch(name) or type(vocab) is not int:
            continue
        rows = max((box.stop[0] for _, box in parts if box.ndim), default=vocab)
        if rows < vocab:
            _refuse(folder, ranks, f"{name} ends at row {rows}, and config.json says {vocab}")
    if type(hidden) is int:
        return hidden
    columns = {n for name, parts in cuts.items() for n in _columns(name, parts)}
    return columns.pop() if len(columns) == 1 else None


def _columns(name: str, parts: Iterable[tuple[int, Box]]) -> set[int]:
    """The number of columns of a matrix that has one for each number of the residual stream."""
    if not (_EMBEDDING.fullmatch(name) or _PROJECTION.fullmatch(name)):
        return set()
    spans = {(box.start[1], box.stop[1]) for _, box in parts if box.ndim == 2}
    return {stop for start, stop in spans if start == 0 and len(spans) == 1}
