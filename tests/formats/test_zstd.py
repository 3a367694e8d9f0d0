"""Frames of zstandard inflate to what they were, in memory that what is there bounds."""

import tracemalloc

import pytest
import zstandard

from jax_ucp.codecs.zstd import PIECE_BYTES, inflate
from jax_ucp.errors import CorruptData


def peak_of(call) -> int:
    """The most bytes that Python objects took during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 5]
)
def test_a_frame_inflates_to_what_was_deflated_and_to_no_byte_more_than_is_allowed(size):
    data = bytes(range(251)) * (size // 251 + 1)
    frame = zstandard.compress(data[:size])
    assert inflate(frame, size) == data[:size]
    assert inflate(frame, size + 1) == data[:size]
    if size:
        with pytest.raises(CorruptData, match=f"more than the {size - 1} bytes"):
            inflate(frame, size - 1)


def test_a_size_that_is_declared_and_not_there_takes_no_memory():
    frame = zstandard.compress(b"few")
    assert peak_of(lambda: inflate(frame, 1 << 50)) < 4 * PIECE_BYTES


def test_a_frame_that_inflates_a_thousandfold_stops_where_its_tensor_ends():
    bomb = zstandard.compress(bytes(256 << 20))
    assert len(bomb) < 64 << 10

    def refused():
        with pytest.raises(CorruptData, match="inflates to more than"):
            inflate(bomb, PIECE_BYTES)

    assert peak_of(refused) < 8 * PIECE_BYTES


def test_what_is_no_frame_is_refused():
    with pytest.raises(CorruptData, match="cannot be inflated"):
        inflate(b"no frame at all", 100)
