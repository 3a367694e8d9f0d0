"""Writes tiny quantised models of the families that are published so, and beside each the logits
that transformers gives for it, whose own code dequantises it.

    python tests/generators/quantized_models.py OUT [--only PART ...]

OUT/<case>/ckpt is the checkpoint, OUT/<case>/logits.npz has `tokens` and `logits` (float32), and
OUT/<case>/case.json says who wrote it. It needs what `quantized.py`, beside it, needs.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import writing
from quantized import MXFP4, PACKED, config_with, mxfp4_parts, only_weights, tiny_llama
from safetensors.torch import load_file, save_file
from torch import nn

CASES: dict[str, Callable[[Path], tuple[nn.Module, list[str]]]] = {}
LENGTH = 24
SMALL = {"vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64}  # fmt: skip


def case(function: Callable[[Path], tuple[nn.Module, list[str]]]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def write(name: str, folder: Path) -> None:
    (folder / "ckpt").mkdir()
    torch.manual_seed(sum(name.encode()))
    model, packages = CASES[name](folder / "ckpt")
    tokens = torch.randint(0, model.config.vocab_size, (2, LENGTH))
    with torch.no_grad():
        logits = model.float().eval()(input_ids=tokens, use_cache=False).logits
    np.savez_compressed(folder / "logits.npz", tokens=tokens.numpy(), logits=logits.numpy())
    about = {"writer": writing.versions("torch", *packages)}
    (folder / "case.json").write_text(json.dumps(about, indent=1) + "\n")


def saved(model: nn.Module, source: Path) -> dict[str, torch.Tensor]:
    """The weights as transformers saves them, with norms and biases that say something."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            grown = weight * 4 if weight.dim() > 1 else weight + torch.randn_like(weight) * 0.3
            weight.copy_(weight if "embed_tokens" in name else grown)
    model.to(torch.bfloat16).save_pretrained(source)
    return load_file(source / "model.safetensors")


@case
def gpt_oss_mxfp4(folder: Path) -> tuple[nn.Module, list[str]]:
    """Its own writer runs on a GPU: codes and exponents are torchao's, names and layout gpt-oss's."""
    from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

    sizes: dict[str, Any] = {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}  # fmt: skip
    source = folder.parent / "source"
    stored: dict[str, torch.Tensor] = {}
    model = GptOssForCausalLM(GptOssConfig(**SMALL | sizes))
    with torch.no_grad():
        for name, buffer in model.named_parameters():
            if name.endswith(("_bias", "sinks")):
                buffer.copy_(torch.randn_like(buffer))
    for name, weight in saved(model, source).items():
        stored |= mxfp4_parts(name, weight) if name.endswith(PACKED) else {name: weight}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config_with(folder, source, MXFP4)
    config = Mxfp4Config(dequantize=True)
    read = GptOssForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return read, ["transformers", "torchao"]


@case
def deepseek_v3_fp8(folder: Path) -> tuple[nn.Module, list[str]]:
    """The operation by which transformers saves such weights, on the names of the hub."""
    from types import SimpleNamespace

    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    sizes: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 32,
        "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0,
        "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}  # fmt: skip
    source = folder.parent / "source"
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL | sizes))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    config = FineGrainedFP8Config(weight_block_size=(32, 32))
    quantizer = SimpleNamespace(quantization_config=config)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in saved(model, source).items():
        is_linear = "_proj" in name and "lm_head" not in name and weight.dim() == 2
        stored |= Fp8Quantize(quantizer).convert({name: weight}) if is_linear else {name: weight}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config_with(folder, source, json.loads(config.to_json_string(use_diff=False)))
    read = DeepseekV3ForCausalLM.from_pretrained(
        folder,
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
        dtype=torch.bfloat16,
        attn_implementation="eager",
    )
    return read, ["transformers"]


@case
def llama_int4(folder: Path) -> tuple[nn.Module, list[str]]:
    """compressed-tensors, groups of 32 with zero points, by llm-compressor."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    sizes = {"vocab_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    source = tiny_llama(folder, **sizes)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    saved(model, source)
    said = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": said}}
    recipe = QuantizationModifier(ignore=["lm_head"], config_groups=groups)
    oneshot(model=model, recipe=recipe, pipeline="datafree")
    model.save_pretrained(folder, save_compressed=True)
    shutil.rmtree(source)
    only_weights(folder)
    read = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
        dtype=torch.bfloat16,
        attn_implementation="eager",
    )
    return read, ["transformers", "compressed-tensors", "llmcompressor"]


if __name__ == "__main__":
    given = writing.arguments(__doc__).parse_args()
    sys.exit(len(writing.write_each(writing.chosen(CASES, given.only), given.out, write)))
