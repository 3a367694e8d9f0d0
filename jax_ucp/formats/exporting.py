"""Checkpoints into the formats that torch's world reads, decided file by file.

To add a format, write a module with a function that makes `File`s of `Parameters`, and add its
`_Writer` here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_ucp.arguments import whole_number
from jax_ucp.arrays.budget import DEFAULT_BUDGET
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.dtypes import named_dtype
from jax_ucp.codecs.pickle_json import values
from jax_ucp.errors import TreeMismatch, UnsupportedLeaf
from jax_ucp.export.files import File, peak_bytes
from jax_ucp.export.folder import FolderTarget
from jax_ucp.export.parameters import Parameters, is_floating, parameters, untold
from jax_ucp.export.streams import BucketTarget
from jax_ucp.files.path import FilePath
from jax_ucp.formats.dcp import writer as dcp
from jax_ucp.formats.deepspeed import universal_writer as deepspeed
from jax_ucp.formats.huggingface.companions import kind_of
from jax_ucp.formats.huggingface.conv1d import require_own_layout
from jax_ucp.formats.huggingface.given_config import model_configs
from jax_ucp.formats.huggingface.quantization import declared, undeclared
from jax_ucp.formats.megatron import writer as megatron
from jax_ucp.formats.nested import as_written
from jax_ucp.formats.safetensors import writer as safetensors
from jax_ucp.jobs.run import Target
from jax_ucp.layout.box import Box

ExportFormat = Literal["safetensors", "dcp", "deepspeed", "megatron"]
Extras = Mapping[str, Mapping[str, Any]]  # by file and by name

MAX_SHARD_BYTES = 50 * 10**9  # as `save_pretrained` of transformers 5


@dataclass(frozen=True, repr=False)
class ExportPlan:
    """An export, decided before any byte moves; `notes`: left out, cast, not known."""

    format: ExportFormat
    files: Sequence[File]
    notes: Sequence[str]
    budget_bytes: int
    peak_bytes: int

    @property
    def write_bytes(self) -> int:
        """Bytes of tensors; headers and settings come on top."""
        return sum(tensor.nbytes for file in self.files for _, tensor in file.tensors)

    def __repr__(self) -> str:
        tensors = sum(len(file.tensors) for file in self.files)
        return (
            f"<an export to {self.format}: {tensors} tensors, {self.write_bytes:,} bytes, in"
            f" {len(self.files)} files; {len(self.notes)} notes>"
        )


def plan_export(
    contents: Contents,
    format: ExportFormat,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    zero_stage: int | None = None,
    budget_bytes: int = DEFAULT_BUDGET,
) -> ExportPlan:
    """The files of a checkpoint in another format; arguments are `Checkpoint.export`'s."""
    _check_arguments(format, max_shard_bytes, zero_stage, budget_bytes)
    writer = _WRITERS[format]
    if dtype is not None and not writer.takes_dtype:
        raise ValueError(
            f"dtype is not for {format}, where the run's arguments say that of weights"
        )
    params = parameters(contents, _dtype(dtype))
    if not params.model and not writer.stores_other:
        raise TreeMismatch(
            f"{contents.path} has no parameters, and {format} has a place for nothing else"
        )
    extras, unwritable = values(contents.extras)
    request = _Request(contents, params, extras, max_shard_bytes, zero_stage)
    with as_written(f"{contents.path} has extras that are not as its trainer writes them"):
        content = writer.content(request)
    notes: list[str] = []
    if dtype is not None:
        stored = contents.arrays.arrays()
        notes.append(f"floating parameters are cast to {dtype}; states keep their dtypes")
        if all(tensor.dtype == stored[tensor.key].dtype for tensor in params.model.values()):
            notes = [f"no parameter is cast: all floating ones have dtype {dtype} already"]
    notes += content.notes
    if params.other and not writer.stores_other:
        first = next(iter(params.other))
        notes.append(
            f"{len(params.other)} tensors beside the model are left out, the first {first}"
        )
    if contents.companions and not writer.stores_companions:
        notes.append(
            f"{len(contents.companions)} files that go with the model are left out, the first"
            f" {min(contents.companions)}: only safetensors has a place for them"
        )
    notes += unwritable
    if content.left:
        file, name = content.left[0]
        notes.append(
            f"{len(content.left)} extras are left out, which {format} has no place for; the first"
            f" is {name} of {file}"
        )
    peak = peak_bytes(content.files, contents.arrays, budget_bytes)
    return ExportPlan(format, content.files, notes, budget_bytes, peak)


@dataclass(frozen=True)
class _Content:
    """The files of a format, the last of which commits, notes, and extras without a place."""

    files: Sequence[File]
    notes: Sequence[str]
    left: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class _Request:
    """The content to be written, and the options of the user."""

    contents: Contents
    params: Parameters
    extras: Extras
    max_shard_bytes: int | None
    zero_stage: int | None


def _as_safetensors(request: _Request) -> _Content:
    require_own_layout(request.contents)
    params = request.params
    max_shard_bytes = request.max_shard_bytes or MAX_SHARD_BYTES
    extras = request.contents.extras
    configs, notes = model_configs(undeclared(extras), params)
    if method := declared(extras):
        notes.append(f"the config declares {method}, which is left out: no weight is stored so")
    companions = request.contents.companions
    files = [
        File.literal(name, companions[name].read_bytes()) for name in companions if kind_of(name)
    ]
    files += safetensors.plan_files(params, configs, max_shard_bytes)
    if params.moments:
        states = ", ".join(params.moments)
        notes.append(
            f"{states} are left out: safetensors is for weights, and its readers expect no more"
        )
    left = [place for place in _places(request.extras) if not safetensors.carries(*place)]
    return _Content(files, notes, left)


def _as_dcp(request: _Request) -> _Content:
    params, extras, source = request.params, request.extras, request.contents.source
    is_native = source.get("format", request.contents.format) == "dcp"
    objects = dcp.objects(extras, renamed="mapping" in source) if is_native else {}
    files = dcp.plan_files(params, objects)
    notes = untold(dcp.groups(params, objects), "their group in param_groups has no settings")
    left = [] if is_native else _places_beside_groups(params, extras)
    return _Content(files, list(notes), left)


def _as_deepspeed(request: _Request) -> _Content:
    params, extras = request.params, request.extras
    steps = _steps(request.contents, params)
    files = deepspeed.plan_files(params, extras, steps, request.zero_stage)
    places = _places_beside_groups(params, extras)
    left = [place for place in places if not deepspeed.carries(*place)]
    return _Content(files, list(deepspeed.notes(params, extras)), left)


def _as_megatron(request: _Request) -> _Content:
    params, extras = request.params, request.extras
    steps = _steps(request.contents, params)
    files, notes = megatron.plan_files(params, extras, steps)
    common, _ = megatron.common_of(extras)
    places = _places(extras)
    left = [place for place in places if not megatron.carries(*place, common)]
    return _Content(files, notes, left)


@dataclass(frozen=True)
class _Writer:
    """The function that decides the files of a format, and what it takes of a checkpoint.

    A format that `stores_other` has a place for tensors that are no part of a model.
    """

    content: Callable[[_Request], _Content]
    stores_other: bool = False
    stores_companions: bool = False
    takes_max_shard_bytes: bool = False
    takes_zero_stage: bool = False
    takes_dtype: bool = True


_WRITERS: Mapping[ExportFormat, _Writer] = {
    "safetensors": _Writer(_as_safetensors, stores_companions=True, takes_max_shard_bytes=True),
    "dcp": _Writer(_as_dcp, stores_other=True),
    "deepspeed": _Writer(_as_deepspeed, takes_zero_stage=True),
    "megatron": _Writer(_as_megatron, takes_dtype=False),
}
EXPORT_FORMATS: Sequence[ExportFormat] = tuple(_WRITERS)


def _places(extras: Extras) -> list[tuple[str, str]]:
    return [(file, name) for file, named in extras.items() for name in named]


def _places_beside_groups(params: Parameters, extras: Extras) -> list[tuple[str, str]]:
    """The extras without optimizer groups, which the format makes of `params`."""
    places = _places(extras)
    return [
        (file, name) for file, name in places if not params.groups or "param_groups" not in name
    ]


def export_target(
    contents: Contents,
    plan: ExportPlan,
    path: FilePath,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Target[Any]:
    """The planned files at the new folder `path`; `progress` hears of bytes that are written."""
    made = BucketTarget if path.files.is_remote else FolderTarget
    return made(contents, plan.files, plan.budget_bytes, path, progress)


def _check_arguments(
    format: ExportFormat, max_shard_bytes: int | None, zero_stage: int | None, budget_bytes: int
) -> None:
    if format not in EXPORT_FORMATS:
        raise ValueError(
            f"format={format!r} is not one that is written: {', '.join(EXPORT_FORMATS)}"
        )
    whole_number("budget_bytes", budget_bytes)
    if max_shard_bytes is not None:
        whole_number("max_shard_bytes", max_shard_bytes)
        if not _WRITERS[format].takes_max_shard_bytes:
            raise ValueError(
                f"max_shard_bytes is for safetensors: files of {format} are not cut by size"
            )
    if zero_stage is not None:
        if whole_number("zero_stage", zero_stage) > 3:
            raise ValueError(f"zero_stage={zero_stage} is not a stage of ZeRO: give 1, 2 or 3")
        if not _WRITERS[format].takes_zero_stage:
            raise ValueError(f"zero_stage is for deepspeed: {format} does not know it")


def _dtype(name: str | None) -> np.dtype | None:
    if name is None:
        return None
    try:
        dtype = named_dtype(name)
    except TypeError:
        dtype = np.dtype(bool)
    if not is_floating(dtype):
        raise UnsupportedLeaf(f"{name!r} is not a floating dtype; write float32 or bfloat16")
    return dtype


def _steps(contents: Contents, params: Parameters) -> Mapping[str, np.ndarray]:
    tensors = {name: states["step"] for name, states in params.states.items() if "step" in states}
    return {
        name: np.asarray(contents.arrays.read(t.key, Box.whole(t.shape)))
        for name, t in tensors.items()
    }
