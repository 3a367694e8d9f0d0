"""Experts as transformers 5 has them in memory, packed in one parameter for all, and as it saves
them, one by one: a mapping takes both.

`tests/data/maxtext/MODEL/packed` is the model of `ckpt` as `save_original_format=False` saves it,
which the state dicts of FSDP, DeepSpeed, verl and accelerate have too
(`examples/maxtext_logits.py`).
"""

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA, assert_same
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.mapping.binding import outcomes
from jax_ucp.mapping.rules import shipped

MODELS = {
    "qwen3_moe": ["hf-qwen3-moe-to-maxtext", "hf-qwen3-moe-to-tunix"],
    "qwen3_next": ["hf-qwen3-next-to-maxtext"],
    "qwen35_moe": ["hf-qwen3.5-moe-to-maxtext"],
    "mixtral": ["hf-mixtral-to-maxtext"],
    "deepseek2": ["hf-deepseek2-to-maxtext"],
    "deepseek3": ["hf-deepseek3-to-maxtext"],
}
CASES = [(model, mapping) for model, mappings in MODELS.items() for mapping in mappings]


def apart(model):
    return ucp.open(DATA / "maxtext" / model / "ckpt")


def packed(model):
    return ucp.open(DATA / "maxtext" / model / "packed" / "model.safetensors")


def arrays_of(checkpoint):
    return {name: param.read() for name, param in checkpoint.params.items()}


def with_moments(model, arrays):
    """A run's checkpoint, of which the first moments are the weights times three."""
    tree = {"param": dict(arrays), "exp_avg": {name: one * 3 for name, one in arrays.items()}}
    return ucp.Checkpoint.of(tree), apart(model).config


def mapped(checkpoint, mapping, config):
    rules = ucp.Mapping.load(mapping)
    unmet = [one.requirement.name for one in outcomes(rules, config) if one.state == "unmet"]
    return checkpoint.map(rules, config=config, assume=unmet)


def test_every_mapping_with_experts_one_by_one_was_tried():
    with_layouts = [name for name in shipped() if "packed" in ucp.Mapping.load(name).layouts]
    assert sorted(mapping for _, mapping in CASES) == with_layouts
    for name in filter(lambda name: name.startswith("hf-"), shipped()):
        params = [param for rule in ucp.Mapping.load(name).rules for param in rule.params]
        stacks_experts = any("experts.{expert}." in param for param in params)
        assert stacks_experts == (name in with_layouts), name


@pytest.mark.parametrize(
    ("model", "mapping"),
    [*CASES, *((model, f"{one}:unscanned") for model, one in CASES if "maxtext" in one)],
)
def test_both_layouts_give_the_same_leaves_bit_for_bit_and_the_same_moments(model, mapping):
    one, config = with_moments(model, arrays_of(apart(model)))
    other, _ = with_moments(model, arrays_of(packed(model)))
    assert one.params.keys() != other.params.keys()
    first, second = (mapped(each, mapping, config) for each in (one, other))
    want = {leaf.label: first.read(leaf.label) for leaf in first.leaves}
    assert_same({leaf.label: second.read(leaf.label) for leaf in second.leaves}, want)
    assert any(label.startswith("exp_avg/") for label in want)


# Mixtral's query is scaled, which rounds.
@pytest.mark.parametrize(("model", "mapping"), [one for one in CASES if one[0] != "mixtral"])
def test_the_inverse_writes_either_layout_whichever_was_read(model, mapping):
    config = apart(model).config
    rules = ucp.Mapping.load(mapping)
    for read in (apart, packed):
        leaves = mapped(read(model), mapping, config)
        assert_same(arrays_of(leaves.map(rules.inverse())), arrays_of(apart(model)))
        back = leaves.map(rules.variant("packed").inverse())
        assert_same(arrays_of(back), arrays_of(packed(model)))


@pytest.mark.parametrize(("model", "mapping"), CASES)
def test_a_checkpoint_in_both_layouts_is_refused(model, mapping):
    one, other = arrays_of(apart(model)), arrays_of(packed(model))
    strays = [name for name in other if name not in one]
    for stray in (strays[0], strays[-1]):
        mixed, config = with_moments(model, {**one, stray: other[stray]})
        with pytest.raises(LayoutError, match=r"in several layouts, per_expert .* and packed"):
            mapped(mixed, mapping, config)
    last = max(stray for stray in strays if "gate_up" in stray).partition(".experts.")[0]
    moved = {name: one[name] for name in one if not name.startswith(f"{last}.experts.")}
    moved |= {name: other[name] for name in other if name.startswith(f"{last}.experts.")}
    with pytest.raises(LayoutError, match="in several layouts"):
        mapped(with_moments(model, moved)[0], mapping, config)


@pytest.mark.parametrize(("model", "mapping"), CASES)
def test_one_layout_may_be_demanded(model, mapping):
    config = apart(model).config
    mapped(packed(model), f"{mapping}:packed", config)
    with pytest.raises(LayoutError, match="claimed by no rule"):
        mapped(apart(model), f"{mapping}:packed", config)
    with pytest.raises(LayoutError, match="claimed by no rule"):
        mapped(packed(model), f"{mapping}:per_expert", config)


TURNED = """\
leaves:
- {param: embed, axes: vocab embed, leaf: embed}
- {param: up, axes: expert embed mlp, layout: first, leaf: {up: expert embed mlp}}
- {param: up, axes: expert mlp embed, layout: second, leaf: {up: expert embed mlp}}
"""


def test_layouts_of_the_same_names_are_told_apart_by_shapes_or_not_at_all():
    rules = ucp.Mapping.parse(TURNED, "turned")

    def up(*shape, way=rules):
        array = np.arange(float(np.prod(shape))).reshape(shape)
        tree = {"param": {"embed": np.zeros((5, 4)), "up": array}}
        return ucp.Checkpoint.of(tree).map(way)["param/up"][:], array

    found, array = up(2, 4, 3)
    assert same_bits(found, array)
    found, array = up(2, 3, 4)
    assert same_bits(found, array.swapaxes(1, 2).copy())
    with pytest.raises(LayoutError, match="turned fits with the layout of first and of second"):
        up(2, 4, 4)
    found, array = up(2, 4, 4, way=rules.variant("second"))
    assert same_bits(found, array.swapaxes(1, 2).copy())
    with pytest.raises(LayoutError, match="embed"):
        up(2, 3, 3)


def test_a_layer_without_experts_is_refused_in_either_layout():
    arrays = arrays_of(packed("qwen3_moe"))
    del arrays["model.layers.1.mlp.experts.gate_up_proj"]
    checkpoint, config = with_moments("qwen3_moe", arrays)
    with pytest.raises(LayoutError, match=r"experts\.gate_up_proj.* the array has 1 there"):
        mapped(checkpoint, "hf-qwen3-moe-to-maxtext", config)


def test_a_run_is_exported_in_either_layout(tmp_path):
    checkpoint, config = apart("qwen3_moe"), apart("qwen3_moe").config
    run = checkpoint.map("hf-qwen3-moe-to-maxtext").save(tmp_path / "run", root="params")
    rules = ucp.Mapping.load("hf-qwen3-moe-to-maxtext")
    for name, want in (("per_expert", apart), ("packed", packed)):
        weights = run.weights("params").map(rules.variant(name).inverse(), config=config)
        weights.export(tmp_path / name, "safetensors")
        assert_same(arrays_of(ucp.open(tmp_path / name)), arrays_of(want("qwen3_moe")))


def test_halves_of_a_packed_expert_are_not_exchanged():
    gate_up = packed("qwen3_moe").read("param/model.layers.1.mlp.experts.gate_up_proj")
    leaves = mapped(packed("qwen3_moe"), "hf-qwen3-moe-to-tunix", apart("qwen3_moe").config)
    gate, up = np.split(gate_up, 2, axis=1)
    assert same_bits(leaves.read("param/layers/1/mlp/gate_proj"), gate.swapaxes(1, 2))
    assert same_bits(leaves.read("param/layers/1/mlp/up_proj"), up.swapaxes(1, 2))


PAIRS = ("a", "one"), ("b", "two")
RULES = [{"param": {n: "x"}, "leaf": {"w": "x"}, "layout": layout} for n, layout in PAIRS]
RULES = {"leaves": RULES}


@pytest.mark.parametrize(("change", "fault"), [
    ({"layout": "one"}, "layouts are of the same leaves, but w is not formed in each"),
    ({"leaf": {"v": "x"}}, "layouts are of the same leaves, but v is not formed in each"),
    ({"layout": "t w o"}, "its name is one word"),
    ({"layout": 2}, "the layout of a rule is a word, not 2"),
])  # fmt: skip
def test_layouts_that_are_no_alternatives_are_refused(change, fault):
    rules = {"leaves": [RULES["leaves"][0], RULES["leaves"][1] | change]}
    ucp.Mapping.from_dict(RULES)
    with pytest.raises(SpecError, match=fault):
        ucp.Mapping.from_dict(rules)


def test_a_layout_is_not_called_as_a_variant_is():
    with pytest.raises(SpecError, match="not that of a variant"):
        ucp.Mapping.from_dict({**RULES, "variants": {"one": {"w": "v"}}})
    assert ucp.Mapping.from_dict(RULES).layouts == ("one", "two")
    assert ucp.Mapping.from_dict(ucp.Mapping.from_dict(RULES).to_dict()).layouts == ("one", "two")
