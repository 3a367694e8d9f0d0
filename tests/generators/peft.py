"""Adapters of peft, their bases, and what `merge_and_unload` makes of them.

    python tests/generators/peft.py OUT [--only CASE]

Run by a Python that has torch, transformers and peft. `OUT/<case>/base` is the model's folder,
`adapter` (and `second`) what peft saved, `merged.npz` the tensors of the merged model as
`save_pretrained` writes them, types that numpy lacks as unsigned bits. Of a case without
`merged.npz` peft merges nothing that is an adapter's sum. `case.json` has the versions.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# beside this file, which is called as the library is, others are imported by their own names
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import numpy as np  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402

CASES: dict[str, Callable[[Path], None]] = {}
COMMON = dict(vocab_size=40, num_hidden_layers=2, max_position_embeddings=32, bos_token_id=1,
              eos_token_id=2, pad_token_id=0)  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2),
    "qwen2": dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2),
    "gpt2": dict(n_embd=16, n_head=4, n_layer=2, n_positions=32),
    "gpt_oss": dict(hidden_size=16, intermediate_size=24, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=4, num_local_experts=4),
    "vit": dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, image_size=8,
                patch_size=4),
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_model(out: Path, kind: str, head: str, dtype: torch.dtype, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**COMMON | TINY[kind] | changes)
    model = getattr(transformers, f"AutoModel{head}").from_config(config).to(dtype)
    for param in model.parameters():  # biases too, and norms that are not all ones
        with torch.no_grad():
            param.add_(torch.randn_like(param) / 8)
    model.save_pretrained(out / "base")
    return loaded(out, head, dtype)


def loaded(out: Path, head: str, dtype: torch.dtype) -> Any:
    named = "dtype" if transformers.__version__ >= "5" else "torch_dtype"
    auto = getattr(transformers, f"AutoModel{head}")
    return auto.from_pretrained(out / "base", **{named: dtype})


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
    make: Callable[..., Any] = peft.LoraConfig,
    **config: Any,
) -> None:
    base = base_model(out, kind, head, dtype, **(model or {}))
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
        fresh = peft.PeftModel.from_pretrained(loaded(out, head, dtype), out / "adapter")
        names = ["default"]
        if second:
            forget(out / "adapter" / "second" / "adapter_config.json")
            fresh.load_adapter(out / "adapter" / "second", "second")
            names.append("second")
        whole = fresh.merge_and_unload(adapter_names=names)
        whole.save_pretrained(out / "about")
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
case("trainable_tokens", "llama", merge=False, r=4, target_modules=["q_proj"],
     trainable_token_indices=[1, 3])  # fmt: skip
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="the cases whose names begin so")
    said = parser.parse_args()
    writers = {name: version(name) for name in ("torch", "transformers", "peft")}
    for name, write in CASES.items():
        if said.only and not name.startswith(said.only):
            continue
        out = said.out / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        try:
            write(out)
        except Exception as error:  # a writer of another release may lack what the case needs
            print(f"{name}: not written: {type(error).__name__}: {error}"[:300])
            shutil.rmtree(out)
            continue
        (out / "case.json").write_text(json.dumps({"writer": writers}, indent=1))
        print(name)


if __name__ == "__main__":
    main()
