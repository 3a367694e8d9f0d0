"""The GGUF files that `tests/generators/gguf_files.py` wrote: `ckpt`, `truth.npz`, `case.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DATA = Path(__file__).parent / "data" / "gguf"
CASES = sorted(path.name for path in DATA.iterdir())


def about(case: str) -> Mapping[str, Any]:
    return json.loads((DATA / case / "case.json").read_text())


def file_of(case: str) -> Path:
    """The file, or the first of several."""
    return DATA / case / "ckpt" / about(case)["file"]


def truth(case: str) -> dict[str, np.ndarray]:
    """Every tensor by label, as gguf-py has it; what is in blocks as float32."""
    with np.load(DATA / case / "truth.npz") as arrays:
        return {
            label: array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
            for label, array in arrays.items()
        }
