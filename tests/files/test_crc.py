"""A CRC-32 summed from parts is that of the whole, whatever the parts and their order."""

import zlib
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.files import crc
from jax_ucp.files.crc import Tally, combined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_crcs_combine_to_that_of_both(a, b):
    assert combined(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@given(st.integers(1 << 31, 1 << 45), st.integers(1 << 31, 1 << 45), st.binary(max_size=9))
def test_runs_that_are_too_long_to_be_summed_combine_in_any_grouping(b, c, data):
    """Of `a`, `b` and `c`, first two of them or last two: the lengths are beyond 32 bits."""
    crcs = [zlib.crc32(data + bytes([i])) for i in range(3)]
    first = combined(combined(crcs[0], crcs[1], b), crcs[2], c)
    assert first == combined(crcs[0], combined(crcs[1], crcs[2], c), b + c)


@given(st.binary(max_size=200), st.data())
def test_a_tally_of_any_reads_is_the_crc_and_knows_what_it_has_not_seen(data, draw):
    start = draw.draw(st.integers(0, 50))
    reads = draw.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 120)), max_size=12))
    room = bytes(start) + data + bytes(200)
    alarms = []
    expected = zlib.crc32(data) ^ draw.draw(st.sampled_from([0, 1]))
    tally = Tally(start, start + len(data), expected, lambda: alarms.append(1))
    seen = set()
    for at, length in reads:
        run, cut = memoryview(room)[at : at + length], draw.draw(st.integers(0, length))
        tally.add(at, run[:cut], run[cut:])
        seen |= set(range(at, min(at + length, len(room))))
    every = range(start, start + len(data))
    gaps = list(tally.gaps())
    assert [i for a, b in gaps for i in range(a, b)] == [i for i in every if i not in seen]
    for a, b in gaps:
        tally.add(a, memoryview(room)[a:b])
    assert list(tally.gaps()) == []
    assert tally.agrees() == (expected == zlib.crc32(data))
    assert len(alarms) == bool(data and not tally.agrees())


@given(st.binary(max_size=9000), st.binary(max_size=9000))
def test_crc32_is_that_of_zlib(a, b):
    assert crc.crc32(a) == zlib.crc32(a)
    assert crc.crc32(memoryview(b), crc.crc32(a)) == zlib.crc32(a + b)


def test_what_another_thread_added_meanwhile_leaves_no_gap(monkeypatch):
    """The rest of the bytes is summed out of memory, and not read again."""
    data = bytes(range(200))
    tally = Tally(0, 200, zlib.crc32(data))

    def meanwhile(run, before=0):
        monkeypatch.setattr(crc, "crc32", zlib.crc32)
        tally.add(50, memoryview(data)[50:100])
        return zlib.crc32(run, before)

    monkeypatch.setattr(crc, "crc32", meanwhile)
    tally.add(0, memoryview(data)[:120], memoryview(data)[120:])
    assert list(tally.gaps()) == []
    assert tally.agrees()


def test_threads_that_read_the_same_bytes_sum_each_once():
    data = bytes(range(256)) * 256
    tally = Tally(0, len(data), zlib.crc32(data))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            pool.map(
                lambda at: tally.add(at, memoryview(data)[at : at + 5000]), range(0, 65536, 700)
            )
    assert list(tally.gaps()) == []
    assert tally.agrees()
