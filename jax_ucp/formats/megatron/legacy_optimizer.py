"""The tensors to which the optimizer states of a legacy checkpoint's rank belong.

An optimizer numbers its parameters (`numbered`), or keeps its states in flat buffers. Neither ids
nor buffers name parameters: both follow the order of the model's keys in the file.

Facts: `megatron/core/optimizer/distrib_optimizer.py` of Megatron-LM core_v0.13.1 to core_v0.19.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_ucp.codecs.unpickle import what_is
from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.buffers import bucket_limit, buffer_walk
from jax_ucp.formats.megatron.legacy_files import OPTIM_FILE, LegacyRank, optimizer_parts
from jax_ucp.formats.megatron.model import EMBEDDING, TIED, is_expert
from jax_ucp.formats.megatron.numbered import (
    Module,
    ModuleState,
    numbered_states,
    param_groups,
    shapes_of,
    stored_tensors,
)
from jax_ucp.formats.megatron.run import Args


def find_states(
    args: Args, rank: LegacyRank, chunks: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, ModuleState]]:
    """Every state of the rank's modules in the rank's files.

    There can be several optimizers: one for experts, and another one beside Muon. Raises
    FormatError, naming the file, if sizes do not fit, and Undecided if the groups can be filled in
    no way, or in several.
    """
    where = rank.model.path
    parts = optimizer_parts(rank.tree["optimizer"])
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise FormatError(f"{where}: the optimizer is {what_is(rank.tree['optimizer'])}")
    numbered = ["state" in part.get("optimizer", part) for part in parts]
    if all(numbered):
        # Muon has matrices, and another optimizer the rest
        modules, muon = list(itertools.chain(*chunks)), "muon" in str(args.optional("optimizer"))
        for module, state in numbered_states(where, parts, modules, muon):
            yield module, replace(state, key=f"{rank.name}:{state.key}") if state.key else state
        return
    if any(numbered) or len(parts) > 2:
        raise FormatError(
            f"{where}: {len(parts)} optimizers, of which {sum(numbered)} number their parameters;"
            " of distributed ones we know one, or one more for experts. weights_only leaves them"
            " aside"
        )
    buffers = _flat_buffers(rank, len(parts))
    for experts, part, by_chunk in zip((False, True), parts, buffers, strict=False):
        groups = param_groups(where, part.get("optimizer", part))
        own = chunks
        if len(parts) == 2:
            if any(group.get("is_expert_parallel", experts) != experts for group in groups):
                raise FormatError(
                    f"{where}: the two optimizers are not that of the rest and that of the experts"
                )
            own = [[m for m in chunk if is_expert(m.local) == experts] for chunk in chunks]
        # how often it stepped: one number or none, as flat buffers have no groups
        steps = {group["step"] for group in groups if isinstance(group.get("step"), int)}
        if len(steps) > 1:
            raise FormatError(
                f"{where}: the parameter groups of a distributed optimizer stepped {sorted(steps)}"
                " times, and which parameters they have is not stored; weights_only leaves the"
                " optimizer aside"
            )
        for module, step in itertools.product(itertools.chain(*own), steps):
            yield module, ModuleState("step", value=step)
        if by_chunk is not None:
            yield from _flat_states(args, rank, by_chunk, own)


def _flat_buffers(rank: LegacyRank, count: int) -> list[Mapping[Any, Any] | None]:
    """The flat buffers of a rank's `count` optimizers, by model chunk, then dtypes.

    None if another rank's file has them: only dense data-parallel rank 0 writes them.
    """
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
    buffers: list[Mapping[Any, Any] | None] = []
    for i, part in enumerate(parts):
        if part is None and (i, count) == (0, 2):
            buffers.append(None)
            continue
        if not isinstance(part, dict) or part.get("buckets_coalesced") is not True:
            raise FormatError(
                f"{path}: the buffers are not coalesced, as before February 2024; load it with"
                " Megatron's --ckpt-convert-update-legacy-dist-opt-format and save it again"
            )
        buffers.append({key: value for key, value in part.items() if key != "buckets_coalesced"})
    return buffers


def _flat_states(
    args: Args, rank: LegacyRank, buffers: Mapping[Any, Any], chunks: Sequence[Sequence[Module]]
) -> Iterator[tuple[Module, ModuleState]]:
    """The states in the flat buffers of a distributed optimizer, which has a buffer for each chunk
    and each dtype of weights.
    """
    path, tied = rank.folder / OPTIM_FILE, args.copies_embedding
    dp = args.degree("data_parallel_size") * args.degree("context_parallel_size")
    if strays := [key for key in buffers if key not in range(len(chunks))]:
        raise FormatError(f"{path}: buffers {strays} for {len(chunks)} model chunks")
    numel = sum(module.numel for module in itertools.chain(*chunks))
    for c, modules in enumerate(chunks):
        by_dtype = buffers.get(c) or {}
        if not isinstance(by_dtype, dict):
            raise FormatError(
                f"{path}: buffer {c} should be a dict by dtype, but is {what_is(by_dtype)}"
            )
        missing = dict.fromkeys(module.local for module in modules)
        for (dtype, *_), buffer in by_dtype.items():
            own = [module for module in modules if module.tensor.dtype == dtype]
            if any(module.local not in missing for module in own):
                raise FormatError(f"{path}: several buffers for weights of {dtype}")
            for module in own:
                del missing[module.local]
            sizes = [module.numel for module in own]
            shared = [tied and module.local in (EMBEDDING, TIED) for module in own]
            limit = bucket_limit(args, rank.pp, c, dp, numel)
            starts, buckets = buffer_walk(sizes, shared, dp, limit)
            states = stored_tensors(buffer)
            if "param" not in states:
                raise FormatError(
                    f"{path}: the buffer of chunk {c} has no masters, only {list(states)}"
                )
            lengths = {"numel_unpadded": (buffer.get("numel_unpadded"),), **shapes_of(buffer)}
            for what, length in lengths.items():
                if length != (sum(buckets),):
                    raise FormatError(
                        f"{path}: {what} of chunk {c} is {list(length)}, but {len(own)} parameters"
                        f" in {len(buckets)} buckets take {sum(buckets)}: some parameters were"
                        " frozen, the buckets had another size than args say, or the file belongs"
                        " to another run or rank. weights_only leaves the optimizer aside"
                    )
            for state, tensor in states.items():
                key = f"{rank.optim_name}:{tensor.key}"
                for module, start in zip(own, starts, strict=True):
                    yield module, ModuleState(state, key, module.tensor.shape, start, flat=True)
        if missing:
            raise FormatError(f"{path}: no buffer holds {next(iter(missing))}")
