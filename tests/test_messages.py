"""What a refusal says is true of the situation that reached it, and the remedy that it names works.

Of damaged files `test_damages.py` shows that.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_ucp as ucp
from cases import Case
from helpers import mesh_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import QuantizedWeights, UCPError
from jax_ucp.sharding.jax_versions import enable_x64
from safetensors_writer import write_safetensors
from torch_writer import Instance, edit, save

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(("label", "part"), [
    ("deepspeed/z1_bf16_dp2",       "global_step5/mp_rank_00_model_states.pt"),
    ("megatron/legacy_tp2_pp1_bf16", "iter_0000003/mp_rank_01/model_optim_rng.pt"),
    ("megatron/legacy_tp2_pp1_bf16", "iter_0000003/mp_rank_00"),
])  # fmt: skip
def test_what_one_rank_wrote_is_refused_with_the_folder_to_open(label, part):
    case = Case(label)
    with pytest.raises(UCPError, match=r"\.pt is what one rank wrote") as refused:
        ucp.open(case.path / part)
    named = re.search(r"open (/\S+)$", str(refused.value))
    assert named is not None
    assert case.wrong(case.open(named[1])) == []


Q = "model.layers.0.self_attn.q_proj"
FP8 = ml_dtypes.float8_e4m3fn
UNREAD = {
    "HQQ": (
        {f"{Q}.W_q": np.ones((32, 64), np.uint8), f"{Q}.scale": np.ones((64, 1), np.float16)},
        {"quant_method": "hqq"},
        "declares hqq, which is not dequantised here",
    ),
    "fp8 without a config": (
        {
            f"{Q}.weight": np.ones((64, 64), FP8),
            f"{Q}.weight_scale_inv": np.ones((1, 1), np.float32),
        },
        {},
        r"names alone do not say .* Put the config\.json",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_quantised_weights_are_sent_only_to_where_they_are_read(name, tmp_path):
    arrays, settings, why = UNREAD[name]
    write_safetensors(tmp_path / "model.safetensors", arrays)
    config = {"model_type": "llama", "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config if settings else {}))
    marked = ucp.open(tmp_path)
    with pytest.raises(QuantizedWeights, match=why) as refused:
        marked.restore()
    for said in (str(refused.value), *marked.notes):
        assert "dequantize='bfloat16'" not in said
        assert "dequantize=False" in said
    with pytest.raises(QuantizedWeights, match=why):
        ucp.open(tmp_path, dequantize="bfloat16")
    kept = ucp.open(tmp_path, dequantize=False).restore()["stored"]
    assert all(same_bits(np.asarray(kept[name]), array) for name, array in arrays.items())


@pytest.mark.parametrize("case", sorted(path.name for path in (DATA / "quantized").iterdir()))
def test_quantised_weights_that_are_read_are_sent_there(case):
    marked = ucp.open(DATA / "quantized" / case / "ckpt")
    with pytest.raises(QuantizedWeights, match="dequantize='bfloat16'"):
        marked.restore()
    assert ucp.open(DATA / "quantized" / case / "ckpt", dequantize="bfloat16").params


def test_states_of_fused_experts_are_not_sent_to_words_or_lists(tmp_path):
    """A Trainer's folder of transformers 5, whose experts are trained as one and stored apart."""
    weights = {f"mlp.experts.{i}.{p}_proj.weight": (3, 4) for i in range(2) for p in ("gate", "up")}
    arrays = {name: np.ones(shape, np.float32) for name, shape in weights.items()}
    stored = arrays | {"norm.weight": np.ones(4, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", stored)
    config = {"model_type": "mixtral", "transformers_version": "5.23.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    states = [np.ones((2, 6, 4), np.float32), np.ones(4, np.float32)]
    state = {i: {"exp_avg": array, "exp_avg_sq": array} for i, array in enumerate(states)}
    groups = [{"params": [i], "lr": 0.1} for i in range(2)]
    save({"state": state, "param_groups": groups}, tmp_path / "optimizer.pt")
    why = "all experts of a layer, as transformers 5 trains them"
    apart = ucp.open(tmp_path)
    assert any(why in note for note in apart.notes)
    assert not any("optimizer_groups=" in note for note in apart.notes)
    for groups in ("hf-decay", "module-order", [[*arrays], ["norm.weight"]]):
        with pytest.raises(UCPError, match=f"{why}.* weights_only"):
            ucp.open(tmp_path, optimizer_groups=groups)
    assert {*arrays} < {*ucp.open(tmp_path, weights_only=True).params}


def test_files_that_say_the_same_in_instances_are_of_one_run(tmp_path):
    case = Case("deepspeed/tp2_dp1_z1_fp32_gqa")

    def as_instances(tree: Any) -> None:
        kind = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
        info = tree["universal_checkpoint_info"]
        parts = [Instance(kind, said) for said in info["parameter_with_sub_params"]]
        info["parameter_with_sub_params"] = parts

    for path in case.copied(tmp_path / "c").rglob("mp_rank_*_model_states.pt"):
        edit(path, as_instances)
    assert case.wrong(case.open(tmp_path / "c")) == []


def test_a_mapping_says_where_the_arrays_are_that_it_misses(tmp_path):
    weights = {"w": np.ones(2, np.float32)}
    save({"actor": weights, "critic": weights}, tmp_path / "run.pt")
    checkpoint = ucp.open(tmp_path / "run.pt")
    assert any("kept under `other`" in note for note in checkpoint.notes)
    words = r"no parameters: a mapping needs them below `param`; 2 are below `other`, and its"
    with pytest.raises(UCPError, match=words):
        checkpoint.map("hf-llama-to-tunix")


def test_a_float_of_64_bits_is_rounded_by_the_remedy_that_its_refusal_names(tmp_path):
    save({"w": np.full(2, 1 / 3)}, tmp_path / "run.pt")
    checkpoint, mesh = ucp.open(tmp_path / "run.pt"), mesh_of(2)
    remedy = "set jax_enable_x64, or give a target of float32 and cast=True"
    said = rf"w: JAX would make float32 of its float64; {remedy}"
    with pytest.raises(UCPError, match=said):
        checkpoint.restore(mesh=mesh)
    target = {"param": {"w": jax.ShapeDtypeStruct((2,), np.float32)}}
    assert checkpoint.restore(target, mesh=mesh, cast=True)["param"]["w"].dtype == np.float32
    with enable_x64(True):
        assert checkpoint.restore(mesh=mesh)["param"]["w"].dtype == np.float64
