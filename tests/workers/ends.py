"""A program that ends while it saves: `ends.py FOLDER WAY HOW`. No chunk is written before the
program ends, unless it waits for that; or none can be; or it ends with an exit code of its own.
"""

import os
import sys
import threading
import time
from typing import Any

root, way, how = sys.argv[1:]
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import orbax.checkpoint as ocp

import jax_ucp as ucp
from jax_ucp.universal.store import ZarrStore

TREE = {f"w{i}": np.full((300, 300), i, np.float32) for i in range(3)}
write = ZarrStore.write


def slowly(*args: Any, **options: Any) -> None:
    while how != "waits" and not threading._SHUTTING_DOWN:
        time.sleep(0.01)
    if how == "fails":
        raise OSError(28, "No space left on device")
    write(*args, **options)


ZarrStore.write = slowly
if way == "manager":
    manager = ocp.CheckpointManager(root, item_handlers=ucp.CheckpointHandler())
    manager.save(1, args=ucp.args.Save(TREE))
    wait = manager.wait_until_finished
elif way == "everywhere":
    context = ucp.orbax_everywhere()
    context.__enter__()
    manager = ocp.CheckpointManager(root)
    manager.save(1, args=ocp.args.StandardSave(TREE))
    wait = manager.wait_until_finished
elif way == "checkpointer":
    checkpointer = ocp.AsyncCheckpointer(ucp.CheckpointHandler())
    checkpointer.save(f"{root}/1", args=ucp.args.Save(TREE))
    wait = checkpointer.wait_until_finished
else:
    from orbax.checkpoint import v1

    with ucp.orbax_context():
        response = v1.save_async(f"{root}/1", TREE)
    wait = response.result
if how == "waits":
    wait()
if how == "exits":
    sys.exit(3)
