"""Which tensors the optimizer states of a legacy checkpoint's rank belong to.

An optimizer numbers its parameters (`numbered`), or keeps its states in flat buffers. Neither ids
nor buffers name parameters: both follow the order of the model's keys in the file.

Facts: `megatron/core/optimizer/distrib_optimizer.py` of Megatron-LM core_v0.13.1 to core_v0.19.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.megatron.files import OPTIM_FILE, Args, Rank, optimizer_parts
from jax_ucp.formats.megatron.numbered import (
    Module,
    ModuleState,
    numbered_states,
    param_groups,
    shapes_of,
    stored_tensors,
)
from jax_ucp.formats.megatron.walk import EMBEDDING, TIED, buffer_walk, is_expert
from jax_ucp.formats.torch_save.unpickle import what_is

# What is no parameter, though the model keeps it beside them.
BUFFERS = ("mlp.router.expert_bias",)


def find_states(
    args: Args, rank: Rank, chunks: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, ModuleState]]:
    """Every state in the rank's files of its modules.

    There can be several optimizers: another for experts, and with Muon one more of each for what is
    no matrix.

    Raises FormatError, naming the file, where sizes do not fit, and Undecided where groups can be
    filled in no way, or in several.
    """
    where = rank.model.path
    parts = optimizer_parts(rank.tree["optimizer"])
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise FormatError(f"{where}: the optimizer is {what_is(rank.tree['optimizer'])}")
    numbered = ["state" in part.get("optimizer", part) for part in parts]
    if all(numbered):
        modules = list(itertools.chain(*chunks))
        states = numbered_states(where, parts, modules, args.uses_muon)
        yield from _keyed(rank, states)
        return
    if any(numbered) or len(parts) > 2:
        raise FormatError(
            f"{where}: {len(parts)} optimizers, of which {sum(numbered)} number their parameters;"
            " of distributed ones we know one, or one more for experts. weights_only leaves them"
            " aside"
        )
    for i, part in enumerate(parts):
        yield from _distributed(args, rank, part, i, len(parts), chunks)


def _keyed(
    rank: Rank, states: Iterable[tuple[Module, ModuleState]]
) -> Iterator[tuple[Module, ModuleState]]:
    """States whose keys name the rank's file too; a number has no key."""
    for module, state in states:
        yield module, replace(state, key=f"{rank.name}:{state.key}") if state.key else state


def _distributed(
    args: Args,
    rank: Rank,
    part: Mapping[str, Any],
    index: int,
    count: int,
    chunks: Sequence[Sequence[Module]],
) -> Iterator[tuple[Module, ModuleState]]:
    """States of one of the rank's distributed optimizers, of which there are `count`."""
    groups = param_groups(rank.model.path, part.get("optimizer", part))
    own = _half(rank, groups, chunks, experts=bool(index)) if count == 2 else chunks
    yield from _flat_steps(rank, groups, itertools.chain(*own))
    yield from _flat(args, rank, _flat_part(rank, index, count), own)


def _half(
    rank: Rank,
    groups: Sequence[Mapping[str, Any]],
    chunks: Sequence[Sequence[Module]],
    experts: bool,
) -> list[list[Module]]:
    """The modules of one of two optimizers, by chunk: those of experts, or the rest."""
    if any(group.get("is_expert_parallel", experts) != experts for group in groups):
        raise FormatError(
            f"{rank.model.path}: the two optimizers are not that of the rest and that of the"
            " experts"
        )
    return [[m for m in chunk if is_expert(m.local) == experts] for chunk in chunks]


def _flat_steps(
    rank: Rank, groups: Sequence[Mapping[str, Any]], modules: Iterable[Module]
) -> Iterator[tuple[Module, ModuleState]]:
    """How often the optimizer stepped: one number or none, as flat buffers have no groups.

    Raises FormatError where groups differ: then nothing says which parameters stepped how often.
    """
    steps = {group["step"] for group in groups if isinstance(group.get("step"), int)}
    if len(steps) > 1:
        raise FormatError(
            f"{rank.model.path}: the parameter groups of a distributed optimizer stepped"
            f" {sorted(steps)} times, and which parameters they have is not stored; weights_only"
            " leaves the optimizer aside"
        )
    for module, step in itertools.product(modules, steps):
        yield module, ModuleState("step", value=step)


def _flat_part(rank: Rank, index: int, count: int) -> Mapping[Any, Any] | None:
    """The flat buffers of one of a rank's optimizers, by model chunk, then dtypes."""
    path = rank.folder / OPTIM_FILE
    if rank.optim is None:
        raise FormatError(
            f"{path} is missing: by {rank.name} it holds the state of a distributed optimizer"
        )
    parts = optimizer_parts(rank.optim.tree)
    if len(parts) != count:
        raise FormatError(
            f"{path} has the state of {len(parts)} optimizers, {rank.name} of {count}: one of them"
            " is of another run or model. weights_only leaves the optimizer aside"
        )
    part = parts[index]
    if part is None and (index, count) == (0, 2):
        # another expert-parallel rank's file has it: only dense data-parallel rank 0 writes it
        return None
    if not isinstance(part, dict) or part.get("buckets_coalesced") is not True:
        raise FormatError(
            f"{path}: the buffers are not coalesced, as before February 2024; load it with"
            " Megatron's --ckpt-convert-update-legacy-dist-opt-format and save it again"
        )
    return {chunk: buffers for chunk, buffers in part.items() if chunk != "buckets_coalesced"}


def _flat(
    args: Args, rank: Rank, part: Mapping[Any, Any] | None, chunks: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, ModuleState]]:
    """States in the flat buffers of a distributed optimizer: one per chunk and dtype."""
    if part is None:
        return
    path = rank.folder / OPTIM_FILE
    if strays := [key for key in part if key not in range(len(chunks))]:
        raise FormatError(f"{path}: buffers {strays} for {len(chunks)} model chunks")
    numel = sum(module.numel for module in itertools.chain(*chunks))
    for c, modules in enumerate(chunks):
        buffers = part.get(c) or {}
        if not isinstance(buffers, dict):
            raise FormatError(
                f"{path}: buffer {c} should be a dict by dtype, but is {what_is(buffers)}"
            )
        for buffer, own in _owners(path, buffers, modules):
            yield from _buffer(args, rank, c, numel, own, buffer)


def _owners(
    path: FilePath, buffers: Mapping[Any, Any], modules: Sequence[Module]
) -> Iterator[tuple[Mapping[str, Any], list[Module]]]:
    """The buffers of a model chunk, each with the modules that are in it: those of its dtype."""
    missing = dict.fromkeys(module.local for module in modules)
    for (dtype, *_), buffer in buffers.items():
        own = [module for module in modules if module.tensor.dtype == dtype]
        if any(module.local not in missing for module in own):
            raise FormatError(f"{path}: several buffers for weights of {dtype}")
        for module in own:
            del missing[module.local]
        yield buffer, own
    if missing:
        raise FormatError(f"{path}: no buffer holds {next(iter(missing))}")


def _buffer(
    args: Args, rank: Rank, c: int, numel: int, modules: Sequence[Module], buffer: Mapping[str, Any]
) -> Iterator[tuple[Module, ModuleState]]:
    path = rank.folder / OPTIM_FILE
    tied = args.copies_embedding
    shared = [tied and m.local in (EMBEDDING, TIED) for m in modules]
    dp = args.degree("data_parallel_size") * args.degree("context_parallel_size")
    limit = bucket_limit(args, rank.pp, c, dp, numel)
    starts, buckets = buffer_walk([m.numel for m in modules], shared, dp, limit)
    states = stored_tensors(buffer)
    if "param" not in states:
        raise FormatError(f"{path}: the buffer of chunk {c} has no masters, only {list(states)}")
    lengths = {"numel_unpadded": (buffer.get("numel_unpadded"),), **shapes_of(buffer)}
    for what, length in lengths.items():
        if length != (sum(buckets),):
            raise FormatError(
                f"{path}: {what} of chunk {c} is {list(length)}, but {len(modules)} parameters in"
                f" {len(buckets)} buckets take {sum(buckets)}: some parameters were frozen, the"
                " buckets had another size than args say, or the file belongs to another run or"
                " rank. weights_only leaves the optimizer aside"
            )
    for state, tensor in states.items():
        key = rank.key(tensor, OPTIM_FILE)
        for module, start in zip(modules, starts, strict=True):
            yield module, ModuleState(state, key, module.tensor.shape, start, flat=True)


def bucket_limit(args: Args, pp: int, chunk: int, dp: int, numel: int) -> int | None:
    """Elements after which a bucket is closed; None where a buffer has one bucket.

    Only the first chunk of the first pipeline stage has several, and only where gradients are
    reduced meanwhile. `numel` are the elements of all parameters of the stage.
    """
    if pp or chunk or not args.get("overlap_grad_reduce"):
        return None
    if size := args.get("ddp_bucket_size"):
        return int(size)
    if buckets := args.get("ddp_num_buckets"):
        return numel // int(buckets)
    return max(40_000_000, 1_000_000 * dp)


def numbered_alone(optimizer: Any) -> bool:
    """Whether an optimizer has states by number, and no masters beside them."""
    parts = [part for part in optimizer_parts(optimizer) if isinstance(part, dict)]
    unmastered = [part for part in parts if "fp32_from_fp16_params" not in part]
    return any(part.get("optimizer", part).get("state") for part in unmastered)


def beside_tensors(optimizer: Any) -> dict[str, Any]:
    """An optimizer's hyper-parameters and loss scaler: what is not a tensor."""
    beside: dict[str, Any] = {}
    for i, part in enumerate(optimizer_parts(optimizer)):
        if not isinstance(part, dict):
            continue
        label = f"optimizer/{i}" if isinstance(optimizer, list) else "optimizer"
        inner = part.get("optimizer", part)
        beside |= _labelled(label, inner, without=("state",))
        if inner is not part:
            beside |= _labelled(label, part, without=("optimizer", "fp32_from_fp16_params"))
    return beside


def _labelled(label: str, tree: Mapping[str, Any], without: Sequence[str]) -> dict[str, Any]:
    return {f"{label}/{name}": value for name, value in tree.items() if name not in without}
