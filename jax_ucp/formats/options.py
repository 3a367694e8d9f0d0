"""What the user says of a checkpoint that it does not say itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Options:
    """`sizes` are lengths by name (`vocab`); `spec` is a file in the universal checkpoint language that says how
    shards form parameters; `weights_only` leaves the optimizer aside. `believe` says which of two stored copies is
    right where they differ, `master` or `copy`: then they are not compared. The master is also the first of several
    replicas; a copy is what the model computed with, in its dtype. `dequantize=False` keeps quantised weights as the
    parts that are stored; None refuses to hand them out.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    spec: Path | None = None
    weights_only: bool = False
    believe: Literal["master", "copy"] | None = None
    dequantize: Literal[False] | None = None
