"""Quantised checkpoints in JAX models: the logits are those that transformers gives for the weights
that its own code dequantises.

    pip install --no-deps google-tunix==0.1.7 jaxtyping wadler-lindig
    python examples/quantized_logits.py

gpt-oss in MXFP4 and DeepSeek-V3 in block fp8 run in `models/mixtures.py`, a Llama of 4 bits
(compressed-tensors) in tunix. Each is opened with `dequantize="bfloat16"`, as transformers has it,
mapped, restored onto a mesh of eight devices, and run in float32. As negative controls each two
inputs of the last MLP's last weight are exchanged, as if codes were read in another order, and then
the heads of the first layer.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import equal_logits
import jax_ucp as ucp
from equal_logits import Model, Params
from models.mixtures import Mixture

DATA = Path(__file__).parent.parent / "tests" / "data" / "quantized_models"
TOLERANCE = 1e-5
# Case -> the mapping, and where in a layer the weights are that come last in attention and MLP.
MIXTURE = ("attention", "out", "kernel"), ("mlp", "down", "kernel")
CASES = {
    "gpt_oss_mxfp4": (Path(__file__).parent / "models" / "hf-gpt-oss.yaml", *MIXTURE),
    "deepseek_v3_fp8": (Path(__file__).parent / "models" / "hf-deepseek-v3.yaml", *MIXTURE),
    "llama_int4": ("hf-llama-to-tunix", ("attn", "o_proj", "w"), ("mlp", "down_proj", "kernel")),
}
RULES = [(r"(up|down|gate)(_proj)?/kernel$", P("data"))]


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    failed = sum(not is_equal(case, mesh) for case in CASES)
    print("The logits agree." if not failed else f"{failed} of {len(CASES)} fail.")
    return min(failed, 1)


def is_equal(case: str, mesh: Mesh) -> bool:
    right, *wrong = differences(case, mesh)
    neighbours, heads = wrong
    print(
        f"{case}: logits differ by {right:.1e} of their scale; with neighbours exchanged by"
        f" {neighbours:.1e}, with heads by {heads:.1e}"
    )
    return right <= TOLERANCE and min(wrong) >= 100 * TOLERANCE


def differences(case: str, mesh: Mesh, folder: Path | None = None) -> tuple[float, float, float]:
    """The largest difference of logits in parts of their scale: as they are, with neighbours
    exchanged, and with heads.
    """
    checkpoint = ucp.open(folder or DATA / case / "ckpt", dequantize="bfloat16")
    mapping, heads, mlp = CASES[case]
    config, assume = checkpoint.config, []
    if case.startswith("llama"):
        assume = ["rope_theta"]
        model = equal_logits.tunix("llama3.Llama3", config, assume)
    else:
        model = mixture(config)
    mapped = checkpoint.map(mapping, assume=assume)
    params = mapped.restore({"param": model.tree}, mesh=mesh, rules=RULES, cast=True)["param"]
    with np.load(DATA / case / "logits.npz") as stored:
        tokens, want = stored["tokens"], stored["logits"]
    logits = jax.jit(model.logits)  # eager, eight devices of two cores can wait for each other

    def difference() -> float:
        return float(np.abs(logits(params, tokens) - want).max() / np.abs(want).max())

    right = difference()
    down = at(params["layers"][config["num_hidden_layers"] - 1], mlp[:-1])
    down[mlp[-1]] = exchanged(down[mlp[-1]])
    neighbours = difference()
    out = at(params["layers"][0], heads[:-1])
    out[heads[-1]] = jnp.roll(out[heads[-1]], 1, axis=0)
    return right, neighbours, difference()


def mixture(config: Mapping[str, Any]) -> Model:
    graph, state = nnx.split(nnx.eval_shape(lambda: Mixture(config, rngs=nnx.Rngs(0))))

    def logits(params: Params, tokens: np.ndarray) -> jax.Array:
        return nnx.merge(graph, params)(jnp.asarray(tokens))

    return Model(nnx.to_pure_dict(state), logits, {})


def at(tree: Params, path: tuple[str, ...]) -> Params:
    for key in path:
        tree = tree[key]
    return tree


def exchanged(kernel: jax.Array) -> jax.Array:
    """A kernel `[..., mlp, embed]` with each two neighbours on its axis `mlp` exchanged."""
    pairs = kernel.reshape(*kernel.shape[:-2], -1, 2, kernel.shape[-1])
    return pairs[..., ::-1, :].reshape(kernel.shape)


if __name__ == "__main__":
    sys.exit(main())
