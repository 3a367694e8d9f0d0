"""The table of ggml's types in docs/quantization.md: `python tests/gguf_table.py` prints it, from a
run over `tests/data/gguf`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

import jax_ucp as ucp
from cases import Case, names_of
from jax_ucp.formats.quantized.ggml import SCHEME, TYPES

HEAD = "| type | cases | elements | dtype | reference | equal |\n|---|---|---|---|---|---|"


def table() -> str:
    """For each type, how many elements of how many files have the reference's bits."""
    cases: dict[str, set[str]] = defaultdict(set)
    elements: dict[str, int] = defaultdict(int)
    equal: dict[str, int] = defaultdict(int)
    for case in names_of("gguf"):
        live = Case(f"gguf/{case}")
        checkpoint, want = live.open(), live.truth()
        for weight in ucp.open(live.path)._contents.quantized:
            type, array = weight.scheme.removeprefix(SCHEME), checkpoint.read(weight.name)
            cases[type].add(case)
            elements[type] += array.size
            same = array.view(np.uint32) == want[weight.name].view(np.uint32)
            equal[type] += int(np.count_nonzero(same))
    reference = f"gguf {live.about['writer']['gguf']}"
    rows = []
    for type in TYPES:
        differ = elements[type] - equal[type]
        result = f"{differ:,} differ" if differ else "every bit"
        cells = type, ", ".join(sorted(cases[type])), f"{elements[type]:,}", "float32", reference
        rows.append(f"| {' | '.join([*cells, result])} |")
    return "\n".join([HEAD, *rows])


if __name__ == "__main__":
    print(table())
