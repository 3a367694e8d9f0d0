"""The cases of data/torch, the live state of each, and what is asked of every checkpoint that opens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from jax_ucp.storage.consolidated import same_bits

DATA = Path(__file__).parent / "data" / "torch"
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
RULES = [(r"weight$|wte", P("data", "model"))]


def about(case: str) -> dict[str, Any]:
    return json.loads((DATA / case / "case.json").read_text())


def live(case: str) -> dict[str, np.ndarray]:
    """The arrays of truth.npz by their keys; types that numpy lacks are stored there as bits."""
    dtypes = about(case)["dtypes"]
    with np.load(DATA / case / "truth.npz") as arrays:
        return {
            key: arrays[key].view(getattr(ml_dtypes, dtype, None) or np.dtype(dtype)) for key, dtype in dtypes.items()
        }


def assert_equal_however_read(checkpoint: ucp.Checkpoint, want: Mapping[str, np.ndarray], folder: Path) -> None:
    """Its leaves are just those wanted, bit for bit: as read, as restored on a mesh, and as converted and restored."""
    assert {leaf.label for leaf in checkpoint.leaves} == set(want)
    converted = checkpoint.save(folder / "converted")
    jax.config.update("jax_enable_x64", True)  # not jax.enable_x64(): restore's threads would not see it
    try:
        straight = _flat(checkpoint.restore(mesh=MESH, rules=RULES))
        kept = _flat(converted.restore(mesh=MESH, rules=RULES))
    finally:
        jax.config.update("jax_enable_x64", False)
    for label, array in want.items():
        assert same_bits(checkpoint.read(label), array), label
        assert same_bits(np.asarray(straight[label]), array), label
        assert same_bits(np.asarray(kept[label]), array), label
    assert converted.extras == checkpoint.extras
    for one in (checkpoint, converted):
        assert [fault for _, fault in one.verify() if fault] == []


def assert_accounted_for(checkpoint: ucp.Checkpoint) -> None:
    """Every stored thing is in the account once, with a reason."""
    assert len({item.where for item in checkpoint.account}) == len(checkpoint.account)
    assert all(item.reason and item.reason != "not understood" for item in checkpoint.account)
    json.dumps(checkpoint.extras)


def _flat(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{state}/{name}": array for state, arrays in tree.items() for name, array in arrays.items()}
