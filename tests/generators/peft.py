"""Adapters of peft, their bases, and what `merge_and_unload` makes of them.

    python tests/generators/peft.py OUT [--only PART ...]

Run by a Python that has torch, transformers and peft. `OUT/<case>/base` is the model's folder,
`adapter` (and `second`) what peft saved, `merged.npz` the tensors of the merged model as
`save_pretrained` writes them, types that numpy lacks as unsigned bits; of a head that is tied to
the embedding and is changed, what peft's layers hold of each. Of a case without
`merged.npz` peft merges nothing that is an adapter's sum. `case.json` has the versions.
"""

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import writing
from tiny_models import COMMON as OF_ALL
from tiny_models import TINY

# beside this file, which is called as the library is, others are imported by their own names
sys.path.remove(str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import peft
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

CASES: dict[str, Callable[[Path], None]] = {}
COMMON = {**OF_ALL, "vocab_size": 40}
del COMMON["decoder_start_token_id"]
FEW = dict(num_experts=4, num_experts_per_tok=2)
LOCAL = TINY["mixtral"] | dict(intermediate_size=12)
TINY |= {
    "mixtral": LOCAL, "phimoe": LOCAL,
    "qwen3_moe": TINY["llama"] | FEW | dict(head_dim=4, moe_intermediate_size=12, mlp_only_layers=[0]),
    "granitemoe": LOCAL | dict(num_experts_per_tok=2),
    "olmoe": TINY["llama"] | FEW | dict(intermediate_size=8),
    "vit": TINY["bert"] | dict(image_size=8, patch_size=4),
}  # fmt: skip
_TEXT = COMMON | TINY["llama"]
TINY["llava"] = dict(
    text_config=dict(model_type="llama", **_TEXT), image_token_index=39,
    vision_config=dict(model_type="siglip_vision_model", num_hidden_layers=2, **TINY["vit"]),
)  # fmt: skip
TINY["llava_onevision"] = TINY["llava"] | dict(
    text_config=dict(model_type="qwen2", **_TEXT), video_token_index=38)  # fmt: skip
TINY["qwen2_vl"] = dict(
    text_config=dict(model_type="qwen2_vl_text", **_TEXT, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 0])),
    vision_config=dict(depth=2, embed_dim=16, hidden_size=16, num_heads=4, patch_size=4),
    image_token_id=39, video_token_id=38, vision_start_token_id=37, vision_end_token_id=36,
)  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_model(out: Path, kind: str, head: str, dtype: torch.dtype, **changes: Any) -> Any:
    torch.manual_seed(0)
    saved = changes.pop("saved", head)
    common = {} if "text_config" in TINY[kind] else COMMON
    config = transformers.CONFIG_MAPPING[kind](**common | TINY[kind] | changes)
    model = getattr(transformers, f"AutoModel{saved}").from_config(config).to(dtype)
    for param in model.parameters():  # biases too, and norms that are not all ones
        with torch.no_grad():
            param.add_(torch.randn_like(param) / 8)
    model.save_pretrained(out / "base")
    return loaded(out, head, dtype)


def loaded(out: Path, head: str, dtype: torch.dtype, resize: int = 0) -> Any:
    named = "dtype" if transformers.__version__ >= "5" else "torch_dtype"
    auto = getattr(transformers, f"AutoModel{head}")
    model = auto.from_pretrained(out / "base", **{named: dtype})
    if resize:
        model.resize_token_embeddings(resize)
    return model


def untied(tuned: Any) -> dict[str, np.ndarray]:
    """The embedding and the head of an adapter's model that ties them, each with what the adapter
    adds to it: `merge_and_unload` adds both to the one tensor, and computes other logits.
    """
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    layers = {
        "model.embed_tokens.weight": tuned.get_input_embeddings(),
        "lm_head.weight": tuned.get_output_embeddings(),
    }
    with torch.no_grad():
        want, found = tuned(input_ids=ids).logits, {}
        for name, layer in layers.items():
            adds = hasattr(layer, "get_delta_weight")
            weight = layer.get_base_layer().weight if adds else layer.weight
            found[name] = weight + layer.get_delta_weight("default") if adds else weight.clone()
        whole = tuned.merge_and_unload()
        config = copy.deepcopy(whole.config)
        config.tie_word_embeddings = False
        model = type(whole)(config)
        model.load_state_dict({**whole.state_dict(), **found})
        np.testing.assert_allclose(model(input_ids=ids).logits, want, atol=1e-5)
    return {name: weight.numpy() for name, weight in found.items()}


def disturb(model: Any, seed: int) -> None:
    """Random numbers for all that is trained, as if it had been."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.requires_grad:
            noise = torch.randn(param.shape, generator=generator).to(param.dtype)
            with torch.no_grad():
                param.add_(noise / 8)


def adapter_case(
    out: Path,
    kind: str,
    head: str = "ForCausalLM",
    dtype: torch.dtype = torch.float32,
    merge: bool = True,
    second: Any = None,
    model: dict[str, Any] | None = None,
    safe: bool = True,
    resize: int = 0,
    unties: bool = False,
    make: Callable[..., Any] = peft.LoraConfig,
    **config: Any,
) -> None:
    base = base_model(out, kind, head, dtype, **(model or {}))
    if resize:
        base.resize_token_embeddings(resize)
    tuned = peft.get_peft_model(base, make(**config))
    if second:
        tuned.add_adapter("second", make(**second))
        for name in ("default", "second"):
            tuned.set_adapter(name)
            disturb(tuned, len(name))
    else:
        disturb(tuned, 1)
    tuned.save_pretrained(out / "adapter", safe_serialization=safe)
    for readme in out.rglob("README.md"):
        readme.unlink()
    config_file = out / "adapter" / "adapter_config.json"
    forget(config_file)
    if merge:
        (out / "about").mkdir()
        fresh = loaded(out, head, dtype, resize)
        fresh = peft.PeftModel.from_pretrained(fresh, out / "adapter")
        names = ["default"]
        if second:
            forget(out / "adapter" / "second" / "adapter_config.json")
            fresh.load_adapter(out / "adapter" / "second", "second")
            names.append("second")
        more = untied(fresh) if unties else {}
        whole = fresh if unties else fresh.merge_and_unload(adapter_names=names)
        whole = whole.base_model.model if unties else whole
        whole.save_pretrained(out / "about")
        np.savez_compressed(out / "merged.npz", **{**tensors(out / "about"), **more})
        shutil.rmtree(out / "about")


def packed_case(out: Path, of: Path) -> None:
    """A case that an older transformers wrote, base and merged model with their experts packed."""
    shutil.copytree(of / "adapter", out / "adapter")
    shutil.copy(of / "case.json", out)
    for name, merged in (("base", {}), ("about", dict(np.load(of / "merged.npz")))):
        model = transformers.AutoModelForCausalLM.from_pretrained(of / "base")
        if merged:
            shutil.copytree(of / "base", out / "older")
            save_file(merged, out / "older" / "model.safetensors")
            model = transformers.AutoModelForCausalLM.from_pretrained(out / "older")
            shutil.rmtree(out / "older")
        model.save_pretrained(out / name, save_original_format=False)
    np.savez_compressed(out / "merged.npz", **tensors(out / "about"))
    shutil.rmtree(out / "about")


def forget(config_file: Path) -> None:
    """Leave the path of this machine out of an adapter's config."""
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = "base"
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
                found[name] = bits.numpy()
    return found


def case(name: str, kind: str, **options: Any) -> None:
    CASES[name] = lambda out: adapter_case(out, kind, **options)


case("lora", "llama", r=4, lora_alpha=6, target_modules="all-linear")
case("rslora_patterns", "llama", r=4, lora_alpha=6, use_rslora=True, target_modules=ATTENTION,
     rank_pattern={"q_proj": 2, "model.layers.1.self_attn.v_proj": 8},
     alpha_pattern={"q_proj": 12, r"layers\.0\.self_attn\.o_proj": 1.5})  # fmt: skip
case("dora", "llama", r=4, lora_alpha=6, use_dora=True, target_modules=[*ATTENTION, "down_proj"])
case("several", "llama", r=4, target_modules=ATTENTION,
     second=dict(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"]))  # fmt: skip
case("saved_modules", "llama", r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])
case("saved_head_renamed", "gpt_neox", r=4, target_modules=["query_key_value"],
     modules_to_save=["lm_head"])  # fmt: skip
case(
    "saved_experts", "mixtral", r=2, target_modules=["q_proj"], modules_to_save=["gate", "experts"]
)
case("conv1d", "gpt2", r=4, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
case("conv1d_dora", "gpt2", r=4, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True,
     use_dora=True)  # fmt: skip
case("embedding", "llama", r=4, target_modules=["embed_tokens", "q_proj"])
case("embedding_tied", "qwen2", r=4, target_modules=["embed_tokens"],
     model=dict(tie_word_embeddings=True))  # fmt: skip
case("embedding_dora", "llama", r=4, target_modules=["embed_tokens"], use_dora=True)
case("bias_all", "qwen2", r=4, target_modules=ATTENTION, bias="all")
case("bias_lora_only", "qwen2", r=4, target_modules=["q_proj"], bias="lora_only")
case("lora_bias", "qwen2", r=4, target_modules=["q_proj", "v_proj"], lora_bias=True)
case("experts", "gpt_oss", r=2, target_modules=["q_proj"],
     target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])  # fmt: skip
case("router_patterns", "gpt_oss", r=2,
     target_parameters=["mlp.router.weight", "mlp.experts.down_proj"],
     alpha_pattern={"router": 5, "router.weight": 3, "down_proj": 7})  # fmt: skip
case("convolution", "vit", head="", r=4, target_modules=["projection", "query"],
     make=peft.LoraConfig)  # fmt: skip
case("convolution_dora", "vit", head="", r=4, target_modules=["projection"], use_dora=True)
case("some_layers", "llama", r=4, target_modules=ATTENTION, layers_to_transform=[1])
case("new_head", "llama", head="ForSequenceClassification", r=4, target_modules=["q_proj"],
     task_type="SEQ_CLS")  # fmt: skip
case("bfloat16", "llama", dtype=torch.bfloat16, r=4, target_modules="all-linear")
case("bfloat16_dora", "llama", dtype=torch.bfloat16, r=4, target_modules=ATTENTION, use_dora=True)
case("torch_save", "llama", r=4, target_modules=ATTENTION, safe=False)
for refused in ("pissa", "olora"):
    case(refused, "llama", merge=False, r=4, target_modules=ATTENTION, init_lora_weights=refused)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TIED = dict(tie_word_embeddings=True)
case("experts_mixtral", "mixtral", r=2, target_modules=["q_proj"],
     target_parameters=[*EXPERTS, "mlp.gate.weight"])  # fmt: skip
case("experts_qwen3", "qwen3_moe", r=2, target_modules=["v_proj"],
     target_parameters=EXPERTS, rank_pattern={"gate_up_proj": 3}, alpha_pattern={"down_proj": 5})  # fmt: skip
case("experts_phimoe", "phimoe", r=2, target_modules=["q_proj"],
     target_parameters=[*EXPERTS, "mlp.router.weight"])  # fmt: skip
case("experts_granite", "granitemoe", r=2, target_modules=["q_proj"],
     target_parameters=["experts.gate_up_proj", "experts.down_proj", "router.weight"])  # fmt: skip
case("experts_olmoe", "olmoe", r=2, target_parameters=["mlp.experts.gate_up_proj"], use_rslora=True)
case("experts_each", "mixtral", r=2, target_modules=["w1", "w2", "w3", "gate", "v_proj"],
     alpha_pattern={"w2": 5})  # fmt: skip
case("experts_square", "gpt_oss", r=2, target_parameters=EXPERTS, model=dict(intermediate_size=16))
case("tokens", "llama", r=4, target_modules=["q_proj"], trainable_token_indices=[3, 1])
case("tokens_bfloat16", "llama", dtype=torch.bfloat16, r=4, target_modules=["q_proj"],
     trainable_token_indices={"embed_tokens": [0, 39], "lm_head": [2]})  # fmt: skip
case("tokens_tied", "llama", r=4, target_modules=["q_proj"], model=TIED,
     trainable_token_indices=[1, 3])  # fmt: skip
case("resized", "llama", r=4, target_modules=["q_proj"], resize=43)
case("resized_embedding", "llama", merge=False, r=4, target_modules=["embed_tokens"], resize=43)
case("tied_head", "llama", r=4, target_modules=["q_proj", "lm_head"], model=TIED, unties=True)
case("tied_both", "llama", r=4, target_modules=["embed_tokens", "lm_head"], model=TIED, unties=True)
case("tied_ensured", "llama", r=4, target_modules=["embed_tokens", "q_proj"], model=TIED,
     ensure_weight_tying=True, unties=True)  # fmt: skip
case("tied_saved", "llama", r=4, target_modules=["q_proj"], model=TIED,
     modules_to_save=["embed_tokens"])  # fmt: skip
case("vlm_llava", "llava", head="ForImageTextToText", r=4,
     target_modules=r".*language_model.*\.(q_proj|down_proj)|.*multi_modal_projector.linear_1")  # fmt: skip
case("vlm_onevision", "llava_onevision", head="ForImageTextToText", r=4,
     target_modules=r".*language_model.*\.(q_proj|down_proj)")  # fmt: skip
case("vlm_qwen2_vl", "qwen2_vl", head="ForImageTextToText", r=4,
     target_modules=["q_proj", "gate_proj", "qkv"])  # fmt: skip
case("headless_base", "llama", r=4, target_modules=["q_proj"], model=TIED | dict(saved=""))
case("headless_adapter", "llama", head="", r=4, target_modules=["q_proj"],
     model=dict(saved="ForCausalLM"))  # fmt: skip
CASES["old_experts_packed"] = lambda out: packed_case(out, out.parent / "old_experts_each")
for kind, options in {
    "IA3": dict(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "PrefixTuning": dict(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "PromptTuning": dict(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "LoHa": dict(r=2, target_modules=ATTENTION),
    "LoKr": dict(r=2, target_modules=ATTENTION),
    "AdaLora": dict(target_modules=ATTENTION, total_step=10),
}.items():
    case(f"other_{kind.lower()}", "llama", merge=False, make=getattr(peft, f"{kind}Config"),
         **options)  # fmt: skip


def main() -> None:
    given = writing.arguments(__doc__).parse_args()
    writers = writing.versions("torch", "transformers", "peft")

    def write(name: str, folder: Path) -> None:
        CASES[name](folder)
        if not (folder / "case.json").exists():
            (folder / "case.json").write_text(json.dumps({"writer": writers}, indent=1))

    writing.write_each(writing.chosen(CASES, given.only), given.out, write)


if __name__ == "__main__":
    main()
