"""The table of ggml's types in docs/quantization.md: `python tests/gguf_table.py` prints it, from a
run over `tests/data/gguf`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

import jax_ucp as ucp
from gguf_cases import CASES, about, file_of, truth
from jax_ucp.formats.quantized.ggml import SCHEME, TYPES

HEAD = "| type | cases | elements | dtype | reference | equal |\n|---|---|---|---|---|---|"


def table() -> str:
    """For each type, how many elements of how many files have the reference's bits."""
    cases: dict[str, set[str]] = defaultdict(set)
    elements: dict[str, int] = defaultdict(int)
    equal: dict[str, int] = defaultdict(int)
    for case in CASES:
        checkpoint, want = ucp.open(file_of(case), dequantize="float32"), truth(case)
        for weight in ucp.open(file_of(case))._contents.quantized:
            type, array = weight.scheme.removeprefix(SCHEME), checkpoint.read(weight.name)
            cases[type].add(case)
            elements[type] += array.size
            same = array.view(np.uint32) == want[weight.name].view(np.uint32)
            equal[type] += int(np.count_nonzero(same))
    reference = f"gguf {about(CASES[0])['writer']['gguf']}"
    rows = []
    for type in TYPES:
        differ = elements[type] - equal[type]
        result = f"{differ:,} differ" if differ else "every bit"
        cells = type, ", ".join(sorted(cases[type])), f"{elements[type]:,}", "float32", reference
        rows.append(f"| {' | '.join([*cells, result])} |")
    return "\n".join([HEAD, *rows])


if __name__ == "__main__":
    print(table())
