"""Whether `common.pt` describes the model, ranks and optimizer that are stored beside it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.dist_files import DistFiles
from jax_ucp.formats.megatron.dist_flat import group_object
from jax_ucp.formats.megatron.dist_names import is_flat, is_fully_reshardable, state_of
from jax_ucp.formats.megatron.files import Args
from jax_ucp.formats.megatron.gtp import check_gtp
from jax_ucp.formats.megatron.walk import EMBEDDING, layer_of
from jax_ucp.formats.nested import as_dict

_EXPERT = re.compile(r".+\.experts\.(\d+)\..+")

_SHARDING_TYPE = "distrib_optim_sharding_type"

# What is compared: its name, its value in `common.pt`, and the value that is stored.
Comparison = tuple[str, Any, Any]


def check_args(
    files: DistFiles, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> None:
    """Compare `common.pt` with what is stored: `shapes` and `dtypes` of the model's parameters.

    Raises FormatError, naming the file, at the first difference. Without args nothing is compared.
    """
    if not files.args.fields:
        return
    check_gtp(files.args, files.common.path, shapes)
    comparisons = itertools.chain(
        of_model(files.args, shapes), _of_ranks(files), _of_optimizer(files, dtypes)
    )
    refuse_difference(files.common.path, comparisons)


def refuse_difference(path: FilePath, comparisons: Iterable[Comparison]) -> None:
    """Raise FormatError at the first difference from what the file `path` declares."""
    for what, declared, stored in comparisons:
        if declared is not None and declared != stored:
            raise FormatError(
                f"{path} tells of {what} {declared}, but what is stored has {stored}: that file or"
                " the others are of another run, or it was changed"
            )


def of_model(args: Args, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Comparison]:
    yield "num_layers", args.get("num_layers"), _count(shapes, layer_of)
    yield "num_experts", args.get("num_experts") or 0, _count(shapes, _expert_of)
    if EMBEDDING in shapes:
        rows, columns = shapes[EMBEDDING][:2]
        yield "padded_vocab_size", args.get("padded_vocab_size"), rows
        yield "hidden_size", args.get("hidden_size"), columns


def _of_ranks(files: DistFiles) -> Iterator[Comparison]:
    for key in files.objects:
        grid = key.rpartition("_")[2].split(".")
        if key.startswith("rng_state/") and len(grid) > 1:
            for kind, stored in zip(("pipeline", "tensor"), grid, strict=False):
                degree = files.args.degree(f"{kind}_model_parallel_size")
                yield f"{kind} parallelism", str(degree), stored


def _of_optimizer(files: DistFiles, dtypes: Mapping[str, str]) -> Iterator[Comparison]:
    args, types = files.args, _sharding_types(files)
    if types:
        sharding_type = as_dict(files.tree.get("content_metadata")).get(_SHARDING_TYPE)
        yield _SHARDING_TYPE, sharding_type, " and ".join(types)
    if types or any(state_of(key)[0] != "weight" for key in files.tensors):
        if not args.is_layer_wise:  # which may have a distributed one behind it
            declared = args.optional("use_distributed_optimizer")
            yield "use_distributed_optimizer", declared, bool(types)
        dtype = args.optional("params_dtype")
        if isinstance(dtype, np.dtype) and EMBEDDING in dtypes:
            yield "params_dtype", dtype.name, dtypes[EMBEDDING]


def _expert_of(name: str) -> int | None:
    match = _EXPERT.fullmatch(name)
    return int(match[1]) if match else None


def _count(names: Iterable[str], number_of: Callable[[str], int | None]) -> int | str:
    """How many numbers names have, or which, where they are not 0 to one less than that."""
    numbers = sorted({number for number in map(number_of, names) if number is not None})
    if numbers == list(range(len(numbers))):
        return len(numbers)
    return f"only {numbers}"


def _sharding_types(files: DistFiles) -> list[str]:
    """The sharding types of a distributed optimizer that the stored keys show."""
    objects = map(group_object, files.objects)
    types = {_type_of(files, key) for key in files.tensors}
    if any(described and described.what == "param_state" for described in objects):
        types.add("dp_zero_gather_scatter")
    return sorted(filter(None, types))


def _type_of(files: DistFiles, key: str) -> str:
    """The sharding type that wrote a tensor, or an empty text where it does not show."""
    if is_flat(key):
        return "dp_reshardable"
    state, model = state_of(key)
    if state != "weight" and files.tensors[key].shape != files.tensors[model].shape:
        return "fully_sharded_model_space"
    return "fully_reshardable" if is_fully_reshardable(key) else ""
