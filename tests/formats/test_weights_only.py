"""`weights_only` needs none of the optimizer's files: damaged, missing or another's."""

import os
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import arrays_of
from dcp_writer import Writer
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import UCPError
from jax_ucp.layout.box import Box
from torch_writer import save

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}


def flipped(path: Path) -> None:
    """One bit of the elements of the first tensor that is the optimizer's."""
    file = TorchFile(path)
    key = next(key for key in file.arrays() if key.startswith("optim") and key.endswith("exp_avg"))
    stored = file.read(key, Box.whole(file.arrays()[key].shape)).tobytes()
    data = path.read_bytes()
    assert data.count(stored) == 1
    at = data.index(stored)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_the_optimizer_of_a_trainers_file_is_not_verified(tmp_path):
    states = {0: {"exp_avg": WEIGHTS["a"] + 7}, 1: {"exp_avg": WEIGHTS["b"] + 7}}
    groups = [{"params": [0, 1], "param_names": ["a", "b"]}]
    optim = {"state": states, "param_groups": groups}
    save({"model": WEIGHTS, "optim": optim}, tmp_path / "run.pt")
    flipped(tmp_path / "run.pt")
    found = arrays_of(ucp.open(tmp_path / "run.pt", weights_only=True).save(tmp_path / "copy"))
    assert found.keys() == {"param/a", "param/b"}
    assert all(same_bits(found[f"param/{name}"], array) for name, array in WEIGHTS.items())
    with pytest.raises(UCPError, match="do not have the CRC"):
        ucp.open(tmp_path / "run.pt").save(tmp_path / "whole")


def dcp(folder: Path) -> Path:
    writer = Writer(folder)
    for name, array in WEIGHTS.items():
        own = (f"model.{name}", 0, array), (f"optim.state.{name}.exp_avg", 1, array + 1)
        for fqn, file, value in own:
            writer.tensor(fqn, value, [(f"__{file}_0.distcp", Box.whole(value.shape))])
            path = ("model", name) if file == 0 else ("optim", "state", name, "exp_avg")
            writer.paths[fqn] = path
    writer.object("optim.param_groups", "__1_0.distcp", [{"lr": 0.1}])
    writer.paths["optim.param_groups"] = ("optim", "param_groups")
    return writer.finish()


DAMAGES = [Path.unlink, lambda path: os.truncate(path, 100), lambda path: os.truncate(path, 0)]


@pytest.mark.parametrize("damage", DAMAGES, ids=["missing", "cut", "empty"])
def test_items_of_the_optimizer_need_not_be_there(damage, tmp_path):
    folder = dcp(tmp_path / "c")
    damage(folder / "__1_0.distcp")
    found = arrays_of(ucp.open(folder, weights_only=True).save(tmp_path / "copy"))
    assert found.keys() == {"param/a", "param/b"}
    assert all(same_bits(found[f"param/{name}"], array) for name, array in WEIGHTS.items())
    with pytest.raises(UCPError, match=r"__1_0\.distcp"):
        ucp.open(folder)
