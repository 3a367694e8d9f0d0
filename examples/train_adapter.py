"""A LoRA adapter of peft, trained on in tunix, and back: peft gives the logits that JAX gave.

    pip install --no-deps google-tunix==0.1.7 qwix==0.1.8 jaxtyping wadler-lindig
    python examples/train_adapter.py train BASE ADAPTER OUT

    pip install peft transformers torch
    python examples/train_adapter.py load BASE OUT

BASE is a folder of a Llama, ADAPTER what `save_pretrained` of peft wrote for it. `train` restores
both onto a mesh of eight devices, by the mapping of the base alone, compares the factors with what
qwix wants, takes a step of AdamW on them, and exports OUT, a folder of peft again, with the logits
beside it. `load` has peft load it, in another process, and compares every factor and the logits.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

MAPPING = "hf-llama-to-tunix"
TOKENS = np.arange(1, 25).reshape(2, 12)


def train(base: str, adapter: str, out: str) -> None:
    import jax
    import jax.numpy as jnp
    import optax
    import qwix  # pyright: ignore[reportMissingImports]
    from flax import nnx
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import jax_ucp as ucp
    from equal_logits import positions, tunix_module

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    opened, factors = ucp.open(base), ucp.open(adapter)
    config, lora = opened.config, factors.extras["adapter_config.json"]["config"]
    module = tunix_module("llama3", config, ["rope_theta"])
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "num_kv_heads": config["num_key_value_heads"],
    }
    model = module.Llama3(
        module.ModelConfig(**sizes, rope_theta=10_000, norm_eps=config["rms_norm_eps"]),
        rngs=nnx.Rngs(0),
    )
    about = {"config": config, "assume": ["rope_theta"]}
    mapped = factors.map(MAPPING, **about)
    modules = {"/".join(map(str, leaf.path[1:-1])) for leaf in mapped.leaves}
    provider = qwix.LoraProvider(
        module_path="|".join(sorted(modules)), rank=lora["r"], alpha=float(lora["lora_alpha"])
    )
    model = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))
    graph, params, weights = nnx.split(model, nnx.LoRAParam, ...)
    rules = [(r"(w|kernel)(_lora_[ab])?$", P("data")), (r"up_proj.*_lora_b$", P(None, "model"))]

    def restored(checkpoint: ucp.Checkpoint, state: nnx.State) -> nnx.State:
        target = {"param": nnx.to_pure_dict(state)}
        pure = checkpoint.restore(target, mesh=mesh, rules=rules)["param"]
        nnx.replace_by_pure_dict(state, pure)
        return state

    weights, params = restored(opened.map(MAPPING, **about), weights), restored(mapped, params)
    print(f"{len(jax.tree.leaves(params))} factors restored, on {mesh.size} devices")

    def logits(params: nnx.State) -> jax.Array:
        model = nnx.merge(graph, params, weights)
        length = TOKENS.shape[1]
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (2, length, length))
        return model(jnp.asarray(TOKENS), positions(TOKENS), None, mask)[0]

    def loss(params: nnx.State) -> jax.Array:
        predicted = logits(params)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(predicted, TOKENS[:, 1:])
        return losses.mean()

    tx = optax.adamw(1e-2)
    before, gradients = jax.value_and_grad(loss)(params)
    updates, _ = tx.update(gradients, tx.init(params), params)
    trained_params: Any = optax.apply_updates(params, updates)
    print(f"loss {before:.4f}, after a step {loss(trained_params):.4f}")

    trained = ucp.Checkpoint.of({"param": nnx.to_pure_dict(trained_params)})
    back = trained.map(ucp.Mapping.load(MAPPING).inverse(), **about)
    back.export(out, "safetensors", adapter_config=lora)
    np.save(Path(out, "logits.npy"), np.asarray(logits(trained_params)))


def load(base: str, out: str) -> None:
    import peft  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(model, out)
    saved = load_file(Path(out, "adapter_model.safetensors"))
    live = peft.get_peft_model_state_dict(tuned)
    assert saved.keys() == live.keys(), "peft has other factors"
    assert all(torch.equal(saved[name], live[name]) for name in saved), "peft has other values"
    with torch.no_grad():
        torch_logits = tuned(torch.from_numpy(TOKENS)).logits.numpy()
    jax_logits = np.load(Path(out, "logits.npy"))
    scale = np.abs(torch_logits).max()
    difference = np.abs(jax_logits - torch_logits).max() / scale
    print(
        f"peft loads {len(saved)} factors, equal; logits differ by {difference:.1e} of their scale"
    )
    assert difference < 1e-5, json.dumps(sys.argv)


if __name__ == "__main__":
    {"train": train, "load": load}[sys.argv[1]](*sys.argv[2:])
