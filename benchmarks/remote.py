"""Checkpoints in a bucket that is as far away as a bucket: an emulator of Google Cloud Storage
behind a proxy.

Beside ours: bare `obstore` moving the same bytes in parallel, which is the limit; a local folder
that is copied to or from the bucket; and stock Orbax, through TensorStore.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ucp as ucp
from benchmarks.race import Contestant, Options, Table, compared, race
from jax_ucp.files.locations import locate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from servers.stores import HERE, Store, gcs, serving

OURS, LIMIT = "jax_ucp", "bare obstore, the same bytes"
IN_FLIGHT = 32
SMALL = 10_000

NETWORKS = {
    "20 ms a request, 200 MB/s in all": {"latency_s": 0.02, "total_rate": 200e6},
    "50 ms a request, 50 MB/s a connection": {"latency_s": 0.05, "connection_rate": 50e6},
}


def run(options: Options) -> Iterator[Table]:
    large = {f"w{i:02}": (options.mib << 12, 1) for i in range(64)}
    small = {f"w{i:05}": (256, 1) for i in range(SMALL)}
    for name, network in NETWORKS.items():
        with _bucket(network) as store:
            bench = _Bench(store, options)
            yield bench.save(f"save {options.mib} MiB in 64 arrays, {name}", large)
            yield bench.convert(f"convert {options.mib} MiB, bucket to bucket, {name}", large)
            yield bench.save(f"save {SMALL:,} arrays of 1 KB, {name}", small)


@contextmanager
def _bucket(network: Mapping[str, float]) -> Iterator[Store]:
    """An empty bucket behind a proxy, which the environment names."""
    program = [sys.executable, str(HERE / "fault_proxy.py")]
    with gcs() as store:
        arguments = [store.endpoint, json.dumps(network)]
        with serving(lambda port: [*program, str(port), *arguments]) as endpoint:
            behind = store.behind(endpoint)
            os.environ.update(behind.env)
            yield behind


class _Bench:
    def __init__(self, store: Store, options: Options):
        self._store, self._options = store, options
        self._sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
        self._numbers = itertools.count()

    def save(self, title: str, shapes: Mapping[str, tuple[int, ...]]) -> Table:
        tree = {
            name: jax.device_put(_numbers(shape, i), self._sharding)
            for i, (name, shape) in enumerate(shapes.items())
        }
        host = np.concatenate([np.asarray(array).reshape(-1) for array in tree.values()])
        parts = np.array_split(host, 64)
        contestants = [
            self._to_bucket(OURS, lambda url: _save_ours(url, tree)),
            self._to_bucket(LIMIT, lambda url: _put_all(url, parts)),
            self._to_bucket("a local folder, then uploaded", lambda url: self._upload(url, tree)),
            self._to_bucket("Orbax v0, default", lambda url: _save_orbax(url, tree)),
        ]
        return self._race(title, contestants)

    def convert(self, title: str, shapes: Mapping[str, tuple[int, ...]]) -> Table:
        source = f"{self._store.url}/source"
        tree = {name: _numbers(shape, i) for i, (name, shape) in enumerate(shapes.items())}
        _save_ours(source, tree)
        contestants = [
            self._to_bucket(OURS, lambda url: ucp.open(source).save(url)),
            self._to_bucket(LIMIT, lambda url: _copy_all(source, url)),
            self._to_bucket(
                "downloaded, converted, uploaded", lambda url: self._by_disk(source, url)
            ),
        ]
        table = self._race(title, contestants)
        _empty(source)
        return table

    def _to_bucket(self, name: str, do: Callable[[str], object]) -> Contestant:
        """One that writes to a new place each time; what the last one wrote is deleted."""
        last: list[str] = []

        def prepare() -> str:
            for url in last:
                _empty(url)
            last[:] = [f"{self._store.url}/{next(self._numbers)}"]
            return last[0]

        return Contestant(name, do, prepare)

    def _race(self, title: str, contestants: Sequence[Contestant]) -> Table:
        return compared(title, race(contestants, self._options.runs), OURS)

    def _upload(self, url: str, tree: Mapping[str, Any]) -> None:
        folder = self._folder("saved")
        _save_ours(str(folder), tree)
        _upload_folder(folder, url)

    def _by_disk(self, source: str, url: str) -> None:
        here, there = self._folder("downloaded"), self._folder("converted")
        files, key = locate(source)
        inside = files.join(key)
        _all(
            lambda file: _write(here / file.name, _get(files, f"{key}/{file.name}")),
            list(inside.walk()),
        )
        ucp.open(here).save(there)
        _upload_folder(there, url)

    def _folder(self, name: str) -> Path:
        folder = self._options.work / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def _numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers that nothing compresses."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _save_ours(url: str, tree: Mapping[str, Any]) -> None:
    ucp.CheckpointHandler().save(url, ucp.args.Save(tree))


def _save_orbax(url: str, tree: Mapping[str, Any]) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(url, tree)


def _put_all(url: str, parts: Sequence[np.ndarray]) -> None:
    files, key = locate(url)
    _all(lambda part: _put(files, f"{key}/{part[0]}", part[1].tobytes()), list(enumerate(parts)))


def _copy_all(source: str, url: str) -> None:
    files, key = locate(source)
    _, target = locate(url)
    _all(
        lambda file: _put(files, f"{target}/{file.name}", _get(files, f"{key}/{file.name}")),
        list(files.join(key).walk()),
    )


def _upload_folder(folder: Path, url: str) -> None:
    files, key = locate(url)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    _all(lambda p: _put(files, f"{key}/{p.relative_to(folder)}", p.read_bytes()), paths)


def _put(files: Any, key: str, data: bytes) -> None:
    import obstore

    obstore.put(files._store, key, data)


def _get(files: Any, key: str) -> bytes:
    """A file, in ranges that come at once."""
    import obstore

    size = obstore.head(files._store, key)["size"]
    starts = list(range(0, size, 4 << 20))
    ends = [min(start + (4 << 20), size) for start in starts]
    ranges = obstore.get_ranges(files._store, key, starts=starts, ends=ends) if size else []
    return b"".join(map(bytes, ranges))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _empty(url: str) -> None:
    files, key = locate(url)
    _all(lambda file: files.delete(f"{key}/{file.name}"), list(files.join(key).walk()))


def _all(do: Callable[[Any], object], items: Sequence[Any]) -> None:
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(do, items))
