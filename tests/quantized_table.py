"""The table of docs/quantization.md, of tests/data/quantized: `python tests/quantized_table.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cases import Case
from quantized_cases import weight_of

DATA = Path(__file__).parent / "data" / "quantized"
PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"
CASES = sorted(path.name for path in DATA.iterdir())
HEAD = "| case | scheme | weights | elements | dtype | reference | equal |\n|---|---|---|---|---|---|---|"

# Whose dequantisation the truth is, of the packages that wrote a case.
_REFERENCES = (
    "gptqmodel", "autoawq", "bitsandbytes", "nvidia-modelopt", "torchao", "compressed-tensors", "mlx",
)  # fmt: skip


def row(case: str) -> str:
    """The line of a case: how many elements of its quantised weights have the reference's bits."""
    live = Case(f"quantized/{case}")
    said, checkpoint = live.about, live.open()
    arrays = checkpoint._contents.arrays
    weights = {leaf.label: weight_of(arrays, leaf.name) for leaf in checkpoint.leaves}
    schemes = sorted({weight.scheme for weight in weights.values() if weight})
    shapes = sorted({weight.shape for weight in weights.values() if weight})
    elements = equal = 0
    for label, want in live.truth().items():
        if weights[label] is None:
            continue
        made = checkpoint.read(label)
        elements += want.size
        if made.dtype == want.dtype and made.shape == want.shape:
            equal += int((_bits(made) == _bits(want)).sum())
    result = "all bits" if equal == elements else f"{elements - equal:,} differ"
    sizes = ", ".join("x".join(map(str, shape)) for shape in shapes)
    dtype = said["options"]["dequantize"]
    cells = case, ", ".join(schemes), sizes, f"{elements:,}", dtype, _reference(case, said), result
    return f"| {' | '.join(cells)} |"


def table() -> str:
    return "\n".join([HEAD, *map(row, CASES)])


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _reference(case: str, said: dict[str, dict[str, str]]) -> str:
    writer = said["writer"]
    if case.startswith(("mxfp4", "fp8")):
        return f"transformers {writer['transformers']}"
    name = next(name for name in _REFERENCES if name in writer)
    return f"{name} {writer[name]}"


if __name__ == "__main__":
    print(table())
