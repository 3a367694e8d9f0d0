"""Models that see, with their towers, in the leaves of models that others wrote.

`tests/data/tunix/gemma3_vision` is of `generators/tunix_models.py`; `examples/equal_logits.py` runs
tunix's own model on it.
"""

import json

import pytest

import jax_ucp as ucp
from cases import DATA
from config_changes import changed
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import LayoutError
from jax_ucp.mapping.binding import outcomes

MODEL, MAPPING = DATA / "tunix" / "gemma3_vision", "vlm-gemma3-to-tunix"
SECTIONS = ("text_config", "vision_config")


def checkpoint():
    return ucp.open(MODEL / "ckpt")


def arrays(released):
    """The parameters under the names that transformers 5 saves, or under those of releases."""
    tower, of_release = "vision_tower.", "vision_tower.vision_model."
    found = {name: one.read() for name, one in checkpoint().params.items()}
    return {name.replace(tower, of_release) if released else name: a for name, a in found.items()}


def with_change(config, change):
    """The config with other values of a section, or of itself."""
    inner = {key: changed(config[key], change[key]) for key in SECTIONS if key in change}
    return {**config, **inner} if inner else changed(config, change)


def fault(change):
    """Why the model is refused with a change of its config; empty where it is not."""
    config = with_change(checkpoint().config, change)
    try:
        ucp.Checkpoint.of({"param": arrays(released=False)}).map(MAPPING, config=config)
    except LayoutError as error:
        return str(error)
    return ""


def test_the_leaves_are_those_of_tunix():
    tree = json.loads((DATA / "trees" / f"{MAPPING}.json").read_text())
    want = {leaf["leaf"]: (tuple(leaf["shape"]), leaf["dtype"]) for leaf in tree["leaves"]}
    leaves = checkpoint().map(MAPPING).leaves
    assert {leaf.label: (leaf.shape, leaf.dtype) for leaf in leaves} == want


@pytest.mark.parametrize(("layout", "released"), [("released", True), ("saved", False)])
def test_both_names_of_the_tower_give_the_same_leaves_and_come_back(layout, released):
    stored = arrays(released)
    mapping = ucp.Mapping.load(f"{MAPPING}:{layout}")
    mapped = ucp.Checkpoint.of({"param": stored}).map(MAPPING, config=checkpoint().config)
    want = checkpoint().map(MAPPING)
    assert mapped.params.keys() == want.params.keys()
    params = mapped.params.items()
    assert all(same_bits(one.read(), want.params[name].read()) for name, one in params)
    back = mapped.map(mapping.inverse())
    assert back.params.keys() == stored.keys()
    for name, array in stored.items():
        assert same_bits(back.params[name].read(), array), name


def test_the_head_of_the_tower_which_gemma_does_not_read_is_left_aside():
    params = ucp.open(DATA / "maxtext" / "gemma3" / "release").params.items()
    of_head = {name: one.read() for name, one in params if ".head." in name}
    stored = {**arrays(released=False), **of_head}
    assert len(of_head) == 11
    mapped = ucp.Checkpoint.of({"param": stored}).map(MAPPING, config=checkpoint().config)
    assert mapped.params.keys() == checkpoint().map(MAPPING).params.keys()


@pytest.mark.parametrize("layer", ["encoder.layers.1.", "language_model.model.layers.6."])
def test_a_last_layer_that_is_missing_is_refused(layer):
    stored = {name: a for name, a in arrays(released=False).items() if layer not in name}
    with pytest.raises(LayoutError, match=r"finds no parameter with (tower_)?layer = "):
        ucp.Checkpoint.of({"param": stored}).map(MAPPING, config=checkpoint().config)


def test_the_text_requires_what_it_does_alone():
    """Of the keys of the text a release leaves out those that are as in `Gemma3TextConfig`."""
    alone = {one.name: one for one in ucp.Mapping.load("hf-gemma3-to-tunix").requires}
    seeing = {one.name: one for one in ucp.Mapping.load(MAPPING).requires}
    assert alone.keys() <= seeing.keys()
    of_text = checkpoint().config["text_config"]
    left_out = ("head_dim", "num_attention_heads", "num_key_value_heads", "query_pre_attn_scalar")
    few = {key: value for key, value in of_text.items() if key not in left_out}
    config = {**checkpoint().config, "text_config": few}
    assert {one.state for one in outcomes(ucp.Mapping.load(MAPPING), config)} == {"met"}


@pytest.mark.parametrize(("change", "name"), [
    ({"text_config": {"rms_norm_eps": 1e-5}}, "eps"),
    ({"text_config": {"final_logit_softcapping": 30.0}}, "softcap"),
    ({"text_config": {"use_bidirectional_attention": True}}, "causal"),
    ({"text_config": {"query_pre_attn_scalar": 16}}, "query_scale"),
    ({"text_config": {"layer_types": ["full_attention"] * 7}}, "layers"),
    ({"text_config": {"hidden_activation": "relu"}}, "activation"),
    ({"vision_config": {"hidden_act": "gelu"}}, "tower_activation"),
    ({"vision_config": {"layer_norm_eps": 1e-5}}, "tower_eps"),
    ({"vision_config": {"model_type": "siglip2_vision_model"}}, "family"),
    ({"mm_tokens_per_image": 16}, "image"),
    ({"tie_word_embeddings": False}, "tied"),
])  # fmt: skip
def test_another_arithmetic_of_the_text_or_the_tower_is_refused(change, name):
    assert f"requires {name}: " in fault(change)
