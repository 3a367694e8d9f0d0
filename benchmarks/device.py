"""The link between the host and one device, and what saves and restores make of it.

On a machine without an accelerator it runs too, for the sake of its test, and says nothing of one.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.peers import OURS, Peer, fresh, peers, ready
from benchmarks.race import Contestant, Options, Table, compared, race
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.sharding.transfer import PINNED, has_pinned, to_device, to_host

ARRAYS = 16
BITS = np.array([0x7F81, 0xFF81, 0x7FC1, 0x8000, 0x0001, 0xFFFF, 0x3C00, 0x7F80], np.uint16)


def run(options: Options) -> Iterator[Table]:
    device = jax.devices()[0]
    options.work.mkdir(parents=True, exist_ok=True)
    yield _link(device, options)
    yield _bits(device)
    state = _state(device, options.mib)
    yield _blocking(state, options)
    yield from _restores(state, options)


def _link(device: Any, options: Options) -> Table:
    """GB/s of both directions by size: from ordinary and from pinned memory, and as saves copy."""
    pinned = SingleDeviceSharding(device, memory_kind=PINNED)
    usual = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    rows: dict[str, dict[str, object]] = {}
    size = 64 << 10
    while size <= options.mib << 20:
        host = np.random.default_rng(0).integers(0, 255, size, np.uint8)
        on_device, in_pinned = jax.device_put(host, device), jax.device_put(host, pinned)
        # Every copy is of a new array: JAX keeps the host's copy of one that it has copied once.
        ways: dict[str, Callable[[Any], Any]] = {
            "to device": lambda _, host=host: jax.device_put(host, device),
            "to device, pinned": lambda _, data=in_pinned: jax.device_put(data, usual),
            "to host": np.asarray,
            "to host, pinned": lambda data: jax.device_put(data, pinned),
            "to host, as saves do": lambda data: to_host([data])[0],
        }
        rows[f"{size >> 10} KiB"] = {
            name: round(size / 1e9 / _seconds(way, on_device, options.runs), 3)
            for name, way in ways.items()
        }
        size *= 8
    notes = [
        f"{device.device_kind} ({device.platform}); saves go through pinned memory:"
        f" {has_pinned(device)}; peak of the device: {_peak(device)} MiB",
    ]
    return Table("The link, GB/s by size", rows, notes)


def _seconds(way: Callable[[Any], Any], data: jax.Array, runs: int) -> float:
    found = []
    for _ in range(runs + 1):
        new = ready(data + jnp.uint8(1))
        begun = time.perf_counter()
        ready(way(new))
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


def _bits(device: Any) -> Table:
    """Whether bits that arithmetic would change come through the device unchanged."""
    arrays = {
        "bfloat16": BITS.view(ml_dtypes.bfloat16),
        "float16": BITS.view(np.float16),
        "float32": (BITS.astype(np.uint32) << 16 | 1).view(np.float32),
        "float8_e4m3fn": BITS.view(np.uint8).view(ml_dtypes.float8_e4m3fn),
        "float8_e5m2": BITS.view(np.uint8).view(ml_dtypes.float8_e5m2),
        "int4": (np.arange(16) - 8).astype(ml_dtypes.int4),
    }
    rows: dict[str, dict[str, object]] = {}
    for name, data in arrays.items():
        sent = to_device(data, device)
        back = (
            to_host([sent])[0].view(data.dtype) if sent.dtype != data.dtype else to_host([sent])[0]
        )
        plain = to_host([jax.device_put(data, device)])[0]
        rows[name] = {
            "as restores send": same_bits(back, data),
            "device_put": same_bits(plain, data),
        }
    return Table("Bits unchanged: NaN payloads, -0, subnormals", rows)


def _state(device: Any, mib: int) -> dict[str, jax.Array]:
    count = (mib << 20) // ARRAYS // 4
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    return {
        f"w{i:02}": jax.device_put(jax.random.normal(key, (count // 256, 256)), device)
        for i, key in enumerate(keys)
    }


def _blocking(state: dict[str, jax.Array], options: Options) -> Table:
    """Seconds until an async save returns, of a state that has not been copied before."""

    def save(peer: Peer, new: dict[str, jax.Array]) -> float:
        assert peer.begin is not None
        begun = time.perf_counter()
        wait = peer.begin(fresh(options.work / "async"), new)
        blocked = time.perf_counter() - begun
        wait()
        return blocked

    rows: dict[str, dict[str, object]] = {}
    for peer in (each for each in peers() if each.begin is not None):
        found = [
            save(peer, {name: ready(array + 1) for name, array in state.items()})
            for _ in range(options.runs + 1)
        ]
        rows[peer.name] = {"blocked s": round(statistics.median(found[1:]), 3)}
    return Table(f"An async save of {options.mib} MiB blocks the program", rows)


def _restores(state: dict[str, jax.Array], options: Options) -> Iterator[Table]:
    target = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in state.items()
    }
    contestants = []
    for i, peer in enumerate(peers()):
        path = fresh(options.work / f"saved{i}")
        peer.save(path, state)
        restore = partial(peer.restore, path, target)
        contestants.append(Contestant(peer.name, lambda _, restore=restore: ready(restore())))
    samples = race(contestants, options.runs)
    device = jax.devices()[0]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    notes = [f"peak of all together: host {host} MiB, device {_peak(device)} MiB"]
    yield compared(f"Restores of {options.mib} MiB onto the device", samples, OURS, notes)


def _peak(device: Any) -> object:
    stats = device.memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return "unknown" if peak is None else peak >> 20
