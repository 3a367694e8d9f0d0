"""One of several processes, joined, that restore a checkpoint, each the whole of it:
`bucket_restore.py URL SHARE`, which is `share` if they read it together.
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jax_ucp as ucp

url, share = sys.argv[1], sys.argv[2] == "share"
MESH = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))


def main() -> None:
    checkpoint = ucp.open(url)
    rules = [(".*", PartitionSpec("model"))]
    restored = checkpoint.restore(mesh=MESH, rules=rules, share_reads=share)
    sums = {
        name: [
            float(np.asarray(shard.data, np.float64).sum()) for shard in array.addressable_shards
        ]
        for name, array in restored["param"].items()
    }
    print(sorted(sums.items()))


if __name__ == "__main__":
    main()
