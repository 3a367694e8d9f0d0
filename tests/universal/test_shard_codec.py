"""Files of outer chunks: what we write is what TensorStore writes, byte for byte, and is read
back box by box.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import boxes_in, tree_of_files
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData
from jax_ucp.files.local import LocalFiles
from jax_ucp.layout.blocks import Chunks, chunk_shapes, grid_boxes
from jax_ucp.layout.box import Box
from jax_ucp.universal import shard_codec as shard_file
from jax_ucp.universal.store import ZarrStore
from jax_ucp.universal.zarr_files import zarr_metadata

DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4,
]  # fmt: skip


def noise(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    values = np.random.default_rng(len(shape)).integers(-8, 8, shape)
    return (values > 0 if dtype.kind == "b" else np.asarray(values)).astype(dtype)


def stored_by_us(root: Path, array: np.ndarray, chunks: Chunks, max_bytes: int = 100) -> ZarrStore:
    """A store with the array, whose chunks were given in blocks of at most so many bytes, or one
    row of inner chunks.
    """
    store = ZarrStore(LocalFiles(root), {"w": ArrayInfo(array.shape, array.dtype)}, {"w": chunks})
    store.create("w")
    for box in grid_boxes(array.shape, chunks.outer):
        blocks = store.row_blocks("w", box, max_bytes)
        store.write("w", box, (array[block.index] for block in blocks), durable=False)
    return store


def stored_by_tensorstore(root: Path, array: np.ndarray, chunks: Chunks) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{root}/w/"},
        "metadata": zarr_metadata(ArrayInfo(array.shape, array.dtype), chunks),
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True, open=True).result().write(array).result()


def data_files(root: Path) -> dict[str, bytes]:
    files = tree_of_files(root).items()
    return {name: data for name, data in files if not name.endswith("zarr.json")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_written_as_tensorstore_writes_it(tmp_path, dtype):
    dtype = np.dtype(dtype)
    for shape in ((), (5,), (7, 9), (3, 4, 5)):
        array, chunks = noise(shape, dtype), chunk_shapes(shape, dtype.itemsize, None, 64, 128)
        ours, theirs = tmp_path / f"ours{len(shape)}", tmp_path / f"theirs{len(shape)}"
        stored_by_us(ours, array, chunks)
        stored_by_tensorstore(theirs, array, chunks)
        assert data_files(ours) == data_files(theirs)
        mine, other = (json.loads((x / "w/zarr.json").read_bytes()) for x in (ours, theirs))
        assert mine == other
        same = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{ours}/w/"}}
        read = ts.open(same, open=True).result()
        assert np.asarray(read.read().result()).tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)], ids=str)
def test_what_memory_held_before_decides_nothing(tmp_path, shape):
    """Neither whether a chunk is found damaged, nor the bits of a bool."""
    array = noise(shape, np.dtype("bool"))
    chunks = chunk_shapes(shape, 1, None, 64, 128)
    store = stored_by_us(tmp_path, array, chunks)
    out = np.empty(shape, bool)
    out.view(np.uint8)[...] = 255
    store.read_into("w", [Box.whole(shape)], [out])
    assert out.tobytes() == array.tobytes()
    (file,) = data_files(tmp_path)
    content = bytearray((tmp_path / file).read_bytes())
    content[0] ^= 1
    (tmp_path / file).write_bytes(content)
    for held in (array, ~array):
        with pytest.raises(CorruptData):
            store.read_into("w", [Box.whole(shape)], [held.copy()])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_boxes_of_any_chunks_are_read_back(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 12), max_size=3), label="shape"))
    inner = tuple(data.draw(st.integers(1, n), label="inner") for n in shape)
    outer = tuple(i * data.draw(st.integers(1, 3), label="inner chunks") for i in inner)
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    store = stored_by_us(tmp_path_factory.mktemp("any"), array, Chunks(outer, inner))
    boxes = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=4), label="boxes")
    outs = [np.full(box.shape, -1, np.int32) for box in boxes]
    # Larger files are not read whole, and their index may be longer than an inner chunk.
    with pytest.MonkeyPatch.context() as patch:
        sizes = st.sampled_from([0, shard_file.WHOLE_BYTES])
        patch.setattr(shard_file, "WHOLE_BYTES", data.draw(sizes, label="whole"))
        store.read_into("w", boxes, outs)
    for box, out in zip(boxes, outs, strict=True):
        np.testing.assert_array_equal(out, array[box.index])
        np.testing.assert_array_equal(store.read("w", box), array[box.index])
    np.testing.assert_array_equal(store.read("w", Box.whole(shape)), array)
    for box in grid_boxes(shape, outer):
        whole = ZarrStore(store.directory, {"w": store.arrays()["w"]}, {"w": store.chunks["w"]})
        whole.write("w", box, [array[box.index]], durable=False)
        assert whole.written == {"w": {str(box): store.written["w"][str(box)]}}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_tiles_are_read_back_however_many_go_together_and_wherever_takers_part(
    tmp_path_factory, data
):
    inner, dtype = (2, 3), np.dtype(np.int32)
    rows, columns = (data.draw(st.integers(1, n), label="tiles") for n in (3, 6))
    array = np.arange(rows * columns * 6, dtype=dtype).reshape(rows * 2, columns * 3)
    chunks = Chunks((2 * data.draw(st.integers(1, rows), label="outer"), columns * 3), inner)
    store = stored_by_us(tmp_path_factory.mktemp("tiles"), array, chunks)
    parts = 3 * data.draw(st.integers(0, columns), label="parts")
    boxes = [Box((0, 0), (rows * 2, parts)), Box((0, parts), array.shape)]
    boxes = [box for box in boxes if box.size]
    outs = [np.full(box.shape, -1, dtype) for box in boxes]
    together = data.draw(st.integers(1, 8), label="together")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "WHOLE_BYTES", 0)
        nbytes = together * shard_file.chunk_bytes(chunks, dtype)
        patch.setattr(shard_file, "LOCAL_BATCH_BYTES", nbytes)
        store.read_into("w", boxes, outs)
    for box, out in zip(boxes, outs, strict=True):
        np.testing.assert_array_equal(out, array[box.index])
