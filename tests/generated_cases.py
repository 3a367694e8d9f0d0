"""Cases that a script of tests/generators wrote: `ckpt`, `truth.npz` by label, and `case.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.sources.consolidated import same_bits


def is_generated(folder: Path) -> bool:
    return (folder / "ckpt").exists() and "writer" in about(folder)


def about(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "case.json").read_text())


def truth(folder: Path) -> dict[str, np.ndarray]:
    """The live state; what ranks held differently has no truth, and is not in it."""
    dtypes = about(folder)["dtypes"]
    with np.load(folder / "truth.npz") as arrays:
        found = {key: arrays[key] for key in arrays.files if not key.startswith("differs/")}
    return {
        key: array.view(getattr(ml_dtypes, dtypes[key])) if key in dtypes else array
        for key, array in found.items()
    }


def equal(got: np.ndarray, want: np.ndarray) -> bool:
    """The same bits; numbers of Python are floats in a truth."""
    got = np.asarray(got)
    return float(got) == float(want) if not want.shape else same_bits(got, want)
