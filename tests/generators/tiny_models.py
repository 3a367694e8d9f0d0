"""Sizes of the smallest models that have what makes a family of transformers what it is."""

from typing import Any

_HEADS = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
_EACH = {**_HEADS, "num_key_value_heads": 4}
_GROUPS = {**_HEADS, "num_key_value_heads": 2}
COMMON = {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2"), _GROUPS),
    **dict.fromkeys(("mistral", "olmo2"), _EACH),
    **dict.fromkeys(("phi", "gpt_neox", "bert", "roberta"), _HEADS),
    "qwen3": {**_GROUPS, "head_dim": 6},
    "gemma2": {**_GROUPS, "head_dim": 4},
    "mixtral": {**_GROUPS, "num_local_experts": 4},
    "gpt_oss": {**_GROUPS, "head_dim": 4, "num_local_experts": 4},
    "qwen3_moe": {**_GROUPS, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8},
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32},
    "opt": {"hidden_size": 16, "ffn_dim": 24, "num_attention_heads": 4, "word_embed_proj_dim": 16},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 4},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_heads": 4, "n_layers": 2},
    "t5": {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 4, "num_layers": 2,
        "num_decoder_layers": 2},
    "bart": {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
}  # fmt: skip
