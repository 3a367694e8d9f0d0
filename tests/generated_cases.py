"""Cases that a script of tests/generators wrote: `ckpt`, `truth.npz` by label, and `case.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_ucp.sources.consolidated import same_bits


def is_generated(folder: Path) -> bool:
    made = (folder / "case.json").is_file() and (folder / "truth.npz").is_file()
    return made and isinstance(about(folder).get("writer"), dict)


def about(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "case.json").read_text())


def truth(folder: Path) -> dict[str, np.ndarray]:
    """The live state as it is stored, by label; what ranks held differently has no truth."""
    states = _arrays(folder)
    return {key: states[key] for key in states if not key.startswith(("differs/", "dequantized"))}


def meant(folder: Path) -> dict[str, np.ndarray]:
    """What codes in the live state meant, by `dequantized<number of the state>/<parameter>`."""
    states = _arrays(folder)
    return {key: states[key] for key in states if key.startswith("dequantized")}


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    dtypes = about(folder)["dtypes"]
    with np.load(folder / "truth.npz") as arrays:
        found = {key: arrays[key] for key in arrays.files}
    return {
        key: array.view(getattr(ml_dtypes, dtypes[key])) if key in dtypes else array
        for key, array in found.items()
    }


def equal(got: np.ndarray, want: np.ndarray) -> bool:
    """The same bits; numbers of Python are floats in a truth."""
    got = np.asarray(got)
    return float(got) == float(want) if not want.shape else same_bits(got, want)
