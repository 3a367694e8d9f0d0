"""gpt-oss and DeepSeek-V3 in Flax NNX, written for reading: both are published quantised.

`config` is the model's config.json. Parameters have the shapes of the arithmetic. Axes in einsums
and in the mappings beside this file: b batch, t and s positions, e embed, h heads, g heads of keys,
d head_dim, r rank, x experts, m mlp. Every expert computes every token: plain, not fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.transformer import Linear, Table

Config = Mapping[str, Any]


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.scale[...]


class SinkAttention(nnx.Module):
    """gpt-oss: groups of heads share a key; each head has a sink, which takes attention and gives
    nothing. With `window` a position sees so many.
    """

    def __init__(self, config: Config, window: int | None, *, rngs: nnx.Rngs):
        self.rope, self.window = config["rope_parameters"], window
        embed, size = config["hidden_size"], config["head_dim"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.q = Linear((embed, heads, size), (heads, size), rngs=rngs)
        self.k = Linear((embed, groups, size), (groups, size), rngs=rngs)
        self.v = Linear((embed, groups, size), (groups, size), rngs=rngs)
        self.out = Linear((heads, size, embed), (embed,), rngs=rngs)
        self.sinks = nnx.Param(jnp.zeros(heads))

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (of("bte,ehd->bthd", x) for of in (self.q, self.k, self.v))
        rates, gain = rotation(q.shape[-1], self.rope)
        q, k = rotate(q, rates, gain), rotate(k, rates, gain)
        k, v = (jnp.repeat(one, q.shape[2] // k.shape[2], axis=2) for one in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(visible(x.shape[1], self.window), scores, -jnp.inf)
        sinks = jnp.broadcast_to(self.sinks[...][:, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
        return self.out("bthd,hde->bte", jnp.einsum("bhts,bshd->bthd", weights, v))


class ClampedExperts(nnx.Module):
    """gpt-oss: of a row of `up` each pair is a gate and what passes it, both clamped; the weights
    are a softmax over those chosen.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.per_token, self.limit = config["num_experts_per_tok"], config["swiglu_limit"]
        experts, embed = config["num_local_experts"], config["hidden_size"]
        mlp = config["intermediate_size"]
        self.router = Linear((embed, experts), (experts,), rngs=rngs)
        self.up = Linear((experts, embed, mlp, 2), (experts, mlp, 2), rngs=rngs)
        self.down = Linear((experts, mlp, embed), (experts, embed), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.router("bte,ex->btx", x)
        top, index = jax.lax.top_k(scores, self.per_token)
        weights = spread(jax.nn.softmax(top), index, scores.shape[-1])
        pairs = self.up("bte,xemp->btxmp", x)
        gate = jnp.minimum(pairs[..., 0], self.limit)
        passed = jnp.clip(pairs[..., 1], -self.limit, self.limit)
        hidden = (passed + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        return jnp.einsum("btx,btxe->bte", weights, self.down("btxm,xme->btxe", hidden))


class LatentAttention(nnx.Module):
    """DeepSeek-V3: queries, and keys with values, come of latents; one rotated key serves all
    heads.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.rope, self.rank = config["rope_parameters"], config["kv_lora_rank"]
        self.plain, self.rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        embed, heads, eps = config["hidden_size"], config["num_attention_heads"], 1e-6
        of_query, value = config["q_lora_rank"], config["v_head_dim"]
        size = self.plain + self.rotated
        self.q_a = Linear((embed, of_query), None, rngs=rngs)
        self.q_norm = RMSNorm(of_query, eps)
        self.q_b = Linear((of_query, heads, size), None, rngs=rngs)
        self.kv_a = Linear((embed, self.rank + self.rotated), None, rngs=rngs)
        self.kv_norm = RMSNorm(self.rank, eps)
        self.kv_b = Linear((self.rank, heads, self.plain + value), None, rngs=rngs)
        self.out = Linear((heads, value, embed), None, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        rates, gain = rotation(self.rotated, self.rope)
        q = self.q_b("btr,rhd->bthd", self.q_norm(self.q_a("bte,er->btr", x)))
        latent = self.kv_a("bte,er->btr", x)
        kv = self.kv_b("btr,rhd->bthd", self.kv_norm(latent[..., : self.rank]))
        key = rotate(in_halves(latent[..., None, self.rank :]), rates, gain)
        key = jnp.broadcast_to(key, (*kv.shape[:-1], self.rotated))
        k = jnp.concatenate([kv[..., : self.plain], key], axis=-1)
        turned = rotate(in_halves(q[..., self.plain :]), rates, gain)
        q = jnp.concatenate([q[..., : self.plain], turned], axis=-1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        scores *= growth(self.rope.get("factor", 1), self.rope.get("mscale_all_dim", 0)) ** 2
        weights = jax.nn.softmax(jnp.where(visible(x.shape[1]), scores, -jnp.inf), axis=-1)
        return self.out(
            "bthd,hde->bte", jnp.einsum("bhts,bshd->bthd", weights, kv[..., self.plain :])
        )


class GatedMLP(nnx.Module):
    def __init__(self, embed: int, mlp: int, *, rngs: nnx.Rngs):
        self.gate = Linear((embed, mlp), None, rngs=rngs)
        self.up = Linear((embed, mlp), None, rngs=rngs)
        self.down = Linear((mlp, embed), None, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(self.gate("bte,em->btm", x)) * self.up("bte,em->btm", x)
        return self.down("btm,me->bte", hidden)


class GroupedExperts(nnx.Module):
    """DeepSeek-V3: experts are in groups, of which some are chosen first, by their two best; `bias`
    says who is chosen and not how much it counts. Shared experts answer every token.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        experts, embed = config["n_routed_experts"], config["hidden_size"]
        mlp = config["moe_intermediate_size"]
        self.router = Linear((embed, experts), None, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(experts))
        self.gate = Linear((experts, embed, mlp), None, rngs=rngs)
        self.up = Linear((experts, embed, mlp), None, rngs=rngs)
        self.down = Linear((experts, mlp, embed), None, rngs=rngs)
        self.shared = GatedMLP(embed, mlp * config["n_shared_experts"], rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = jax.nn.sigmoid(self.router("bte,ex->btx", x))
        index = self._chosen(scores + self.bias[...])
        top = jnp.take_along_axis(scores, index, axis=-1)
        if self.config["norm_topk_prob"]:
            top /= top.sum(-1, keepdims=True)
        weights = spread(top * self.config["routed_scaling_factor"], index, scores.shape[-1])
        hidden = jax.nn.silu(self.gate("bte,xem->btxm", x)) * self.up("bte,xem->btxm", x)
        routed = jnp.einsum("btx,btxe->bte", weights, self.down("btxm,xme->btxe", hidden))
        return routed + self.shared(x)

    def _chosen(self, scores: jax.Array) -> jax.Array:
        groups = scores.reshape(*scores.shape[:-1], self.config["n_group"], -1)
        best = jax.lax.top_k(groups, 2)[0].sum(-1)
        kept = jax.lax.top_k(best, self.config["topk_group"])[1]
        mask = spread(jnp.ones(kept.shape), kept, groups.shape[-2])
        open_to_choice = jnp.where(mask[..., None] > 0, groups, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(open_to_choice, self.config["num_experts_per_tok"])[1]


class Block(nnx.Module):
    """Attention, then experts or an MLP, each on a norm of the stream and added to it."""

    def __init__(self, attention: nnx.Module, mlp: nnx.Module, config: Config):
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.attention_norm, self.mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attention, self.mlp = attention, mlp

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Mixture(nnx.Module):
    """Tokens `[batch, length]` to logits `[batch, length, vocab]`: the family is that of the
    config.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        block = {"gpt_oss": gpt_oss, "deepseek_v3": deepseek_v3}[config["model_type"]]
        vocab, embed = config["vocab_size"], config["hidden_size"]
        self.embed = Table(vocab, embed, rngs=rngs)
        layers = range(config["num_hidden_layers"])
        self.layers = nnx.List([block(config, layer, rngs) for layer in layers])
        self.final_norm = RMSNorm(embed, config["rms_norm_eps"])
        self.head = Linear((embed, vocab), None, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed.embedding[tokens]
        for layer in self.layers:
            x = layer(x)
        return self.head("bte,ev->btv", self.final_norm(x))


def gpt_oss(config: Config, layer: int, rngs: nnx.Rngs) -> Block:
    is_sliding = config["layer_types"][layer] == "sliding_attention"
    window = config["sliding_window"] if is_sliding else None
    attention = SinkAttention(config, window, rngs=rngs)
    return Block(attention, ClampedExperts(config, rngs=rngs), config)


def deepseek_v3(config: Config, layer: int, rngs: nnx.Rngs) -> Block:
    is_dense = layer < config["first_k_dense_replace"]
    plain = GatedMLP(config["hidden_size"], config["intermediate_size"], rngs=rngs)
    mlp = plain if is_dense else GroupedExperts(config, rngs=rngs)
    return Block(LatentAttention(config, rngs=rngs), mlp, config)


def spread(weights: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Weights of those chosen as weights of all, where the others have none."""
    return (weights[..., None] * jax.nn.one_hot(index, count)).sum(-2)


def visible(length: int, window: int | None = None) -> jax.Array:
    """Which positions a position sees: itself and those before it, or the last `window` of them."""
    away = jnp.arange(length)[:, None] - jnp.arange(length)
    return (away >= 0) & (away < (window or length))


def rotate(x: jax.Array, rates: jax.Array, gain: float) -> jax.Array:
    """Rotary positions on `[batch, length, heads, size]`: feature i and the one half a head on form
    a plane.
    """
    angle = jnp.arange(x.shape[1])[:, None, None] * rates
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = gain * jnp.cos(angle), gain * jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def in_halves(x: jax.Array) -> jax.Array:
    """Planes of neighbours as planes of features half a head apart."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def rotation(size: int, rope: Config) -> tuple[jax.Array, float]:
    """How fast each plane turns, and by how much it grows: by theta alone, or as YaRN has it.

    YaRN slows planes that turn less than `beta_slow` times in the original length by `factor`,
    keeps those that turn more than `beta_fast` times, and goes from one to the other in a line.
    """
    theta, planes = rope["rope_theta"], size // 2
    rates = theta ** (-jnp.arange(planes) / planes)
    if rope["rope_type"] == "default":
        return rates, 1.0
    turns = rope["original_max_position_embeddings"] / (2 * math.pi)
    edges = [
        planes * math.log(turns / rope[name]) / math.log(theta)
        for name in ("beta_fast", "beta_slow")
    ]
    if rope.get("truncate", True):
        edges = [math.floor(edges[0]), math.ceil(edges[1])]
    low, high = max(edges[0], 0), min(edges[1], size - 1)
    slowed = jnp.clip((jnp.arange(planes) - low) / (high - low), 0, 1)
    factor, all_dim = rope["factor"], rope.get("mscale_all_dim")
    gain = growth(factor, rope.get("mscale", 1)) / growth(factor, all_dim or 0)
    return rates * (1 - slowed + slowed / factor), gain


def growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1
