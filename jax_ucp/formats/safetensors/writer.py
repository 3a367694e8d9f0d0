"""Hugging Face safetensors: weights in one file, or in shards with an index, as `save_pretrained`
writes them.

Facts: the format's README and `serialize` (`safetensors/src/tensor.rs`) of safetensors 0.8, which
pads the header with spaces to 8 bytes and orders tensors by falling alignment of their dtype, then
by name; shards and index are those of `split_torch_state_dict_into_shards` (huggingface_hub
`serialization/_torch.py`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

import numpy as np

from jax_ucp.errors import UnsupportedLeaf
from jax_ucp.export.files import File, Section, Tensor
from jax_ucp.export.parameters import CAST_FIRST, Parameters
from jax_ucp.formats.safetensors.reader import DTYPES

INDEX = "model.safetensors.index.json"
CONFIG, ADAPTER = CONFIGS = ("config.json", "adapter_config.json")
MAX_HEADER_BYTES = 100_000_000  # what readers of the format accept

_CODES = {np.dtype(kind).name: code for code, kind in DTYPES.items()}


def plan_files(
    parameters: Parameters, configs: Mapping[str, Mapping[str, object]], max_shard_bytes: int
) -> list[File]:
    """The files of a model: shards of `max_shard_bytes`, an index if there are several, `configs`.

    With an adapter's config they are named as peft names them. A larger tensor is a shard of its
    own. Raises UnsupportedLeaf, naming every parameter, for dtypes and names beyond the format.
    """
    tensors = parameters.model
    problems = [
        f"{name} has dtype {tensor.dtype}"
        for name, tensor in tensors.items()
        if tensor.dtype.name not in _CODES
    ]
    if "__metadata__" in tensors:
        problems.append("__metadata__ has a name that the header keeps for itself")
    if problems:
        remedy = f"{CAST_FIRST}, or export to another format."
        raise UnsupportedLeaf("safetensors cannot hold:", problems, remedy=remedy)
    described = [
        File.literal(name, json.dumps(config, indent=2).encode() + b"\n")
        for name, config in configs.items()
    ]
    if ADAPTER in configs:  # which peft never cuts
        return [_file("adapter_model.safetensors", tensors), *described]
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        return [_file("model.safetensors", shards[0]), *described]
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    named_shards = dict(zip(names, shards, strict=True))
    return [*itertools.starmap(_file, named_shards.items()), _index(named_shards), *described]


def _index(shards: Mapping[str, Mapping[str, Tensor]]) -> File:
    weight_map: dict[str, str] = {}
    total = 0
    for file, tensors in shards.items():
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return File.literal(INDEX, json.dumps(index, indent=2).encode() + b"\n")


def carries(file: str, name: str) -> bool:
    """Whether the export has the extra `name` of the source's `file`, copied or made anew."""
    return file in CONFIGS or name in ("format", "total_size", "total_parameters")


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in their order, divided into as few shards as hold them; at least one."""
    shards: list[dict[str, Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _file(name: str, tensors: Mapping[str, Tensor]) -> File:
    """A file of tensors, the dtypes with the largest elements first. Raises UnsupportedLeaf for too
    long a header.
    """
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: list[tuple[int, Tensor]] = []
    at = 0
    for key in order:
        tensor = tensors[key]
        end = at + tensor.nbytes
        header[key] = {
            "dtype": _CODES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        places.append((at, tensor))
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedLeaf(
            f"{name} would have a header of {len(text)} bytes; make shards smaller"
        )
    begin = 8 + len(text)
    literals = [(0, len(text).to_bytes(8, "little") + text)]
    placed = [(begin + offset, tensor) for offset, tensor in places]
    return File(name, begin + at, [Section(placed, literals)])
