"""What `tests/generators/orbax.py` wrote, with various versions of Orbax and Flax, and what the
JAX that is installed can do.
"""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

FOLDER = Path(__file__).parent / "data" / "jax"


def about(name: str) -> dict:
    return json.loads((FOLDER / name / "case.json").read_text())


def truth(name: str) -> dict[str, np.ndarray]:
    """The arrays of the process that wrote the case, by label."""
    dtypes = about(name)["dtypes"]
    with np.load(FOLDER / name / "truth.npz") as stored:
        return {label: _typed(stored[label], dtype) for label, dtype in dtypes.items()}


def require_memory(kind: str | None) -> None:
    """Skip the test if the devices have no memory of that kind."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if kind not in {None, *kinds}:
        pytest.skip(f"these devices have no {kind}")


def _typed(array: np.ndarray, name: str) -> np.ndarray:
    """The array in its dtype: those that numpy does not have are stored as unsigned bits."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    return array if array.dtype == dtype else array.view(dtype)
