"""A gibibyte of 64 arrays: saved from 8 devices, restored onto the same, transposed, onto fewer
and onto more.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ucp as ucp
from benchmarks.group import Group
from benchmarks.limit import copy_in, copy_out, write_flat
from benchmarks.peers import OURS, Begin, fresh, peers, ready
from benchmarks.race import Contestant, Options, Sample, Table, compared, now, race
from benchmarks.torch_peer import group

ARRAYS = 64
ROWS, COLUMNS = PartitionSpec("x", None), PartitionSpec(None, "x")
# What is restored onto: how many devices and the spec; and of torch's ranks, which are processes,
# how many.
TARGETS = {
    "same": (8, ROWS, 2, 0),
    "transposed": (8, COLUMNS, 2, 1),
    "fewer devices": (4, ROWS, 1, 0),
    "more devices": (16, ROWS, 4, 0),
}
SAVED_BY = 2


def run(options: Options) -> Iterator[Table]:
    side = math.isqrt(options.mib * (1 << 20) // ARRAYS // 4) // 16 * 16
    yield from compete(
        "arrays", {f"w{i:05}": (side, side) for i in range(ARRAYS)}, TARGETS, options
    )
    yield _reshaped(options)


def compete(
    what: str,
    shapes: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, tuple[int, PartitionSpec, int, int]],
    options: Options,
) -> Iterator[Table]:
    """Tables of a save by rows from 8 devices, and of a restore onto each target; float32."""
    options.work.mkdir(parents=True, exist_ok=True)
    nbytes = 4 * sum(map(math.prod, shapes.values()))
    title = f"{len(shapes):,} {what}, {nbytes / (1 << 20):,.0f} MiB"
    values = np.ones if options.ones else np.random.default_rng(0).standard_normal
    rows = _sharding(8, ROWS)
    tree = {
        name: ready(
            jax.device_put(values(shape, np.float32), rows if len(shape) > 1 else _flat(rows))
        )
        for name, shape in shapes.items()
    }
    paths = {peer.name: options.work / f"peer_{i}" for i, peer in enumerate(peers())}
    flat, data = options.work / "flat", np.ones(nbytes, np.uint8)
    with ExitStack() as stack:
        groups: dict[int, Group] = {}
        for ranks in sorted(
            {SAVED_BY, *(t[2] for t in targets.values())} if options.torch_python else ()
        ):
            groups[ranks] = stack.enter_context(
                group(str(options.torch_python), ranks, options.work)
            )
        request = {
            "count": len(shapes),
            "shape": list(next(iter(shapes.values()))),
            "path": str(options.work / "dcp"),
        }

        def torch_save(threads: int) -> Contestant:
            ask = groups[SAVED_BY].ask
            call = {**request, "do": "save", "axis": 0, "threads": threads}
            return Contestant(
                f"PyTorch DCP, {SAVED_BY} processes, {threads} threads each", lambda _: ask(**call)
            )

        contestants = [
            Contestant("limit: one copy of the bytes, synced", lambda _: copy_out(data, flat))
        ]
        for peer in peers():
            contestants.append(
                Contestant(
                    peer.name,
                    lambda path, peer=peer: peer.save(path, tree),
                    lambda peer=peer: fresh(paths[peer.name]),
                )
            )
        contestants += [torch_save(threads) for threads in (1, 2) if groups]
        yield compared(f"Save: {title}", race(contestants, options.runs), OURS)
        yield compared(f"Blocked by an asynchronous save: {title}", _blocked(tree, options), OURS)
        yield Table(
            f"On disk: {title}", {name: _on_disk(path, nbytes) for name, path in paths.items()}
        )

        write_flat(flat, nbytes)
        for name, (devices, spec, ranks, axis) in targets.items():
            sharding = _sharding(devices, spec)
            target = {
                key: jax.ShapeDtypeStruct(
                    shape, np.float32, sharding=sharding if len(shape) > 1 else _flat(sharding)
                )
                for key, shape in shapes.items()
            }
            contestants = [Contestant("limit: one copy of the bytes", lambda _: copy_in(flat))]
            for peer in peers():
                contestants.append(
                    Contestant(
                        peer.name,
                        lambda _, peer=peer, to=target: ready(peer.restore(paths[peer.name], to)),
                    )
                )
            if groups:
                call = {**request, "do": "load", "axis": axis}
                ask = groups[ranks].ask
                contestants.append(
                    Contestant(
                        f"PyTorch DCP, {ranks} processes", lambda _, ask=ask, call=call: ask(**call)
                    )
                )
            for touched, memory in ((0, ""), (nbytes, ", memory touched before")):
                yield compared(
                    f"Restore onto {name}, {devices} devices by {spec}: {title}{memory}",
                    race(contestants, options.runs, touched),
                    OURS,
                )


def _reshaped(options: Options) -> Table:
    """What was saved by rows, verified and copied into chunks for 8 devices by columns."""
    source, target = options.work / "peer_0", options.work / "reshaped"
    copy = ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', str(source), str(target)]

    def reshape(path: Path) -> object:
        return ucp.open(source).save(path, mesh={"x": 8}, rules=[("", COLUMNS)])

    contestants = [
        Contestant(
            "limit: cp -r, synced",
            lambda _: subprocess.run(copy, check=True),
            lambda: fresh(target),
        ),
        Contestant(OURS, reshape, lambda: fresh(target)),
    ]
    samples = race(contestants, options.runs)
    fresh(target)
    return compared("Reshape by rows to by columns", samples, OURS)


def _blocked(tree: Mapping[str, jax.Array], options: Options) -> dict[str, list[Sample]]:
    """How long the caller of an asynchronous save waits until it may change the arrays."""

    def begun(begin: Begin) -> Callable[[Path], Sample]:
        def run(path: Path) -> Sample:
            begun = now()
            wait = begin(path, tree)
            sample = now().since(begun)
            wait()
            return sample

        return run

    def copy_alone(_: Path) -> object:
        return [
            np.asarray(shard.data) for array in tree.values() for shard in array.addressable_shards
        ]

    path = options.work / "async"
    contestants = [Contestant("limit: device to host, which on CPU is no copy", copy_alone)]
    contestants += [
        Contestant(p.name, begun(p.begin), lambda: fresh(path)) for p in peers() if p.begin
    ]
    samples = race(contestants, options.runs)
    fresh(path)
    return samples


def _sharding(devices: int, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(Mesh(np.array(_devices(devices)), ("x",)), spec)


def _devices(count: int) -> Sequence[jax.Device]:
    if len(jax.devices()) < count:
        raise RuntimeError(f"{count} devices are needed, there are {len(jax.devices())}")
    return jax.devices()[:count]


def _flat(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec("x"))


def _on_disk(path: Path, nbytes: int) -> dict[str, object]:
    """Bytes and files of a checkpoint; blocks are what the file system gives it."""
    files = [file.stat() for file in path.rglob("*") if file.is_file()]
    size = sum(file.st_size for file in files)
    blocks = 512 * sum(entry.lstat().st_blocks for entry in path.rglob("*"))
    return {
        "files": len(files),
        "bytes / data": round(size / nbytes, 3),
        "blocks / data": round(blocks / nbytes, 2),
    }
