"""A small file that says it is large is refused, or costs what its bytes cost."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

import jax_ucp as ucp
from cases import DATA
from commands import run
from dcp_writer import Writer
from helpers import MemoryStore, changed_json, contents_of
from hostile.files import little_memory, plain_stock, resealed, saved, stock, write_zarr
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.files.path import file_path
from jax_ucp.formats.megatron.run import Args
from jax_ucp.formats.safetensors.rank_files import require_every_rank
from jax_ucp.layout.box import Box
from jax_ucp.options import Sizes
from jax_ucp.tree import Key, Leaf, SavedSharding
from jax_ucp.universal import orbax_tree
from jax_ucp.universal.copy import plan_copy

pytestmark = pytest.mark.timeout(60)  # what has no bound runs for hours


def all_of_it(path: Path) -> None:
    """What a user does with a checkpoint, in a gibibyte."""
    with little_memory():
        checkpoint = ucp.open(path)
        checkpoint.plan_save()
        list(checkpoint.verify())
        for leaf in checkpoint.leaves:
            checkpoint.read(leaf.label)


def claim(path: Path, shape: list[int], outer: list[int], inner: list[int], digests=1) -> Path:
    """A universal checkpoint of six numbers that says it has others."""

    def change(content: dict) -> None:
        (leaf,) = content["leaves"]
        leaf["shape"] = shape
        content["arrays"]["a"] |= {"outer": outer, "inner": inner, "digests": ["0" * 16] * digests}

    return resealed(saved(path, {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}), change)


@pytest.mark.parametrize(("shape", "outer", "inner"), [
    ([10**8, 3],     [1, 3],         [1, 3]),  # so many chunks
    ([2**33, 3],     [2**33, 3],     [1, 3]),  # so many inner ones
    ([2**32, 2**32], [2**32, 2**32], [2**32, 2**32]),  # more bytes than any number in C
    ([2**31, 2**31], [2**31, 2**31], [2**31, 2**31]),
    ([2**62, 1],     [1, 1],         [1, 1]),
    # none at all, of a length that only itself divides
    ([0, 2**61 - 1], [1, 2**61 - 1], [1, 2**61 - 1]),
    ([2, 3],         [2**61, 3],     [2**61, 3]),  # a chunk that reaches far past the array
    ([2, 3],         [2**40, 3],     [1, 3]),
    ([2, 3],         [2, 3],         [2, 0]),
    ([2, 3],         [0, 3],         [2, 3]),
    ([2, 3],         [2, 3],         [2, 2]),
    ([2] * 40,       [2] * 40,       [2] * 40),
])  # fmt: skip
def test_ours_says_more_than_it_has(tmp_path, shape, outer, inner):
    with pytest.raises(UCPError):
        all_of_it(claim(tmp_path / "c", shape, outer, inner))


def test_ours_says_that_a_packed_array_is_elsewhere(tmp_path):
    """Packs, and places in them, that no file has."""
    for number, offset in ((0, 2**62), (2**61, 0), (0, 2**40)):
        path = saved(tmp_path / f"{number}-{offset}", {"a": np.arange(6, dtype=np.float32)})
        resealed(path, lambda text, at=(number, offset): text["arrays"]["a"].update(places=[at]))
        (path / "ucp.pack_0").write_bytes(bytes(28))
        with pytest.raises(UCPError):
            all_of_it(path)


def test_ours_says_that_a_mesh_has_devices_without_end(tmp_path):
    """For stock Orbax a conversion lists the devices of each leaf."""
    mesh = {"axis_names": ["x", "y"], "axis_sizes": [2**31, 2**31], "spec": ["x"], "device_ids": []}
    path = saved(tmp_path / "c", {"a": np.ones(4, np.float32)})
    resealed(path, lambda content: content["leaves"][0].update(sharding=0))
    resealed(path, lambda content: content["shardings"].append(mesh))
    with pytest.raises(FormatError, match="a mesh of 4611686018427387904 devices"):
        all_of_it(path)


@pytest.mark.parametrize(("metadata", "about"), [
    ({"shape": [2**60], "chunks": [2**20]}, {}),  # all of it a fill value
    ({"shape": [2**60], "chunks": [2**20]}, {"store_array_data_equal_to_fill_value": True}),
    ({"shape": [2**31, 2**31], "chunks": [1, 2**31]}, {}),
    ({"shape": [2**32, 2**32], "chunks": [2**32, 2**32]}, {}),
    ({"shape": [2**40], "chunks": [2**40], "compressor": None}, {}),
    ({"shape": [4], "chunks": [2**50]}, {}),  # a chunk that is larger than the array
])  # fmt: skip
def test_stock_s_metadata_say_more_than_is_stored(tmp_path, metadata, about):
    with pytest.raises(UCPError):
        all_of_it(plain_stock(tmp_path / "c", {"a": metadata}, **about))


def test_many_arrays_of_stock_that_are_nothing_but_fill_values(tmp_path):
    """Each is small enough; all of them together are not."""
    arrays = {f"a{i}": {"shape": [1 << 24], "chunks": [1 << 24]} for i in range(40)}
    with pytest.raises(FormatError, match="says that its arrays have"):
        all_of_it(plain_stock(tmp_path / "c", arrays))


def test_fill_values_of_a_moderate_size_are_read(tmp_path):
    """Older versions of Orbax leave out chunks of zeros: a fresh optimizer has nothing else."""
    path = plain_stock(tmp_path / "c", {"a": {"shape": [1 << 20], "chunks": [1 << 18]}})
    assert not ucp.open(path).read("a").any()


@pytest.mark.parametrize("compressor", ["zstd", "zlib", "bz2", "blosc"])
def test_a_chunk_that_inflates_to_more_than_its_size_takes_no_memory_for_it(tmp_path, compressor):
    bomb = np.zeros(1 << 29, np.uint8)  # 512 MiB
    how = {"cname": "lz4", "clevel": 5, "shuffle": 1} if compressor == "blosc" else {"level": 1}
    config = {"id": compressor, **how}
    array = {"shape": [6], "chunks": [6], "dtype": "|u1", "compressor": config}
    path = plain_stock(tmp_path / "c", {"a": array})
    write_zarr(tmp_path / "big", bomb, compressor=config)
    shutil.copy(tmp_path / "big" / "0", path / "a" / "0")
    with little_memory(256 << 20), pytest.raises(UCPError):
        ucp.open(path).read("a")


def test_every_stored_chunk_is_decoded_once_however_small_the_budget(tmp_path, monkeypatch):
    """A device's shard is one chunk to stock; blocks are smaller, and none is of two chunks
    where chunks fit.
    """
    data = np.arange(4 << 20, dtype=np.float32).reshape(2048, 2048)
    path = plain_stock(tmp_path / "c", {"a": {"shape": [2048, 2048], "chunks": [2048, 1024]}})
    write_zarr(path / "a", data, chunks=[2048, 1024])
    opened: list[object] = []
    open_array = ts.open

    def noted(*args, **more):
        opened.append(more)
        return open_array(*args, **more)

    monkeypatch.setattr(ts, "open", noted)
    copy = ucp.open(path).save(tmp_path / "out", budget_bytes=1 << 20)
    assert len(opened) == 1 + 2  # once as it is, and once with a cache for each chunk
    np.testing.assert_array_equal(copy.restore()["a"], data)


class Chunked(MemoryStore):
    """Arrays that are stored in chunks."""

    def __init__(self, data: Mapping[str, np.ndarray], chunk: tuple[int, ...]):
        super().__init__(data)
        self.chunk = chunk

    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {key: ArrayInfo(a.shape, a.dtype, self.chunk) for key, a in self.data.items()}


def test_a_plan_counts_the_stored_chunk_that_a_block_is_a_part_of():
    """Decoded, and as it is stored. Blocks of one chunk follow one another, none is of two."""
    contents = contents_of({"param": {"a": np.zeros((4096, 4096), np.float32)}})
    zeros = {leaf.name: np.zeros(leaf.shape, leaf.dtype) for leaf in contents.leaves}
    chunked = Chunked(zeros, (4096, 2048))
    plan = plan_copy(replace(contents, arrays=chunked), budget_bytes=1 << 20)
    assert plan.peak_bytes >= 2 * 4096 * 2048 * 4
    boxes = [block.box for block in plan.blocks]
    columns = [(box.start[1] // 2048, (box.stop[1] - 1) // 2048) for box in boxes]
    assert columns == sorted(columns)
    assert all(first == last for first, last in columns)


@pytest.mark.parametrize("sizes", [(2**31, 2**31), (2**40, 1), (100, 100)])
def test_dcp_says_that_an_item_holds_more_than_its_bytes(tmp_path, sizes):
    writer = Writer(tmp_path / "c")
    whole = Box((0, 0), sizes)
    writer.declare("w", np.dtype(np.float32), sizes, [whole])
    writer.item("w", "__0_0.distcp", (0, 0), np.zeros((2, 3), np.float32))
    with pytest.raises(FormatError, match=r"but the item of it in __0_0\.distcp has"):
        all_of_it(writer.finish())


@pytest.mark.parametrize("shape", [(2**32, 2**32), (2**62, 1), (-1, 4), (0, 2**62), (1,) * 33])
def test_no_array_of_any_format_has_a_shape_that_cannot_be(shape):
    with pytest.raises(FormatError, match="no array is float32"):
        ArrayInfo(shape, np.dtype(np.float32))


@pytest.mark.parametrize("shape", [[2**60], [2**30, 2**30], [10**7, 16]])
def test_megatron_s_zarray_says_more_chunks_than_there_are_files(megatron_zarr, shape):
    (array,) = megatron_zarr.glob("embedding.word_embeddings.weight/.zarray")
    changed_json(array, lambda said: said.update(shape=shape, chunks=[1] * len(shape)))
    with pytest.raises(FormatError, match="chunks, but there are"), little_memory():
        ucp.open(megatron_zarr.parent)


@pytest.fixture
def megatron_zarr(tmp_path):
    data = DATA / "megatron" / "old0153_tp2_zarr_fp32" / "ckpt"
    shutil.copytree(data, tmp_path / "ckpt")
    return next(path.parent for path in (tmp_path / "ckpt").rglob("common.pt"))


@pytest.mark.parametrize(
    "kind",
    ["tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model", "expert_tensor"],
)
def test_megatron_s_args_say_more_ranks_than_any_run_has(kind):
    with pytest.raises(FormatError, match="model-parallel ranks"):
        Args({f"{kind}_parallel_size": 10**12})
    Args({
        "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 64,
        "expert_model_parallel_size": 128,
    })  # fmt: skip


@pytest.mark.parametrize(("name", "why"), [
    ("shard-99999999999-model-00001-of-99999999999", "none has one called model-00002-of-"),
    ("shard-99999999999-model-00001-of-00001", "that of rank 1 is not there"),
])  # fmt: skip
def test_a_file_name_may_have_any_number_in_it(name, why):
    tensors = {"w": [(f"{name}.safetensors", Box.whole((2, 2)))]}
    with pytest.raises(FormatError, match=why):
        require_every_rank(file_path("folder"), tensors, Sizes({}))


def test_the_command_line_says_that_there_is_not_enough_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_ucp.cli.command.open_with", lambda *args, **more: bytearray(1 << 62))
    output = run("inspect", stock(tmp_path / "c"), code=1)
    assert output.startswith("Error: there is not enough memory")


@pytest.mark.parametrize("place", ["extras", "source"])
def test_values_of_ours_of_any_depth_are_refused(tmp_path, place):
    value: object = 1
    for _ in range(400):
        value = [value]
    path = saved(tmp_path / "c", {"a": np.ones(2, np.float32)})
    resealed(path, lambda content: content[place].update(x={"deep": value}))
    with pytest.raises(FormatError, match="nested more than"):
        ucp.open(path)


def test_a_tree_that_is_too_deep_is_refused_where_it_is_saved_and_where_it_is_opened(tmp_path):
    path = saved(tmp_path / "c", {"a": np.ones(2, np.float32)})
    resealed(path, lambda content: content["leaves"][0].update(path=["a"] * 300))
    with pytest.raises(FormatError, match="length <= 256"):
        ucp.open(path)
    hostile = stock(tmp_path / "stock")
    keys = [{"key": "a", "key_type": 2}] * 300

    def first(content):
        return next(iter(content["tree_metadata"].values()))

    changed_json(hostile / "_METADATA", lambda content: first(content).update(key_metadata=keys))
    with pytest.raises(FormatError, match="length <= 256"):
        ucp.open(hostile)
    tree: object = np.ones(2, np.float32)
    for _ in range(300):
        tree = {"a": tree}
    with pytest.raises(UCPError, match="more than 256 levels"):
        ucp.Checkpoint.of(tree)


def test_a_stored_chunk_of_a_prime_length_makes_no_chunks_of_single_elements():
    """A chunk of 100,003 rows cannot be cut evenly: the copy's chunks do not follow it."""
    contents = contents_of({"param": {"a": np.zeros((200_006, 3), np.float32)}})
    zeros = {leaf.name: np.zeros(leaf.shape, leaf.dtype) for leaf in contents.leaves}
    chunked = Chunked(zeros, (100_003, 3))
    (chunks,) = plan_copy(replace(contents, arrays=chunked), budget_bytes=1 << 20).chunks.values()
    assert math.prod(chunks.inner) > 1000


def test_the_devices_of_a_mesh_are_not_listed_for_leaves_without_end(monkeypatch):
    """Stock takes the devices that it has where none are listed."""
    sharding = SavedSharding(("x",), (4,), ("x",), (3, 2, 1, 0))
    paths = [(Key("dict", f"a{i}"),) for i in range(3)]
    leaves = [Leaf(p, p[0].name, "jax", (4,), "float32", sharding=sharding) for p in paths]
    outer = {leaf.name: (4,) for leaf in leaves}
    for most, listed in ((12, True), (11, False)):
        monkeypatch.setattr(orbax_tree, "MAX_DEVICES_LISTED", most)
        said = json.loads(orbax_tree.orbax_files(leaves, outer)["_sharding"])
        assert [("device_mesh" in json.loads(text)) for text in said.values()] == [listed] * 3
