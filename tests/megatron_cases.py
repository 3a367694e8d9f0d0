"""The Megatron cases and the live state of each, which tests compare with."""

import json
from pathlib import Path

import numpy as np

from jax_ucp.sources.consolidated import same_bits

DATA = Path(__file__).parent / "data" / "megatron"
# What `generators/megatron.py` wrote.
CORE = DATA.parent / "megatron_core"
EVERY = sorted(path.name for path in DATA.iterdir())
# Its writer, the released library, moved masters and moments.
CORRUPTED = "dist_pp2_dp2_distopt_buckets_fully_reshardable_fp32"
STATES = {"w": "param", "m": "exp_avg", "v": "exp_avg_sq"}


def about(case: str) -> dict:
    return json.loads((DATA / case / "case.json").read_text())


def truth(case: str) -> dict[str, np.ndarray]:
    """The live state, under our labels."""
    found = {}
    with np.load(DATA / case / "truth.npz") as arrays:
        for key in arrays.files:
            state, _, name = key.partition("/")
            if state in STATES:
                found[f"{STATES[state]}/{name}"] = arrays[key]
                found[f"step/{name}"] = arrays["step"]
            elif name:  # of `tests/generators`, under our labels
                found[key] = arrays[key]
    return found


def core_truth(case: str) -> dict[str, np.ndarray]:
    """The live state of a case of newer releases, with the steps of what Adam has moments of."""
    steps = json.loads((CORE / case / "case.json").read_text())["steps"]
    with np.load(CORE / case / "truth.npz") as arrays:
        state = {key: arrays[key] for key in arrays.files}
    names = [key.removeprefix("exp_avg/") for key in state if key.startswith("exp_avg/")]
    return state | {f"step/{name}": np.asarray(steps) for name in names}


def equal(got: np.ndarray, want: np.ndarray, label: str) -> bool:
    """The same bits; steps are integers in the truth, and fp32 in some files."""
    got = np.asarray(got)
    return float(got) == float(want) if label.startswith("step/") else same_bits(got, want)


def flat(tree: dict) -> dict[str, np.ndarray]:
    return {
        f"{state}/{name}": array for state, arrays in tree.items() for name, array in arrays.items()
    }


def swap(folder: Path, a: str, b: str) -> None:
    (folder / a).rename(folder / "aside")
    (folder / b).rename(folder / a)
    (folder / "aside").rename(folder / b)
