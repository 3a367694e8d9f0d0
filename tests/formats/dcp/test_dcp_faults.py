"""DCP checkpoints cut in every way, read back equal; and damaged ones, refused by file name."""

import gc
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA as CASES
from dcp_writer import Writer
from helpers import boxes_in, grids, open_below
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs import json_values as extras
from jax_ucp.errors import CorruptData, FormatError, LayoutError, UCPError
from jax_ucp.layout.box import Box
from torch_writer import Instance

DTYPES = (np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int64, np.uint8, np.bool_)


@st.composite
def chunkings(draw: st.DrawFn) -> dict[str, tuple[np.ndarray, list[tuple[str, Box]]]]:
    """Tensors, and for each the chunks it is stored in: (file, box)."""
    found = {}
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        bits = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, (*shape, 8), np.uint8)
        whole = np.packbits(bits, -1)[..., 0].astype(draw(st.sampled_from(DTYPES)))
        boxes = dict.fromkeys(sorted(draw(grids(shape)), key=lambda x: (-x.size, -sum(x.shape))))
        # one item lies at one offset: the largest
        first = {box.start: box for box in reversed(boxes)}
        boxes = [box for box in boxes if first[box.start].size or first[box.start] == box]
        files = st.sampled_from(("__0_0.distcp", "__1_0.distcp", "__1_1.distcp"))
        found[f"w.{i}"] = whole, [(draw(files), box) for box in draw(st.permutations(boxes))]
    return found


@given(chunkings(), st.data())
@settings(max_examples=60)
def test_any_chunks_in_any_files_are_read_back_equal(tensors, data):
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder))
        for fqn, (whole, chunks) in tensors.items():
            writer.tensor(fqn, whole, chunks)
        checkpoint = ucp.open(writer.finish())
        for fqn, (whole, _) in tensors.items():
            assert same_bits(checkpoint.read(f"param/{fqn}"), whole)
            box = data.draw(boxes_in(whole.shape))
            assert same_bits(checkpoint.read(f"param/{fqn}", box), np.asarray(whole[box.index]))
        assert [fault for _, fault in checkpoint.verify() if fault] == []


@given(chunkings(), st.data())
@settings(max_examples=40)
def test_the_tables_of_several_ranks_are_one_and_their_replicas_are_compared(tensors, data):
    """Without collectives each rank describes what it wrote; what two ranks had is there twice."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Writer(Path(folder)) for _ in range(3)]
        twice: list[tuple[str, Box]] = []
        for fqn, (whole, chunks) in tensors.items():
            owners = [data.draw(st.sets(st.integers(0, 2), min_size=1)) for _ in chunks]
            for rank, writer in enumerate(ranks):
                mine = [box for (_, box), by in zip(chunks, owners, strict=True) if rank in by]
                own = [(f"__{rank}_0.distcp", box) for box in mine]
                ordered = sorted(own, key=lambda one: sum(one[1].shape))
                if own := {box.start: (file, box) for file, box in ordered}:
                    writer.tensor(fqn, whole, own.values())
            both = zip(chunks, owners, strict=True)
            twice += [(fqn, box) for (_, box), by in both if box.size and len(by) > 1]
        for rank, writer in enumerate(ranks):
            writer.finish(f"__{rank}.metadata")
        checkpoint = ucp.open(folder)
        for fqn, (whole, _) in tensors.items():
            assert same_bits(checkpoint.read(f"param/{fqn}"), whole)
        assert [fault for _, fault in checkpoint.verify() if fault] == []
        for fqn, box in twice[:1]:
            other = Writer(Path(folder) / "other")
            whole = np.array(tensors[fqn][0])
            whole[box.index] = whole[box.index] == 0  # 0 becomes 1, and anything else 0
            change_replica(checkpoint, fqn, box, np.asarray(whole[box.index]), other)
            faults = [fault for what, fault in ucp.open(folder).verify() if what == f"param/{fqn}"]
            faults = [fault for fault in faults if fault]
            assert "which should be replicas" in faults[0]


def change_replica(checkpoint: ucp.Checkpoint, fqn: str, box: Box, value, scratch: Writer):
    """Write `value` in place of one copy of `box`, as an item that is whole in itself."""
    piece = next(piece for piece in checkpoint.where(f"param/{fqn}") if piece.target == box)
    start = int(piece.item.rpartition("@")[2])
    scratch.item(fqn, "one", box.start, value)
    item, path = (scratch.folder / "one").read_bytes(), Path(checkpoint.path) / piece.file
    data = path.read_bytes()
    path.write_bytes(data[:start] + item + data[start + len(item) :])


# What is refused.


def faults_of(folder: Path) -> list[str]:
    """What opening or verifying says is wrong."""
    try:
        return [fault for _, fault in ucp.open(folder).verify() if fault]
    except UCPError as error:
        return [str(error)]


def test_the_metadata_of_a_rank_of_another_run_is_refused(copy_of):
    folder = copy_of("torch/dcp_no_collectives")
    writer = Writer(folder.parent / "other")
    whole = Box((0, 0), (2, 2))
    writer.tensor("output.weight", np.zeros((2, 2), np.float32), [("__1_0.distcp", whole)])
    shutil.copy(writer.finish("__1.metadata") / "__1.metadata", folder)
    words = r"__1\.metadata: output\.weight is .* files of different saves are in the folder"
    with pytest.raises(FormatError, match=words):
        ucp.open(folder)


def contents(folder: Path) -> dict[str, tuple]:
    checkpoint = ucp.open(folder)
    read = checkpoint.read
    return {x.label: (x.shape, x.dtype, read(x.label).tobytes()) for x in checkpoint.leaves}


@pytest.mark.parametrize("case", ["old_v260", "dcp_objects", "dcp_no_collectives", "dcp_noflatten"])
def test_a_bit_of_the_metadata_is_refused_harmless_or_part_of_a_name(case):
    """Names that are written once are what nothing else says: a changed one is another name."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(CASES / "torch" / case / "ckpt", Path(parent) / "c"))
        file = folder / (".metadata" if case != "dcp_no_collectives" else "__0.metadata")
        data, want, refused = file.read_bytes(), contents(folder), 0
        for at in rng.choice(len(data), 300, replace=False):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.integers(8)
            file.write_bytes(changed)
            if faults_of(folder):
                refused += 1
            elif (found := contents(folder)) != want:
                assert set(found.values()) == set(want.values())
                # one step of a path: one string, written once
                assert case in ("dcp_no_collectives", "dcp_noflatten")
        assert refused > 240


WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)
LEFT, RIGHT = Box((0, 0), (4, 3)), Box((0, 3), (4, 6))


@pytest.fixture
def writer(tmp_path) -> Writer:
    writer = Writer(tmp_path / "c")
    writer.tensor("w", WHOLE, [("__0_0.distcp", LEFT), ("__1_0.distcp", RIGHT)])
    return writer


def test_chunks_that_overlap_or_leave_a_hole_are_shown(writer):
    wide = Box((0, 2), (4, 6))
    writer.declare("w", WHOLE.dtype, WHOLE.shape, [LEFT, wide])
    writer.item("w", "__1_0.distcp", wide.start, WHOLE[wide.index])
    with pytest.raises(FormatError, match=r"has bytes of 'w' at \(0, 3\), where it has no chunk"):
        ucp.open(writer.finish())
    writer.storage = {i: info for i, info in writer.storage.items() if i.state["offset"] != (0, 3)}
    with pytest.raises(LayoutError, match=r"(?s)c: param.w: .*overlap: .*"):
        ucp.open(writer.finish())
    narrow = Box((0, 3), (4, 5))
    writer.declare("w", WHOLE.dtype, WHOLE.shape, [LEFT, narrow])
    writer.storage = {i: info for i, info in writer.storage.items() if i.state["offset"] == (0, 0)}
    writer.item("w", "__1_0.distcp", narrow.start, WHOLE[narrow.index])
    with pytest.raises(LayoutError, match=r"(?s)c: param.w: .*hole: .*"):
        ucp.open(writer.finish())


def test_a_chunk_that_no_file_holds_is_refused(writer):
    writer.storage = {i: info for i, info in writer.storage.items() if i.state["offset"] == (0, 0)}
    with pytest.raises(FormatError, match=r"w: the chunk \[4, 3\] at \[0, 3\] is in no file"):
        ucp.open(writer.finish())


def test_items_that_share_bytes_are_refused(writer):
    writer.declare("v", WHOLE.dtype, (4, 3), [Box((0, 0), (4, 3))])
    writer.place("v", (0, 0), "__0_0.distcp", 8, 100)
    with pytest.raises(FormatError, match=r"__0_0\.distcp: .* of v, from 8, overlap those of w"):
        ucp.open(writer.finish())


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 3), np.int64), ((4, 3), np.float16), ((3, 4), np.float32)]
)
def test_an_item_that_is_no_declared_chunk_is_found_by_a_read_and_verify(writer, shape, dtype):
    writer.declare("v", np.dtype(np.float32), (4, 3), [Box((0, 0), (4, 3))])
    writer.item("v", "__1_0.distcp", (0, 0), np.zeros(shape, dtype))
    checkpoint = ucp.open(writer.finish())
    with pytest.raises(CorruptData, match=r"__1_0\.distcp:v@\d+ should be float32 \[4, 3\]"):
        checkpoint.read("param/v")
    assert any("should be float32 [4, 3]" in (fault or "") for _, fault in checkpoint.verify())


@given(st.permutations(range(20)), st.sets(st.integers(0, 19), max_size=3), st.booleans())
@settings(max_examples=20)
def test_a_damaged_item_is_refused_when_read_and_those_beside_it_are_read(order, damaged, header):
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder))
        arrays = {i: np.full((3, 4 + i % 2), i, np.float32) for i in range(20)}
        for i, array in arrays.items():
            writer.tensor(f"w.{i}", array, [("__0_0.distcp", Box.whole(array.shape))])
        spans = {index.state["fqn"]: info.state for index, info in writer.storage.items()}
        file = writer.folder / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        for i in damaged:  # where its zip file begins, or ends
            about = spans[f"w.{i}"]
            at = about["offset"] if header else about["offset"] + about["length"] - 8
            content[at : at + 4] = b"\0\0\0\0"
        file.write_bytes(content)
        checkpoint = ucp.open(writer.finish())
        for i in order:
            if i in damaged:
                with pytest.raises(FormatError, match=r"__0_0\.distcp"):
                    checkpoint.read(f"param/w.{i}")
            else:
                assert same_bits(checkpoint.read(f"param/w.{i}"), arrays[i])


def test_items_that_are_opened_together_hold_no_descriptor(writer):
    for i in range(40):
        writer.tensor(f"v.{i}", WHOLE, [("__0_0.distcp", Box.whole(WHOLE.shape))])
    folder = writer.finish()
    checkpoint = ucp.open(folder)
    for i in range(40):
        assert same_bits(np.array(checkpoint.read(f"param/v.{i}")), WHOLE)
    gc.collect()
    assert open_below(folder) == []


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/etc/passwd", "a\\b", "C:x", "", ".", "..", "a\0b"]
)
def test_a_file_name_that_leads_elsewhere_is_refused(writer, name):
    writer.declare("v", np.dtype(np.uint8), (1,), [Box((0,), (1,))])
    writer.place("v", (0,), name, 0, 1)
    with pytest.raises(FormatError, match="which is not a plain file name"):
        ucp.open(writer.finish())


@pytest.mark.parametrize(("shape", "boxes", "message"), [
    ((0, 6), [Box((0, 0), (0, 5))], r"w has shape \[0, 6\], but its chunks end elsewhere on axis 1"),
    ((4, 6), [], r"w has shape \[4, 6\], but by the metadata no chunk of it is in any file"),
    ((4,), [Box((0, 0), (4, 6))], r"w has shape \[4\], but a chunk of \[4, 6\] at \[0, 0\]"),
    ((-1,), [], r"w: \(-1,\) is not a shape"),
    ((1 << 40, 1 << 40), [], "is not a shape"),
    ((4, 6), [LEFT, Box((0, 3), (4, 7))], "outside the array"),
])  # fmt: skip
def test_shapes_that_cannot_be_are_refused(tmp_path, shape, boxes, message):
    writer = Writer(tmp_path / "c")
    writer.declare("w", WHOLE.dtype, shape, boxes)
    for i, box in enumerate(boxes):
        writer.item("w", f"__{i}_0.distcp", box.start, np.zeros(box.shape, np.float32))
    with pytest.raises((FormatError, LayoutError), match=message):
        ucp.open(writer.finish())


def test_objects_that_ask_for_code_or_are_made_of_data_are_left_out_and_noted(writer, monkeypatch):
    writer.object("lr", "__0_0.distcp", {"lr": 0.5})
    writer.object("run", "__0_0.distcp", {"step": 3, "hook": Instance("os.system", {})})
    writer.object("buffer", "__1_0.distcp", [np.zeros(100, np.float32)])
    monkeypatch.setattr(extras, "MAX_EXTRA_BYTES", 399)
    checkpoint = ucp.open(writer.finish())
    assert checkpoint.extras == {"__0_0.distcp": {"lr": {"lr": 0.5}}}
    hook, data, _ = checkpoint.notes
    assert "run was left out" in hook
    assert "os.system" in hook
    assert "buffer in __1_0.distcp was left out: an object with 400 bytes of tensors" in data
    items = [item for item in checkpoint.inventory if "distcp:" in item.where]
    reasons = {item.where.partition("@")[0]: item.status for item in items}
    assert reasons["__0_0.distcp:run"] == reasons["__1_0.distcp:buffer"] == "skipped"


@pytest.mark.parametrize(("paths", "message"), [
    ({"w": ("model", "v")}, "'w' was at \\('model', 'v'\\), which has another flattened name"),
    ({"v": ("v",)}, "'w' is not in planner_data"),
])  # fmt: skip
def test_paths_that_contradict_the_names_are_refused(writer, paths, message):
    writer.paths = paths
    with pytest.raises(FormatError, match=message):
        ucp.open(writer.finish())


def test_paths_of_what_was_not_stored_are_no_harm(writer):
    writer.paths = {"w": ("w",), "loader.rank_1": ("loader", "rank_1")}
    assert list(ucp.open(writer.finish())) == ["param/w"]


def test_one_ranks_items_are_refused_by_themselves():
    with pytest.raises(FormatError, match=r"distcp holds one rank's items .*: open its folder"):
        ucp.open(CASES / "torch" / "old_v1131" / "ckpt" / "__0_0.distcp")
