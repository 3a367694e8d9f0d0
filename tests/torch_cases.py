"""The cases that torch and transformers wrote, and the live state of each, which tests compare with."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

DATA = Path(__file__).parent / "data" / "torch"


def about(case: str) -> dict:
    return json.loads((DATA / case / "case.json").read_text())


def truth(case: str) -> dict[str, np.ndarray]:
    """The live state by our labels; types that numpy lacks are stored as bits. Of files, `file:key`."""
    said = about(case)
    with np.load(DATA / case / "truth.npz") as arrays:
        bits = {key: arrays[key].view(_dtype(said["dtypes"][key])) for key in arrays.files if key in said["dtypes"]}
        if said["kind"] == "torch_save":
            return {key.removeprefix("tensor::"): array for key, array in bits.items() if key.startswith("tensor::")}
        if said["kind"] == "hf":
            found = {f"param/{name}": bits[key] for key, name in said["map"].items()}
            return found | {f"param/{name}": _expert(name, arrays) for name in said["only_in_file"]}
        found = {}
        for key, array in bits.items():
            state, _, name = key.partition("::")
            if state == "tensor":  # something beside the model; torch 1.13 recorded no paths, which would tell
                state, name = ("other" if "v1131" not in case else "param"), said["map"][key]
            found[f"{'param' if state == 'model' else state}/{name}"] = array
        return found


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def _expert(name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a file calls `layers.0.block_sparse_moe.experts.1.w2.weight`, or a gate that memory has by another name."""
    if not (found := re.fullmatch(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight", name)):
        return arrays[f"model::{name.replace('block_sparse_moe', 'mlp')}"]
    layer, i, part = found[1], int(found[2]), found[3]
    if part in ("w2", "down_proj"):
        return arrays[f"model::{layer}.mlp.experts.down_proj"][i]
    gate, up = np.split(arrays[f"model::{layer}.mlp.experts.gate_up_proj"][i], 2)
    return gate if part in ("w1", "gate_proj") else up
