"""The text model of one that sees, in the names that it has alone, and on from there.

`tests/data/maxtext/MODEL/release` has the weights of `ckpt` as the text model of one with a tower,
which transformers saved (`examples/maxtext_logits.py`).
"""

import re
import shutil

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA, arrays_of, assert_same
from commands import run_json
from helpers import changed_json
from jax_ucp.errors import LayoutError
from jax_ucp.mapping.rules import shipped

MODEL = DATA / "maxtext" / "qwen35_moe"
TEXT, ON = "vlm-qwen3.5-moe-to-hf", "hf-qwen3.5-moe-to-maxtext"
# A model, the mapping to its text, and those that go on.
CASES = [
    ("qwen35_moe", TEXT, ON),
    ("qwen35_moe", TEXT, f"{ON}:unscanned"),
    ("qwen3", "vlm-qwen3-vl-to-hf", "hf-qwen3-to-maxtext"),
    ("qwen3", "vlm-qwen3-vl-to-hf", "hf-qwen3-to-maxtext:unscanned"),
    ("qwen3", "vlm-qwen3-vl-to-hf", "hf-qwen3-to-tunix"),
    ("qwen3_moe", "vlm-qwen3-vl-moe-to-hf", "hf-qwen3-moe-to-maxtext"),
    ("qwen3_moe", "vlm-qwen3-vl-moe-to-hf", "hf-qwen3-moe-to-maxtext:unscanned"),
    ("qwen3_moe", "vlm-qwen3-vl-moe-to-hf", "hf-qwen3-moe-to-tunix"),
    ("qwen3_omni_moe", "vlm-qwen3-omni-moe-to-hf", "hf-qwen3-moe-to-maxtext"),
    ("qwen3_omni_moe", "vlm-qwen3-omni-moe-to-hf", "hf-qwen3-moe-to-maxtext:unscanned"),
    ("qwen3_omni_moe", "vlm-qwen3-omni-moe-to-hf", "hf-qwen3-moe-to-tunix"),
    ("kimi_k2", "vlm-kimi-k2.5-to-hf", "hf-deepseek3-to-maxtext"),
    ("kimi_k2", "vlm-kimi-k2.5-to-hf", "hf-deepseek3-to-maxtext:unscanned"),
    ("gemma3", "vlm-gemma3-to-hf", "hf-gemma3-to-maxtext"),
    ("gemma3", "vlm-gemma3-to-hf", "hf-gemma3-to-maxtext:unscanned"),
    ("gemma3", "vlm-gemma3-to-hf", "hf-gemma3-to-tunix"),
    ("llama4", "vlm-llama4-to-hf", "hf-llama4-to-maxtext"),
    ("llama4", "vlm-llama4-to-hf", "hf-llama4-to-maxtext:unscanned"),
    ("gemma4_moe", "vlm-gemma4-to-hf", "hf-gemma4-to-maxtext"),
    ("gemma4_moe", "vlm-gemma4-to-hf", "hf-gemma4-to-maxtext:unscanned"),
]
TOWER = re.compile(
    r"visual\.|vision|multi_modal_projector|mm_projector|audio_tower|talker|code2wav"
)
EXPERTS = "thinker.model.layers.0.mlp.experts."
ASSUMED = {"hf-qwen3-to-tunix": ["rope_theta"]}
ASSUMED["hf-qwen3-moe-to-tunix"] = ["rope_theta", "norm_topk_prob"]


def release(model="qwen35_moe"):
    return ucp.open(DATA / "maxtext" / model / "release")


def text_config(config):
    """The config of the text model in that of a release."""
    return config.get("thinker_config", config)["text_config"]


def changed(folder, change, model="qwen35_moe"):
    """The release with another config of its text."""
    shutil.copytree(DATA / "maxtext" / model / "release", folder)
    changed_json(folder / "config.json", lambda config: text_config(config).update(change))
    return ucp.open(folder)


def test_every_mapping_of_a_vision_model_is_tried():
    of_text = {name for name in shipped() if name.startswith("vlm-") and name.endswith("-to-hf")}
    assert of_text == {text for _, text, _ in CASES}


@pytest.mark.parametrize(("model", "text", "on"), CASES)
def test_the_leaves_are_those_of_the_text_model_alone(model, text, on):
    assumed = ASSUMED.get(on, [])
    want = ucp.open(DATA / "maxtext" / model / "ckpt").map(on, assume=assumed)
    assert_same(arrays_of(release(model).map(text).map(on, assume=assumed)), arrays_of(want))


def test_experts_may_be_packed():
    packed = ucp.open(MODEL / "packed" / "model.safetensors")
    own = [name for name in packed.params if name.startswith("model.")]
    names = {name: name.replace("model.", "model.language_model.", 1) for name in own}
    tree = {"param": {names.get(name, name): one.read() for name, one in packed.params.items()}}
    found = ucp.Checkpoint.of(tree).map(TEXT, config=release().config).map(ON)
    assert_same(arrays_of(found), arrays_of(ucp.open(MODEL / "ckpt").map(ON)))


def test_experts_are_read_as_qwen_released_them_and_so_they_come_back():
    text, on = "vlm-qwen3-vl-moe-to-hf", "hf-qwen3-moe-to-maxtext"
    saved, plain = release("qwen3_moe"), ucp.open(DATA / "maxtext" / "qwen3_moe" / "ckpt")
    arrays = {name: one.read() for name, one in saved.params.items() if ".visual." not in name}
    turned = {n: one.swapaxes(1, 2).copy() for n, one in arrays.items() if ".experts." in n}
    turned = arrays | turned
    mapped = ucp.Checkpoint.of({"param": turned}).map(text, config=saved.config)
    assert_same(arrays_of(mapped), arrays_of(plain))
    assert_same(arrays_of(mapped.map(on)), arrays_of(plain.map(on)))
    back = mapped.map(ucp.Mapping.load(text).inverse())
    assert_same(arrays_of(back), {f"param/{name}": one for name, one in turned.items()})
    mixed = {**arrays, **{name: one for name, one in turned.items() if ".0." in name}}
    with pytest.raises(LayoutError, match="experts"):
        ucp.Checkpoint.of({"param": mixed}).map(text, config=saved.config)


def test_qwen3_omni_may_have_the_names_and_packed_experts_of_transformers_in_memory():
    text, on = "vlm-qwen3-omni-moe-to-hf", "hf-qwen3-moe-to-maxtext"
    one_by_one = release("qwen3_omni_moe")
    arrays = {name: one.read() for name, one in one_by_one.params.items()}
    experts = {name: arrays.pop(name) for name in [*arrays] if name.startswith(EXPERTS)}
    count = text_config(one_by_one.config)["num_experts"]
    names = [f"{EXPERTS}{{}}.{name}_proj.weight" for name in ("gate", "up", "down")]
    each = [[experts[name.format(i)] for i in range(count)] for name in names]
    gate, up, down = map(np.stack, each)
    arrays[f"{EXPERTS}gate_up_proj"] = np.concatenate([gate, up], axis=1)
    arrays[f"{EXPERTS}down_proj"] = down
    old, new = "thinker.model.", "thinker.model.language_model."
    arrays = {name.replace(old, new): one for name, one in arrays.items()}
    packed = ucp.Checkpoint.of({"param": arrays}).map(text, config=one_by_one.config)
    assert_same(arrays_of(packed.map(on)), arrays_of(one_by_one.map(text).map(on)))


@pytest.mark.parametrize("packed", [False, True], ids=["one_by_one", "packed"])
@pytest.mark.parametrize(("lm_head", "model", "layers"), [
    ("language_model.lm_head", "language_model.model", "layers"),
    ("language_model.lm_head", "language_model.model", "blocks"),
    ("lm_head", "model.language_model", "layers"),
])  # fmt: skip
def test_kimi_has_names_of_releases_of_transformers_5_and_of_memory(lm_head, model, layers, packed):
    text, on = "vlm-kimi-k2.5-to-hf", "hf-deepseek3-to-maxtext"
    plain = DATA / "maxtext" / "kimi_k2" / "ckpt"
    arrays = {name: one.read() for name, one in ucp.open(plain).params.items()}
    if packed:
        arrays = with_packed_experts(arrays)
    named = {
        name.replace("lm_head", lm_head) if "lm_head" in name else
        name.replace("model", model, 1).replace(".layers.", f".{layers}."): one
        for name, one in arrays.items()
    }  # fmt: skip
    found = ucp.Checkpoint.of({"param": named}).map(text, config=release("kimi_k2").config)
    assert_same(arrays_of(found), {f"param/{name}": one for name, one in arrays.items()})
    assert_same(arrays_of(found.map(on)), arrays_of(ucp.open(plain).map(on)))
    scores = next(name for name in named if name.endswith("e_score_correction_bias"))
    for lost in (scores, next(name for name in named if "lm_head" in name)):
        less = {name: one for name, one in named.items() if name != lost}
        with pytest.raises(LayoutError, match=r"is not there|finds no parameter"):
            ucp.Checkpoint.of({"param": less}).map(text, config=release("kimi_k2").config)


def with_packed_experts(arrays):
    """The same with the experts of a layer in one array, as transformers 5 has them in memory."""
    experts = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight")
    found = {name: one for name, one in arrays.items() if not experts.fullmatch(name)}
    for above in {match[1] for match in map(experts.fullmatch, arrays) if match}:
        gate, up, down = (
            np.stack([arrays[f"{above}.{i}.{part}_proj.weight"] for i in range(8)])
            for part in ("gate", "up", "down")
        )
        found |= {
            f"{above}.gate_up_proj": np.concatenate([gate, up], 1),
            f"{above}.down_proj": down,
        }
    return found


def test_a_text_model_that_was_loaded_from_a_release_keeps_its_names():
    plain = ucp.open(MODEL / "ckpt")
    alone = {name: one.read() for name, one in release().params.items() if ".visual." not in name}
    found = ucp.Checkpoint.of({"param": alone}).map(TEXT, config=plain.config)
    assert found.config["num_experts"] == plain.config["num_experts"]
    assert_same(arrays_of(found.map(ON)), arrays_of(plain.map(ON)))


# MaxText adds one to the norms of Gemma 3, which rounds.
@pytest.mark.parametrize(
    ("model", "text", "on"), [case for case in CASES if "gemma3-to-maxtext" not in case[2]]
)
def test_the_way_back_has_the_bits_of_the_release_without_its_tower(model, text, on, tmp_path):
    seeing = release(model)
    seeing.map(text).map(on, assume=ASSUMED.get(on, [])).save(tmp_path / "saved")
    back = ucp.open(tmp_path / "saved")
    # of the two orders of experts' axes transformers writes the second
    way = f"{text}:saved" if "saved" in ucp.Mapping.load(text).layouts else text
    for name in (on, way):
        back = back.map(ucp.Mapping.load(name).inverse())
    # transformers 5.23 saves Kimi's layers as blocks, and its releases have layers
    want = {
        label.replace(".blocks.", ".layers."): one
        for label, one in arrays_of(seeing).items()
        if not TOWER.search(label)
    }
    assert_same(arrays_of(back), want)


@pytest.mark.parametrize(("model", "text", "on"), CASES)
def test_the_config_is_the_section_of_the_text_but_for_what_the_mapping_names(model, text, on):
    plain = ucp.open(DATA / "maxtext" / model / "ckpt").config
    found, named = release(model).map(text).config, ucp.Mapping.load(text).config.keys() - {"..."}
    want = text_config(release(model).config)
    assert {k: v for k, v in found.items() if k not in named} == {
        k: v for k, v in want.items() if k not in named
    }
    shared = found.keys() & plain.keys() - {"dtype"}  # transformers has it once for Qwen3-Omni
    assert {key: plain[key] for key in shared} == {key: found[key] for key in shared}
    assert ucp.Mapping.load(on).config_keys & plain.keys() <= found.keys()


@pytest.mark.parametrize(("change", "name"), [
    ({"layer_types": ["full_attention"] * 8}, "layers"),
    ({"hidden_act": "relu"}, "activation"),
    ({"is_causal": False}, "causal"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope"),
    ({"shared_expert_intermediate_size": 8}, "shared_expert"),
    ({"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "layers_alike"),
])  # fmt: skip
def test_another_arithmetic_of_the_text_is_refused_by_the_next_mapping(change, name, tmp_path):
    mapped = changed(tmp_path / "model", change).map(TEXT)
    with pytest.raises(LayoutError, match=f"requires {name}: "):
        mapped.map(ON)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "qwen3_omni_moe"])
@pytest.mark.parametrize(("change", "name"), [
    ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ({"rope_parameters": None}, "rope_theta"),
    ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window"),
    ({"layer_types": ["sliding_attention"]}, "sliding_window"),
])  # fmt: skip
def test_what_the_text_model_alone_takes_otherwise_is_refused(model, change, name, tmp_path):
    text = {of: text for of, text, _ in CASES}[model]
    with pytest.raises(LayoutError, match=f"requires {name}: "):
        changed(tmp_path / "model", change, model).map(text)


MODELS_OF_A_HEAD = ["qwen35_moe", "qwen3", "qwen3_moe", "qwen3_omni_moe", "kimi_k2"]


@pytest.mark.parametrize("model", MODELS_OF_A_HEAD)
@pytest.mark.parametrize(("change", "name"), [
    ({"model_type": "qwen3_5_text"}, "family"),
    ({"tie_word_embeddings": True}, "tied"),
])  # fmt: skip
def test_another_text_model_is_refused(model, change, name, tmp_path):
    text = {of: text for of, text, _ in CASES}[model]
    with pytest.raises(LayoutError, match=f"requires {name}: "):
        changed(tmp_path / "model", change, model).map(text)


def test_a_release_without_its_last_layer_is_refused_by_the_next_mapping():
    short = {name: one.read() for name, one in release().params.items() if ".layers.7." not in name}
    mapped = ucp.Checkpoint.of({"param": short}).map(TEXT, config=release().config)
    with pytest.raises(LayoutError, match=r"model\.layers\."):
        mapped.map(ON)


def test_the_list_of_mappings_has_the_chain():
    found = run_json("mappings", MODEL / "release")["mappings"]
    assert [one["name"] for one in found if one["fits"]] == [TEXT, f"{TEXT},{ON}"]
