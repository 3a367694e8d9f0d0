"""A model's leaves, stacked, transposed and split, out of a folder of safetensors: linked or
converted, and then restored by stock Orbax and by jax_ucp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ucp as ucp
from benchmarks.peers import OURS, fresh, ready
from benchmarks.race import Contestant, Options, Table, compared, race
from benchmarks.remote import NETWORKS, far_bucket
from jax_ucp.files.path import file_path

LAYERS, DIM = 16, 64
MAPPING = {
    "sizes": {"dim": DIM},
    "leaves": [
        {
            "param": "layers.{layer}.weight",
            "axes": "(head dim) embed",
            "leaf": {"layers/kernel": "embed layer head dim"},
        }
    ],
}
# Along which axis of the leaf the devices' parts are cut.
TARGETS = {"embed": 0, "heads": 2}
LINK, CONVERSION, OWN = "link", "conversion", "Orbax's own save"


def run(options: Options) -> Iterator[Table]:
    side = math.isqrt(options.mib * (1 << 20) // LAYERS // 2) // 512 * 512
    source, link, whole = (options.work / name for name in ("source", "link", "whole"))
    options.work.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    weights = {
        f"layers.{i}.weight": rng.integers(0, 1 << 15, (side, side), np.uint16).view("float16")
        for i in range(LAYERS)
    }
    nbytes = sum(array.nbytes for array in weights.values())
    ucp.Checkpoint.of({"param": weights}).export(fresh(source), "safetensors")
    title = f"{LAYERS} matrices of {nbytes / (1 << 20):,.0f} MiB in all"
    mapped = ucp.open(source).map(ucp.Mapping.from_dict(MAPPING))
    making = [
        Contestant(LINK, mapped.link, lambda: fresh(link)),
        Contestant(
            "link with checksums",
            lambda path: mapped.link(path, checksum=True),
            lambda: fresh(link.with_name("link_sums")),
        ),
        Contestant(CONVERSION, mapped.save, lambda: fresh(whole)),
    ]
    yield compared(f"Make: {title}", race(making, options.runs), LINK)
    own = fresh(options.work / "own")
    with ocp.StandardCheckpointer() as stock:
        stock.save(own, jax.tree.map(jax.numpy.asarray, ucp.open(whole).restore()))
    for name, axis in TARGETS.items():
        target = _target(axis, side)

        def by_orbax(path, target=target):
            with ocp.StandardCheckpointer() as stock:
                return ready(stock.restore(path, target))

        def by_us(path, target=target):
            return ready(ucp.open(path).restore(target))

        places = {LINK: link, CONVERSION: whole, OWN: own}
        restoring = [
            Contestant(f"stock Orbax, from {place}", lambda _, path=path: by_orbax(path))
            for place, path in places.items()
        ]
        restoring += [
            Contestant(f"{OURS}, from {place}", lambda _, path=path: by_us(path))
            for place, path in places.items()
        ]
        restoring.append(
            Contestant(
                f"{OURS}, from the safetensors",
                lambda _, target=target: ready(mapped.restore(target)),
            )
        )
        samples = race(restoring, options.runs)
        yield compared(f"Restore, cut by {name}: {title}", samples, restoring[0].name)
    far = "20 ms a request, 200 MB/s in all"
    with far_bucket(NETWORKS[far]) as store:
        yield _from_bucket(
            f"Restore by stock Orbax, {far}: {title}", store.url, source, own, options
        )


def _from_bucket(title: str, bucket: str, source: Path, own: Path, options: Options) -> Table:
    """What stock Orbax takes to restore the leaf from a bucket: by a link, whose index is above the
    safetensors, from a conversion, and from its own save.
    """
    root = f"{bucket}/{LINK}"
    for path in source.iterdir():
        copy = file_path(f"{root}/0/default/source/{path.name}")
        copy.files.write(copy.key, [path.read_bytes()], durable=True)
    mapped = ucp.open(f"{root}/0/default/source").map(ucp.Mapping.from_dict(MAPPING))
    mapped.link(root, step=0)
    mapped.save(f"{bucket}/{CONVERSION}", step=0)
    state = ucp.open(own).restore()
    with ocp.CheckpointManager(f"{bucket}/own") as manager:
        manager.save(0, args=ocp.args.PyTreeSave(jax.tree.map(jax.numpy.asarray, state)))
    (kernel,) = jax.tree.leaves(state)
    target = _target(0, kernel.shape[0])
    args = ocp.checkpoint_utils.construct_restore_args(target)

    def restored(folder: str) -> object:
        with ocp.CheckpointManager(f"{bucket}/{folder}") as manager:
            return ready(manager.restore(0, args=ocp.args.PyTreeRestore(target, args)))

    contestants = [
        Contestant(name, lambda _, folder=folder: restored(folder))
        for name, folder in ((LINK, LINK), (CONVERSION, CONVERSION), (OWN, "own"))
    ]
    return compared(title, race(contestants, options.runs), LINK)


def _target(axis: int, side: int) -> dict[str, object]:
    mesh = Mesh(np.array(jax.devices()[:8]), ["x"])
    spec: list[str | None] = [None] * 4
    spec[axis] = "x"
    shape = (side, LAYERS, side // DIM, DIM)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    kernel = jax.ShapeDtypeStruct(shape, np.float16, sharding=sharding)
    return {"param": {"layers": {"kernel": kernel}}}
