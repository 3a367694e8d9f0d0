"""Hugging Face checkpoints in the models of google-tunix: the logits are those that transformers gave.

    pip install --no-deps google-tunix==0.1.7 jaxtyping wadler-lindig
    python examples/tunix_logits.py [--trees DIRECTORY]

Each checkpoint is opened from its safetensors shards, mapped by the mapping of its family that comes with the package,
restored onto a mesh of eight devices, and run. Two things that tunix 0.1.7 has fixed are set as the checkpoint has
them: the theta by which Llama and Qwen3 rotate, and whether Qwen3-MoE scales its routing weights to one. As a negative
control the heads of one layer are then exchanged. `--trees` writes the models' trees, which the tests know.
"""

import argparse
import functools
import importlib
import json
import sys
import types
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp

DATA = Path(__file__).parent.parent / "tests" / "data" / "torch"
TOLERANCE = 1e-5
# Case -> module of tunix, class, mapping.
CASES = {
    "hf_llama": ("llama3", "Llama3", "hf-llama-to-tunix"),
    "hf_qwen2": ("qwen2", "Qwen2", "hf-qwen2-to-tunix"),
    "hf_qwen3": ("qwen3", "Qwen3", "hf-qwen3-to-tunix"),
    "hf_qwen3_moe": ("qwen3", "Qwen3", "hf-qwen3-moe-to-tunix"),
    "hf_gemma": ("gemma", "Gemma", "hf-gemma-to-tunix"),
    "hf_gemma_mha": ("gemma", "Gemma", "hf-gemma-7b-to-tunix"),
}


def main(trees: Path | None) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rules = [(r"(_proj|einsum)/(w|kernel)$", P("data", None, "model")), (r"embedding$", P(None, "model"))]
    failed = 0
    for case, (family, name, mapping) in CASES.items():
        checkpoint = ucp.open(DATA / case / "ckpt")
        config = checkpoint.extras["config.json"]["config"]
        module = tunix_model(family, config)
        model = nnx.eval_shape(lambda: getattr(module, name)(model_config(module, config), rngs=nnx.Rngs(0)))  # noqa: B023
        graph, state = nnx.split(model)
        target = {"param": nnx.to_pure_dict(state)}
        if trees:
            write_tree(trees / f"{mapping.removeprefix('hf-')}.json", target)
        params = checkpoint.map(mapping).restore(target, mesh=mesh, rules=rules)["param"]
        with np.load(DATA / case / "truth.npz") as truth:
            tokens, want = truth["io::tokens"], truth["io::logits"]

        def error(params: Any) -> float:
            nnx.replace_by_pure_dict(state, params)  # noqa: B023
            got = logits(nnx.merge(graph, state), tokens)  # noqa: B023
            return float(np.abs(got - want).max() / np.abs(want).max())  # noqa: B023

        right = error(params)
        out = params["layers"][0]["attn"]["attn_vec_einsum" if family == "gemma" else "o_proj"]
        out["w"] = jnp.roll(out["w"], 1, axis=0)
        wrong = error(params)
        print(f"{case}: logits differ by {right:.1e} of their scale; with the heads exchanged by {wrong:.1e}")
        failed += right > TOLERANCE or wrong < 100 * TOLERANCE
    print("The logits agree." if not failed else f"{failed} of {len(CASES)} fail.")
    return min(failed, 1)


def tunix_model(family: str, config: Mapping[str, Any]) -> Any:
    """The module of a model. Packages above it are entered without running them, which would need all of tunix."""
    spec = PathFinder.find_spec("tunix")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("google-tunix is not installed; see the top of this file")
    path = Path(spec.submodule_search_locations[0])
    for package in ("tunix", "tunix.models", f"tunix.models.{family}"):
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(path.joinpath(*package.split(".")[1:]))]
    module: Any = importlib.import_module(f"tunix.models.{family}.model")
    module = importlib.reload(module)  # each case sets it its own way
    if family in ("llama3", "qwen3"):
        module.apply_rope = functools.partial(module.apply_rope, rope_theta=config["rope_parameters"]["rope_theta"])
    if config.get("norm_topk_prob") is False:
        module.jnp = Unscaled()
    return module


class Unscaled:
    """jax.numpy, but for a sum that keeps its axis, which is one: `x / sum(x)` is then `x`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def sum(self, x: jax.Array, axis: int = -1, keepdims: bool = False) -> jax.Array:
        return jnp.ones_like(x[..., :1]) if keepdims else jnp.sum(x, axis=axis)


def model_config(module: Any, config: Mapping[str, Any]) -> Any:
    """The model's own configuration, with the names that this family has for things."""
    moe = config["model_type"].endswith("moe")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    said = {
        "num_layers": layers,
        "vocab_size": config["vocab_size"],
        "num_embed": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["moe_intermediate_size" if moe else "intermediate_size"],
        "num_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_kv_heads": config["num_key_value_heads"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "norm_eps": config["rms_norm_eps"],
        "weight_tying": config["tie_word_embeddings"],
        "use_tied_embedding": config["tie_word_embeddings"],
        "num_experts": config.get("num_local_experts") if moe else None,
        "num_experts_per_tok": config.get("num_experts_per_tok") if moe else None,
        "final_logit_softcap": None,
        "use_post_attn_norm": False,
        "use_post_ffw_norm": False,
        "attention_types": (module.AttentionType.GLOBAL,) * layers if hasattr(module, "AttentionType") else (),
    }
    known = module.ModelConfig.__dataclass_fields__
    return module.ModelConfig(**{name: value for name, value in said.items() if name in known})


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    batch, length = tokens.shape
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    found, _ = model(jnp.asarray(tokens), positions, None, causal)
    return np.asarray(found)


def write_tree(path: Path, tree: Any) -> None:
    """The tree as `jax-ucp inspect --json` writes one, which `jax-ucp map --target` reads."""
    leaves = [
        {
            "leaf": jax.tree_util.keystr(at, simple=True, separator="/"),
            "shape": list(leaf.shape),
            "dtype": leaf.dtype.name,
        }
        for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    path.write_text(json.dumps({"leaves": leaves}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trees", type=Path)
    sys.exit(main(parser.parse_args().trees))
