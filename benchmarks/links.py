"""A model's leaves, stacked, transposed and split, out of a folder of safetensors: linked or
converted, and then restored by stock Orbax and by jax_ucp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ucp as ucp
from benchmarks.peers import OURS, fresh, ready
from benchmarks.race import Contestant, Options, Table, compared, race

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


def _target(axis: int, side: int) -> dict[str, object]:
    mesh = Mesh(np.array(jax.devices()[:8]), ["x"])
    spec = [None] * 4
    spec[axis] = "x"
    shape = (side, LAYERS, side // DIM, DIM)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    kernel = jax.ShapeDtypeStruct(shape, np.float16, sharding=sharding)
    return {"param": {"layers": {"kernel": kernel}}}
