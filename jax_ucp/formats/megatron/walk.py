"""Global names of a rank's tensors, and their places in flat buffers. Integers only.

Facts: `megatron/core/distributed/param_and_grad_buffer.py` (buffers),
`distributed_data_parallel.py` (bucket size) and `megatron/core/transformer/moe/experts.py` (grouped
experts) of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jax_ucp.errors import FormatError

TIED, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
# A stage with multi-token prediction, and not the first, has copies of the embedding's parameters.
MTP_COPY = " of multi-token prediction"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(.+)")
# TransformerEngine's grouped experts
_NUMBERED_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_GROUPED = re.compile(r"(.+\.mlp\.experts)\.weight([12])")
# TransformerEngine fuses a norm with the linear layer that follows it; these are the names of the
# local spec.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter in a rank's tensor from element `start` on; `transposed` swaps its axes."""

    name: str
    start: int
    shape: tuple[int, ...]
    transposed: bool = False


def in_layer(name: str) -> tuple[int, str] | None:
    """The number of the layer and the name inside it, or None for what is in none.

    >>> in_layer("decoder.layers.3.mlp.linear_fc1.weight")
    (3, 'mlp.linear_fc1.weight')
    """
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def layer_of(name: str) -> int | None:
    """The number of the layer, counted as the name counts: in a rank's file within its chunk."""
    place = in_layer(name)
    return place[0] if place else None


def local_norm(inner: str) -> str:
    """The name of a layer's tensor in the local spec, which has norms of their own.

    >>> local_norm("mlp.linear_fc1.layer_norm_bias")
    'pre_mlp_layernorm.bias'
    """
    for fused, norm in _FUSED_NORMS.items():
        if inner.startswith(fused):
            return norm + inner.removeprefix(fused)
    return inner


def is_expert(local: str) -> bool:
    return ".experts." in local


def parts_of(
    local: str, shape: tuple[int, ...], first_layer: int, experts: range, hidden: int
) -> list[Part]:
    """The parameters in a tensor of the model: one, but for grouped experts.

    `experts` are the global numbers of the rank's experts. Grouped ones lie in memory as (experts,
    hidden, rows) and (experts, columns, hidden), whatever the recorded shape; as parameters they
    are (rows, hidden) and (hidden, columns), as those of separate experts.

    >>> parts_of("decoder.layers.1.mlp.router.weight", (4, 8), first_layer=2, experts=range(0),
    ...     hidden=8)
    [Part(name='decoder.layers.3.mlp.router.weight', start=0, shape=(4, 8), transposed=False)]
    >>> weight = "decoder.layers.0.mlp.experts.weight2"
    >>> [part.name for part in parts_of(weight, (12, 8), 0, range(2, 3), 8)]
    ['decoder.layers.0.mlp.experts.2.linear_fc2.weight']
    """
    name = _in_model(local, first_layer)
    if expert := _expert_in_file(name):
        prefix, number, inner = expert
        if number >= len(experts):
            raise FormatError(f"{local}: the rank should have {len(experts)} experts")
        return [Part(f"{prefix}.{experts[number]}.{inner}", 0, shape)]
    grouped = _GROUPED.fullmatch(name)
    if not grouped:
        return [Part(name, 0, shape)]
    numel, count = math.prod(shape), len(experts)
    if not count or numel % (count * hidden):
        raise FormatError(
            f"{local} of shape {shape} does not divide into {count} experts of hidden size {hidden}"
        )
    each = numel // count
    memory = (hidden, each // hidden) if grouped[2] == "1" else (each // hidden, hidden)
    names = [f"{grouped[1]}.{expert}.linear_fc{grouped[2]}.weight" for expert in experts]
    return [Part(name, i * each, memory, transposed=True) for i, name in enumerate(names)]


def _in_model(local: str, first_layer: int) -> str:
    """The name in the whole model of a tensor of a chunk whose first layer is `first_layer`."""
    place = in_layer(local)
    if place is None:
        return local
    layer, inner = place
    return f"decoder.layers.{first_layer + layer}.{local_norm(inner)}"


def _expert_in_file(name: str) -> tuple[str, int, str] | None:
    """The module of all experts, the number of one on its rank, and what of it the name means.

    >>> _expert_in_file("decoder.layers.0.mlp.experts.linear_fc1.weight3")
    ('decoder.layers.0.mlp.experts', 3, 'linear_fc1.weight')
    """
    if match := _LOCAL_EXPERT.fullmatch(name):
        return match[1], int(match[2]), match[3]
    if match := _NUMBERED_EXPERT.fullmatch(name):
        return match[1], int(match[4]), f"{match[2]}.{match[3]}"
    return None


def buffer_walk(
    sizes: Sequence[int],
    shared: Sequence[bool],
    dp: int,
    bucket_size: int | None,
    recorded: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """Offsets of tensors in a coalesced buffer, and the sizes of its buckets without their tails.

    `sizes` are elements in module order, `shared` marks a tied embedding with several pipeline
    stages, which has a bucket to itself. The buffer is filled from the last tensor to the first,
    each at a multiple of 64. Where `bucket_size` is not known, buckets end where those `recorded`
    do, if a tensor ends there.

    >>> buffer_walk([100, 32], [False, False], dp=2, bucket_size=None)
    ([64, 0], [164])
    >>> buffer_walk([100, 32], [False, False], dp=2, bucket_size=32)
    ([32, 0], [32, 100])
    >>> buffer_walk([100, 32], [False, False], dp=2, bucket_size=None, recorded=[32, 100])
    ([32, 0], [32, 100])
    """
    offsets, buckets = [0] * len(sizes), list[int]()
    start = bucket_start = 0
    multiple = math.lcm(dp, 128)

    def is_full(elements: int) -> bool:
        if recorded:
            return recorded[min(len(buckets), len(recorded) - 1)] == elements
        return bucket_size is not None and elements >= bucket_size

    def close(end: int) -> int:
        buckets.append(end - bucket_start)
        return _round_up(end, multiple)

    empty = True
    for i in reversed(range(len(sizes))):
        start = _round_up(start, 64)
        if shared[i] and not empty:
            start = bucket_start = close(start)
            empty = True
        offsets[i] = sum(buckets) + start - bucket_start
        start, empty = start + sizes[i], False
        if shared[i] or is_full(start - bucket_start):
            start = bucket_start = close(start)
            empty = True
    if not empty:
        close(start)
    return offsets, buckets


def tails_before(offsets: Sequence[int], buckets: Sequence[int], multiple: int) -> list[int]:
    """For tensors at `offsets` of a coalesced buffer, the padding before their buckets.

    In memory every bucket is padded to a `multiple`; a coalesced buffer leaves that out. A writer
    that takes one for the other moves a tensor by this many elements.

    >>> tails_before([0, 100], [100, 32], multiple=128)
    [0, 28]
    """
    ends = list(itertools.accumulate(buckets))
    padding = [0, *itertools.accumulate(_round_up(n, multiple) - n for n in buckets)]
    return [padding[bisect.bisect_right(ends, offset)] for offset in offsets]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
