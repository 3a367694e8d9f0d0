"""The table of docs/adapters.md, from tests/data/adapters: `python tests/adapters_table.py`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import jax_ucp as ucp

DATA = Path(__file__).parent / "data" / "adapters"
PAGE = Path(__file__).parents[1] / "docs" / "adapters.md"
# without those where peft loads the base into a model whose names begin otherwise
names = (path.parent.name for path in DATA.glob("*/merged.npz"))
CASES = sorted(name for name in names if "headless" not in name)
HEAD = "| case | peft | elements changed | equal to peft's, bit for bit | largest difference |\n|---|---|---|---|---|"


def row(case: str) -> str:
    """The line of a case: of the elements that an adapter changes, how many have peft's bits, and
    by how much the others differ, in parts of the largest number of their weight.
    """
    folder = DATA / case
    writer = json.loads((folder / "case.json").read_text())["writer"]
    base = ucp.open(folder / "base")
    adapters = [path.parent for path in sorted(folder.glob("adapter/**/adapter_config.json"))]
    merged = base.merge(*adapters)
    changed = equal = 0
    largest = 0.0
    with np.load(folder / "merged.npz") as pefts:
        for leaf in merged.leaves:
            got = merged.read(leaf.label)
            want = pefts[str(leaf.path[1])].view(got.dtype)
            before = base.read(leaf.label) if leaf.label in base else np.zeros_like(got)
            if before.shape != got.shape:  # tokens were added
                before = np.zeros_like(got)
            is_changed = got != before
            changed += int(is_changed.sum())
            equal += int((got[is_changed] == want[is_changed]).sum())
            wide = want.astype(np.float64)
            largest = max(largest, np.abs(got - wide).max() / np.abs(wide).max())
    share = f"{equal / changed:.0%}" if equal < changed else "all"
    difference = f"{largest:.0e}" if largest else "none"
    return f"| {case} | {writer['peft']} | {changed:,} | {share} | {difference} |"


if __name__ == "__main__":
    print("\n".join([HEAD, *map(row, CASES)]))
