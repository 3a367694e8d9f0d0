"""The folders around a tree: a step with its items, and a run with its steps.

CheckpointManager and v1's `training.Checkpointer` make both; Flax's `save_checkpoint`, T5X and
Paxml make runs, whose steps may be files or trees themselves. A save has another name until it is
finished; on storage without renames it has its own, and lacks `commit_success.txt`. From Orbax
0.12.3 on every finished step has that file.

Facts: `_src/path/atomicity.py`, `temporary_paths.py` and `step.py` of orbax-checkpoint 0.12.8;
`flax/training/checkpoints.py` of flax 0.12.7; `t5x/checkpoints.py`; `paxml/checkpoint_paths.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from jax_ucp.arrays.beside import MARKERS, items_beside
from jax_ucp.arrays.contents import Contents, Item
from jax_ucp.errors import NotACheckpoint
from jax_ucp.files.path import FilePath
from jax_ucp.formats.orbax.marks import are_arrays, is_tree
from jax_ucp.formats.steps import Open, Run, chosen_model
from jax_ucp.formats.weight_names import holds_weights
from jax_ucp.json_text import MAX_JSON_DEPTH, is_shallow
from jax_ucp.options import Options
from jax_ucp.text import listed

STEP_FILE = "_CHECKPOINT_METADATA"

_COMMITTED_FILE = "commit_success.txt"
_NAMED_STEP = re.compile(r"checkpoint_[0-9]{1,18}")
_STEP_NAME = re.compile(r"(.*?)([0-9]{1,18})")
# the last is of v1's partial saves, until one is finalized
_UNFINISHED_NAME = re.compile(r"\.orbax-checkpoint-tmp|\.tmp-|^tmp_|_tmp$|\.partial_save(\.|$)")
# What JsonCheckpointHandler and managers call the one file of an item.
_JSON_FILES = ("metadata", "metrics")
_SAID_BY_USERS = ("metrics", "custom_metadata")
_MAX_JSON_BYTES = 1 << 24
# ArrayCheckpointHandler calls the one array of an item so.
_LONE_ARRAY = "checkpoint/.zarray"


def is_item(path: FilePath) -> bool:
    """Whether it is a tree of Orbax, this package, Flax, T5X or Paxml, and finished by its name."""
    if _UNFINISHED_NAME.search(path.name):
        return False
    if is_tree(path):
        return True
    from jax_ucp.formats.flax_msgpack.reader import recognise  # which few paths come to

    return recognise(path) or are_arrays(path)


def items_of_step(path: FilePath) -> list[FilePath]:
    """The trees in the folder of one step, in order, without items of ArrayCheckpointHandler."""
    folders = [child for child in path.children() if child.is_dir() and is_item(child)]
    return sorted(child for child in folders if not (child / _LONE_ARRAY).is_file())


def is_step(path: FilePath) -> bool:
    """Whether Orbax marked it as a step, and it is no tree itself."""
    return (path / STEP_FILE).is_file() and not is_item(path)


def is_unmarked_step(path: FilePath) -> bool:
    """Whether it is named as a step and has trees, but no mark, as of older writers."""
    if not _STEP_NAME.fullmatch(path.name) or not path.is_dir() or (path / STEP_FILE).exists():
        return False
    return bool(items_of_step(path))


def not_a_step(path: FilePath) -> str:
    """The reason why a path named as a step of Flax, T5X or Paxml is not one; else ""."""
    if not _NAMED_STEP.fullmatch(path.name) or _is_checkpoint(path):
        return ""
    if path.is_dir():
        return "is a folder without a tree" if path.children() else "is an empty folder"
    return "does not begin as a msgpack file of Flax" if path.size() else "is an empty file"


def find_run(path: FilePath) -> Run | None:
    """The run in a folder; None if it has no steps, or names of several kinds."""
    if not path.is_dir():
        return None
    steps: dict[int, FilePath] = {}
    unfinished: list[str] = []
    kinds: set[str] = set()
    for child in path.children():
        match = _STEP_NAME.fullmatch(child.name)
        if _UNFINISHED_NAME.search(child.name):
            unfinished.append(child.name)
        elif match and _is_checkpoint(child):
            kinds.add(match[1])
            if int(match[2]) in steps:
                return None
            steps[int(match[2])] = child
    if len(kinds) != 1:
        return None
    begun = _begun(steps)
    finished = {number: steps[number] for number in sorted(steps.keys() - begun)}
    unfinished += [steps[number].name for number in begun]
    return Run("Orbax, Flax, T5X or Paxml", path, finished, "", unfinished, (), _refuse_weights)


def _refuse_weights(run: Run, number: int) -> None:
    """Raise NotACheckpoint if weights of another library lie beside the steps."""
    names = [child.name for child in run.folder.children() if not child.is_dir()]
    if weights := [name for name in names if holds_weights([name])]:
        raise NotACheckpoint(
            f"{run.folder} holds the steps {run.names}, and beside them weights of torch or"
            f" safetensors, {listed(weights)}: open one of them by its path"
        )


def _is_checkpoint(path: FilePath) -> bool:
    return is_item(path) or is_step(path) or is_unmarked_step(path)


def _begun(steps: Mapping[int, FilePath]) -> list[int]:
    """The steps that were begun and not finished, in order.

    They lack `commit_success.txt`; and an earlier step has it, or their own metadata have the time
    at which the save began and none at which it ended.
    """
    folders = {number: path for number, path in steps.items() if path.is_dir()}
    committed = {n for n, path in folders.items() if (path / _COMMITTED_FILE).is_file()}
    first = min(committed, default=None)
    unfinished: list[int] = []
    for number in sorted(folders.keys() - committed):
        said: Mapping[str, Any] = {}
        is_later = first is not None and number > first
        if not is_later:  # the file of a step says when the save began, and when it was finished
            said = _json(folders[number] / STEP_FILE, FilePath.read_pointer) or {}
        is_begun = said.get("init_timestamp_nsecs") and not said.get("commit_timestamp_nsecs")
        if is_later or is_begun:
            unfinished.append(number)
    return unfinished


def open_step(path: FilePath, options: Options, open_item: Open) -> Contents:
    """The one tree of a step, or `model`, with JSON items as extras. Raises NotACheckpoint."""
    if _UNFINISHED_NAME.search(path.name):
        raise NotACheckpoint(f"{path} is a step that was never finished, by its name")
    items = items_of_step(path)
    if not items:
        nested = [item for child in path.children() for item in items_of_step(child)]
        deeper = f"; {nested[0]} is one, a folder too deep" if nested else ""
        raise NotACheckpoint(
            f"{path} is a step without a PyTree item: what it had is missing, or was never"
            f" finished{deeper}"
        )
    name = chosen_model(path, [item.name for item in items], options.model, "items")
    item = path / name
    contents = open_item(item, replace(options, model=None))
    # JSON of the step by file: items of one file, and user data in the file of the mark
    extras: dict[str, dict[str, Any]] = {}
    for child in filter(FilePath.is_dir, path.children()):
        files = [file for file in child.children() if file.name not in MARKERS]
        if len(files) == 1 and files[0].name in _JSON_FILES:
            value = _json(files[0])
            if value is not None:
                extras[files[0].below(path)] = value
    of_step = _json(path / STEP_FILE) or {}
    if kept := {name: of_step[name] for name in _SAID_BY_USERS if of_step.get(name)}:
        extras[STEP_FILE] = kept
    known = {item.name, *MARKERS, *(name.partition("/")[0] for name in extras)}
    inventory = [*contents.inventory, *items_beside(path, known)]
    inventory += [Item(name, "JSON", "extra", "kept as JSON") for name in extras]
    said = {"model": options.model} if options.model else {}
    source = {"format": contents.format, "name": path.name, **contents.source, **said}
    return replace(
        contents,
        inventory=inventory,
        extras={**contents.extras, **extras},
        source=source if said else contents.source,
    )


def _json(
    path: FilePath, read: Callable[[FilePath], str] = FilePath.read_text
) -> dict[str, Any] | None:
    """The JSON of a file, under "value" if it is not an object; None for a missing or large file,
    and if it is not JSON.
    """
    if not path.is_file() or path.size() > _MAX_JSON_BYTES:
        return None
    try:
        value = msgspec.json.decode(read(path))
    except (msgspec.DecodeError, RecursionError):
        return None
    if not is_shallow(value, MAX_JSON_DEPTH):
        return None
    return value if isinstance(value, dict) else {"value": value}
