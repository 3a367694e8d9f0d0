"""Checkpoints in a bucket that is as far away as a bucket: an emulator of Google Cloud Storage
behind a proxy; and weights of a hub that is as far away.

Beside ours: bare `obstore` moving the same bytes in parallel, which is the limit; a local folder
that is copied to or from the bucket; stock Orbax, through TensorStore; and `huggingface_hub` with
`safetensors`, where that is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
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

OURS, LIMIT, STOCK = "jax_ucp", "bare obstore, the same bytes", "Orbax v0, default"
IN_FLIGHT = 32
SMALL = 10_000  # so many arrays stock Orbax does not save to this emulator

# 200 MB/s are what two cores can serve beside the contestants: a faster network would measure them.
NETWORKS = {
    "20 ms a request, 200 MB/s in all": {"latency_s": 0.02, "total_rate": 200e6},
    "50 ms a request, 50 MB/s a connection, 200 MB/s in all": {
        "latency_s": 0.05,
        "connection_rate": 50e6,
        "total_rate": 200e6,
    },
}


def run(options: Options) -> Iterator[Table]:
    large = {f"w{i:02}": (4 * options.mib, 1024) for i in range(64)}
    small = {f"w{i:05}": (16, 16) for i in range(SMALL)}
    sizes = {f"{options.mib} MiB in 64 arrays": large, f"{SMALL:,} arrays of 1 KB": small}
    for name, network in NETWORKS.items():
        with far_bucket(network) as store:
            bench = _Bench(store, options)
            for size, shapes in sizes.items():
                yield bench.save(f"save {size}, {name}", shapes)
                yield from bench.restore(f"{size}, {name}", shapes)
            yield bench.convert(f"convert {options.mib} MiB, bucket to bucket, {name}", large)
        yield _hub(f"{options.mib} MiB of safetensors, {name}", network, options)


@contextmanager
def far_bucket(network: Mapping[str, float]) -> Iterator[Store]:
    """An empty bucket behind a proxy, which the environment names."""
    with gcs() as store, _far_away(store.endpoint, network) as endpoint:
        behind = store.behind(endpoint)
        os.environ.update(behind.env)
        yield behind


def _far_away(endpoint: str, network: Mapping[str, float]) -> AbstractContextManager[str]:
    """A proxy in front of a server."""
    program = [sys.executable, str(HERE / "fault_proxy.py")]
    return serving(lambda port: [*program, str(port), endpoint, json.dumps(network)])


def _hub(title: str, network: Mapping[str, float], options: Options) -> Table:
    """Weights of a model onto 8 devices, each of which has a part of each."""
    model, home = options.work / "model", options.work / "home"
    shutil.rmtree(model, ignore_errors=True)
    weights = {f"w{i:02}": _numbers((4 * options.mib, 1024), i) for i in range(64)}
    tree, shard = {"param": weights}, max(1, options.mib << 17)  # files of an eighth each
    ucp.Checkpoint.of(tree).export(model, "safetensors", max_shard_bytes=shard)
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    program = [sys.executable, str(HERE / "web.py")]
    with (
        serving(lambda port: [*program, str(port), str(model)]) as server,
        _far_away(server, network) as endpoint,
    ):
        os.environ.update(HF_ENDPOINT=f"http://{endpoint}", HF_TOKEN="hf_t")
        contestants = [
            Contestant(OURS, lambda _: _restore("hf://org/name", mesh, PartitionSpec("x"))),
            Contestant(
                "snapshot_download, safetensors, device_put",
                lambda _: _by_snapshot(home, mesh),
                lambda: shutil.rmtree(home, ignore_errors=True),
            ),
        ]
        has_peer = importlib.util.find_spec("safetensors") is not None
        samples = race(contestants if has_peer else contestants[:1], options.runs)
    notes = [] if has_peer else ["safetensors is not installed here: its row is absent."]
    return compared(f"hub, onto 8 devices: {title}", samples, OURS, notes)


def _by_snapshot(home: Path, mesh: Mesh) -> None:
    import huggingface_hub
    from safetensors.numpy import load_file

    folder = huggingface_hub.snapshot_download(
        "org/name", cache_dir=home, endpoint=os.environ["HF_ENDPOINT"], max_workers=IN_FLIGHT
    )
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    files = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    jax.block_until_ready([jax.device_put(a, sharding) for file in files for a in file.values()])


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
        ]
        if len(shapes) < SMALL:
            stock = self._to_bucket(STOCK, lambda url: _save_orbax(url, tree))
            contestants.append(stock)
        return self._race(title, contestants)

    def restore(self, title: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Table]:
        """Onto devices that have the rows, by which it was saved, and onto such that have columns;
        and what describes it alone.
        """
        source, stock = f"{self._store.url}/source", f"{self._store.url}/stock"
        mesh = self._sharding.mesh
        tree = {
            name: jax.device_put(_numbers(shape, i), self._sharding)
            for i, (name, shape) in enumerate(shapes.items())
        }
        _save_ours(source, tree)
        with_stock = len(shapes) < SMALL
        if with_stock:
            _save_orbax(stock, tree)
        layouts = {"": PartitionSpec("x"), " transposed": PartitionSpec(None, "x")}
        if len(shapes) == SMALL:
            del layouts[" transposed"]
        for how, spec in layouts.items():
            contestants = [
                Contestant(OURS, lambda _, spec=spec: _restore(source, mesh, spec)),
                Contestant(LIMIT, lambda _: _get_all(source)),
                Contestant(
                    "downloaded, then opened",
                    lambda _, spec=spec: _restore(str(self._downloaded(source)), mesh, spec),
                ),
            ]
            if with_stock:
                contestants.append(
                    Contestant(
                        STOCK, lambda _, spec=spec: _restore_orbax(stock, shapes, mesh, spec)
                    )
                )
            yield self._race(f"restore{how} {title}", contestants)
        yield self._race(f"open {title}", [Contestant(OURS, lambda _: ucp.open(source))])
        _empty(source)
        if with_stock:
            _empty(stock)

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
        there = self._folder("converted")
        ucp.open(self._downloaded(source)).save(there)
        _upload_folder(there, url)

    def _downloaded(self, source: str) -> Path:
        here = self._folder("downloaded")
        files, key = locate(source)
        _all(
            lambda file: _write(here / file.name, _get(files, f"{key}/{file.name}")),
            list(files.join(key).walk()),
        )
        return here

    def _folder(self, name: str) -> Path:
        folder = self._options.work / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def _numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers that nothing compresses."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _save_ours(url: str, tree: Mapping[str, Any]) -> None:
    ucp.CheckpointHandler().save(url, ucp.args.Save(tree))


def _restore(path: str, mesh: Mesh, spec: PartitionSpec) -> None:
    jax.block_until_ready(ucp.open(path).restore(mesh=mesh, rules=[("", spec)]))


def _get_all(source: str) -> None:
    files, key = locate(source)
    _all(lambda file: _get(files, f"{key}/{file.name}"), list(files.join(key).walk()))


def _save_orbax(url: str, tree: Mapping[str, Any]) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(url, tree)


def _restore_orbax(
    url: str, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, spec: PartitionSpec
) -> None:
    sharding = NamedSharding(mesh, spec)
    target = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
        for name, shape in shapes.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        jax.block_until_ready(checkpointer.restore(url, target))


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
