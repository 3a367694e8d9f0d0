"""Codes and scales in a model's own quantised leaves, by a mapping that names them `stored/NAME`.

`examples/quantized_leaves.py` runs the libraries that have such leaves.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import jax_ucp as ucp
from helpers import faults_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import LayoutError, QuantizedWeights, SpecError

DATA = Path(__file__).parents[2] / "data" / "quantized"
MAPPING = Path(__file__).parents[3] / "examples" / "models" / "hf-llama-8bit-to-qwix.yaml"
ASSUME = ["rope_theta"]
CODES = {"ct_int8_channel": np.int8, "ct_fp8_channel_odd": ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize("case", CODES)
def test_codes_times_scales_in_their_leaves_are_the_weights_in_theirs(case, tmp_path):
    path = DATA / case / "ckpt"
    mapped = ucp.open(path, dequantize=False).map(MAPPING, assume=ASSUME)
    whole = ucp.open(path, dequantize="float32").map("hf-llama-to-tunix", assume=ASSUME)
    saved = mapped.save(tmp_path / "saved")
    weights = 0
    for leaf in whole.leaves:
        want = whole.read(leaf.label)
        for checkpoint in (mapped, saved):
            if f"{leaf.label}/array/qvalue" not in checkpoint:
                assert same_bits(checkpoint.read(leaf.label), want)
                continue
            codes = checkpoint.read(f"{leaf.label}/array/qvalue")
            scale = checkpoint.read(f"{leaf.label}/array/scale")
            assert codes.dtype == CODES[case]
            assert scale.ndim == codes.ndim == want.ndim
            assert same_bits(codes.astype(np.float32) * scale.astype(np.float32), want)
            weights += 1
    assert weights == 2 * 7
    assert len(mapped.leaves) == len(whole.leaves) + 7
    assert faults_of(mapped) == []


def test_parts_are_mapped_only_where_they_were_asked_for_and_only_by_a_mapping_that_names_them():
    path = DATA / "ct_int8_channel" / "ckpt"
    with pytest.raises(QuantizedWeights, match="dequantize=False"):
        ucp.open(path).map(MAPPING, assume=ASSUME)
    with pytest.raises(QuantizedWeights, match="a mapping may say by `stored/NAME` where"):
        ucp.open(path, dequantize=False).map("hf-llama-to-tunix", assume=ASSUME)
    with pytest.raises(LayoutError, match=r"stored/model\.layers\.\{layer\}"):
        ucp.open(path, dequantize="float32").map(MAPPING, assume=[*ASSUME, "scheme"])
    with pytest.raises(SpecError, match="maps parts of quantised weights"):
        ucp.Mapping.load(MAPPING).inverse()


@pytest.mark.parametrize(("case", "why"), [
    ("ct_int8_packed", "codes of other schemes are packed"),
    ("torchao_int8",   "codes of other schemes are packed"),
    ("ct_fp8_block",   "`one` = 1"),
    ("ct_fp8_tensor",  "codes of other schemes are packed"),
])  # fmt: skip
def test_scales_of_another_kind_do_not_fit(case, why):
    checkpoint = ucp.open(DATA / case / "ckpt", dequantize=False)
    with pytest.raises(LayoutError, match=why):
        checkpoint.map(MAPPING, assume=ASSUME)
