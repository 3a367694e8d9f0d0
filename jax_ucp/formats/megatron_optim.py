"""The optimizer states of one rank of a legacy Megatron checkpoint, and which of its tensors each belongs to.

Neither ids nor flat buffers name parameters: the order is that of the model's keys, and sizes are compared.

Facts: `megatron/core/optimizer/__init__.py` (groups), `optimizer.py` (the 16-bit wrapper) and `distrib_optimizer.py`
of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron_files import OPTIM_FILE, Args, Rank
from jax_ucp.formats.megatron_walk import EMBEDDING, TIED, Part, buffer_walk, is_expert
from jax_ucp.formats.safe_pickle import what_is
from jax_ucp.formats.torch_file import StoredTensor

# What is no parameter, though the model keeps it beside them.
BUFFERS = ("mlp.router.expert_bias",)
_ORDER = "the order of parameters is not the one we know, or the file belongs to another run"


@dataclass(frozen=True, slots=True)
class Module:
    """A tensor of a rank's model, and the parameters that are in it."""

    local: str
    chunk: int
    tensor: StoredTensor
    parts: Sequence[Part]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it: not to biases, nor to anything with one axis."""
        return len(self.tensor.shape) != 1 and not self.local.endswith(".bias")


@dataclass(frozen=True, slots=True)
class Held:
    """One state of a module: in the stored tensor `key`, from `start` on if that is a flat buffer, or a number."""

    state: str
    key: str = ""
    shape: tuple[int, ...] = ()
    start: int = 0
    flat: bool = False
    value: Any = None


def find_states(args: Args, rank: Rank, chunks: Sequence[Sequence[Module]]) -> Iterator[tuple[Module, Held]]:
    """Every state that the rank's files hold of its modules. With experts there can be a second optimizer for them.

    Raises FormatError, naming the file, where sizes do not fit.
    """
    optimizer = rank.tree["optimizer"]
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, dict) for part in parts):
        raise FormatError(f"{rank.model.path}: {len(parts)} optimizers; we know one, or one more for experts")
    for i, part in enumerate(parts):
        mine = [[m for m in chunk if len(parts) == 1 or is_expert(m.local) == bool(i)] for chunk in chunks]
        inner = part.get("optimizer", part)
        groups = _groups(rank, inner, [m for chunk in mine for m in chunk])
        if len(parts) == 2 and any(group.get("is_expert_parallel", bool(i)) != bool(i) for group, _ in groups):
            raise FormatError(f"{rank.model.path}: the two optimizers are not that of the rest and that of the experts")
        for group, modules in groups:
            if isinstance(group.get("step"), int):
                yield from ((module, Held("step", value=group["step"])) for module in modules)
        if "state" in inner:
            yield from _by_id(rank, inner["state"], groups)
            if "fp32_from_fp16_params" in part:
                yield from _masters(rank, part["fp32_from_fp16_params"], groups)
        else:
            yield from _flat(args, rank, i, len(parts), mine)


def _groups(
    rank: Rank, inner: Mapping[str, Any], modules: Sequence[Module]
) -> list[tuple[dict[str, Any], list[Module]]]:
    """The parameter groups with their modules: one with weight decay and one without, found by `wd_mult`."""
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{rank.model.path}: the optimizer has no param_groups")
    decay = {True: [m for m in modules if m.decays], False: [m for m in modules if not m.decays]}
    found: dict[bool, tuple[dict[str, Any], list[Module]]] = {}
    for group in groups:
        with_decay = group.get("wd_mult", 1.0) != 0
        if with_decay in found:
            raise FormatError(
                f"{rank.model.path}: several parameter groups {'with' if with_decay else 'without'} weight decay "
                "(learning rates by parameter, for example); which parameters they hold is not stored"
            )
        mine, ids = decay[with_decay], group.get("params")
        if ids is not None and len(ids) != len(mine):
            raise FormatError(
                f"{rank.model.path}: a parameter group has {len(ids)} parameters, where {len(mine)} of the model's "
                f"{'have' if with_decay else 'lack'} weight decay; {_ORDER}"
            )
        found[with_decay] = group, mine
    if lost := [m.local for d, mine in decay.items() if d not in found for m in mine]:
        raise FormatError(f"{rank.model.path}: {lost[0]} is in no parameter group; {_ORDER}")
    return [found[bool(group.get("wd_mult", 1.0) != 0)] for group in groups]


def _by_id(
    rank: Rank, state: Mapping[int, Any], groups: Sequence[tuple[dict[str, Any], list[Module]]]
) -> Iterator[tuple[Module, Held]]:
    """States under the ids of their groups."""
    known: set[int] = set()
    for group, modules in groups:
        for number, module in zip(group.get("params") or (), modules, strict=True):
            known.add(number)
            for name, value in (state.get(number) or {}).items():
                if not isinstance(value, StoredTensor):
                    if value is not None:
                        yield module, Held(name, value=value)
                elif value.shape == module.tensor.shape or (name == "step" and value.shape == ()):
                    yield module, Held(name, rank.key(value), value.shape)
                else:
                    raise FormatError(
                        f"{rank.model.path}: {name} of parameter {number} has shape {value.shape}, but "
                        f"{module.local}, which should be that parameter, has {module.tensor.shape}; {_ORDER}"
                    )
    if strays := set(state) - known:
        raise FormatError(f"{rank.model.path}: the optimizer has states of {sorted(strays)[:5]}, which no group holds")


def _masters(
    rank: Rank, masters: Any, groups: Sequence[tuple[dict[str, Any], list[Module]]]
) -> Iterator[tuple[Module, Held]]:
    """The fp32 masters of 16-bit weights, by group; a weight that is fp32 in the model is its own master."""
    if not isinstance(masters, list) or len(masters) != len(groups):
        raise FormatError(f"{rank.model.path}: fp32_from_fp16_params is not a list of {len(groups)} groups")
    for (_, modules), tensors in zip(groups, masters, strict=True):
        rounded = [m for m in modules if m.tensor.dtype != np.float32]
        if len(rounded) != len(tensors):
            raise FormatError(f"{rank.model.path}: {len(tensors)} masters for {len(rounded)} 16-bit weights; {_ORDER}")
        for module, tensor in zip(rounded, tensors, strict=True):
            if tensor.shape != module.tensor.shape:
                raise FormatError(
                    f"{rank.model.path}: the master at {tensor.key} has shape {tensor.shape}, but {module.local} "
                    f"has {module.tensor.shape}; {_ORDER}"
                )
            yield module, Held("param", rank.key(tensor), tensor.shape)


def _flat(
    args: Args, rank: Rank, index: int, count: int, chunks: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, Held]]:
    """States in the flat buffers of a distributed optimizer: one per chunk and dtype."""
    path = rank.folder / OPTIM_FILE
    if rank.optim is None:
        raise FormatError(f"{path} is missing: by {rank.name} it holds the state of a distributed optimizer")
    tree = rank.optim.tree
    parts = tree if isinstance(tree, list) else [tree]
    if len(parts) != count:
        raise FormatError(f"{path} has the state of {len(parts)} optimizers, {rank.name} of {count}")
    part = parts[index]
    if part is None and count == 2 and index == 0:
        return  # another expert-parallel rank's file has it: only dense data-parallel rank 0 writes it
    if not isinstance(part, dict) or part.get("buckets_coalesced") is not True:
        raise FormatError(
            f"{path}: the buffers are not coalesced, as before February 2024; load it with Megatron's "
            "--ckpt-convert-update-legacy-dist-opt-format and save it again"
        )
    if strays := [key for key in part if key != "buckets_coalesced" and key not in range(len(chunks))]:
        raise FormatError(f"{path}: buffers {strays} for {len(chunks)} model chunks")
    for c, modules in enumerate(chunks):
        buffers = part.get(c) or {}
        if not isinstance(buffers, dict):
            raise FormatError(f"{path}: buffer {c} should be a dict by dtype, but is {what_is(buffers)}")
        covered: set[str] = set()
        for (dtype, *_), buffer in buffers.items():
            mine = [m for m in modules if m.tensor.dtype == dtype]
            if covered & {m.local for m in mine}:
                raise FormatError(f"{path}: several buffers for weights of {dtype}")
            covered |= {m.local for m in mine}
            yield from _buffer(args, rank, c, chunks, mine, buffer)
        if lost := [m.local for m in modules if m.local not in covered]:
            raise FormatError(f"{path}: no buffer holds {lost[0]}")


def _buffer(
    args: Args,
    rank: Rank,
    c: int,
    chunks: Sequence[Sequence[Module]],
    modules: Sequence[Module],
    buffer: Mapping[str, Any],
) -> Iterator[tuple[Module, Held]]:
    path = rank.folder / OPTIM_FILE
    p = args.degree("pipeline_model_parallel_size")
    tied = p > 1 and not args.get("untie_embeddings_and_output_weights", False)
    shared = [tied and m.local in (EMBEDDING, TIED) for m in modules]
    dp = args.degree("data_parallel_size") * args.degree("context_parallel_size")
    numel = sum(math.prod(m.tensor.shape) for chunk in chunks for m in chunk)
    limit = bucket_size(args, dp, numel) if rank.pp == 0 and c == 0 and args.get("overlap_grad_reduce") else None
    starts, buckets = buffer_walk([math.prod(m.tensor.shape) for m in modules], shared, dp, limit)
    length = sum(buckets)
    states = {name: value for name, value in buffer.items() if isinstance(value, StoredTensor)}
    if "param" not in states:
        raise FormatError(f"{path}: the buffer of chunk {c} has no masters, only {list(states)}")
    lengths = {"numel_unpadded": (buffer.get("numel_unpadded"),), **{k: v.shape for k, v in states.items()}}
    for what, found in lengths.items():
        if found != (length,):
            raise FormatError(
                f"{path}: {what} of chunk {c} is {list(found)}, but {len(modules)} parameters in "
                f"{len(buckets)} buckets take {length}; {_ORDER}"
            )
    for state, tensor in states.items():
        for module, start in zip(modules, starts, strict=True):
            yield module, Held(state, rank.key(tensor, OPTIM_FILE), module.tensor.shape, start, flat=True)


def bucket_size(args: Args, dp: int, numel: int) -> int:
    """Elements after which a bucket is closed, on the first pipeline stage; `numel` are those of all its parameters."""
    if said := args.get("ddp_bucket_size"):
        return int(said)
    if buckets := args.get("ddp_num_buckets"):
        return numel // int(buckets)
    return max(40_000_000, 1_000_000 * dp)


def beside_tensors(optimizer: Any) -> list[tuple[str, Any]]:
    """What an optimizer's state has beside masters and moments: hyper-parameters and the loss scaler."""
    found: list[tuple[str, Any]] = []
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    for i, part in enumerate(parts):
        at = f"optimizer/{i}" if isinstance(optimizer, list) else "optimizer"
        inner = part.get("optimizer", part) if isinstance(part, dict) else {}
        found += [(f"{at}/{name}", value) for name, value in inner.items() if name != "state"]
        if inner is not part and isinstance(part, dict):
            skipped = ("optimizer", "fp32_from_fp16_params")
            found += [(f"{at}/{name}", value) for name, value in part.items() if name not in skipped]
    return found
