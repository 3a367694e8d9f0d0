"""A thousand small arrays and more: in few files, as safe as apart, and stock Orbax reads them."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import jax_ucp as ucp
from helpers import digests
from hostile.files import resealed
from jax_ucp.arrays import budget
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData, NotACheckpoint
from jax_ucp.files.local import LocalFiles
from jax_ucp.handler.versions import HAS_V1
from jax_ucp.layout.blocks import Chunks
from jax_ucp.layout.box import Box
from jax_ucp.sharding import save as saving
from jax_ucp.universal import copy as copying
from jax_ucp.universal import ocdbt, packs
from jax_ucp.universal.packs import PACK_FROM
from jax_ucp.universal.store import ZarrStore

MESH = jax.make_mesh((4, 2), ("data", "model"))
DTYPES = [np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.int8, bool, np.complex64)]
SHAPES = [(), (6,), (2, 3), (0, 4), (8, 16)]
FLIPS = 60

WARNING = "ignore:Sharding info not provided when restoring:UserWarning"
stock_warns = pytest.mark.filterwarnings(WARNING)


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    replicated, rows = (NamedSharding(MESH, PartitionSpec(*spec)) for spec in ((), ("data",)))

    def small(i: int) -> jax.Array:
        shape, dtype = SHAPES[i % len(SHAPES)], DTYPES[i // len(SHAPES) % len(DTYPES)]
        values = rng.standard_normal(shape) * 8
        sharding = rows if shape == (8, 16) else replicated
        return jax.device_put(np.asarray(values).astype(dtype), sharding)

    large = rng.standard_normal((512, 256), np.float32)
    return {
        "layers": [{"scale": small(i)} for i in range(PACK_FROM)],
        "large": jax.device_put(large, NamedSharding(MESH, PartitionSpec("data", "model"))),
        "rng": jax.random.key(3),
        "name": "adam",
        "none": None,
        "step": 7,
    }


def check(got: Any, want: Any) -> None:
    found, wanted = (dict(jax.tree_util.tree_leaves_with_path(t)) for t in (got, want))
    assert set(map(jax.tree_util.keystr, found)) == set(map(jax.tree_util.keystr, wanted))
    for path, leaf in wanted.items():
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert (jax.random.key_data(found[path]) == jax.random.key_data(leaf)).all()
        elif isinstance(leaf, jax.Array | np.ndarray):
            assert same_bits(np.asarray(found[path]), np.asarray(leaf)), path
        else:
            assert found[path] == leaf


def test_packs_of_a_save_are_of_a_size_that_is_sent_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SAVED_PACK_BYTES", 20_000)
    want = tree()
    ucp.CheckpointHandler().save(tmp_path / "saved", ucp.args.Save(want))
    sizes = [file.stat().st_size for file in (tmp_path / "saved").glob("ucp.pack_*")]
    assert len(sizes) > 3
    assert max(sizes) <= 1.1 * 20_000  # with their checksums
    check(ucp.open(tmp_path / "saved").restore(), want)


def save(root: Path, tree: Any) -> Path:
    with ocp.CheckpointManager(root, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(1, args=ucp.args.Save(tree))
    return root / "1" / "default"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    want = tree()
    return save(tmp_path_factory.mktemp("packed"), want), want


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Arrays of one dtype, each different: nothing is right by chance."""
    want = {f"w{i:04}": np.arange(i, i + 5, dtype=np.float32) for i in range(PACK_FROM)}
    return save(tmp_path_factory.mktemp("numbers"), want), want


def faults_of(item: Path) -> list[str]:
    return [fault for _, fault in ucp.open(item).verify() if fault]


def test_they_are_restored_as_they_were_and_take_few_files(saved):
    item, want = saved
    checkpoint = ucp.open(item)
    got = checkpoint.restore(want)
    check(got, want)
    assert got["layers"][4]["scale"].sharding == want["layers"][4]["scale"].sharding
    assert faults_of(item) == []
    files = [path for path in item.rglob("*") if path.is_file()]
    beside_large = [path for path in files if path.parent.name != "large"]
    assert len(beside_large) < 12, beside_large
    (piece,) = checkpoint.where("layers/7/scale")
    assert (item / piece.file).is_file()
    assert piece.item == "layers.7.scale/c.0.0"


def test_chunks_of_an_array_that_several_processes_packed_are_all_placed(tmp_path):
    values = np.arange(12, dtype=np.float32)
    arrays, chunks = {"w": ArrayInfo((12,), values.dtype)}, {"w": Chunks((4,), (4,))}
    stores = [ZarrStore(LocalFiles(tmp_path), arrays, chunks) for _ in range(3)]
    for number, store in enumerate(stores):
        box = Box((4 * number,), (4 * number + 4,))
        store.write_pack(number, [("w", box)], [values[box.index]])
    first, *others = stores
    for store in others:
        first.add(store.written)
    np.testing.assert_array_equal(first.read("w", Box((0,), (12,))), values)


@stock_warns
@pytest.mark.filterwarnings("ignore:`load_pytree` is deprecated:DeprecationWarning")
def test_stock_orbax_reads_them(saved):
    item, want = saved
    with ocp.CheckpointManager(item.parents[1]) as manager:
        check(manager.restore(1), want)
    if HAS_V1:
        check(v1.load(item.parent), want)

    def like(x):
        return ocp.utils.to_shape_dtype_struct(x) if isinstance(x, jax.Array) else x

    target = jax.tree.map(like, want)
    args = ocp.args.PyTreeRestore(target, ocp.checkpoint_utils.construct_restore_args(target))
    got = ocp.PyTreeCheckpointer().restore(item, args=args)
    check(got, want)
    assert got["large"].sharding == want["large"].sharding


def test_fewer_have_files_of_their_own(tmp_path):
    item = save(tmp_path, {f"w{i}": np.float32(i) for i in range(PACK_FROM - 1)})
    assert not list(item.glob("ucp.pack_*"))
    assert (item / "w7" / "c").is_file()


def test_more_than_the_index_can_hold_have_files_of_their_own(monkeypatch):
    arrays = {f"w{i}": ArrayInfo((4,), np.dtype(np.int8)) for i in range(PACK_FROM)}
    chunks = dict.fromkeys(arrays, Chunks((2,), (2,)))  # two chunks and a `zarr.json` each
    assert packs.packed_arrays(arrays, chunks) == set(arrays)
    monkeypatch.setattr(packs, "MAX_ENTRIES", 3 * PACK_FROM - 1)
    assert packs.packed_arrays(arrays, chunks) == set()


def test_a_copy_of_them_is_the_same_tree(saved, tmp_path):
    item, want = saved
    check(ucp.open(item).save(tmp_path / "copy").restore(want), want)


@pytest.fixture
def packs_of_300(monkeypatch):
    monkeypatch.setattr(copying, "PACK_BLOCKS", 300)


@stock_warns
def test_a_conversion_packs_them_too(packs_of_300, numbers, tmp_path, monkeypatch):
    item, want = numbers
    monkeypatch.setattr(ocdbt, "NODE_ENTRIES", 700)  # of the index, which has 2,000
    ucp.open(item).save(tmp_path / "copy")
    assert len(list((tmp_path / "copy").glob("ucp.pack_*"))) == -(-PACK_FROM // 300)
    assert len(list((tmp_path / "copy").iterdir())) < 12
    assert faults_of(tmp_path / "copy") == []
    check(ucp.open(tmp_path / "copy").restore(), want)
    check(ocp.PyTreeCheckpointer().restore(tmp_path / "copy"), want)
    for name in ("w0000", "w0299", "w0300", "w0999"):
        assert same_bits(read_by_tensorstore(tmp_path / "copy", name), want[name])


def test_processes_write_the_same_packs(packs_of_300, numbers, tmp_path):
    item, _ = numbers
    ucp.open(item).save(tmp_path / "here")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        ucp.open(item).save(tmp_path / "there", executor=executor)
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


@pytest.mark.parametrize("harm", ["nothing", "a flipped bit", "a missing pack"])
def test_a_stopped_copy_goes_on_with_whole_packs(
    packs_of_300, numbers, tmp_path, monkeypatch, harm
):
    item, want = numbers
    ucp.open(item).save(tmp_path / "whole")
    monkeypatch.setattr("jax_ucp.jobs.run.GROUP_BYTES", 0)
    monkeypatch.setattr(budget, "threads", lambda *files: 1)
    written = []

    def stop_after_two_packs(nbytes):
        written.append(nbytes)
        if len(written) == 600:
            raise KeyboardInterrupt

    target = tmp_path / "copy"
    with pytest.raises(KeyboardInterrupt):
        ucp.open(item).save(target, progress=stop_after_two_packs)
    packs_there = sorted(target.glob("ucp.pack_*"))
    assert len(packs_there) == 2
    assert not (target / "ucp.json").exists()
    inode = packs_there[1].stat().st_ino, packs_there[1].stat().st_mtime_ns
    if harm == "a flipped bit":
        data = bytearray(packs_there[0].read_bytes())
        data[100] ^= 1
        packs_there[0].write_bytes(data)
    elif harm == "a missing pack":
        packs_there[0].unlink()
    ucp.open(item).save(target)
    assert (packs_there[1].stat().st_ino, packs_there[1].stat().st_mtime_ns) == inode
    assert digests(target) == digests(tmp_path / "whole")
    check(ucp.open(target).restore(), want)


def read_by_tensorstore(item: Path, name: str) -> np.ndarray:
    kvstore = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"}
    return np.asarray(ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result())


@pytest.mark.slow
def test_any_flipped_bit_of_a_pack_is_an_error_to_us_and_to_tensorstore(numbers):
    item, want = numbers
    (pack,) = item.glob("ucp.pack_*")
    data, draw = pack.read_bytes(), random.Random(0)
    stored = len(data) // len(want)
    for _ in range(FLIPS):
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        name = list(want)[at // stored]
        pack.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        with pytest.raises(CorruptData, match=f"{item / name}: .*{pack.name} is damaged"):
            ucp.open(item).restore()
        with pytest.raises(ValueError, match="Digest mismatch"):
            read_by_tensorstore(item, name)
    pack.write_bytes(data)
    check(ucp.open(item).restore(), want)


@pytest.mark.slow
def test_any_flipped_bit_of_the_index_is_found_by_verify(numbers):
    item, want = numbers
    draw = random.Random(1)
    for name in ("ucp.index", "manifest.ocdbt"):
        data = (item / name).read_bytes()
        for _ in range(FLIPS // 2):
            at, bit = draw.randrange(len(data)), draw.randrange(8)
            (item / name).write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            faults = faults_of(item)
            assert len(faults) == 1, (name, at, bit, faults)
            assert str(item / name) in faults[0]
        (item / name).write_bytes(data)
    check(ucp.open(item).restore(), want)


def test_a_pack_that_is_missing_or_short_is_an_error(numbers, tmp_path):
    item, _ = numbers
    copy = shutil.copytree(item, tmp_path / "copy")
    (pack,) = copy.glob("ucp.pack_*")
    data, opened = pack.read_bytes(), ucp.open(copy)
    for length in (0, len(data) // 2, len(data) - 1):
        pack.write_bytes(data[:length])
        with pytest.raises(CorruptData, match=f"{pack.name} is too short"):
            ucp.open(copy).restore()
    pack.write_bytes(data + b"\0")
    assert [fault.partition(" ")[0] for fault in faults_of(copy)] == [str(pack)]
    pack.unlink()
    with pytest.raises(CorruptData, match=pack.name):
        ucp.open(copy)
    with pytest.raises(CorruptData, match=f"{pack.name} is missing"):
        opened.restore()


@pytest.mark.parametrize("other", ["w0001", "w0900"])
def test_two_arrays_at_one_place_of_a_pack_are_found_by_verify(other, numbers, tmp_path):
    """A read finds the bytes that `ucp.json` says: only the pack shows that others are there."""
    copy = shutil.copytree(numbers[0], tmp_path / "copy")
    resealed(copy, lambda said: said["arrays"].update(w0000=said["arrays"][other]))
    assert ["two arrays at one place" in fault for fault in faults_of(copy)] == [True]


def stopped_when_none_is_left(do: Callable[..., None], left: Iterator[int]) -> Callable[..., None]:
    def step(directory: LocalFiles, name: str, *args: Any, **kwargs: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt(name)
        do(directory, name, *args, **kwargs)

    return step


def test_a_save_that_stops_at_any_file_leaves_no_checkpoint(tmp_path, monkeypatch):
    """Before each file that is written and each that is removed: nothing opens, for us or for stock
    Orbax, until the last of them is there, and then everything does."""
    want = {f"w{i}": np.float32(i) for i in range(PACK_FROM)}
    reached = Counter()
    for stop in range(20):
        left = iter(range(stop))
        for what in ("write", "create", "delete"):
            stopped = stopped_when_none_is_left(getattr(LocalFiles, what), left)
            monkeypatch.setattr(LocalFiles, what, stopped)
        item = tmp_path / str(stop)
        try:
            ucp.CheckpointHandler().save(item, ucp.args.Save(want))
        except KeyboardInterrupt as error:
            name = str(error)
        else:
            name = ""
        monkeypatch.undo()
        if (item / "_METADATA").exists():
            check(ucp.open(item).restore(), want)
            check(ocp.PyTreeCheckpointer().restore(item), want)
        else:
            with pytest.raises(NotACheckpoint):
                ucp.open(item)
            with pytest.raises(FileNotFoundError):
                ocp.PyTreeCheckpointer().restore(item)
        reached[name] += 1
        if not name:
            break
    places = {"ucp.pack_0", "ucp.index", "manifest.ocdbt", "_METADATA", "ucp.json", ""}
    assert places <= set(reached), reached
