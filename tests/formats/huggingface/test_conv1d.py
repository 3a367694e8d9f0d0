"""Weights of Conv1D modules that are stored quantised, with outputs before inputs."""

import json
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from jax_ucp.errors import UnsupportedLeaf
from safetensors_writer import write_safetensors

NAMES = {"attn.c_attn": (24, 8), "attn.c_proj": (8, 8), "mlp.c_fc": (32, 8), "mlp.c_proj": (8, 32)}
EXCHANGED = """
about: {model: GPT2LMHeadModel, target: the same with inputs first}
sizes: {layer: n_layer}
leaves:
""" + "".join(
    f"- param: transformer.h.{{layer}}.{module}.weight\n"
    f"  axes: outputs_{i} inputs_{i}\n"
    f"  leaf:\n    transformer.h.{{layer}}.{module}.weight: inputs_{i} outputs_{i}\n"
    for i, module in enumerate(NAMES)
)


def gpt2(folder: Path, method: str, model_type: str = "gpt2") -> dict[str, np.ndarray]:
    """A folder as bitsandbytes (int8) or GPTQ (8 bits) stores it; gives its Linears' weights."""
    rng, arrays, want = np.random.default_rng(0), {}, {}
    for module, shape in NAMES.items():
        base = f"transformer.h.0.{module}"
        if method == "bitsandbytes":
            codes = rng.integers(-127, 128, shape).astype(np.int8)
            scale = rng.uniform(1, 2, shape[0]).astype(np.float32)
            arrays |= {f"{base}.weight": codes, f"{base}.SCB": scale}
            rows = codes.astype(np.float32) * scale[:, None]
            want[f"{base}.weight"] = rows * np.float32(7.874015718698502e-3)
        else:
            codes = rng.integers(0, 256, (shape[1], shape[0])).astype(np.uint8)
            arrays[f"{base}.qweight"] = np.ascontiguousarray(codes.T).view(np.int32).T.copy()
            arrays[f"{base}.qzeros"] = np.zeros((1, shape[0] // 4), np.int32)
            arrays[f"{base}.scales"] = scale = rng.uniform(1, 2, (1, shape[0])).astype(np.float16)
            arrays[f"{base}.g_idx"] = np.zeros(shape[1], np.int32)
            want[f"{base}.weight"] = ((codes.astype(np.float32) - 1) * scale.astype(np.float32)).T
    write_safetensors(folder / "model.safetensors", arrays)
    said = {"quant_method": method, "bits": 8, "group_size": -1, "load_in_8bit": True}
    config = {"model_type": model_type, "n_layer": 1, "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    return want


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_a_folder_is_not_written_with_outputs_where_its_config_has_inputs(method, tmp_path):
    (tmp_path / "c").mkdir()
    want = gpt2(tmp_path / "c", method)
    made = ucp.open(tmp_path / "c", dequantize="float32")
    for name, array in want.items():
        assert np.array_equal(made.read(f"param/{name}"), array)
    assert any("outputs before inputs, as" in note for note in made.notes)
    made.save(tmp_path / "copy")
    for checkpoint in (made, ucp.open(tmp_path / "copy")):
        with pytest.raises(UnsupportedLeaf, match=r"(?s)/c.*c_attn\.weight.*Map them first"):
            checkpoint.export(tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()
    (tmp_path / "exchanged.yaml").write_text(EXCHANGED)
    made.map(tmp_path / "exchanged.yaml").export(tmp_path / "out", "safetensors")
    exported = ucp.open(tmp_path / "out")
    for name, array in want.items():
        assert np.array_equal(exported.read(f"param/{name}"), array.T)


def test_models_of_linears_are_written(tmp_path):
    (tmp_path / "c").mkdir()
    want = gpt2(tmp_path / "c", "bitsandbytes", "gpt_neo")
    ucp.open(tmp_path / "c", dequantize="float32").export(tmp_path / "out", "safetensors")
    exported = ucp.open(tmp_path / "out")
    assert all(np.array_equal(exported.read(f"param/{name}"), x) for name, x in want.items())
