"""The cases of data/trainers, which `generators/trainers.py` writes, and the live state of each."""

import json
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data" / "trainers"


def about(case: str) -> dict[str, Any]:
    return json.loads((DATA / case / "case.json").read_text())


def live(case: str) -> dict[str, np.ndarray]:
    """The live state by our labels; peft leaves the adapter's name out of those in files."""
    with np.load(DATA / case / "truth.npz") as arrays:
        found = {key: arrays[key] for key in arrays if not key.startswith("io/")}
    if about(case).get("names") == "peft":
        found = {key.replace(".default.", "."): array for key, array in found.items()}
    return found


def truth(case: str) -> dict[str, np.ndarray]:
    """The live state that is in the folder: of an adapter its own weights, not the base's."""
    return {
        label: array
        for label, array in live(case).items()
        if about(case).get("names") != "peft" or "lora" in label
    }
