"""Quantised models that libraries wrote, in JAX: the logits are those of transformers, which
dequantised them itself. `tests/generators/quantized_models.py` writes both.
"""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import decoder
import jax_ucp as ucp
import quantized_logits
from helpers import mesh_of
from jax_ucp.formats.safetensors.reader import SafetensorsFile
from jax_ucp.layout.box import Box
from quantized_logits import DATA, TOLERANCE, differences
from safetensors_writer import write_safetensors

MESH = mesh_of(4, 2)
# Case -> what of its parts is turned by a place: exponents, scales.
MIXTURES = {"gpt_oss_mxfp4": "down_proj_scales", "deepseek_v3_fp8": "proj.weight_scale_inv"}


@pytest.mark.parametrize("case", MIXTURES)
def test_a_model_restored_from_codes_and_scales_has_the_logits_of_the_reference(case):
    right, *wrong = differences(case, MESH)
    assert right <= TOLERANCE
    assert min(wrong) > 1000 * TOLERANCE


@pytest.mark.parametrize("case", MIXTURES)
def test_scales_of_other_blocks_give_other_logits(case, tmp_path):
    path = shutil.copytree(DATA / case / "ckpt", tmp_path / "c")
    file = SafetensorsFile(path / "model.safetensors")
    arrays = {name: file.read(name, Box.whole(i.shape)) for name, i in file.arrays().items()}
    for name in arrays:
        if name.endswith(MIXTURES[case]):
            arrays[name] = np.roll(arrays[name], 1, axis=0)
    write_safetensors(path / "model.safetensors", arrays, file.metadata)
    assert differences(case, MESH, path)[0] > 1000 * TOLERANCE


def test_a_llama_of_four_bits_has_the_logits_of_the_reference():
    checkpoint = ucp.open(DATA / "llama_int4" / "ckpt", dequantize="bfloat16")
    tree = checkpoint.map("hf-llama2-to-maxtext").restore()["param"]
    with np.load(DATA / "llama_int4" / "logits.npz") as stored:
        tokens, want = stored["tokens"], stored["logits"]
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    found = decoder.logits(tree, checkpoint.config, tokens)
    assert np.abs(found - want).max() <= TOLERANCE * np.abs(want).max()
    layers = tree["params"]["decoder"]["layers"]["mlp"]["wo"]
    layers["kernel"] = np.asarray(quantized_logits.exchanged(layers["kernel"]))
    off = decoder.logits(tree, checkpoint.config, tokens)
    assert np.abs(off - want).max() > 1000 * TOLERANCE * np.abs(want).max()


def test_every_model_is_run_by_the_example():
    assert {path.name for path in Path(DATA).iterdir()} == set(quantized_logits.CASES)
