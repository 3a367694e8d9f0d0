"""A checkpoint as an item of a step of a run, where the managers of Orbax look for one.

Facts: `_src/metadata/step_metadata_serialization.py` and `_src/path/atomicity.py` of
orbax-checkpoint 0.12.8. An unfinished step's folder has this suffix; in a bucket it has no file of
`CommitFileTemporaryPath`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from jax_ucp.arguments import whole_number
from jax_ucp.errors import SpecError
from jax_ucp.files.local import name_fault
from jax_ucp.files.path import FilePath
from jax_ucp.files.protocol import Files, file_size
from jax_ucp.universal.store import METADATA_FILE

STEP_FILE, COMMIT_FILE = "_CHECKPOINT_METADATA", "commit_success.txt"
UNFINISHED_STEP = ".orbax-checkpoint-tmp"

# The handler of stock Orbax that a step names for its item. `restore(step)` uses it, and a manager
# keeps the one that it used first: after this one it takes `StandardRestore`.
STOCK_HANDLER = (
    "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
)


def write_step(
    run: FilePath,
    step: int,
    item: str,
    write: Callable[[FilePath], object],
    custom_metadata: Mapping[str, Any],
) -> FilePath:
    """The path of the item, after `write` has written it. The step appears only when it is whole:
    on a disk by a rename, in a bucket by the creation of `commit_success.txt`.

    Raises FileExistsError if the step exists or is being written, or the run is a checkpoint
    itself; SpecError for an item that is not a name, and for metadata that JSON cannot represent.
    """
    try:
        said = json.loads(json.dumps(dict(custom_metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SpecError(f"custom_metadata={custom_metadata!r:.80} is not JSON: {error}") from None
    step = whole_number("step", step, least=0)
    fault = name_fault(item) or ("it has a slash" if "/" in item else None)
    if fault or item in (STEP_FILE, COMMIT_FILE):
        raise SpecError(f"item={item!r:.80} is not a name: {fault or 'a file of the step has it'}")
    if (run / METADATA_FILE).is_file():
        raise FileExistsError(f"{run} is a checkpoint, and no run to which a step could be added")
    target = run / str(step)
    if run.files.is_remote:
        files = target.folder()
        others = [entry.name for entry in files.list() if entry.name != item]
        if file_size(files, COMMIT_FILE) is not None or others:
            raise FileExistsError(
                f"{target} is there already, or is being written ({', '.join(others)}); give"
                " another step"
            )
        begun = time.time_ns()
        write(target / item)
        _describe(files, item, begun, said)
        for folder in (f"{item}/", ""):
            said = f"Checkpoint commit was successful to {target}/{folder}".rstrip("/")
            files.create(f"{folder}{COMMIT_FILE}", said.encode())
    else:
        if target.exists():
            raise FileExistsError(f"{target} is there already; give another step")
        unfinished = target.with_name(f"{target.name}{UNFINISHED_STEP}")
        others = [
            entry.name for entry in unfinished.children() if entry.name not in (item, STEP_FILE)
        ]
        if others:
            raise FileExistsError(
                f"{unfinished} has another item that is not finished, {others[0]}: finish that, or"
                " delete the folder"
            )
        begun = time.time_ns()
        write(unfinished / item)
        _describe(unfinished.folder(), item, begun, said)
        os.replace(str(unfinished), str(target))
        target.parent.folder().sync()
    return target / item


def _describe(files: Files, item: str, begun: int, custom_metadata: Mapping[str, Any]) -> None:
    metadata = {
        "item_handlers": {item: STOCK_HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": begun,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": custom_metadata,
    }
    files.write(STEP_FILE, [json.dumps(metadata).encode()], durable=True)
    files.sync()
