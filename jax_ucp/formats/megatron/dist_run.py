"""The args of a run whose checkpoint has none.

Megatron-Bridge writes its configuration beside the tensors, NeMo 2 in another folder. What neither
has shows in what is stored: how many ranks wrote, how many layers there are. It is proved as args
are: by the sizes of flat buffers, and by masters beside weights.

Facts: `ConfigContainer.to_yaml` in `src/megatron/bridge/training/config.py` of Megatron-Bridge
v0.6.0; `get_rng_state` in `megatron/training/checkpointing.py` of Megatron-LM core_v0.19.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jax_ucp.errors import SpecError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.dist_names import (
    EXPERT_KEY,
    DistTensor,
    bare_name,
    group_key,
    is_flat,
    state_of,
)
from jax_ucp.formats.megatron.model import EMBEDDING, TIED
from jax_ucp.formats.nested import as_dict
from jax_ucp.shard_spec.document import MAX_TEXT, document

RUN_CONFIG = "run_config.yaml"  # of Megatron-Bridge
_CHUNK = re.compile(r"gbuf_idx_(\d+)\..+")
_RNG = re.compile(r"rng_state/shard_[\d.]+_(\d+)\.(\d+)(?:\.\d+)*")
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
    folder: FilePath, tensors: Mapping[str, DistTensor], objects: Iterable[str]
) -> dict[str, Any]:
    """The fields of args, by Megatron-Bridge's configuration or by stored keys and shapes."""
    fields, path = _seen(tensors, list(objects)), folder / RUN_CONFIG
    if not path.is_file() or path.size() > MAX_TEXT:
        return fields
    try:
        content = document(path.read_text(), str(path)).content
    except (SpecError, ValueError):
        return fields
    for section in _SECTIONS:
        for name, value in as_dict(content.get(section)).items():
            target = as_dict(value).get("_target_")  # a dtype, by the name of its object
            if target in ("torch.float32", "torch.float16"):
                value = np.dtype(target.removeprefix("torch."))
            fields[_RENAMED.get(name) or str(name)] = value
    if isinstance(ties := fields.pop(_TIES, None), bool):
        fields[_UNTIES] = not ties
    return fields


def _seen(tensors: Mapping[str, DistTensor], objects: list[str]) -> dict[str, Any]:
    groups = list(filter(None, map(group_key, (*tensors, *objects))))
    own_keys = [key for key in tensors if state_of(key)[0] == "weight" and not is_flat(key)]
    models = {bare_name(key): tensors[key] for key in own_keys}
    dense, expert = (len({own.group for own in groups if own.chain == chain}) for chain in (0, 1))
    chunks = filter(None, (_CHUNK.fullmatch(own.inner) for own in groups))
    # the grid of the ranks' random states; else the pieces of the vocabulary, and the ranks that
    # had flat buffers
    if grid := next(filter(None, map(_RNG.fullmatch, objects)), None):
        tp, pp = int(grid[2]), int(grid[1])
    else:
        tp = _cuts(models[EMBEDDING]) if EMBEDDING in models else 1
        pp = max(1, dense // tp)
    # layers and experts have numbers in keys, or are an axis; of a matrix the last before its two
    layers = {"decoder.layers": 0, "mtp.layers": 0}
    by_number = by_axis = etp = 0
    for key, tensor in models.items():
        for root in layers:
            if key.startswith(f"{root}."):
                number = key.removeprefix(f"{root}.").partition(".")[0]
                axis = tensor.shape[0] if tensor.shape else 0
                count = int(number[:9]) + 1 if number.isdecimal() else axis
                layers[root] = max(layers[root], count)
        if own := EXPERT_KEY.fullmatch(key):
            if own[2]:
                by_number = max(by_number, int(own[2][:9].rstrip(".")) + 1)
            elif own[3].startswith("linear_fc2.") and len(tensor.shape) > 2:
                by_axis = max(by_axis, tensor.shape[-3])
            if own[3] == "linear_fc2.weight":
                etp = max(etp, _cuts(tensor))
    etp = etp or tp
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": max((int(c[1]) + 1 for c in chunks), default=1),
        "expert_tensor_parallel_size": etp,
        "expert_model_parallel_size": max(1, expert // (etp * pp)),
        "num_layers": layers["decoder.layers"],
        "num_experts": by_number or by_axis,
        "mtp_num_layers": layers["mtp.layers"],
        _UNTIES: TIED in models,
    }


def _cuts(tensor: DistTensor) -> int:
    """The number of parts that ranks cut a tensor into, or one layer or expert of several."""
    if not tensor.runs:
        return 1
    part = math.prod(tensor.runs[0].target.shape[-2:])
    return max(1, math.prod(tensor.shape[-2:]) // max(1, part))
