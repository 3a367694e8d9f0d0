"""A damaged checkpoint is an error, an unfinished one is none at all, and neither is ever other
data.

The negative controls are here too: what the comparisons would say of data that are wrong and valid.
"""

import contextlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

import jax_ucp as ucp
from helpers import changed, tree_differences, tree_of_files
from hostile.files import resealed, without_crcs
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint
from jax_ucp.universal import metadata
from programs import killed
from workers.killed import BUDGET, STEPS, tree_of_step
from workers.stock import digests

WORKERS = Path(__file__).parent / "workers"
FLIPS = 100
KILLS = 8


def save_with_manager(root: Path, step: int, tree: Any) -> Path:
    with ocp.CheckpointManager(root, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(step, args=ucp.args.Save(tree))
    return root / str(step) / "default"


def data_files(item: Path) -> list[Path]:
    """The files of array data: beside a `zarr.json`, what is called `c` or begins so."""
    return sorted(path for path in item.rglob("c*") if (path.parent / "zarr.json").is_file())


def array_of(item: Path, file: Path) -> str:
    return str(file.parent.relative_to(item))


def part_of_shard(data: bytes, at: int) -> str:
    """Which part of a file the byte at an offset belongs to: a zarr v3 shard with its index and
    the crc32c of that at the end, or one chunk with its crc32c."""
    after_index = len(data) - 4
    for chunks in range(1, len(data)):
        begin = after_index - 16 * chunks
        if begin < 0:
            return "checksum" if at >= after_index else "data"
        index = np.frombuffer(data[begin:after_index], "<u8").reshape(chunks, 2)
        if index.sum(axis=0)[1] == begin:
            break
    if at >= begin:
        return "index" if at < after_index else "checksum of index"
    stops = index.sum(axis=1).tolist()
    return "checksum" if any(stop - 4 <= at < stop for stop in stops) else "data"


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def faults_of(item: Path) -> list[str]:
    """What opening or verifying a checkpoint finds wrong with it."""
    try:
        return [fault for _, fault in ucp.open(item).verify() if fault]
    except FormatError as error:
        return [str(error)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Any]:
    """A checkpoint whose arrays have one chunk or several, inner and outer, and files of 25
    bytes to 3 MiB.
    """
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def put(array: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    tree = {
        "kernel": put(rng.standard_normal((1024, 768), np.float32), "data", "model"),
        "embedding": put(rng.standard_normal((768, 1024), np.float32)),
        "bfloat16": put(rng.standard_normal((1030, 1001), np.float32).astype(ml_dtypes.bfloat16)),
        "int8": rng.integers(-128, 128, (1500, 1000), np.int8),
        "layers": [
            {"scale": put(rng.standard_normal((3, 5, 7), np.float32)), "on": np.array([True])}
        ],
        "rng": jax.random.key(1),
        "name": "adam",
        "step": 7,
    }
    return save_with_manager(tmp_path_factory.mktemp("saved"), 1, tree), tree


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, Any]:
    tree = {
        "same": [np.arange(i, i + 6, dtype=np.float32).reshape(2, 3) for i in (10, 20)],
        "zeros": np.zeros(3, np.float32),
        "scales": (np.float32(0.5), np.int8(-3)),
        "rng": jax.random.key(1),
        "name": "adam",
        "step": 7,
    }
    return save_with_manager(tmp_path_factory.mktemp("small"), 1, tree), tree


def test_any_flipped_bit_of_array_data_is_an_error_to_us_and_to_stock_orbax(saved, stock):
    """Files are drawn alike, large or small, and every other time the place is at the end, so
    that checksums and indices are hit as well as data."""
    item, tree = saved
    files, draw = data_files(item), random.Random(0)
    by_us, by_stock, parts = 0, 0, Counter()
    assert stock(item) == {"arrays": digests(tree)}
    for turn in range(FLIPS):
        file = draw.choice(files)
        data, name = file.read_bytes(), array_of(item, file)
        at, bit = draw.randrange(max(0, len(data) - 40) * (turn % 2), len(data)), draw.randrange(8)
        parts[part_of_shard(data, at)] += 1
        with changed(file, flipped(data, at, bit)):
            try:
                ucp.open(item).restore()
            except CorruptData as error:
                by_us += f"{item / name}:" in str(error)
            by_stock += f"{name}/" in stock(item).get("error", "")
    assert (by_us, by_stock) == (FLIPS, FLIPS)
    assert set(parts) == {"data", "checksum", "index", "checksum of index"}, parts
    assert tree_differences(ucp.open(item).restore(), tree) == []
    assert stock(item) == {"arrays": digests(tree)}


def test_without_checksums_a_flipped_bit_is_other_data_and_the_comparison_sees_it(tmp_path):
    want = np.arange(1000, dtype=np.float32)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"}}
    ts.open(spec, create=True, dtype=ts.float32, shape=[1000]).result()[...] = want
    file = tmp_path / "x" / "c" / "0"
    with changed(file, flipped(file.read_bytes(), 2001, 3)):
        found = ts.open(spec).result().read().result()
    assert tree_differences({"x": found}, {"x": want}) == ["['x']"]


def test_valid_chunks_of_other_data_are_seen_by_the_comparison_and_by_verify(small, tmp_path):
    """One sign of one zero: TensorStore wrote it, with good checksums, of data never saved."""
    item, tree = small
    copy = shutil.copytree(item, tmp_path / "copy")
    store = {"driver": "file", "path": f"{copy}/zeros/"}
    ts.open({"driver": "zarr3", "kvstore": store}).result()[1] = -0.0
    with pytest.raises(CorruptData, match=r"zeros/c\.0: .* another array, step or run"):
        ucp.open(copy).restore()
    assert [fault.partition(":")[0] for fault in faults_of(copy)] == [f"{copy}/zeros"]
    resealed(copy, without_crcs)
    assert tree_differences(ucp.open(copy).restore(), tree) == ["['zeros']"]
    assert [fault.partition(":")[0] for fault in faults_of(copy)] == [f"{copy}/zeros"]


@pytest.mark.parametrize(("found", "want"), [
    ({"a": 1},                    {"a": np.int64(1)}),
    ({"a": 1},                    {"a": True}),
    ({"a": (1, 2)},               {"a": [1, 2]}),
    ({"a": None},                 {}),
    ({"a": np.zeros(2, np.int8)}, {"a": np.zeros(2, np.uint8)}),
    ({"a": np.zeros((1, 2))},     {"a": np.zeros((2, 1))}),
    ({"a": jax.random.key(1)},    {"a": jax.random.key_data(jax.random.key(1))}),
])  # fmt: skip
def test_the_comparison_sees_kinds_and_nodes(found, want):
    assert tree_differences(found, found) == tree_differences(want, want) == []
    assert len(tree_differences(found, want)) == 1


def test_any_flipped_bit_of_ucp_json_is_an_error(small):
    """Every bit there is, through the function that opening calls."""
    item, _ = small
    data = (item / "ucp.json").read_bytes()
    metadata.decode(data, "ucp.json")
    missed = []
    for at in range(len(data)):
        for bit in range(8):
            try:
                metadata.decode(flipped(data, at, bit), "ucp.json")
            except FormatError:
                continue
            missed.append((at, data[at - 20 : at + 20]))
    assert missed == []


def test_a_flipped_bit_in_any_other_file_is_found_by_opening_or_by_verify(small):
    item, tree = small
    draw = random.Random(1)
    others = sorted({path for path in item.rglob("*") if path.is_file()} - set(data_files(item)))
    # of Orbax, which reads none on a disk
    others = [path for path in others if path.name != "commit_success.txt"]
    ours = {"ucp.json", "ucp.index", "zarr.json"}
    stock = {"_METADATA", "_sharding", "_strings.json", "process_0", "manifest.ocdbt"}
    assert {path.name for path in others} == ours | stock
    assert faults_of(item) == []
    missed = []
    for file in others:
        data = file.read_bytes()
        for _ in range(16):
            at, bit = draw.randrange(len(data)), draw.randrange(8)
            with changed(file, flipped(data, at, bit)):
                faults = faults_of(item)
            if not any(str(file) in fault for fault in faults):
                missed.append((file.name, at, bit, faults))
    assert missed == []
    assert tree_differences(ucp.open(item).restore(), tree) == []


def test_a_missing_data_file_is_an_error_and_never_zeros(small, tmp_path, stock):
    item, _ = small
    for n, file in enumerate(data_files(item)):
        copy = shutil.copytree(item, tmp_path / str(n))
        opened, name = ucp.open(copy), array_of(item, file)
        (copy / file.relative_to(item)).unlink()
        with pytest.raises(CorruptData, match=f"{name}/c"):
            ucp.open(copy)
        with pytest.raises(CorruptData, match=f"{name}: "):
            opened.restore()
        assert f"{name}/" in stock(copy)["error"]


def test_a_missing_file_of_metadata_is_an_error(small, tmp_path):
    item, _ = small
    names = list(metadata.decode((item / "ucp.json").read_bytes(), "ucp.json").files)
    for n, name in enumerate(names):
        copy = shutil.copytree(item, tmp_path / str(n))
        (copy / name).unlink()
        # without the file that is written last, it was never finished
        error = NotACheckpoint if name == "_METADATA" else CorruptData
        with pytest.raises(error, match=name):
            ucp.open(copy)


def test_a_data_file_that_is_too_short_or_too_long_is_an_error(small):
    item, _ = small
    for file in data_files(item):
        data, words = file.read_bytes(), f"{array_of(item, file)}: "
        for length in range(len(data)):
            with changed(file, data[:length]), pytest.raises(CorruptData, match=words):
                ucp.open(item).restore()
        with changed(file, data + b"\0"), pytest.raises(CorruptData, match=words):
            ucp.open(item).restore()


@pytest.fixture(scope="module")
def trees() -> Mapping[int, Any]:
    return {step: tree_of_step(step) for step in STEPS}


def opened_below(root: Path) -> Iterator[tuple[Path, Any]]:
    """What opens of `root` and every directory below: the path that it leads to, restored."""
    for directory, _, _ in os.walk(root):
        with contextlib.suppress(NotACheckpoint, FormatError):
            checkpoint = ucp.open(directory)
            yield Path(checkpoint.path), checkpoint.restore()


@pytest.mark.parametrize("job", ["save", pytest.param("save in stages", marks=pytest.mark.slow)])
def test_a_save_killed_at_any_moment_leaves_whole_steps_and_nothing_else_that_opens(
    tmp_path, trees, job
):
    """Real SIGKILLs, at 8 times drawn uniformly over the duration of two asynchronous saves with
    `CheckpointManager`, and at each step of the second commit: before and after each file of it
    that we write, and before each file that Orbax writes, renames or removes.
    """
    kills = killed(job, tmp_path, times=KILLS)
    outcomes = Counter()
    for root, moment in kills:
        whole = set()
        for directory, found in opened_below(root):
            step = int(directory.relative_to(root).parts[0].partition(".")[0])
            assert tree_differences(found, trees[step]) == [], (moment, directory)
            whole.add(step)
        with ocp.CheckpointManager(root, item_handlers=ucp.CheckpointHandler()) as manager:
            steps = manager.all_steps()
            assert steps == list(STEPS[: len(steps)])
            assert manager.latest_step() == (steps[-1] if steps else None)
            assert set(steps) <= whole, (moment, steps)
            manager.save(9, args=ucp.args.Save(trees[1]))
            manager.wait_until_finished()
            for step in manager.all_steps():
                want = trees[1 if step == 9 else step]
                assert tree_differences(manager.restore(step), want) == [], (moment, step)
        outcomes[len(steps)] += 1
        shutil.rmtree(root)
    assert len(kills) > KILLS
    assert set(outcomes) == {0, 1, 2}, f"{outcomes} whole steps: no kill before, between or after"


@pytest.fixture(scope="module")
def source(tmp_path_factory, trees) -> Path:
    """A checkpoint of stock Orbax, with its arrays in many blocks of a convert."""
    path = tmp_path_factory.mktemp("stock") / "saved"
    with ocp.StandardCheckpointer() as checkpointer:
        # it takes no strings
        checkpointer.save(path, {key: value for key, value in trees[1].items() if key != "name"})
    return path


def test_a_convert_killed_at_any_moment_is_completed_by_the_same_convert(tmp_path, source):
    """Real SIGKILLs, at 8 times drawn uniformly over the duration of `jax-ucp convert`, and at
    each step from the last block to the end: before and after each file we write, and before each
    that is opened or removed.
    """
    kills = killed("convert", tmp_path, source, KILLS)
    want = ucp.open(source).restore()
    whole = tree_of_files(tmp_path / "whole" / "converted")
    outcomes = Counter()
    for root, moment in kills:
        opened = list(opened_below(root))
        for directory, found in opened:
            assert directory == root / "converted", moment
            assert tree_differences(found, want) == [], moment
        if tree_of_files(root / "converted") == whole:
            with pytest.raises(FileExistsError, match="is a checkpoint already"):
                ucp.open(source).save(root / "converted", budget_bytes=BUDGET)
        else:
            again = ucp.open(source).save(root / "converted", budget_bytes=BUDGET)
            assert tree_differences(again.restore(), want) == [], moment
        assert faults_of(root / "converted") == [], moment
        assert tree_of_files(root / "converted") == whole, moment
        outcomes[len({directory for directory, _ in opened})] += 1
        shutil.rmtree(root)
    assert len(kills) > KILLS
    assert set(outcomes) == {0, 1}, f"{outcomes}: no kill before, or none after the commit"


@pytest.mark.parametrize("job", ["save", "convert"])
def test_what_a_kill_in_the_commit_leaves_is_refused_or_whole_to_stock_orbax_and_to_us(
    job, tmp_path, trees, source, stock
):
    """Kills at each moment of the commit, when all arrays are on disk. `_METADATA` is written last,
    after `ucp.json`: from that moment on stock Orbax and we read the directory, and all of it is
    right.
    """
    want = digests(trees[STEPS[-1]] if job == "save" else ucp.open(source).restore())
    answers = Counter()
    for root, moment in killed(job, tmp_path, source, times=0):
        # Stock Orbax refuses the temporary directories of a save by their names: take that away.
        item = max({path.parents[1] for path in root.rglob("zarr.json")}).rename(tmp_path / "item")
        files = {name: (item / name).exists() for name in ("ucp.json", "_METADATA")}
        if files["_METADATA"]:
            assert stock(item) == {"arrays": want}, moment
            assert digests(ucp.open(item).restore()) == want, moment
        else:
            assert "error" in stock(item), moment
            with pytest.raises(NotACheckpoint):
                ucp.open(item)
        shutil.rmtree(item)
        answers[tuple(files.values())] += 1
    assert set(answers) == {(False, False), (True, False), (True, True)}
