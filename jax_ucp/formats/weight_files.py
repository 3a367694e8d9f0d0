"""What folders of weights have in common, whatever their files are: an index, a config, and files beside them.

Facts: `transformers` writes `<name>.index.json` with a `weight_map` of names to files, and `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_ucp.errors import FormatError
from jax_ucp.formats.importing import Import
from jax_ucp.storage.source_files import noted

CONFIG = "config.json"


def read_json(path: Path) -> Any:
    try:
        return json.loads(noted(path).read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from None


def read_index(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    """An index and the files that it names, which are all beside it. Raises FormatError where one is not."""
    index = read_json(path)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise FormatError(f"{path} has no weight_map of names to files")
    names, beside = sorted(set(weights.values())), {file.name for file in path.parent.iterdir() if file.is_file()}
    for name in names:
        if name not in beside:
            raise FormatError(f"{path} names the file {name!r}, which is not beside it")
    return index, names


def keep_index(found: Import, path: Path, index: Mapping[str, Any], there: Iterable[tuple[str, str]]) -> None:
    """Account for an index; `there` are the tensors of its files: (file, name). Raises FormatError if it has others."""
    said = {(name, key) for key, name in index["weight_map"].items()}
    for name, key in sorted(said ^ set(there)):
        where = "in the index, but not in the file" if (name, key) in said else "in the file, but not so in the index"
        raise FormatError(f"{found.path}: {key} of {name} is {where}; the files are not of one checkpoint")
    found.skip(path.name, "index", "says which file has which tensor; compared with the files")
    for key, value in (index.get("metadata") or {}).items():
        found.extra(path.name, key, value)


def keep_config(found: Import, folder: Path) -> None:
    if (folder / CONFIG).is_file():
        found.extra(CONFIG, "config", read_json(folder / CONFIG))


def skip_others(found: Import, used: Collection[str], suffix: str, known: Mapping[str, str]) -> None:
    """Account for what lies beside the files used; `known` has reasons by name, others with `suffix` are noted."""
    for path in sorted(found.path.iterdir()):
        if path.name not in used and path.name != CONFIG:
            reason = known.get(path.name, "lies beside the weights; not read")
            found.skip(path.name, "folder" if path.is_dir() else "file", reason)
            if path.name.endswith(suffix):
                found.notes.append(f"{path.name} is not in the index, so it was not read")
