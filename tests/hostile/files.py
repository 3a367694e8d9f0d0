"""Checkpoints that say what no writer says, and a limit on the memory of reading them."""

import contextlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

import jax_ucp as ucp
from cases import DATA
from jax_ucp.universal.ocdbt import MANIFEST_FILE, ValueRange, index_parts

STOCK = DATA / "orbax"
MEMORY_BYTES = 1 << 30


def saved(path: Path, tree: Any) -> Path:
    """A universal checkpoint of a tree of numpy arrays."""
    return Path(ucp.Checkpoint.of(tree).save(path).path)


def resealed(path: Path, change: Callable[[Any], Any]) -> Path:
    """The universal checkpoint with another `ucp.json`, under the digest that is right for it."""
    file = path / "ucp.json"
    content = json.loads(file.read_bytes())
    content = change(content) or content
    file.write_bytes(sealed(json.dumps({**content, "digest": ""}, separators=(",", ":")).encode()))
    return path


def sealed(bare: bytes) -> bytes:
    """A `ucp.json` that ends with an empty digest, with the right one."""
    return bare.removesuffix(b'"}') + xxhash.xxh3_64_hexdigest(bare).encode() + b'"}'


def without_crcs(content: Any) -> None:
    """What a `ucp.json` says, as one says it that has no crc32c of inner chunks."""
    for stored in content["arrays"].values():
        stored.pop("crcs", None)


def renamed(path: Path, old: str, new: str) -> Path:
    """The universal checkpoint, in which the array of a leaf is said to be in another directory."""

    def change(content: Any) -> None:
        (leaf,) = (leaf for leaf in content["leaves"] if leaf["name"] == old)
        leaf["name"] = new
        content["arrays"][new] = content["arrays"].pop(old)
        content["files"][f"{new}/zarr.json"] = content["files"].pop(f"{old}/zarr.json")

    return resealed(path, change)


def stock(path: Path, name: str = "plain") -> Path:
    """A checkpoint that stock Orbax wrote."""
    return Path(shutil.copytree(STOCK / name, path))


def stock_entry(content: dict[str, Any], name: str) -> dict[str, Any]:
    """What a `_METADATA` says of the leaf with this key."""
    entries = content["tree_metadata"].values()
    return next(entry for entry in entries if entry["key_metadata"][-1]["key"] == name)


def plain_stock(path: Path, arrays: Mapping[str, dict[str, Any]], **about: Any) -> Path:
    """A checkpoint of stock Orbax v0 without OCDBT: each array's zarr v2 metadata, no chunk."""
    path.mkdir(parents=True)
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    keys = {name: [{"key": name, "key_type": 2}] for name in arrays}
    entries = {str((n,)): {"key_metadata": k, "value_metadata": {**value}} for n, k in keys.items()}
    content = {"tree_metadata": entries, "use_ocdbt": False, "use_zarr3": False}
    content |= {"custom_metadata": None, **about}
    (path / "_METADATA").write_text(json.dumps(content))
    for name, metadata in arrays.items():
        usual = {"zarr_format": 2, "order": "C", "filters": None, "fill_value": 0}
        usual["compressor"] = {"id": "zstd", "level": 1}
        usual |= {"dtype": "<f4", "dimension_separator": "."}
        (path / name).mkdir(parents=True)
        (path / name / ".zarray").write_text(json.dumps(usual | metadata))
    return path


def write_zarr(folder: Path, data: np.ndarray, **metadata: Any) -> None:
    """An array of zarr v2."""
    store = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "zarr", "kvstore": store, "create": True, "open": True}
    about = {"shape": list(data.shape), "dtype": data.dtype.str}
    about |= {"chunks": list(data.shape), **metadata}
    ts.open({**spec, "metadata": about}).result().write(data).result()


def write_database(folder: Path, values: dict[str, bytes], file: str = "data") -> None:
    """An OCDBT database, whose values are said to lie in `file`."""
    entries, end = list[tuple[bytes, ValueRange]](), 0
    for key, value in values.items():
        entries.append((key.encode(), ValueRange(file, end, len(value))))
        end += len(value)
    parts, manifest = index_parts("node", sorted(entries))
    (folder / "data").write_bytes(b"".join(values.values()))
    (folder / "node").write_bytes(b"".join(parts))
    (folder / MANIFEST_FILE).write_bytes(manifest)


@contextlib.contextmanager
def little_memory(nbytes: int = MEMORY_BYTES) -> Iterator[None]:
    """At most so many bytes more than the process has now: else there is a MemoryError."""
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
