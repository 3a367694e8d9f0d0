"""A small model of Megatron's, by names and shapes, and how ranks of tensor parallelism cut it."""

from typing import Any

import ml_dtypes
import numpy as np

HIDDEN, HEADS, HEAD_DIM, FFN, VOCAB, EXPERTS, LAYERS = 12, 4, 3, 20, 40, 4, 4
BF16 = np.dtype(ml_dtypes.bfloat16)
STATES = ("param", "exp_avg", "exp_avg_sq")


def arrays_of(gated: bool, moe: bool, tied: bool, hidden: int) -> dict[str, dict[str, np.ndarray]]:
    """Parameters and moments by state, then by name in module order, with global numbers."""
    rng, shapes = np.random.default_rng(0), shapes_of(gated, moe, tied, hidden)

    def noise(shape):
        return rng.normal(size=shape).astype(np.float32)

    return {state: {name: noise(shape) for name, shape in shapes.items()} for state in STATES}


def shapes_of(gated: bool, moe: bool, tied: bool, hidden: int) -> dict[str, tuple[int, ...]]:
    rows = (2 if gated else 1) * FFN
    shapes = {"embedding.word_embeddings.weight": (VOCAB, hidden)}
    shapes["embedding.position_embeddings.weight"] = (7, hidden)
    for i in range(LAYERS):
        layer = f"decoder.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attention.linear_proj.weight"] = (hidden, HEADS * HEAD_DIM)
        shapes[layer + "self_attention.linear_proj.bias"] = (hidden,)
        shapes[layer + "self_attention.linear_qkv.weight"] = (3 * HEADS * HEAD_DIM, hidden)
        shapes[layer + "pre_mlp_layernorm.weight"] = (hidden,)
        if moe:
            shapes[layer + "mlp.router.weight"] = (EXPERTS, hidden)
        for mlp in [f"mlp.experts.{j}." for j in range(EXPERTS)] if moe else ["mlp."]:
            shapes[layer + mlp + "linear_fc1.weight"] = (rows, hidden)
            shapes[layer + mlp + "linear_fc2.weight"] = (hidden, FFN)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    return shapes if tied else {**shapes, "output_layer.weight": (VOCAB, hidden)}


def shard(name: str, whole: np.ndarray, ranks: int, gated: bool) -> list[list[np.ndarray]]:
    """The pieces that each tensor-parallel rank has of a parameter, one after another."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return [[piece] for piece in np.split(whole, ranks, 1)]
    if "linear_fc1" in name and gated:
        gate, up = (np.split(half, ranks) for half in np.split(whole, 2))
        return [[gate[r], up[r]] for r in range(ranks)]
    if any(x in name for x in ("linear_fc1", "linear_qkv", "word_embeddings", "output_layer")):
        return [[piece] for piece in np.split(whole, ranks)]
    return [[whole]] * ranks


def args_of(t, p, v, e, etp, *, moe: bool, tied: bool, **more: Any) -> dict[str, Any]:
    """What Megatron tells of a run with these degrees."""
    return {
        "tensor_model_parallel_size": t, "pipeline_model_parallel_size": p, "expert_model_parallel_size": e,
        "virtual_pipeline_model_parallel_size": v if v > 1 else None, "expert_tensor_parallel_size": etp,
        "context_parallel_size": 1, "data_parallel_size": 2 * e, "world_size": t * p * 2 * e,
        "num_layers": LAYERS, "num_experts": EXPERTS if moe else None, "padded_vocab_size": VOCAB,
        "untie_embeddings_and_output_weights": not tied, "ddp_num_buckets": None, **more,
    }  # fmt: skip
