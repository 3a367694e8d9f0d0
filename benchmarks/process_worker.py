"""One of several processes of JAX that share eight devices: `python -m benchmarks.process_worker
RANK PROCESSES PORT`.

A request in JSON per line of stdin: `{"do": "save" | "restore", "peer": ..., "path": ..., "axis": 0
| 1, "side": ...}`. An answer has seconds of wall clock and of CPU, page
faults, the bytes that the process read of files, and those that its devices need. What a peer
restores for the first time is compared with what was saved.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

rank, processes, port = map(int, sys.argv[1:])
DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // processes}"
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # gloo prints on stdout

import jax

if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers import Tree, peers, ready
from benchmarks.race import now
from jax_ucp.sharding.boxes import device_boxes

ARRAYS = 64
MESH = Mesh(np.array(jax.devices()), ("x",))
PEERS = {peer.name: peer for peer in peers()}


def target(side: int, axis: int) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = NamedSharding(MESH, PartitionSpec("x") if axis == 0 else PartitionSpec(None, "x"))
    return {
        f"w{i:05}": jax.ShapeDtypeStruct((side, side), np.float32, sharding=sharding)
        for i in range(ARRAYS)
    }


def values(name: str, side: int) -> np.ndarray:
    return np.random.default_rng(int(name[1:])).standard_normal((side, side), np.float32)


def made(side: int) -> Tree:
    def array(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        data = values(name, side)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: data[index])

    return ready({name: array(name, like) for name, like in target(side, 0).items()})


def bytes_read() -> int:
    """Bytes that this process has asked of files so far, whoever in it asked."""
    (line,) = [
        line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:")
    ]
    return int(line.split()[1])


def check(tree: Tree) -> None:
    """Raise ValueError if a peer restored something else."""
    for name in (min(tree), max(tree)):
        want = values(name, len(tree[name]))
        for shard in tree[name].addressable_shards:
            if not np.array_equal(np.asarray(shard.data), want[shard.index]):
                raise ValueError(f"{name} is not what was saved")


state: dict[int, Tree] = {}
checked: set[tuple[str, int]] = set()
for line in sys.stdin:
    request = json.loads(line)
    peer, path, side = PEERS[request["peer"]], Path(request["path"]), request["side"]
    if request["do"] == "save" and side not in state:
        state[side] = made(side)
    wanted = target(side, request["axis"])
    begun, read = now(), bytes_read()
    if request["do"] == "save":
        peer.save(path, state[side])
        got = None
    else:
        got = ready(peer.restore(path, wanted))
    took, read = now().since(begun), bytes_read() - read
    boxes = [box for array in wanted.values() for box in device_boxes(array.sharding, array.shape)]
    needed = 4 * sum(box.size for box in boxes)
    print(
        json.dumps({**asdict(took), "read": read, "needed": needed}),
        file=answers,
        flush=True,
    )
    if got is not None and (peer.name, request["axis"]) not in checked:
        check(got)
        checked.add((peer.name, request["axis"]))
    del got
