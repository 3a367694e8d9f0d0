"""A decoder in numpy that runs MaxText's scanned trees as MaxText's own model does: what the
mappings are checked by.

It is written from the code of maxtext 0.2.5, with the settings that a config of transformers asks
for, and compared with the logits that MaxText itself gave, of right trees and of wrong ones
(`tests/data/maxtext`).
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Tree = Mapping[str, Any]
# Families whose query kernel holds the attention's 1/sqrt(head_dim); the others multiply the query
# by it.
FOLDED = ("llama", "mistral", "mixtral")


def logits(tree: Tree, config: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    tree = tree["params"]
    decoder, embedding = tree["decoder"], tree["token_embedder"]["embedding"]
    x = embedding[tokens].astype(np.float64)
    for i, layer in enumerate(layers_of(decoder)):
        h = norm(x, layer["pre_self_attention_layer_norm"]["scale"], config)
        if "GptOssAttention" in layer:
            window = None if i % 2 else config["sliding_window"]
            x = x + attention(layer["GptOssAttention"], config, h, window)
        else:
            attend = latent_attention if "wkv_a" in layer["self_attention"] else attention
            x = x + attend(layer["self_attention"], config, h)
        h = norm(x, layer["post_self_attention_layer_norm"]["scale"], config)
        if "mlp" in layer:
            x = x + mlp(h, *(layer["mlp"][name]["kernel"] for name in ("wi_0", "wi_1", "wo")))
        elif "DeepSeekMoeBlock_0" in layer:
            block = layer["DeepSeekMoeBlock_0"]
            shared = (block["shared_experts"][name]["kernel"] for name in ("wi_0", "wi_1", "wo"))
            x = x + mlp(h, *shared) + experts(block["MoeBlock_0"], config, h)
        elif "GptOssMlp" in layer:
            x = x + clamped_experts(layer["GptOssMlp"], config, h)
        else:
            x = x + experts(layer.get("moe_block") or layer["MoeBlock_0"], config, h)
    x = norm(x, decoder["decoder_norm"]["scale"], config)
    head = decoder["logits_dense"]["kernel"] if "logits_dense" in decoder else embedding.T
    return x @ head


def layers_of(decoder: Tree) -> Iterator[Tree]:
    """The layers in their order; DeepSeek's dense ones are first, gpt-oss' are in blocks of two."""
    for name in ("layers", "dense_layers", "moe_layers"):
        if name not in decoder:
            continue
        stacks = [decoder[name]]
        if "layers_0" in decoder[name]:
            stacks = [decoder[name]["layers_0"], decoder[name]["layers_1"]]
        for i in range(stacks[0]["pre_self_attention_layer_norm"]["scale"].shape[1]):
            yield from (at_layer(stack, i) for stack in stacks)


def at_layer(tree: Any, i: int) -> Any:
    """One layer of scanned parameters: they are stacked on axis 1, but the bias of experts' scores
    in a MoeBlock_0, which is no parameter there, on axis 0.
    """
    if not isinstance(tree, Mapping):
        return tree[:, i]
    layer = {name: at_layer(value, i) for name, value in tree.items()}
    gate = tree.get("MoeBlock_0", {}).get("gate", {})
    if "bias" in gate:
        layer["MoeBlock_0"]["gate"]["bias"] = gate["bias"][i]
    return layer


def norm(x: np.ndarray, scale: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale


def attention(p: Tree, config: Mapping[str, Any], x: np.ndarray, window=None) -> np.ndarray:
    """Attention of groups of heads; with a window to so many keys, the query's own included. A head
    may have a sink, a score of nothing.
    """
    own = (p[name] for name in ("query", "key", "value"))
    q, k, v = (np.einsum("bte,ehd->bthd", x, a["kernel"]) + a.get("bias", 0) for a in own)
    if "query_norm" in p:
        q, k = norm(q, p["query_norm"]["scale"], config), norm(k, p["key_norm"]["scale"], config)
    rope = config["rope_parameters"]
    neighbours = rope["rope_type"] == "llama3"  # MaxText's rope_type llama3.1
    rates = rope["rope_theta"] ** (-np.arange(q.shape[-1] // 2) / (q.shape[-1] // 2))
    rates = slowed(rates) if neighbours else rates
    longer = 1.0
    if rope["rope_type"] == "yarn":
        rates, longer = yarn_rates(rope, q.shape[-1]), 0.1 * np.log(rope["factor"]) + 1
    q, k = (longer * rotated(each, rates, neighbours) for each in (q, k))
    group = q.shape[2] // k.shape[2]
    folded = config["model_type"] in FOLDED
    scale = 1 if folded else q.shape[-1] ** -0.5
    scores = np.einsum("bthd,bshd->bhts", q, k.repeat(group, axis=2)) * scale
    is_seen = np.tril(np.ones(scores.shape[-2:], bool))
    scores = np.where(np.triu(is_seen, 1 - (window or len(is_seen))), scores, -np.inf)
    sinks = np.reshape(p.get("sinks", -np.inf), (-1, 1, 1))
    scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:3], 1))], -1)
    out = np.einsum("bhts,bshd->bthd", softmax(scores)[..., :-1], v.repeat(group, axis=2))
    return np.einsum("bthd,hde->bte", out, p["out"]["kernel"]) + p["out"].get("bias", 0)


def latent_attention(p: Tree, config: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    """Heads made of a latent; they share the part of the key that is turned; yarn scales it."""
    rope, nope = config["rope_parameters"], config["qk_nope_head_dim"]
    low = norm(x @ p["wq_a"]["kernel"], p["q_norm"]["scale"], config)
    q = np.einsum("bte,ehd->bthd", low, p["wq_b"]["kernel"])
    latent, shared = np.split(x @ p["wkv_a"]["kernel"], [config["kv_lora_rank"]], -1)
    latent = norm(latent, p["kv_norm"]["scale"], config)
    k, v = np.split(np.einsum("bte,ehd->bthd", latent, p["wkv_b"]["kernel"]), [nope], -1)
    rates = yarn_rates(rope, config["qk_rope_head_dim"])
    turned = rotated(shared[:, :, None], rates, neighbours=True)
    scores = np.einsum("bthd,bshd->bhts", q[..., :nope], k)
    own = rotated(q[..., nope:], rates, neighbours=True)
    scores = scores + np.einsum("bthd,bsd->bhts", own, turned[:, :, 0])
    mscale = 0.1 * rope["mscale_all_dim"] * np.log(rope["factor"]) + 1
    scores = scores * mscale**2 * q.shape[-1] ** -0.5
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    out = np.einsum("bhts,bshd->bthd", softmax(scores), v)
    return np.einsum("bthd,hde->bte", out, p["out"]["kernel"])


def yarn_rates(rope: Mapping[str, Any], features: int) -> np.ndarray:
    """Rates of rotation, the slow ones divided by the factor."""

    def pair(turns: float) -> float:
        """The pair that turns so often in the original context."""
        turned = rope["original_max_position_embeddings"] / (turns * 2 * np.pi)
        return features * np.log(turned) / (2 * np.log(rope["rope_theta"]))

    low, high = pair(rope["beta_fast"]), pair(rope["beta_slow"])
    if rope.get("truncate", True):
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, features - 1)
    pairs = np.arange(features // 2)
    slow = np.clip((pairs - low) / (high - low), 0, 1)
    rates = rope["rope_theta"] ** (-2.0 * pairs / features)
    return slow * rates / rope["factor"] + (1 - slow) * rates


def slowed(rates: np.ndarray) -> np.ndarray:
    """Llama 3.1's rates of rotation, by the four numbers that MaxText has fixed: 8, 1, 4, 8192."""
    turns = 8192 * rates / (2 * np.pi)  # in the original context
    smooth = np.clip((turns - 1) / (4 - 1), 0, 1)
    return (1 - smooth) * rates / 8 + smooth * rates


def rotated(x: np.ndarray, rates: np.ndarray, neighbours: bool) -> np.ndarray:
    """Pairs of features turned by the position; a pair are neighbours, or lie half a head apart."""
    turn = np.exp(1j * np.arange(x.shape[1])[:, None] * rates)[None, :, None, :]
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    turned = (a + 1j * b) * turn
    parts = turned.real, turned.imag
    return np.stack(parts, -1).reshape(x.shape) if neighbours else np.concatenate(parts, -1)


def mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def experts(p: Tree, config: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    """The weights are a softmax over those that are chosen, whatever `norm_topk_prob` is; where a
    bias helps to choose, sigmoids in parts of their sum.
    """
    scores = x @ p["gate"]["kernel"]
    ranks, weigh = scores, softmax
    if "bias" in p["gate"]:
        scores = 1 / (1 + np.exp(-scores))
        ranks = of_best_groups(scores + p["gate"]["bias"], config["n_group"], config["topk_group"])
        weigh = functools.partial(in_parts_of, config["routed_scaling_factor"])
    chosen = np.argsort(-ranks, -1)[..., : config["num_experts_per_tok"]]
    kept = np.zeros_like(scores)
    np.put_along_axis(kept, chosen, weigh(np.take_along_axis(scores, chosen, -1)), -1)
    experts_of = range(kept.shape[-1])
    out = np.stack([mlp(x, p["wi_0"][e], p["wi_1"][e], p["wo"][e]) for e in experts_of], -1)
    return np.einsum("btde,bte->btd", out, kept)


def clamped_experts(p: Tree, config: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    """Experts of gpt-oss: they and the router have biases, and what they compute is clamped."""
    scores, limit = x @ p["gate"]["kernel"] + p["gate"]["bias"], config["swiglu_limit"]
    chosen = np.argsort(-scores, -1)[..., : config["num_experts_per_tok"]]
    kept = np.zeros_like(scores)
    np.put_along_axis(kept, chosen, softmax(np.take_along_axis(scores, chosen, -1)), -1)
    gate, up = (np.einsum("bte,xem->btxm", x, p[w]) + p[f"{w}_bias"] for w in ("wi_0", "wi_1"))
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    wide = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    out = np.einsum("btxm,xme->btxe", wide, p["wo"]) + p["wo_bias"]
    return np.einsum("btxe,btx->bte", out, kept)


def gpt2_logits(tree: Tree, config: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """The logits of Flax's GPT-2 in transformers 4, whose kernels are (out, in)."""
    tree = tree["transformer"]
    heads, length = config["n_head"], tokens.shape[1]
    is_earlier = np.tril(np.ones((length, length), bool))
    embedding = tree["wte"]["embedding"].astype(np.float64)

    def linear(x: np.ndarray, p: Tree) -> np.ndarray:
        return x @ p["kernel"].T + p["bias"]

    def layer_norm(x: np.ndarray, p: Tree) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return centred / np.sqrt(variance + config["layer_norm_epsilon"]) * p["scale"] + p["bias"]

    x = embedding[tokens] + tree["wpe"]["embedding"][:length]
    for i in range(config["n_layer"]):
        p = tree["h"][str(i)]
        qkv = linear(layer_norm(x, p["ln_1"]), p["attn"]["c_attn"])
        q, k, v = (each.reshape(*x.shape[:2], heads, -1) for each in np.split(qkv, 3, -1))
        scores = np.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        scores = np.where(is_earlier, scores, -np.inf)
        out = np.einsum("bhts,bshd->bthd", softmax(scores), v).reshape(x.shape)
        x = x + linear(out, p["attn"]["c_proj"])
        wide = linear(layer_norm(x, p["ln_2"]), p["mlp"]["c_fc"])
        x = x + linear(gelu(wide, config["activation_function"]), p["mlp"]["c_proj"])
    return layer_norm(x, tree["ln_f"]) @ embedding.T


def gelu(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def of_best_groups(scores: np.ndarray, groups: int, best: int) -> np.ndarray:
    """The scores, without those of groups whose two best have a lower sum than `best` others."""
    grouped = scores.reshape(*scores.shape[:-1], groups, -1)
    sums = np.sort(grouped, -1)[..., -2:].sum(-1)
    is_left = np.argsort(np.argsort(-sums, -1), -1) >= best
    return np.where(is_left[..., None], -np.inf, grouped).reshape(scores.shape)


def in_parts_of(total: float, x: np.ndarray) -> np.ndarray:
    return total * x / x.sum(-1, keepdims=True)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
