"""Compares the logits of transformers with those of Megatron's own model, whose checkpoint it gets.

    python examples/megatron_logits.py

Needs torch and transformers 5. Megatron's model gave the logits when it saved the checkpoint
(`tests/generators/megatron_core.py`, `megatron_deepspeed.py`). As a control, heads, experts, the
biases of experts' scores, sinks, and keys with values are exchanged.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

import jax_ucp as ucp

DATA = Path(__file__).parents[1] / "tests" / "data"
CASES = [
    ("megatron/dist_pp2_vpp2_fp32", "megatron-gpt2-to-hf"),
    ("megatron/dist_tp2_singleton_swiglu_fp32", "megatron-llama-to-hf"),
    ("megatron_logits/llama31", "megatron-llama-to-hf"),
    ("megatron_logits/qwen2", "megatron-qwen2-to-hf"),
    ("megatron/dist_tp2_gqa_swiglu_qknorm_fp32", "megatron-qwen3-to-hf"),
    ("megatron/legacy_ep2_moe_seq_distopt_fp32", "megatron-mixtral-to-hf"),
    ("megatron_logits/mixtral", "megatron-mixtral-to-hf"),
    ("megatron_logits/qwen3_moe", "megatron-qwen3-moe-to-hf"),
    ("megatron_logits/qwen3_moe_unscaled", "megatron-qwen3-moe-to-hf"),
    ("megatron_logits/deepseek3", "megatron-deepseek3-to-hf"),
    ("megatron_logits/gpt_oss", "megatron-gpt-oss-to-hf"),
    ("megatron_logits/gpt_oss_clamped", "megatron-gpt-oss-to-hf"),
    ("megatron_deepspeed/gpt2_tp2", "deepspeed-gpt2-to-hf"),
    ("megatron_deepspeed/gpt2_tp2_before_fpdt", "deepspeed-gpt2-to-hf"),
    ("megatron_deepspeed/gpt2_pp2_tp2", "deepspeed-gpt2-to-hf"),
]


def main() -> None:
    for case, mapping in CASES:
        print(f"{mapping}: {', '.join(_differences(case, mapping))}  ({case})", flush=True)


def _differences(case: str, mapping: str) -> Iterator[str]:
    with np.load(DATA / case / "truth.npz") as truth:
        tokens, want = truth["io/tokens"], truth["io/logits"]
    checkpoint = ucp.open(DATA / case / "ckpt", sizes={"vocab": 101}, weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        hub = Path(folder) / "hf"
        checkpoint.map(mapping).export(hub, "safetensors")
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            hub, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if any(loading.values()):
        raise SystemExit(f"transformers did not load it as it is: {loading}")

    def off() -> str:
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.numpy()
        return f"{np.abs(logits - want).max() / np.abs(want).max():.1e}"

    yield off()
    alike = model.config.hidden_size // model.config.num_attention_heads
    of_heads = (getattr(model.config, name, None) for name in ("qk_head_dim", "head_dim"))
    head_dim = next(filter(None, of_heads), alike)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for what, names, rows in (
        ("heads", ("q_proj.weight", "q_b_proj.weight", "attn.c_proj.weight"), head_dim),
        ("experts", ("experts.down_proj",), 1),
        ("biases", ("e_score_correction_bias",), 1),
        ("sinks", ("sinks",), 1),
    ):
        weights = [each for end, each in tensors.items() if end.endswith(names)]
        if not weights:
            continue
        for weight in weights:
            _turn(weight, rows)
        yield f"{what} exchanged {off()}"
        for weight in weights:
            _turn(weight, rows)
    for keys, values in _keys_and_values(tensors, model.config):
        kept = keys.clone()
        keys.copy_(values)
        values.copy_(kept)
    yield f"keys and values exchanged {off()}"


def _keys_and_values(
    tensors: dict[str, torch.Tensor], config: transformers.PretrainedConfig
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of weights and biases, not copied, that make keys and values."""
    for name, tensor in tensors.items():
        if ".k_proj." in name:
            yield tensor.data, tensors[name.replace(".k_proj.", ".v_proj.")].data
        elif ".c_attn." in name:
            _, keys, values = tensor.data.chunk(3, -1)
            yield keys, values
        elif name.endswith("kv_b_proj.weight"):  # here keys are as wide as values
            keys, values = tensor.data.unflatten(0, (-1, 2, config.v_head_dim)).unbind(1)
            yield keys, values


def _turn(weight: torch.Tensor, rows: int) -> None:
    """Exchange blocks of so many rows: the last comes first."""
    blocks = weight.data.reshape(-1, rows, *weight.shape[1:])
    weight.data = blocks.flip(0).reshape(weight.shape)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
