"""Weights of eight bits in quantised leaves of qwix and AQT, without dequantising them: a model
makes of them what it makes of the numbers that they stand for.

    pip install --no-deps google-tunix==0.1.7 jaxtyping wadler-lindig qwix==0.1.8 aqtp==0.9.0
    python examples/quantized_leaves.py

Two Llamas that llm-compressor wrote, int8 and fp8 with a scale for each output, are opened with
`dequantize=False` and mapped by `models/hf-llama-8bit-to-qwix.yaml` to the tree that qwix'
`PtqProvider` gives tunix' Llama; its codes are those of the file. Beside it the same model without
qwix has the weights of `dequantize="float32"`. A layer of Flax that AQT quantises, as MaxText's
are, has a weight of the first. As a negative control scales are turned by a place.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix  # pyright: ignore[reportMissingImports]
from aqt.jax.v2 import config as aqt_config  # pyright: ignore[reportMissingImports]
from aqt.jax.v2 import utils as aqt_utils  # pyright: ignore[reportMissingImports]
from aqt.jax.v2.flax import aqt_flax  # pyright: ignore[reportMissingImports]
from flax import linen, nnx

import equal_logits
import jax_ucp as ucp

DATA = Path(__file__).parent.parent / "tests" / "data" / "quantized"
MAPPING = Path(__file__).parent / "models" / "hf-llama-8bit-to-qwix.yaml"
TOLERANCE = 1e-5
CASES = {"ct_int8_channel": jnp.int8, "ct_fp8_channel": jnp.float8_e4m3fn}
LAYER = "model.layers.0.mlp.gate_proj.weight"
FROZEN = "AqtDotGeneral_0/qrhs/frozen"
OTHERS = (
    "model.*",
    "lm_head.weight",
    "stored/*self_attn*",
    "stored/*up_proj*",
    "stored/*down_proj*",
)
AQT = {
    "sizes": {"one": 1},
    "leaves": [
        {
            "param": {f"stored/{LAYER}": "mlp embed"},
            "leaf": {f"{FROZEN}/qvalue": "embed mlp"},
        },
        {
            "param": {f"stored/{LAYER}_scale": "mlp one"},
            "leaf": {f"{FROZEN}/scale/0": "one mlp"},
        },
    ],
    "skip": [{"param": name, "reason": "the example has one layer"} for name in OTHERS],
}
ASSUME = ["rope_theta"]  # set in the model by `equal_logits.tunix_module`


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    found = {
        f"{case} in qwix": differences(DATA / case / "ckpt", dtype) for case, dtype in CASES.items()
    }
    found["a layer of int8 in AQT"] = aqt_differences(DATA / "ct_int8_channel" / "ckpt")
    failed = 0
    for name, (right, wrong) in found.items():
        print(f"{name}: differs by {right:.1e} of its scale; with scales turned by {wrong:.1e}")
        failed += right > TOLERANCE or wrong < 100 * TOLERANCE
    print("They agree." if not failed else f"{failed} of {len(found)} fail.")
    return min(failed, 1)


def differences(path: Path, dtype: Any) -> tuple[float, float]:
    """By how much logits differ from those of the dequantised model, as they are and with the
    scales of a weight turned.
    """
    whole = ucp.open(path, dequantize="float32")
    plain = equal_logits.tunix("llama3.Llama3", whole.config, ASSUME)
    mapped = whole.map("hf-llama-to-tunix", assume=ASSUME)
    params = mapped.restore({"param": plain.tree}, cast=True)["param"]
    tokens = np.arange(24).reshape(2, 12) % whole.config["vocab_size"]
    want = np.asarray(plain.logits(params, tokens))

    codes = ucp.open(path, dequantize=False)
    graph, tree = quantized_llama(codes.config, dtype)
    params = codes.map(MAPPING, assume=ASSUME).restore({"param": tree}, cast=True)["param"]

    def difference() -> float:
        batch, length = tokens.shape
        causal = jnp.broadcast_to(
            jnp.tril(jnp.ones((length, length), bool)), (batch, length, length)
        )
        found, _ = nnx.merge(graph, params)(tokens, equal_logits.positions(tokens), None, causal)
        return float(np.abs(np.asarray(found) - want).max() / np.abs(want).max())

    right = difference()
    scales = params["layers"][0]["mlp"]["down_proj"]["kernel"]["array"]
    scales["scale"] = jnp.roll(scales["scale"], 1)
    return right, difference()


def aqt_differences(path: Path) -> tuple[float, float]:
    """The same of what a layer gives whose weight AQT holds as codes."""
    label = f"param/{LAYER}"
    kernel = ucp.open(path, dequantize="float32").read(label).T
    x = jax.random.normal(jax.random.key(1), (5, len(kernel)))
    modes = aqt_utils.QuantMode
    layer = aqt_layer(kernel.shape[1], modes.CONVERT)
    tree = jax.eval_shape(lambda: layer.init(jax.random.key(0), x))
    mapping = ucp.Mapping.from_dict(AQT)
    codes = ucp.open(path, dequantize=False).map(mapping)
    # AQT's tensors have None where a weight has no such part
    leaves = codes.restore({"param": tree["aqt"]}, cast=True, missing="keep")["param"]

    def difference() -> float:
        variables = {"params": {"kernel": jnp.zeros(kernel.shape)}, "aqt": leaves}
        serving = aqt_layer(kernel.shape[1], modes.SERVE)
        made: Any = serving.apply(variables, x, rngs={"params": jax.random.key(2)})
        want = np.asarray(x) @ kernel
        return float(np.abs(made - want).max() / np.abs(want).max())

    right = difference()
    held = leaves["AqtDotGeneral_0"]["qrhs"]
    held["frozen"] = held["frozen"].replace(scale=[jnp.roll(held["frozen"].scale[0], 1)])
    return right, difference()


def aqt_layer(features: int, mode: Any) -> linen.Dense:
    """A layer with its weight in int8, kept as MaxText's `AqtQuantization` has AQT keep it."""
    make = functools.partial(
        aqt_flax.AqtDotGeneral,
        aqt_config.dot_general_make(lhs_bits=None, rhs_bits=8),
        rhs_quant_mode=mode,
        lhs_freeze_mode=aqt_flax.FreezerMode.NONE,
        rhs_freeze_mode=aqt_flax.FreezerMode.CALIBRATION_AND_VALUE,
        use_legacy_freezer=False,
    )
    return linen.Dense(features, use_bias=False, dot_general_cls=make)


def quantized_llama(config: Any, dtype: Any) -> tuple[Any, Any]:
    """The graph and the tree of tunix' Llama with the weights of its layers quantised by qwix."""
    module = equal_logits.tunix_module("llama3", config, ASSUME)
    model = module.Llama3(equal_logits.model_config(module, config), rngs=nnx.Rngs(0))
    rule = qwix.QuantizationRule(module_path=".*(attn|mlp).*", weight_qtype=dtype)
    tokens, mask = np.ones((1, 4), np.int32), jnp.ones((1, 4, 4), bool)
    quantized = qwix.quantize_model(
        model, qwix.PtqProvider([rule]), tokens, equal_logits.positions(tokens), None, mask
    )
    graph, state = nnx.split(quantized)
    return graph, nnx.to_pure_dict(state)


if __name__ == "__main__":
    sys.exit(main())
