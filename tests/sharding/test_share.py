"""Reads shared by processes: the pieces of every box are the box, and joined the original bits."""

import itertools
import math
import threading
from collections.abc import Iterable
from functools import partial
from unittest.mock import patch

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import require_memory
from jax_ucp.arrays.budget import in_order
from jax_ucp.arrays.checks import Check
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.layout.blocks import SMALL_BYTES, grid_boxes
from jax_ucp.layout.box import Box
from jax_ucp.sharding import share
from jax_ucp.sharding.boxes import index_box
from jax_ucp.sharding.fit import fit_spec
from jax_ucp.sharding.jax_versions import enable_x64, set_mesh
from jax_ucp.sharding.restore import Placement, RestorePlan, dealt_out
from jax_ucp.sharding.share import AxisCut, SharedRead, best_cut, shared_read
from jax_ucp.tree import Leaf

SIZES = [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 4}, {"a": 2, "b": 3}]
SPECS = [(), ("a",), (None, "a"), ("b",), (None, "b"), (("b", "a"),), ("b", "c"), (None, None, "a")]
DTYPES = [
    np.float32, ml_dtypes.bfloat16, np.bool_, np.int8, np.float16, ml_dtypes.float8_e4m3fn, np.float64,
    np.uint16,
]  # fmt: skip


def mesh_of(sizes: dict[str, int], **more) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), **more)


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> NamedSharding:
    sizes = draw(st.sampled_from(SIZES))
    fitted = fit_spec(draw(st.sampled_from(SPECS)), shape, sizes)
    return NamedSharding(mesh_of(sizes), P(*fitted.spec))


shapes = st.lists(st.integers(1, 17), min_size=1, max_size=3).map(tuple)


def boxes_of(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Box]:
    indices = sharding.devices_indices_map(shape)
    return [index_box(indices[device], shape) for device in sharding.mesh.devices.flat]


def free_names(sharding: NamedSharding) -> tuple[str, ...]:
    entries = (axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec)
    used = {name for axes in entries for name in axes}
    return tuple(name for name in sharding.mesh.axis_names if name not in used)


@st.composite
def reads(draw: st.DrawFn, dtype=np.uint8) -> SharedRead:
    """Any array by any sharding, cut into as many pieces as there are copies, or more."""
    shape = draw(shapes)
    sharding = draw(shardings(shape).filter(free_names))
    axis = draw(st.integers(0, len(shape) - 1))
    names = free_names(sharding)
    copies = math.prod(sharding.mesh.shape[name] for name in names)
    even = -(-sharding.shard_shape(shape)[axis] // copies)
    cut = AxisCut(axis, draw(st.integers(even, even + 2)), names)
    return SharedRead(shape, np.dtype(dtype), sharding, cut)


def parts_of(shared: SharedRead, array: np.ndarray) -> list[np.ndarray]:
    return shared.padded({box: array[box.index].copy() for box in shared.boxes()})


def bits(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array with every bit pattern: negative zeros and NaNs with a payload too."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(math.prod(shape))
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    array = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)
    special = array.flat[:1]
    if dtype.kind in "fV":
        special = np.array([-0.0, np.nan, -np.nan, np.inf]).astype(dtype)
    array.flat[: special.size] = special[: array.size]
    return array


@given(reads())
def test_the_pieces_of_a_box_are_disjoint_and_join_to_the_box(shared):
    held = boxes_of(shared.sharding, shared.shape)
    pieces = shared.boxes()
    for box in set(held):
        parts = [piece for piece in pieces if piece.within(box)]
        assert sum(piece.size for piece in parts) == box.size
        assert not any(a.intersect(b) for a, b in itertools.combinations(parts, 2))
    assert sum(piece.size for piece in pieces) == math.prod(shared.shape)
    by_device = dict(zip(shared.sharding.mesh.devices.flat, held, strict=True))
    assert all(piece.within(by_device[device]) for piece, (device,) in pieces.items())


@settings(max_examples=60)
@given(st.data(), st.sampled_from(DTYPES))
def test_what_is_gathered_is_the_original_bits_on_its_sharding(data, dtype):
    with enable_x64(True):
        shared = data.draw(reads(dtype))
        want = bits(shared.shape, dtype)
        got = shared.gathered(parts_of(shared, want))
        assert got.sharding == shared.sharding
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        for shard in got.addressable_shards:
            assert same_bits(np.asarray(shard.data), want[shard.index])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", [None, "pinned_host"])
def test_another_mesh_may_be_set_and_the_kind_of_memory_stays(kind, axis_type):
    require_memory(kind)
    mesh = mesh_of({"a": 2, "b": 4}, axis_types=(axis_type, axis_type))
    sharding = NamedSharding(mesh, P("a"), memory_kind=kind)
    shared = SharedRead((6, 5), np.dtype(np.float32), sharding, AxisCut(1, 2, ("b",)))
    want = bits((6, 5), np.float32)
    for other in (mesh, mesh_of({"q": 8}), mesh_of({"q": 8}, axis_types=(AxisType.Explicit,))):
        with set_mesh(other), jax.debug_nans(True):
            got = shared.gathered(parts_of(shared, want))
        assert got.sharding == sharding
        assert same_bits(np.asarray(got), want)


def elements_read(boxes: Iterable[tuple[int, Box]], info: ArrayInfo) -> int:
    """Elements of the chunks that each owner's boxes meet, each chunk once for an owner."""
    unit = info.chunk or (1,) * len(info.shape)
    grid = list(grid_boxes(info.shape, unit))
    met = {(owner, c) for owner, box in boxes for c in grid if box.intersect(c)}
    return math.prod(unit) * len(met)


@st.composite
def placed_arrays(draw: st.DrawFn) -> tuple[NamedSharding, ArrayInfo, tuple[int, ...]]:
    """An array in chunks, its sharding, and the process of each device of the mesh."""
    shape = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=2)))
    sharding = draw(shardings(shape))
    whole = [sharding.shard_shape(shape), tuple(-(-n // 2) for n in shape)]
    chunk = draw(st.sampled_from([None, *whole]) | st.tuples(*(st.integers(1, n) for n in shape)))
    size = sharding.mesh.size
    processes = draw(st.sampled_from([p for p in (1, 2, 4, 8) if size % p == 0]))
    owners = [i * processes // size for i in range(size)]
    info = ArrayInfo(shape, np.dtype(np.float32), chunk)
    return sharding, info, tuple(draw(st.permutations(owners) | st.just(owners)))


@given(placed_arrays())
def test_the_best_cut_reads_least_of_all_and_nothing_twice_where_chunks_allow_it(case):
    sharding, info, owners = case
    boxes, unit = boxes_of(sharding, info.shape), info.chunk or (1,) * len(info.shape)
    places = np.array([boxes[:i].count(box) for i, box in enumerate(boxes)])
    start, stop = (np.array([getattr(box, end) for box in boxes]) for end in ("start", "stop"))
    best = best_cut(start, stop, places, np.array(owners), unit)
    owner = dict(zip(sharding.mesh.devices.flat, owners, strict=True))
    copies, names = places.max() + 1, free_names(sharding)
    costs = {}
    for axis, n in enumerate(boxes[0].shape):
        even = -(-n // copies)
        for length in {even, -(-n // copies // unit[axis]) * unit[axis]} if names else ():
            if length * copies < 2 * n:
                cut = AxisCut(axis, length, names)
                pieces = SharedRead(info.shape, info.dtype, sharding, cut).boxes()
                read = ((owner[device], piece) for piece, (device,) in pieces.items())
                costs[axis, length] = elements_read(read, info)
    alone = elements_read(zip(owners, boxes, strict=True), info)
    if min(costs.values(), default=alone) >= alone:
        assert best is None
        return
    assert best is not None
    assert costs[best] == min(costs.values()) < alone
    assert best[0] == min(axis for (axis, _), cost in costs.items() if cost == costs[best])
    pieces = SharedRead(info.shape, info.dtype, sharding, AxisCut(*best, names)).boxes()
    chunks = elements_read([(0, Box.whole(info.shape))], info)
    edges = [[piece.start[axis] % u for piece in pieces] for axis, u in enumerate(unit)]
    if not any(map(any, edges)):
        assert costs[best] == chunks


def test_a_process_whose_pieces_are_empty_reads_nothing():
    zeros, each = np.zeros((4, 1), int), np.arange(4)
    # three read the one chunk, and not four
    assert best_cut(zeros, zeros + 9, each, each, (10,)) == (0, 3)
    assert best_cut(zeros, zeros + 8, each, each, (10,)) is None


def test_arrays_that_are_small_or_held_once_or_not_whole_bytes_are_not_shared(monkeypatch):
    mesh, float32 = mesh_of({"a": 4, "b": 2}), np.dtype(np.float32)
    everywhere, large = NamedSharding(mesh, P()), ArrayInfo((1024, 64), float32)
    assert shared_read(everywhere, large, float32) is None  # there is one process
    monkeypatch.setattr(share, "_owners", lambda mesh: (0, 0, 0, 0, 1, 1, 1, 1))

    def cut(spec: P, shape: tuple[int, ...], chunk=None) -> AxisCut | None:
        read = shared_read(NamedSharding(mesh, spec), ArrayInfo(shape, float32, chunk), float32)
        return read and read.cut

    assert cut(P(), (1024, 64)) == AxisCut(0, 128, ("a", "b"))
    assert cut(P("b"), (1024, 64)) == AxisCut(0, 128, ("a",))
    assert cut(P("a"), (1024, 64)) is None  # its copies are within a process
    assert cut(P(("a", "b")), (1024, 64)) is None
    assert cut(P(), (SMALL_BYTES // 4,)) is None
    assert cut(P(), (3, 3, 99999)) == AxisCut(2, 12500, ("a", "b"))
    # at chunks: two for each of five devices
    assert cut(P(), (1030, 64), (103, 64)) == AxisCut(0, 206, ("a", "b"))
    assert cut(P(), (1024, 64), (1024, 64)) is None  # each would read all
    for name in ("float32", "bool", "bfloat16", "int8", "uint64", "float8_e8m0fnu"):
        assert shared_read(everywhere, large, np.dtype(name)) is not None, name
    for name in ("complex64", "complex128", "int4", "uint2", "float4_e2m1fn"):
        assert shared_read(everywhere, large, np.dtype(name)) is None, name
    one = SingleDeviceSharding(jax.devices()[0])
    for other in (None, one, NamedSharding(mesh.abstract_mesh, P())):
        assert shared_read(other, large, float32) is None


def test_in_one_process_the_plan_is_what_it_was():
    replicated = NamedSharding(mesh_of({"a": 8}), P())
    tree = {"w": jax.device_put(np.ones((1024, 64), np.float32), replicated)}
    checkpoint = ucp.Checkpoint.of(tree)
    shared, plain = checkpoint.plan(tree, share_reads=True), checkpoint.plan(tree)
    assert shared.placements == plain.placements
    assert [node.path for node in shared.nodes] == [node.path for node in plain.nodes]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_results_come_in_order_and_those_not_yet_taken_fit_the_budget(costs, budget):
    held, most = 0, 0
    lock = threading.Lock()

    def job(i: int) -> int:
        nonlocal held, most
        with lock:
            held += costs[i]
            most = max(most, held)
        return i

    found = []
    for i in in_order(((cost, partial(job, i)) for i, cost in enumerate(costs)), budget):
        found.append(i)
        with lock:
            held -= costs[i]
    assert found == list(range(len(costs)))
    assert most <= max([budget, *costs])


def test_while_a_result_is_used_the_next_is_worked_at():
    begun = [threading.Event() for _ in range(10)]
    for i, _ in enumerate(in_order(((1, event.set) for event in begun), budget_bytes=2)):
        assert all(event.wait(60) for event in begun[: i + 2])


@given(st.integers(0, 20), st.integers(1, 5), st.sampled_from(["sample", "full"]), st.booleans())
def test_proofs_in_full_are_dealt_out_and_samples_are_not(count, processes, extent, shares):
    checks = [Check(str(i), frozenset(), 0, lambda: None) for i in range(count)]
    sharding = NamedSharding(mesh_of({"a": 8}), P())
    read = SharedRead((8,), np.dtype(np.uint8), sharding, AxisCut(0, 1, ("a",)))
    shared = read if shares else None
    plan = RestorePlan([Placement(Leaf((), "w", "array", (8,), "uint8"), "jax", shared=shared)])
    run: list[str] = []
    for process in range(processes):
        with (
            patch("jax.process_index", lambda p=process: p),
            patch("jax.process_count", lambda: processes),
        ):
            run += [check.label for check in dealt_out(plan, checks, extent)]
    once = extent == "full" and shares
    assert sorted(run) == sorted([check.label for check in checks] * (1 if once else processes))
