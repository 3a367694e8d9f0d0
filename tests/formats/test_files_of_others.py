"""Files of formats that are not read: the refusal says what they are and the way in."""

import re

import pytest

import jax_ucp as ucp
from jax_ucp.errors import NotACheckpoint

OTHERS = {
    "model.keras": "a model of Keras in an archive, which is not read here: load it, `model =",
    "model.weights.h5": "Keras's HDF5, which is not read here: build the model and load it",
    "arrays.npz": "numpy's npz, which is not read here: `ucp.Checkpoint.of(dict(np.load(path)))`",
    "model.nemo": "NeMo's archive, which is not read here: unpack it",
    "model.onnx": "ONNX, which is not read here: export the model's weights as safetensors",
}


@pytest.mark.fast
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_format_is_named_with_the_way_in(name, tmp_path):
    (tmp_path / name).write_bytes(b"PK\x03\x04 or whatever it is")
    with pytest.raises(NotACheckpoint, match=re.escape(f"{name} is {OTHERS[name]}")) as error:
        ucp.open(tmp_path / name)
    assert "\n" not in str(error.value)
    with pytest.raises(NotACheckpoint, match=re.escape(f"{name} in it is {OTHERS[name]}")):
        ucp.open(tmp_path)


@pytest.mark.fast
def test_a_folder_that_is_called_like_a_file_of_another_format_is_looked_into(tmp_path):
    (tmp_path / "run.onnx").mkdir()
    with pytest.raises(NotACheckpoint, match="not a checkpoint of a format known here"):
        ucp.open(tmp_path / "run.onnx")
