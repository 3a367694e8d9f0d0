"""A chunk in the place of another, valid by itself: no value of it is handed out, whoever asks
and however little.
"""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import jax_ucp as ucp
from helpers import boxes_in, changed, faults_of, mesh_of
from hostile.files import resealed, without_crcs
from jax_ucp.errors import CorruptData
from jax_ucp.handler.versions import HAS_V1
from jax_ucp.layout.blocks import Chunks
from jax_ucp.layout.box import Box
from jax_ucp.universal import shard_codec as shard_file
from jax_ucp.universal.packs import PACK_FROM
from jax_ucp.universal.shard_codec import CRC_BYTES, chunk_bytes
from jax_ucp.universal.store import ZarrStore, open_store

MESHES = [mesh_of(*shape, names=("x", "y")) for shape in ((4, 2), (1, 8), (2, 3), (1, 1))]
ROWS = NamedSharding(MESHES[0], P("x"))
INNER = "wide"  # the array of which each file has several inner chunks


def tree(step: int, run: int) -> dict[str, Any]:
    """Arrays of which several have files of one size, and each file other values than any other."""
    rng = np.random.default_rng([step, run])

    def array(*shape: int, sharding: Any = ROWS) -> jax.Array:
        return jax.device_put(rng.standard_normal(shape, np.float32), sharding)

    return {
        "a": array(1024, 512),
        "edge": array(397, 401, sharding=None),
        "b": [array(16, 6), array(16, 6)],
        "mu": {"b": [array(16, 6), array(6, sharding=None)], "nu": array(6, sharding=None)},
        INNER: array(1024, 512),
        "step": step,
    }


def save(root: Path, run: int) -> None:
    with ocp.CheckpointManager(root, item_handlers=ucp.CheckpointHandler()) as manager:
        for step in (1, 2):
            manager.save(step, args=ucp.args.Save(tree(step, run)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    roots = [tmp_path_factory.mktemp(f"run{run}") for run in range(2)]
    for run, root in enumerate(roots):
        save(root, run)
    return roots


@pytest.fixture(scope="module")
def item(runs) -> Path:
    return runs[0] / "1" / "default"


def chunk_files(item: Path) -> list[Path]:
    return sorted(path for path in item.glob("*/c*") if (path.parent / "zarr.json").is_file())


def by_v1(item: Path, mesh: Mesh) -> Any:
    try:
        target = {"default": ucp.args.Restore(mesh=mesh)}
        return v1.load_checkpointables(item.parent, target)["default"]
    except Exception as error:  # v1 raises one of its own from that of any handler
        raise (error.__cause__ or error) from None


def by_v0(item: Path, mesh: Mesh) -> Any:
    with ocp.CheckpointManager(item.parents[1], item_handlers=ucp.CheckpointHandler()) as manager:
        return manager.restore(int(item.parent.name), args=ucp.args.Restore(mesh=mesh))


READERS: dict[str, Callable[[Path, Mesh], Any]] = {
    "restore": lambda item, mesh: ucp.open(item).restore(mesh=mesh),
    "restore to numpy": lambda item, mesh: ucp.open(item).restore(),
    "restore sharing reads": lambda item, mesh: ucp.open(item).restore(mesh=mesh, share_reads=True),
    "read": lambda item, mesh: [ucp.open(item).read(leaf.label) for leaf in ucp.open(item).leaves],
    "v0 manager": by_v0,
    **({"v1": by_v1} if HAS_V1 else {}),
}


@settings(max_examples=60)
@given(st.data())
def test_a_chunk_file_that_is_another_of_its_size_is_refused_by_every_reader(runs, item, data):
    """Of the same array or another, of another step, of another run."""
    file = data.draw(st.sampled_from(chunk_files(item)), label="file")
    others = [
        path
        for root in runs
        for step in (1, 2)
        for path in chunk_files(root / str(step) / "default")
        if path.stat().st_size == file.stat().st_size and path.read_bytes() != file.read_bytes()
    ]
    other = data.draw(st.sampled_from(others), label="other")
    read = READERS[data.draw(st.sampled_from(sorted(READERS)), label="reader")]
    mesh = data.draw(st.sampled_from(MESHES), label="mesh")
    with changed(file, other.read_bytes()):
        with pytest.raises(CorruptData) as refused:
            read(item, mesh)
        (fault,) = faults_of(ucp.open(item))
    assert f"{item}/{file.parent.name}: {file}: the data of" in fault
    for said in (f"{item}/{file.parent.name}: ", f"{file}", "another array, step or run"):
        assert said in str(refused.value)
    assert "damaged" not in str(refused.value)


@pytest.mark.parametrize("reader", READERS)
def test_the_metadata_of_another_step_or_run_are_refused_by_every_reader(runs, item, reader):
    for other in (runs[0] / "2", runs[1] / "1"):
        data = (other / "default" / "ucp.json").read_bytes()
        refused = pytest.raises(CorruptData, match="another array, step or run")
        with changed(item / "ucp.json", data), refused:
            READERS[reader](item, MESHES[0])
    READERS[reader](item, MESHES[0])


def test_what_is_not_of_the_exchanged_file_is_still_read(runs, item):
    want = tree(1, 0)
    other = (runs[1] / "1" / "default" / "b.0" / "c.0.0").read_bytes()
    with changed(item / "b.0" / "c.0.0", other):
        checkpoint = ucp.open(item)
        np.testing.assert_array_equal(checkpoint.read("b/1"), want["b"][1])
        with pytest.raises(CorruptData, match=r"b\.0: "):
            checkpoint.read("b/0")


@settings(max_examples=60)
@given(st.data())
def test_an_inner_chunk_in_the_place_of_another_is_refused_where_any_of_it_is_read(item, data):
    """By its bytes, or by an index that leads to the other; what is read of the others is what
    was saved.
    """
    metadata, store = open_store(item)
    stored = metadata.arrays[INNER]
    grid = tuple(o // i for o, i in zip(stored.outer, stored.inner, strict=True))
    count = int(np.prod(grid))
    nbytes = chunk_bytes(Chunks(stored.outer, stored.inner), np.dtype(np.float32))
    assert count > 3
    files = st.sampled_from(chunk_files(item)).filter(lambda path: path.parent.name == INNER)
    file = data.draw(files, label="file")
    two = st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True)
    one, other = data.draw(two, label="inner")
    raw = bytearray(file.read_bytes())
    if data.draw(st.booleans(), label="by its bytes"):
        raw[one * nbytes : (one + 1) * nbytes] = raw[other * nbytes : (other + 1) * nbytes]
    else:
        index = np.frombuffer(raw[-16 * count - CRC_BYTES : -CRC_BYTES], np.uint64)
        index = index.reshape(count, 2).copy()
        index[one] = index[other]
        crc = google_crc32c.value(index.tobytes()).to_bytes(4, "little")
        raw[-16 * count - CRC_BYTES :] = index.tobytes() + crc
    outer = [int(part) for part in file.name.split(".")[1:]]
    place = [o * g + p for o, g, p in zip(outer, grid, np.unravel_index(one, grid), strict=True)]
    start = [p * n for p, n in zip(place, stored.inner, strict=True)]
    swapped = Box(tuple(start), tuple(a + n for a, n in zip(start, stored.inner, strict=True)))
    box = data.draw(boxes_in((1024, 512)), label="box")
    whole = data.draw(st.sampled_from([0, shard_file.WHOLE_BYTES]), label="whole")
    with changed(file, bytes(raw)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "WHOLE_BYTES", whole)
        if box.intersect(swapped) is not None:
            with pytest.raises(CorruptData, match=r"inner chunk .* another array, step or run"):
                store.read(INNER, box)
        else:
            want = np.asarray(tree(1, 0)[INNER])[box.index]
            np.testing.assert_array_equal(store.read(INNER, box), want)


@pytest.mark.parametrize("other", [1, PACK_FROM - 1])
def test_a_chunk_of_a_pack_in_the_place_of_another_is_refused(tmp_path, other):
    with ocp.CheckpointManager(tmp_path, item_handlers=ucp.CheckpointHandler()) as manager:
        arrays = {f"w{i:04}": np.arange(i, i + 5, dtype=np.int32) for i in range(PACK_FROM)}
        manager.save(1, args=ucp.args.Save(arrays))
    item = tmp_path / "1" / "default"
    (pack,) = item.glob("ucp.pack_*")
    data, nbytes = pack.read_bytes(), pack.stat().st_size // PACK_FROM
    pack.write_bytes(data[other * nbytes : (other + 1) * nbytes] + data[nbytes:])
    ucp.open(item).read("w0001")
    fault = rf"w0000: .*{pack.name}.* another array, step or run"
    with pytest.raises(CorruptData, match=fault):
        ucp.open(item).restore()
    with pytest.raises(CorruptData, match=fault):  # of which all are read at once
        ucp.open(item).save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert [fault.partition(": ")[0] for fault in faults_of(ucp.open(item))] == [f"{item}/w0000"]
    pack.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CorruptData, match=r"w0000: .*is damaged"):
        ucp.open(item).save(tmp_path / "copy")


def require_bound(item: Path) -> None:
    """Raises where a chunk of the checkpoint is not bound to its place."""
    for leaf in ucp.open(item).leaves:
        if leaf.has_array and leaf.shape:
            file = next(file for file in chunk_files(item) if file.parent.name == leaf.name)
            zeros = chunk_of_zeros(item, leaf.name)
            with changed(file, zeros), pytest.raises(CorruptData, match="another array"):
                ucp.open(item).read(leaf.label)


def chunk_of_zeros(item: Path, name: str) -> bytes:
    """The first file of an array, as it would be if the array were zeros."""
    metadata, _ = open_store(item)
    (leaf,) = (leaf for leaf in metadata.leaves if leaf.name == name)
    chunks = Chunks(metadata.arrays[name].outer, metadata.arrays[name].inner)
    inside = tuple(min(n, o) for n, o in zip(leaf.shape, chunks.outer, strict=True))
    return b"".join(
        bytes(part)
        for part in shard_file.shard_parts(
            [np.zeros(inside, leaf.dtype)], inside, np.dtype(leaf.dtype), chunks, bytearray()
        )
    )


def test_a_copy_is_bound_also_if_it_was_taken_up(item, tmp_path):
    source = ucp.open(item)
    require_bound(Path(source.save(tmp_path / "whole").path))
    done = []

    def stop(block: Any) -> None:
        done.append(block)
        if len(done) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.save(tmp_path / "taken up", progress=stop, budget_bytes=1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        held = []
        holds = ZarrStore.holds
        patch.setattr(ZarrStore, "holds", lambda *args: held.append(args) or holds(*args))
        result = source.save(tmp_path / "taken up", budget_bytes=1 << 20)
    assert held
    assert faults_of(result) == []
    require_bound(Path(result.path))


def test_the_crcs_are_those_of_the_files_in_row_major_order(item, tmp_path):
    """As `docs/format.md` has it, computed here from the elements: a chunk at an edge has zeros
    past the array.
    """
    want = tree(1, 0)
    copy = Path(ucp.open(item).save(tmp_path / "copy", budget_bytes=1 << 20).path)
    assert len(chunk_files(copy)) > len(chunk_files(item))
    for path in (item, copy):
        require_crcs(json.loads((path / "ucp.json").read_bytes()), want)


def require_crcs(content: Any, want: Any) -> None:
    arrays = {"a": want["a"], "edge": want["edge"], "b.1": want["b"][1]}
    for name, array in (arrays | {"step": np.int64(1)}).items():
        array, inner = np.asarray(array), content["arrays"][name]["inner"]
        grid = [-(-n // c) for n, c in zip(array.shape, inner, strict=True)]
        padded = np.zeros([n * c for n, c in zip(grid, inner, strict=True)], array.dtype)
        padded[tuple(map(slice, array.shape))] = array
        crcs = base64.b64decode(content["arrays"][name]["crcs"])
        found = np.frombuffer(crcs, "<u4").reshape(grid)
        for place in np.ndindex(*grid):
            part = padded[tuple(slice(p * c, p * c + c) for p, c in zip(place, inner, strict=True))]
            assert google_crc32c.value(part.tobytes()) == found[place], (name, place)


def test_a_checkpoint_without_the_crcs_is_read_as_before(item, tmp_path):
    old = resealed(shutil.copytree(item, tmp_path / "old"), without_crcs)
    assert not any(stored.crcs for stored in open_store(old)[0].arrays.values())
    want = ucp.open(item).restore()
    jax.tree.map(np.testing.assert_array_equal, ucp.open(old).restore(), want)
    assert faults_of(ucp.open(old)) == []
    (old / "b.0" / "c.0.0").write_bytes((old / "b.1" / "c.0.0").read_bytes())
    assert len(faults_of(ucp.open(old))) == 1
    with pytest.raises(CorruptData, match=r"b\.0: the data of .* are not those that were saved"):
        ucp.open(old).restore(verify="full")
    with pytest.raises(CorruptData, match=r"b\.0: the data of .* are not those that were saved"):
        ucp.CheckpointHandler().restore(old, ucp.args.Restore(verify="full"))
