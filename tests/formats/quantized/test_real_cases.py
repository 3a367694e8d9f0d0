"""Checkpoints that libraries of quantisation wrote: codes, rounding and what is declared.

`tests/generators/quantized.py` writes them, and their truth.
"""

from collections.abc import Mapping

import jax
import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case, names_of
from commands import run
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import QuantizedWeights
from jax_ucp.layout.box import Box
from quantized_cases import weight_of

DATA = CASES_DATA / "quantized"
CASES = names_of("quantized")
SOME = [name for name in CASES if name.endswith(("_wide", "_odd", "_order", "narrow", "_32"))]


def open_case(case: str) -> ucp.Checkpoint:
    return Case(f"quantized/{case}").open()


def truth_of(case: str) -> dict[str, np.ndarray]:
    return Case(f"quantized/{case}").truth()


def quantized_names(case: str) -> list[str]:
    stored = set(ucp.open(DATA / case / "ckpt", dequantize=False))
    return [name for name in truth_of(case) if name not in stored]


@pytest.mark.parametrize("case", CASES)
def test_the_config_declares_no_quantisation_and_the_source_says_what_it_was(case):
    checkpoint = open_case(case)
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.source["quantization"]
    assert quantized_names(case)


@pytest.mark.parametrize("case", CASES)
def test_float32_is_rounded_once_to_what_is_asked_for(case):
    whole = ucp.open(DATA / case / "ckpt", dequantize="float32")
    truth = truth_of(case)
    for label in quantized_names(case):
        made = whole.read(label)
        assert made.dtype == np.float32
        assert same_bits(made.astype(truth[label].dtype), np.ascontiguousarray(truth[label]))


@pytest.mark.parametrize("case", CASES)
def test_without_the_config_nothing_is_dequantised_by_names_alone(case, tmp_path):
    (tmp_path / "c").mkdir()
    weights = (DATA / case / "ckpt" / "model.safetensors").read_bytes()
    (tmp_path / "c" / "model.safetensors").write_bytes(weights)
    with pytest.raises(QuantizedWeights, match=r"names alone do not say .*config\.json"):
        ucp.open(tmp_path / "c", dequantize="bfloat16")


@pytest.mark.parametrize("case", SOME)
def test_an_export_has_the_numbers_and_a_conversion_declares_no_quantisation(case, tmp_path):
    checkpoint = open_case(case)
    exported = checkpoint.export(tmp_path / "exported", "safetensors")
    assert Case(f"quantized/{case}").wrong(exported) == []
    saved = checkpoint.save(tmp_path / "saved")
    assert saved.source["dequantize"] == checkpoint.source["dequantize"]
    assert not [note for note in ucp.open(tmp_path / "saved").notes if "declares" in note]


@pytest.mark.parametrize("case", SOME)
def test_a_slice_reads_no_more_of_codes_than_its_share(case):
    """For a quarter of an axis, about a quarter of the codes is asked for."""
    checkpoint = open_case(case)
    arrays = checkpoint._contents.arrays
    for label in quantized_names(case):
        leaf = checkpoint._leaf(label)
        weight = weight_of(arrays, leaf.name)
        assert weight is not None
        codes = weight.parts["codes"].shape
        for axis, n in enumerate(leaf.shape):
            if axis == 1 and codes[0] == 1:
                continue  # runs that rows do not divide: whole rows are read
            spans = [(0, m // 4 if i == axis else m) for i, m in enumerate(leaf.shape)]
            asked = weight.boxes(Box.spanning(spans))["codes"].size
            assert asked <= int(np.prod(codes)) * (0.25 + 32 / n)


def test_the_command_line_dequantises_and_names_what_it_did(tmp_path):
    source = DATA / "gptq_4" / "ckpt"
    assert "--dequantize" in run("convert", source, tmp_path / "no", code=1)
    text = run("convert", source, tmp_path / "out", "--dequantize", "float16")
    assert "weights are stored quantised (GPTQ or AWQ)" in text
    assert "dequantised to float16" in text
    for label, want in truth_of("gptq_4").items():
        assert same_bits(ucp.open(tmp_path / "out").read(label), np.ascontiguousarray(want))
    text = run("inspect", source, "--dequantize", "bfloat16", "--no-dequantize", code=2)
    assert "contradict each other" in text


def test_a_mapping_works_on_top(tmp_path):
    checkpoint = open_case("ct_int4_asymmetric")
    plain = checkpoint.export(tmp_path / "plain", "safetensors")
    said = {"config": checkpoint.config, "assume": ["rope_theta"]}
    mapped = (source.map("hf-llama-to-tunix", **said) for source in (checkpoint, plain))
    of_codes, of_numbers = (_flat(one.restore()) for one in mapped)
    assert of_codes.keys() == of_numbers.keys()
    assert all(same_bits(of_codes[path], array) for path, array in of_numbers.items())


def _flat(tree: object) -> Mapping[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {str(path): np.asarray(leaf) for path, leaf in leaves}
