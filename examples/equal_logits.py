"""Hugging Face checkpoints in JAX models that others wrote: the logits are those that torch gave.

    pip install --no-deps google-tunix==0.1.7 jaxtyping wadler-lindig einops
    python examples/equal_logits.py tunix [--trees DIRECTORY]

    pip install transformers==4.55.4      # from 5 on it has no Flax models; torch is not needed
    python examples/equal_logits.py flax [--trees DIRECTORY]

Each checkpoint is opened from its safetensors shards, mapped by the mapping of its family that
comes with the package, restored onto a mesh of eight devices, and run. Two things that tunix 0.1.7
has fixed are set as the checkpoint has them, and so vouched for: the theta by which Llama and Qwen3
rotate, and whether Qwen3-MoE scales its routing weights to one. As negative controls the heads of
one layer are exchanged, and where something was set tunix is run as it is. `--trees` writes the
models' trees, which the tests know.
"""

import argparse
import functools
import importlib
import json
import sys
import types
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
    },
    "flax": {"torch/hf_gpt2": ("FlaxGPT2LMHeadModule", "hf-gpt2-to-flax")},
}
RULES = [
    (r"(_proj|einsum|c_\w+)/(w|kernel)$", P("data", None, "model")),
    (r"embedding$", P(None, "model")),
]

Params = Any


@dataclass(frozen=True)
class Model:
    """A model without its parameters: their tree, what makes logits of them, what exchanges the
    heads of a layer.
    """

    tree: Params
    logits: Callable[[Params, np.ndarray], jax.Array]
    exchange: Callable[[Params], None]


def main(package: str, trees: Path | None) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    failed = 0
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
        params = mapped.restore({"param": model.tree}, mesh=mesh, rules=RULES)["param"]
        tokens, want = truth(DATA / case)
        # eager operations on eight devices of two cores can wait for each other
        logits = jax.jit(model.logits)
        right = np.abs(logits(params, tokens) - want).max() / np.abs(want).max()
        for missed in vouched:
            as_it_is = jax.jit(
                tunix(name, config, [one for one in vouched if one != missed]).logits
            )
            off = np.abs(as_it_is(params, tokens) - want).max() / np.abs(want).max()
            print(f"{case}: without {missed} set they differ by {off:.1e}")
            failed += int(off < 10 * TOLERANCE)
        model.exchange(params)
        wrong = np.abs(logits(params, tokens) - want).max() / np.abs(want).max()
        print(
            f"{case}: logits differ by {right:.1e} of their scale; with the heads exchanged by"
            f" {wrong:.1e}"
        )
        failed += int(right > TOLERANCE or wrong < 100 * TOLERANCE)
    print("The logits agree." if not failed else f"{failed} of {len(CASES[package])} fail.")
    return min(failed, 1)


def truth(case: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that torch was given, and its logits."""
    if case.parent.name == "torch":
        with np.load(case / "truth.npz") as arrays:
            return arrays["io/tokens"], arrays["io/logits"]
    with np.load(case / "logits.npz") as arrays:
        return arrays["tokens"], arrays["transformers"]


def tunix(name: str, config: Mapping[str, Any], changed: Sequence[str]) -> Model:
    family, _, kind = name.partition(".")
    module = tunix_module(family, config, changed)
    model = nnx.eval_shape(
        lambda: getattr(module, kind)(model_config(module, config), rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(model)

    def logits(params: Params, tokens: np.ndarray) -> jax.Array:
        batch, length = tokens.shape
        causal = jnp.broadcast_to(
            jnp.tril(jnp.ones((length, length), bool)), (batch, length, length)
        )
        found, _ = nnx.merge(graph, params)(tokens, positions(tokens), None, causal)
        return found

    def exchange(params: Params) -> None:
        out = params["layers"][0]["attn"]["attn_vec_einsum" if "gemma" in family else "o_proj"]
        out["w"] = jnp.roll(out["w"], 1, axis=0)

    return Model(nnx.to_pure_dict(state), logits, exchange)


def flax(name: str, config: Mapping[str, Any]) -> Model:
    from transformers import GPT2Config  # pyright: ignore[reportMissingImports]
    from transformers.models.gpt2 import modeling_flax_gpt2  # pyright: ignore[reportMissingImports]

    module = getattr(modeling_flax_gpt2, name)(GPT2Config(**config))

    def apply(of: Callable[..., Any], first: Any, tokens: np.ndarray) -> Any:
        return of(first, tokens, jnp.ones_like(tokens), positions(tokens), return_dict=False)

    def exchange(params: Params) -> None:
        out = params["transformer"]["h"]["0"]["attn"]["c_proj"]
        out["kernel"] = jnp.roll(out["kernel"], config["n_embd"] // config["n_head"], axis=1)

    tree = jax.eval_shape(lambda: apply(module.init, jax.random.key(0), np.ones((1, 2), np.int32)))
    return Model(
        tree["params"],
        lambda params, tokens: apply(module.apply, {"params": params}, tokens)[0],
        exchange,
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
    moe = config["model_type"].endswith("moe")
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
        "param_dtype": jnp.float32,
        "attention_types": attention_types(module, config),
    }
    known = module.ModelConfig.__dataclass_fields__
    return module.ModelConfig(**{name: value for name, value in said.items() if name in known})


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
