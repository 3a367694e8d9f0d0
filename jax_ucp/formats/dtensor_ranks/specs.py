"""The mesh of a pickled DTensor, and a placement for each axis of it, as typed values.

`DeviceMesh` of torch 2.4 to 2.8 has the ranks as a tensor, later ones a layout of them over a list
of ranks; each process has its own coordinate beside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_ucp.codecs.tensor_names import DTensor, StoredTensor
from jax_ucp.codecs.unpickle import Record, what_is
from jax_ucp.errors import FormatError
from jax_ucp.formats.dtensor_ranks.placements import Placement, Split
from jax_ucp.layout.fragments import Shape

_MAX_SPLIT_FACTOR = 1 << 20
Read = Callable[[StoredTensor], np.ndarray]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid, in row-major order, and the coordinate of the rank that wrote it."""

    shape: Shape
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The spec of a DTensor: how the tensor lies on a mesh."""

    mesh: Mesh
    placements: tuple[Placement, ...]


def spec_of(tensor: DTensor, rank: int, read: Read) -> TensorSpec:
    """The spec of a DTensor in the file of `rank`. Raises FormatError if it does not fit, or if
    `rank` is not at its coordinate of the mesh.
    """
    fields = tensor.spec.fields
    record = fields.get("mesh")
    if not isinstance(record, Record):
        raise FormatError(f"its mesh should be a DeviceMesh, but is {what_is(record)}")
    shape, ranks = _grid(record.fields, rank, read)
    coordinate = _coordinate(record.fields, shape)
    here = int(np.ravel_multi_index(coordinate, shape)) if shape else 0
    if ranks[here] != rank:
        raise _misplaced(rank, f"rank {ranks[here]} at {list(coordinate)}")
    names = record.fields.get("mesh_dim_names", record.fields.get("_mesh_dim_names"))
    axes = tuple(map(str, names)) if isinstance(names, tuple | list) else ()
    mesh = Mesh(shape, ranks, coordinate, axes)
    placements = fields.get("placements")
    if not isinstance(placements, tuple) or len(placements) != len(mesh.shape):
        raise FormatError(f"a mesh of {len(mesh.shape)} axes needs as many placements")
    spec = TensorSpec(mesh, tuple(_placement(entry, len(tensor.shape)) for entry in placements))
    meta = fields.get("tensor_meta")
    if not isinstance(meta, Record) or not meta.args or meta.args[0] != tensor.shape:
        raise FormatError(f"its spec is not of a tensor of shape {list(tensor.shape)}")
    return spec


def _placement(entry: object, ndim: int) -> Placement:
    if not isinstance(entry, Record):
        raise FormatError(f"a placement should be a Shard or Replicate, but is {what_is(entry)}")
    kind = entry.type.rpartition(".")[2]
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise FormatError(
            f"it is placed as {kind}: each rank has a summand of it, and none the whole. Save it"
            " after redistribute()"
        )
    axis, factor = entry.fields.get("dim"), entry.fields.get("split_factor", 1)
    if type(axis) is not int or not 0 <= axis < ndim:
        raise FormatError(f"it is sharded on axis {axis!r:.20}, but has {ndim}")
    if type(factor) is not int or not 1 <= factor <= _MAX_SPLIT_FACTOR:
        raise FormatError(f"a split factor of {factor!r:.20} cannot be")
    return Split(axis, factor)


def _misplaced(rank: int, at: str) -> FormatError:
    return FormatError(
        f"its mesh has {at} where this file is, which is called that of rank {rank}: the file was"
        " renamed, or is of another run"
    )


def _coordinate(fields: Mapping[str, Any], shape: Shape) -> tuple[int, ...]:
    """The coordinate of the writing rank. Raises FormatError if the mesh lacks it."""
    coordinate = fields.get("_coordinate_on_dim")
    numbers = tuple(coordinate) if isinstance(coordinate, list | tuple) else ()
    within = [type(i) is int and 0 <= i < n for i, n in zip(numbers, shape, strict=False)]
    if len(numbers) == len(shape) and all(within):
        return numbers
    raise FormatError(f"the mesh of shape {list(shape)} has no coordinate {coordinate!r:.60}")


def _grid(fields: Mapping[str, Any], rank: int, read: Read) -> tuple[Shape, tuple[int, ...]]:
    mesh = fields.get("mesh")
    if isinstance(mesh, StoredTensor):
        return mesh.shape, _ranks(read(mesh))
    rank_map, layout = fields.get("_rank_map"), fields.get("_layout")
    if not isinstance(rank_map, StoredTensor) or not isinstance(layout, Record):
        raise FormatError("its mesh has no ranks")
    axes = _axes(layout)
    shape = tuple(math.prod(size for size, _ in axis) for axis in axes)
    ranks = _ranks(read(rank_map))
    if math.prod(shape) > len(ranks) or rank not in ranks:
        raise FormatError(f"rank {rank} is not in its mesh of shape {list(shape)}")
    # the part of the list of ranks that the layout picks around the rank
    offsets: list[list[int]] = []
    for axis in axes:
        steps = [[i * stride for i in range(size)] for size, stride in axis]
        offsets.append([sum(step) for step in itertools.product(*steps)])
    coordinate = _coordinate(fields, shape)
    here = sum(of_axis[i] for of_axis, i in zip(offsets, coordinate, strict=True))
    base = ranks.index(rank) - here
    places = [base + sum(place) for place in itertools.product(*offsets)]
    if min(places) < 0 or max(places) >= len(ranks):
        raise _misplaced(rank, f"another rank of {len(ranks)}")
    return shape, tuple(ranks[place] for place in places)


def _ranks(array: np.ndarray) -> tuple[int, ...]:
    if array.dtype.kind not in "iu" or len({*array.ravel().tolist()}) != array.size:
        raise FormatError("the ranks of its mesh are not distinct whole numbers")
    return tuple(array.ravel().tolist())


def _axes(layout: Record) -> list[list[tuple[int, int]]]:
    """The (size, stride) pairs of each axis of a mesh, which may be made of several."""
    fields = layout.fields
    axes = fields.get("axes")
    if isinstance(axes, tuple):
        sizes = [axis.fields.get("shape") for axis in axes if isinstance(axis, Record)]
        strides = [axis.fields.get("stride") for axis in axes if isinstance(axis, Record)]
    else:
        sizes, strides = _listed(fields.get("shape")), _listed(fields.get("stride"))
    if len(sizes) != len(strides):
        raise FormatError("the layout of its mesh has other sizes than strides")
    pairs = zip(map(_flat, sizes), map(_flat, strides), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def _flat(value: Any) -> list[int]:
    if isinstance(value, tuple):
        return list(itertools.chain.from_iterable(map(_flat, value)))
    if type(value) is not int or value < 0:
        raise FormatError(f"the layout of its mesh has {value!r:.40}, which is not a whole number")
    return [value]
