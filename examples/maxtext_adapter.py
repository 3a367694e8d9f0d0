"""A LoRA adapter of peft in MaxText's own LoRA, and back: the logits are those that peft gave.

    pip install peft transformers torch        # an environment of its own
    python examples/maxtext_adapter.py peft BASE ADAPTER LOGITS

    pip install --no-deps maxtext==0.2.5       # and the rest, as examples/maxtext_logits.py says
    python examples/maxtext_adapter.py maxtext BASE ADAPTER LOGITS

BASE is the folder of a Llama 2, ADAPTER what `save_pretrained` of peft wrote for it. `peft` writes
the logits without and with it, to a file of numpy. `maxtext` saves the adapter as MaxText's leaves,
with layers scanned and not, has MaxText make its model and restore them by `lora_restore_path`,
which takes rank and alpha from the step's metadata, and compares the logits; then it takes the
factors of the model back to a folder of peft, which has those of ADAPTER bit for bit. As a negative
control the factors of two layers are exchanged.
"""

import sys
import tempfile
from typing import Any

import numpy as np

MAPPING = "hf-llama2-to-maxtext"
TOKENS = np.arange(1, 25).reshape(2, 12)
TOLERANCE = 1e-5


def peft(base: str, adapter: str, logits: str) -> None:
    import peft  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        plain = model(torch.from_numpy(TOKENS)).logits.numpy()
        tuned = peft.PeftModel.from_pretrained(model, adapter)(torch.from_numpy(TOKENS)).logits
    np.savez_compressed(logits, base=plain, adapter=tuned.numpy())


def maxtext(base: str, adapter: str, logits: str) -> None:
    with np.load(logits) as arrays:
        plain, want = arrays["base"], arrays["adapter"]
    print(f"the adapter moves logits by {difference(plain, want):.1e} of their scale")
    for scan in (True, False):
        with tempfile.TemporaryDirectory() as run:
            right = difference(through(base, adapter, run, scan), want)
            wrong = difference(through(base, adapter, run, scan, exchanged=True), want)
        print(
            f"layers {'scanned' if scan else 'apart'}: MaxText's logits differ from peft's by"
            f" {right:.1e}, with two layers exchanged by {wrong:.1e}; the factors come back"
        )
        assert right < TOLERANCE < wrong / 100, "the logits are not those of peft"


def difference(logits: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(logits - want).max() / np.abs(want).max())


def through(base: str, adapter: str, run: str, scan: bool, exchanged: bool = False) -> np.ndarray:
    """The logits of MaxText's model with an adapter that it restores from a step of `run`."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import Mesh
    from maxtext.models import models  # pyright: ignore[reportMissingImports]
    from maxtext.utils import lora_utils, maxtext_utils  # pyright: ignore[reportMissingImports]

    import jax_ucp as ucp
    from maxtext_logits import configured, settings

    mapping = MAPPING if scan else f"{MAPPING}:unscanned"
    opened, factors = ucp.open(base), ucp.open(adapter)
    lora = factors.extras["adapter_config.json"]["config"]
    if not exchanged:
        factors.map(mapping, config=opened.config).save(
            run,
            root="",
            variables=True,
            step=0,
            item="items",
            custom_metadata={
                "scan_layers": scan,
                "lora": {"lora_rank": lora["r"], "lora_alpha": float(lora["lora_alpha"])},
            },
        )
    modules = "(self_attention/(query|key|value|out)|mlp/(wi_0|wi_1|wo))"
    said: dict[str, Any] = {
        **settings(opened.config),
        "lora": {
            "enable_lora": True,
            "lora_module_path": f"decoder/layers(_[0-9]+)?/.*{modules}",
            "lora_restore_path": f"{run}/0/items",
        },
    }
    config = configured(said, TOKENS.shape, scan)
    lora_utils.sync_lora_metadata(config)
    mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with jax.set_mesh(mesh):
        model = models.Transformer(config, mesh, quant=None, rngs=nnx.Rngs(0))
        weights = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(weights, opened.map(mapping).restore()["param"]["params"])
        nnx.update(model, weights)
        model = lora_utils.apply_lora_to_model(model, mesh, config)
        model = lora_utils.restore_lora_from_path(model, config)
        params = nnx.state(model, nnx.LoRAParam)
        if exchanged:
            nnx.update(model, exchange(params, scan))
        else:
            back(factors, nnx.to_pure_dict(params), mapping, opened.config, lora)
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        segments = jnp.ones(TOKENS.shape, jnp.int32)
        logits = model(jnp.asarray(TOKENS, jnp.int32), positions, segments, enable_dropout=False)
    return np.asarray(jax.device_get(logits))


def exchange(params: Any, scan: bool) -> Any:
    """The factors, with those of the first two layers exchanged."""
    import jax
    import jax.numpy as jnp

    if scan:
        return jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=1), params)
    decoder = params["decoder"]
    first, second = decoder["layers_0"], decoder["layers_1"]
    decoder["layers_0"], decoder["layers_1"] = second, first
    return params


def back(factors: Any, tree: Any, mapping: str, config: Any, lora: Any) -> None:
    """Compare an adapter with the factors of a model, taken back to a folder of peft."""
    import jax_ucp as ucp

    inverse = ucp.Mapping.load(mapping).inverse()
    trained = ucp.Checkpoint.of({"param": tree}).map(inverse, config=config)
    with tempfile.TemporaryDirectory() as folder:
        exported = trained.export(f"{folder}/adapter", "safetensors", adapter_config=lora)
        found = ucp.diff(factors, exported)
    assert found.equal == len(factors.leaves) == len(exported.leaves), str(found)


if __name__ == "__main__":
    {"peft": peft, "maxtext": maxtext}[sys.argv[1]](*sys.argv[2:])
