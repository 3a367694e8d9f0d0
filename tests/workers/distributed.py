"""One of several processes: `distributed.py PORT PROCESSES RANK save|restore DIRECTORY`; prints one JSON line.

Each process has 2 virtual CPU devices. What is saved is a function of names alone, so that every process can check
its own part of what it restores.
"""

import json
import os
import sys

port, processes, rank = map(int, sys.argv[1:4])
what, directory = sys.argv[4:]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax

if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)

import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from jax_ucp.sharding.boxes import device_boxes

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from reads import bytes_read

BIG, ODD = (1536, 768), (24, 10)
SMALL = [f"small{i:04}" for i in range(1000)]  # so many are packed
MESH = Mesh(np.array(jax.devices()), ("x",))


def want(name: str) -> np.ndarray:
    shape = BIG if name.startswith("big") else ODD
    return np.random.default_rng(list(name.encode())).normal(size=shape).astype(np.float32)


def spec(name: str, columns: bool) -> P:
    if "replicated" in name:
        return P()
    return P(None, "x") if columns and name == "big" else P("x", None)


def placed(name: str, columns: bool) -> jax.Array:
    array = want(name)
    return jax.make_array_from_callback(array.shape, NamedSharding(MESH, spec(name, columns)), lambda i: array[i])


NAMES = ["big", "big_replicated", "odd"]
manager = ocp.CheckpointManager(directory, item_handlers=ucp.CheckpointHandler())
if what == "save":
    tree = {name: placed(name, columns=False) for name in NAMES + SMALL} | {"step": 7, "host": np.arange(3)}
    manager.save(0, args=ucp.args.Save(tree))
    manager.wait_until_finished()
    print(json.dumps({"rank": rank}))
else:
    target = {}
    for name in NAMES:
        if name != "odd" or ODD[0] % len(jax.devices()) == 0:
            sharding = NamedSharding(MESH, spec(name, columns=True))
            target[name] = jax.ShapeDtypeStruct(want(name).shape, np.float32, sharding=sharding)
    with bytes_read() as count:
        got = manager.restore(0, args=ucp.args.Restore(target, partial=True))
    read = count()
    needed = 0
    for name, array in got.items():
        needed += 4 * sum(box.size for box in device_boxes(array.sharding, array.shape))
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), want(name)[shard.index]), name
    refitted = manager.restore(0, args=ucp.args.Restore(mesh=MESH))
    assert refitted["step"] == 7
    for name in NAMES + SMALL:
        for shard in refitted[name].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), want(name)[shard.index]), name
    print(json.dumps({"rank": rank, "read": read, "needed": needed}))
manager.close()
