"""The tables of docs/where-checkpoints-live.md: `python tests/remote_table.py` prints them, from a run of
each format in each kind of store. Azurite comes from npm.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

import jax_ucp as ucp
from jax_ucp.errors import UnsupportedPath
from jax_ucp.files.path import file_path
from joined import said_by
from large_sources import FORMATS, made
from servers import stores, web
from servers.fault_proxy import FaultProxy
from servers.stores import Store

PAGE = Path(__file__).parent.parent / "docs" / "where-checkpoints-live.md"
PLACES = ("S3", "Google", "Azure", "HTTP", "hub")
OF_TENSORSTORE = ("Orbax", "Orbax, a file a chunk")  # which reads its arrays by itself


@dataclass(frozen=True)
class Row:
    """What a format cost in one kind of store: requests and bytes to open it, to restore it, and
    the bytes of its arrays, and how many they are. `is_equal` says whether it is the local result, bit for bit.
    """

    opening: tuple[int, int]
    restoring: tuple[int, int]
    needed: int
    arrays: int
    is_equal: bool

    @property
    def amplification(self) -> float:
        return (self.opening[1] + self.restoring[1]) / self.needed


def measured(path: Path, url: str, proxy: FaultProxy) -> Row:
    """What is read of the checkpoint at `url`, which is the one at `path`."""
    want = restored(ucp.open(path))
    proxy.set(proxy.faults)
    checkpoint = ucp.open(url)
    opening = _met(proxy)
    proxy.set(proxy.faults)
    got = restored(checkpoint)
    alike = [x for x in want if x in got and got[x].dtype == want[x].dtype]
    is_equal = got.keys() == {*alike} == want.keys()
    is_equal = is_equal and all(got[x].tobytes() == want[x].tobytes() for x in want)
    needed = sum(array.nbytes for array in want.values())
    return Row(opening, _met(proxy), needed, len(want), is_equal)


def restored(checkpoint: ucp.Checkpoint) -> Mapping[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(checkpoint.restore())
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _met(proxy: FaultProxy) -> tuple[int, int]:
    methods = ("GET", "HEAD", "POST", "PUT", "DELETE")
    return sum(proxy.met[method] for method in methods), proxy.met["bytes"]


Place = Callable[[Path], AbstractContextManager[tuple[str, FaultProxy]]]


@contextmanager
def bucket(store: Store, path: Path) -> Iterator[tuple[str, FaultProxy]]:
    """A copy of a file or folder in a bucket, and the proxy that it is asked through."""
    with FaultProxy(store.endpoint) as proxy, pytest.MonkeyPatch.context() as environment:
        for key, value in store.behind(proxy.endpoint).env.items():
            environment.setenv(key, value)
        root = file_path(f"{store.url}/{path.parent.name}")
        for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
            target = root / file.relative_to(path.parent).as_posix()
            target.files.write(target.key, [file.read_bytes()], durable=True)
        yield str(root / path.name), proxy


@contextmanager
def server(path: Path) -> Iterator[tuple[str, FaultProxy]]:
    """A web server of the folder around."""
    with web.web(path.parent) as (address, _), _proxy(address) as proxy:
        yield f"http://{proxy.endpoint}/{path.name}", proxy


@contextmanager
def hub(path: Path) -> Iterator[tuple[str, FaultProxy]]:
    """A hub whose model is a folder."""
    with (
        web.hub(path) as address,
        _proxy(address) as proxy,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("HF_ENDPOINT", f"http://{proxy.endpoint}")
        environment.setenv("HF_TOKEN", "hf_t")
        yield "hf://org/name", proxy


def _proxy(address: str) -> FaultProxy:
    return FaultProxy(address.removeprefix("http://"))


def table(places: Mapping[str, Place]) -> str:
    heads = ("format", "where", "opened by", "restored by", "bytes read / needed", "bits")
    lines = [_line(heads), _line(["---"] * len(heads))]
    with tempfile.TemporaryDirectory() as folder:
        for number, format in enumerate(FORMATS):
            path = made(format, Path(folder, f"{number}"))
            for where, place in places.items():
                if where == "hub" and format not in ("safetensors", "PEFT"):
                    continue
                with place(path) as (url, proxy):
                    lines.append(_line([format, where, *_cells(path, url, proxy)]))
            shutil.rmtree(Path(folder, f"{number}"))
    return "\n".join(lines)


def sharing(path: Path, store: Store, processes: int, share: bool) -> tuple[int, int]:
    """Requests and bytes of processes that each restore the whole of an universal checkpoint."""
    with bucket(store, path) as (url, proxy):
        proxy.set(proxy.faults)
        said = said_by(processes, "bucket_restore.py", url, "share" if share else "each")
        assert len(set(said)) == 1
        return _met(proxy)


def sharing_table(store: Store) -> str:
    heads = ("processes", "`share_reads`", "requests", "bytes", "read / stored")
    lines = [_line(heads), _line(["---"] * len(heads))]
    with tempfile.TemporaryDirectory() as folder:
        path = made("universal", Path(folder, "made"))
        nbytes = ucp.open(path).nbytes
        for processes, share in itertools.product((2, 4), (False, True)):
            requests, read = sharing(path, store, processes, share)
            cells = str(processes), str(share), str(requests), f"{read:,}", f"{read / nbytes:.3f}"
            lines.append(_line(cells))
    return "\n".join(lines)


def _cells(path: Path, url: str, proxy: FaultProxy) -> list[str]:
    try:
        row = measured(path, url, proxy)
    except UnsupportedPath:
        return ["refused", "", "", ""]
    counts = [f"{count} requests, {nbytes:,} B" for count, nbytes in (row.opening, row.restoring)]
    return [*counts, f"{row.amplification:.3f}", "equal" if row.is_equal else "DIFFERENT"]


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    with stores.moto() as s3, stores.gcs() as gcs, stores.azurite() as azure:
        buckets = (partial(bucket, store) for store in (s3, gcs, azure))
        print(table(dict(zip(PLACES, (*buckets, server, hub), strict=True))), end="\n\n")
        print(sharing_table(s3))


if __name__ == "__main__":
    main()
