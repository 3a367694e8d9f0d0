"""`python tests/generators/tunix_models.py [FOLDER]`: tiny random models for tunix that other cases
do not have, as transformers 5.23 saves them, with their logits in fp32.

Gemma 4 in two blocks of layers, with the keys as values in the last of each or apart, and Gemma 3
with its vision tower, on two images beside texts. Norms after sublayers are near 0.1: near one, so
many layers amplify rounding to 1e-5 of the logits' scale (transformers in fp32 against fp64).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

DATA = Path(__file__).parent.parent / "data" / "tunix"
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SMALL |= {"sliding_window": 8, "tie_word_embeddings": True}
GEMMA4 = {**SMALL, "num_hidden_layers": 12, "global_head_dim": 16, "num_global_key_value_heads": 1}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
ROPES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
ROPES |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA3 = {**SMALL, "num_hidden_layers": 7, "query_pre_attn_scalar": 8, "rope_parameters": ROPES}
TOWER = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 10, "image_size": 8}
TOWER |= {"num_hidden_layers": 2, "patch_size": 2, "vision_use_head": False}
IMAGE, TOKENS = 60, 4  # the token that stands for one of an image, and how many an image has


def models() -> dict[str, Any]:
    """The models by their names, without weights that are to be told apart."""
    text = transformers.Gemma4TextConfig
    seeing = transformers.Gemma3Config(
        text_config=GEMMA3, vision_config=TOWER, mm_tokens_per_image=TOKENS, image_token_index=IMAGE
    )
    return {
        "gemma4": transformers.Gemma4ForCausalLM(text(**GEMMA4, attention_k_eq_v=True)),
        "gemma4_apart": transformers.Gemma4ForCausalLM(text(**GEMMA4, attention_k_eq_v=False)),
        "gemma3_vision": transformers.Gemma3ForConditionalGeneration(seeing),
    }


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Two texts, and of a model that sees an image in each, in another place."""
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, IMAGE, (2, 40), generator=random)
    if name != "gemma3_vision":
        return {"input_ids": tokens}
    for row, at in enumerate((3, 20)):
        tokens[row, at : at + TOKENS] = IMAGE
    images = torch.rand((2, 3, 8, 8), generator=random) * 2 - 1
    return {"input_ids": tokens, "pixel_values": images, "token_type_ids": (tokens == IMAGE).int()}


def main(folder: Path) -> None:
    for name in models():
        torch.manual_seed(11)
        model = models()[name].float().eval()
        with torch.no_grad():
            for label, weight in model.named_parameters():
                weight.mul_(4) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.1)
                if "language_model" not in label and "mm_input_projection" in label:
                    weight.normal_()
                if "post_" in label and "layernorm.weight" in label and "vision" not in label:
                    weight.mul_(0.1).sub_(0.9 * (name == "gemma3_vision"))  # it adds one
            for label, buffer in model.named_buffers():
                if label.endswith("layer_scalar"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
            given = inputs(name)
            logits = model(**given, use_cache=False).logits
        model.save_pretrained(folder / name / "ckpt")
        (folder / name / "ckpt" / "generation_config.json").unlink(missing_ok=True)
        arrays = {"tokens": given["input_ids"].numpy(), "transformers": logits.numpy()}
        if "pixel_values" in given:
            arrays["images"] = given["pixel_values"].numpy()
        np.savez_compressed(folder / name / "logits.npz", allow_pickle=False, **arrays)
        with torch.no_grad():
            wide = {k: one.double() if one.is_floating_point() else one for k, one in given.items()}
            exact = model.double()(**wide, use_cache=False).logits
        off = ((exact - logits).abs().max() / exact.abs().max()).item()
        print(f"{name}: transformers {transformers.__version__}, {off:.1e} off fp64")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
