"""What is read straight into its place equals what is read as a whole, through every view, once."""

import itertools
import math
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
import torch_writer
from helpers import MemoryStore, boxes_in, numbered
from jax_ucp.arrays.evaluate import Evaluated, expressions
from jax_ucp.arrays.gather import ALIGNMENT, read_boxes
from jax_ucp.arrays.value import Array, cut
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import CorruptData, FormatError, LayoutError
from jax_ucp.files import pread
from jax_ucp.files.pread import pread_into
from jax_ucp.files.protocol import FileInfo, RangeRead
from jax_ucp.layout.box import Box

DATA = Path(__file__).parent.parent / "data"
CASES = [
    "deepspeed/tp2_dp2_z3_bf16", "deepspeed_universal/z3_bf16_dp2_frozen_tied",
    "megatron/legacy_tp2_dp2_distopt_bf16/ckpt", "megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16/ckpt",
    "megatron/dist_tp2_dp2_distopt_fully_reshardable_bf16/ckpt", "megatron/old0153_tp2_zarr_fp32/ckpt",
    "torch/fsdp2_tp_2x2/ckpt", "torch/dcp_zstd/ckpt", "torch/hf_llama/ckpt", "torch/torchsave/trainer.pt",
]  # fmt: skip
_FILE = FileInfo("file", 250, "")


def halves(box: Box, axis: int) -> list[Box]:
    middle = box.start[axis] + (box.stop[axis] - box.start[axis]) // 2
    first = Box(box.start, (*box.stop[:axis], middle, *box.stop[axis + 1 :]))
    return [first, Box((*box.start[:axis], middle, *box.start[axis + 1 :]), box.stop)]


@pytest.mark.parametrize("case", CASES)
def test_boxes_read_into_their_places_are_those_of_the_whole(case):
    checkpoint = ucp.open(DATA / case)
    source = checkpoint._contents.arrays
    rng = np.random.default_rng(0)
    for leaf in checkpoint.leaves:
        whole = Box.whole(leaf.shape)
        want = np.array(source.read(leaf.name, whole))
        cuts = [[whole], *(halves(whole, axis) for axis in range(whole.ndim))]
        start = [int(rng.integers(0, n)) for n in leaf.shape]
        stop = [int(rng.integers(a, n)) + 1 for a, n in zip(start, leaf.shape, strict=True)]
        cuts.append([Box(tuple(start), tuple(stop))])
        for boxes in cuts:
            for box, got in zip(boxes, read_boxes(source, leaf.name, boxes), strict=True):
                assert got.tobytes() == want[box.index].tobytes(), (leaf.label, box)
                assert got.ctypes.data % ALIGNMENT == 0 or not got.size
        # A place with gaps, and one that is not in row-major order.
        wide = np.zeros((*leaf.shape, 2), want.dtype)
        turned = np.zeros(leaf.shape[::-1], want.dtype)
        source.read_into(leaf.name, [whole, whole], [wide[..., 0], turned.T])
        assert wide[..., 0].tobytes() == turned.T.tobytes() == want.tobytes(), leaf.label
        assert not wide[..., 1].any()


@given(st.data())
def test_a_tensor_of_any_strides_reads_into_any_place(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    types = np.float32, ml_dtypes.bfloat16, np.bool_
    dtype = data.draw(st.sampled_from([np.dtype(each) for each in types]))
    order = data.draw(st.permutations(range(len(shape))))
    array = numbered(shape, np.int32).astype(dtype).transpose(order)
    path = tmp_path_factory.mktemp("strided") / "file.pt"
    torch_writer.save({"w": array}, path)
    starts = [data.draw(st.integers(0, n - 1)) for n in array.shape]
    stops = [data.draw(st.integers(a + 1, n)) for a, n in zip(starts, array.shape, strict=True)]
    box = Box(tuple(starts), tuple(stops))
    room = np.zeros((*box.shape, data.draw(st.sampled_from([1, 3]))), dtype)
    TorchFile(path).read_into("w", [box], [room[..., 0]])
    np.testing.assert_array_equal(room[..., 0], array[box.index])


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.sampled_from([1, 16, 64]),
)
def test_slabs_of_rows_are_one_read_where_each_stays_aligned(columns, rows, width):
    store = MemoryStore({"w": numbered((sum(rows), columns * width), np.int8)})
    edges = [0, *np.cumsum(rows).tolist()]
    boxes = [Box((a, 0), (b, columns * width)) for a, b in itertools.pairwise(edges)]
    for box, got in zip(boxes, read_boxes(store, "w", boxes), strict=True):
        np.testing.assert_array_equal(got, store.data["w"][box.index])
        assert got.ctypes.data % ALIGNMENT == 0
    aligned = all(box.size % ALIGNMENT == 0 for box in boxes)
    assert len(store.reads) == (1 if aligned else len(boxes))
    store.reads.clear()
    for box, got in zip(boxes[::-1], read_boxes(store, "w", boxes[::-1]), strict=True):
        np.testing.assert_array_equal(got, store.data["w"][box.index])


@pytest.mark.parametrize("case", ["deepspeed/tp2_dp2_z3_bf16", "torch/fsdp2_tp_2x2/ckpt"])
def test_what_lies_in_runs_is_read_from_the_files_once_and_no_more(case, monkeypatch):
    checkpoint = ucp.open(DATA / case)
    read, preadv = [], os.preadv

    def counted(handle, rooms, offset):
        count = preadv(handle, rooms, offset)
        read.append(count)
        return count

    arrays = checkpoint._contents.arrays
    leaves = [leaf for leaf in checkpoint.leaves if leaf.path[0].name != "step"]
    for leaf in leaves:  # opens the items of DCP, each of which is a file with a directory
        arrays.read(leaf.name, Box.whole(leaf.shape))
    monkeypatch.setattr(os, "preadv", counted)
    needed = 0
    for leaf in leaves:
        (got,) = read_boxes(arrays, leaf.name, [Box.whole(leaf.shape)])
        needed += got.nbytes
    assert sum(read) == needed


def cut_of(store: MemoryStore, start: int, shape: tuple[int, ...], transposed=False) -> Array:
    return cut("past", expressions(store)["w"], start, shape, transposed)


@given(st.data())
def test_a_cut_of_a_tensor_is_the_run_of_its_elements_wherever_it_is_read_to_also_turned(data):
    stored = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    depth = data.draw(st.integers(0, len(stored) - 1))
    shape = data.draw(st.just(stored[depth:]) | st.tuples(st.integers(1, stored[-1])))
    size = math.prod(shape)
    start = data.draw(st.integers(0, math.prod(stored) - size))
    store = MemoryStore({"w": numbered(stored)})
    start = start - start % size if data.draw(st.booleans()) else start
    transposed = data.draw(st.booleans())
    view = Evaluated({"cut": cut_of(store, start, shape, transposed)})
    want = store.data["w"].ravel()[start : start + size].reshape(shape)
    want = want.T if transposed else want
    box = data.draw(boxes_in(want.shape))
    np.testing.assert_array_equal(view.read("cut", box), want[box.index])
    wide = np.zeros((*box.shape, 2), want.dtype)
    view.read_into("cut", [box], [wide[..., 0]])
    np.testing.assert_array_equal(wide[..., 0], want[box.index])
    assert not wide[..., 1].any()
    (got,) = read_boxes(view, "cut", [Box.whole(want.shape)])
    np.testing.assert_array_equal(got, want)
    located = np.full(want.shape, -1)
    for piece in view.locate("cut", Box.whole(want.shape)):
        elements = store.data["w"][piece.source.index]
        located[piece.target.index] = elements.reshape(piece.target.shape)
    np.testing.assert_array_equal(located, want)


def test_columns_of_a_layer_of_several_are_read_and_nothing_beside_them():
    store = MemoryStore({"w": numbered((3, 4, 8))})
    view = Evaluated({"layer": cut_of(store, 32, (4, 8))})
    got = view.read("layer", Box((1, 2), (3, 5)))
    np.testing.assert_array_equal(got, store.data["w"][1, 1:3, 2:5])
    assert store.reads == [("w", Box((1, 1, 2), (2, 3, 5)))]


def test_a_cut_that_reaches_past_its_tensor_is_refused():
    store = MemoryStore({"w": numbered((2, 3, 4))})
    assert cut_of(store, 12, (3, 4)).info.shape == (3, 4)
    for start in (-1, 13, 24):
        with pytest.raises(LayoutError, match=r"past: .* is not inside an array of 24"):
            cut_of(store, start, (3, 4))


@given(st.data())
def test_a_run_of_a_file_fills_a_place_with_gaps_in_row_major_order(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple))
    types = np.int16, ml_dtypes.bfloat16, np.int64
    dtype = data.draw(st.sampled_from([np.dtype(each) for each in types]))
    file = tmp_path_factory.mktemp("run") / "file"
    want = numbered(shape, np.int16).astype(dtype)
    file.write_bytes(b"before" + want.tobytes())
    order = data.draw(st.permutations(range(len(shape))))
    room = np.zeros((*(shape[axis] for axis in order), 2), dtype)
    out = room[..., 0].transpose(np.argsort(order))
    with pytest.MonkeyPatch.context() as patch, file.open("rb") as opened:
        patch.setattr(pread, "SCATTERED_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        pread_into(opened.fileno(), [RangeRead(_FILE, 6, out)])
    assert out.tobytes() == want.tobytes()
    assert not room[..., 1].any()


@given(st.data())
def test_neighbours_come_by_one_request_and_what_it_leaves_by_the_next(tmp_path_factory, data):
    """In any order, with gaps and without, empty ones among them."""
    path = tmp_path_factory.mktemp("neighbours") / "file"
    path.write_bytes(bytes(range(250)))
    edges = st.lists(st.integers(0, 250), min_size=2, max_size=9)
    ends = data.draw(edges.map(sorted), label="ends")
    runs = list(itertools.pairwise(ends))
    kept = data.draw(st.lists(st.sampled_from(runs), min_size=1, max_size=8), label="reads")
    reads = [RangeRead(_FILE, a, np.zeros(b - a, np.uint8)) for a, b in kept]
    most = data.draw(st.sampled_from([1, 7, 1 << 20]), label="bytes of a request")
    asked: list[int] = []

    def preadv(handle: int, rooms: list[memoryview], offset: int, real=os.preadv) -> int:
        asked.append(offset)
        return real(handle, [rooms[0][:most], *(rooms[1:] if most > 250 else [])], offset)

    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(os, "preadv", preadv)
        most = data.draw(st.sampled_from([1, 2, 1024]), label="arrays")
        patch.setattr(pread, "MOST_ARRAYS", most)
        pread_into(file.fileno(), reads)
        is_one_request = most > 250 and pread.MOST_ARRAYS > 8
    for read in reads:
        assert read.out.tobytes() == bytes(range(250))[read.start :][: len(read.out)]
    breaks = sum(b != c for (_, b), (c, _) in itertools.pairwise(kept))
    assert not is_one_request or len(asked) <= 1 + breaks


def test_a_file_that_changes_or_ends_too_soon_is_an_error(tmp_path):
    path = tmp_path / "file.pt"
    torch_writer.save({"w": numbered((64,), np.float32)}, path)
    file = TorchFile(path)
    end = RangeRead(_FILE, path.stat().st_size, np.empty(8, np.uint8))
    with path.open("rb") as opened, pytest.raises(CorruptData, match="8 bytes too soon"):
        pread_into(opened.fileno(), [end])
    torch_writer.save({"w": numbered((65,), np.float32)}, path)
    with pytest.raises(FormatError, match=r"file\.pt: the file has changed since it was opened"):
        file.read_into("w", [Box((0,), (64,))], [np.empty(64, np.float32)])
