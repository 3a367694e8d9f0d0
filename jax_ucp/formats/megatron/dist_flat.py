"""The flat buffers of dp_reshardable and dp_zero_gather_scatter as states of parameters.

Megatron reads them only with the tensor and pipeline parallelism that wrote them. Here sizes are
compared with those recorded; `dist_proof` compares masters with weights.

Facts: `megatron/core/optimizer/distrib_optimizer.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.megatron.dist_buffers import Buffer, Place, Plan, slice_of
from jax_ucp.formats.megatron.dist_files import DistFiles, Tensor
from jax_ucp.formats.megatron.legacy_optimizer import stored_tensors
from jax_ucp.formats.nested import as_dict
from jax_ucp.formats.torch_save.file import TorchFile
from jax_ucp.formats.torch_save.unpickle import what_is
from jax_ucp.sources.consolidated import Consolidated

_KEY = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(
    r"gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)\.([^.]+)"
)
_OTHER = (
    "some parameters were frozen, buckets had another size than args say, the buffers belong to"
    " another run, or the modules lie in another order than the one known here"
)


# Of a buffer: optimizer, group, model chunk, dtype.
Address = tuple[int, int, int, str]


@dataclass
class Flat:
    """A rank's coalesced buffer: the sizes of its buckets, and by state stored pieces."""

    name: str
    coalesced: bool
    buckets: dict[int, int] = field(default_factory=dict)
    pieces: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)

    @property
    def bucket_sizes(self) -> list[int]:
        return [self.buckets[k] for k in sorted(self.buckets)]


@dataclass(frozen=True)
class Slice:
    """A state of a parameter as one tensor-parallel rank had it, to be called `key`."""

    state: str
    name: str
    rank: int
    key: str
    tensor: Consolidated


@dataclass(frozen=True)
class GroupObject:
    """A rank's object: `optimizer` has param groups, `per_bucket_numel` sizes."""

    chain: int
    group: int
    what: str


def group_object(key: str) -> GroupObject | None:
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return GroupObject(int(match[1] or 0), int(match[2]), match[3].partition("/")[0])


def param_state_sources(files: DistFiles) -> dict[str, TorchFile]:
    """The files of `param_state` objects (dp_zero_gather_scatter), by prefix of their keys."""
    sources: dict[str, TorchFile] = {}
    for key, stored in files.objects.items():
        group = group_object(key)
        if group is not None and group.what == "param_state":
            sources[f"{stored.file}:{key}:"] = stored.open()
    return sources


def flats(files: DistFiles, sources: Mapping[str, TorchFile]) -> dict[Address, Flat]:
    """Every buffer that is stored, by its address."""
    by_address: dict[Address, Flat] = {}
    for prefix, file in sources.items():
        key = prefix.partition(":")[2].removesuffix(":")
        by_address |= _coalesced(key, prefix, _only(file.tree, key))
    buckets: dict[Address, dict[str, dict[int, str]]] = {}
    for match in filter(None, map(_KEY.fullmatch, files.tensors)):
        bucket = _BUCKET.fullmatch(match[3])
        if bucket is None:
            raise FormatError(f"{files.folder}: the buffer {match[0]} is of a kind not known here")
        address = int(match[1] or 0), int(match[2]), int(bucket[1]), bucket[2]
        by_state = buckets.setdefault(address, {})
        by_state.setdefault(bucket[4], {})[int(bucket[3])] = match[0]
    return by_address | {address: _joined(files, keys) for address, keys in buckets.items()}


def _joined(files: DistFiles, keys: Mapping[str, Mapping[int, str]]) -> Flat:
    """Buckets, each a tensor, as one buffer; `keys` by state, then number of the bucket."""
    every = itertools.chain(*(by_bucket.values() for by_bucket in keys.values()))
    flat = Flat(min(every).rpartition(".bucket_idx_")[0], coalesced=False)
    for by_bucket in keys.values():
        for k, key in by_bucket.items():
            shape = files.tensors[key].shape
            if len(shape) != 1 or flat.buckets.setdefault(k, shape[0]) != shape[0]:
                raise FormatError(
                    f"{files.folder}: {key} has shape {list(shape)}, another state"
                    f" {flat.buckets[k]} elements"
                )
    if sorted(flat.buckets) != list(range(len(flat.buckets))):
        raise FormatError(
            f"{files.folder}: of {flat.name} there are only the buckets {sorted(flat.buckets)}"
        )
    for state, by_bucket in keys.items():
        if lost := sorted(flat.buckets.keys() - by_bucket.keys()):
            raise FormatError(
                f"{files.folder}: {flat.name}.bucket_idx_{lost[0]}.{state} is in no file"
            )
        flat.pieces[state] = _pieces([files.tensors[by_bucket[k]] for k in sorted(by_bucket)])
    return flat


def _pieces(buckets: Sequence[Tensor]) -> list[tuple[int, int, str]]:
    """The stored pieces of a buffer's buckets, by their first and last elements in the buffer."""
    pieces: list[tuple[int, int, str]] = []
    first = 0
    for bucket in buckets:
        for run in bucket.runs:
            if run.target.size:
                pieces.append((first + run.target.start[0], first + run.target.stop[0], run.key))
        first += bucket.shape[0]
    return sorted(pieces)


def _coalesced(key: str, prefix: str, state: Any) -> dict[Address, Flat]:
    """The buffers in one `param_state` object, which is like a legacy `distrib_optim.pt`."""
    group = group_object(key)
    if group is None or not isinstance(state, dict) or state.get("buckets_coalesced") is not True:
        raise FormatError(
            f"{key} has no coalesced buffers; those of before February 2024 are not read"
        )
    by_address: dict[Address, Flat] = {}
    for c, buffers in state.items():
        for dtypes, buffer in as_dict(buffers).items():
            address = group.chain, group.group, c, dtypes[0].name
            by_address[address] = _coalesced_buffer(key, c, prefix, buffer)
    return by_address


def _coalesced_buffer(key: str, c: int, prefix: str, buffer: Mapping[str, Any]) -> Flat:
    tensors = stored_tensors(buffer)
    lengths = {(buffer.get("numel_unpadded"),), *(tensor.shape for tensor in tensors.values())}
    length, *others = lengths
    if others or len(length) != 1:
        raise FormatError(
            f"{key}: the states and numel_unpadded of chunk {c} differ in size:"
            f" {sorted(lengths, key=str)}"
        )
    pieces = {name: [(0, length[0], prefix + tensor.key)] for name, tensor in tensors.items()}
    return Flat(f"{key}, chunk {c}", True, {0: length[0]} if tensors else {}, pieces)


@dataclass(frozen=True)
class Filled:
    """A buffer of the plan and what is stored of it; `gaps` are the pieces that hold nothing.

    Tensors begin at multiples of 64 elements, and what was in memory between them is stored too.
    """

    place: Place
    buffer: Buffer
    flat: Flat
    gaps: Sequence[str]

    def slices(self) -> Iterator[Slice]:
        """Every state of every parameter in the buffer."""
        return _slices_of(self.place, self.buffer, self.flat)


def filled(
    files: DistFiles, plans: Mapping[int, Plan], stored: Mapping[Address, Flat]
) -> list[Filled]:
    """The buffers of all optimizers as they are stored; `plans` by the numbers of these.

    Raises FormatError where one is missing, or more are there, or sizes are not those of the plans.
    """
    buffers = {
        (chain, place.group, c, dtype): (place, buffer)
        for chain, plan in plans.items()
        for place in plan.places
        for (pp, ep, c, dtype), buffer in plan.buffers.items()
        if (pp, ep) == (place.pp, place.ep)
    }
    for _, group, c, dtype in buffers.keys() - stored.keys():
        raise FormatError(
            f"{files.folder}: by the args there is a model-parallel rank {group}, but no"
            f" buffer of its {dtype} parameters in model chunk {c}"
        )
    result = [_filled(files, *buffers[address], stored[address]) for address in buffers]
    for chain, group, c, dtype in stored.keys() - buffers.keys():
        raise FormatError(
            f"{files.folder}: {stored[chain, group, c, dtype].name} (optimizer {chain}, group"
            f" {group}, chunk {c}, {dtype}) belongs to no rank that the args know"
        )
    return result


def _filled(files: DistFiles, place: Place, buffer: Buffer, flat: Flat) -> Filled:
    _check_sizes(files, flat, buffer)
    return Filled(place, buffer, flat, list(_gaps(files, flat, buffer)))


def _slices_of(place: Place, buffer: Buffer, flat: Flat) -> Iterator[Slice]:
    parts = [(unit.start, part) for unit in buffer.units for part in unit.parts]
    for state, pieces in flat.pieces.items():
        ranges = [(start, stop) for start, stop, _ in pieces]
        for start, part in parts:
            layout, used = slice_of(part, start, ranges)
            key = f"{state} of {part.name} in {flat.name}"
            tensor = Consolidated(layout, [pieces[i][2] for i in used])
            yield Slice(state, part.name, place.rank, key, tensor)


def _gaps(files: DistFiles, flat: Flat, buffer: Buffer) -> Iterator[str]:
    """The pieces between tensors. Ranks wrote each tensor's by itself: none is in two."""
    if flat.coalesced:
        return
    units = sorted(
        (unit.start, unit.start + unit.numel, unit.parts[0].name) for unit in buffer.units
    )
    for start, stop, key in itertools.chain(*flat.pieces.values()):
        at = bisect.bisect_right(units, stop - 1, key=lambda unit: unit[0]) - 1
        first, end, name = units[at] if at >= 0 else (0, 0, "")
        if end <= start:
            yield key
        elif not first <= start < stop <= end:
            raise FormatError(
                f"{files.folder}: {key} is the elements {start} to {stop} of {flat.name}, where"
                f" {name} should be {first} to {end}; {_OTHER}"
            )


def _check_sizes(files: DistFiles, flat: Flat, buffer: Buffer) -> None:
    want = [sum(buffer.buckets)] if flat.coalesced else list(buffer.buckets)
    if flat.bucket_sizes != want:
        raise FormatError(
            f"{files.folder}: {flat.name} has buckets of {flat.bucket_sizes} elements, but"
            f" {len(buffer.units)} tensors of the model take {want}; {_OTHER}"
        )
    if "param" not in flat.pieces:
        raise FormatError(f"{files.folder}: {flat.name} has no masters, only {sorted(flat.pieces)}")


def check_numels(
    files: DistFiles, key: str, stored: TorchFile, flats: Mapping[Address, Flat]
) -> None:
    """Compare `per_bucket_numel_unpadded` of a model-parallel rank with its buckets."""
    group = group_object(key)
    recorded = _only(stored.tree, key)
    if group is None or not isinstance(recorded, list):
        raise FormatError(f"{files.folder}: {key} should be a list, but is {what_is(recorded)}")
    for c, by_dtype in enumerate(recorded):
        for dtypes, sizes in by_dtype.items():
            flat = flats.get((group.chain, group.group, c, dtypes[0].name))
            buckets = flat.bucket_sizes if flat else []
            if buckets != sizes:
                raise FormatError(
                    f"{files.folder}: {key} says {sizes} elements, but the buckets have {buckets}"
                )


def _only(tree: Any, key: str) -> Any:
    if not isinstance(tree, list) or len(tree) != 1:
        raise FormatError(f"{key} should be a list of one item, but is {what_is(tree)}")
    return tree[0]
