"""One of several processes: `distributed.py PORT PROCESSES RANK FUNCTION DIRECTORY`; prints what the function returns.

Each process has 2 virtual CPU devices. What is saved is a function of names alone, so that every process can check
its own part of what it restores.
"""

import json
import os
import sys
import time
from pathlib import Path

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
from orbax.checkpoint import v1

import jax_ucp as ucp
from jax_ucp import handler
from jax_ucp.sharding.boxes import device_boxes

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from reads import bytes_read

BIG, ODD, TINY = (1536, 768), (24, 330), (24, 10)
SMALL = [f"small{i:04}" for i in range(1000)]  # so many are packed
MESH = Mesh(np.array(jax.devices()), ("x",))


def want(name: str) -> np.ndarray:
    shape = BIG if name.startswith("big") else TINY if name in SMALL else ODD
    return np.random.default_rng(list(name.encode())).normal(size=shape).astype(np.float32)


def spec(name: str, columns: bool) -> P:
    if "replicated" in name:
        return P()
    return P(None, "x") if columns and name == "big" else P("x", None)


def placed(name: str, columns: bool) -> jax.Array:
    array = want(name)
    return jax.make_array_from_callback(array.shape, NamedSharding(MESH, spec(name, columns)), lambda i: array[i])


NAMES = ["big", "big_replicated", "odd"]


def save(names: list[str] = NAMES) -> dict:
    with ocp.CheckpointManager(directory, item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(0, args=ucp.args.Save(tree(names)))
        manager.wait_until_finished()
    return {}


def save_packed() -> dict:
    return save(NAMES + SMALL)


def restore() -> dict:
    """Restored transposed, with the bytes read and needed; and refitted."""
    target = {}
    for name in NAMES:
        if name != "odd" or ODD[0] % len(jax.devices()) == 0:
            sharding = NamedSharding(MESH, spec(name, columns=True))
            target[name] = jax.ShapeDtypeStruct(want(name).shape, np.float32, sharding=sharding)
    with ocp.CheckpointManager(directory, item_handlers=ucp.CheckpointHandler()) as manager:
        with bytes_read() as count:
            got = manager.restore(0, args=ucp.args.Restore(target, partial=True))
        read = count()
        check(got)
        check(manager.restore(0, args=ucp.args.Restore(mesh=MESH)))
    needed = 4 * sum(box.size for array in got.values() for box in device_boxes(array.sharding, array.shape))
    return {"read": read, "needed": needed}


def save_v1() -> dict:
    """A step saved at once, and one in the background while its arrays are deleted. The last process writes late."""
    if rank == processes - 1:
        write = handler.write_snapshot
        handler.write_snapshot = lambda *args: (time.sleep(0.5), write(*args))
    v1.save_checkpointables(f"{directory}/sync", {"model": ucp.args.Save(tree()), "config": {"layers": 2}})
    state = tree()
    saving = v1.save_checkpointables_async(f"{directory}/async", {"model": ucp.args.Save(state)})
    for name in NAMES:
        state[name].delete()
    saving.result()
    return {}


def restore_v1() -> dict:
    for step in ("sync", "async"):
        found = v1.load_checkpointables(f"{directory}/{step}", {"model": ucp.args.Restore(mesh=MESH)})["model"]
        check(found)
        assert found["host"].tolist() == [0, 1, 2], found["host"]
        sharding = NamedSharding(MESH, P(None, "x"))
        target = {"big": jax.ShapeDtypeStruct(BIG, np.float32, sharding=sharding)}
        found = v1.load_checkpointables(f"{directory}/{step}", {"model": ucp.args.Restore(target, partial=True)})
        assert found["model"]["big"].sharding == sharding
        check(found["model"])
    return {}


def count() -> dict:
    """Bytes read to restore each checkpoint of the directory with all its arrays by rows, and by columns."""
    read = {}
    for path in sorted(Path(directory).iterdir()):
        for axes in (("x",), (None, "x")):
            with bytes_read() as count:
                got = ucp.open(path).restore(mesh=MESH, rules=[("", P(*axes))])
            check(got)
            read[f"{path.name} onto {'columns' if len(axes) > 1 else 'rows'}"] = count()
    return {"read": read}


def first() -> dict:
    """A restore onto the devices of process 0 alone, in which the others take part and read nothing."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with bytes_read() as count:
        got = ucp.open(directory).restore(mesh=mesh, rules=[("", P("x"))])
    check(got)
    return {"read": count()}


def tree(names: list[str] = NAMES) -> dict:
    return {name: placed(name, columns=False) for name in names} | {"step": 7, "host": np.arange(3)}


def check(got: dict) -> None:
    """Every part of an array that this process has is what it should be."""
    for name, array in got.items():
        for shard in array.addressable_shards if isinstance(array, jax.Array) else ():
            assert np.array_equal(np.asarray(shard.data), want(name)[shard.index]), name
    assert got.get("step", 7) == 7


print(json.dumps({"rank": rank} | globals()[what]()))
