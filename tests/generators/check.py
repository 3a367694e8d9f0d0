"""`python tests/generators/check.py FOLDER...`: checkpoints that generators wrote, compared with
their truths, bit for bit.

A folder has a folder for each case: `ckpt`, `truth.npz` (`<state>/<parameter>`, types that numpy
lacks as unsigned bits) and `case.json` (`writer`, `options` of `jax_ucp.open`, `dtypes`, and `file`
where one in `ckpt` is opened).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16 by name)
import numpy as np

import jax_ucp as ucp

_SHOWN = 3


def faults(case: Path) -> list[str]:
    """What of the truth is not in the checkpoint, bit for bit, and what else is under its states."""
    about = json.loads((case / "case.json").read_text())
    options = about.get("options", {})
    (path,) = case.glob(f"ckpt/{about['file']}" if "file" in about else "ckpt*")
    checkpoint = ucp.open(path, **options)
    with np.load(case / "truth.npz") as file:
        truth = {name: file[name] for name in file.files}
    if not truth:
        return ["the truth is empty"]
    states = {label.partition("/")[0] for label in truth}
    leaves = {leaf.label for leaf in checkpoint.leaves if leaf.has_array}
    extra = {label for label in leaves - truth.keys() if label.partition("/")[0] in states}
    found = [f"{label} is not in the truth" for label in sorted(extra)]
    for label, want in truth.items():
        if label not in leaves:
            found.append(f"{label} is missing")
        elif not _same(checkpoint.read(label), want, about.get("dtypes", {}).get(label)):
            found.append(f"{label} differs")
    return found


def _same(got: np.ndarray, want: np.ndarray, dtype: str | None) -> bool:
    if dtype is not None and got.dtype != np.dtype(dtype):
        return False
    return got.shape == want.shape and got.tobytes() == want.tobytes()


def main(folders: list[str]) -> int:
    """Print a line a case and how many are right; the exit code is 1 where one is not."""
    count: Counter[bool] = Counter()
    cases = sorted(file.parent for folder in folders for file in Path(folder).glob("*/case.json"))
    for case in cases:
        try:
            wrong = faults(case)
        except ucp.errors.UCPError as error:
            wrong = [f"refused: {error}"]
        count[not wrong] += 1
        print(f"{case.name}: {'; '.join(wrong[:_SHOWN]) or 'equal'}")
    print(f"{count[True]} equal, {count[False]} not")
    return 1 if count[False] or not cases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
