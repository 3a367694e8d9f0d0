"""The common part of files of weights, whatever their format: an index, configs, and what lies
beside them.

Facts: `transformers` writes `<name>.index.json` with a `weight_map` of names to files, and
`config.json`. Files of a quantisation beside it are those of Model Optimizer, AutoGPTQ and AutoAWQ.
Mistral's `params.json` and Llama's have the sizes of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.files.placeholders import stand_in, why_missing
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.formats.weight_names import (
    WeightSave,
    is_ranks_part,
    missing_parts,
    model_of_index,
    numbered,
)
from jax_ucp.json_text import decode_json
from jax_ucp.text import listed

_OTHER_TOTAL = (
    "{} says that the tensors have {!r:.40} bytes, and they have {}: a file of another save, such"
    " as one of another dtype, may be among them. Some writers' totals are wrong, too"
)
_MAX_NAME = 200  # bytes: with the suffix of a download it is still one that file systems take

CONFIG = "config.json"
CONFIGS = (
    CONFIG,
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "adapter_config.json",
    "params.json",
)

# What names of files say of themselves: one part of several, or what one rank wrote. The number is
# the second group.
_NUMBERED_PART = re.compile(r".*-(?P<part>\d+)-of-(?P<parts>\d+)(?:\.\w+)*")
_WORLD = re.compile(r".*world_size_(?P<world>\d+)_rank_\d+.*")
_RANKS = (
    re.compile(r"(.*(?<![a-z])rank[_-]?)(\d+)(.*)"),
    re.compile(r"(.*(?<![a-z])shard[_-]?)(\d+)(.*)"),
    re.compile(r"(consolidated\.)(\d+)(\.pth)"),
)
# DeepSpeed's and Megatron's files hold one rank's part, which looks like a whole model's state
# dict.
RANK_STATES = re.compile(
    r"(mp_rank_|zero_pp_rank_|layer_|expp_rank_)\d.*_states\.pt"
    r"|model_optim_rng\.pt|distrib_optim\.pt"
)
_CHECKLIST = "checklist.chk"  # of Llama's originals: a line for each file


def read_json(path: FilePath) -> Any:
    """The content of a file of JSON. Raises FormatError where it is none, or a broken link."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if (target := path.link()) is None:
            raise
        raise FormatError(
            f"{path} is a link to {target}, where nothing is: copy the file itself"
        ) from None
    try:
        return decode_json(data)
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {stand_in(path) or error}") from None


def read_index(path: FilePath) -> tuple[Mapping[str, Any], list[str]]:
    """An index, and the files that it names. Raises FormatError where it is none."""
    index = read_json(path)
    match index:
        case {"weight_map": dict(weights)} if {*map(type, weights.values())} <= {str}:
            return index, sorted(set(weights.values()))
    raise FormatError(f"{path} has no weight_map of names to files")


def index_save(path: FilePath) -> tuple[Mapping[str, Any], list[str]]:
    """The files of one model: an index and what it names. Raises FormatError."""
    index, names = read_index(path)
    beside = {file.name for file in path.parent.children() if file.is_file()}
    require_files(path, path.parent, [name for name in names if name not in beside], len(names))
    _require_named(path, names, missing_parts(names))
    return index, names


def require_all(folder: FilePath, save: WeightSave) -> None:
    by = folder / save.index if save.index else folder / save.files[0]
    require_files(by, folder, save.missing, len(save.files) + len(save.missing))
    _require_named(by, save.files, save.unnamed)


def _require_named(index: FilePath, names: Sequence[str], unnamed: Sequence[str]) -> None:
    """Raise FormatError if an index names some of the parts that their names count."""
    if not unnamed:
        return
    shown = listed([f"{name!r:.200}" for name in unnamed])
    raise FormatError(
        f"{index} names {len(names)} files, and not {shown}, which numbers in their names"
        " count too: it is of another save, or was cut. The model is not whole without them. Put"
        " the index of this save in its place; where all parts are there they open without an"
        " index, too"
    )


def require_files(by: FilePath, folder: FilePath, missing: Sequence[str], of: int) -> None:
    """Raise FormatError if files are missing that `by`, or its name, says there are."""
    if not missing:
        return
    plain = filter(_is_plain, missing[:8])
    reasons = [why_missing(folder, name) for name in plain]
    distinct = list(dict.fromkeys(filter(None, reasons)))
    names = listed([f"{name!r:.200}" for name in missing])
    why = f" ({'; '.join(distinct[:2])})" if distinct else ""
    raise FormatError(
        f"{by} is of {of} files, of which {len(missing)} are not beside it: {names}{why}. The"
        " model is not whole without them"
    )


def _is_plain(name: str) -> bool:
    """Whether a name that an index gives can be that of a file in the same folder."""
    try:
        fits = len(name.encode()) <= _MAX_NAME
    except UnicodeEncodeError:
        return False
    return fits and "\0" not in name and "/" not in name and name not in ("", ".", "..")


def keep_index(builder: ContentsBuilder, path: FilePath, index: Mapping[str, Any]) -> None:
    """Account for an index and its metadata. Raises FormatError unless it lists just the tensors
    that are stored.
    """
    in_index = {(name, key) for key, name in index["weight_map"].items()}
    stored = (key.partition(":") for key in builder.stored)
    for name, key in sorted(in_index ^ {(file, name) for file, _, name in stored}):
        place = "in the file, but not so in the index"
        if (name, key) in in_index:
            place = "in the index, but not in the file"
        raise FormatError(
            f"{builder.path}: {key} of {name} is {place}; the files are not of one checkpoint"
        )
    builder.skip(path.name, "index", "says which file has which tensor; compared with the files")
    metadata = index.get("metadata") or {}
    for key, value in metadata.items():
        builder.extra(path.name, key, value)
    # writers count two names of one tensor once or twice
    sizes = {key: info.nbytes for key, info in builder.stored.items()}
    distinct = {builder.ties.get(key.partition(":")[2], key): n for key, n in sizes.items()}
    totals = sum(sizes.values()), sum(distinct.values())
    total = metadata.get("total_size")
    if total is not None and total not in totals:
        builder.notes.append(_OTHER_TOTAL.format(path.name, total, totals[0]))


def keep_configs(builder: ContentsBuilder, folder: FilePath) -> None:
    """Keep configs as extras: of the model, of its quantisation, of an adapter."""
    for name in CONFIGS:
        if (folder / name).is_file():
            builder.extra(name, "config", read_json(folder / name))


def refuse_stand_in(path: FilePath) -> None:
    if why := stand_in(path):
        raise FormatError(f"{path}: {why}")


def refuse_part(path: FilePath) -> None:
    """Raise FormatError for one file of several, by its name or an index beside it."""
    if path.suffix == ".distcp":
        raise FormatError(
            f"{path} holds one rank's items of a checkpoint (torch DCP): open its folder"
        )
    if is_ranks_part(path.name):
        raise FormatError(f"{path} holds one rank's parts of tensors (torch DCP): open its folder")
    numbers = _NUMBERED_PART.fullmatch(path.name)
    parts = int(numbers["parts"]) if numbers else 1
    if numbers and parts > 1:
        first = min(int(numbers["part"]), 1)
        others = [numbered(path.name, n) for n in range(first, first + min(parts, 1000))]
        absent = [name for name in others if not (path.parent / name).is_file()]
        are = f"of which {len(absent)} are missing: {listed(absent)}" if absent else "all beside it"
        raise FormatError(f"{path} is one of {parts} parts of a model, {are}: open its folder")
    beside = filter(FilePath.is_file, path.parent.children())
    for index in sorted(file for file in beside if model_of_index(file.name)):
        try:
            files = read_index(index)[1]
        except FormatError:
            continue  # it is not what was asked for
        if path.name in files and len(files) > 1:
            raise FormatError(
                f"{path} is one of the {len(files)} files of a model that {index.name} names: open"
                " that"
            )
    if RANK_STATES.search(path.name):
        raise one_ranks(path)
    refuse_rank(path)


def one_ranks(path: FilePath) -> FormatError:
    """The error for a file of DeepSpeed's or Megatron's ranks; Megatron has a folder for each."""
    whole = path.parent.parent if path.parent.name.startswith("mp_rank_") else path.parent
    return FormatError(f"{path} is what one rank wrote of a checkpoint: open {whole}")


def refuse_rank(path: FilePath) -> None:
    """Raise FormatError for a file named after a rank, beside other ranks' files."""
    world = _WORLD.fullmatch(path.name)
    if world and int(world["world"]) > 1:
        raise FormatError(
            f"{path} is what one of {int(world['world'])} ranks wrote: open its folder, if verl or"
            " SkyRL saved it; of others nothing stored says how the ranks' tensors form those of"
            " the model: save it as one checkpoint with the library that wrote it"
        )
    names = {file.name for file in path.parent.children()}
    checklist = path.parent / _CHECKLIST
    for line in checklist.read_text().splitlines() if checklist.is_file() else ():
        names.update(word.lstrip("*") for word in line.split()[-1:])  # behind its sum
    for pattern in _RANKS:
        own = pattern.fullmatch(path.name)
        if own is None:
            continue
        alike = (m for m in map(pattern.fullmatch, names) if m and m.group(1, 3) == own.group(1, 3))
        others = sorted(match[0] for match in alike if match[2] != own[2])
        if others:
            raise FormatError(
                f"{path} is named after a rank, and there are others: {listed(others)}."
                " Nothing stored says whether each has a part of the model, and of which axes."
                " Convert them with the library that wrote them (Llama's originals with"
                " convert_llama_weights_to_hf.py of transformers); if each has all of the model,"
                " open a copy in a folder of its own"
            )


def refuse_rank_of_llama(builder: ContentsBuilder, path: FilePath) -> None:
    """Raise FormatError for one rank's file of Llama's originals, of which no other is there.

    The `params.json` beside it has the whole model's sizes. Source: `ModelArgs` and `Transformer`
    in meta-llama `llama/model.py` and `llama3/llama/model.py`.
    """
    if not _RANKS[2].fullmatch(path.name):
        return
    params = path.parent / "params.json"
    said = read_json(params) if params.is_file() else {}
    items = said.items() if isinstance(said, Mapping) else ()
    sizes = {key: n for key, n in items if type(n) is int and n > 0}
    shapes = {str(key): param.info.shape for (_, key), param in builder.params.items()}
    width = sizes.get("dim") or next(iter(shapes.get("norm.weight", ())), 0)
    head = sizes.get("head_dim") or width // sizes.get("n_heads", 1)
    whole = {
        "tok_embeddings.weight": (sizes.get("vocab_size", 0), width),
        "output.weight": (sizes.get("vocab_size", 0), width),
        "layers.0.attention.wq.weight": (sizes.get("n_heads", 0) * head, width),
    }
    for name, least in whole.items():
        shape = shapes.get(name, least)
        if len(shape) == 2 and any(n < wanted for n, wanted in zip(shape, least, strict=True)):
            raise FormatError(
                f"{path} is named after a rank, and has {name} of {list(shape)}, of which the whole"
                f" model has at least {[n or 'any' for n in least]}: it is one part of several, and"
                " the others are missing. Copy them, and convert them with"
                " convert_llama_weights_to_hf.py of transformers"
            )
