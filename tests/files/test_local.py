"""Files of the local disk, paths in them, and ranges of their bytes."""

import errno
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import boxes_in
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files import strided
from jax_ucp.files.local import LocalFiles
from jax_ucp.files.path import FilePath, file_path
from jax_ucp.files.protocol import RangeRead, file_size, read_file
from jax_ucp.files.ranges import EDGE_BYTES, EdgesInMemory, FileRange, MemoryRange
from jax_ucp.files.strided import GAP_BYTES, WINDOW_BYTES, StridedRead, read_strided
from jax_ucp.layout.box import Box


def test_files_are_listed_by_name_with_their_sizes(tmp_path):
    (tmp_path / "b").write_bytes(b"12")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c").write_bytes(b"1")
    files = LocalFiles(tmp_path)
    listed = [(file.name, file.kind, file.size) for file in files.list()]
    assert listed == [("a", "folder", 0), ("b", "file", 2)]
    assert [file.name for file in files.walk()] == ["a/c", "b"]
    assert (file_size(files, "b"), file_size(files, "a"), file_size(files, "d")) == (2, None, None)
    assert (read_file(files, "a/c"), read_file(files, "a")) == (b"1", None)
    assert read_file(files.join("a"), "c") == b"1"


@pytest.mark.parametrize("change", ["replaced", "written", "cut short"])
def test_a_file_that_changed_since_it_was_looked_at_is_not_read(tmp_path, change):
    path = tmp_path / "f"
    path.write_bytes(b"abcd")
    files = LocalFiles(tmp_path)
    file = files.stat("f")
    assert file is not None
    if change == "replaced":
        (tmp_path / "g").write_bytes(b"abcd")
        os.replace(tmp_path / "g", path)
    elif change == "written":
        path.write_bytes(b"abce")
        os.utime(path, ns=(1, 1))
    else:
        os.truncate(path, 3)
    with pytest.raises(CorruptData, match="has changed"):
        files.read_into([RangeRead(file, 0, np.empty(4, np.uint8))])


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a//b", "a\0b"])
def test_a_path_from_text_that_leads_out_is_refused(tmp_path, name):
    with pytest.raises(FormatError, match="is not a name of a file inside"):
        file_path(tmp_path) / name


def linked(tmp_path: Path) -> Path:
    """A folder with links out of it, and a folder and a link to it beside."""
    for name in ("folder", "folder/sub", "folder/sub/deep", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(name.encode())
    folder = tmp_path / "folder"
    (folder / "link").symlink_to("../other/file")
    (folder / "dir").symlink_to("../other")
    (folder / "sub" / "up").symlink_to("../file")
    (folder / "sub" / "deep" / "out").symlink_to("../../../other/file")
    (folder / "hard").hardlink_to(tmp_path / "other" / "file")
    (tmp_path / "named").symlink_to("folder")
    return folder


@pytest.mark.parametrize("name", ["link", "dir", "dir/file", "dir/none", "sub/deep/out"])
@pytest.mark.parametrize("named", ["folder", "named", "folder/file"])
def test_a_link_out_of_the_named_folder_is_refused_whatever_is_asked(tmp_path, name, named):
    linked(tmp_path)
    folder = file_path(tmp_path / named)
    folder = folder.parent if named == "folder/file" else folder
    questions = [
        FilePath.info, FilePath.exists, FilePath.is_file, FilePath.is_dir, FilePath.size,
        FilePath.read_bytes, FilePath.read_pointer, FilePath.file, FileRange,
        lambda path: folder.folder().stat(name),
    ]  # fmt: skip
    for question in questions:
        with pytest.raises(FormatError, match=r"is a link to .*other.*, outside the checkpoint"):
            question(folder / name)
    listed = {info.name: info.kind for info in folder.folder().list()}
    assert (listed["link"], listed["dir"], listed["sub"]) == ("other", "other", "folder")


def test_links_inside_a_named_folder_and_what_is_named_itself_are_followed(tmp_path):
    folder = linked(tmp_path)
    for named in (folder, tmp_path / "named"):
        opened = file_path(named)
        assert (opened / "sub" / "up").read_bytes() == b"folder"
        assert (opened / "sub").folder().find("up") is not None  # the boundary is what was named
        assert (opened / "hard").read_bytes() == b"other"
    assert file_path(folder / "link").read_bytes() == b"other"
    assert (file_path(folder / "dir") / "file").read_bytes() == b"other"
    with pytest.raises(FormatError, match="outside the checkpoint"):
        (file_path(folder / "sub") / "up").read_bytes()
    with pytest.raises(FormatError, match="outside the checkpoint"):  # beside what was named
        (file_path(folder / "sub" / "file").parent.parent / "link").read_bytes()


def test_a_folder_that_becomes_a_link_after_it_was_looked_at_leads_nowhere_else(tmp_path):
    """The file is the same by size, time and inode: a hard link that lies outside, too."""
    folder = linked(tmp_path)
    path = file_path(folder) / "sub" / "file"
    file = path.file()
    assert path.read_bytes() == b"folder/sub"
    (tmp_path / "other" / "sub").mkdir()
    (tmp_path / "other" / "sub" / "file").hardlink_to(folder / "sub" / "file")
    (folder / "sub").rename(tmp_path / "gone")
    (folder / "sub").symlink_to("../other/sub")
    with pytest.raises(FormatError, match="outside the checkpoint"):
        path.files.read_into([RangeRead(file, 0, np.empty(file.size, np.uint8))])


def test_a_file_that_becomes_a_fifo_is_not_waited_for(tmp_path):
    (tmp_path / "f").write_bytes(b"1")
    files = LocalFiles(tmp_path)
    file = files.stat("f")
    assert file is not None
    (tmp_path / "f").unlink()
    os.mkfifo(tmp_path / "f")
    with pytest.raises(CorruptData, match="has changed"):
        files.read_into([RangeRead(file, 0, np.empty(1, np.uint8))])


def test_a_name_of_two_thousand_folders_is_looked_at(tmp_path):
    assert file_path(tmp_path).folder().stat("/".join("a" * 2000)) is None


@given(size=st.integers(1, 3 * EDGE_BYTES), data=st.data())
def test_bytes_are_the_same_through_edges_and_parts(tmp_path_factory, size, data):
    content = np.random.default_rng(size).bytes(size)
    path = tmp_path_factory.mktemp("f") / "f"
    path.write_bytes(content)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    for of in (FileRange(file_path(path)), MemoryRange(content)):
        assert of.read(start, stop) == content[start:stop]
        edges = EdgesInMemory(of)
        assert edges.read(start, stop) == content[start:stop]
        assert edges.read_heads([start, 0], 7) == [content[start : start + 7], content[:7]]
    inner = FileRange(file_path(path), start, stop - start)
    assert (inner.size, inner.read(0, size)) == (stop - start, content[start:stop])
    if inner.size:
        with pytest.raises(CorruptData):
            inner.read_into([(1, np.empty(inner.size, np.uint8))])


@given(data=st.data())
def test_any_box_of_any_strided_array_is_read_as_numpy_has_it(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    stored = np.arange(np.prod(shape, dtype=int), dtype=np.int16)
    stored = stored.reshape(tuple(shape[i] for i in order))
    array = stored.transpose(np.argsort(order).tolist())
    boxes = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=4))
    strides = [step // array.itemsize for step in array.strides]
    every_second = [tuple(slice(0, 2 * n, 2) for n in box.shape) for box in boxes]
    outs = [np.zeros([s.stop for s in index], np.int16)[index] for index in every_second]
    window = data.draw(st.sampled_from([4, 16, WINDOW_BYTES]))
    with mock.patch.object(strided, "WINDOW_BYTES", window):
        read = StridedRead(4, strides, boxes, outs)
        read_strided(MemoryRange(b"head" + stored.tobytes()), [read])
    for box, out in zip(boxes, outs, strict=True):
        np.testing.assert_array_equal(out, array[box.index])


@pytest.mark.parametrize(("window", "reads"), [(WINDOW_BYTES, 1), (5 * 32, 13)])
def test_columns_of_several_devices_are_one_read_of_their_rows(monkeypatch, window, reads):
    monkeypatch.setattr(strided, "WINDOW_BYTES", window)
    stored = np.random.default_rng(0).random((64, 8), np.float32)
    asked: list[tuple[int, int]] = []

    class Counted(MemoryRange):
        def read_into(self, reads):
            asked.extend((start, out.nbytes) for start, out in reads)
            super().read_into(reads)

    boxes = [Box((a, b), (a + 32, b + 4)) for a in (0, 32) for b in (0, 4)]
    outs = [np.empty((32, 4), np.float32) for _ in boxes]
    read_strided(Counted(stored.tobytes()), [StridedRead(0, (8, 1), boxes, outs)])
    assert len(asked) == reads
    ends = [start + nbytes for start, nbytes in asked]
    assert [start for start, _ in asked] == [0, *ends[:-1]]  # one after the other, nothing twice
    assert ends[-1] == stored.nbytes
    for box, out in zip(boxes, outs, strict=True):
        np.testing.assert_array_equal(out, stored[box.index])


@pytest.mark.parametrize("row", [GAP_BYTES // 8, GAP_BYTES, WINDOW_BYTES])
def test_columns_of_rows_near_and_far_apart_are_read(row):
    stored = np.random.default_rng(0).integers(0, 256, (80, row), np.uint8)
    whole = MemoryRange(stored.tobytes())
    box, out = Box((3, 5), (79, 9)), np.empty((76, 4), np.uint8)
    read_strided(whole, [StridedRead(0, (row, 1), [box], [out])])
    np.testing.assert_array_equal(out, stored[box.index])


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_is_created_once_also_where_there_are_no_hard_links(tmp_path, monkeypatch, error):
    def refused(first: str, path: str) -> None:
        raise OSError(error, os.strerror(error), path)

    monkeypatch.setattr(os, "link", refused)
    files = LocalFiles(tmp_path)
    files.create("a/ucp.json", b"first")
    with pytest.raises(FileExistsError):
        files.create("a/ucp.json", b"second")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["ucp.json"]
    assert (tmp_path / "a" / "ucp.json").read_bytes() == b"first"
