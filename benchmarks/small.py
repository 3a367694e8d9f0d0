"""Ten thousand arrays of 1 KB over 8 devices: what each array costs, apart from its bytes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.elastic import TARGETS, compete
from benchmarks.race import Options, Table

ARRAYS = 10_000


def run(options: Options) -> Iterator[Table]:
    return compete(
        "arrays of 1 KB",
        {f"w{i:05}": (256,) for i in range(ARRAYS)},
        {"same": TARGETS["same"]},
        options,
    )
