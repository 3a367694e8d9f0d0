"""Copies to the host through pinned memory, with CPU devices taken for accelerators: JAX gives them
`pinned_host` memory too. All bits arrive, in bounded pieces, and nothing is wanted of the devices
afterwards.
"""

import threading
import time
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import mesh_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.sharding import transfer
from jax_ucp.sharding.jax_versions import enable_x64
from jax_ucp.sharding.save import describe, take_snapshot

pytestmark = pytest.mark.skipif(
    all(memory.kind != transfer.PINNED for memory in jax.devices()[0].addressable_memories()),
    reason="the CPU devices of this JAX have no pinned memory",
)
BITS = np.random.default_rng(0).integers(0, 1 << 16, (96, 40), np.uint16)
SIGNALLING = np.array([0x7F81, 0xFF81, 0x7FC1, 0x8000], np.uint16)
BITS[0, :4] = SIGNALLING
BYTES = BITS.view(np.uint8)


class Link:
    """Pinned memory that counts what is held of it, now and at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.held = self.most = self.copies = 0
        self._lock, self._real = threading.RLock(), transfer._pinned
        monkeypatch.setattr(transfer, "has_pinned", lambda device: True)
        monkeypatch.setattr(transfer, "_pinned", self._pinned)
        monkeypatch.setattr(transfer, "PINNED_FROM_BYTES", 256)
        monkeypatch.setattr(transfer, "PIECE_BYTES", 1024)
        monkeypatch.setattr(transfer, "PINNED_BYTES", 2048)

    def _pinned(self, part: jax.Array) -> jax.Array:
        with self._lock:
            self.copies += 1
            self.held += part.nbytes
            self.most = max(self.most, self.held)
        time.sleep(0.001)  # so that copies of several threads overlap
        pinned = self._real(part)
        weakref.finalize(pinned, self._given_back, part.nbytes)
        return pinned

    def _given_back(self, nbytes: int) -> None:
        with self._lock:
            self.held -= nbytes


@pytest.fixture
def link(monkeypatch) -> Link:
    return Link(monkeypatch)


@pytest.mark.parametrize(
    "want",
    [
        BITS.view(ml_dtypes.bfloat16),
        BITS.view(np.float16),
        BYTES.view(ml_dtypes.float8_e5m2),
        BYTES.view(ml_dtypes.float8_e4m3fn),
        (BYTES & 7).astype(ml_dtypes.int4),
        BITS.view(np.float32),
        BITS.view(np.float64),
        BITS.view(np.int64),
        BITS.view(np.complex64),
        BITS > 1000,
    ],
    ids=lambda want: str(want.dtype),
)
def test_every_bit_comes_through_pinned_memory_in_pieces(link, want):
    with enable_x64(True):
        array = jax.device_put(want, jax.devices()[1])
    (got,) = transfer.to_host([array])
    assert got.dtype == want.dtype
    assert same_bits(got, want)
    assert link.copies > 1


def test_what_is_held_of_pinned_memory_is_bounded_whatever_is_saved(link):
    pairs = [(i, device) for i in range(8) for device in jax.devices()[:4]]
    arrays = [jax.device_put(BITS.astype(np.int32) + i, device) for i, device in pairs]
    for array, got in zip(arrays, transfer.to_host(arrays), strict=True):
        np.testing.assert_array_equal(got, BITS.astype(np.int32) + int(array[0, 0] - BITS[0, 0]))
    assert 0 < link.most <= transfer.PINNED_BYTES
    assert link.held == 0


def test_offloaded_arrays_are_copied_from_where_they_are(link):
    pinned = SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
    array = jax.device_put(BITS.astype(np.int32), pinned)
    (got,) = transfer.to_host([array])
    np.testing.assert_array_equal(got, BITS.astype(np.int32))
    assert got.flags.owndata
    assert link.copies == 1


def test_a_snapshot_is_complete_when_its_devices_are_donated(link):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    mesh = mesh_of(4, 2, names="xy")
    x = jax.device_put(BITS.astype(np.float32), NamedSharding(mesh, P("x", "y")))
    snapshots = []
    for _ in range(4):
        snapshots.append(take_snapshot(describe({"x": x})))
        x = step(x)
    for i, snapshot in enumerate(snapshots):
        for _, box in snapshot.blocks:
            want = BITS.astype(np.float32)[box.index] + np.float32(i)
            np.testing.assert_array_equal(snapshot.block("x", box), want)


def test_an_error_of_a_copy_ends_the_snapshot(link, monkeypatch):
    def fails(part: jax.Array) -> jax.Array:
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(transfer, "_pinned", fails)
    with pytest.raises(MemoryError, match="no pinned memory"):
        ucp.Checkpoint.of({"x": jnp.zeros((64, 64))})


def test_on_cpu_nothing_is_copied():
    array = jax.device_put(BITS.astype(np.int32), jax.devices()[0])
    (got,) = transfer.to_host([array])
    assert got.ctypes.data == array.unsafe_buffer_pointer()
