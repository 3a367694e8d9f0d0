"""Leaves of any source onto any mesh: place each leaf, then read each distinct box once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jax.typing import DTypeLike

from jax_ucp.arguments import switch, whole_number
from jax_ucp.arrays.budget import DEFAULT_BUDGET, batches, run_bounded, threads
from jax_ucp.arrays.checks import Check, Extent, require
from jax_ucp.arrays.protocol import BLOCK_BYTES, TOGETHER, TOGETHER_BYTES, ArrayInfo, ArraySource
from jax_ucp.errors import TreeMismatch
from jax_ucp.layout.blocks import SMALL_BYTES
from jax_ucp.layout.box import Box
from jax_ucp.sharding.boxes import Device, device_boxes, process_hull
from jax_ucp.sharding.fit import (
    ON_DEVICES,
    Fit,
    Rule,
    axis_names,
    check_rules,
    fit_leaf,
    fit_on_host,
    unused_rules,
    warn_given_up,
)
from jax_ucp.sharding.jax_versions import enable_x64, has_x64, mesh_in_scope
from jax_ucp.sharding.output_buffers import OutputBuffers, ReadRequest, output_buffers, read_at_once
from jax_ucp.sharding.share import Read, SharedRead, read_together, shared_read
from jax_ucp.sharding.trees import (
    Matched,
    Missing,
    TreeNode,
    fill,
    key_dtype,
    kind_of,
    match,
    narrowed,
)
from jax_ucp.text import html_table
from jax_ucp.tree import Axes, Leaf, tree_of

_NOT_ON_SET_MESH = (
    "it is on the mesh that it was saved from, not on the one that is set, and its axes are not"
    " explicit; give a target"
)


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The arguments of `Checkpoint.restore` that decide where leaves go and as what.

    With a `mesh`, a leaf has the first of these shardings that there is, refitted to the mesh, in
    the kind of memory that its own has:
    - its own in the target, if that is on this mesh;
    - that of the first rule on its label, or of rules on its logical axes;
    - the PartitionSpec that it was saved with;
    - that of those of its logical axes that the mesh has.

    Without a mesh it has the first of these:
    - its own in the target; one on an abstract mesh is for the mesh that is set, if that has the
      same axes;
    - on the mesh that is set, by the target's logical axes, if the mesh has these, or as above;
    - with "saved" as the mesh, that which it was saved with, on the same devices.

    Without a target, leaves that were saved as numpy come as numpy, and without a mesh too all do.
    `cast=True` converts to the target's dtypes, a dtype all floating arrays to that one. With
    `narrow_integers`, 64-bit integers that go on devices are 32-bit ones where JAX has no others.
    With `missing="keep"`, leaves of the target that the checkpoint lacks keep their values; with
    "leave" they stay as they are, without a value too. With `share_reads`, processes that hold the
    same share its reading.

    Raises ValueError for rules without a mesh, and arguments that cannot be meant.
    """

    target: Any = None
    mesh: Mesh | Literal["saved"] | None = None
    rules: Sequence[Rule] = ()
    cast: bool | DTypeLike = False
    partial: bool = False
    missing: Missing = "refuse"
    narrow_integers: bool = False
    share_reads: bool = False

    def __post_init__(self) -> None:
        switch("partial", self.partial)
        switch("narrow_integers", self.narrow_integers)
        switch("share_reads", self.share_reads)
        mesh, missing, cast = self.mesh, self.missing, self.cast
        if missing not in get_args(Missing):
            raise ValueError(f"missing={missing!r:.80} is none of {', '.join(get_args(Missing))}")
        if mesh not in (None, "saved") and not isinstance(mesh, Mesh):
            given = "an AbstractMesh" if isinstance(mesh, AbstractMesh) else f"{mesh!r:.80}"
            raise ValueError(
                f"mesh= is {given}, and should be a jax.sharding.Mesh, whose devices are here, or"
                " 'saved'. plan_reads takes a mesh without devices"
            )
        if self.rules and not isinstance(mesh, Mesh):
            raise ValueError("rules= are for a mesh: give mesh= too")
        if self.target is None and self.partial:
            raise ValueError("partial=True leaves out what a target lacks, and there is no target")
        if self.target is None and missing != "refuse":
            raise ValueError(
                f'missing="{missing}" keeps leaves of a target, and there is no target'
            )
        if self.target is None and cast is True:
            raise ValueError(
                "cast=True converts to the dtypes of a target, and there is none; give a dtype"
            )
        if not isinstance(cast, bool) and not _is_floating(cast):
            raise ValueError(
                f"cast={cast!r} would not keep floating arrays floating; give a floating dtype, or"
                " a target"
            )
        check_rules(self.rules)


def _is_floating(dtype: DTypeLike) -> bool:
    with suppress(TypeError):
        # numpy takes None for float64
        return dtype is not None and bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))
    return False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a leaf goes and as what: on devices by `sharding`, or on the host as `kind` says.

    `dtype` is that of the result. `notes` tell how the sharding is not the one asked for. `shared`
    says which pieces this process reads of an array that several read together.
    """

    leaf: Leaf
    kind: str
    dtype: np.dtype | None = None
    sharding: Sharding | None = None
    notes: tuple[str, ...] = ()
    shared: SharedRead | None = None

    def boxes(self) -> Mapping[Box, Sequence[Device]]:
        """The distinct boxes of the stored array that this process reads, each with its devices."""
        if self.shared is not None:
            return self.shared.boxes()
        if self.sharding is None:
            return {Box.whole(self.leaf.shape): []}
        return device_boxes(self.sharding, self.leaf.shape)


@dataclass(frozen=True, repr=False)
class RestorePlan:
    """A restore; placements fill `nodes` of the target in order, and `kept` stay."""

    placements: Sequence[Placement]
    target: Any = None
    nodes: Sequence[TreeNode] = ()
    kept: Sequence[TreeNode] = ()
    unused_rules: Sequence[str] = ()

    def __getitem__(self, label: str) -> Placement:
        """The placement of the leaf with this label."""
        placements = [placement for placement in self.placements if placement.leaf.label == label]
        if len(placements) != 1:
            raise KeyError(f"there are {len(placements)} leaves {label!r}")
        return placements[0]

    @property
    def read_bytes(self) -> int:
        """Bytes this process reads: each distinct box once, of shared ones its own pieces."""
        arrays = [p for p in self.placements if p.leaf.has_array]
        return sum(box.size * np.dtype(p.leaf.dtype).itemsize for p in arrays for box in p.boxes())

    @property
    def notes(self) -> list[str]:
        """Every departure from the sharding asked for, by leaf; and each unused rule."""
        placed = [f"{p.leaf.label}: {note}" for p in self.placements for note in p.notes]
        return [*placed, *self.unused_rules]

    def __repr__(self) -> str:
        on_devices = sum(p.sharding is not None for p in self.placements)
        return (
            f"<a restore of {len(self.placements)} leaves, {on_devices} of them onto devices;"
            f" {len(self.notes)} notes>"
        )

    def _repr_html_(self) -> str:
        rows: list[tuple[str, ...]] = []
        for p in self.placements:
            place = getattr(p.sharding, "spec", p.sharding or f"the host, as {p.kind}")
            dtype = str(p.dtype or "")
            rows.append((p.leaf.label, str(p.leaf.shape), dtype, str(place), "; ".join(p.notes)))
        return html_table(repr(self), ("leaf", "shape", "dtype", "goes to", "given up"), rows)


def plan_restore(leaves: Sequence[Leaf], request: RestoreRequest) -> RestorePlan:
    """The plan of a restore. Raises TreeMismatch with all differences of target and checkpoint."""
    target, mesh, rules = request.target, request.mesh, request.rules
    matched = Matched((), ())
    if target is None:
        wanted = [_LeafRequest(leaf, leaf.kind) for leaf in leaves]
    else:
        cast, narrow = bool(request.cast), request.narrow_integers
        of_specs = mesh if isinstance(mesh, Mesh) else mesh_in_scope()
        matched = match(leaves, target, request.partial, cast, narrow, request.missing, of_specs)
        wanted = [
            _LeafRequest(leaf, kind_of(node), node.value, node.axes) for node, leaf in matched.pairs
        ]
    ruled = [*leaves, *map(_ruled, wanted)]
    check_rules(rules, ruled)
    notes = unused_rules(rules, ruled)
    placements = [_place(each, request) for each in wanted]
    faults = [f"{p.leaf.label}: {fault}" for p in placements for fault in _device_faults(p)]
    if faults:
        raise TreeMismatch(f"{len(faults)} leaves cannot be put where they should go:", faults)
    on_devices = [p for p in placements if p.kind in ("jax", "prng_key")]
    homeless = [p.leaf.label for p in on_devices if p.sharding is None]
    if homeless and target is not None:
        raise TreeMismatch(
            f"{len(homeless)} leaves of the target have no sharding on devices, the first"
            f" {homeless[0]}: give mesh=, or set a mesh (jax.set_mesh) that has the axes of the"
            " target's shardings, or put shardings on the target's ShapeDtypeStructs"
        )
    if isinstance(mesh, Mesh) and placements and all(p.sharding is None for p in placements):
        notes.append(
            "nothing goes on the mesh: all leaves are values of the host program, and come back as"
            " such"
        )
    return RestorePlan(placements, target, [node for node, _ in matched.pairs], matched.kept, notes)


def shared_plan(plan: RestorePlan, arrays: Mapping[str, ArrayInfo]) -> RestorePlan:
    """The plan with reads shared among processes that hold the same, where that reads less."""

    def shared(p: Placement) -> Placement:
        if not p.leaf.has_array:
            return p
        return replace(p, shared=shared_read(p.sharding, arrays[p.leaf.name], p.dtype))

    return replace(plan, placements=[shared(p) for p in plan.placements])


def run_restore(
    plan: RestorePlan,
    source: ArraySource,
    budget_bytes: int = DEFAULT_BUDGET,
    checks: Iterable[Check] = (),
    remote: bool = False,
) -> Any:
    """The tree, with every box that this process needs read once, after the `checks`.

    Warns of what the plan gave up of a sharding. At most `budget_bytes` are in flight beside the
    arrays themselves, or one stored chunk where that is larger. Shared reads go at once, and an
    error of one process that shares them is raised in all. `remote`: the source is behind a
    network. Raises CorruptData where a check finds a fault.
    """
    budget_bytes = whole_number("budget_bytes", budget_bytes)
    warn_given_up(plan.notes, stacklevel=3)  # where `restore` was called
    reading = _Reading(plan, source, budget_bytes, remote)
    reading.run(checks)
    values = list(map(_as_kind, plan.placements, reading.values()))
    if plan.target is not None:
        kept = {n.path: n.value if n.original is None else n.original for n in plan.kept}
        paths = [node.path for node in plan.nodes]
        return fill(plan.target, kept | dict(zip(paths, values, strict=True)))
    paths = [p.leaf.path for p in plan.placements]
    return tree_of(dict(zip(paths, values, strict=True)))


Job = tuple[int, Callable[[], object]]  # bytes in flight while it runs, and what it does
_Whole = tuple[int, ReadRequest, int]  # the number of a placement, what is read, and its cost


class _Reading:
    """The arrays of a plan while they are read."""

    def __init__(self, plan: RestorePlan, source: ArraySource, budget_bytes: int, remote: bool):
        self._plan, self._source, self._budget_bytes = plan, source, budget_bytes
        self._remote = remote
        self._arrays: dict[int, Any] = {}  # by the number of the placement
        self._buffers: dict[int, OutputBuffers] = {}  # of arrays that are read in blocks
        self._x64 = has_x64()

    def run(self, checks: Iterable[Check]) -> None:
        """Run the checks, and read everything."""
        alone = partial(run_bounded, self._jobs(checks), self._budget_bytes, self._remote)
        shared = {i: p.shared for i, p in enumerate(self._plan.placements) if p.shared}
        if not shared:
            alone()
            return
        reads: list[Read] = []
        for i, pieces in shared.items():
            request = _request(self._plan.placements[i], self._source)
            # A piece is held as it was read, and padded.
            read = partial(request.read, list(request.boxes))
            reads.append((request.key, pieces, 2 * request.cost(), read))
        arrays = read_together(reads, alone, self._budget_bytes, self._remote)
        self._arrays |= zip(shared, arrays, strict=True)

    def values(self) -> list[Any]:
        """The values that were read, by placement; None for leaves that have no array."""
        for i, place in self._buffers.items():
            self._arrays[i] = jax.block_until_ready(place.array())
        return [self._arrays.get(i) for i in range(len(self._plan.placements))]

    def _jobs(self, checks: Iterable[Check]) -> Iterator[Job]:
        # First, so that what is wrong is known before much is read.
        for check in checks:
            yield check.memory, partial(require, check)
        in_blocks: list[tuple[int, ReadRequest]] = []
        most = min(TOGETHER_BYTES, self._budget_bytes // threads())
        single, groups = self._groups()
        for whole in self._whole_reads(single, in_blocks):
            yield whole[2], partial(self._read_together, [whole])
        for group in groups:
            wholes = self._whole_reads(group, in_blocks)
            for batch in batches(wholes, operator.itemgetter(2), most, TOGETHER):
                yield sum(cost for _, _, cost in batch), partial(self._read_together, batch)
        for i, request in in_blocks:
            for block in request.blocks(self._block_bytes):
                yield request.cost(block), partial(self._read_block, i, block)

    def _whole_reads(
        self, numbers: Sequence[int], in_blocks: list[tuple[int, ReadRequest]]
    ) -> Iterator[_Whole]:
        """The placements that are read whole. Larger ones get output buffers, and are added to
        `in_blocks`.
        """
        share = self._budget_bytes // threads()
        for i in numbers:
            request = _request(self._plan.placements[i], self._source)
            if request.info.nbytes <= SMALL_BYTES:
                yield i, request, request.info.nbytes
                continue
            # Writing into a device's memory takes a program for each shape, so only where the
            # budget asks for it.
            whole_bytes = self._block_bytes if request.in_place else share
            cost = request.cost()
            place = output_buffers(request) if cost > whole_bytes else None
            if place is None:
                yield i, request, cost
                continue
            self._buffers[i] = place
            in_blocks.append((i, request))

    def _groups(self) -> tuple[Sequence[int], Iterable[Sequence[int]]]:
        """The numbers of this process's own placements, in groups that are read together."""
        groups: dict[str, list[int]] = {}
        for i, placement in enumerate(self._plan.placements):
            if placement.leaf.has_array and not placement.shared:
                name = placement.leaf.name
                group = self._source.lies_in(name) if self._remote else name
                groups.setdefault(group, []).append(i)
        single = [group[0] for group in groups.values() if len(group) == 1]
        return single, [group for group in groups.values() if len(group) > 1]

    @property
    def _block_bytes(self) -> int:
        return min(BLOCK_BYTES, self._budget_bytes // threads())

    def _read_together(self, batch: Sequence[_Whole]) -> None:
        with enable_x64(self._x64):
            arrays = read_at_once(self._source, [request for _, request, _ in batch])
            self._arrays |= zip((i for i, _, _ in batch), arrays, strict=True)

    def _read_block(self, i: int, block: Box) -> None:
        with enable_x64(self._x64):
            self._buffers[i].fill(block)


def dealt_out(plan: RestorePlan, checks: Iterable[Check], extent: Extent) -> Iterable[Check]:
    """This process's checks: its part of full ones if reads are shared, else all.

    Samples are compared by all: they cost little, and hosts may have their own copies of files.
    """
    if extent == "full" and any(p.shared for p in plan.placements):
        return itertools.islice(checks, jax.process_index(), None, jax.process_count())
    return checks


def _request(p: Placement, source: ArraySource) -> ReadRequest:
    """The boxes of a leaf that this process reads; a small leaf is read as a single box."""
    boxes = p.boxes()
    if (
        boxes
        and p.sharding is not None
        and not p.shared
        and source.arrays()[p.leaf.name].nbytes <= SMALL_BYTES
    ):
        boxes = {process_hull(p.sharding, p.leaf.shape): []}
    return ReadRequest(source, p.leaf.name, boxes, p.dtype or np.dtype(p.leaf.dtype), p.sharding)


def abstract_leaf(leaf: Leaf, sharding: Sharding | None = None, is_placed: bool = False) -> Any:
    """The abstract array, on the sharding of the stored one, a number's zero, or a value; zeros in
    numpy, which take no memory, for what is placed on the host.

    Raises FormatError for unknown PRNG keys.
    """
    match leaf.kind:
        case "numpy" | "numpy_scalar" if is_placed and sharding is None:
            return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
        case "jax" | "array" | "numpy" | "numpy_scalar":
            return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=sharding)
        case "prng_key":
            if isinstance(sharding, NamedSharding):  # without the axis of the keys' data
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1]))
            return jax.ShapeDtypeStruct(leaf.shape[:-1], key_dtype(leaf), sharding=sharding)
        case "bool" | "int" | "float" | "complex":
            return {"bool": bool, "int": int, "float": float, "complex": complex}[leaf.kind]()
        case _:
            return _as_kind(Placement(leaf, leaf.kind), None)


@dataclass(frozen=True, slots=True)
class _LeafRequest:
    """A leaf, the `kind` that it should have, and the target's value and logical axes."""

    leaf: Leaf
    kind: str
    value: Any = None
    axes: tuple[Axes, ...] | None = None


def _place(wanted: _LeafRequest, request: RestoreRequest) -> Placement:
    leaf, mesh, rules = wanted.leaf, request.mesh, request.rules
    if not leaf.has_array:
        return Placement(leaf, leaf.kind)
    dtype = _dtype(leaf, wanted.value, request.cast)
    if wanted.kind not in ON_DEVICES:
        fit = fit_on_host(leaf, dict(mesh.shape), rules) if isinstance(mesh, Mesh) else Fit(())
        return Placement(leaf, wanted.kind, dtype, notes=fit.notes)
    if isinstance(mesh, Mesh):
        # the target's own sharding if it is on this mesh, else a fitted one
        own = getattr(wanted.value, "sharding", None)
        if isinstance(own, NamedSharding) and _is_like(own.mesh, mesh) and not _says_nothing(own):
            fitted, notes = NamedSharding(mesh, own.spec), ()
        else:
            fitted, notes = fit_leaf(_ruled(wanted), mesh, rules)
        sharding = _in_memory_of(own, fitted, leaf)
    else:
        sharding, notes = _sharding_of_target(wanted, mesh)
    if sharding is None:
        return Placement(leaf, wanted.kind, dtype, None, notes)
    if leaf.kind == "prng_key" and isinstance(sharding, NamedSharding):
        # The stored key data have one axis more than the keys.
        rank = len(leaf.shape) - 1
        spec = PartitionSpec(*sharding.spec, *[None] * (rank - len(sharding.spec)), None)
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    if request.narrow_integers:  # reading refuses values that do not fit
        dtype = narrowed(dtype)
    return Placement(leaf, wanted.kind, dtype, sharding, notes)


def _dtype(leaf: Leaf, value: Any, cast: bool | DTypeLike) -> np.dtype:
    """The dtype that an array is read as: its own, the target's, or that of all floating arrays."""
    stored = np.dtype(leaf.dtype)
    if leaf.kind == "prng_key":
        key_dtype(leaf)  # that there is one
        return stored
    if isinstance(cast, bool):
        return np.dtype(value.dtype) if cast and hasattr(value, "dtype") else stored
    is_cast = leaf.kind in ("jax", "array", "numpy") and jnp.issubdtype(stored, jnp.floating)
    return np.dtype(cast) if is_cast else stored  # pyright: ignore[reportArgumentType]


def _is_like(mesh: Mesh | AbstractMesh, other: Mesh) -> bool:
    return dict(mesh.shape) == dict(other.shape)


def _says_nothing(own: NamedSharding) -> bool:
    """Whether a sharding leaves open how an array lies, as those of `jax.eval_shape` may."""
    if isinstance(own.mesh, Mesh) or any(own.spec):
        return False
    return any(kind is not AxisType.Explicit for kind in own.mesh.axis_types)


def _in_memory_of(own: Sharding | None, fitted: NamedSharding, leaf: Leaf) -> NamedSharding:
    """The sharding in the target's kind of memory. Raises TreeMismatch where there is none."""
    kind = None if own is None else own.memory_kind
    if own is None or kind is None:
        return fitted
    is_concrete = not isinstance(own, NamedSharding) or isinstance(own.mesh, Mesh)
    # Where nobody asks for a kind, arrays are in their devices' usual one; other devices may call
    # theirs otherwise.
    if is_concrete and kind == next(iter(own.device_set)).default_memory().kind:
        return fitted
    try:
        return NamedSharding(fitted.mesh, fitted.spec, memory_kind=kind)
    except ValueError as error:
        raise TreeMismatch(
            f"{leaf.label}: the target is in memory of the kind {kind!r}, which the devices of the"
            f" mesh do not have: {error}"
        ) from None


def _ruled(wanted: _LeafRequest) -> Leaf:
    """The leaf that rules apply to: without logical axes of its own it has those of the target."""
    if wanted.axes is None or wanted.leaf.axes is not None:
        return wanted.leaf
    return replace(wanted.leaf, axes=wanted.axes)


def _sharding_of_target(
    wanted: _LeafRequest, mesh: Literal["saved"] | None
) -> tuple[Sharding | None, tuple[str, ...]]:
    """A leaf's sharding without a mesh: its own, by the set mesh, as saved, or one device."""
    own, here = getattr(wanted.value, "sharding", None), mesh_in_scope()
    if isinstance(own, NamedSharding) and not isinstance(own.mesh, Mesh):
        if here is None or not _is_like(own.mesh, here):
            return None, ()
        named = _named_by_target(wanted, here)
        if any(own.spec) or not (named or _says_nothing(own)):
            fitted, notes = NamedSharding(here, own.spec), ()
        else:
            fitted, notes = fit_leaf(named or _ruled(wanted), here)
        return _in_memory_of(own, fitted, wanted.leaf), notes
    if isinstance(own, Sharding):
        return own, ()
    if wanted.value is not None and here is not None:
        return fit_leaf(_named_by_target(wanted, here) or _ruled(wanted), here)
    if mesh == "saved":
        return _saved_sharding(wanted.leaf, here)
    if wanted.value is None or len(jax.devices()) > 1:
        return None, ()
    return SingleDeviceSharding(jax.devices()[0]), ()


def _named_by_target(wanted: _LeafRequest, mesh: Mesh) -> Leaf | None:
    """The leaf with the target's logical axes, if these are axes of the mesh, as in Flax."""
    names = {name for axes in wanted.axes or () for name in axis_names(axes)}
    if not names or not names <= set(mesh.axis_names):
        return None
    return replace(wanted.leaf, sharding=None, axes=wanted.axes)


def _saved_sharding(leaf: Leaf, here: Mesh | None) -> tuple[Sharding | None, tuple[str, ...]]:
    """The sharding that a JAX array was saved with, on the same devices, with notes; else None.

    It is on the mesh that is set, if that is the same. Raises TreeMismatch if a device is not here.
    """
    if leaf.kind not in ("jax", "prng_key"):
        return None, ()
    saved, is_explicit = leaf.sharding, here is not None and AxisType.Explicit in here.axis_types
    notes = (_NOT_ON_SET_MESH,) if is_explicit else ()
    if saved is None:  # of one process, as it was saved
        return SingleDeviceSharding(jax.local_devices()[0]), notes
    known = {device.id: device for device in jax.devices()}
    if not saved.device_ids or not known.keys() >= {*saved.device_ids}:
        sizes = dict(zip(saved.axis_names, saved.axis_sizes, strict=True))
        raise TreeMismatch(
            f"{leaf.label} was saved on a mesh of {sizes}, not all of whose devices are here, where"
            f" there are {len(known)}: give a target with shardings, or a mesh"
        )
    devices = np.array([known[i] for i in saved.device_ids]).reshape(saved.axis_sizes)
    mesh, spec = Mesh(devices, saved.axis_names), PartitionSpec(*saved.spec)
    is_set = here is not None and here.axis_names == mesh.axis_names
    if here is not None and is_set and np.array_equal(here.devices, mesh.devices):
        return NamedSharding(here, spec), ()
    return NamedSharding(mesh, spec), notes


def _device_faults(placement: Placement) -> Iterator[str]:
    """Why an array cannot be on devices as it is, or not by its sharding."""
    sharding, dtype = placement.sharding, placement.dtype
    if sharding is None or dtype is None:
        return
    available = jax.dtypes.canonicalize_dtype(dtype)
    if available != dtype:
        remedy = f"a target of {available} and cast=True, which rounds"
        if dtype.kind in "iu":
            remedy = f"narrow_integers=True, which makes it {available} if every value fits"
        yield f"JAX would make {available} of its {dtype}; set jax_enable_x64, or give {remedy}"
    try:
        sharding.shard_shape(placement.leaf.shape)
    except ValueError as error:
        yield str(error)


def _as_kind(placement: Placement, value: Any) -> Any:
    """The value as what it was, or as what the target has in its place."""
    leaf = placement.leaf
    match placement.kind:
        case "none":
            return None
        case "str":
            return leaf.value
        case "empty":
            return {"dict": {}, "list": [], "tuple": (), "attr": {}}[leaf.value]
        case "bool" | "int" | "float" | "complex":
            return value.item()
        case "numpy_scalar":
            return value[()]
        case "prng_key":
            return jax.random.wrap_key_data(value, impl=leaf.key_impl)
        case _:
            return value
