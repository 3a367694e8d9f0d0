"""Whether `common.pt` tells of the model, the ranks and the optimizer that are stored beside it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.dist_files import DistFiles
from jax_ucp.formats.megatron.dist_flat import group_object
from jax_ucp.formats.megatron.dist_names import is_flat, is_fully_reshardable, state_of
from jax_ucp.formats.megatron.walk import EMBEDDING, layer_of

_EXPERT = re.compile(r".+\.experts\.(\d+)\..+")


def check_args(
    files: DistFiles, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> None:
    """Compare what is said with what is stored; `shapes` and `dtypes` are those of the model's
    parameters.

    Raises FormatError, naming the file, at the first difference. A checkpoint without args says
    nothing.
    """
    if not files.args.fields:
        return
    pairs = itertools.chain(_model_pairs(files, shapes), _optimizer_pairs(files, dtypes))
    for what, declared, stored in pairs:
        if declared is not None and declared != stored:
            raise FormatError(
                f"{files.common.path} tells of {what} {declared}, but what is stored has {stored}:"
                " that file or the others are of another run, or it was changed"
            )


def _model_pairs(
    files: DistFiles, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Any, Any]]:
    args = files.args
    yield "num_layers", args.get("num_layers"), _count(map(layer_of, shapes))
    yield "num_experts", args.get("num_experts") or 0, _count(map(_expert_of, shapes))
    if EMBEDDING in shapes:
        yield "padded_vocab_size", args.get("padded_vocab_size"), shapes[EMBEDDING][0]
        yield "hidden_size", args.get("hidden_size"), shapes[EMBEDDING][1]
    for key in files.objects:
        if key.startswith("rng_state/") and len(grid := key.rpartition("_")[2].split(".")) > 1:
            yield "pipeline parallelism", str(args.degree("pipeline_model_parallel_size")), grid[0]
            yield "tensor parallelism", str(args.degree("tensor_model_parallel_size")), grid[1]


def _optimizer_pairs(files: DistFiles, dtypes: Mapping[str, str]) -> Iterator[tuple[str, Any, Any]]:
    args, kinds = files.args, _sharding_types(files)
    about = files.tree.get("content_metadata")
    if kinds and isinstance(about, dict):
        sharding_type = about.get("distrib_optim_sharding_type")
        yield "distrib_optim_sharding_type", sharding_type, " and ".join(kinds)
    if kinds or any(state_of(key)[0] != "weight" for key in files.tensors):
        yield "use_distributed_optimizer", args.optional("use_distributed_optimizer"), bool(kinds)
        dtype = args.optional("params_dtype")
        if isinstance(dtype, np.dtype) and EMBEDDING in dtypes:
            yield "params_dtype", dtype.name, dtypes[EMBEDDING]


def _expert_of(name: str) -> int | None:
    match = _EXPERT.fullmatch(name)
    return int(match[1]) if match else None


def _count(found: Iterable[int | None]) -> int | str:
    """How many numbers there are, or which, where they are not 0 to one less than that."""
    numbers = sorted({number for number in found if number is not None})
    return len(numbers) if numbers == list(range(len(numbers))) else f"only {numbers}"


def _sharding_types(files: DistFiles) -> Sequence[str]:
    """The sharding types of a distributed optimizer, of those that the stored keys show."""
    types: set[str] = set()
    for about in map(group_object, files.objects):
        if about and about.what == "param_state":
            types.add("dp_zero_gather_scatter")
    for key, tensor in files.tensors.items():
        state, model = state_of(key)
        if is_flat(key):
            types.add("dp_reshardable")
        elif state != "weight" and tensor.shape != files.tensors[model].shape:
            types.add("fully_sharded_model_space")
        elif is_fully_reshardable(key):
            types.add("fully_reshardable")
    return sorted(types)
