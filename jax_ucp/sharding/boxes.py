"""Shardings as boxes: which block of an array each device and each process holds."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jax_ucp.layout.box import Box
from jax_ucp.tree import Axes, SavedSharding

Device = Any  # jax.Device, which type checkers see as a variable


def index_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of a device's index, as JAX gives it: slices that may be open at either end.

    >>> str(index_box((slice(None), slice(2, 4)), (8, 4)))
    '[0:8, 2:4]'
    """
    return Box.spanning(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


@functools.lru_cache(maxsize=1024)
def device_boxes(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[Box, list[Device]]:
    """The distinct boxes this process needs, each with its devices: replicas share one read."""
    devices_of: defaultdict[Box, list[Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_of[index_box(index or (), shape)].append(device)
    return dict(devices_of)


@functools.lru_cache(maxsize=1024)
def process_hull(sharding: Sharding, shape: tuple[int, ...]) -> Box:
    """The smallest box around all that this process needs."""
    return Box.around(device_boxes(sharding, shape))


@functools.lru_cache(maxsize=1024)
def process_boxes(
    sharding: Sharding, shape: tuple[int, ...], processes: int
) -> Sequence[frozenset[Box]]:
    """The distinct boxes that each process holds, by process."""
    boxes_of: defaultdict[int, set[Box]] = defaultdict(set)
    for device, index in sharding.devices_indices_map(shape).items():
        boxes_of[device.process_index].add(index_box(index or (), shape))
    return [frozenset(boxes_of[process]) for process in range(processes)]


@functools.lru_cache(maxsize=1024)
def saved_sharding(sharding: Sharding) -> SavedSharding | None:
    """A NamedSharding in serializable form, or None for any other sharding."""
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    ids = mesh.device_ids.ravel() if isinstance(mesh, Mesh) else ()
    return SavedSharding(
        tuple(map(str, mesh.axis_names)),
        tuple(mesh.axis_sizes),
        tuple(map(_axes, sharding.spec)),
        tuple(map(int, ids)),
    )


def _axes(axes: object) -> Axes:
    if axes is None or axes is PartitionSpec.UNCONSTRAINED:
        return None
    return tuple(map(str, axes)) if isinstance(axes, tuple) else str(axes)
