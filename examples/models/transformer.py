"""A decoder-only transformer in Flax NNX, written for reading: GPT-2's kind, Llama's kind, and what
lies between.

What differs between the families is in `Config`. Parameters have the shapes of the arithmetic:
queries are `[embed, heads, head_dim]`, not `[embed, heads * head_dim]`, and experts are stacked.
Axes in einsums: b batch, t and s positions, e embed, h heads, g groups of heads that share a key, d
head_dim, p gate and up, m mlp, x experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Config:
    """The numbers of a model, and which of the known variants of each part it has.

    `positions` is the length of the table of learned positions, or None; `rope_theta` the base of
    the rotation, or None. `parts` is 2 where the MLP is gated. `moe_layers` are those with experts
    instead of one MLP: `per_token` of them answer for each token, weighted by their probabilities,
    which with `renormalized` are scaled to a sum of one.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    activation: Literal["gelu", "gelu_tanh", "silu"]
    norm: Literal["layer", "rms"]
    eps: float = 1e-5
    parts: int = 1
    positions: int | None = None
    rope_theta: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    head_bias: bool = False
    final_gain: bool = False
    moe_layers: tuple[int, ...] = ()
    experts: int = 0
    moe_mlp: int = 0
    per_token: int = 1
    renormalized: bool = True
    expert_bias: bool = False


class Linear(nnx.Module):
    """`kernel` and `bias` of a linear map; how axes are contracted, `__call__` is told."""

    def __init__(self, shape: tuple[int, ...], bias: tuple[int, ...] | None, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        if bias is not None:
            self.bias = nnx.Param(jnp.zeros(bias))

    def __call__(self, einsum: str, x: jax.Array) -> jax.Array:
        y = jnp.einsum(einsum, x, self.kernel[...])
        return y + self.bias[...] if hasattr(self, "bias") else y


class Table(nnx.Module):
    """An embedding: one row for each token, or for each position."""

    def __init__(self, rows: int, embed: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (rows, embed)))


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last axis; with `gain`, times a number for all features
    together.
    """

    def __init__(self, size: int, config: Config, gain: bool = False):
        self.eps, self.centred = config.eps, config.norm == "layer"
        self.scale = nnx.Param(jnp.ones(size))
        if self.centred:
            self.bias = nnx.Param(jnp.zeros(size))
        if gain:
            self.gain = nnx.Param(jnp.ones(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.centred:
            x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.scale[...]
        x = x + self.bias[...] if self.centred else x
        return x * self.gain[...] if hasattr(self, "gain") else x


class Attention(nnx.Module):
    """Causal attention; each key and value serves `heads / kv_heads` neighbouring queries."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        embed, size = config.embed, config.head_dim

        def project(heads: int) -> Linear:
            return Linear(
                (embed, heads, size), (heads, size) if config.qkv_bias else None, rngs=rngs
            )

        self.q, self.k, self.v = (
            project(config.heads),
            project(config.kv_heads),
            project(config.kv_heads),
        )
        self.out = Linear(
            (config.heads, size, embed), (embed,) if config.out_bias else None, rngs=rngs
        )
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(size, config), Norm(size, config)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (of("bte,ehd->bthd", x) for of in (self.q, self.k, self.v))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.rope_theta is not None:
            q, k = rotate(q, self.config.rope_theta), rotate(k, self.config.rope_theta)
        batch, length, heads, size = q.shape
        q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], size)
        scores = jnp.einsum("btghd,bsgd->bghts", q, k) * size**-0.5
        past = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1)
        y = jnp.einsum("bghts,bsgd->btghd", weights, v)
        return self.out("bthd,hde->bte", y.reshape(batch, length, heads, size))


class MLP(nnx.Module):
    """One hidden layer. Gated (`parts` 2), the first half of `up` says how much of the second
    passes.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.activation = config.activation
        up, down = (
            ((config.parts, config.mlp), (config.embed,)) if config.mlp_bias else (None, None)
        )
        self.up = Linear((config.embed, config.parts, config.mlp), up, rngs=rngs)
        self.down = Linear((config.mlp, config.embed), down, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down("btm,me->bte", activate(self.up("bte,epm->btpm", x), self.activation))


class Experts(nnx.Module):
    """A mixture of MLPs. Every expert computes every token, and most answers count nothing: plain,
    not fast.

    The second result is the balance loss of top-1 routing: experts times the sum, over experts, of
    the share of tokens that chose it and its mean probability. It is 1 where all are used alike.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        experts, parts, mlp, embed = config.experts, config.parts, config.moe_mlp, config.embed
        up, down = ((experts, parts, mlp), (experts, embed)) if config.expert_bias else (None, None)
        self.router = Linear((embed, experts), None, rngs=rngs)
        self.up = Linear((experts, embed, parts, mlp), up, rngs=rngs)
        self.down = Linear((experts, mlp, embed), down, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts = self.config.experts
        probabilities = jax.nn.softmax(self.router("bte,ex->btx", x), axis=-1)
        top, index = jax.lax.top_k(probabilities, self.config.per_token)
        if self.config.renormalized:
            top = top / top.sum(-1, keepdims=True)
        weights = (top[..., None] * jax.nn.one_hot(index, experts)).sum(-2)
        hidden = activate(self.up("bte,xepm->btxpm", x), self.config.activation)
        y = jnp.einsum("btx,btxe->bte", weights, self.down("btxm,xme->btxe", hidden))
        first = jax.nn.one_hot(index[..., 0], experts)
        return y, experts * (probabilities.mean((0, 1)) * first.mean((0, 1))).sum()


class Block(nnx.Module):
    """Attention, then an MLP or experts, each on a norm of the stream and added to it."""

    def __init__(self, config: Config, moe: bool, *, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = Norm(config.embed, config), Norm(config.embed, config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp = Experts(config, rngs=rngs) if moe else MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp(self.mlp_norm(x))
        y, balance = y if isinstance(y, tuple) else (y, jnp.zeros(()))
        return x + y, balance


class Transformer(nnx.Module):
    """Tokens `[batch, length]` to logits `[batch, length, vocab]`, and the balance loss of its
    experts.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Table(config.vocab, config.embed, rngs=rngs)
        if config.positions is not None:
            self.positions = Table(config.positions, config.embed, rngs=rngs)
        self.layers = nnx.List(
            [Block(config, i in config.moe_layers, rngs=rngs) for i in range(config.layers)]
        )
        self.final_norm = Norm(config.embed, config, gain=config.final_gain)
        if not config.tied:
            self.head = Linear((config.embed, config.vocab), None, rngs=rngs)
        if config.head_bias:
            self.head_bias = nnx.Param(jnp.zeros(config.vocab))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.embed.embedding[tokens]
        if self.config.positions is not None:
            x = x + self.positions.embedding[: tokens.shape[1]]
        balance = jnp.zeros(())
        for layer in self.layers:
            x, more = layer(x)
            balance = balance + more
        x = self.final_norm(x)
        logits = (
            x @ self.embed.embedding[...].T if self.config.tied else self.head("bte,ev->btv", x)
        )
        return logits + self.head_bias[...] if self.config.head_bias else logits, balance


def activate(hidden: jax.Array, activation: str) -> jax.Array:
    """The hidden layer `[..., parts, mlp]` as `[..., mlp]`."""
    function = {
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": jax.nn.gelu,
        "silu": jax.nn.silu,
    }
    first = function[activation](hidden[..., 0, :])
    return first * hidden[..., 1, :] if hidden.shape[-2] == 2 else first


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions on `[batch, length, heads, head_dim]`: feature i and the one half a head
    on form a plane.
    """
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1
    )


def next_token_loss(model: Transformer, tokens: jax.Array, balance: float = 0.0) -> jax.Array:
    """The mean cross entropy of each token but the first, plus `balance` times the balance loss."""
    logits, uneven = model(tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -chosen.mean() + balance * uneven
