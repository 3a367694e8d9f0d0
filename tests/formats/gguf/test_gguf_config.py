"""The config that is made of the keys of an architecture: what they do not decide is not made up."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jax_ucp as ucp
from gguf_writer import Tensor, Written
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import LayoutError

KEYS: dict[str, tuple[Any, Any]] = {
    "block_count": ("u32", 1),
    "embedding_length": ("u32", 8),
    "attention.head_count": ("u32", 2),
    "attention.layer_norm_rms_epsilon": ("f32", 1e-5),
    "rope.freq_base": ("f32", 500000.0),
    "rope.dimension_count": ("u32", 16),
    "attention.key_length": ("u32", 16),
    "attention.value_length": ("u32", 16),
}


def opened(folder: Path, architecture="llama", factors=None, **changes: Any) -> ucp.Checkpoint:
    """A model of one tensor with these keys, in which `_` stands for a point; None takes one away."""
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    values: dict[str, Any] = {"general.architecture": ("str", architecture)}
    values |= {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    tensors = [Tensor.of("token_embd.weight", np.ones((4, 8), np.float32))]
    if factors is not None:
        tensors.append(Tensor.of("rope_freqs.weight", np.asarray(factors, np.float32)))
    path = folder / "m.gguf"
    path.write_bytes(Written(values, tensors).data())
    return ucp.open(path)


def llama3_factors(factor: float, theta: float = 500000.0, original: float = 8192) -> np.ndarray:
    """As `LlamaModel.generate_extra_tensors` of llama.cpp has them, one by one."""
    found = []
    for i in range(8):
        wavelength = 2 * np.pi * theta ** (2 * i / 16)
        smooth = (original / wavelength - 1) / 3
        if wavelength < original / 4:
            found.append(1.0)
        elif wavelength > original:
            found.append(factor)
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_1_give_its_settings(tmp_path, factor):
    rope = opened(tmp_path, factors=llama3_factors(factor)).config["rope_parameters"]
    want = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor}
    want |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert rope == want | {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize("factors", [
    llama3_factors(8.0, original=4096), llama3_factors(8.0) * np.float32(1.001), llama3_factors(8.0)[:4],
    np.zeros(8), np.full(8, np.nan),
])  # fmt: skip
def test_other_factors_are_refused_where_a_mapping_would_leave_them_out(tmp_path, factors):
    checkpoint = opened(tmp_path, factors=factors)
    assert checkpoint.config["rope_parameters"]["rope_type"] == "rope_freqs.weight"
    with pytest.raises(LayoutError, match=r"rope.* are none of Llama 3\.1"):
        checkpoint.map("gguf-llama-to-hf")


@pytest.mark.parametrize(("architecture", "changes", "why"), [
    ("mamba",  {}, "'mamba' says nothing here"),
    ("llama",  {"logit_scale": ("f32", 2.0)}, "'logit_scale' is not known here"),
    ("qwen2",  {"rope__scaling__attn_factor": ("f32", 1.0)}, "'rope.scaling.attn_factor' is not known here"),
    ("llama",  {"attention__sliding_window": ("u32", 8)}, "'attention.sliding_window' is not"),
    ("llama",  {"attention__head_count": (["u32"], [2, 4])}, "not a number that holds for all"),
    ("llama",  {"attention__head_count": None}, "attention.head_count is not a length"),
    ("llama",  {"block_count": ("i32", -1)}, "block_count is not a length"),
    ("llama",  {"attention__value_length": ("u32", 8)}, "differ in length"),
    ("llama",  {"tensor_data_layout": ("str", "reference")}, "tensor_data_layout is 'reference'"),
    ("llama",  {"rope__freq_base": ("f32", float("nan"))}, "rope.freq_base is not a number"),
    ("gemma2", {}, "attn_logit_softcapping is missing"),
    ("gemma3", {}, "attention.sliding_window is missing"),
    ("qwen2",  {"rope__freq_base_swa": ("f32", 1e4)}, "rope.freq_base_swa is not known here"),
])  # fmt: skip
def test_where_a_key_is_not_known_a_note_says_it_and_no_config(
    architecture, changes, why, tmp_path
):
    checkpoint = opened(tmp_path, architecture, **changes)
    assert checkpoint.config == {}
    assert any(why in note for note in checkpoint.notes), checkpoint.notes
    with pytest.raises(LayoutError, match="does not have its model's config"):
        checkpoint.map("gguf-llama-to-hf")


@pytest.mark.parametrize(("changes", "rope"), [
    ({"rope__freq_base": None}, {"rope_type": "default", "rope_theta": 10000.0}),
    ({"rope__scaling__type": ("str", "none")}, {"rope_type": "default", "rope_theta": 500000.0}),
    ({"rope__scaling__type": ("str", "linear"), "rope__scaling__factor": ("f32", 4.0)},
     {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}),
    ({"rope__scaling__factor": ("f32", 4.0)}, {"rope_type": "unsaid", "rope_theta": 500000.0, "factor": 4.0}),
    ({"rope__dimension_count": ("u32", 4)},
     {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.25}),
])  # fmt: skip
def test_the_rotation_is_what_the_keys_say(tmp_path, changes, rope):
    assert opened(tmp_path, **changes).config["rope_parameters"] == rope


def test_float32_settings_are_the_shortest_decimal_number(tmp_path):
    changes = {"attention__layer_norm_rms_epsilon": ("f32", 1e-6)}
    assert opened(tmp_path, **changes).config["rms_norm_eps"] == 1e-6


def test_the_largest_gemma_scales_its_queries_by_its_width(tmp_path):
    caps = {"attn_logit_softcapping": ("f32", 50.0), "final_logit_softcapping": ("f32", 30.0)}
    caps |= {"attention__sliding_window": ("u32", 4096)}
    config = opened(tmp_path, "gemma2", **caps).config
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 16
    of_46 = opened(tmp_path, "gemma2", **caps, block_count=("u32", 46))
    assert of_46.config["query_pre_attn_scalar"] == (8 // 2)


def test_of_bfloat16_norms_the_one_that_was_added_is_taken_off_without_a_trace(tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    size = np.abs(bits)
    weights = bits[((size >= 2.0**-16) & (size <= 2.0**23)) | (bits.view(np.uint32) == 0)]
    path = tmp_path / "m.gguf"
    path.write_bytes(Written({}, [Tensor.of("w", weights + np.float32(1))]).data())
    mapping = ucp.Mapping.from_dict({"leaves": [{"param": "w", "add": -1, "leaf": "w"}]})
    assert same_bits(ucp.open(path).map(mapping).read("param/w"), weights)
