"""Hugging Face checkpoints in JAX models that others wrote: the logits are those that torch gave.

    pip install --no-deps google-tunix==0.1.7 jaxtyping wadler-lindig einops
    python examples/equal_logits.py tunix [--trees DIRECTORY]

    pip install transformers==4.55.4      # from 5 on it has no Flax models; torch is not needed
    python examples/equal_logits.py flax [--trees DIRECTORY]

Each checkpoint is opened from its safetensors shards, mapped by the mapping of its family that
comes with the package, restored onto a mesh of eight devices, and run. Two things that tunix 0.1.7
has fixed are set as the checkpoint has them, and so vouched for: the theta by which Llama and Qwen3
rotate, and whether Qwen3-MoE scales its routing weights to one. As negative controls the heads of
one layer are exchanged, of a vision tower the places of patches too, and where something was set
tunix is run as it is. `--trees` writes the models' trees, which the tests know.
"""

import argparse
import functools
import importlib
import json
import sys
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from jax_ucp.mapping.binding import outcomes

DATA = Path(__file__).parent.parent / "tests" / "data"
TOLERANCE = 1e-5
# Package -> case -> what it is there, and the mapping.
CASES = {
    "tunix": {
        "torch/hf_llama": ("llama3.Llama3", "hf-llama-to-tunix"),
        "torch/hf_qwen2": ("qwen2.Qwen2", "hf-qwen2-to-tunix"),
        "torch/hf_qwen3": ("qwen3.Qwen3", "hf-qwen3-to-tunix"),
        "torch/hf_qwen3_moe": ("qwen3.Qwen3", "hf-qwen3-moe-to-tunix"),
        "torch/hf_gemma": ("gemma.Gemma", "hf-gemma-to-tunix"),
        "torch/hf_gemma_mha": ("gemma.Gemma", "hf-gemma-7b-to-tunix"),
        "maxtext/gemma2": ("gemma.Gemma", "hf-gemma2-to-tunix"),
        "maxtext/gemma3": ("gemma3.Gemma3", "hf-gemma3-to-tunix"),
        "maxtext/gemma3_linear": ("gemma3.Gemma3", "hf-gemma3-to-tunix"),
        "tunix/gemma3_vision": ("gemma3.Gemma3", "vlm-gemma3-to-tunix"),
        "tunix/gemma4": ("gemma4.Gemma4", "hf-gemma4-to-tunix"),
        "tunix/gemma4_apart": ("gemma4.Gemma4", "hf-gemma4-to-tunix"),
        "maxtext/gemma4_e2b": ("gemma4.Gemma4", "hf-gemma4-small-to-tunix"),
        "maxtext/gemma4_e4b": ("gemma4.Gemma4", "hf-gemma4-small-to-tunix"),
    },
    "flax": {"torch/hf_gpt2": ("FlaxGPT2LMHeadModule", "hf-gpt2-to-flax")},
}
RULES = [
    (r"(_proj|einsum|c_\w+)/(w|kernel)$", P("data", None, "model")),
    (r"embedding$", P(None, "model")),
]

Params = Any
Inputs = tuple[np.ndarray, ...]  # tokens, and images for a model that sees
# In the name of a leaf, the axis of the parts that are exchanged, of so many rows each.
Control = tuple[str, int, int]


@dataclass(frozen=True)
class Model:
    """A model without its parameters: their tree, what makes logits of them, and what is exchanged
    to see them differ.
    """

    tree: Params
    logits: Callable[..., jax.Array]
    controls: Mapping[str, Control]


def main(package: str, trees: Path | None) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    failed, proved = 0, dict[str, int]()
    for case, (name, mapping) in CASES[package].items():
        checkpoint = ucp.open(DATA / case / "ckpt")
        config = checkpoint.config
        vouched = [
            one.requirement.name
            for one in outcomes(ucp.Mapping.load(mapping), config)
            if one.state == "unmet"
        ]
        model = tunix(name, config, vouched) if package == "tunix" else flax(name, config)
        if trees:
            write_tree(trees / f"{mapping.removeprefix('hf-')}.json", {"param": model.tree})
        mapped = checkpoint.map(mapping, assume=vouched)
        # a leaf that the mapping does not form is NaN, and so are logits of a model that reads it
        unread = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype), model.tree)
        params = mapped.restore({"param": unread}, mesh=mesh, rules=RULES, missing="keep")["param"]
        wanted = truth(DATA / case)
        # eager operations on eight devices of two cores can wait for each other
        logits = jax.jit(model.logits)
        right = off(logits, params, wanted)
        for missed in vouched:
            as_it_is = jax.jit(
                tunix(name, config, [one for one in vouched if one != missed]).logits
            )
            unset = off(as_it_is, params, wanted)
            print(f"{case}: without {missed} set they differ by {unset:.1e}")
            failed += int(unset < 10 * TOLERANCE)
        wrong = {
            what: off(logits, exchanged(params, *control), wanted)
            for what, control in model.controls.items()
        }
        controls = ", ".join(f"with the {what} exchanged by {by:.1e}" for what, by in wrong.items())
        print(f"{case}: logits differ by {right:.1e} of their scale; {controls}")
        proved[f"{case} {mapping}"] = digest(mapped)
        failed += int(not right <= TOLERANCE or min(wrong.values()) < 100 * TOLERANCE)  # or NaN
    if trees and not failed:
        (trees / f"proved-{package}.json").write_text(json.dumps(proved, indent=1) + "\n")
    print("The logits agree." if not failed else f"{failed} of {len(CASES[package])} fail.")
    return min(failed, 1)


def off(
    logits: Callable[..., jax.Array], params: Params, wanted: tuple[Inputs, np.ndarray]
) -> float:
    """The largest difference of logits, in parts of their scale."""
    inputs, want = wanted
    return float(np.abs(logits(params, *inputs) - want).max() / np.abs(want).max())


def truth(case: Path) -> tuple[Inputs, np.ndarray]:
    """What torch was given, and its logits."""
    if case.parent.name == "torch":
        with np.load(case / "truth.npz") as arrays:
            return (arrays["io/tokens"],), arrays["io/logits"]
    with np.load(case / "logits.npz") as arrays:
        names = [name for name in ("tokens", "images") if name in arrays]
        return tuple(arrays[name] for name in names), arrays["transformers"]


def digest(mapped: ucp.Checkpoint) -> int:
    """One number for the names, shapes and bits of a tree."""
    crc = 0
    for name, leaf in sorted(mapped.params.items()):
        crc = zlib.crc32(f"{name} {leaf.shape}".encode(), crc)
        crc = zlib.crc32(leaf.read().tobytes(), crc)
    return crc


def exchanged(params: Params, name: str, axis: int, rows: int) -> Params:
    """The parameters, of one leaf with each part in the next one's place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            jnp.roll(leaf, rows, axis)
            if jax.tree_util.keystr(path, simple=True, separator="/") == name
            else leaf
        ),
        params,
    )


def tunix(name: str, config: Mapping[str, Any], changed: Sequence[str]) -> Model:
    family, _, kind = name.partition(".")
    module = tunix_module(family, config, changed)
    model = nnx.eval_shape(
        lambda: getattr(module, kind)(model_config(module, config), rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(model)

    def logits(params: Params, tokens: np.ndarray, images: np.ndarray | None = None) -> jax.Array:
        batch, length = tokens.shape
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
        merged, seen = nnx.merge(graph, params), {}
        if images is not None:
            mask = merged.get_attention_mask(tokens, inputs_mask=jnp.ones(tokens.shape, bool))
            seen = {"images": images.transpose(0, 2, 3, 1)}
        found, _ = merged(tokens, positions(tokens), None, mask, **seen)
        return found

    out = "attn_vec_einsum" if "gemma" in family else "o_proj"
    controls: dict[str, Control] = {"heads": (f"layers/0/attn/{out}/w", 0, 1)}
    if config.get("hidden_size_per_layer_input"):
        controls["embeddings of layers"] = ("embedder/per_layer_input_embedding", 1, 1)
    if tower := config.get("vision_config"):
        of_tower, head = "vision_encoder/siglip_encoder", tower["hidden_size"]
        head //= tower["num_attention_heads"]
        kernel = f"{of_tower}/transformer/blocks/0/attn/out_proj/kernel"
        controls["heads of the tower"] = (kernel, 0, head)
        controls["patches"] = (f"{of_tower}/pos_embedding", 1, 1)
        controls["rows of the projection"] = ("embedder/mm_input_projection/w", 0, 1)
    return Model(nnx.to_pure_dict(state), logits, controls)


def flax(name: str, config: Mapping[str, Any]) -> Model:
    from transformers import GPT2Config  # pyright: ignore[reportMissingImports]
    from transformers.models.gpt2 import modeling_flax_gpt2  # pyright: ignore[reportMissingImports]

    module = getattr(modeling_flax_gpt2, name)(GPT2Config(**config))

    def apply(of: Callable[..., Any], first: Any, tokens: np.ndarray) -> Any:
        return of(first, tokens, jnp.ones_like(tokens), positions(tokens), return_dict=False)

    tree = jax.eval_shape(lambda: apply(module.init, jax.random.key(0), np.ones((1, 2), np.int32)))
    return Model(
        tree["params"],
        lambda params, tokens: apply(module.apply, {"params": params}, tokens)[0],
        {"heads": ("transformer/h/0/attn/c_proj/kernel", 1, config["n_embd"] // config["n_head"])},
    )


def positions(tokens: np.ndarray) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def tunix_module(family: str, config: Mapping[str, Any], changed: Sequence[str]) -> Any:
    """The module of a model, in which what is `changed` is set as the config has it.

    Packages above it are entered without running them, which would need all of tunix.
    """
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
    if "rope_theta" in changed:
        module.apply_rope = functools.partial(
            module.apply_rope, rope_theta=config["rope_parameters"]["rope_theta"]
        )
    if "norm_topk_prob" in changed:
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
    vision = vision_config(config) if "vision_config" in config else {}
    config = config.get("text_config", config)
    moe = config["model_type"].endswith("moe")
    # of Gemma 4's layers without a window
    of_global = next(iter(config.get("per_layer_config", {}).values()), {})
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    rope = config["rope_parameters"]
    of_all, of_window = (rope.get(f"{kind}_attention", rope) for kind in ("full", "sliding"))
    said = {
        "num_layers": layers,
        "vocab_size": config["vocab_size"],
        "num_embed": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["moe_intermediate_size" if moe else "intermediate_size"],
        "num_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_kv_heads": config["num_key_value_heads"],
        "rope_theta": of_all["rope_theta"],
        "local_base_frequency": of_window["rope_theta"],
        "global_base_frequency": of_all["rope_theta"],
        "global_scale_factor": of_all.get("factor", 1.0),
        "norm_eps": config["rms_norm_eps"],
        "weight_tying": config["tie_word_embeddings"],
        "use_tied_embedding": config["tie_word_embeddings"],
        "num_experts": (
            config.get("num_local_experts") or config.get("num_experts") if moe else None
        ),
        "num_experts_per_tok": config.get("num_experts_per_tok") if moe else None,
        "final_logit_softcap": config.get("final_logit_softcapping"),
        "attn_logits_soft_cap": config.get("attn_logit_softcapping"),
        "sliding_window_size": config.get("sliding_window"),
        "use_post_attn_norm": config["model_type"] == "gemma2",
        "use_post_ffw_norm": config["model_type"] == "gemma2",
        "global_key_size": of_global.get("head_dim"),
        "num_global_kv_heads": of_global.get("num_key_value_heads"),
        "k_eq_v_global": config.get("attention_k_eq_v"),
        "global_rope_proportion": of_all.get("partial_rotary_factor"),
        "per_layer_input_dim": config.get("hidden_size_per_layer_input"),
        "frac_shared_layers": config.get("num_kv_shared_layers", 0) / layers,
        "override_kv_shared_ffw_hidden": (
            2 * config["intermediate_size"] if config.get("use_double_wide_mlp") else None
        ),
        "attention_pattern": attention_types(module, config),
        "param_dtype": jnp.float32,
        "vision_config": module.vision.SigLIPConfig(**vision) if vision else None,
        "attention_types": attention_types(module, config),
    }
    known = module.ModelConfig.__dataclass_fields__
    return module.ModelConfig(**{name: value for name, value in said.items() if name in known})


def vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What tunix's vision tower is told of a model that sees."""
    tower = config["vision_config"]
    return {
        "num_mm_tokens_per_image_prepool": (tower["image_size"] // tower["patch_size"]) ** 2,
        "num_mm_tokens_per_image": config["mm_tokens_per_image"],
        "image_height": tower["image_size"],
        "image_width": tower["image_size"],
        "image_channels": tower["num_channels"],
        "soft_token_placeholder": config["image_token_index"],
        "patch_size": (tower["patch_size"], tower["patch_size"]),
        "width": tower["hidden_size"],
        "depth": tower["num_hidden_layers"],
        "mlp_dim": tower["intermediate_size"],
        "num_heads": tower["num_attention_heads"],
    }


def attention_types(module: Any, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of each layer whether it has a window, for a model of which that is said."""
    if not hasattr(module, "AttentionType"):
        return ()
    kinds = module.AttentionType
    layers = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    return tuple(kinds.LOCAL_SLIDING if "sliding" in one else kinds.GLOBAL for one in layers)


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
    parser.add_argument("package", choices=CASES)
    parser.add_argument("--trees", type=Path)
    given = parser.parse_args()
    sys.exit(main(given.package, given.trees))
