"""A conversion and an export read every byte of their source once, and prove all of it by that."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

import jax_ucp as ucp
import torch_writer
from helpers import flip_bit
from jax_ucp.arrays import budget
from jax_ucp.errors import CorruptData
from large_sources import SOURCES, STATES, made


@contextmanager
def reads_of(folder: Path) -> Iterator[dict[str, np.ndarray]]:
    """How often each byte of each file below the folder is read, by name."""
    counts: dict[str, np.ndarray] = {}
    preadv = os.preadv

    def counted(handle: int, rooms: list[memoryview], at: int) -> int:
        length = preadv(handle, rooms, at)
        name = os.readlink(f"/proc/self/fd/{handle}")
        if Path(name).is_relative_to(folder.resolve()):
            count = counts.setdefault(name, np.zeros(os.path.getsize(name), np.uint8))
            count[at : at + length] += 1
        return length

    def pread(handle: int, size: int, at: int) -> bytes:
        room = bytearray(size)
        return bytes(room[: os.preadv(handle, [memoryview(room)], at)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        patch.setattr(os, "pread", pread)
        yield counts


def files_of(source: Path) -> list[Path]:
    below = [path for path in source.rglob("*") if path.is_file()]
    return [source] if source.is_file() else below


TARGETS: dict[str, Callable[[ucp.Checkpoint, Path], object]] = {
    "convert": lambda source, target: source.save(target),
    "convert in small blocks": lambda source, target: source.save(target, budget_bytes=24 << 20),
    "export dcp": lambda source, target: source.export(target, "dcp"),
    "export safetensors": lambda source, target: source.export(target, "safetensors"),
}


@pytest.fixture(scope="module", params=SOURCES)
def source(request, tmp_path_factory) -> Path:
    return made(request.param, tmp_path_factory.mktemp("source"), SOURCES)


@pytest.mark.parametrize("job", TARGETS)
def test_every_byte_is_read_once(source, job, tmp_path):
    checkpoint = ucp.open(source)
    stored = sum(path.stat().st_size for path in files_of(source))
    with reads_of(source) as counts:
        TARGETS[job](checkpoint, tmp_path / "out")
    read = sum(int(count.sum()) for count in counts.values())
    assert 0.98 < read / stored <= 1.02


def test_what_is_stored_in_columns_is_read_once(tmp_path):
    """By rows it would be read with what lies between them, once for each block of rows."""
    stored = np.arange(2048 * 1024, dtype=np.int32)
    turned = torch_writer.Tensor(torch_writer.Storage("0", stored), 0, (1024, 2048), (1, 1024))
    torch_writer.save({"model": {"a": turned}}, tmp_path / "it")
    with reads_of(tmp_path / "it") as counts:
        converted = ucp.open(tmp_path / "it").save(tmp_path / "out")
    (count,) = counts.values()
    assert count.sum() <= 1.02 * count.size
    np.testing.assert_array_equal(converted.read("param/a"), stored.reshape(2048, 1024).T)


def test_verify_reads_every_byte_once_where_its_checks_run_one_by_one(source, monkeypatch):
    """A checksum that runs beside a comparison may read again what that is about to read. Checksums
    beside an export are read by themselves.
    """
    monkeypatch.setattr(budget, "threads", lambda *files: 1)
    checkpoint = ucp.open(source)
    stored = sum(path.stat().st_size for path in files_of(source))
    with reads_of(source) as counts:
        checks = dict(checkpoint.verify())
    assert set(checks.values()) <= {None}
    readings = 2 if (source / "ucp.checksums.sfv").exists() else 1
    assert sum(int(count.sum()) for count in counts.values()) / stored <= readings * 1.02


def test_a_leaf_that_is_stacked_and_transposed_is_read_once_by_blocks(tmp_path):
    """However small the budget: no block has a part of a row."""
    rng = np.random.default_rng(0)
    weights = {f"{i}.w": rng.integers(0, 9, (256, 384)).astype(np.float32) for i in range(4)}
    ucp.Checkpoint.of({"param": weights}).export(tmp_path / "source", "safetensors")
    rule = {"param": "{layer}.w", "axes": "(head dim) embed", "leaf": {"w": "embed layer head dim"}}
    mapping = ucp.Mapping.from_dict({"sizes": {"dim": 32}, "leaves": [rule]})
    mapped = ucp.open(tmp_path / "source").map(mapping)
    by_columns = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    target = jax.ShapeDtypeStruct((384, 4, 8, 32), np.float32, sharding=by_columns)
    with reads_of(tmp_path / "source") as counts:
        restored = mapped.restore({"param": {"w": target}}, budget_bytes=256 << 10)["param"]["w"]
    expected = np.stack([weights[f"{i}.w"].T for i in range(4)], 1)
    np.testing.assert_array_equal(np.asarray(restored).reshape(384, 4, 256), expected)
    assert sum(int(count.sum()) for count in counts.values()) <= 1.02 * expected.nbytes


def test_stock_orbax_is_read_once(tmp_path):
    """TensorStore reads it, and says how much."""
    ocp.PyTreeCheckpointer().save(tmp_path / "source", STATES)
    stored = sum(path.stat().st_size for path in (tmp_path / "source").rglob("*") if path.is_file())
    checkpoint = ucp.open(tmp_path / "source")
    before = _read_by_tensorstore()
    checkpoint.save(tmp_path / "out")
    assert 0.9 < (_read_by_tensorstore() - before) / stored <= 1.02


def _read_by_tensorstore() -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


@pytest.mark.parametrize("job", ["convert", "export dcp"])
def test_a_bit_that_flipped_in_any_file_of_tensors_is_found_by_one_reading(source, job, tmp_path):
    """Two fifths into the largest files; of safetensors, without checksum, nothing says it."""
    copied = tmp_path / "source"
    (shutil.copy if source.is_file() else shutil.copytree)(source, copied)
    tensors = [path for path in files_of(copied) if path.stat().st_size > 1 << 14]
    largest = sorted(tensors, key=lambda path: path.stat().st_size)[-4:]
    assert largest
    for path in [path for path in largest if path.suffix != ".safetensors"]:
        whole = path.read_bytes()
        flip_bit(path, 2 * len(whole) // 5, bit=4)
        with pytest.raises(CorruptData, match=r"contradicts itself in [12] places"):
            TARGETS[job](ucp.open(copied), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        path.write_bytes(whole)
