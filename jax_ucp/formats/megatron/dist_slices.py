"""What the flat buffers of a torch_dist checkpoint hold of each parameter, and which masters may
be in another's place.

Facts: `megatron/core/optimizer/distrib_optimizer.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.formats.megatron.dist_buffers import (
    Plan,
    Variant,
    copies_of_embedding,
    cut_of,
    may_have_buckets,
    plan_buffers,
    variants,
)
from jax_ucp.formats.megatron.dist_files import DistFiles
from jax_ucp.formats.megatron.dist_flat import (
    Address,
    Filled,
    Flat,
    Slice,
    check_numels,
    filled,
    flats,
    group_object,
)
from jax_ucp.formats.megatron.dist_names import is_flat, is_fully_reshardable
from jax_ucp.formats.megatron.dist_proof import (
    BF16,
    are_remainders,
    moved_by_padding,
    not_of_weights,
    unproved_order,
)
from jax_ucp.formats.megatron.dist_tensors import TensorStates
from jax_ucp.formats.megatron.gtp import uses_gtp
from jax_ucp.formats.megatron.legacy_optimizer import BUFFERS
from jax_ucp.formats.megatron.walk import is_expert
from jax_ucp.formats.torch_save.file import TorchFile
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.sources.consolidated import Consolidated


@dataclass(frozen=True)
class BufferStates:
    """By parameter and state how it is stored in flat buffers.

    `slices` are what ranks had of them, by whose keys they are made; `gaps` the stored pieces that
    hold nothing. `copies` are embeddings that further stages had, with the parameter that each is a
    copy of. `causes` say of parameters why their masters may be those of others.
    """

    states: Mapping[str, Mapping[str, Consolidated]] = field(default_factory=dict)
    slices: Sequence[Slice] = ()
    gaps: Sequence[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)


def has_flat_buffers(files: DistFiles) -> bool:
    return any(map(is_flat, (*files.tensors, *files.objects)))


def buffer_states(
    files: DistFiles, tensors: TensorStates, inside: Mapping[str, TorchFile]
) -> BufferStates:
    """The states in flat buffers; `inside` are the objects that have such.

    Raises FormatError or LayoutError where the buffers are not those of the model; both name the
    remedy, because the weights are not in the buffers.
    """
    try:
        if has_flat_buffers(files):
            if uses_gtp(files.args):
                raise FormatError(
                    f"{files.folder}: flat buffers of ranks that each have a shard of a weight"
                    " (generalized tensor parallelism) are not read"
                )
            return _read(files, tensors, flats(files, inside))
        if any(map(is_fully_reshardable, files.tensors)):
            return BufferStates(causes=_moved(files, tensors))
        return BufferStates()
    except (FormatError, LayoutError) as error:
        if "weights_only" in str(error):
            raise
        raise type(error)(f"{error}. weights_only opens the weights alone") from error


def _read(files: DistFiles, tensors: TensorStates, stored: Mapping[Address, Flat]) -> BufferStates:
    _check_recorded_sizes(files, stored)
    ranks = _held_by_ranks(files, tensors)
    buffers = _filled(files, ranks, stored)
    slices = [part for buffer in buffers for part in buffer.slices()]
    keys: dict[tuple[str, str], dict[int, str]] = {}
    for part in slices:
        keys.setdefault((part.name, part.state), {})[part.rank] = part.key
    states: dict[str, dict[str, Consolidated]] = {}
    for (name, state), by_rank in keys.items():
        shards = [by_rank[rank] for rank in range(len(by_rank))]
        states.setdefault(name, {})[state] = Consolidated(ranks.cuts[name], shards)
    return BufferStates(
        states,
        slices,
        [gap for buffer in buffers for gap in buffer.gaps],
        ranks.copies,
        dict.fromkeys(states, not_of_weights()),
    )


def _check_recorded_sizes(files: DistFiles, stored: Mapping[Address, Flat]) -> None:
    for key, stored_object in files.objects.items():
        if (about := group_object(key)) and about.what == "per_bucket_numel_unpadded":
            check_numels(files, key, stored_object.open(), stored)


@dataclass(frozen=True)
class _HeldByRanks:
    """How tensor-parallel ranks held each parameter, and the copies of an embedding.

    `dtypes` are those of what can be in flat buffers: not of what has states by its name.
    """

    cuts: Mapping[str, ParamLayout]
    dtypes: Mapping[str, str]
    copies: Mapping[str, str]


def _held_by_ranks(files: DistFiles, tensors: TensorStates) -> _HeldByRanks:
    cuts = {
        name: _cut(files, name, states["weight"].layout)
        for name, states in tensors.states.items()
        if not name.endswith(BUFFERS)
    }
    copies = copies_of_embedding(files.args, cuts)
    dtypes = dict(tensors.dtypes)
    if files.args.is_layer_wise:
        dtypes = {name: dtypes[name] for name in cuts if tensors.states[name].keys() == {"weight"}}
    return _HeldByRanks(
        cuts | {copy: cuts[name] for copy, name in copies.items()},
        dtypes | {copy: dtypes[name] for copy, name in copies.items() if name in dtypes},
        copies,
    )


def _cut(files: DistFiles, name: str, layout: ParamLayout) -> ParamLayout:
    ranks = files.args.degree("tensor_model_parallel_size")
    if is_expert(name):
        ranks = files.args.expert_ranks
    try:
        return cut_of(layout.shape, [fragment.target for fragment in layout.fragments], ranks)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None


def _filled(files: DistFiles, ranks: _HeldByRanks, stored: Mapping[Address, Flat]) -> list[Filled]:
    """The buffers, by the first order of modules that has their sizes.

    Whether it is theirs, `dist_proof` says: weights are compared with masters.
    """
    fits, errors = _fits(files, ranks, stored, every=_has_remainders(files))
    if not fits:
        raise errors[0]
    orders = [[buffer.buffer for buffer in fit] for fit in fits]
    if any(order != orders[0] for order in orders):
        raise FormatError(f"{files.folder}: {unproved_order()}")
    return fits[0]


def _fits(
    files: DistFiles, ranks: _HeldByRanks, stored: Mapping[Address, Flat], every: bool
) -> tuple[list[list[Filled]], list[FormatError]]:
    """The buffers by `every` order of modules that fits, or by the first; and why others do
    not.
    """
    several = any(chain for chain, *_ in stored)
    fits: list[list[Filled]] = []
    errors: list[FormatError] = []
    for variant in variants(files.args):
        if fits and not every:
            break
        try:
            plans = _plans(files, ranks, variant, several, stored)
            fits.append(filled(files, plans, stored))
        except FormatError as error:
            errors.append(error)
    return fits, errors


def _has_remainders(files: DistFiles) -> bool:
    """Whether some masters in flat buffers are remainders, which prove no order."""
    dtypes = {tensor.dtype for key, tensor in files.tensors.items() if is_flat(key)}
    return any(are_remainders(files.args, dtype, BF16) for dtype in (*dtypes, np.dtype("f4")))


def _plans(
    files: DistFiles,
    ranks: _HeldByRanks,
    variant: Variant,
    several: bool,
    stored: Mapping[Address, Flat],
) -> dict[int, Plan]:
    """The buffers of the optimizer, or of `several`, by the numbers of these: that of experts is
    the second, and so is the one behind a layer-wise optimizer, which has no buffers.
    """
    shapes = {name: layout.shards[0] for name, layout in ranks.cuts.items()}
    experts: dict[int, bool | None] = {0: False, 1: True} if several else {0: None}
    if files.args.is_layer_wise:
        experts = {1: None}
    recorded: dict[int, dict[tuple[int, int, str], list[int]]] = {0: {}, 1: {}}
    if "data_parallel_size" not in files.args.fields:
        for (chain, group, c, dtype), flat in stored.items():
            if not flat.coalesced:
                recorded.setdefault(chain, {})[group, c, dtype] = flat.bucket_sizes
    return {
        chain: plan_buffers(files.args, expert, shapes, ranks.dtypes, variant, recorded[chain])
        for chain, expert in experts.items()
    }


def _moved(files: DistFiles, tensors: TensorStates) -> dict[str, str]:
    """What `fully_reshardable` may have moved, with the cause; see `dist_proof`."""
    try:
        if files.args.is_layer_wise:
            raise FormatError("the parameters of both optimizers have states by their names")
        ranks = _held_by_ranks(files, tensors)
        several = files.args.degree("expert_model_parallel_size") > 1
        plans = _plans(files, ranks, variants(files.args)[0], several, {})
        buffers = [buffer for plan in plans.values() for buffer in plan.buffers.values()]
        return {name: moved_by_padding(n) for buffer in buffers for name, n in buffer.moved}
    # modules of an order not known here: any of them may have been moved, if there is padding
    except (FormatError, LayoutError):
        if not may_have_buckets(files.args):
            return {}
        return dict.fromkeys(tensors.states, moved_by_padding(None))
