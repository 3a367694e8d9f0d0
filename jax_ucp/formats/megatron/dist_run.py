"""What a run was, where its checkpoint has no args.

Megatron-Bridge writes its configuration beside the tensors, NeMo 2 in another folder. What neither
says shows in what is stored: how many ranks wrote, how many layers there are. It is proved as args
are: by the sizes of flat buffers, and by masters beside weights.

Facts: `ConfigContainer.to_yaml` in `src/megatron/bridge/training/config.py` of Megatron-Bridge
v0.6.0; `get_rng_state` in `megatron/training/checkpointing.py` of Megatron-LM core_v0.19.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_ucp.errors import SpecError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.dist_names import Tensor, bare_name, state_of
from jax_ucp.formats.megatron.notes import RUN_CONFIG
from jax_ucp.formats.megatron.walk import EMBEDDING, TIED
from jax_ucp.formats.nested import as_dict
from jax_ucp.shard_spec.document import MAX_TEXT, document

_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_CHUNK = re.compile(r"gbuf_idx_(\d+)\..+")
_RNG = re.compile(r"rng_state/shard_[\d.]+_(\d+)\.(\d+)(?:\.\d+)*")
_EXPERT_ROWS = re.compile(r"\.experts\.experts\.(?:\d+\.)?linear_fc2\.weight$")
_SECTIONS = ("model", "ddp", "optimizer")
# What they call otherwise than args do.
_RENAMED = {
    "num_moe_experts": "num_experts",
    "bucket_size": "ddp_bucket_size",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
}
_TIES = "share_embeddings_and_output_weights"
_UNTIES = "untie_embeddings_and_output_weights"


def run_fields(
    folder: FilePath, tensors: Mapping[str, Tensor], objects: Iterable[str]
) -> dict[str, Any]:
    """What args would say: by the configuration, or else by what is stored."""
    return _seen(tensors, list(objects)) | _configured(folder)


def _configured(folder: FilePath) -> dict[str, Any]:
    """The settings in Megatron-Bridge's configuration; none where it cannot be read."""
    path = folder / RUN_CONFIG
    if not path.is_file() or path.size() > MAX_TEXT:
        return {}
    try:
        content = document(path.read_text(), str(path)).content
    except (SpecError, ValueError):
        return {}
    fields: dict[str, Any] = {}
    for section in _SECTIONS:
        for name, value in as_dict(content.get(section)).items():
            fields[_RENAMED.get(name) or str(name)] = _value(value)
    if isinstance(ties := fields.pop(_TIES, None), bool):
        fields[_UNTIES] = not ties
    return fields


def _value(value: Any) -> Any:
    """A value as args have it; a dtype is written as the object that it names."""
    target = as_dict(value).get("_target_")
    if target in ("torch.float32", "torch.float16"):
        return np.dtype(target.removeprefix("torch."))
    return value


def _seen(tensors: Mapping[str, Tensor], objects: list[str]) -> dict[str, Any]:
    models = {bare_name(key): tensor for key, tensor in tensors.items() if _is_models(key)}
    groups = list(filter(None, map(_GROUP.fullmatch, (*tensors, *objects))))
    tp, pp = _ranks(models, objects, _group_count(groups, 0))
    rows = [_cuts(tensor) for key, tensor in models.items() if _EXPERT_ROWS.search(key)]
    etp = max(rows, default=tp)
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": _chunk_count(groups),
        "expert_tensor_parallel_size": etp,
        "expert_model_parallel_size": max(1, _group_count(groups, 1) // (etp * pp)),
        "num_layers": _count(models, "decoder.layers"),
        "num_experts": _count_experts(models),
        "mtp_num_layers": _count(models, "mtp.layers"),
        _UNTIES: TIED in models,
    }


def _group_count(groups: Iterable[re.Match[str]], chain: int) -> int:
    """The model-parallel ranks of an optimizer, which each have a group."""
    return len({int(group[2]) for group in groups if int(group[1] or 0) == chain})


def _chunk_count(groups: Iterable[re.Match[str]]) -> int:
    """The model chunks of each rank, one more than the last number of a buffer."""
    chunks = filter(None, (_CHUNK.fullmatch(group[3]) for group in groups))
    return max((int(chunk[1]) + 1 for chunk in chunks), default=1)


def _is_models(key: str) -> bool:
    return state_of(key)[0] == "weight" and not _GROUP.fullmatch(key)


def _ranks(models: Mapping[str, Tensor], objects: Iterable[str], groups: int) -> tuple[int, int]:
    """The tensor and pipeline parallelism: by the grid of the ranks' random states; else by the
    pieces of the vocabulary, and the ranks that had flat buffers.
    """
    for match in filter(None, map(_RNG.fullmatch, objects)):
        return int(match[2]), int(match[1])
    tp = _cuts(models[EMBEDDING]) if EMBEDDING in models else 1
    return tp, max(1, groups // tp)


def _cuts(tensor: Tensor) -> int:
    """Into how many parts the ranks cut a tensor, of one layer or expert where it has several."""
    sizes = [run.target.shape[-2:] for run in tensor.runs]
    whole = math.prod(tensor.shape[-2:])
    return max(1, whole // max(1, math.prod(sizes[0]))) if sizes else 1


def _count(models: Mapping[str, Tensor], layers: str) -> int:
    """The layers of a model: the length of their axis, or one more than the last number."""
    return max((count for key, tensor in models.items() for count in _counts(key, tensor, layers)),
               default=0)  # fmt: skip


def _counts(key: str, tensor: Tensor, layers: str) -> Iterator[int]:
    inner = key.removeprefix(f"{layers}.")
    if inner == key:
        return
    number = inner.partition(".")[0]
    if number.isdecimal():
        yield int(number[:9]) + 1
    elif tensor.shape:
        yield tensor.shape[0]


def _count_experts(models: Mapping[str, Tensor]) -> int:
    """The experts of a layer, which are an axis, the last before the two of a matrix."""
    shapes = [models[key].shape for key in models if ".experts.experts.linear_fc2." in key]
    numbers = [re.search(r"\.experts\.experts\.(\d{1,9})\.", key) for key in models]
    by_number = max((int(match[1]) + 1 for match in numbers if match), default=0)
    return by_number or max((shape[-3] for shape in shapes if len(shape) > 2), default=0)
