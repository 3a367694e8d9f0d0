import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.errors import CorruptData
from jax_ucp.files import read_ahead
from jax_ucp.files.local import LocalFiles
from jax_ucp.files.protocol import RangeRead
from jax_ucp.files.read_ahead import ReadAhead

SIZE = 5000


class Counted(LocalFiles):
    reads = 0

    def read_into(self, reads) -> None:
        self.reads += len(reads)
        super().read_into(reads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "pack").write_bytes(np.random.default_rng(0).bytes(SIZE))
    return folder


def ahead(folder) -> tuple[ReadAhead, Counted]:
    files = Counted(folder)
    return ReadAhead(files, files.stat("pack")), files


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 700)), min_size=1))
def test_any_ranges_in_any_order_are_the_bytes_of_the_file(folder, ranges):
    want, (reader, _) = (folder / "pack").read_bytes(), ahead(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(read_ahead, "FIRST_BYTES", 64)
        patched.setattr(read_ahead, "MOST_BYTES", 512)
        reader._length = 64
        for start, length in ranges:
            out = np.empty(min(length, SIZE - start), np.uint8)
            reader.read_into([RangeRead(reader._file, start, out)])
            assert out.tobytes() == want[start : start + out.size]


def test_ranges_one_after_the_other_are_few_reads(folder):
    reader, files = ahead(folder)
    out = np.empty(10, np.uint8)
    for start in range(0, SIZE, 10):
        reader.read_into([RangeRead(reader._file, start, out)])
    assert files.reads == 1


def test_ranges_that_come_a_little_late_or_cross_the_end_of_a_run_are_few_reads(folder):
    """As from threads, of which each waits for a range that lies near those of the others."""
    starts = [at + late for at in range(0, SIZE, 20) for late in (10, 0)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(read_ahead, "FIRST_BYTES", 64)
        patched.setattr(read_ahead, "MOST_BYTES", 512)
        reader, files = ahead(folder)
        reader._length = 64
        for start in starts:
            reader.read_into([RangeRead(reader._file, start, np.empty(10, np.uint8))])
    assert files.reads <= 14


def test_what_lies_past_the_end_is_refused(folder):
    reader, _ = ahead(folder)
    with pytest.raises(CorruptData):
        reader.read_into([RangeRead(reader._file, SIZE - 1, np.empty(2, np.uint8))])
