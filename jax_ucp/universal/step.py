"""A checkpoint as an item of a step of a run, where the managers of Orbax look for one.

Facts: `_src/metadata/step_metadata_serialization.py` and `_src/path/atomicity.py` of
orbax-checkpoint 0.12.8. A folder with this suffix is of a step that is not finished.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from jax_ucp.arguments import whole_number
from jax_ucp.files.local import LocalFiles, name_fault

STEP_FILE = "_CHECKPOINT_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def write_step(run: Path, step: int, item: str, write: Callable[[Path], object]) -> Path:
    """The path of the item that `write` writes; no step is there before it is whole.

    Raises FileExistsError where the run has that step already, ValueError for an item that is no
    name.
    """
    step = whole_number("step", step, least=0)
    fault = name_fault(item) or ("it has a slash" if "/" in item else None)
    if fault:
        raise ValueError(f"item={item!r:.80} is no name: {fault}")
    target, unfinished = run / str(step), run / f"{step}{_UNFINISHED}"
    if target.exists():
        raise FileExistsError(f"{target} is there already; give another step")
    begun = time.time_ns()
    write(unfinished / item)
    metadata = {
        "item_handlers": {item: _HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": begun,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    files = LocalFiles(unfinished)
    files.write(STEP_FILE, [json.dumps(metadata).encode()], durable=True)
    files.sync()
    os.replace(unfinished, target)
    LocalFiles(run).sync()
    return target / item
