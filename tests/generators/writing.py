"""What all generators do: choose cases by name, write each into a folder of its own, and its truth."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser of `OUT [--only PART ...]`."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=plain)
    parser.add_argument("out", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of cases")
    return parser


def chosen(names: Iterable[str], parts: Iterable[str]) -> list[str]:
    """The names that have one of the parts; all, without parts."""
    wanted = [*parts]
    return [name for name in names if not wanted or any(part in name for part in wanted)]


def write_each(names: Iterable[str], out: Path, write: Callable[[str, Path], None]) -> list[str]:
    """Those of the cases that are not written, though nothing that they import is missing. Of those
    that are not, nothing is left: a writer of another release may lack what they need.
    """
    failed = []
    for name in names:
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            write(name, folder)
        except Exception as error:
            print(f"{name}: not written: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, ImportError):
                traceback.print_exc()
                failed.append(name)
            shutil.rmtree(folder)
        else:
            print(name, flush=True)
    return failed


def bits(value: Any) -> tuple[np.ndarray, str]:
    """An array of elements, of those that numpy lacks as unsigned numbers, and what they are."""
    name = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if hasattr(value, "detach"):  # a tensor of torch
        import torch

        value = value.detach().cpu().contiguous()
        if name == "bfloat16" or name.startswith("float8"):
            whole = {1: torch.uint8, 2: torch.int16}[value.element_size()]
            return value.view(whole).numpy().view(f"u{value.element_size()}").copy(), name
        return value.numpy().copy(), name
    array = np.asarray(value)
    is_own = array.dtype.type.__module__ == "numpy"
    return (array if is_own else array.view(f"u{array.dtype.itemsize}")), array.dtype.name


def write_case(folder: Path, truth: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """The truth beside a checkpoint, and what is said of it, with the dtypes that numpy lacks."""
    found = {key: bits(value) for key, value in truth.items()}
    np.savez_compressed(folder / "truth.npz", **{key: array for key, (array, _) in found.items()})
    lacking = {key: name for key, (array, name) in found.items() if array.dtype.name != name}
    said = {**about, "dtypes": {**about.get("dtypes", {}), **lacking}}
    (folder / "case.json").write_text(json.dumps(said, indent=1) + "\n")


def versions(*packages: str) -> dict[str, str]:
    """The versions of those of the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
