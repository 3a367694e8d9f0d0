"""Writes checkpoints of quantised weights with the libraries that people use, and beside each what
those libraries dequantise it to.

    python tests/generators/quantized.py OUT [--only PART ...]

OUT/<case>/ckpt is the checkpoint, OUT/<case>/truth.npz has `param/<name>` for every tensor of the
model (bfloat16 as its bits in uint16), OUT/<case>/case.json says who wrote it and with which options
the truth is read. It needs torch, transformers, compressed-tensors, llmcompressor, torchao,
bitsandbytes, gptqmodel, autoawq, nvidia-modelopt and mlx; what is not installed is left out, with a word on stderr.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import writing
from safetensors.torch import load_file, save_file

sys.path.remove(str(Path(__file__).parent))  # it has files called like packages

Truth = Mapping[str, torch.Tensor]
CASES: dict[str, tuple[Callable[[Path], Truth], list[str]]] = {}


def add(
    name: str, make: Callable[..., Truth], packages: str = "", *args: Any, **sizes: Any
) -> None:
    """A case that `make` writes, by these packages and transformers."""
    CASES[name] = (lambda folder: make(folder, *args, **sizes)), ["transformers", *packages.split()]


def write(name: str, folder: Path) -> None:
    (folder / "ckpt").mkdir()
    torch.manual_seed(sum(name.encode()))
    make, packages = CASES[name]
    truth = make(folder / "ckpt")
    quantized = next(tensor for key, tensor in truth.items() if "_proj" in key or ".w1." in key)
    options = {"dequantize": str(quantized.dtype).removeprefix("torch.")}
    about = {"writer": writing.versions("torch", *packages), "options": options}
    writing.write_case(folder, {f"param/{key}": tensor for key, tensor in truth.items()}, about)


def saved_model(folder: Path, model: Any) -> Path:
    """The folder of a model, beside that of a case."""
    source = folder.parent / "source"
    model.save_pretrained(source)
    return source


def only_weights(folder: Path) -> None:
    """Leave out what is neither the weights nor their config."""
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


def tiny_llama(folder: Path, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Path:
    """A model of transformers with its own random weights, saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = {
        "vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**usual | sizes)).to(dtype)
    return saved_model(folder, model)


def coded(
    folder: Path,
    source: Path,
    quantization: Mapping[str, Any],
    code: Callable[[str, torch.Tensor], tuple[Truth, torch.Tensor]],
    ends: str | tuple[str, ...] = "_proj.weight",
) -> Truth:
    """The model's truth; writes what `code` stores of weights with these ends, and its config."""
    stored, truth = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith(ends):
            parts, truth[name] = code(name, weight)
            stored |= parts
        else:
            stored[name] = truth[name] = weight
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config_with(folder, source, quantization)
    return truth


def config_with(folder: Path, source: Path, quantization: Mapping[str, Any]) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shutil.rmtree(source)


# fp8 with block scales: the operation by which transformers saves it.


def _fine_grained(folder: Path, block: tuple[int, int] | None, fmt: str, **sizes: int) -> Truth:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    source = tiny_llama(folder, **sizes)
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=fmt)
    quantizer = types.SimpleNamespace(quantization_config=config)

    def code(name: str, weight: torch.Tensor) -> tuple[Truth, torch.Tensor]:
        made = Fp8Quantize(quantizer).convert({name: weight})
        scale = made[name.replace(".weight", ".weight_scale_inv")]
        return made, Fp8Dequantize(quantizer)._dequantize_one(made[name], scale, torch.bfloat16)

    return coded(folder, source, json.loads(config.to_json_string(use_diff=False)), code)


add("fp8_block_32", _fine_grained, "", (32, 32), "float")
add("fp8_block_of_powers_of_two", _fine_grained, "", (16, 32), "ue8m0", hidden_size=96, head_dim=24)


def _fp8_experts(folder: Path) -> Truth:
    """As transformers 5.23 saves it: the codes of each expert, and the scales of all."""
    import transformers.quantizers.quantizer_finegrained_fp8 as quantizer
    from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    # it asks for a GPU, and needs none to store
    quantizer.FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 3, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=16, num_hidden_layers=1, **sizes, **heads, **experts)
    source = saved_model(folder, Qwen3MoeForCausalLM(config).to(torch.bfloat16))
    settings = FineGrainedFP8Config(weight_block_size=(32, 16))
    how = {"quantization_config": settings, "device_map": "cpu"}
    model = Qwen3MoeForCausalLM.from_pretrained(source, **how)
    model.save_pretrained(folder)
    shutil.rmtree(source)
    (folder / "generation_config.json").unlink(missing_ok=True)
    how, state, truth = Fp8Dequantize(model.hf_quantizer), model.state_dict(), {}
    for name, codes in state.items():
        scale = state.get(f"{name}_scale_inv")
        if name.endswith("_scale_inv"):
            continue
        whole = codes if scale is None else how._dequantize_one(codes, scale, torch.bfloat16)
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            truth[name] = whole
            continue
        prefix = name.rpartition(".")[0]
        parts = ["down_proj"] if name.endswith("down_proj") else ["gate_proj", "up_proj"]
        for expert, own in enumerate(whole):
            for part, weight in zip(parts, own.chunk(len(parts)), strict=True):
                truth[f"{prefix}.{expert}.{part}.weight"] = weight
    return truth


def _fp8_deepseek_v4(folder: Path) -> Truth:
    """DeepSeek's own layout, by hand: exponents called `scale`, and experts of fp4."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    config = FineGrainedFP8Config(weight_block_size=(32, 32))
    quantizer = Fp8Dequantize(types.SimpleNamespace(quantization_config=config))
    shapes = {"attn.wq_a": (64, 96), "attn.wo_b": (96, 64), "ffn.shared_experts.w1": (64, 96)}
    shapes |= {f"ffn.experts.{i}.{w}": (64, 96) for i in range(2) for w in ("w1", "w3")}
    stored = {"layers.0.attn_norm.weight": torch.randn(96).to(torch.bfloat16)}
    truth = dict(stored)
    for module, (rows, columns) in shapes.items():
        if ".experts." in module:
            codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            exponents = torch.randint(110, 135, (rows, columns // 32), dtype=torch.uint8)
        else:
            codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            exponents = torch.randint(110, 135, (rows // 32, columns // 32), dtype=torch.uint8)
        name, scale = f"layers.0.{module}.weight", exponents.view(torch.float8_e8m0fnu)
        stored |= {name: codes, f"layers.0.{module}.scale": scale}
        truth[name] = quantizer._dequantize_one(codes, scale, torch.bfloat16)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    settings |= {"activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    about = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(about, indent=1))
    return truth


add("fp8_experts", _fp8_experts)
add("fp8_deepseek_v4", _fp8_deepseek_v4)


# compressed-tensors: written by llm-compressor, or by the library itself.


def _llm_compressor(folder: Path, scheme: Any, dense: bool = False, **sizes: int) -> Truth:
    from compressed_tensors.compressors.base import decompress_module
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    source = tiny_llama(folder, **sizes)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    arguments = {"scheme": scheme, "targets": "Linear"}
    if isinstance(scheme, dict) and "weights" not in scheme:
        arguments = {"config_groups": scheme}
    elif isinstance(scheme, dict):
        arguments = {"config_groups": {"group_0": {"targets": ["Linear"], **scheme}}}
    recipe = QuantizationModifier(ignore=["lm_head"], **arguments)
    oneshot(model=model, recipe=recipe, pipeline="datafree")
    model.save_pretrained(folder, save_compressed=not dense)
    for module in model.modules():
        how = getattr(module, "quantization_scheme", None)
        if how is not None and dense:
            scales = module.weight_scale, module.weight_zero_point
            module.weight.data = fake_quantize(module.weight, *scales, how.weights)
        elif how is not None:
            decompress_module(module)
    stored = load_file(folder / "model.safetensors")
    plain = {name for name in stored if not name.startswith(tuple(_bases(stored)))}
    state = model.state_dict()
    truth = {name: state[name] for name in plain}
    truth |= {base + "weight": state[base + "weight"] for base in _bases(stored)}
    shutil.rmtree(source)
    only_weights(folder)
    return truth


def _bases(stored: Mapping[str, torch.Tensor]) -> set[str]:
    ends = ("weight_scale",)
    return {name.removesuffix("weight_scale") for name in stored if name.endswith(ends)}


_CT = _llm_compressor, "compressed-tensors llmcompressor"


def _integers(bits: int, **more: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": bits, "type": "int", **more}}


def _floats(strategy: str) -> dict[str, Any]:
    return {"weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}}


_SMALL = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 64}
_ODD = {"hidden_size": 72, "head_dim": 18, "intermediate_size": 100}
add("ct_fp8_channel", *_CT, "FP8_DYNAMIC")
add("ct_fp8_channel_odd", *_CT, "FP8_DYNAMIC", **_ODD)
add("ct_fp8_block", *_CT, "FP8_BLOCK", hidden_size=144, intermediate_size=160, head_dim=36)
add("ct_fp8_block_odd", *_CT, "FP8_BLOCK", hidden_size=80, head_dim=20, intermediate_size=136)
add("ct_fp8_tensor", *_CT, _floats("tensor"))
add("ct_fp8_tensor_small", *_CT, _floats("tensor"), **_SMALL)
add("ct_int8_channel", *_CT, "W8A8")
add("ct_int8_channel_small", *_CT, "W8A8", **_SMALL)
add("ct_int8_packed", *_CT, _integers(8, symmetric=True, strategy="channel"), **_ODD)
add("ct_int4_group", *_CT, "W4A16", hidden_size=128, intermediate_size=128)
add("ct_int4_asymmetric", *_CT, _integers(4, symmetric=False, strategy="group", group_size=32))
add("ct_int4_channel_odd", *_CT, _integers(4, symmetric=False, strategy="channel"), **_ODD)
add("ct_int3_group", *_CT, _integers(3, symmetric=False, strategy="group", group_size=16))
add("ct_dense_fp8", *_CT, "FP8_DYNAMIC", dense=True)
_GROUPS = _integers(4, symmetric=False, strategy="group", group_size=32)
add("ct_dense_int4", *_CT, _GROUPS, dense=True)
add("ct_nvfp4", *_CT, "NVFP4A16")
add("ct_nvfp4_wide", *_CT, "NVFP4A16", hidden_size=80, head_dim=20, intermediate_size=112)
add("ct_mxfp4", *_CT, "MXFP4A16")
add("ct_mxfp4_wide", *_CT, "MXFP4A16", hidden_size=96, head_dim=24, intermediate_size=160)
add("ct_mxfp6", *_CT, "MXFP6A16")
add("ct_mxfp6_wide", *_CT, "MXFP6A16", hidden_size=96, head_dim=24, intermediate_size=160)
add("ct_mxfp8", *_CT, "MXFP8A16")
add("ct_mxfp8_wide", *_CT, "MXFP8A16", hidden_size=96, head_dim=24, intermediate_size=160)


# Two groups that differ in symmetry alone, and scales of a cache beside weights.


def _by_modules(symmetric: bool, modules: str) -> dict[str, Any]:
    weights = _integers(4, symmetric=symmetric, strategy="group", group_size=32)
    return {"targets": [f"re:.*{modules}.*"], **weights}


_APART = {"attention": _by_modules(True, "self_attn"), "mlp": _by_modules(False, "mlp")}
add("ct_int4_some_asymmetric", *_CT, _APART)


def _ct_fp8_cache_scales(folder: Path) -> Truth:
    """As llm-compressor's `kv_cache_scheme` writes it, but for the calibration of its scales."""
    truth = _llm_compressor(folder, "FP8_DYNAMIC", **_SMALL)
    stored = load_file(folder / "model.safetensors")
    for cache in ("k_scale", "v_scale"):
        stored[f"model.layers.0.self_attn.{cache}"] = torch.tensor([0.5], dtype=torch.bfloat16)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = {**cache, "dynamic": False}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return truth


add("ct_fp8_cache_scales", _ct_fp8_cache_scales, _CT[1])


# AutoFP8's layout, by what vLLM 0.11 `layers/quantization/fp8.py` reads; the rule is that of
# transformers for a scale of a whole weight.


def _fp8_auto(folder: Path) -> Truth:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    config = FineGrainedFP8Config(weight_block_size=None)
    quantizer = types.SimpleNamespace(quantization_config=config)

    def code(name: str, weight: torch.Tensor) -> tuple[Truth, torch.Tensor]:
        scale = weight.float().abs().max() / 448
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        stored = {name: codes, f"{name}_scale": scale.reshape(1)}
        stored[name.replace("weight", "input_scale")] = torch.tensor([0.01])
        stored["model.layers.0.self_attn.kv_scale"] = torch.tensor([1.0])
        return stored, Fp8Dequantize(quantizer)._dequantize_one(codes, scale, torch.bfloat16)

    settings = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    return coded(folder, tiny_llama(folder), {**settings, "ignored_layers": ["lm_head"]}, code)


add("fp8_auto", _fp8_auto)


# MLX: its own codes, with the names that `mlx_lm.convert` gives them. The truth is what it makes of
# them with scales and biases in float32, rounded once: in 16 bits it rounds product and sum.


def _mlx(
    folder: Path,
    mode: str,
    bits: int,
    group: int,
    own: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Truth:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    settings = {"group_size": group, "bits": bits, "mode": mode}
    source = tiny_llama(folder, **{"intermediate_size": 128, **sizes})
    stored, truth = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        said = (own or {}).get(module, settings)
        made = mx.array(weight.float().numpy()).astype(mx.bfloat16)
        if weight.dim() < 2 or not said:
            stored[name], truth[name] = made, weight
            continue
        codes, *small = mx.quantize(made, **said)
        stored[name] = codes
        for role, part in zip(("scales", "biases"), small, strict=False):
            stored[f"{module}.{role}"] = part
        if said["mode"] == "affine":
            small = [part.astype(mx.float32) for part in small]
        whole = mx.dequantize(codes, *small, **said).astype(mx.float32)
        truth[name] = torch.from_numpy(np.array(whole)).to(torch.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), stored, metadata={"format": "mlx"})
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = config["quantization_config"] = {**settings, **(own or {})}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shutil.rmtree(source)
    return truth


_OWN = {
    "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 6, "mode": "affine"},
    "model.layers.0.mlp.up_proj": {"group_size": 128, "bits": 5, "mode": "affine"},
    "model.layers.0.self_attn.v_proj": {"group_size": 32, "bits": 2, "mode": "affine"},
    "lm_head": False,
}
_MLX = _mlx, "mlx"
add("mlx_3", *_MLX, "affine", 3, 64)
add("mlx_4_wide", *_MLX, "affine", 4, 32, hidden_size=96, head_dim=24, intermediate_size=160)
add("mlx_8_and_others", *_MLX, "affine", 8, 64, _OWN, hidden_size=128)
add("mlx_mxfp4", *_MLX, "mxfp4", 4, 32)
add("mlx_mxfp8", *_MLX, "mxfp8", 8, 32)
add("mlx_nvfp4", *_MLX, "nvfp4", 4, 16)


# MXFP4 as gpt-oss has it. Its own writer runs on a GPU: codes and exponents are torchao's, the names
# and layout those that transformers reads, and the truth is what it makes of them.


PACKED = ("experts.gate_up_proj", "experts.down_proj")
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def mxfp4_parts(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The blocks of codes of a layer's experts, and their scales."""
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    rows = weight.transpose(1, 2).contiguous()
    scales, codes = to_mx(rows, torch.float4_e2m1fn_x2, 32)
    blocks = codes.view(torch.uint8).reshape(*rows.shape[:2], -1, 16)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales.view(torch.uint8)}


def _gpt_oss(folder: Path, experts: int, hidden: int, inner: int) -> Truth:
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(vocab_size=64, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_local_experts=experts, num_experts_per_tok=1, max_position_embeddings=32)  # fmt: skip
    source = saved_model(folder, GptOssForCausalLM(config).to(torch.bfloat16))

    def code(name: str, weight: torch.Tensor) -> tuple[Truth, torch.Tensor]:
        parts = mxfp4_parts(name, weight)
        return parts, convert_moe_packed_tensors(*parts.values())

    return coded(folder, source, MXFP4, code, PACKED)


add("mxfp4_gpt_oss", _gpt_oss, "torchao", 2, 64, 96)
add("mxfp4_gpt_oss_narrow", _gpt_oss, "torchao", 3, 32, 32)


# ModelOpt: its own quantiser and exporter; the truth is in float32, because its fp8 rounds scales to
# the dtype of the result.


def _mixed(mtq: Any) -> dict[str, Any]:
    """fp8 in attention, NVFP4 elsewhere: the exporter calls that MIXED_PRECISION."""
    rules = [{"quantizer_name": "*", "enable": False}]
    for modules, preset in ("self_attn", mtq.FP8_DEFAULT_CFG), ("mlp", mtq.NVFP4_DEFAULT_CFG):
        for rule in preset["quant_cfg"]:
            name = rule["quantizer_name"]
            if name in ("*weight_quantizer", "*input_quantizer"):
                rules.append({**rule, "quantizer_name": f"*{modules}{name}"})
    return {"quant_cfg": rules, "algorithm": "max"}


def _modelopt(folder: Path, config: str | Callable[[Any], Any], **sizes: int) -> Truth:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from transformers import AutoModelForCausalLM

    source = tiny_llama(folder, **sizes)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)

    def calibrate(model: Any) -> None:
        model(torch.randint(0, 16, (2, 8)))

    settings = getattr(mtq, config) if isinstance(config, str) else config(mtq)
    export_hf_checkpoint(mtq.quantize(model, settings, calibrate), export_dir=folder)
    shutil.rmtree(source)
    (folder / "generation_config.json").unlink()
    stored = load_file(folder / "model.safetensors")
    truth = {}
    for name, codes in stored.items():
        scale = stored.get(f"{name}_scale")
        if name.endswith("_scale") or name.endswith("_scale_2"):
            continue
        if scale is None:
            truth[name] = codes
        elif codes.dtype == torch.uint8:
            shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
            made = NVFP4QTensor(shape, torch.float32, codes)
            scales = {"scale": scale, "double_scale": stored[f"{name}_scale_2"]}
            truth[name] = made.dequantize(**scales, block_sizes={-1: 16})
        elif scale.dtype == torch.uint8:
            made = MXFP8QTensor(codes.shape, torch.float32, codes)
            truth[name] = made.dequantize(scale=scale)
        elif scale.dim() > 1:
            made = FP8QTensor(codes.shape, torch.float32, codes)
            truth[name] = made.dequantize(scale=scale[:, 0, :, 0], block_sizes={-1: 128, -2: 128})
        else:
            made = FP8QTensor(codes.shape, torch.float32, codes)
            truth[name] = made.dequantize(scale=scale[:, None] if scale.dim() else scale)
    return truth


_SQUARE = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 256}
_SQUARE |= {"num_attention_heads": 1, "num_key_value_heads": 1}
_OPT = _modelopt, "nvidia-modelopt"
add("modelopt_fp8", *_OPT, "FP8_DEFAULT_CFG")
add("modelopt_fp8_block", *_OPT, "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", **_SQUARE)
add("modelopt_mixed", *_OPT, _mixed)
add("modelopt_fp8_channel_odd", *_OPT, "FP8_PER_CHANNEL_PER_TOKEN_CFG", **_ODD)
add("modelopt_mxfp8", *_OPT, "MXFP8_DEFAULT_CFG")
add("modelopt_mxfp8_small", *_OPT, "MXFP8_DEFAULT_CFG", **_SMALL)
add("modelopt_nvfp4", *_OPT, "NVFP4_DEFAULT_CFG")
_WIDE = {"hidden_size": 80, "head_dim": 20, "intermediate_size": 112}
add("modelopt_nvfp4_wide", *_OPT, "W4A16_NVFP4_CFG", **_WIDE)


# GPTQ: GPTQModel packs codes that were rounded to the nearest, and dequantises what it packed.


def _gptq(folder: Path, bits: int, group: int, order: bool, v2: bool) -> Truth:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    def code(name: str, weight: torch.Tensor) -> tuple[Truth, torch.Tensor]:
        rows, columns = weight.shape
        size = columns if group == -1 else group
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = weight.float()
        groups = torch.arange(columns) // size
        if order:
            groups = groups[torch.randperm(columns)]
        scales = torch.rand(rows, columns // size) * 0.01 + 0.001
        # v1 stores one less, and has no way to store 0.
        zeros = torch.randint(1, 1 << bits, scales.shape).float()
        module = TorchLinear(bits=bits, group_size=group, sym=False, desc_act=order,
            in_features=columns, out_features=rows, bias=False, register_buffers=True)  # fmt: skip
        module.pack(linear, scales, zeros, groups.to(torch.int32))
        module.post_init()
        whole = module.dequantize_weight().T.contiguous()
        if not v2:
            layout = types.SimpleNamespace(bits=bits, pack_dtype=torch.int32)
            convert_gptq_v2_to_v1_format_module(module, layout)
        base = name.removesuffix("weight")
        parts = ("qweight", "qzeros", "scales", "g_idx")
        return {base + part: getattr(module, part).detach().clone() for part in parts}, whole

    quantization = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": order,
        "sym": False,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return coded(folder, tiny_llama(folder, torch.float16), quantization, code)


_GPTQ = _gptq, "gptqmodel"
add("gptq_4", *_GPTQ, 4, 32, False, False)
add("gptq_4_v2_act_order", *_GPTQ, 4, 32, True, True)
add("gptq_3_act_order", *_GPTQ, 3, 32, True, False)
add("gptq_3", *_GPTQ, 3, -1, False, True)
add("gptq_8", *_GPTQ, 8, -1, False, True)
add("gptq_8_act_order", *_GPTQ, 8, 16, True, False)
add("gptq_2", *_GPTQ, 2, 16, False, False)


# AWQ: AutoAWQ's own module and its own dequantisation.


def _awq(folder: Path, group: int, **sizes: int) -> Truth:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def code(name: str, weight: torch.Tensor) -> tuple[Truth, torch.Tensor]:
        rows, columns = weight.shape
        linear = torch.nn.Linear(columns, rows, bias=False).half()
        groups = weight.float().reshape(rows, -1, group)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low).clamp(min=1e-5) / 15).half()
        zeros = (-torch.round(low / scales)).clamp(0, 15)
        codes = torch.clamp(torch.round(groups / scales[..., None]) + zeros[..., None], 0, 15)
        linear.weight.data = (
            ((codes - zeros[..., None]) * scales[..., None]).reshape(rows, columns).half()
        )
        module = WQLinear_GEMM.from_linear(
            linear, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        base = name.removesuffix("weight")
        made = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, group)
        parts = ("qweight", "qzeros", "scales")
        stored = {base + part: getattr(module, part).detach().clone() for part in parts}
        return stored, made.T.contiguous()

    quantization = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm",
        "zero_point": True}  # fmt: skip
    return coded(folder, tiny_llama(folder, torch.float16, **sizes), quantization, code)


add("awq_32", _awq, "autoawq", 32)
add("awq_8_wide", _awq, "autoawq", 8, hidden_size=96, head_dim=24, num_key_value_heads=4)


# bitsandbytes: loaded and saved by transformers.


def _bitsandbytes(folder: Path, dtype: torch.dtype, config: dict[str, Any], **sizes: int) -> Truth:
    import bitsandbytes as bnb
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source = tiny_llama(folder, dtype, **sizes)
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=BitsAndBytesConfig(**config), dtype=dtype, device_map="cpu"
    )
    model.save_pretrained(folder)
    truth = {}
    for name, parameter in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module) if leaf == "weight" else None
        if isinstance(owner, bnb.nn.Linear4bit):
            state = owner.weight.quant_state
            absmax = state.absmax
            if state.nested:
                absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
            codes = _get_4bit_code(state.quant_type, torch.device("cpu"))
            packed = owner.weight.data.view(torch.uint8).reshape(-1)
            made = _dequantize_4bit_compute(
                packed, absmax, codes, state.blocksize, state.shape, dtype
            )
            native = bnb.functional.dequantize_4bit(owner.weight.data, state)
            print(f"  {name}: the CPU kernel differs in {int((made != native).sum())} elements")
            truth[name] = made
        elif isinstance(owner, bnb.nn.Linear8bitLt):
            whole = bnb.functional.int8_vectorwise_dequant(owner.weight.CB, owner.weight.SCB)
            truth[name] = whole.to(dtype)
        elif leaf in ("weight", "bias"):
            truth[name] = parameter
    shutil.rmtree(source)
    only_weights(folder)
    stored = load_file(folder / "model.safetensors")
    return {name: made for name, made in truth.items() if name in stored}


_four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
_nf4 = {**_four, "bnb_4bit_quant_type": "nf4"}
_double = {"bnb_4bit_use_double_quant": True}
_BNB = _bitsandbytes, "bitsandbytes"
add("bnb_int8", *_BNB, torch.bfloat16, {"load_in_8bit": True})
add("bnb_int8_float32", *_BNB, torch.float32, {"load_in_8bit": True}, **_ODD)
add("bnb_nf4", *_BNB, torch.bfloat16, _nf4)
add("bnb_nf4_double", *_BNB, torch.bfloat16, {**_nf4, **_double}, hidden_size=128)
add("bnb_nf4_double_odd", *_BNB, torch.float32, {**_nf4, **_double}, **_ODD)
add("bnb_fp4", *_BNB, torch.bfloat16, {**_four, "bnb_4bit_quant_type": "fp4"}, **_ODD)
add("bnb_fp4_double", *_BNB, torch.float32, {**_four, "bnb_4bit_quant_type": "fp4", **_double})
_HALVES = {**_nf4, "bnb_4bit_quant_storage": torch.bfloat16}
add("bnb_nf4_in_bfloat16", *_BNB, torch.bfloat16, _HALVES)


# torchao: by transformers where its configs are known there, by its own safetensors support else.


def _torchao(
    folder: Path, described: Any, dtype: torch.dtype = torch.bfloat16, **sizes: int
) -> Truth:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_
    from transformers import AutoModelForCausalLM

    config = described()
    source = tiny_llama(folder, dtype, **sizes)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    if isinstance(config, torch.dtype):  # MX has no config that leaves activations as they are
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        state = {
            name: MXTensor.to_mx(tensor, config, 32) if "_proj" in name else tensor
            for name, tensor in model.state_dict().items()
        }
    else:
        quantize_(model, config, filter_fn=lambda module, name: name.endswith("_proj"))
        state = dict(model.state_dict())
    truth = {
        name: tensor.dequantize() if hasattr(tensor, "dequantize") and "_proj" in name else tensor
        for name, tensor in state.items()
    }
    plain = {name: tensor.detach().clone() for name, tensor in state.items() if "_proj" not in name}
    plain = state | plain
    flat, metadata = flatten_tensor_state_dict(plain)
    save_file({k: v.contiguous() for k, v in flat.items()}, folder / "model.safetensors", metadata)
    config_with(folder, source, {"quant_method": "torchao", "quant_type": type(config).__name__})
    return truth


def _ao(name: str, module: str = "quantization", **arguments: Any) -> Callable[[], Any]:
    """A config of torchao, made where torchao is."""
    return lambda: getattr(importlib.import_module(f"torchao.{module}"), name)(**arguments)


_MX = "prototype.mx_formats"
_AO = _torchao, "torchao"
add("torchao_float8", *_AO, _ao("Float8WeightOnlyConfig"))
add("torchao_float8_float32", *_AO, _ao("Float8WeightOnlyConfig"), torch.float32, **_ODD)
add("torchao_int8", *_AO, _ao("Int8WeightOnlyConfig", version=2))
add("torchao_int8_float32", *_AO, _ao("Int8WeightOnlyConfig", version=2), torch.float32, **_ODD)
add("torchao_intx", *_AO, _ao("IntxWeightOnlyConfig", weight_dtype=torch.int4))
add("torchao_intx_odd", *_AO, _ao("IntxWeightOnlyConfig", weight_dtype=torch.int3), **_ODD)
add("torchao_nvfp4", *_AO, _ao("NVFP4WeightOnlyConfig", _MX))
add("torchao_nvfp4_wide", *_AO, _ao("NVFP4WeightOnlyConfig", _MX), hidden_size=128)
add("torchao_mxfp8", *_AO, lambda: torch.float8_e4m3fn)
add("torchao_mxfp8_wide", *_AO, lambda: torch.float8_e5m2, hidden_size=96, head_dim=24)
add("torchao_mxfp4", *_AO, lambda: torch.float4_e2m1fn_x2)
add("torchao_mxfp4_wide", *_AO, lambda: torch.float4_e2m1fn_x2, hidden_size=96, head_dim=24)


if __name__ == "__main__":
    given = writing.arguments(__doc__).parse_args()
    sys.exit(len(writing.write_each(writing.chosen(CASES, given.only), given.out, write)))
