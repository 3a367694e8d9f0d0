"""Every mapping to MaxText on real models: the logits of MaxText's own code beside those of
transformers.

    pip install torch transformers safetensors     # any environment; tiny random models
    python examples/maxtext_logits.py write MODELS

    pip install --no-deps maxtext==0.2.5                  # Python 3.12 or newer, beside jax_ucp
    pip install jax flax omegaconf pydantic aqtp qwix tokamax pathwaysutils \
        transformers grain drjax jinja2 packaging pillow tiktoken sentencepiece sympy
    python examples/maxtext_logits.py run MODELS [--record DIRECTORY]

`run` applies every mapping whose rules fit a model's names, whether its requirements hold or not,
restores the tree, and runs MaxText with the settings that the model's config asks for. Where the
requirements hold, the logits must be those of transformers; where only they are in the way, the
table shows what they keep out. `--record` writes MaxText's logits, and the models, for the tests.
"""

import argparse
import json
import re
import shutil
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-5
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 24}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# MaxText rounds an embedding that it makes logits of, here one that 4 scales, which changes no bit
GEMMA = {"hidden_size": 16, "head_dim": 8, "intermediate_size": 16, "query_pre_attn_scalar": 8}
GEMMA |= {"sliding_window": 8, "tie_word_embeddings": True}
GEMMA4 = {**GEMMA, "num_hidden_layers": 12, "global_head_dim": 16, "num_global_key_value_heads": 1}
GEMMA4 |= {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "intermediate_size": 24}
GEMMA4 |= {"final_logit_softcapping": 30.0}
del GEMMA4["query_pre_attn_scalar"]
GEMMA4_MOE = {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
GEMMA4_MOE |= {"moe_intermediate_size": 8}
# E2B and E4B, all but the lengths. So many layers amplify rounding, unless each adds little: with
# norms near one after them, transformers in fp32 is 1.6e-4 and 1.1e-3 off what it gives in fp64,
# and so 5e-7 and 1.1e-6.
QUIET = ("gemma4_e2b", "gemma4_e4b")
GEMMA4_SMALL = {**GEMMA4, "head_dim": 4, "global_head_dim": 8, "attention_k_eq_v": False}
GEMMA4_SMALL |= {"intermediate_size": 8, "hidden_size_per_layer_input": 4}
GEMMA4_SMALL |= {"vocab_size_per_layer_input": 64}
GEMMA4_E2B = {**GEMMA4_SMALL, "num_hidden_layers": 35, "num_kv_shared_layers": 20}
GEMMA4_E2B |= {"num_attention_heads": 2, "num_key_value_heads": 1, "use_double_wide_mlp": True}
GEMMA4_E2B |= {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7}
GEMMA4_E4B = {**GEMMA4_SMALL, "num_hidden_layers": 42, "num_kv_shared_layers": 18}
LLAMA4 = {"num_hidden_layers": 8, "hidden_size": 16, "head_dim": 8, "intermediate_size": 6}
LLAMA4 |= {"intermediate_size_mlp": 10, "num_local_experts": 4, "num_experts_per_tok": 1}
LLAMA4 |= {"attention_chunk_size": 8, "rope_parameters": {**LLAMA3, "factor": 8.0}}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16, "beta_fast": 32.0}
YARN |= {"beta_slow": 1.0, "factor": 4.0}
GPT_OSS = {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS |= {"hidden_size": 16, "head_dim": 8, "intermediate_size": 8, "sliding_window": 8}
GPT_OSS |= {"rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False}}
DEEPSEEK = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK |= {"hidden_size": 16, "intermediate_size": 24, "q_lora_rank": 12, "kv_lora_rank": 10}
DEEPSEEK |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 6}
DEEPSEEK |= {"num_key_value_heads": 4, "n_shared_experts": 1}
DEEPSEEK_YARN = {**YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK |= {"rope_parameters": DEEPSEEK_YARN}
DEEPSEEK2 = {**DEEPSEEK, "n_group": 1, "topk_method": "greedy", "n_shared_experts": 2}
# so many heads that no two scores are zero: of equal ones it is not said which is chosen
DEEPSEEK32 = {**DEEPSEEK, "index_topk": 8, "index_n_heads": 32, "index_head_dim": 6}
# Kimi K2's configs are those of DeepSeek-V3, with other numbers
KIMI = {**DEEPSEEK_YARN, "rope_theta": 50000.0, "beta_fast": 1.0, "factor": 32.0}
OLMO = {"num_hidden_layers": 8, "num_key_value_heads": 4}
QWEN_NEXT = {**QWEN_MOE, "num_hidden_layers": 8, "norm_topk_prob": True}
QWEN_NEXT |= {"shared_expert_intermediate_size": 16, "partial_rotary_factor": 0.25}
QWEN_NEXT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
QWEN_NEXT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN35 = {**QWEN_NEXT, "linear_key_head_dim": 16}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
# Name -> the family in transformers, and what differs from SMALL.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama31": ("Llama", {"rope_parameters": {**LLAMA3, "factor": 8.0}}),
    "llama32_tied": (
        "Llama",
        {"rope_parameters": {**LLAMA3, "factor": 32.0}, "tie_word_embeddings": True},
    ),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "mixtral_window": ("Mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": 8}),
    "seed_oss": ("SeedOss", {"num_attention_heads": 6}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3_omni_moe": (
        "Qwen3Moe",
        {**QWEN_MOE, "norm_topk_prob": True, "num_hidden_layers": 1, "num_experts": 3},
    ),
    "qwen3_moe_unscaled": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": False}),
    "gemma2": ("Gemma2", {**GEMMA, "num_hidden_layers": 4}),
    # a block of six layers, and two over
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 8}),
    "gemma3_linear": (
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 6,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
    "gemma3_no_window": ("Gemma3Text", {**GEMMA, "layer_types": ["full_attention"] * 2}),
    "gemma4_apart": ("Gemma4Text", {**GEMMA4, "attention_k_eq_v": False, "num_hidden_layers": 6}),
    "gemma4": ("Gemma4Text", {**GEMMA4, "num_hidden_layers": 6}),
    "gemma4_moe": ("Gemma4Text", GEMMA4_MOE),
    "gemma4_e2b": ("Gemma4Text", GEMMA4_E2B),
    "gemma4_e4b": ("Gemma4Text", GEMMA4_E4B),
    "llama4": ("Llama4Text", LLAMA4),
    "llama4_maverick": (
        "Llama4Text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "gpt_oss": ("GptOss", GPT_OSS),
    "deepseek3": ("DeepseekV3", DEEPSEEK),
    "deepseek32": ("DeepseekV32", DEEPSEEK32),
    "kimi_k2": ("DeepseekV3", {**DEEPSEEK, "n_group": 1, "rope_parameters": KIMI}),
    "deepseek2": ("DeepseekV2", {**DEEPSEEK2, "q_lora_rank": None}),
    "deepseek2_steps": ("DeepseekV2", DEEPSEEK2),
    "deepseek2_groups": (
        "DeepseekV2",
        {**DEEPSEEK2, "n_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "gemma": ("Gemma", {"hidden_size": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3_next": ("Qwen3Next", QWEN_NEXT),
    "qwen35_moe": ("Qwen3_5MoeText", QWEN35),
    "olmo2": ("Olmo2", OLMO),
    "olmo3": ("Olmo3", {**OLMO, "sliding_window": 8, "num_key_value_heads": 2}),
    "olmo3_yarn": (
        "Olmo3",
        {
            **OLMO,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
}
BLOCKS = {
    "llama": "llama2",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
BLOCKS |= {"qwen3_moe": "qwen3_moe", "gemma2": "gemma2", "gemma3_text": "gemma3"}
BLOCKS |= {"gpt_oss": "gpt_oss", "deepseek_v3": "deepseek", "deepseek_v2": "deepseek"}
BLOCKS |= {"deepseek_v32": "deepseek"}
SMALL_GEMMAS = {35: "gemma4-e2b", 42: "gemma4-e4b"}  # by their layers
BLOCKS |= {"qwen3_next": "qwen3_next", "gemma": "gemma", "olmo2": "olmo3", "olmo3": "olmo3"}
BLOCKS |= {
    "qwen3_5_moe_text": "qwen3_5",
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "seed_oss": "qwen2",
}
# What MaxText does by the name of a model alone
NAMES = {"gemma3_text": "gemma3-4b", "gemma4_text": "gemma4-31b", "deepseek_v3": "deepseek3-671b"}
NAMES |= {"deepseek_v2": "deepseek2-16b", "olmo2": "olmo3-7b", "olmo3": "olmo3-7b"}
NAMES |= {"deepseek_v32": "deepseek3.2-671b"}
ROPES = {"llama3": "llama3.1", "yarn": "yarn"}
QK_NORMS = ("qwen3", "qwen3_moe", "olmo2", "olmo3")
EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
# What is exchanged to see logits differ: names in MaxText's tree, and the axis of the parts, or
# None where they are the arrays: keys of layers with a window, one of which later layers have too.
CONTROLS = {"heads": ("/out/kernel$", 0), "experts": ("/wo$", 0)}
CONTROLS |= {"heads of the indexer": ("/indexer/wq_b/kernel$", -2)}
CONTROLS |= {"embeddings of layers": ("/embed_tokens_per_layer$", 1)}
CONTROLS |= {"keys of layers": ("/layers_(12|13|21|22)/self_attention/key/kernel$", None)}
# What tests have: models and MaxText's logits of every tree, or, of models that tests/decoder.py
# does not run, what the trees are that were right.
RECORDED = ("llama2", "llama31", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
RECORDED += ("qwen3_moe_unscaled",)
PROVED = ("gemma2", "gemma3", "gemma3_linear", "gpt_oss", "deepseek3")
PROVED += ("kimi_k2", "deepseek2", "deepseek2_steps", "gemma", "olmo2", "olmo3", "qwen3_next")
PROVED += ("deepseek32", "qwen35_moe", "gemma4", "gemma4_apart", "gemma4_moe", *QUIET, "llama4")
PROVED += ("llama4_maverick", "seed_oss", "qwen3_omni_moe")

# The same weights as the text model of one that sees, by the name of the text's.
RELEASED = {"qwen35_moe": "Qwen3_5Moe", "qwen3": "Qwen3VL", "qwen3_moe": "Qwen3VLMoe"}
RELEASED |= {"gemma4_moe": "Gemma4", "llama4": "Llama4"}
RELEASED |= {"gemma3": "Gemma3", "qwen3_omni_moe": "Qwen3OmniMoe", "kimi_k2": "Kimi_K25"}
TOWER = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 2}
TOWER |= {"out_hidden_size": SMALL["hidden_size"], "num_position_embeddings": 4}
TOWER |= {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4, "image_size": 4}
TOWER |= {"position_embedding_size": 4, "num_key_value_heads": 2, "vision_output_dim": 8}
TOWER |= {"projector_input_dim": 8, "projector_output_dim": 8}
TOWER |= {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2}
EAR = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "d_model": 8}
EAR |= {"encoder_ffn_dim": 8, "n_window": 4, "downsample_hidden_size": 4}
EAR |= {"output_dim": SMALL["hidden_size"]}
# Of these the tests have the experts packed too, as transformers has them in memory.
PACKED = ("mixtral", "qwen3_moe", "qwen3_next", "qwen35_moe", "deepseek2", "deepseek3")


def write(folder: Path) -> None:
    """The models, as transformers saves them, and their logits in fp32."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    for name, (family, changes) in MODELS.items():
        torch.manual_seed(11)
        config = getattr(transformers, f"{family}Config")(**SMALL | changes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name_of, weight in model.named_parameters():
                weight.mul_(4) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.1)
                if name in QUIET and ".post_" in name_of:
                    weight.mul_(0.01)
            for name_of, bias in model.named_buffers():
                if name_of.endswith(("e_score_correction_bias", "layer_scalar")):
                    bias.add_(torch.randn_like(bias) * 0.1)
            # MaxText rounds a tied embedding to bfloat16 where it makes logits of it
            if config.tie_word_embeddings:
                model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.bfloat16())
        model.save_pretrained(folder / name)
        if name in PACKED:
            model.save_pretrained(folder / name / "packed", save_original_format=False)
        tokens = torch.randint(
            0, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(5)
        )
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
        np.savez(folder / name / "logits.npz", tokens=tokens.numpy(), transformers=logits.numpy())
        if name in RELEASED:
            seeing = released(RELEASED[name], model)
            seeing.save_pretrained(folder / name / "release")
            with torch.no_grad():
                seeing = getattr(seeing, "thinker", seeing)
                of_release = seeing(input_ids=tokens, use_cache=False).logits
            print(f"{name}: as one that sees {(of_release - logits).abs().max():.1e} off")
        print(
            f"{name}: written with transformers {transformers.__version__}, torch"
            f" {torch.__version__}"
        )


def released(family: str, text: Any) -> Any:
    """A model of a family that sees, which has this text model."""
    import transformers  # pyright: ignore[reportMissingImports]

    of_text = text.config.to_dict()
    del of_text["model_type"]
    config_class = getattr(transformers, f"{family}Config")
    if family == "Qwen3OmniMoe":
        return thinking(of_text, text)
    kind = config_class.sub_configs["vision_config"]
    if family == "Gemma3":
        kind = transformers.SiglipVisionConfig
    tower = {key: value for key, value in TOWER.items() if hasattr(kind, key)}
    untied = {"projection_hidden_size": 8, "tie_word_embeddings": False}
    more = untied if family == "Kimi_K25" else {}
    config = config_class(text_config=of_text, vision_config=tower, **more)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    if family == "Llama4":
        model.language_model.load_state_dict(text.state_dict())
        return model
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def thinking(of_text: dict[str, Any], text: Any) -> Any:
    """A Qwen3-Omni, which sees, hears and talks, and thinks with this text model."""
    import transformers  # pyright: ignore[reportMissingImports]

    of_text["num_experts"] = of_text.pop("num_local_experts")
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    few |= {"head_dim": 4, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
    talker = {"text_config": {**few, **experts, "shared_expert_intermediate_size": 4}}
    talker |= {"code_predictor_config": {**few, "num_code_groups": 2}, "num_code_groups": 2}
    talker |= {"thinker_hidden_size": of_text["hidden_size"], "spatial_merge_size": 2}
    sound = {**few, "num_key_value_heads": 2, "codebook_size": 8, "num_quantizers": 2}
    sound |= {"decoder_dim": 4, "upsample_rates": (2,), "upsampling_ratios": (2,)}
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": of_text,
            "vision_config": {**TOWER, "deepstack_visual_indexes": []},
            "audio_config": EAR,
        },
        talker_config=talker,
        code2wav_config=sound,
    )
    model = transformers.Qwen3OmniMoeForConditionalGeneration(config).float().eval()
    model.thinker.model.language_model.load_state_dict(text.model.state_dict())
    model.thinker.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def run(folder: Path, record: Path | None) -> int:
    """A line for each model and each mapping whose rules fit its names; 1 where one that should
    agree does not.
    """
    import jax_ucp as ucp
    from jax_ucp.mapping.rules import shipped

    of_maxtext = [one for one in shipped() if one.endswith("-to-maxtext")]
    mappings = [
        f"{one}{variant}"
        for one in of_maxtext
        for variant in ("", *map(":{}".format, ucp.Mapping.load(one).variants))
    ]
    failed = 0
    for name in sorted(path.name for path in folder.iterdir()):
        with np.load(folder / name / "logits.npz") as stored:
            found = dict(stored)
        results = {mapping: tried(folder / name, mapping, found) for mapping in mappings}
        for mapping, result in results.items():
            if result is None:
                continue
            failed += result.failed
            print(f"{name:20} {mapping:35} {result}", flush=True)
        if record and name in (*RECORDED, *PROVED):
            keep(folder / name, record / name, found, results)
    print("What is accepted agrees." if not failed else f"{failed} that are accepted do not agree.")
    return min(failed, 1)


@dataclass(frozen=True)
class Result:
    """What MaxText made of a mapping's tree: the largest difference of logits in parts of their
    scale, the same of each control, how many parameters the way back has with their bits, of how
    many, and what the tree is.
    """

    logits: np.ndarray
    error: float
    exchanged: dict[str, float]
    back: tuple[int, int]
    unmet: list[str]
    digest: int

    @property
    def failed(self) -> bool:
        wrong = min(self.exchanged.values(), default=0)
        return not self.unmet and (self.error > TOLERANCE or wrong < 100 * TOLERANCE)

    def __str__(self) -> str:
        if self.unmet:
            return f"{self.error:.1e}  refused: {', '.join(self.unmet)}"
        exchanged = (f"{what} exchanged {off:.1e}" for what, off in self.exchanged.items())
        back = " of ".join(map(str, self.back))
        return f"{self.error:.1e}  with the {', '.join(exchanged)}; back {back} have the same bits"


def tried(model: Path, mapping: str, found: dict[str, np.ndarray]) -> Result | None:
    """What MaxText makes of a model's tree; None where the mapping is for other names."""
    import jax_ucp as ucp
    from jax_ucp.errors import LayoutError
    from jax_ucp.mapping.binding import outcomes

    checkpoint, rules = ucp.open(model), ucp.Mapping.load(mapping)
    config = checkpoint.config
    unmet = [one.requirement.name for one in outcomes(rules, config) if one.state == "unmet"]
    try:
        mapped = checkpoint.map(rules, assume=unmet)
    except LayoutError:
        return None
    tree = mapped.restore()["param"]["params"]
    back = mapped.map(rules.inverse()).params
    stored = {name: param.read() for name, param in checkpoint.params.items()}
    same = [back[name].read().tobytes() == param.tobytes() for name, param in stored.items()]
    want, scan = found["transformers"], "unscanned" in rules.variants
    if unmet and not scan:
        return None  # the scanned tree shows what the requirement keeps out

    def off(given: Any) -> tuple[np.ndarray, float]:
        logits = maxtext_logits(settings(config), given, found["tokens"], scan)
        return logits, float(np.abs(logits - want).max() / np.abs(want).max())

    logits, error = off(tree)
    # in MaxText's Qwen3-Next and Qwen3.5 heads and their features are one axis
    rows = {"embeddings of layers": config.get("hidden_size_per_layer_input", 0)}
    if "linear_attention" in config.get("layer_types", ()):
        rows["heads"] = config["head_dim"]
    wrong = {
        what: off(exchanged(tree, pattern, axis, rows.get(what, 1)))[1]
        for what, (pattern, axis) in CONTROLS.items()
        if not unmet and any(re.search(pattern, "/".join(path)) for path in flat(tree))
    }
    return Result(logits, error, wrong, (sum(same), len(same)), unmet, digest(tree))


def exchanged(tree: Any, pattern: str, axis: int | None, rows: int) -> Any:
    """The tree, of what the pattern names with each part, so many rows, in the next one's place."""
    named = {path: leaf for path, leaf in flat(tree).items() if re.search(pattern, "/".join(path))}
    moved = (
        np.roll([*named.values()], 1, 0)
        if axis is None
        else (np.roll(leaf, rows, axis) for leaf in named.values())
    )
    changed = dict(zip(named, moved, strict=True))

    def with_changed(tree: Any, above: tuple[str, ...] = ()) -> Any:
        if not isinstance(tree, Mapping):
            return changed.get(above, tree)
        return {name: with_changed(value, (*above, name)) for name, value in tree.items()}

    return with_changed(tree)


def digest(tree: Any) -> int:
    """One number for the names, shapes and bits of a tree."""
    crc = 0
    for path, leaf in sorted(flat(tree).items()):
        crc = zlib.crc32(f"{'/'.join(path)} {leaf.shape}".encode(), crc)
        crc = zlib.crc32(leaf.tobytes(), crc)
    return crc


def keep(
    model: Path,
    target: Path,
    found: dict[str, np.ndarray],
    results: Mapping[str, Result | None],
) -> None:
    """What tests have of a model."""
    (target / "ckpt").mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(model / file, target / "ckpt" / file)
    if model.name in PACKED:
        (target / "packed").mkdir(exist_ok=True)
        packed = Path("packed", "model.safetensors")
        shutil.copyfile(model / packed, target / packed)
    if model.name in RELEASED:
        (target / "release").mkdir(exist_ok=True)
        for file in (Path("release", "config.json"), Path("release", "model.safetensors")):
            shutil.copyfile(model / file, target / file)
    tried = {mapping: result for mapping, result in results.items() if result}
    right = {mapping: result.digest for mapping, result in tried.items() if not result.unmet}
    (target / "proved.json").write_text(json.dumps(right, indent=1) + "\n")
    scanned = {mapping: one.logits for mapping, one in tried.items() if ":" not in mapping}
    logits = {**found, **scanned} if model.name in RECORDED else found
    np.savez_compressed(target / "logits.npz", allow_pickle=False, **logits)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """MaxText's settings for a model of transformers."""
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    experts = next(filter(None, map(config.get, EXPERTS_KEYS)), None)
    gelu = "gelu_pytorch_tanh" in (config.get("hidden_activation"), config.get("hidden_act"))
    said = {
        "model_name": NAMES.get(config["model_type"], "default"),
        "decoder_block": BLOCKS[config["model_type"]],
        "base_emb_dim": config["hidden_size"],
        "base_num_query_heads": config["num_attention_heads"],
        "base_num_kv_heads": config["num_key_value_heads"],
        "head_dim": (
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        ),
        "base_mlp_dim": config["intermediate_size"],
        "base_moe_mlp_dim": config.get("moe_intermediate_size") or config["intermediate_size"],
        "base_num_decoder_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "normalization_layer_epsilon": config["rms_norm_eps"],
        "mlp_activations": ["gelu" if gelu else config["hidden_act"], "linear"],
        "rope_type": ROPES.get(rope["rope_type"], "default"),
        "rope_max_timescale": int(rope["rope_theta"]),
        "logits_via_embedding": config["tie_word_embeddings"],
        "normalize_embedding_logits": False,
        "attention_bias": config["model_type"] in ("qwen2", "gpt_oss", "seed_oss"),
        "use_qk_norm": config["model_type"] in QK_NORMS,
    }
    said["rope_linear_scaling_factor"] = rope["factor"] if rope["rope_type"] == "linear" else 1.0
    if experts:
        said |= {
            "num_experts": experts,
            "num_experts_per_tok": config.get("num_experts_per_tok"),
            "norm_topk_prob": config.get("norm_topk_prob", False),
            "sparse_matmul": False,
            "megablox": False,
        }
    if rope["rope_type"] == "yarn":
        said |= {name: rope[name] for name in ("original_max_position_embeddings", "beta_fast")}
        said |= {"rope_factor": rope["factor"], "rope_truncate": rope.get("truncate", True)}
        said["max_position_embeddings"] = config["max_position_embeddings"]
    return said | SETTINGS.get(config["model_type"], lambda config: {})(config)


def gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have besides; MaxText's Gemma 2 has layers of two."""
    of_local = config["rope_parameters"].get("sliding_attention", {})
    said = {
        "sliding_window_size": config["sliding_window"],
        "normalize_embedding_logits": True,  # which undoes the embedding's scale
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "final_logits_soft_cap": config["final_logit_softcapping"] or 0.0,
        "attn_logits_soft_cap": config["attn_logit_softcapping"] or 0.0,
        "local_rope_max_timescale": int(of_local.get("rope_theta", -1)),
    }
    pairs = config["model_type"] == "gemma2"
    return said | ({"base_num_decoder_layers": config["num_hidden_layers"] // 2} if pairs else {})


def gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    ropes = config["rope_parameters"]
    of_global = next(iter(config["per_layer_config"].values()))
    kv_heads = of_global.get("num_key_value_heads", config["num_key_value_heads"])
    return {
        "sliding_window_size": config["sliding_window"],
        "global_head_dim": of_global["head_dim"],
        "global_num_kv_heads": kv_heads,
        "share_kv_projections": config["attention_k_eq_v"],
        "v_norm_with_scale": False,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "final_logits_soft_cap": config["final_logit_softcapping"] or 0.0,
        "local_rope_max_timescale": int(ropes["sliding_attention"]["rope_theta"]),
        "global_rope_max_timescale": int(ropes["full_attention"]["rope_theta"]),
        "local_rope_proportion": 1.0,
        "global_rope_proportion": ropes["full_attention"]["partial_rotary_factor"],
        "normalize_embedding_logits": True,
        **(gemma4_experts(config) if config["enable_moe_block"] else {}),
        **(gemma4_small(config) if config["hidden_size_per_layer_input"] else {}),
    }


def gemma4_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": config["top_k_experts"],
    }


def gemma4_small(config: Mapping[str, Any]) -> dict[str, Any]:
    """What E2B and E4B have besides."""
    same = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers")
    return {name: config[name] for name in (*same, "use_double_wide_mlp")} | {
        "model_name": SMALL_GEMMAS[config["num_hidden_layers"]],
        "decoder_block": "gemma4_small",
    }


def llama4(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope_type": "llama3.1",
        "rope_use_scale": config["rope_parameters"]["rope_type"] == "llama3",
        "base_mlp_dim": config["intermediate_size_mlp"],
        "base_moe_mlp_dim": config["intermediate_size"],
        "shared_experts": 1,
        "use_qk_norm": config["use_qk_norm"],
        "nope_layer_interval": 4,
        "inhomogeneous_layer_cycle_interval": 4,
        "interleave_moe_layer_step": config["moe_layers"][0] + 1,
        "temperature_tuning": config["attn_temperature_tuning"],
        "chunk_attn_window_size": config["attention_chunk_size"],
    }


def gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window_size": config["sliding_window"],
        "attention_sink": True,
        "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": 7.0,
        "routed_bias": True,
        "mlp_bias": True,
        "inhomogeneous_layer_cycle_interval": 2,
        "rope_interleave": False,
        "rope_attention_scaling": True,
    }


def deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    same = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    is_v3 = config["model_type"] != "deepseek_v2"
    # transformers scales the softmax by yarn's mscale always, MaxText of a longer context alone
    longer = config["rope_parameters"]["original_max_position_embeddings"] + 1
    return {name: config[name] for name in (*same, "routed_scaling_factor")} | {
        "q_lora_rank": config["q_lora_rank"] or 0,
        "attention_type": "mla",
        "first_num_dense_layers": config["first_k_dense_replace"],
        "shared_experts": config["n_shared_experts"],
        "n_routing_groups": config["n_group"],
        "topk_routing_group": config["topk_group"],
        "routed_score_func": "sigmoid" if is_v3 else "softmax",
        "routed_bias": is_v3,
        "mscale": config["rope_parameters"]["mscale_all_dim"],
        "max_position_embeddings": max(config["max_position_embeddings"], longer),
        "rope_interleave": config.get("rope_interleave", True),
        "rope_attention_scaling": False,
        "use_indexer": "index_topk" in config,
        "indexer_topk": config.get("index_topk", 0),
        "indexer_n_heads": config.get("index_n_heads", 0),
        "indexer_head_dim": config.get("index_head_dim", 0),
    }


def olmo(config: Mapping[str, Any]) -> dict[str, Any]:
    """What OLMo has besides; of OLMo 2, which has no windows, they are as long as a text."""
    return {
        "sliding_window_size": config.get("sliding_window") or config["max_position_embeddings"],
        "inhomogeneous_layer_cycle_interval": 4,
        "rope_interleave": False,
        "rope_attention_scaling": True,
    }


def qwen3_next(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "shared_experts": 1,
        "inhomogeneous_layer_cycle_interval": 4,
        "gdn_conv_kernel_dim": config["linear_conv_kernel_dim"],
        "gdn_key_head_dim": config["linear_key_head_dim"],
        "gdn_value_head_dim": config["linear_value_head_dim"],
        "gdn_num_key_heads": config["linear_num_key_heads"],
        "gdn_num_value_heads": config["linear_num_value_heads"],
        "partial_rotary_factor": config["rope_parameters"]["partial_rotary_factor"],
    }


def first_gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"normalize_embedding_logits": True}


SETTINGS = {"gemma2": gemma, "gemma3_text": gemma, "gpt_oss": gpt_oss, "deepseek_v3": deepseek}
SETTINGS |= {
    "gemma4_text": gemma4,
    "llama4_text": llama4,
    "qwen3_next": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "deepseek_v2": deepseek,
    "deepseek_v32": deepseek,
    "gemma": first_gemma,
    "olmo2": olmo,
    "olmo3": olmo,
}


def maxtext_logits(
    said: Mapping[str, Any], tree: Any, tokens: np.ndarray, scan: bool = True
) -> np.ndarray:
    """The logits of MaxText's model, in fp32 on one device, with the parameters of a tree, or those
    that MaxText's own loader finds at a path.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import Mesh
    from maxtext.common.checkpointing import (  # pyright: ignore[reportMissingImports]
        load_params_from_path,
    )
    from maxtext.layers import moe  # pyright: ignore[reportMissingImports]
    from maxtext.models import models  # pyright: ignore[reportMissingImports]
    from maxtext.utils import maxtext_utils  # pyright: ignore[reportMissingImports]

    config = configured(said, tokens.shape, scan)
    mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with jax.set_mesh(mesh):
        model = models.Transformer(config, mesh, quant=None, rngs=nnx.Rngs(0))
        stored = nnx.Any(nnx.Param, moe.MoEBiasVar)
        graph, params, others = nnx.split(model, stored, ...)
        wanted: dict[Any, Any] = dict(nnx.to_flat_state(params))
        if isinstance(tree, str):
            tree = nnx.to_pure_dict(load_params_from_path(tree, params, 8))
        given = flat(tree)
        here, there = (
            {(path, leaf.shape) for path, leaf in tree.items()} for tree in (wanted, given)
        )
        if here != there:
            sys.exit(
                f"MaxText has {sorted(here - there)}, the mapping gives {sorted(there - here)}"
            )
        filled = [(path, leaf.replace(jnp.asarray(given[path]))) for path, leaf in wanted.items()]
        model = nnx.merge(graph, nnx.from_flat_state(filled), others)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = jnp.ones(tokens.shape, jnp.int32)
        logits = model(jnp.asarray(tokens, jnp.int32), positions, segments, enable_dropout=False)
    return np.asarray(jax.device_get(logits))


def configured(said: Mapping[str, Any], shape: tuple[int, ...], scan: bool | None = True) -> Any:
    """MaxText's configuration for batches of a shape, in fp32 on one device; `scan` None leaves it
    open whether layers are scanned.
    """
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]

    batch, length = shape
    fixed: dict[str, Any] = {
        "run_name": "logits",
        "dtype": "float32",
        "weight_dtype": "float32",
        "matmul_precision": "highest",
        "float32_qk_product": True,
        "float32_logits": True,
        "attention": "dot_product",
        **({} if scan is None else {"scan_layers": scan}),
        "enable_dropout": False,
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "hardware": "cpu",
        "per_device_batch_size": batch,
        "max_target_length": length,
        "override_model_config": True,
    }
    base = Path(pyconfig.__file__).parent / "base.yml"
    return pyconfig.initialize(["", str(base)], **{**fixed, **said})


def flat(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], np.ndarray]:
    """The arrays of nested dicts by their paths."""
    found: dict[tuple[str, ...], np.ndarray] = {}
    for name, value in tree.items():
        found |= (
            flat(value, (*above, name)) if isinstance(value, Mapping) else {(*above, name): value}
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("write", "run"))
    parser.add_argument("models", type=Path)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    sys.exit(write(given.models) if given.command == "write" else run(given.models, given.record))
