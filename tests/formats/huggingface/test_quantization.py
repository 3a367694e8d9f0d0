"""Weights that mean something only with other tensors: recognised, refused, kept on request."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import faults_of
from commands import run
from dcp_writer import Writer
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import QuantizedWeights
from jax_ucp.formats.huggingface.quantization import declared, settle
from jax_ucp.formats.registry import open_contents
from jax_ucp.layout.box import Box
from jax_ucp.options import Options
from safetensors_writer import write_safetensors as write
from torch_writer import save as torch_save

F8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def of(dtype: Any, *shape: int) -> np.ndarray:
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    return (np.arange(size, dtype=np.uint8) % 63 + 1).view(dtype).reshape(shape)


# By scheme: the tensors of one weight, and how it is called.
SCHEMES: dict[str, tuple[str, dict[str, np.ndarray]]] = {
    "block scales": ("m.weight", {"m.weight": of(F8, 4, 8), "m.weight_scale_inv": of(np.float32, 1, 1)}),
    "block scales of experts": ("e.up", {"e.up": of(F8, 2, 4, 8), "e.up_scale_inv": of(np.float32, 2, 1, 1)}),
    "cast without its scales": ("m.weight",
        {"m.weight": of(BF16, 4, 8), "m.weight_scale_inv": of(np.float32, 1, 1)}),
    "scales": ("m.weight", {"m.weight": of(F8, 4, 8), "m.weight_scale": of(np.float32, 4, 1),
        "m.input_scale": of(np.float32)}),
    "int8 with scales": ("m.weight", {"m.weight": of(np.int8, 4, 8), "m.weight_scale": of(np.float16, 4, 1)}),
    "NVFP4": ("m.weight", {"m.weight": of(np.uint8, 4, 8), "m.weight_scale": of(F8, 4, 1),
        "m.weight_scale_2": of(np.float32), "m.input_scale": of(np.float32)}),
    "a scale beside": ("m.weight", {"m.weight": of(F8, 4, 8), "m.scale": of(ml_dtypes.float8_e8m0fnu, 1, 1)}),
    "compressed-tensors, packed": ("m.weight",
        {"m.weight_packed": of(np.int32, 4, 2), "m.weight_scale": of(BF16, 4, 1),
        "m.weight_zero_point": of(np.int32, 1, 1), "m.weight_shape": of(np.int64, 2)}),
    "GPTQ": ("m.weight", {"m.qweight": of(np.int32, 2, 8), "m.qzeros": of(np.int32, 1, 1),
        "m.scales": of(np.float16, 1, 8), "m.g_idx": of(np.int32, 16)}),
    "AWQ": ("m.weight", {"m.qweight": of(np.int32, 16, 1), "m.qzeros": of(np.int32, 1, 1),
        "m.scales": of(np.float16, 1, 8)}),
    "MXFP4": ("e.up", {"e.up_blocks": of(np.uint8, 2, 4, 3, 16), "e.up_scales": of(np.uint8, 2, 4, 3)}),
    "bitsandbytes int8": ("m.weight",
        {"m.weight": of(np.int8, 4, 8), "m.SCB": of(np.float32, 4), "m.weight_format": of(np.uint8)}),
    "bitsandbytes nf4": ("m.weight",
        {"m.weight": of(np.uint8, 16, 1), "m.weight.absmax": of(np.uint8, 1),
        "m.weight.quant_map": of(np.float32, 16), "m.weight.nested_absmax": of(np.float32, 1),
        "m.weight.nested_quant_map": of(np.float32, 256),
        "m.weight.quant_state.bitsandbytes__nf4": of(np.uint8, 80)}),
    "bitsandbytes nf4 in bfloat16": ("m.weight",
        {"m.weight": of(BF16, 8, 1), "m.weight.absmax": of(np.float32, 1),
        "m.weight.quant_map": of(np.float32, 16)}),
    "MLX": ("m.weight", {"m.weight": of(np.uint32, 4, 2), "m.scales": of(BF16, 4, 1),
        "m.biases": of(BF16, 4, 1)}),
    "EETQ": ("m.weight", {"m.weight": of(np.int8, 8, 4), "m.weight_scales": of(np.float16, 4)}),
    "quanto": ("m.weight", {"m.weight._data": of(np.int8, 4, 8), "m.weight._scale": of(np.float32, 4, 1)}),
    "HQQ": ("m.weight", {"m.W_q": of(np.uint8, 4, 8), "m.scale": of(np.float16, 8),
        "m.zero": of(np.float16, 8)}),
    "torchao": ("m.weight", {"m._weight_qdata": of(F8, 4, 8), "m._weight_scale": of(np.float32, 4, 1)}),
    "torchao int4": ("m.weight", {"m._weight_qdata": of(np.int32, 4, 1),
        "m._weight_scale_and_zero": of(BF16, 1, 4, 2)}),
}  # fmt: skip
PLAIN = {"norm.weight": of(BF16, 8), "norm.scale": of(np.float32, 8), "m.bias": of(np.float32, 4)}


def refusals(checkpoint: ucp.Checkpoint, out: Path) -> list:
    """Every door at which weights are handed out."""
    return [
        checkpoint.restore,
        lambda: checkpoint.plan(),
        lambda: checkpoint.map("hf-llama-to-tunix"),
        lambda: checkpoint.save(out / "saved"),
        lambda: checkpoint.plan_save(),
        lambda: checkpoint.plan_reads({"x": 2}),
        lambda: checkpoint.export(out / "exported", "safetensors"),
        lambda: checkpoint.export(out / "exported", "dcp"),
    ]


def assert_refused_and_kept(path: Path, weight: str, parts: Mapping[str, np.ndarray], out: Path):
    """The parts at `path` are refused as weights, by the names of all, and kept on request."""
    checkpoint = ucp.open(path)
    for door in refusals(checkpoint, out):
        with pytest.raises(QuantizedWeights, match=f"param/{weight} .*dequantize=False") as refused:
            door()
        assert all(f"param/{name}" in str(refused.value) for name in parts)
    for name in parts:
        with pytest.raises(QuantizedWeights):
            checkpoint.read(f"param/{name}")
    assert sorted(out.iterdir()) == []
    assert any(f"param/{weight}" in note for note in checkpoint.notes)
    kept = ucp.open(path, dequantize=False)
    for again in (kept, kept.save(out / "kept"), ucp.open(out / "kept")):
        labels = set(again)
        assert {f"stored/{name}" for name in parts} | {f"param/{name}" for name in PLAIN} == labels
        tree = again.restore()
        for name, array in parts.items():
            assert same_bits(tree["stored"][name], array)
            assert same_bits(again.read(f"stored/{name}"), array)
            assert again.where(f"stored/{name}")
        for name, array in PLAIN.items():
            assert same_bits(tree["param"][name], array)
        assert again.source["dequantize"] is False
        assert faults_of(again) == []

        def mapped(c=again):
            return c.map("hf-llama-to-tunix")

        for door in (mapped, lambda c=again: c.export(out / "no", "safetensors")):
            with pytest.raises(QuantizedWeights, match="are parts of quantised weights, kept as"):
                door()
    assert not (out / "no").exists()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_refused_at_every_door_and_its_parts_are_kept_on_request(scheme, tmp_path):
    weight, parts = SCHEMES[scheme]
    (tmp_path / "c").mkdir()
    (tmp_path / "out").mkdir()
    write(tmp_path / "c" / "model.safetensors", {**parts, **PLAIN})
    assert_refused_and_kept(tmp_path / "c", weight, parts, tmp_path / "out")


def test_what_the_files_state_of_parts_is_stated_of_the_leaves_that_they_are_kept_as(tmp_path):
    path = in_torch(tmp_path, SCHEMES["int8 with scales"][1])
    kept = open_contents(path, Options(dequantize=False))
    claimed = frozenset().union(*(claim.leaves for claim in kept.claims))
    assert claimed == {leaf.name for leaf in kept.leaves}


# The same tensors in other formats.


def in_torch(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    torch_save(dict(arrays), folder / "run.pt")
    return folder / "run.pt"


def in_dcp(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    writer = Writer(folder / "dcp")
    for name, array in arrays.items():
        writer.tensor(name, array, [("__0_0.distcp", Box.whole(array.shape))])
    writer.finish()
    return folder / "dcp"


def in_universal(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """What a conversion wrote that knew nothing of quantised weights."""
    write(folder / "model.safetensors", arrays)
    contents = ucp.open(folder / "model.safetensors")._contents
    ucp.Checkpoint(replace(contents, quantized=())).save(folder / "universal")
    return folder / "universal"


@pytest.mark.parametrize("scheme", ["GPTQ", "int8 with scales", "MXFP4", "bitsandbytes int8"])
@pytest.mark.parametrize("form", [in_torch, in_dcp, in_universal])
def test_the_same_tensors_are_recognised_in_other_formats(scheme, form, tmp_path):
    weight, parts = SCHEMES[scheme]
    (tmp_path / "out").mkdir()
    (tmp_path / "c").mkdir()
    path = form(tmp_path / "c", {**parts, **PLAIN})
    assert_refused_and_kept(path, weight, parts, tmp_path / "out")


@pytest.fixture
def tree() -> dict:
    weights = {name: jax.numpy.asarray(array) for name, array in SCHEMES["block scales"][1].items()}
    of_m = {name.partition(".")[2]: array for name, array in weights.items()}
    return {"param": {"m": of_m, "b": np.ones(3)}}


def test_the_tree_of_a_jax_program_is_refused_by_open_and_comes_back_to_it(tree, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
    with ocp.CheckpointManager(tmp_path / "ours", item_handlers=ucp.CheckpointHandler()) as manager:
        manager.save(1, args=ucp.args.Save(tree))
        manager.wait_until_finished()
        back = manager.restore(1, args=ucp.args.Restore(tree))
        weight = np.asarray(tree["param"]["m"]["weight"])
        assert same_bits(np.asarray(back["param"]["m"]["weight"]), weight)
    for path in (tmp_path / "orbax", tmp_path / "ours" / "1" / "default"):
        checkpoint = ucp.open(path)
        words = r"param/m/weight .fp8 with block scales: param/m/weight, param/m/weight_sc"
        with pytest.raises(QuantizedWeights, match=words):
            checkpoint.restore(cast=BF16)
        with pytest.raises(QuantizedWeights):
            checkpoint.save(tmp_path / "no")
        kept = ucp.open(path, dequantize=False)
        assert set(kept) == {"param/m/weight", "param/m/weight_scale_inv", "param/b"}
        assert same_bits(np.asarray(kept.restore()["param"]["m"]["weight"]), weight)


# What is no quantised weight.

WORDS = (
    "weight", "scale", "scales", "weight_scale", "weight_scales", "blocks", "biases", "kernel", "zero",
    "qweight",
)  # fmt: skip
FLOATS = (np.float32, np.float16, BF16, np.float64)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["m", "n"]), st.sampled_from(WORDS)), st.sampled_from(FLOATS)
    )
)
def test_ordinary_floats_are_weights_whatever_they_are_called(tmp_path_factory, names):
    arrays = {".".join(name): of(dtype, 4, 8) for name, dtype in names.items()}
    checkpoint = ucp.Checkpoint(settle(ucp.Checkpoint.of({"param": arrays})._contents, None))
    assert not checkpoint.notes
    assert set(checkpoint.restore().get("param", {})) == set(arrays)


def test_fp8_without_scales_and_integers_beside_floats_are_what_they_are(tmp_path):
    arrays = {"a.weight": of(F8, 4, 8), "b.weight": of(np.int8, 3), **PLAIN}
    arrays |= {"b.scale_factor": of(np.float32, 3), "f.blocks": of(np.uint8, 2)}
    arrays |= {"e.blocks": of(np.uint8, 4, 16), "e.scales": of(np.uint8, 3)}
    arrays |= {"g.weight": of(np.uint32, 4, 2), "g.scales": of(np.float32, 3, 1)}
    arrays["h.scales"] = of(np.float32, 4)
    write(tmp_path / "model.safetensors", arrays)
    checkpoint = ucp.open(tmp_path)
    assert checkpoint.notes == []
    params = checkpoint.restore()["param"]
    assert all(same_bits(array, arrays[name]) for name, array in params.items())


def test_scales_of_a_cache_beside_ordinary_weights_are_named_and_not_refused(tmp_path):
    arrays = {"attn.k_proj.weight": of(BF16, 4, 8), "attn.k_scale": of(np.float32)}
    write(tmp_path / "model.safetensors", arrays)
    checkpoint = ucp.open(tmp_path)
    assert "1 tensors, the first param/attn.k_scale, are named as scales of" in checkpoint.notes[0]
    assert set(checkpoint.restore()["param"]) == {"attn.k_proj.weight", "attn.k_scale"}


@pytest.mark.parametrize("quantised", [False, True])
def test_scales_of_a_cache_that_a_config_declares_are_left_out(quantised, tmp_path):
    weight = {"attn.k_proj.weight": of(BF16, 4, 8)}
    if quantised:
        weight = {"attn.k_proj.weight": of(F8, 4, 8), "attn.k_proj.weight_scale": of(np.float32)}
    write(tmp_path / "model.safetensors", {**weight, "attn.k_scale": of(np.float32)})
    said = {"quant_algo": "FP8" if quantised else None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    checkpoint = ucp.open(tmp_path, dequantize="bfloat16" if quantised else None)
    assert set(checkpoint.restore()["param"]) == {"attn.k_proj.weight"}
    (item,) = [item for item in checkpoint.inventory if "attn.k_scale" in item.where]
    assert item.status == "skipped"
    assert "it changes no weight" in item.reason
    kept = ucp.open(tmp_path, dequantize=False)
    assert "param/attn.k_scale" in set(kept)


# What a config says.

CONFIGS = {
    "config.json": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    },
    "config.json of a part": {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    "config.json of MLX": {"quantization": {"group_size": 64, "bits": 4}},
    "hf_quant_config.json": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}},
    "quantize_config.json": {"bits": 4, "group_size": 128},
    "params.json": {"quantization": {"qformat_weight": "fp8_e4m3"}},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_codes_whose_scale_is_missing_are_named_where_a_config_says_there_is_one(tmp_path, config):
    arrays = {"m.weight": of(F8, 4, 8), "m.codebook": of(np.float16, 3), **PLAIN}
    write(tmp_path / "model.safetensors", arrays)
    assert ucp.open(tmp_path).restore()["param"].keys() == {"m.weight", "m.codebook", *PLAIN}
    (tmp_path / config.partition(" ")[0]).write_text(json.dumps(CONFIGS[config]))
    with pytest.raises(QuantizedWeights, match=r"m\.weight .*the config declares .*, and no scale"):
        ucp.open(tmp_path).restore()
    kept = ucp.open(tmp_path, dequantize=False).restore()
    assert kept["stored"].keys() == {"m.weight", "m.codebook"}
    assert kept["param"].keys() == PLAIN.keys()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_of_weights_that_are_not_quantised_is_noted_and_refuses_nothing(tmp_path, config):
    arrays = {"m.weight": of(BF16, 4, 8), "attn.bias": of(np.uint8, 4, 4)}
    arrays["position_ids"] = of(np.int64, 4)
    write(tmp_path / "model.safetensors", arrays)
    (tmp_path / config.partition(" ")[0]).write_text(json.dumps(CONFIGS[config]))
    checkpoint = ucp.open(tmp_path)
    assert checkpoint.restore()["param"].keys() == arrays.keys()
    assert "but none is stored so: they are taken as they are" in checkpoint.notes[-1]


def test_a_config_that_quantises_a_cache_alone_declares_nothing_of_weights():
    kv_only = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert declared({"hf_quant_config.json": {"config": kv_only}}) == ""
    for odd in (None, [], "x", {"quantization": []}, {"quantization": "int4"}):
        files = ("hf_quant_config.json", "config.json")
        assert declared({file: {"config": odd} for file in files}) == ""


def test_a_scheme_that_is_not_known_is_refused_by_what_its_config_declares(tmp_path):
    arrays = {"m.codes": of(np.int16, 4, 2, 1), "m.codebooks": of(np.float16, 1, 8, 1, 2)}
    arrays["m.scales"] = of(BF16, 4, 1)
    write(tmp_path / "model.safetensors", arrays)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "aqlm"}}')
    with pytest.raises(QuantizedWeights, match=r"m\.codes \(aqlm: param/m\.codes, .*m\.codebooks"):
        ucp.open(tmp_path).restore()


# Less than a byte an element.


def test_what_numpy_has_no_whole_bytes_of_is_kept_as_bytes(tmp_path):
    arrays = {"m.weight": of(np.uint8, 4, 8), "m.weight_scale": of(F8, 4, 1)}
    arrays["n.weight"] = of(np.uint8, 6)
    stored = {**arrays, "ok": of(np.float32, 2)}
    halves = {"m.weight": ("F4", 16), "n.weight": ("F4", 12)}  # two elements to a byte
    write(tmp_path / "model.safetensors", stored, dtypes=halves)
    checkpoint = ucp.open(tmp_path)
    words = r"2 weights.*m\.weight \(fp8, int8 or NVFP4 with scales: .*n\.weight \(F4, several to a"
    with pytest.raises(QuantizedWeights, match=words):
        checkpoint.restore()
    kept = ucp.open(tmp_path, dequantize=False).restore()
    assert all(same_bits(kept["stored"][name], array) for name, array in arrays.items())
    assert kept["param"].keys() == {"ok"}
    halves = ucp.open(CASES_DATA / "folders" / "quant_fp4" / "ckpt", dequantize=False)
    assert halves.restore()["stored"]["w"].shape == (4, 8)


# Only what is asked for is refused, and the command line says the same.


def test_the_weights_that_are_not_quantised_are_restored_by_themselves(tmp_path):
    write(tmp_path / "model.safetensors", {**SCHEMES["block scales"][1], **PLAIN})
    checkpoint = ucp.open(tmp_path)
    whole = checkpoint.abstract()
    target = {"param": {name: whole["param"][name] for name in PLAIN}}
    got = checkpoint.restore(target, partial=True, mesh=jax.make_mesh((8,), ("x",)))
    assert all(same_bits(np.asarray(got["param"][name]), array) for name, array in PLAIN.items())
    assert same_bits(checkpoint.read("param/m.bias"), PLAIN["m.bias"])
    target = {"param": {**target["param"], "m.weight": jax.ShapeDtypeStruct((4, 8), BF16)}}
    with pytest.raises(QuantizedWeights):
        checkpoint.restore(target, partial=True, cast=True, mesh=jax.make_mesh((8,), ("x",)))


def test_commands_refuse_with_the_reason_and_keep_parts_on_request(tmp_path):
    source, out = tmp_path / "c", tmp_path / "out"
    shutil.copytree(CASES_DATA / "folders" / "quant_fp8block" / "ckpt", source)
    commands = ("convert", source, out), ("plan", source)
    for command in (*commands, ("export", source, out, "--format", "safetensors")):
        text = run(*command, code=1)
        assert "3 weights are quantised: param/w.weight" in text
        assert "--no-dequantize" in text
    assert not out.exists()
    assert "they are refused as weights" in run("inspect", source)
    for command in commands:
        text = run(*command, "--no-dequantize")
        assert "3 quantised weights are kept as the parts that are stored" in text
    labels = {leaf.label for leaf in ucp.open(out).leaves if leaf.label.startswith("param/")}
    assert labels == {"param/b", "param/e8m0", "param/i8"}


@pytest.mark.parametrize("said", [True, "int8", 0])
def test_another_dequantize_is_an_error_and_no_silence(said):
    with pytest.raises(ValueError, match="dequantize="):
        ucp.open(CASES_DATA / "folders" / "quant_fp8block" / "ckpt", dequantize=said)
