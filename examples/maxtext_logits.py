"""Every mapping to MaxText on real models: the logits of MaxText's own code beside those of
transformers.

    pip install torch transformers safetensors     # any environment; tiny random models
    python examples/maxtext_logits.py write MODELS

    pip install --no-deps maxtext==0.2.5                  # Python 3.12 or newer, beside jax_ucp
    pip install jax==0.11.1 flax omegaconf pydantic aqtp qwix tokamax pathwaysutils \
        transformers grain drjax jinja2 packaging pillow tiktoken sentencepiece sympy
    python examples/maxtext_logits.py run MODELS [--record DIRECTORY]

`run` applies every mapping whose rules fit a model's names, whether its requirements hold or not,
restores the tree, and runs MaxText with the settings that the model's config asks for. Where the
requirements hold, the logits must be those of transformers; where only they are in the way, the
table shows what they keep out. `--record` writes MaxText's logits, and the models, for the tests.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping
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
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3_moe_unscaled": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": False}),
}
BLOCKS = {
    "llama": "llama2",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
BLOCKS |= {"qwen3_moe": "qwen3_moe"}
# What tests have: a model for each mapping that they do not have anyway, and the mappings to
# record.
RECORDED = (
    "llama2",
    "llama31",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_unscaled",
)


def write(folder: Path) -> None:
    """The models, as transformers saves them, and their logits in fp32."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    for name, (family, changes) in MODELS.items():
        torch.manual_seed(11)
        config = getattr(transformers, f"{family}Config")(**SMALL | changes)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.1)
            # MaxText rounds a tied embedding to bfloat16 where it makes logits of it
            if config.tie_word_embeddings:
                model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.bfloat16())
        model.save_pretrained(folder / name)
        tokens = torch.randint(
            0, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(5)
        )
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
        np.savez(folder / name / "logits.npz", tokens=tokens.numpy(), transformers=logits.numpy())
        print(
            f"{name}: written with transformers {transformers.__version__}, torch"
            f" {torch.__version__}"
        )


def run(folder: Path, record: Path | None) -> int:
    """A line for each model and each mapping whose rules fit its names; 1 where one that should
    agree does not.
    """
    import jax_ucp as ucp
    from jax_ucp.errors import LayoutError
    from jax_ucp.mapping.binding import outcomes
    from jax_ucp.mapping.rules import shipped

    failed = 0
    for name in MODELS:
        checkpoint = ucp.open(folder / name)
        config = checkpoint.config
        with np.load(folder / name / "logits.npz") as stored:
            found = dict(stored)
        for mapping in (one for one in shipped() if one.endswith("-to-maxtext")):
            rules = ucp.Mapping.load(mapping)
            unmet = [
                one.requirement.name for one in outcomes(rules, config) if one.state == "unmet"
            ]
            try:
                tree = checkpoint.map(rules, assume=unmet).restore()["param"]["params"]
            except LayoutError:
                continue  # other names
            logits = maxtext_logits(settings(config), tree, found["tokens"])
            found[mapping] = logits
            want = found["transformers"]
            error = np.abs(logits - want).max() / np.abs(want).max()
            same = (logits.argmax(-1) == want.argmax(-1)).mean()
            said = f"refused: {', '.join(unmet)}" if unmet else "accepted"
            print(
                f"{name:20} {mapping:24} {error:.1e} of their scale, argmax equal in {same:4.0%} "
                f" {said}",
                flush=True,
            )
            failed += bool(not unmet and error > TOLERANCE)
        if record and name in RECORDED:
            (record / name / "ckpt").mkdir(parents=True, exist_ok=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(folder / name / file, record / name / "ckpt" / file)
            np.savez_compressed(record / name / "logits.npz", **found)
    print("What is accepted agrees." if not failed else f"{failed} that are accepted do not agree.")
    return min(failed, 1)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """MaxText's settings for a model of transformers."""
    rope = config["rope_parameters"]
    experts = config.get("num_local_experts") or config.get("num_experts")
    mlp = config.get("moe_intermediate_size") or config["intermediate_size"]
    tied = config["tie_word_embeddings"]
    said = {
        "decoder_block": BLOCKS[config["model_type"]],
        "base_emb_dim": config["hidden_size"],
        "base_num_query_heads": config["num_attention_heads"],
        "base_num_kv_heads": config["num_key_value_heads"],
        "head_dim": (
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        ),
        "base_mlp_dim": mlp,
        "base_moe_mlp_dim": mlp,
        "base_num_decoder_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "normalization_layer_epsilon": config["rms_norm_eps"],
        "mlp_activations": [config["hidden_act"], "linear"],
        "rope_type": "llama3.1" if rope["rope_type"] == "llama3" else "default",
        "rope_max_timescale": int(rope["rope_theta"]),
        "logits_via_embedding": tied,
        "normalize_embedding_logits": False,
        "attention_bias": config["model_type"] == "qwen2",
        "use_qk_norm": config["model_type"].startswith("qwen3"),
    }
    if rope["rope_type"] == "linear":
        said["rope_linear_scaling_factor"] = rope["factor"]
    if experts:
        said |= {"num_experts": experts, "num_experts_per_tok": config["num_experts_per_tok"]}
        said |= {
            "norm_topk_prob": config.get("norm_topk_prob", False),
            "sparse_matmul": False,
            "megablox": False,
        }
    return said


def maxtext_logits(said: Mapping[str, Any], tree: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits of MaxText's model, in fp32 on one device."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import Mesh
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
    from maxtext.models import models  # pyright: ignore[reportMissingImports]
    from maxtext.utils import maxtext_utils  # pyright: ignore[reportMissingImports]

    batch, length = tokens.shape
    fixed: dict[str, Any] = {
        "run_name": "logits",
        "dtype": "float32",
        "weight_dtype": "float32",
        "matmul_precision": "highest",
        "float32_qk_product": True,
        "float32_logits": True,
        "attention": "dot_product",
        "scan_layers": True,
        "enable_dropout": False,
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "hardware": "cpu",
        "per_device_batch_size": batch,
        "max_target_length": length,
        "override_model_config": True,
    }
    base = Path(pyconfig.__file__).parent / "base.yml"
    config = pyconfig.initialize(["", str(base)], **{**fixed, **said})
    mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with jax.set_mesh(mesh):
        model = models.Transformer(config, mesh, quant=None, rngs=nnx.Rngs(0))
        graph, params, others = nnx.split(model, nnx.Param, ...)
        wanted: dict[Any, Any] = dict(nnx.to_flat_state(params))
        given = flat(tree)
        if {path: leaf.shape for path, leaf in wanted.items()} != {
            path: leaf.shape for path, leaf in given.items()
        }:
            sys.exit(f"MaxText has {sorted(wanted)}, the mapping gives {sorted(given)}")
        filled = [(path, leaf.replace(jnp.asarray(given[path]))) for path, leaf in wanted.items()]
        model = nnx.merge(graph, nnx.from_flat_state(filled), others)
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        segments = jnp.ones(tokens.shape, jnp.int32)
        logits = model(jnp.asarray(tokens, jnp.int32), positions, segments, enable_dropout=False)
    return np.asarray(jax.device_get(logits))


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
