"""Marks of Megatron's checkpoints: the files by which they are recognised.

Facts: `megatron/training/checkpointing.py` of Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import re

from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.formats.dcp.marks import METADATA_FILE
from jax_ucp.formats.nested import as_dict
from jax_ucp.json_text import decode_json

CONFIG_FILE, COMMON_FILE = "metadata.json", "common.pt"
_MAX_CONFIG_BYTES = 1 << 20
_NEMO_WEIGHTS = "weights"
TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"[0-9]{1,19}")
_SAVED = re.compile(r"iter_\d{7,}|release")
_RANK_FOLDER = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_PICKLE = b"\x80"
# Every checkpoint with FSDP has the object, and nobody else's has.
COUNTER = "num_floating_point_operations_so_far"
# Keys of torch_dist, which opens by its `metadata.json`: shards of objects, stacked layers.
_TORCH_DIST = re.compile(rb"/shard_\d+(?:\.\d+)*_\d|decoder\.layers\.(?:self_attention|mlp)\.")


def is_dist(path: FilePath) -> bool:
    """Whether a directory, or its latest iteration, is a checkpoint of torch_dist or zarr."""
    if not path.is_dir():
        return False
    folder = checkpoint_folder(path)
    if not folder.is_dir():  # which is refused, unless it is the legacy format's
        folder = path
    return _is_iteration(folder)


def checkpoint_folder(path: FilePath) -> FilePath:
    """The folder of the iteration in a save directory, or NeMo's folder `weights`; else the
    path.
    """
    folder = iteration_folder(path)
    if folder != path or _is_iteration(path):
        return folder
    inside = [child for child in path.children() if child.is_dir()]
    if not any(child.name == _NEMO_WEIGHTS for child in inside):
        path = inside[0] if len(inside) == 1 else path
    weights = path / _NEMO_WEIGHTS
    has_table = (weights / METADATA_FILE).is_file()  # the formats decide whose it is
    return weights if has_table or (weights.is_dir() and _is_iteration(weights)) else folder


def _is_iteration(folder: FilePath) -> bool:
    """Whether a folder is that of an iteration: by `metadata.json`, or if that is lost, by objects
    or by `common.pt` beside the table of tensors.

    Checkpoints that only the keys in `.metadata` show are recognised by `is_fsdp`.
    """
    if backend_of(folder) is not None:
        return True
    for child in folder.children():
        if child.name.endswith(("rng_state", "._extra_state")) and any(
            path.name.startswith("shard_") for path in child.matching(".pt")
        ):
            return True
    return (folder / METADATA_FILE).is_file() and (folder / COMMON_FILE).is_file()


def is_fsdp(path: FilePath) -> bool:
    """Whether a directory is a save of Megatron in DCP's files alone: `.metadata` names the
    iteration, or keys of torch_dist where no config says that. That of a run's root need only be
    unreadable, since no other format would say so.
    """
    if not path.is_dir():
        return False
    folder = checkpoint_folder(path)
    table = (folder if folder.is_dir() else path) / METADATA_FILE
    if not table.is_file():
        return False
    data = table.read_bytes()
    if COUNTER.encode() in data or _TORCH_DIST.search(data):
        return True
    # below a root nobody else would say what is wrong with it
    return folder != path and not data.startswith(_PICKLE)


def is_legacy(path: FilePath) -> bool:
    """Whether a directory, or the folder that its tracker names, is a legacy checkpoint, or
    whether that folder is missing.
    """
    if not path.is_dir():
        return False
    folder = iteration_folder(path)
    return not folder.is_dir() or bool(rank_folders(folder))


def iteration_folder(path: FilePath) -> FilePath:
    """The folder of the iteration that the tracker names; without a tracker the only iteration's
    folder, or the path.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        inside = [child for child in path.children() if _SAVED.fullmatch(child.name)]
        return inside[0] if len(inside) == 1 else path
    text = tracker.read_pointer().strip()
    if text == "release":
        return path / text
    if not _ITERATION.fullmatch(text):
        raise FormatError(
            f"{tracker} should name an iteration or say `release`, but says {text!r:.80}"
        )
    return path / f"iter_{int(text):07d}"


def backend_of(folder: FilePath) -> str | None:
    """The backend that `metadata.json` names, or None."""
    path = folder / CONFIG_FILE
    if not path.is_file() or path.size() > _MAX_CONFIG_BYTES:
        return None
    try:
        config = decode_json(path.read_text())
    except ValueError:
        return None
    backend = as_dict(config).get("sharded_backend")
    return backend if isinstance(backend, str) else None


def rank_folders(folder: FilePath) -> list[str]:
    inside = (child for child in folder.children() if child.is_dir())
    return sorted(child.name for child in inside if _RANK_FOLDER.fullmatch(child.name))
