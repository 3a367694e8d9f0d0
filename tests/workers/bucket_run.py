"""One of several processes, joined, that train into a bucket: `bucket_run.py ROOT STEPS`.

It resumes from the last step there is, saves each, in the background, keeps three, and prints each
step that it has begun. What a step has is a function of its number.
"""

import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ucp as ucp

root, steps = sys.argv[1], int(sys.argv[2])
SHARDED = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
SHAPE = (4096, 16)


def whole(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=SHAPE).astype(np.float32)


def state(step: int) -> dict:
    array = whole(step)
    return {"w": jax.make_array_from_callback(SHAPE, SHARDED, lambda i: array[i]), "step": step}


def check(restored: dict, step: int) -> None:
    assert restored["step"] == step, (restored["step"], step)
    for shard in restored["w"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole(step)[shard.index])


def main() -> None:
    manager = ocp.CheckpointManager(
        root,
        item_handlers=ucp.CheckpointHandler(),
        options=ucp.in_bucket(ocp.CheckpointManagerOptions(max_to_keep=3)),
    )
    last = manager.latest_step()
    if last is not None:
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state(0))
        check(manager.restore(last, args=ucp.args.Restore(target)), last)
    print("resumed from", last, flush=True)
    for step in range(0 if last is None else last + 1, steps):
        manager.save(step, args=ucp.args.Save(state(step)))
        print(step, flush=True)
        time.sleep(0.05)
    manager.wait_until_finished()
    print("kept", *manager.all_steps(), flush=True)
    manager.close()


if __name__ == "__main__":
    main()
