"""A decoder in numpy that runs MaxText's scanned trees as MaxText's own model does: what the
mappings are checked by.

It is written from the code of maxtext 0.2.5, with the settings that a config of transformers asks
for, and compared with the logits that MaxText itself gave, of right trees and of wrong ones
(`tests/data/maxtext`).
"""

from collections.abc import Mapping
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
    for i in range(config["num_hidden_layers"]):
        layer = at_layer(decoder["layers"], i)
        h = norm(x, layer["pre_self_attention_layer_norm"]["scale"], config)
        x = x + attention(layer["self_attention"], config, h)
        h = norm(x, layer["post_self_attention_layer_norm"]["scale"], config)
        if "mlp" in layer:
            x = x + mlp(h, *(layer["mlp"][name]["kernel"] for name in ("wi_0", "wi_1", "wo")))
        else:
            x = x + experts(layer.get("moe_block") or layer["MoeBlock_0"], config, h)
    x = norm(x, decoder["decoder_norm"]["scale"], config)
    head = decoder["logits_dense"]["kernel"] if "logits_dense" in decoder else embedding.T
    return x @ head


def at_layer(tree: Any, i: int) -> Any:
    """One layer of scanned parameters: they are stacked on axis 1."""
    return {k: at_layer(v, i) for k, v in tree.items()} if isinstance(tree, Mapping) else tree[:, i]


def norm(x: np.ndarray, scale: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale


def attention(p: Tree, config: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    q, k, v = (
        np.einsum("bte,ehd->bthd", x, p[n]["kernel"]) + p[n].get("bias", 0)
        for n in ("query", "key", "value")
    )
    if "query_norm" in p:
        q, k = norm(q, p["query_norm"]["scale"], config), norm(k, p["key_norm"]["scale"], config)
    rope = config["rope_parameters"]
    neighbours = rope["rope_type"] == "llama3"  # MaxText's rope_type llama3.1
    rates = rope["rope_theta"] ** (-np.arange(q.shape[-1] // 2) / (q.shape[-1] // 2))
    rates = slowed(rates) if neighbours else rates
    q, k = rotated(q, rates, neighbours), rotated(k, rates, neighbours)
    group = q.shape[2] // k.shape[2]
    folded = config["model_type"] in FOLDED
    scores = np.einsum("bthd,bshd->bhts", q, k.repeat(group, axis=2)) * (
        1 if folded else q.shape[-1] ** -0.5
    )
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    out = np.einsum("bhts,bshd->bthd", softmax(scores), v.repeat(group, axis=2))
    return np.einsum("bthd,hde->bte", out, p["out"]["kernel"])


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
    """The weights are a softmax over those that are chosen, whatever `norm_topk_prob` is."""
    scores = x @ p["gate"]["kernel"]
    chosen = np.argsort(-scores, -1)[..., : config["num_experts_per_tok"]]
    kept = np.zeros_like(scores)
    np.put_along_axis(kept, chosen, softmax(np.take_along_axis(scores, chosen, -1)), -1)
    out = np.stack(
        [mlp(x, p["wi_0"][e], p["wi_1"][e], p["wo"][e]) for e in range(kept.shape[-1])], -1
    )
    return np.einsum("btde,bte->btd", out, kept)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
