"""What a restore asks of a store behind a network: how many requests, and how many bytes."""

import itertools
import math
from pathlib import Path

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jax_ucp as ucp
from helpers import boxes_in, boxes_of_hosts, flip_bit, in_lanes, mesh_of, numbered
from jax_ucp.errors import CorruptData
from jax_ucp.files import remote
from jax_ucp.layout.blocks import Chunks, grid_boxes, grid_place, outer_boxes
from jax_ucp.sharding import reads, save
from jax_ucp.universal.zarr_files import chunk_name
from remote_files import counted
from servers.fault_proxy import depth

MESH = mesh_of(4, 2, names="ab")
NOT_STORED = (1 << 64) - 1
SPECS = [("a", "b"), ("b", "a"), (("a", "b"), None), (None, ("b", "a")), (None, None)]


def saved(path: Path, spec: tuple) -> dict:
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    want = {f"w{i}": numbered((1024, 512), np.float32) + i for i in range(3)}
    tree = {name: jax.device_put(array, sharding) for name, array in want.items()}
    ucp.CheckpointHandler().save(path, ucp.args.Save(tree))
    return want


@pytest.mark.parametrize(("before", "after"), in_lanes([*itertools.product(SPECS, SPECS)]))
def test_a_restore_asks_once_for_each_file_and_no_index_as_is_planned(tmp_path, before, after):
    want = saved(tmp_path / "saved", before)
    files = [*(tmp_path / "saved").glob("w*/c.*")]
    rules = [("", PartitionSpec(*after))]
    with counted() as far:
        checkpoint = ucp.open(f"counted://{tmp_path}/saved")
        planned = checkpoint.plan_reads(MESH, rules=rules)
        far.asked.clear()
        far.nbytes = 0
        restored = checkpoint.restore(mesh=MESH, rules=rules)
        assert far.asked["fetch"] == planned.requests.tolist()[0] == len(files)
        assert far.nbytes <= 1.001 * sum(array.nbytes for array in want.values())
    for name, array in want.items():
        np.testing.assert_array_equal(restored[name], array)


def saved_in_packs(path: Path, shapes: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    want = {f"w{i:04}": numbered(shape, np.float32) + i for i, shape in enumerate(shapes)}
    ucp.CheckpointHandler().save(path, ucp.args.Save(want))
    assert not [*path.glob("w*")]
    return want


@pytest.mark.parametrize("every", [1, 17])
def test_small_arrays_of_packs_come_at_once(tmp_path, every):
    """All by requests that do not wait for one another, and nothing beside them."""
    shapes = [(64, 40 + i % 5 * 8) for i in range(1000)]
    want = saved_in_packs(tmp_path / "saved", shapes)
    wanted = dict(itertools.islice(want.items(), 0, None, every))
    with counted(latency=0.4) as far:
        checkpoint = ucp.open(f"counted://{tmp_path}/saved")
        planned = checkpoint.plan_reads(MESH)
        far.asked.clear()
        far.seen.clear()
        far.nbytes = 0
        restored = checkpoint.restore(wanted, partial=True)
        fetches = [seen for seen in far.seen if seen.method == "fetch"]
        needed = sum(array.nbytes for array in wanted.values())
        assert depth(fetches) <= 2  # where threads are slow to begin
        assert far.nbytes <= 1.01 * needed
        assert every > 1 or len(fetches) == planned.requests.tolist()[0] < 10
    for name, array in wanted.items():
        np.testing.assert_array_equal(restored[name], array)


def test_small_arrays_of_packs_are_converted_by_a_few_requests(tmp_path):
    want = saved_in_packs(tmp_path / "saved", [(40, 30 + i % 5) for i in range(1000)])
    with counted() as far:
        checkpoint = ucp.open(f"counted://{tmp_path}/saved")
        far.asked.clear()
        far.nbytes = 0
        checkpoint.save(tmp_path / "copy")
        beside = ["ucp.index", "manifest.ocdbt", "_METADATA", "_sharding"]
        needed = sum(array.nbytes for array in want.values())
        needed += sum((tmp_path / "saved" / name).stat().st_size for name in beside)
        assert far.asked["fetch"] <= len(beside) + 3
        assert far.nbytes <= 1.01 * needed
    restored = ucp.open(tmp_path / "copy").restore()
    for name, array in want.items():
        np.testing.assert_array_equal(restored[name], array)


def test_damage_in_a_pack_is_told_of_the_array_that_has_it(tmp_path):
    saved_in_packs(tmp_path / "saved", [(4, 4)] * 1000)
    flip_bit(tmp_path / "saved" / "ucp.pack_0", 500 * (64 + 4) + 3)
    with counted(), pytest.raises(CorruptData, match=r"saved/w0500: .*ucp.pack_0 is damaged"):
        ucp.open(f"counted://{tmp_path}/saved").restore()


def test_damage_beside_the_arrays_is_found_while_they_are_converted(tmp_path):
    saved(tmp_path / "saved", (None, None))
    file = tmp_path / "saved" / "w1" / "zarr.json"
    file.write_bytes(file.read_bytes().replace(b"1024", b"1042"))
    with counted(), pytest.raises(CorruptData, match=r"w1/zarr.json is damaged"):
        ucp.open(f"counted://{tmp_path}/saved").save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def stored(root: Path, chunks: Chunks, array: np.ndarray) -> Path:
    """A checkpoint of the array, cut so."""
    save._writers.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "chunk_shapes", lambda *arguments: chunks)
        ucp.CheckpointHandler().save(root / "saved", ucp.args.Save({"w": jnp.asarray(array)}))
    save._writers.cache_clear()
    return root / "saved"


def turn_round(file: Path, count: int, nbytes: int) -> None:
    """Let the inner chunks of a file lie in the opposite order, as its index then says."""
    data = file.read_bytes()
    parts = [data[at : at + nbytes] for at in range(0, count * nbytes, nbytes)]
    index = np.frombuffer(data[count * nbytes : -4], np.uint64).reshape(-1, 2).copy()
    there = index[:, 0] != NOT_STORED
    index[there, 0] = (count - 1) * nbytes - index[there, 0]
    crc = google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    file.write_bytes(b"".join([*reversed(parts), index.tobytes(), crc]))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_boxes_of_any_chunks_come_in_whatever_order_inner_chunks_lie(tmp_path_factory, data):
    inner = data.draw(st.sampled_from([(2, 3), (4, 4), (8, 6), (5, 7)]), label="inner")
    counts = [data.draw(st.integers(1, 3), label="inner chunks") for _ in inner]
    chunks = Chunks(tuple(i * n for i, n in zip(inner, counts, strict=True)), inner)
    array = numbered((8, 12), np.int32)
    boxes = data.draw(st.lists(boxes_in(array.shape), min_size=1, max_size=4), label="boxes")
    outs = [np.full(box.shape, -1, np.int32) for box in boxes]
    path = stored(tmp_path_factory.mktemp("far"), chunks, array)
    turned = data.draw(st.booleans(), label="turned") and chunks.inner != chunks.outer
    for box in grid_boxes(array.shape, chunks.outer) if turned else ():
        count = sum(1 for _ in grid_boxes(box.shape, inner))
        name = chunk_name(grid_place(box, chunks.outer))
        turn_round(path / "w" / name, count, 4 * math.prod(inner) + 4)
    with counted() as far:
        source = ucp.open(f"counted://{path}")._contents.arrays
        far.asked.clear()
        source.read_into("w", boxes, outs)
        met = outer_boxes(array.shape, chunks.outer, boxes)
        assert turned or far.asked["fetch"] == len(met)
    for box, out in zip(boxes, outs, strict=True):
        np.testing.assert_array_equal(out, array[box.index])
    np.testing.assert_array_equal(ucp.open(path).restore()["w"], array)


@pytest.fixture
def small_requests(monkeypatch):
    """Requests as of a network that is very near, so that small arrays take several."""
    for module in (remote, reads):
        monkeypatch.setattr(module, "GAP_BYTES", 40)
        monkeypatch.setattr(module, "REQUEST_BYTES", 150)
    monkeypatch.setattr(reads, "SMALL_BYTES", 0)
    reads._reads.cache_clear()
    yield
    reads._reads.cache_clear()


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_plan_counts_the_requests_that_each_host_makes(tmp_path_factory, small_requests, data):
    inner = tuple(data.draw(st.integers(1, 9), label="inner") for _ in range(2))
    chunks = Chunks(tuple(i * data.draw(st.integers(1, 4), label="parts") for i in inner), inner)
    array = numbered((8, 16), np.int32)
    path = stored(tmp_path_factory.mktemp("planned"), chunks, array)
    spec, hosts = data.draw(st.sampled_from(SPECS)), data.draw(st.sampled_from([1, 2, 4, 8]))
    with counted() as far:
        checkpoint = ucp.open(f"counted://{path}")
        rules = [("", PartitionSpec(*spec))]
        planned = checkpoint.plan_reads(MESH, rules=rules, hosts=hosts)
        asked = []
        for boxes in boxes_of_hosts(MESH, array.shape, spec, hosts):
            far.asked.clear()
            outs = [np.empty(box.shape, np.int32) for box in boxes]
            checkpoint._contents.arrays.read_into("w", list(boxes), outs)
            asked.append(far.asked["fetch"])
    assert planned.requests.tolist() == asked
