"""The mappings that come with the package, on checkpoints that the real libraries wrote; and mapped
checkpoints whole.

`tests/data/trees` has the trees of models of google-tunix and of Flax in transformers 4, written by
`examples/equal_logits.py`, which also runs those models; that needs these packages, so here names
and shapes are compared. MaxText's trees are run by a decoder written from its code, which is
compared with the logits that MaxText itself gave: `examples/maxtext_logits.py` wrote
`tests/data/maxtext`.
"""

import json
import zlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import decoder
import jax_ucp as ucp
from cases import DATA, Case, names_of
from helpers import faults_of, mesh_of, restored_on
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import LayoutError
from jax_ucp.mapping.binding import outcomes
from jax_ucp.mapping.rules import shipped

MESH = mesh_of(4, 2)
# Case -> the mappings that fit its names, with the requirements that it does not meet.
CASES = [
    ("torch/hf_gpt2", "hf-gpt2-to-flax", []),
    ("torch/hf_llama", "hf-llama-to-tunix", ["rope_theta"]),
    ("torch/hf_llama", "hf-llama2-to-maxtext", []),
    ("torch/hf_llama_bf16_tied", "hf-llama-to-tunix", ["rope_theta"]),
    ("torch/hf_llama_bf16_tied", "hf-llama2-to-maxtext", []),
    ("torch/hf_qwen2", "hf-qwen2-to-tunix", []),
    ("torch/hf_qwen2", "hf-qwen2-to-maxtext", []),
    ("torch/hf_qwen3", "hf-qwen3-to-tunix", ["rope_theta"]),
    ("torch/hf_qwen3", "hf-qwen3-to-maxtext", []),
    ("torch/hf_qwen3_moe", "hf-qwen3-moe-to-tunix", ["norm_topk_prob", "rope_theta"]),
    ("torch/hf_qwen3_moe", "hf-qwen3-moe-to-maxtext", ["norm_topk_prob"]),
    ("torch/hf_mixtral", "hf-mixtral-to-maxtext", []),
    ("torch/hf_gemma", "hf-gemma-to-tunix", []),
    ("torch/hf_gemma_mha", "hf-gemma-7b-to-tunix", []),
    ("maxtext/llama31", "hf-llama-to-maxtext", []),
    ("maxtext/mistral", "hf-mistral-to-maxtext", []),
    ("maxtext/gemma2", "hf-gemma2-to-tunix", []),
    ("maxtext/gemma2", "hf-gemma2-to-maxtext", []),
    ("maxtext/gemma3", "hf-gemma3-to-tunix", []),
    ("maxtext/gemma3", "hf-gemma3-to-maxtext", []),
    ("maxtext/gemma3_linear", "hf-gemma3-to-maxtext", []),
    ("tunix/gemma4", "hf-gemma4-to-tunix", []),
    ("tunix/gemma4_apart", "hf-gemma4-to-tunix", []),
    ("maxtext/gemma4_e2b", "hf-gemma4-small-to-tunix", []),
    ("maxtext/gemma4_e4b", "hf-gemma4-small-to-tunix", []),
    ("maxtext/gemma4", "hf-gemma4-to-maxtext", []),
    ("maxtext/gemma4_apart", "hf-gemma4-to-maxtext", []),
    ("maxtext/gemma4_moe", "hf-gemma4-to-maxtext", []),
    ("maxtext/gemma4_e2b", "hf-gemma4-small-to-maxtext", []),
    ("maxtext/gemma4_e4b", "hf-gemma4-small-to-maxtext", []),
    ("maxtext/seed_oss", "hf-seed-oss-to-maxtext", []),
    ("maxtext/llama4", "hf-llama4-to-maxtext", []),
    ("maxtext/llama4_maverick", "hf-llama4-to-maxtext", []),
    ("maxtext/gemma", "hf-gemma-to-maxtext", []),
    ("maxtext/olmo2", "hf-olmo2-to-maxtext", []),
    ("maxtext/olmo3", "hf-olmo3-to-maxtext", []),
    ("maxtext/qwen3_next", "hf-qwen3-next-to-maxtext", []),
    ("maxtext/qwen35_moe", "hf-qwen3.5-moe-to-maxtext", []),
    ("maxtext/gpt_oss", "hf-gpt-oss-to-maxtext", []),
    ("maxtext/deepseek2", "hf-deepseek2-to-maxtext", []),
    ("maxtext/deepseek2_steps", "hf-deepseek2-to-maxtext", []),
    ("maxtext/kimi_k2", "hf-deepseek3-to-maxtext", []),
    ("maxtext/deepseek3", "hf-deepseek3-to-maxtext", []),
    ("maxtext/deepseek32", "hf-deepseek3-to-maxtext", []),
]
# `tests/data/trees` has the tree of another model of the mapping, or leaves that the models lack.
OTHER_TREES = ("tunix/gemma4", "maxtext/gemma4_e2b", "maxtext/gemma4_e4b")
# Those whose trees MaxText itself has not run: of the others see PROVED.
DECODED = [c[:2] for c in CASES if c[0].startswith("torch") and "maxtext" in c[1] and not c[2]]
# What MaxText itself gave, by the model and the mapping that made its tree.
PROVED = [
    (folder.name, mapping, crc)
    for folder in sorted((DATA / "maxtext").iterdir())
    for mapping, crc in json.loads((folder / "proved.json").read_text()).items()
]
# The same of tunix and of Flax in transformers 4, which `examples/equal_logits.py` ran.
RIGHT = [
    (*key.split(), crc)
    for package in ("tunix", "flax")
    for key, crc in json.loads((DATA / "trees" / f"proved-{package}.json").read_text()).items()
]
RECORDED = [
    (folder.name, mapping)
    for folder in sorted((DATA / "maxtext").iterdir())
    for mapping in np.load(folder / "logits.npz").files
    if mapping in shipped()
]


def hugging_face(case):
    return ucp.open(DATA / case / "ckpt")


def config_of(checkpoint):
    return checkpoint.extras["config.json"]["config"]


def unmet(mapping, config):
    found = outcomes(ucp.Mapping.load(mapping), config)
    return [one.requirement.name for one in found if one.state == "unmet"]


def off(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


def test_every_mapping_of_the_package_is_tried():
    # test_reference_transformer.py, formats/gguf/test_gguf_cases.py, test_chains.py,
    # test_text_of_vision_models.py
    elsewhere = {"deepspeed-gpt-to-reference", "deepspeed-gpt2-to-hf"}
    elsewhere |= {Case(f"gguf/{case}").about["mapping"] for case in names_of("gguf")}
    elsewhere |= {name for name in shipped() if name.startswith(("megatron-", "vlm-"))}
    assert {mapping for _, mapping, _ in CASES} == set(shipped()) - elsewhere


@pytest.mark.parametrize(("case", "mapping", "lacks"), CASES)
def test_there_and_back_parameters_have_the_same_bits_but_for_rounded_scales(case, mapping, lacks):
    checkpoint = hugging_face(case)
    assert sorted(unmet(mapping, config_of(checkpoint))) == lacks
    rules = ucp.Mapping.load(mapping)
    back = checkpoint.map(mapping, assume=lacks).map(rules.inverse())
    assert sorted(back.params) == sorted(checkpoint.params)
    scaled = {p for r in rules.rules if (r.scale, r.add) != (1, 0) for p in r.params}
    for name, param in checkpoint.params.items():
        if any(name.endswith(p.rpartition("}")[2]) for p in scaled):
            got, want = (x.read().astype(np.float64) for x in (back.params[name], param))
            rtol = 2 ** -(6 if "bf16" in case else 22)
            np.testing.assert_allclose(got, want, rtol=rtol, atol=2**-23)
        else:
            assert same_bits(back.params[name].read(), param.read()), name


@pytest.mark.parametrize(
    ("case", "mapping", "lacks"),
    [c for c in CASES if "maxtext" not in c[1] and "bf16" not in c[0] and c[0] not in OTHER_TREES],
)
def test_the_leaves_are_those_of_models_that_others_wrote(case, mapping, lacks):
    tree = json.loads((DATA / "trees" / f"{mapping.removeprefix('hf-')}.json").read_text())
    want = {leaf["leaf"]: (tuple(leaf["shape"]), leaf["dtype"]) for leaf in tree["leaves"]}
    leaves = hugging_face(case).map(mapping, assume=lacks).leaves
    assert {leaf.label: (leaf.shape, leaf.dtype) for leaf in leaves} == want


@pytest.mark.parametrize(("case", "mapping"), [c for c in DECODED if "bf16" not in c[0]])
def test_the_trees_of_maxtext_give_the_recorded_logits_sharded_over_eight_devices(case, mapping):
    checkpoint = hugging_face(case)
    rules = [
        (r"(kernel|wi_0|wi_1|wo|embedding)$", P("model", None, "data")),
        (r"scale$", P("data")),
    ]
    tree = restored_on(MESH, checkpoint.map(mapping), rules)["param"]
    assert {d for leaf in jax.tree.leaves(tree) for d in leaf.devices()} == set(jax.devices())
    measured = Case(case).measured()
    tokens, want = measured["tokens"], measured["logits"]
    tree, config = jax.tree.map(np.asarray, tree), config_of(checkpoint)
    assert off(decoder.logits(tree, config, tokens), want) <= 1e-5
    query = tree["params"]["decoder"]["layers"]["self_attention"]["query"]
    query["kernel"] = np.roll(query["kernel"], 1, axis=2)  # each head in the next one's place
    assert off(decoder.logits(tree, config, tokens), want) > 1e-3


@pytest.mark.parametrize(("model", "mapping", "crc"), PROVED)
def test_the_trees_are_those_that_gave_the_right_logits_in_maxtext_itself(model, mapping, crc):
    tree = hugging_face(f"maxtext/{model}").map(mapping).restore()["param"]["params"]
    found = 0
    for path, leaf in sorted(flat(tree).items()):
        found = zlib.crc32(f"{'/'.join(path)} {leaf.shape}".encode(), found)
        found = zlib.crc32(leaf.tobytes(), found)
    assert found == crc


@pytest.mark.parametrize(("case", "mapping", "crc"), RIGHT)
def test_the_leaves_are_those_that_gave_the_right_logits_in_others_models(case, mapping, crc):
    checkpoint = hugging_face(case)
    mapped = checkpoint.map(mapping, assume=unmet(mapping, config_of(checkpoint)))
    found = 0
    for name, leaf in sorted(mapped.params.items()):
        found = zlib.crc32(f"{name} {leaf.shape}".encode(), found)
        found = zlib.crc32(leaf.read().tobytes(), found)
    assert found == crc


def test_every_mapping_to_such_a_model_has_given_the_right_logits():
    to_them = {name for name in shipped() if name.endswith(("-to-tunix", "-to-flax"))}
    assert {mapping for _, mapping, _ in RIGHT} == to_them


def flat(tree, above=()):
    if not isinstance(tree, dict):
        return {above: tree}
    return {path: leaf for k, v in tree.items() for path, leaf in flat(v, (*above, k)).items()}


@pytest.mark.parametrize(("model", "mapping"), RECORDED)
def test_the_decoder_gives_what_maxtext_gave_of_right_trees_and_of_wrong_ones(model, mapping):
    checkpoint = hugging_face(f"maxtext/{model}")
    config = config_of(checkpoint)
    lacks = unmet(mapping, config)
    tree = checkpoint.map(mapping, assume=lacks).restore()["param"]
    with np.load(DATA / "maxtext" / model / "logits.npz") as arrays:
        tokens, original, live = arrays["tokens"], arrays["transformers"], arrays[mapping]
    assert off(decoder.logits(tree, config, tokens), live) <= 1e-5
    if not lacks:
        assert off(live, original) <= 1e-5
    elif {"rope", "norm_topk_prob"} & set(lacks):
        assert off(live, original) > 1e-2


def with_shared_keys(model):
    """A model as Google releases it: keys and values in the layers too that have those of others.
    And the names of these, and the layers that have their own.
    """
    checkpoint = hugging_face(model)
    config = config_of(checkpoint)
    arrays = {name: one.read() for name, one in checkpoint.params.items()}
    own = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    period = config["layer_types"].index("full_attention") + 1
    keys = [f"self_attn.{name}.weight" for name in ("k_norm", "k_proj", "v_proj")]
    assert f"model.layers.{own}.{keys[0]}" not in arrays
    layers = range(own, config["num_hidden_layers"])
    pairs = [(f"{layer}.{key}", f"{layer % period}.{key}") for layer in layers for key in keys]
    more = {f"model.layers.{new}": arrays[f"model.layers.{old}"] + 1 for new, old in pairs}
    return config, arrays, more, own


@pytest.mark.parametrize("mapping", ["hf-gemma4-small-to-maxtext", "hf-gemma4-small-to-tunix"])
def test_keys_of_a_layer_that_has_those_of_another_may_lack_and_those_of_others_are_needed(mapping):
    plain = hugging_face("maxtext/gemma4_e2b").map(mapping)
    config, arrays, more, own = with_shared_keys("maxtext/gemma4_e2b")
    mapped = ucp.Checkpoint.of({"param": arrays | more}).map(mapping, config=config)
    read = {name for name in mapped.params if name in plain.params}
    assert read == plain.params.keys()
    assert all(same_bits(mapped.params[name].read(), plain.params[name].read()) for name in read)
    for layer in (0, own - 1):
        lacking = {key: one for key, one in arrays.items() if f".{layer}.self_attn.k_p" not in key}
        with pytest.raises(LayoutError, match="k_proj"):
            ucp.Checkpoint.of({"param": lacking}).map(mapping, config=config)
    for change in ({"num_kv_shared_layers": 19}, {"num_kv_shared_layers": 15}):
        with pytest.raises(LayoutError, match=r"own|k_proj"):
            ucp.Checkpoint.of({"param": arrays}).map(mapping, config=config | change)


def test_a_release_with_keys_in_every_layer_has_all_leaves_of_tunix_and_comes_back():
    config, arrays, more, _ = with_shared_keys("maxtext/gemma4_e4b")
    mapping = ucp.Mapping.load("hf-gemma4-small-to-tunix")
    mapped = ucp.Checkpoint.of({"param": arrays | more}).map(mapping, config=config)
    tree = json.loads((DATA / "trees" / "gemma4-small-to-tunix.json").read_text())
    want = {leaf["leaf"]: tuple(leaf["shape"]) for leaf in tree["leaves"]}
    assert {leaf.label: leaf.shape for leaf in mapped.leaves} == want
    back = mapped.map(mapping.inverse())
    assert back.params.keys() == (arrays | more).keys()
    for name, array in (arrays | more).items():
        assert same_bits(back.params[name].read(), array), name
    half = {name: one for name, one in more.items() if "v_proj" not in name}
    with pytest.raises(LayoutError, match="v_proj"):
        ucp.Checkpoint.of({"param": arrays | half}).map(mapping, config=config)


STACKED = """\
sizes: {q: 1, k: 1, v: 1, heads: HEADS}
leaves:
- {param: embed.word_embeddings.weight, axes: vocab embed, leaf: {embed: embed vocab}}
- {param: embed.position_embeddings.weight, leaf: positions}
- {param: head.weight, axes: vocab embed, leaf: {head: embed vocab}, optional: true}
- {param: head.bias, leaf: head_bias, optional: true}
- param: "layers.{layer}.self_attention.query_key_value.weight"
  axes: (heads (q + k + v) dim) embed
  leaf:
    layers/q/kernel: layer embed (heads q) dim
    layers/k/kernel: layer embed (heads k) dim
    layers/v/kernel: (heads v) dim layer embed
- param: "layers.{layer}.self_attention.query_key_value.bias"
  axes: (heads (q + k + v) dim)
  leaf: {layers/qkv/bias: layer (q + k + v) heads dim}
- param: "layers.{layer}.self_attention.dense.weight"
  axes: embed (heads dim)
  leaf: {layers/o: layer heads dim embed}
- {param: "layers.{layer}.self_attention.dense.bias", leaf: "layers/o_bias/{layer}"}
- {param: "layers.{layer}.mlp.dense_h_to_4h.weight", axes: mlp embed, leaf: {"mlp/up/{layer}": embed mlp}}
- {param: "layers.{layer}.mlp.dense_4h_to_h.weight", axes: embed mlp, leaf: {"mlp/down/{layer}": mlp embed}}
- {param: "layers.{layer}.mlp.{which}.bias", leaf: "mlp_bias/{which}/{layer}"}
- {param: "layers.{layer}.{norm}_layernorm.{kind}", axes: embed, leaf: {"norms/{norm}/{kind}": layer embed}}
- {param: "final_layernorm.{kind}", leaf: "norm/{kind}", optional: true}
"""
RULES = [
    (r"(kernel|up/\d|down/\d|embed)$", P("data", "model")),
    (r"layers/o$", P(None, "model", "data")),
]


def deepspeed(case):
    """A case with its mapping."""
    heads = Case(f"deepspeed/{case}").about["model"]["heads"]
    text = STACKED.replace("HEADS", str(heads))
    if case.startswith(
        "pp"
    ):  # a pipeline numbers its modules: the embedding is 0, and the last norm comes after layers
        text = text.replace("layers.{layer}.", "{layer+1}.").replace("final_layernorm.", "3.")
        text = text.replace("param: embed.", "param: tied_modules.embed.")
    return ucp.open(DATA / "deepspeed" / case), ucp.Mapping.parse(text, "stacked.yaml")


@pytest.fixture(params=["z1_fp32_dp4", "tp2_dp2_z1_fp32", "z3_bf16_dp2", "pp2_dp2_z1_fp32"])
def case(request):
    return request.param


def test_parameters_and_moments_go_to_the_leaves_and_back(case):
    checkpoint, mapping = deepspeed(case)
    back = checkpoint.map(mapping).map(mapping.inverse())
    live = Case(f"deepspeed/{case}")
    want = live.truth()
    assert set(back) == want.keys()
    for label, array in want.items():
        assert live.equal(back.read(label), array, label), label


def test_leaves_are_restored_onto_a_mesh_straight_from_the_shards(case):
    checkpoint, mapping = deepspeed(case)
    mapped = checkpoint.map(mapping)
    tree = restored_on(MESH, mapped, RULES)
    kernel = tree["exp_avg"]["layers"]["q"]["kernel"]
    assert len({str(shard.index) for shard in kernel.addressable_shards}) > 1
    number = 2 if case.startswith("pp") else "layers.1"
    layer = checkpoint.read(f"exp_avg/{number}.self_attention.query_key_value.weight")
    heads, dim, embed = kernel.shape[2], kernel.shape[3], kernel.shape[1]
    q = layer.reshape(heads, 3, dim, embed)[:, 0].transpose(2, 0, 1)
    np.testing.assert_array_equal(kernel[1], q)
    for leaf in mapped.leaves:
        array = tree
        for key in leaf.path:
            array = array[key.name]
        assert same_bits(np.asarray(array), mapped.read(leaf.label)), leaf.label


@pytest.mark.parametrize(
    "case",
    ["legacy_ep2_moe_grouped_bf16", "legacy_tp2_dp2_distopt_bf16", "legacy_tp1_pp2_vpp2_fp32"],
)
def test_megatrons_groups_and_experts_are_stacked_and_come_back(case):
    checkpoint = ucp.open(DATA / "megatron" / case / "ckpt")
    mapping = ucp.Mapping.load(DATA / "mappings" / "megatron-stacked.yaml")
    mapped = checkpoint.map(mapping)
    assert faults_of(mapped) == []
    back = mapped.map(mapping.inverse())
    assert set(back) == set(checkpoint)
    for leaf in checkpoint.leaves:
        assert same_bits(back.read(leaf.label), checkpoint.read(leaf.label)), leaf.label
    fused = checkpoint.read("exp_avg/decoder.layers.1.self_attention.linear_qkv.weight")
    k = mapped.read("exp_avg/layers/attn/k/kernel")[1]
    embed, groups, dim = k.shape
    want = fused.reshape(groups, -1, dim, embed)[:, -2].transpose(2, 0, 1)
    np.testing.assert_array_equal(k, want)


def test_a_mapped_checkpoint_is_saved_and_goes_back_without_being_told_more(tmp_path):
    checkpoint, mapping = deepspeed("z1_fp32_dp4")
    saved = checkpoint.map(mapping).save(tmp_path / "out")
    assert faults_of(saved) == []
    assert saved.source["format"] == "deepspeed"
    assert ucp.Mapping.from_dict(saved.source["mapping"]["rules"]) == mapping
    assert saved.source["mapping"]["lengths"]["dim"] == saved.params["layers/q/kernel"].shape[-1]
    back = saved.map(mapping.inverse())
    for leaf in checkpoint.leaves:
        assert same_bits(back.read(leaf.label), checkpoint.read(leaf.label)), leaf.label


def test_what_a_mapping_skips_is_in_the_account_with_its_reason():
    checkpoint, mapping = deepspeed("tp2_dp2_z1_fp32")
    rules = mapping.to_dict()
    norm = "final_layernorm.{kind}"
    rules["leaves"] = [rule for rule in rules["leaves"] if norm not in rule["param"]]
    rules["skip"] = [{"param": "final_layernorm.*", "reason": "the model has none"}]
    mapped = checkpoint.map(ucp.Mapping.from_dict(rules))
    skipped = [item for item in mapped.inventory if item.reason == "the model has none"]
    assert {item.status for item in skipped} == {"skipped"}
    where = {item.where for item in skipped}
    assert where >= {"param/final_layernorm.weight", "exp_avg/final_layernorm.bias"}
    same = [(item.where, item.status) for item in mapped.inventory if item not in skipped]
    assert set(same) <= {(item.where, item.status) for item in checkpoint.inventory}


def test_a_stored_item_that_held_nothing_else_is_skipped_itself():
    checkpoint = hugging_face("torch/hf_llama")
    rules = ucp.Mapping.load("hf-llama-to-tunix").to_dict()
    rules["leaves"] = [rule for rule in rules["leaves"] if "lm_head.weight" not in rule["param"]]
    rules["skip"] = [{"param": "lm_head.weight", "reason": "tied"}]
    mapped = checkpoint.map(ucp.Mapping.from_dict(rules), assume=["rope_theta"])
    pairs = zip(checkpoint.inventory, mapped.inventory, strict=True)
    changed = [(a.where, b.status, b.reason) for a, b in pairs if a != b]
    ((where, *rest),) = changed
    assert (where.partition(":")[2], *rest) == ("lm_head.weight", "skipped", "tied")


def test_a_leaf_tells_which_files_hold_it():
    checkpoint = hugging_face("torch/hf_llama")
    mapped = checkpoint.map("hf-llama2-to-maxtext")
    label = "param/params/decoder/layers/mlp/wi_0/kernel"
    pieces = mapped.where(label)
    places = [
        (f"model.layers.{i}.mlp.gate_proj.weight", f"[0:32, {i}:{i + 1}, 0:48]") for i in (0, 1)
    ]
    assert [(piece.item, str(piece.target)) for piece in pieces] == places
    leaf = label.removeprefix("param/")
    assert {piece.rule.partition(" -> ")[2] for piece in pieces} == {f"{leaf}: embed layer mlp"}
    flat, mapping = deepspeed("z1_fp32_dp4")
    whole = flat.map(mapping)
    for leaf in whole.leaves:
        covered = np.zeros(leaf.shape, bool)
        for piece in whole.where(leaf):
            covered[piece.target.index] = True
        assert covered.all(), leaf.label
