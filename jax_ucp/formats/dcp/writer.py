"""PyTorch's distributed checkpoints (DCP), written by one process as `.metadata` and
`__0_0.distcp`.

The state dict is `{"model": {name: tensor}, "optimizer": {"state": {name: {state: tensor}},
"param_groups": ...}}`, what `get_model_state_dict` and `get_optimizer_state_dict` give, so that
`torch.distributed.checkpoint.load` fills it on any number of ranks. Each tensor is one chunk.

Facts: `metadata.py`, `filesystem.py`, `default_planner.py` in `torch/distributed/checkpoint` of
torch 2.13.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.codecs.pickle_writer import (
    Call,
    Global,
    Instance,
    dumps,
    has_dtype,
    torch_dtype,
)
from jax_ucp.codecs.zip_writer import TorchZip
from jax_ucp.errors import TreeMismatch, UnsupportedLeaf
from jax_ucp.export.files import File, Tensor
from jax_ucp.export.parameters import CAST_FIRST, Parameters, torch_groups
from jax_ucp.formats.dcp.marks import METADATA_FILE
from jax_ucp.layout.fragments import Shape
from jax_ucp.states.optimizer_dicts import Steps, joined

DATA_FILE = "__0_0.distcp"
MODEL, OPTIMIZER = "model", "optimizer"

_DCP = "torch.distributed.checkpoint"
_GROUP = re.compile(rf"{OPTIMIZER}\.param_groups\.(\d+)\.([^.]+)")
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Global(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (0,))


@dataclass(frozen=True)
class Chunked:
    """A tensor of `shape` in chunks, each at its offsets."""

    shape: Shape
    dtype: np.dtype
    chunks: Sequence[tuple[Shape, Tensor | np.ndarray]]


def plan_files(parameters: Parameters, objects: dict[Steps, Any]) -> list[File]:
    """The files of a checkpoint of parameters and states, with DCP's `objects` by path, if any.

    Raises UnsupportedLeaf for dtypes that torch lacks, TreeMismatch for two tensors of one name.
    """
    items: list[tuple[Steps, Any]] = [
        ((MODEL, name), tensor) for name, tensor in parameters.model.items()
    ]
    for name, states in parameters.states.items():
        own = {state: tensor for state, tensor in states.items() if state != "param"}
        items += [((OPTIMIZER, "state", name, state), tensor) for state, tensor in own.items()]
    items += [(_steps(name), tensor) for name, tensor in parameters.other.items()]
    # names take the place of numbers in groups that have both, as the states here go by name
    named: dict[Steps, list[str]] = {}
    for path, names in objects.items():
        is_of_group = path[:2] == (OPTIMIZER, "param_groups") and path[-1] == "param_names"
        if is_of_group and isinstance(names, list):
            named[*path[:-1], "params"] = names
    known = {name for name in itertools.chain(*named.values()) if isinstance(name, str)}
    items += (objects | (named if known & {*parameters.trained} else {})).items()
    for number, group in enumerate(groups(parameters, objects)):
        items += [((OPTIMIZER, "param_groups", number, key), value) for key, value in group.items()]
    _check(items)
    return files_of(dict(items))


def groups(parameters: Parameters, objects: Mapping[Steps, Any]) -> list[dict[str, Any]]:
    """The groups, unless `objects` have them: readers map only states that are in a group."""
    if any(map(_of_groups, objects)):
        return []
    return torch_groups(parameters.groups, parameters.trained)


def _of_groups(path: Steps) -> bool:
    """Whether an object is a part of groups, nested or flattened (`param_groups.<name>.lr`)."""
    if path[0] != OPTIMIZER or len(path) < 2:
        return False
    return str(path[1]).partition(".")[0] == "param_groups"


def objects(extras: Mapping[str, Mapping[str, Any]], renamed: bool) -> dict[Steps, Any]:
    """The objects of a DCP checkpoint by path; without groups if parameters were `renamed`."""
    by_path: dict[Steps, Any] = {}
    for file in extras.values():
        for name, value in file.items():
            group = _GROUP.fullmatch(name)
            in_group = (OPTIMIZER, "param_groups", int(group[1]), group[2]) if group else None
            by_path[in_group or _steps(name)] = value
    if not renamed:
        return by_path
    return {path: value for path, value in by_path.items() if not _of_groups(path)}


def _check(items: Sequence[tuple[Steps, Any]]) -> None:
    tensors = [(path, value) for path, value in items if isinstance(value, Tensor)]
    problems = [
        f"{joined(path)} has dtype {t.dtype}" for path, t in tensors if not has_dtype(t.dtype)
    ]
    if problems:
        raise UnsupportedLeaf("torch has no such dtypes:", problems, remedy=f"{CAST_FIRST}.")
    names: dict[str, Steps] = {}
    for path, _ in items:
        if joined(path) in names:
            problems.append(
                f"{joined(path)}: {' / '.join(map(str, names[joined(path)]))},"
                f" {' / '.join(map(str, path))}"
            )
        names[joined(path)] = path
    if problems:
        raise TreeMismatch(
            "DCP joins keys by dots, which gives one name twice:", problems, remedy="Rename them."
        )


def files_of(tree: Mapping[Steps, Tensor | Chunked | Any], folder: str = "") -> list[File]:
    """The two files of the tensors and objects in `tree`, with `folder` before their names."""
    zips: list[tuple[int, TorchZip]] = []
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    at = 0
    for path, value in tree.items():
        name = joined(path)
        if isinstance(value, Tensor):  # all of it is one chunk
            value = Chunked(value.shape, value.dtype, [((0,) * len(value.shape), value)])
        chunks: Sequence[tuple[Shape | None, Any]] = [(None, value)]
        entries[name] = _instance("BytesStorageMetadata")
        if isinstance(value, Chunked):
            chunks = value.chunks
            sizes = [t.target_shape if isinstance(t, Tensor) else t.shape for _, t in value.chunks]
            starts = [start for start, _ in value.chunks]
            properties = (torch_dtype(value.dtype), _STRIDED, False, _CONTIGUOUS, False)
            entries[name] = _instance(
                "TensorStorageMetadata",
                properties=Instance(Global(f"{_DCP}.metadata", "TensorProperties"), properties),
                size=_size(value.shape),
                chunks=[
                    _instance("ChunkStorageMetadata", offsets=_size(start), sizes=_size(own))
                    for start, own in zip(starts, sizes, strict=True)
                ],
            )
        for start, content in chunks:
            zips.append((at, made := TorchZip(content)))
            offset = None if start is None else _size(start)
            index = _instance("MetadataIndex", fqn=name, offset=offset, index=None)
            info = {"relative_path": DATA_FILE, "offset": at, "length": made.size}
            storage[index] = Instance(Global(f"{_DCP}.filesystem", "_StorageInfo"), info)
            at += made.size  # one after the other, as torch writes them
    metadata = _instance(
        "Metadata",
        state_dict_metadata=entries,
        planner_data={joined(path): path for path in tree},
        storage_data=storage,
        storage_meta=_instance(
            "StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]
        ),
        version="1.0.0",
    )
    data = File(folder + DATA_FILE, at, [made.section(start) for start, made in zips])
    return [data, File.literal(folder + METADATA_FILE, dumps(metadata))]


def _instance(kind: str, **fields: Any) -> Instance:
    return Instance(Global(f"{_DCP}.metadata", kind), fields)


def _size(shape: Sequence[int]) -> Call:
    return Call(Global("torch", "Size"), (tuple(shape),))


def _steps(name: str) -> Steps:
    """The path for a flat name. `load` goes by the outermost key, which is before the first dot."""
    outer, dot, rest = name.partition(".")
    return (outer, rest) if dot else (name,)
