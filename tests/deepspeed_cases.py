"""The DeepSpeed cases and the live state of each, which tests compare with."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jax_ucp.sources.consolidated import same_bits

DATA = Path(__file__).parent / "data" / "deepspeed"
# ZeRO-0 in fp32 stores no names; both runs grouped their parameters by weight decay, each group in
# the module's order.
NUMBERED = ("z0_fp32_dp2", "moe_ep2_dp2_z0_fp32")
STATES = {"fp32": "param", "frozen": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
STATES |= {"momentum_buffer": "momentum_buffer"}


def word(path: Path | str) -> dict[str, Any]:
    """The user's word that a case needs to be opened whole: the order of its optimizer groups,
    if nothing tells.
    """
    return {"optimizer_groups": "module-order"} if set(NUMBERED) & set(Path(path).parts) else {}


def truth(case: str) -> dict[str, np.ndarray]:
    """The live state, under our labels. What the run left out of its files on purpose is left
    out here.
    """
    about = json.loads((DATA / case / "case.json").read_text())
    found = {}
    with np.load(DATA / case / "truth.npz") as arrays:
        for key in arrays.files:
            state, _, name = key.partition("/")
            if state in STATES and not (state == "frozen" and case.endswith("exclude_frozen")):
                found[f"{STATES[state]}/{name}"] = arrays[key]
    for label in (
        [label for label in found if label.startswith("param/")]
        if about["counters"]["optimizer_steps"]
        else ()
    ):
        name = label.partition("/")[2]
        if f"exp_avg/{name}" in found:
            (found[f"step/{name}"],) = about["counters"]["optimizer_steps"]
    return {label: np.asarray(value) for label, value in found.items()}


def equal(got: np.ndarray, want: np.ndarray, label: str) -> bool:
    """The same bits; the truth holds steps as integers, and widened to fp32 what a run kept in
    bf16.
    """
    got = np.asarray(got)
    return (
        float(got) == float(want)
        if label.startswith("step/")
        else same_bits(got.astype(np.float32), want)
    )
