"""A decoder of Megatron's parameters in few lines, for any library with numpy's names: the losses
of a run that goes on in torch and in JAX are those of this function.
"""

from __future__ import annotations

from typing import Any

HEADS, QK, POSITIONS, VALUES = 4, 8, 4, 8  # MLA's head dimensions
GROUPS = 2
# The settings of the runs that `tests/generators/megatron_core.py` writes.
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.95), 1e-8, 0.1
BATCHES, ROWS, LENGTH = 3, 2, 16
# Logits of weights that were hardly trained are alike; so much steeper they tell them apart.
STEEP = 100.0


def tokens(vocab: int) -> list[list[list[int]]]:
    """A few batches of rows of tokens, of no meaning."""

    def row(n, j):
        return [(7 * i * i + 5 * j + 11 * n) % vocab for i in range(LENGTH)]

    return [[row(n, j) for j in range(ROWS)] for n in range(BATCHES)]


def decays(name: str, ndim: int) -> bool:
    """Whether Megatron decays a parameter's weights."""
    return ndim > 1 and not name.endswith(".bias")


def loss(xp: Any, params: dict[str, Any], batch: Any) -> Any:
    """The mean cross entropy of the next tokens."""
    x = params["embedding.word_embeddings.weight"][batch]
    layer = "decoder.layers.0."
    own = {n.removeprefix(layer): value for n, value in params.items() if n.startswith(layer)}
    attend = _mla if "self_attention.linear_kv_down_proj.weight" in own else _grouped
    x = x + attend(xp, own, _norm(xp, x, own["input_layernorm.weight"]))
    x = x + _mlp(xp, own, _norm(xp, x, own["pre_mlp_layernorm.weight"]))
    x = _norm(xp, x, params["decoder.final_layernorm.weight"])
    logits = STEEP * xp.einsum("bsd,vd->bsv", x, params["output_layer.weight"])[:, :-1]
    exact = xp.einsum("bsv,bsv->bs", logits, _one_hot(xp, batch[:, 1:], logits))
    return (xp.log(xp.exp(logits).sum(-1)) - exact).mean()


def _one_hot(xp: Any, labels: Any, like: Any) -> Any:
    return xp.eye(like.shape[-1])[labels]


def _norm(xp: Any, x: Any, weight: Any) -> Any:
    return x / xp.sqrt((x * x).mean(-1)[..., None] + 1e-5) * weight


def _linear(xp: Any, x: Any, weight: Any) -> Any:
    return xp.einsum("...i,oi->...o", x, weight)


def _mlp(xp: Any, own: dict[str, Any], x: Any) -> Any:
    both = _linear(xp, x, own["mlp.linear_fc1.weight"])
    half = both.shape[-1] // 2
    gate, up = both[..., :half], both[..., half:]
    return _linear(xp, gate / (1 + xp.exp(-gate)) * up, own["mlp.linear_fc2.weight"])


def _turned(xp: Any, x: Any) -> Any:
    """Rotary positions on the last axis, half against half; positions are the second axis."""
    half = x.shape[-1] // 2
    steps = xp.arange(x.shape[1])[:, None] / 10000.0 ** (xp.arange(half)[None] / half)
    cos, sin = xp.cos(steps)[None, :, None], xp.sin(steps)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attention(xp: Any, own: dict[str, Any], q: Any, k: Any, v: Any) -> Any:
    scores = xp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = xp.exp(scores) * xp.tril(xp.ones((q.shape[1], q.shape[1])))
    weights = weights / weights.sum(-1)[..., None]
    mixed = xp.einsum("bhqk,bkhd->bqhd", weights, v)
    return _linear(xp, mixed.reshape(*q.shape[:2], -1), own["self_attention.linear_proj.weight"])


def _grouped(xp: Any, own: dict[str, Any], x: Any) -> Any:
    fused = _linear(xp, x, own["self_attention.linear_qkv.weight"])
    each = HEADS // GROUPS
    fused = fused.reshape(*x.shape[:2], GROUPS, each + 2, -1)
    q, k, v = fused[..., :each, :], fused[..., each : each + 1, :], fused[..., each + 1 :, :]
    q = q.reshape(*x.shape[:2], HEADS, -1)
    k, v = ((part + 0 * fused[..., :each, :]).reshape(q.shape) for part in (k, v))
    return _attention(xp, own, _turned(xp, q), _turned(xp, k), v)


def _mla(xp: Any, own: dict[str, Any], x: Any) -> Any:
    prefix = "self_attention.linear_"
    of = {n.removeprefix(prefix): value for n, value in own.items() if n.startswith(prefix)}
    low = _norm(xp, _linear(xp, x, of["q_down_proj.weight"]), of["q_up_proj.layer_norm_weight"])
    q = _linear(xp, low, of["q_up_proj.weight"]).reshape(*x.shape[:2], HEADS, QK + POSITIONS)
    both = _linear(xp, x, of["kv_down_proj.weight"])
    low, k_turned = both[..., :-POSITIONS], both[..., None, -POSITIONS:]
    kv = _linear(xp, _norm(xp, low, of["kv_up_proj.layer_norm_weight"]), of["kv_up_proj.weight"])
    kv = kv.reshape(*x.shape[:2], HEADS, QK + VALUES)
    k_turned = _turned(xp, k_turned) + 0 * q[..., QK:]
    q = xp.concatenate([q[..., :QK], _turned(xp, q[..., QK:])], -1)
    k = xp.concatenate([kv[..., :QK], k_turned], -1)
    return _attention(xp, own, q, k, kv[..., QK:])
