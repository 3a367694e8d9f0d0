"""The table of ggml's types in docs/quantization.md: `python tests/gguf_table.py` prints it, from a
run over `tests/data/gguf` and over blocks of any bits.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict

import numpy as np

import jax_ucp as ucp
from cases import DATA, Case, names_of
from gguf_writer import FIXED, fixed_blocks
from jax_ucp.formats.quantized.ggml import TYPES
from jax_ucp.formats.quantized.names import GGML

# What `tests/generators/ggml_blocks.py` found.
BY_GGUF_PY = json.loads((DATA / "ggml_blocks.json").read_text())
HEAD = "| type | cases | elements | dtype | reference | equal |\n|---|---|---|---|---|---|"


def digest(type: str) -> str:
    """The SHA-256 of the numbers of blocks of any bits."""
    with np.errstate(over="ignore"):
        values = TYPES[type].values(fixed_blocks(type))
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def table() -> str:
    """For each type, how many elements of how many files have the reference's bits."""
    cases: dict[str, set[str]] = defaultdict(set)
    elements: dict[str, int] = defaultdict(int)
    equal: dict[str, int] = defaultdict(int)
    for case in names_of("gguf"):
        live = Case(f"gguf/{case}")
        checkpoint, want = live.open(), live.truth()
        for weight in ucp.open(live.path)._contents.quantized:
            type, array = weight.scheme.removeprefix(GGML), checkpoint.read(weight.name)
            cases[type].add(case)
            elements[type] += array.size
            same = array.view(np.uint32) == want[weight.name].view(np.uint32)
            equal[type] += int(np.count_nonzero(same))
    reference = f"gguf {live.about['writer']['gguf']}"
    rows = []
    for type in TYPES:
        if not cases[type]:
            cases[type] = {f"{FIXED:,} blocks of any bits"}
            elements[type] = FIXED * TYPES[type].elements
            equal[type] = elements[type] * (digest(type) == BY_GGUF_PY["types"][type])
        differ = elements[type] - equal[type]
        result = f"{differ:,} differ" if differ else "every bit"
        cells = type, ", ".join(sorted(cases[type])), f"{elements[type]:,}", "float32", reference
        rows.append(f"| {' | '.join([*cells, result])} |")
    return "\n".join([HEAD, *rows])


if __name__ == "__main__":
    print(table())
