"""From the keys of a torch_dist checkpoint to parameters. Integers and names only.

torch_dist stacks layers and experts on leading axes of one tensor; here every layer and expert has
its own name, that of Megatron's local layer spec with global numbers, as in the legacy format.

Facts: `sharded_state_dict` in `megatron/core/transformer/transformer_block.py`, `mlp.py` and
`moe/experts.py`, and `megatron/core/dist_checkpointing/mapping.py` of Megatron-LM core_v0.16.1;
flattened ranges by core_v0.15.3.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.model import Blocks, StoredRun, local_norm
from jax_ucp.layout.box import Box, range_boxes

_STACKED = re.compile(r"((?:.+\.)?layers)\.(?!\d+\.)(.+)")
EXPERT_KEY = re.compile(r"(.*mlp\.experts\.)experts\.(\d+\.)?(.+)")  # stacked, or one by number
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
# Float16OptimizerWithFloat16Params has its masters as fp32_param, the distributed optimizer as
# param.
_MASTERS = ("param", "fp32_param")


@dataclass(frozen=True)
class DistTensor:
    """A tensor that all ranks wrote together, and the runs that it is made of."""

    shape: tuple[int, ...]
    dtype: np.dtype
    runs: tuple[StoredRun, ...]


def state_of(key: str) -> tuple[str, str]:
    """The state in a tensor, and the model's tensor it is of; `weight` is that itself.

    >>> state_of("optimizer.state.fp32_param.decoder.final_layernorm.weight")
    ('param', 'decoder.final_layernorm.weight')
    >>> state_of("decoder.final_layernorm.weight")
    ('weight', 'decoder.final_layernorm.weight')
    """
    match = _STATE.fullmatch(key)
    if match is None:
        return "weight", key
    return "param" if match[1] in _MASTERS else match[1], match[2]


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The key of a flat buffer of a rank, or of its object `what`: groups, or sizes."""

    chain: int
    group: int
    inner: str

    @property
    def what(self) -> str:
        return self.inner.partition("/")[0]


def group_key(key: str) -> GroupKey | None:
    match = _GROUP.fullmatch(key)
    return GroupKey(int(match[1] or 0), int(match[2]), match[3]) if match else None


def is_flat(key: str) -> bool:
    """Whether a key belongs to flat buffers, which have no names of parameters."""
    return bool(_FLAT.match(key))


def is_optimizers(key: str) -> bool:
    """Whether a key belongs to the optimizer, and not to the model.

    >>> is_optimizers("chained_0.optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1")
    True
    """
    return bool(_OPTIMIZER.match(key))


def is_fully_reshardable(key: str) -> bool:
    """Whether a key is a master that a distributed optimizer joined from its buckets."""
    match = _STATE.fullmatch(key)
    return match is not None and match[1] == "param"


def bare_name(key: str) -> str:
    """A model's key without what NeMo, which wraps the model in a module, has before it.

    >>> bare_name("module.decoder.final_layernorm.weight")
    'decoder.final_layernorm.weight'
    """
    return key.removeprefix("module.")


def stacks_of(key: str) -> list[str]:
    """The counts on the leading axes of a tensor: `layers`, `experts`, both in this order, or none.

    >>> stacks_of("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    ['layers', 'experts']
    """
    experts = EXPERT_KEY.fullmatch(key)
    is_stacked = bool(experts and not experts[2])
    return ["layers"] * bool(_STACKED.fullmatch(key)) + ["experts"] * is_stacked


def name_of(key: str, place: Sequence[int]) -> str:
    """The parameter at the leading indices `place` of the tensor `key`.

    >>> name_of("decoder.layers.mlp.experts.experts.linear_fc1.weight", (3, 1))
    'decoder.layers.3.mlp.experts.1.linear_fc1.weight'
    >>> name_of("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (0,))
    'decoder.layers.0.input_layernorm.weight'
    """
    return _template(key).format(*place)


@lru_cache(maxsize=64)
def _template(key: str) -> str:
    """The name of a parameter in the tensor `key`, with `{}` for each leading index."""
    key = bare_name(key).replace("{", "{{").replace("}", "}}")
    if match := _STACKED.fullmatch(key):
        key = f"{match[1]}.{{}}.{match[2]}"
    if match := EXPERT_KEY.fullmatch(key):
        key = match[1] + (match[2] or "{}.") + match[3]
    prefix, layers, inner = key.rpartition("layers.")
    number, _, module = inner.partition(".")
    return f"{prefix}{layers}{number}.{local_norm(module)}" if layers else key


def unstacked(key: str, shape: Sequence[int], runs: Iterable[StoredRun]) -> Blocks:
    """The parameters in a tensor, each with its shape and the runs that it is made of.

    A run that covers several layers or experts is cut: the block of one is a range of its elements.
    """
    depth = len(stacks_of(key))
    params: Blocks = {}
    by_place: dict[tuple[int, ...], list[StoredRun]] = {}
    for place in itertools.product(*map(range, shape[:depth])):
        by_place[place] = []
        params[name_of(key, place)] = tuple(shape[depth:]), by_place[place]
    for run in runs:
        inner = Box(run.target.start[depth:], run.target.stop[depth:])
        leading = Box(run.target.start[:depth], run.target.stop[:depth])
        for i, place in enumerate(itertools.product(*map(range, leading.start, leading.stop))):
            if inner.size:
                by_place[place].append(StoredRun(run.key, run.start + i * inner.size, inner))
    return params


def flattened_runs(
    shape: Sequence[int], stored: Sequence[int], runs: Iterable[StoredRun]
) -> Iterator[StoredRun]:
    """The runs of a state stored as [grid of fragments, elements of one], flattened.

    That is how `fully_sharded_model_space` keeps what a data-parallel boundary cuts anywhere: the
    tensor of `shape` is a grid of fragments, each of which is stored as its elements in row-major
    order.

    >>> [run] = flattened_runs((4, 6), (2, 1, 12), [StoredRun("k", 0, Box((1, 0, 6), (2, 1, 12)))])
    >>> run.start, str(run.target)
    (0, '[3:4, 0:6]')
    """
    grid = tuple(stored[:-1])
    if len(grid) != len(shape) or any(g < 1 or n % g for n, g in zip(shape, grid, strict=True)):
        raise FormatError(
            f"shape {list(stored)} is not a grid of flattened fragments of {list(shape)}"
        )
    local = [n // g for n, g in zip(shape, grid, strict=True)]
    if math.prod(local) != stored[-1]:
        raise FormatError(
            f"fragments of {stored[-1]} elements do not form {list(shape)} on a grid of"
            f" {list(grid)}"
        )
    for run in runs:
        first, last = run.target.start[-1], run.target.stop[-1]
        start = run.start
        for place in itertools.product(*map(range, run.target.start[:-1], run.target.stop[:-1])):
            offset = [at * n for at, n in zip(place, local, strict=True)]
            for box in range_boxes(local, first, last):
                yield StoredRun(run.key, start, box.shift(offset))
                start += box.size
