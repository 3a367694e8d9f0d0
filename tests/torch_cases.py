"""The cases of data/torch, the live state of each, and what is asked of every checkpoint that
opens.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from helpers import restored_on
from jax_ucp.sharding.jax_versions import enable_x64
from jax_ucp.sources.consolidated import same_bits

DATA = Path(__file__).parent / "data" / "torch"
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
RULES = [(r"weight$|wte", P("data", "model"))]
# Their state dicts had no paths: torch 1.13 took flat ones only, and flatten_state_dict=False
# leaves them as they are.
FLAT = ("old_v1131", "dcp_noflatten")


def about(case: str) -> dict[str, Any]:
    return json.loads((DATA / case / "case.json").read_text())


def live(case: str) -> dict[str, np.ndarray]:
    """The arrays of truth.npz by their keys; types that numpy lacks are stored there as bits."""
    dtypes = about(case)["dtypes"]
    with np.load(DATA / case / "truth.npz") as arrays:
        return {
            key: arrays[key].view(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))
            for key, dtype in dtypes.items()
        }


def truth(case: str) -> dict[str, np.ndarray]:
    """The live state under our labels: by full names beside the model, by `file:key` in files."""
    said, arrays = about(case), live(case)
    if said["kind"].startswith("torch_save"):
        return {key.removeprefix("tensor::"): array for key, array in arrays.items()}
    names = said["map"]
    if said["kind"] in ("hf", "dcp_hf"):
        found = {f"param/{name}": arrays[key] for key, name in names.items()}
        # Experts, which the live model holds fused.
        return found | {
            f"param/{name}": _expert(name, arrays) for name in said.get("only_in_file", ())
        }
    found = {}
    for key, array in arrays.items():
        state, _, name = key.partition("::")
        if case in FLAT or state == "tensor":
            state, name = "param" if case in FLAT else "other", names[key]
        found[f"{'param' if state == 'model' else state}/{name}"] = array
    # the trainer's own count, which is in no optimizer and so not in the truth
    if case.startswith("titan"):
        found["other/train_state.step"] = np.asarray(said["steps"], np.int32)
    return found


def _expert(name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a file calls `layers.0.block_sparse_moe.experts.1.w2.weight`, or a gate that memory
    has by another name.
    """
    if not (
        found := re.fullmatch(
            r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight", name
        )
    ):
        return arrays[f"model::{name.replace('block_sparse_moe', 'mlp')}"]
    layer, i, part = found[1], int(found[2]), found[3]
    if part in ("w2", "down_proj"):
        return arrays[f"model::{layer}.mlp.experts.down_proj"][i]
    gate, up = np.split(arrays[f"model::{layer}.mlp.experts.gate_up_proj"][i], 2)
    return gate if part in ("w1", "gate_proj") else up


def assert_equal_however_read(
    checkpoint: ucp.Checkpoint, want: Mapping[str, np.ndarray], folder: Path
) -> None:
    """Its leaves are just those wanted, bit for bit: as read, as restored on a mesh, and as
    converted and restored.
    """
    assert {leaf.label for leaf in checkpoint.leaves} == set(want)
    converted = checkpoint.save(folder / "converted")
    with enable_x64(True):
        straight = _flat(restored_on(MESH, checkpoint, RULES))
        kept = _flat(restored_on(MESH, converted, RULES))
    for label, array in want.items():
        assert same_bits(checkpoint.read(label), array), label
        assert same_bits(np.asarray(straight[label]), array), label
        assert same_bits(np.asarray(kept[label]), array), label
    assert converted.extras == checkpoint.extras
    for one in (checkpoint, converted):
        assert [fault for _, fault in one.verify() if fault] == []


def assert_accounted_for(checkpoint: ucp.Checkpoint) -> None:
    """Every stored thing is in the inventory once, with a reason."""
    assert len({item.where for item in checkpoint.inventory}) == len(checkpoint.inventory)
    assert all(item.reason and item.reason != "not understood" for item in checkpoint.inventory)
    json.dumps(checkpoint.extras)


def _flat(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{state}/{name}": array for state, arrays in tree.items() for name, array in arrays.items()
    }
