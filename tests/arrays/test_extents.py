"""Tables of stored arrays: any box of any array is numpy's, and checksums see all bytes once."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.arrays.checks import checks_of, verdicts, watching
from jax_ucp.arrays.extents import ExtentTable, Region, StoredArray, StoredFile, SummedArrays
from jax_ucp.arrays.protocol import ArrayInfo
from jax_ucp.errors import CorruptData
from jax_ucp.files.path import file_path
from jax_ucp.files.ranges import MemoryRange
from jax_ucp.layout.box import Box

PATH = file_path("/there/x.bin")
DTYPES = ("float32", "complex64", "int8", "uint16", "float64", "bool")


@st.composite
def stored(draw):
    """An array of a file, and what numpy says it is: a strided view of its bytes."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    axes = draw(st.permutations(range(len(shape))))
    steps = [1] * len(shape)
    for done, axis in enumerate(axes):
        before = math.prod(max(1, shape[i]) for i in axes[:done])
        steps[axis] = before * draw(st.sampled_from([1, 1, 2])) if done else 1
        if done and steps[axis] < max(steps[i] * max(1, shape[i]) for i in axes[:done]):
            steps[axis] = max(steps[i] * max(1, shape[i]) for i in axes[:done])
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True) if n)
    offset = draw(st.integers(0, 9))
    data = draw(st.binary(min_size=offset + extent * dtype.itemsize, max_size=offset + extent * 16))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    swapped = draw(st.booleans())
    order = dtype.newbyteorder() if swapped else dtype
    strides = [step * dtype.itemsize for step in steps]
    array = np.ndarray(shape, order, data, offset, strides)
    file = StoredFile(PATH, MemoryRange(data), swapped)
    stored = StoredArray(file, offset, tuple(steps))
    return array, ExtentTable({"w": ArrayInfo(shape, dtype)}, {"w": stored})


@given(stored(), st.data())
def test_any_box_of_a_table_is_numpys(pair, data):
    array, table = pair
    boxes = []
    for _ in range(data.draw(st.integers(1, 3))):
        edges = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in array.shape]
        boxes.append(Box(tuple(a for a, _ in edges), tuple(b for _, b in edges)))
    outs = [np.zeros(box.shape, array.dtype.newbyteorder("=")) for box in boxes]
    table.read_into("w", boxes, outs)
    for box, out in zip(boxes, outs, strict=True):
        want = array[box.index].astype(out.dtype)
        assert out.tobytes() == want.tobytes()


class Summed(ExtentTable):
    """Two arrays in one region of a file, which records its CRC."""

    def __init__(self, data: bytes, crc: int):
        self.file, self.region = StoredFile(PATH, MemoryRange(data)), Region("r", 4, 20, crc)
        infos = dict.fromkeys("ab", ArrayInfo((2,), np.dtype(np.float32)))
        places = {"a": 4, "b": 12}.items()
        stored = {key: StoredArray(self.file, at, None, self.region, "here") for key, at in places}
        super().__init__(infos, stored)

    def sums(self):
        return [SummedArrays("of a and b", 16, ["a", "b"], ["here"])]

    def regions(self, place):
        return [(self.file, self.region)]


@pytest.mark.parametrize("read", ["", "a", "ab"])
@pytest.mark.parametrize("is_sound", [True, False])
def test_a_checksum_is_compared_when_all_its_bytes_were_seen(read, is_sound):
    data = bytes(range(24))
    table = Summed(data, zlib.crc32(data[4:20]) ^ (not is_sound))
    (check,) = checks_of(table.claims(), "full")
    alarms, notes = [], []
    check.watcher.alarm, check.watcher.note = lambda: alarms.append(1), notes.append
    with watching([check.watcher]):
        for key in read:
            table.read(key, Box.whole((2,)))
    assert len(notes) == len(read)
    assert bool(alarms) == (read == "ab" and not is_sound)
    fault = check.run()
    assert (fault is None) == is_sound
    assert is_sound or "x.bin: the bytes of storage r do not have the CRC" in fault
    # what one process saw is what another need not read
    (other,) = checks_of(Summed(data, table.region.crc).claims(), "full")
    other.watcher.add(notes)
    assert (other.run() is None) == is_sound
    assert [fault is None for _, fault in verdicts(checks_of(table.claims(), "full"))] == [is_sound]


def test_a_file_that_is_too_short_is_named():
    stored = StoredArray(StoredFile(PATH, MemoryRange(bytes(8))), 0)
    table = ExtentTable({"w": ArrayInfo((9,), np.dtype(np.int8))}, {"w": stored})
    with pytest.raises(CorruptData, match=r"/there/x\.bin: bytes 0 to 9"):
        table.read("w", Box.whole((9,)))
