"""One of several processes that restore a checkpoint, each the whole of it:
`bucket_restore.py PORT PROCESSES RANK URL SHARE`, which is `share` if they read it together.
"""

import os
import sys

port, processes, rank = map(int, sys.argv[1:4])
url, share = sys.argv[4], sys.argv[5] == "share"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax

jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)

import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jax_ucp as ucp

MESH = Mesh(np.array(jax.devices()).reshape(processes, 2), ("data", "model"))


def main() -> None:
    checkpoint = ucp.open(url)
    restored = checkpoint.restore(
        mesh=MESH, rules=[(".*", PartitionSpec("model"))], share_reads=share
    )
    sums = {
        name: [
            float(np.asarray(shard.data, np.float64).sum()) for shard in array.addressable_shards
        ]
        for name, array in restored["param"].items()
    }
    print(sorted(sums.items()))


if __name__ == "__main__":
    main()
