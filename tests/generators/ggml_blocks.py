"""Writes `tests/data/ggml_blocks.json`: of blocks of any bits, of each type that is dequantised, the
SHA-256 of the numbers that gguf-py gives them.

    python tests/generators/ggml_blocks.py

It needs gguf, and what jax_ucp needs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

import gguf
import numpy as np

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from gguf_writer import BLOCKS, fixed_blocks  # noqa: E402


def digest(type: str) -> str:
    with np.errstate(over="ignore"):
        values = gguf.quants.dequantize(fixed_blocks(type), gguf.GGMLQuantizationType[type])
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


if __name__ == "__main__":
    writer = {"gguf": importlib.metadata.version("gguf")}
    said = {"writer": writer, "types": {type: digest(type) for type in BLOCKS}}
    (TESTS / "data" / "ggml_blocks.json").write_text(json.dumps(said, indent=1) + "\n")
