"""A part that is missing, extra, of another shape or dtype, or no number: named, and never used."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from helpers import changed_json
from jax_ucp.errors import CorruptData, FormatError, QuantizedWeights, UCPError
from jax_ucp.layout.box import Box
from quantized_cases import SCHEMES, Made
from safetensors_writer import edit, write_safetensors

DATA = Path(__file__).parents[2] / "data" / "quantized"
CASES = sorted(path.name for path in DATA.iterdir())
Change = Callable[[dict[str, np.ndarray]], Any]


def changed(case: str, folder: Path, change: Change) -> Path:
    """A copy of a case, whose tensors a function changes."""
    shutil.copytree(DATA / case / "ckpt", folder / "c")
    edit(folder / "c" / "model.safetensors", change)
    return folder / "c"


def parts_of(case: str) -> list[str]:
    """The parts of one weight that are stored as such, by name."""
    (weight, *_) = ucp.open(DATA / case / "ckpt")._contents.quantized
    leaves = ucp.open(DATA / case / "ckpt", dequantize=False).leaves
    stored = {leaf.path[-1].name for leaf in leaves}
    names = [label.removeprefix("param/") for label in weight.parts.values()]
    return [name for name in names if name in stored]


def _module(name: str) -> str:
    return name.partition("_proj")[0] if "_proj" in name else name.rpartition(".")[0]


EACH = [(case, name) for case in CASES[::2] for name in parts_of(case)]
# What may be missing: the library says nothing of it either.
OPTIONAL = ("input_global_scale", "input_scale", "weight_format", "g_idx")


@pytest.mark.parametrize(("case", "name"), EACH)
def test_a_part_that_is_missing_is_named_or_what_it_leaves_behind(case, name, tmp_path):
    path = changed(case, tmp_path, lambda arrays: arrays.pop(name))
    is_zero = case == "ct_dense_fp8" and name.endswith("weight_zero_point")
    if name.endswith(OPTIONAL) or is_zero:
        ucp.open(path, dequantize="bfloat16")
        return
    with pytest.raises((FormatError, QuantizedWeights), match=_module(name)):
        ucp.open(path, dequantize="bfloat16")


@pytest.mark.parametrize(("case", "name"), EACH)
def test_a_part_of_another_shape_or_dtype_is_named(case, name, tmp_path):
    def longer(arrays: dict[str, np.ndarray]) -> None:
        array = arrays[name]
        arrays[name] = np.concatenate([np.atleast_1d(array)] * 3)

    has_one_scale = case.startswith(("ct_fp8_tensor", "fp8_auto", "modelopt_mixed"))
    has_one_scale |= case == "modelopt_fp8"
    if name.endswith(OPTIONAL) or (has_one_scale and name == parts_of(case)[0]):
        return  # with one scale, codes of any shape are a weight
    (tmp_path / "a").mkdir()
    with pytest.raises((FormatError, QuantizedWeights), match=_module(name)):
        ucp.open(changed(case, tmp_path / "a", longer), dequantize="bfloat16")

    def wider(arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = arrays[name].astype(np.float64)

    (tmp_path / "b").mkdir()
    with pytest.raises((FormatError, QuantizedWeights), match=_module(name)):
        ucp.open(changed(case, tmp_path / "b", wider), dequantize="bfloat16")


@pytest.mark.parametrize("case", CASES)
def test_a_scale_without_codes_is_named(case, tmp_path):
    def extra(arrays: dict[str, np.ndarray]) -> None:
        arrays["more.weight_scale"] = np.ones((3, 1), np.float32)

    with pytest.raises(FormatError, match=r"param/more\.weight_scale is a part of a quantised"):
        ucp.open(changed(case, tmp_path, extra), dequantize="bfloat16")


@pytest.mark.parametrize("case", CASES)
def test_a_part_of_another_scheme_beside_codes_is_named(case, tmp_path):
    name = f"{_module(parts_of(case)[0])}_proj.weight_scale_2"
    if "_proj" not in parts_of(case)[0] or name in parts_of(case):
        name = "model.layers.0.self_attn.q_proj.weight_global_scale"

    def extra(arrays: dict[str, np.ndarray]) -> None:
        assert name not in arrays
        arrays[name] = np.ones((1,), np.float32)

    with pytest.raises((FormatError, QuantizedWeights), match=name.rpartition(".")[2]):
        ucp.open(changed(case, tmp_path, extra), dequantize="bfloat16")


METHODS = ("quark", "hqq", "eetq", "aqlm", "vptq", "higgs", "bitnet", "quanto", "auto-round")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_not_known_is_refused_by_its_name(method, tmp_path):
    weight = {"w.weight": np.ones((8, 8), np.int8), "w.weight_scale": np.ones(8, np.float32)}
    odd = {"v.codes": np.ones((8, 8, 1), np.int16), "v.codebooks": np.ones((4, 8), np.float16)}
    write_safetensors(tmp_path / "model.safetensors", weight | odd)
    said = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(QuantizedWeights) as error:
        ucp.open(tmp_path, dequantize="bfloat16")
    of_weights = str(error.value).splitlines()[1:]
    assert len(of_weights) == 2
    for line in of_weights:
        assert f"the config declares {method}, which is not dequantised here; known are a" in line


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("modelopt")])
def test_the_config_of_modelopt_may_stand_alone_and_says_the_same(case, tmp_path):
    path = shutil.copytree(DATA / case / "ckpt", tmp_path / "c")
    alone = json.loads((path / "config.json").read_text())
    del alone["quantization_config"]
    (path / "config.json").write_text(json.dumps(alone))
    made, same = (ucp.open(one, dequantize="float32") for one in (path, DATA / case / "ckpt"))
    assert set(made) == set(same)
    for leaf in same.leaves:
        assert np.array_equal(made.read(leaf.label), same.read(leaf.label))
    (path / "hf_quant_config.json").unlink()
    with pytest.raises(QuantizedWeights, match="names alone do not say"):
        ucp.open(path, dequantize="float32")


def spoilt(ends: str, at: Any, value: float) -> Change:
    """Parts of such names have another value in one place."""

    def change(arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if name.endswith(ends):
                array[at] = value

    return change


def test_a_scale_that_is_no_number_is_named_when_it_is_read_and_only_then(tmp_path):
    path = changed("fp8_block_32", tmp_path, spoilt("scale_inv", (0, -1), np.nan))
    checkpoint = ucp.open(path, dequantize="bfloat16")
    name = "param/model.layers.0.mlp.down_proj.weight"
    checkpoint.read(name, Box((32, 0), (64, 96)))
    with pytest.raises(CorruptData, match=r"scale_inv has nan at \[0, 2\], which should be"):
        checkpoint.read(name)
    with pytest.raises(CorruptData, match="scale_inv"):
        checkpoint.save(tmp_path / "out")
    assert not (tmp_path / "out" / "ucp.json").exists()


@pytest.mark.parametrize(("case", "change", "words"), [
    ("mxfp4_gpt_oss", spoilt("_scales", (..., 0), 255), r"_scales has 255 at .*an exponent below 255"),
    ("gptq_4",        spoilt("g_idx", 3, -1), r"g_idx has -1 at \[3\], which should be a group from 0"),
    ("gptq_4",        spoilt("g_idx", ..., 0), r"g_idx has 0 at \[0\], which should be a group from 0 to \d+, of at most"),
])  # fmt: skip
def test_an_exponent_or_a_group_that_is_none_is_named(case, change, words, tmp_path):
    checkpoint = ucp.open(changed(case, tmp_path, change), dequantize="bfloat16")
    with pytest.raises(CorruptData, match=words):
        checkpoint.restore()


SETTINGS = {
    "fp8_block_32": {"weight_block_size": [64, 32]},
    "fp8_experts": {"weight_block_size": [64, 16]},
    "fp8_deepseek_v4": {"expert_dtype": "fp8"},
    "modelopt_mixed": {"quantized_layers": None},
    "gptq_4": {"bits": 8},
    "gptq_3_act_order": {"checkpoint_format": "marlin"},
    "awq_32": {"version": "gemv"},
    "awq_8_wide": {"group_size": 7},
    "ct_int4_group": {"config_groups": {"g": {"format": "marlin-24", "weights": {}}}},
    "ct_int3_group": {"transform_config": {"config_groups": {"u": {}}}},
    "ct_nvfp4": {"config_groups": {}},
    "ct_fp8_block": {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "bnb_nf4": {"quant_method": "aqlm"},
    "mxfp4_gpt_oss": {"quant_method": "gptq"},
    "modelopt_fp8": {"quant_algo": "W4A8_AWQ"},
    "modelopt_nvfp4": {"group_size": 7},
    "mlx_3": {"bits": 4},
    "mlx_4_wide": {"group_size": 64},
    "mlx_8_and_others": {"model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 5}},
    "mlx_mxfp4": {"mode": "mxfp8"},
    "mlx_mxfp8": {"model.layers.0.mlp.down_proj": False},
    "ct_int4_some_asymmetric": {"config_groups": {"g": {"weights": {"symmetric": False}}}},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_config_that_names_do_not_agree_with_is_refused(case, tmp_path):
    path = shutil.copytree(DATA / case / "ckpt", tmp_path / "c")

    def change(config: dict[str, Any]) -> None:
        for key in config.keys() & {"quantization_config", "quantization"}:
            config[key] |= SETTINGS[case]

    changed_json(path / "config.json", change)
    with pytest.raises((FormatError, QuantizedWeights), match="of the quantised weights cannot be"):
        ucp.open(path, dequantize="bfloat16")


@pytest.mark.parametrize("block", ["9" * 5000 + "x128", "128", [True, 128], [128], [128, 0]])
def test_a_block_structure_that_is_no_pair_of_lengths_is_refused_as_it_stands(block, tmp_path):
    path = shutil.copytree(DATA / "ct_fp8_block/ckpt", tmp_path / "c")

    def change(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"]["block_structure"] = block

    changed_json(path / "config.json", change)
    words = re.escape(f"block_structure={block!r:.40} in the config is not a pair of lengths")
    with pytest.raises(QuantizedWeights, match=words):
        ucp.open(path, dequantize="bfloat16")


@pytest.mark.parametrize(("case", "changed_to"), [
    ("fp8_block_32", {"weight_block_size": [33, 32]}),
    ("fp8_block_32", {"weight_block_size": [32, 40]}),
    ("gptq_4",       {"group_size": 33}),
])  # fmt: skip
def test_a_block_that_gives_as_many_scales_and_other_numbers_is_refused(case, changed_to, tmp_path):
    def without_order(arrays: dict[str, np.ndarray]) -> None:
        for name in [name for name in arrays if name.endswith(".g_idx")]:
            del arrays[name]

    path = changed(case, tmp_path, without_order)
    whole = ucp.open(path, dequantize="float16").leaves
    changed_json(path / "config.json", lambda x: x["quantization_config"].update(changed_to))
    with pytest.raises(FormatError, match=r"fit blocks of 32 to .*32 is what libraries write"):
        ucp.open(path, dequantize="float16")
    assert whole


def test_groups_that_are_none_are_refused_by_a_read_of_one_of_them(tmp_path):
    def to_zeros(arrays: dict[str, np.ndarray]) -> None:
        for name in [name for name in arrays if name.endswith(".g_idx")]:
            arrays[name][:] = 0

    checkpoint = ucp.open(changed("gptq_4", tmp_path, to_zeros), dequantize="float16")
    leaf = next(leaf for leaf in checkpoint.leaves if leaf.label.endswith("q_proj.weight"))
    with pytest.raises(CorruptData, match=r"g_idx has 0 at \[0\], which should be a group"):
        checkpoint.read(leaf.label, Box((0, 32), (leaf.shape[0], 64)))


def test_six_bits_whose_order_nothing_says_are_refused_and_four_bits_are_numbers(tmp_path):
    codes = np.arange(48, dtype=np.uint8).reshape(4, 12)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_safetensors(tmp_path / "a" / "model.safetensors", {"w": codes}, dtypes={"w": ("F4", 24)})
    made = ucp.open(tmp_path / "a", dequantize="float32").read("param/w")
    assert made.shape == (4, 24)
    assert made[0, :6].tolist() == [0.0, 0.0, 0.5, 0.0, 1.0, 0.0]
    name = tmp_path / "b" / "model.safetensors"
    write_safetensors(name, {"w": codes}, dtypes={"w": ("F6_E2M3", 16)})
    with pytest.raises(QuantizedWeights, match=r"F6_E2M3, several to a byte.*names alone"):
        ucp.open(tmp_path / "b", dequantize="float32")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_done_to_a_part_is_refused_or_changes_nothing_of_the_shape(scheme, data):
    made: Made = data.draw(SCHEMES[scheme])
    role = data.draw(st.sampled_from(sorted(made.parts)))
    array = made.parts[role]
    spoilt = data.draw(
        st.sampled_from(
            [
                lambda: array.reshape(-1)[:-1],
                lambda: array[..., None],
                lambda: np.concatenate([array.reshape(-1)] * 2),
                lambda: array.astype(np.float64),
                lambda: np.zeros((0, 3), array.dtype),
                lambda: np.zeros((), array.dtype),
                lambda: np.zeros((1 << 10, 0), array.dtype),
            ]
        )
    )()
    made.parts[role] = spoilt
    try:
        view = made.view()
        read = view.read("w", Box.whole(view.arrays()["w"].shape))
    except UCPError:
        return
    assert read.shape == view.arrays()["w"].shape
