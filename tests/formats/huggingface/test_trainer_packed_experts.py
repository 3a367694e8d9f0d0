"""Folders of the Trainer of transformers 5, which trains the experts of a layer as one parameter and
stores them one by one: the optimizer's states are those of the stored weights.

`tests/data/packed_experts/MODEL` is of `generators/trainers.py`.
"""

import json
import shutil

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA, Case
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import FormatError
from jax_ucp.formats.packed_experts import in_memory

MODELS = ("qwen3_moe", "mixtral")
FOLDER = DATA / "packed_experts"


@pytest.mark.parametrize("model", MODELS)
def test_lists_of_parameters_in_memory_say_the_same_as_the_word(model):
    case = Case(f"packed_experts/{model}")
    checkpoint = case.open(optimizer_groups=case.about["groups"])
    assert case.wrong(checkpoint) == []
    groups = [group for group in checkpoint.groups if group.settings["weight_decay"]]
    decayed = {name for group in groups for name in group.params}
    assert decayed == {label.partition("/")[2] for label in case.truth() if "norm" not in label}


def test_the_states_go_on_to_the_leaves_of_a_model():
    checkpoint = ucp.open(FOLDER / "qwen3_moe" / "ckpt", optimizer_groups="hf-decay")
    rules = ucp.Mapping.load("hf-qwen3-moe-to-maxtext")
    mapped = checkpoint.map(rules, assume=["norm_topk_prob"])
    live = Case("packed_experts/qwen3_moe").truth()
    name = "exp_avg/model.layers.{}.mlp.experts.{}.up_proj.weight"
    up = np.array([[live[name.format(i, expert)].T for i in range(2)] for expert in range(4)])
    assert same_bits(mapped.read("exp_avg/params/decoder/layers/moe_block/wi_1"), up)


@pytest.mark.parametrize("change", [
    {"model_type": "llama"}, {"transformers_version": "4.57.6"}, {"transformers_version": ""},
    {"auto_map": {"AutoModel": "mine.Model"}},
])  # fmt: skip
def test_models_whose_parameters_in_memory_are_not_known_are_refused(change, tmp_path):
    shutil.copytree(FOLDER / "qwen3_moe" / "ckpt", tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match="all experts of a layer, as transformers 5 trains them"):
        ucp.open(tmp_path / "ckpt", optimizer_groups="hf-decay")


def test_experts_that_are_missing_or_differ_in_shape_are_not_packed():
    parts = [f"{i}.{part}" for i in range(2) for part in ("gate", "up", "down")]
    shapes = {f"mlp.experts.{part}_proj.weight": (3, 3) for part in parts}
    packed = in_memory("qwen3_moe", "5.0.0", shapes)
    found = {name.rpartition(".")[2]: one.shape for name, one in packed.items()}
    assert found == {"gate_up_proj": (2, 6, 3), "down_proj": (2, 3, 3)}
    for name in shapes:
        others = {one: shape for one, shape in shapes.items() if one != name}
        assert in_memory("qwen3_moe", "5.0.0", others) is None
    other = {**shapes, "mlp.experts.1.up_proj.weight": (4, 3)}
    assert in_memory("qwen3_moe", "5.0.0", other) is None
