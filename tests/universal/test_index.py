"""What stock Orbax and TensorStore read of an array's shape is under a checksum: a flipped bit
is an error to them.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import jax_ucp as ucp
from jax_ucp.universal import packs

TREE = {
    "w": np.arange(99 * 9, dtype=np.float32).reshape(99, 9),
    "b": np.arange(8, dtype=np.int8),
    "n": np.zeros((0, 3)),
}
SAMPLE = 3000


def read_as_stock(item: Path, name: str) -> np.ndarray:
    """The array as TensorStore has it, as `_METADATA` tells stock Orbax to look for it."""
    if json.loads((item / "_METADATA").read_bytes())["use_ocdbt"]:
        kvstore: Any = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"}
    else:
        kvstore = f"file://{item}/{name}/"
    spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
    return np.asarray(ts.open(spec).result().read().result())


@pytest.fixture
def item(tmp_path: Path) -> Path:
    ucp.CheckpointHandler().save(tmp_path / "c", ucp.args.Save(TREE))
    return tmp_path / "c"


@pytest.mark.parametrize("file", ["w/zarr.json", "ucp.index", "manifest.ocdbt"])
def test_no_flipped_bit_makes_another_array_of_it(item, file):
    data, draw = (item / file).read_bytes(), random.Random(0)
    bits = range(8 * len(data))
    for bit in bits if len(bits) <= SAMPLE else draw.sample(bits, SAMPLE):
        flipped = data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        (item / file).write_bytes(flipped)
        try:
            found = read_as_stock(item, "w")
        except ValueError:
            continue
        np.testing.assert_array_equal(found, TREE["w"], err_msg=f"bit {bit}")


def test_stock_reads_every_array_by_the_index_and_zarr_s_readers_by_its_directory(item):
    for name, want in TREE.items():
        np.testing.assert_array_equal(read_as_stock(item, name), want)
        array = ts.open({"driver": "zarr3", "kvstore": f"file://{item}/{name}/"}).result()
        plain = array.read().result()
        np.testing.assert_array_equal(np.asarray(plain), want)


def test_a_tree_without_arrays_has_no_index(tmp_path):
    ucp.CheckpointHandler().save(tmp_path / "c", ucp.args.Save({"a": "text", "b": None}))
    assert not (tmp_path / "c" / "ucp.index").exists()
    assert ucp.open(tmp_path / "c").restore() == {"a": "text", "b": None}


def test_more_chunks_than_an_index_can_hold_have_none(tmp_path, monkeypatch):
    """Stock then finds the arrays by their directories."""
    monkeypatch.setattr(packs, "MAX_ENTRIES", 4)
    ucp.CheckpointHandler().save(tmp_path / "c", ucp.args.Save(TREE))
    assert not (tmp_path / "c" / "ucp.index").exists()
    for name, want in TREE.items():
        np.testing.assert_array_equal(read_as_stock(tmp_path / "c", name), want)
