"""Mapping files: what is one, and all in which one may differ from a checkpoint, in one report."""

import numpy as np
import pytest

import jax_ucp as ucp
from jax_ucp.errors import LayoutError, SpecError, TreeMismatch
from jax_ucp.mapping.binding import bind
from jax_ucp.mapping.model_config import config_of, numbers_of
from jax_ucp.mapping.rules import Mapping, MappingRule

FILE = """\
sizes: {heads: num_attention_heads, gate: 1, up: 1}
leaves:
- param: embed.weight
  axes: vocab embed
  leaf: embedder
- param: h.{layer}.q.weight
  axes: (heads head_dim) embed
  leaf: {layers/q: layer embed heads head_dim}
- param:
    h.{layer}.gate: (gate mlp) embed
    h.{layer}.up: (up mlp) embed
  leaf: {layers/wi: layer embed ((gate + up) mlp)}
- param: h.{layer}.{norm}_norm.weight
  leaf: layers/{layer}/{norm}/scale
- param: head.weight
  axes: vocab embed
  leaf: {head: embed vocab}
  optional: true
skip:
- {param: "*.inv_freq", reason: computed from the config}
"""
SHAPES = {
    "embed.weight": (10, 8),
    **{f"h.{i}.q.weight": (8, 8) for i in range(2)},
    **{f"h.{i}.{name}": (12, 8) for i in range(2) for name in ("gate", "up")},
    **{f"h.{i}.{name}_norm.weight": (8,) for i in range(2) for name in ("in", "out")},
    "h.0.inv_freq": (2,),
}
CONFIG = {"num_attention_heads": 2}


def mapping(text=FILE):
    return ucp.Mapping.parse(text, "my.yaml")


def test_leaves_have_the_shapes_and_names_that_the_rules_say():
    bound = bind(mapping(), SHAPES, {}, CONFIG)
    shapes = {name: form.layout.shape for name, form in bound.leaves.items()}
    scales = {f"layers/{i}/{name}/scale": (8,) for i in range(2) for name in ("in", "out")}
    want = {"embedder": (10, 8), "layers/q": (2, 8, 2, 4), "layers/wi": (2, 8, 24)}
    assert shapes == want | scales
    assert bound.skipped == {"h.0.inv_freq": "computed from the config"}
    assert bound.sizes["head_dim"] == 4
    assert not bound.notes


def test_a_mapping_is_what_its_dict_says_and_the_inverse_of_its_inverse():
    said = mapping()
    assert ucp.Mapping.from_dict(said.to_dict()) == said
    assert said.inverse().inverse().rules == said.rules
    leaf = {"h.{layer}.q.weight": "(heads head_dim) embed"}
    assert said.inverse().rules[1] == MappingRule({"layers/q": "layer embed heads head_dim"}, leaf)


def test_backwards_the_shapes_come_out_again():
    bound = bind(mapping(), SHAPES, {}, CONFIG)
    leaves = {name: form.layout.shape for name, form in bound.leaves.items()}
    back = bind(mapping().inverse(), leaves, {}, CONFIG)
    found = {name: form.layout.shape for name, form in back.leaves.items()}
    assert found == {n: shape for n, shape in SHAPES.items() if n not in bound.skipped}


@pytest.mark.parametrize(("text", "faults"), [
    ("- 1", ["should be a mapping of sections"]),
    ("rules: []", ["my.yaml:1: 'rules' is not a section"]),
    ("leaves: {a: b}\nsizes: [a]", ["sizes should be a mapping", "leaves should be a list"]),
    ("sizes: {a b: 1, c: 'x+'}", ["'a b' is not a name for a size", "sizes: c: 'x+' is not a size"]),
    ("leaves:\n- {param: a}", ["my.yaml:2: a rule lacks leaf"]),
    ("leaves:\n- {param: a, leaf: b, axis: x}", ["my.yaml:2: a rule has no field 'axis'"]),
    ("leaves:\n- {param: a, axes: x y, leaf: {b: x}}",
     ["a has the axes x, y, but no leaf has just these: b lacks y"]),
    ("leaves:\n- {param: a, axes: x, leaf: {b: x z}}",
     ["a has the axes x, but no leaf has just these: b has z besides"]),
    ("leaves:\n- {param: a, axes: (q + k), leaf: {b: q}}", ["a has the axes k, but no leaf has just these"]),
    ("leaves:\n- {param: 'a.{i}', axes: x, leaf: {b: x}}", ["a.{i} has the axes i, x, but no leaf"]),
    ("leaves:\n- {param: 'a.{i}', axes: i x, leaf: b}", ["a.{i} has i in its name already"]),
    ("leaves:\n- {param: {a: x, b: x}, leaf: {c: x}}", ["the axes x are named 2 times, in a and b"]),
    ("leaves:\n- {param: {'a.{i}': x, b: y}, leaf: {c: x}}", ["should have the same placeholders"]),
    ("leaves:\n- {param: 'a.{0}', leaf: b}", ["{0} in 'a.{0}' is not a placeholder"]),
    ("leaves:\n- {param: 'a.{x', leaf: b}", ["a brace in 'a.{x' is not closed"]),
    ("leaves:\n- {param: a, leaf: 'b.*'}", ["a leaf has one name"]),
    ("leaves:\n- {param: a, leaf: 'b//c'}", ["keys with one slash between them, not 'b//c'"]),
    ("leaves:\n- {param: {a: x}, axes: x, leaf: b}", ["axes are for a param that is one name"]),
    ("leaves:\n- {param: a, leaf: b, scale: 0}", ["scale should not be 0"]),
    ("leaves:\n- {param: a, leaf: b, add: one}", ["add should be a number, not 'one'"]),
    ("leaves:\n- {param: a, leaf: b, optional: 1}", ["optional is true or false, not 1"]),
    ("leaves:\n- {param: a, leaf: b, cast: int8}", ["cast is the name of a floating dtype"]),
    ("leaves:\n- {param: a, leaf: b, buffer: true}", ["buffer is the side that has buffers"]),
    ("leaves:\n- {param: {a: x, b: y}, leaf: {c: (x + y)}, tied: {d: x}}", ["what is tied is a copy of one"]),
    ("leaves:\n- {param: a, axes: x y, leaf: b, tied: {c: x}}",
     ["c is tied, so it should name the axes that a names"]),
    ("skip:\n- {param: a}", ["my.yaml:2: what is skipped lacks reason"]),
    ("skip:\n- {param: 'a{x', reason: r}", ["a brace in 'a{x' is not closed"]),
    ("skip:\n- {param: a, reason: ''}", ["has a param, which is a name, and a reason"]),
    ("leaves:\n- {param: a.{i}, leaf: b}", ["my.yaml is not YAML", "quote a name that has braces"]),
    ("leaves:\n- {param: a, axes: '(x', leaf: b}\n- {param: c}",
     ["my.yaml:2: in '(x'", "my.yaml:3: a rule lacks"]),
])  # fmt: skip
def test_what_is_no_mapping_is_refused_with_every_fault_and_its_line(text, faults):
    with pytest.raises(SpecError) as error:
        mapping(text)
    for fault in faults:
        assert fault in str(error.value)


def test_a_file_that_is_not_there_is_refused_with_the_names_that_are():
    words = r"nothing is not a mapping that can be read .* the package has .*hf-llama"
    with pytest.raises(SpecError, match=words):
        ucp.Mapping.load("nothing")


def faults_of(text=FILE, shapes=None, sizes=None, config=None):
    shapes = {**SHAPES, **(shapes or {})}
    with pytest.raises(LayoutError) as error:
        bind(mapping(text), shapes, sizes or {}, CONFIG if config is None else config)
    title, *lines = str(error.value).split("\n  ")
    assert title == f"my.yaml does not fit the checkpoint in {len(lines)} places:"
    return lines


def test_everything_that_is_wrong_is_in_one_report():
    text = FILE.replace("(heads head_dim) embed\n", "embed\n")
    text = text.replace("layer embed heads head_dim", "layer embed")
    text += "- {param: embed.*, reason: not wanted}\n"
    lines = faults_of(text, {"stray.weight": (3,), "h.0.gate": (13, 8), "h.2.up": (12, 8)})
    said = "\n".join(lines)
    assert "stray.weight [3]: claimed by no rule; map it, or skip it with a reason" in said
    claims = "claimed 2 times, skip 'embed.*'; my.yaml:3: the rule for embed.weight"
    assert f"embed.weight [10, 8]: {claims}" in said
    rule = "my.yaml:9: the rule for h.{layer}.gate and h.{layer}.up needs it"
    assert f"h.2.gate is not there, but {rule}" in said
    assert "h.0.q.weight (and 1 more) has 2 axes, [8, 8], but `embed` names 1" in said
    assert "h.0.gate: axis 0 is `(gate mlp)`" in said or "h.1.gate: axis 0 is `(gate mlp)`" in said
    assert len(lines) == 7


def test_a_size_that_does_not_divide_is_told_with_where_it_comes_from():
    line, *_ = faults_of(config={"num_attention_heads": 3})
    assert "axis 0 is `(heads head_dim)` with heads = 3 (num_attention_heads of the config)" in line
    assert "the array has 8 there; no length of head_dim makes that fit" in line


def test_a_length_that_follows_from_nothing_is_asked_for():
    (line,) = faults_of(config={})
    words = "leaves the length of head_dim and heads open; give it in sizes"
    assert f"is `(heads head_dim)`, which {words}" in line
    assert bind(mapping(), SHAPES, {"head_dim": 2}, {}).sizes["heads"] == 4
    assert bind(mapping(), SHAPES, {"num_attention_heads": 4}, {}).sizes["head_dim"] == 2
    assert bind(mapping(), SHAPES, {"heads": 8}, CONFIG).sizes["head_dim"] == 1


def test_a_size_that_nothing_has_a_name_for_is_refused():
    (fault, *_) = faults_of(sizes={"haeds": 4})
    assert fault == "haeds in sizes: no rule and no size of my.yaml has that name"
    bind(mapping(), SHAPES, {"layer": 2, "gate": 1, "num_attention_heads": 2, "vocab": 10}, {})


def test_a_quotient_in_sizes_must_be_whole():
    sizes = "heads: num_attention_heads"
    text = FILE.replace(sizes, f"{sizes}, half: heads // 2")
    (fault, *_) = faults_of(text, config={"num_attention_heads": 1})
    assert fault.startswith("my.yaml: sizes: half: in the size 'heads //")


def test_a_size_may_be_in_a_section_of_the_config():
    text = FILE.replace("heads: num_attention_heads", "heads: text.inner.num_attention_heads")
    config = {"text": {"inner": {"num_attention_heads": 2}}, "inner": {"num_attention_heads": 4}}
    assert bind(mapping(text), SHAPES, {}, config) == bind(mapping(), SHAPES, {}, CONFIG)
    lacking = faults_of(text, config={"text": {"num_attention_heads": 2}})
    assert lacking == faults_of(config={"num_key_value_heads": 2})


@pytest.mark.parametrize(("names", "fault"), [
    ({"h.3.q.weight": (8, 8)},             "h.2.q.weight is not there"),
    ({"h.999999999.q.weight": (8, 8)},     "and 999999994 more of h.{layer}.q.weight"),
    ({f"h.{'9' * 5000}.q.weight": (8, 8)}, "stacks {layer} of h.{layer}.q.weight, but finds 999"),
    ({"h.x.q.weight": (8, 8)},             "stacks {layer} of h.{layer}.q.weight, but finds x there"),
    ({"h.01.q.weight": (8, 8)},            "stacks {layer} of h.{layer}.q.weight, but finds 01 there"),
    ({"h.2.q.weight": (8, 8)},             "the number of {layer}"),  # gate and up have two layers
])  # fmt: skip
def test_stacking_needs_every_number_from_zero(names, fault):
    assert any(fault in line for line in faults_of(shapes=names))


def test_copies_of_layers_are_all_there_or_none():
    rule = "{param: 'h.{layer}.a', tied: {'h.{layer}.b': x}, axes: x, leaf: {w: layer x}}"
    text = f"leaves:\n- {rule}"
    shapes = {f"h.{i}.{kind}": (2,) for i in range(3) for kind in "ab"}
    assert len(bind(mapping(text), shapes, {}, {}).leaves["w"].copies) == 1
    for gone in ("h.1.a", "h.1.b"):
        there = {name: shape for name, shape in shapes.items() if name != gone}
        with pytest.raises(LayoutError, match=f"{gone} is not there"):
            bind(mapping(text), there, {}, {})


def test_stacks_of_several_levels_must_be_full():
    text = "leaves:\n- {param: 'h.{layer}.e.{expert}.w', axes: a, leaf: {w: layer expert a}}"
    shapes = {f"h.{i}.e.{j}.w": (2,) for i in range(3) for j in range(4) if (i, j) != (1, 2)}
    with pytest.raises(LayoutError, match=r"h\.1\.e\.2\.w is not there"):
        bind(mapping(text), shapes, {}, {})
    bound = bind(mapping(text), shapes | {"h.1.e.2.w": (2,)}, {}, {})
    assert bound.leaves["w"].layout.shape == (3, 4, 2)


def test_what_is_skipped_is_named_as_in_a_spec():
    text = "skip:\n- {param: 'h.{layer}.w[0]', reason: first}\n- {param: '*.b', reason: all}"
    bound = bind(mapping(text), {"h.1.w[0]": (1,), "a.b.c.b": (1,)}, {}, {})
    assert bound.skipped == {"h.1.w[0]": "first", "a.b.c.b": "all"}
    with pytest.raises(LayoutError, match="claimed by no rule"):
        bind(mapping(text), {"h.1.2.w[0]": (1,)}, {}, {})


def test_what_is_skipped_may_be_layers_by_their_numbers():
    text = """sizes: {own: layers - shared, shared: shared}
leaves:
- {param: "h.{own}.k", axes: a, leaf: {k: own a}}
skip:
- {param: "h.{shared+own}.k", reason: not read}
"""
    shapes = {f"h.{i}.k": (3,) for i in range(5)}
    bound = bind(mapping(text), shapes, {}, {"layers": 5, "shared": 2})
    assert bound.skipped == {"h.3.k": "not read", "h.4.k": "not read"}
    assert bound.leaves["k"].layout.shape == (3, 3)
    bind(mapping(text), {f"h.{i}.k": (3,) for i in range(3)}, {}, {"layers": 5, "shared": 2})
    with pytest.raises(LayoutError, match=r"h\.5\.k \[3\]: claimed by no rule"):
        bind(mapping(text), shapes | {"h.5.k": (3,)}, {}, {"layers": 5, "shared": 2})
    with pytest.raises(LayoutError, match=r"own = 3 .* but the array has 2 there"):
        bind(mapping(text), {"h.0.k": (3,), "h.1.k": (3,)}, {}, {"layers": 5, "shared": 2})


def test_a_parameter_that_lacks_at_one_pair_of_numbers_is_missed():
    text = """sizes: {block: 2, local: 2}
leaves:
- {param: "h.{2*block+local}.k", axes: a, leaf: "layers_{2*block+local}/k"}
"""
    shapes = {f"h.{layer}.k": (3,) for layer in range(4)}
    assert len(bind(mapping(text), shapes, {}, {}).leaves) == 4
    del shapes["h.1.k"]
    with pytest.raises(LayoutError, match=r"with local = 1, of 2 and block = 0, of 2$"):
        bind(mapping(text), shapes, {}, {})
    with pytest.raises(LayoutError, match=r"with local = 1, of 2\n.*with block = 1, of 2$"):
        bind(mapping(text), {"h.0.k": (3,)}, {}, {})


def test_what_is_skipped_counts_as_rules_do():
    text = """sizes: {block: 2}
leaves:
- {param: "h.{2*block}.k", axes: a, leaf: "layers_{2*block}/k"}
skip:
- {param: "h.{2*block+1}.k", reason: not read}
"""
    shapes = {f"h.{layer}.k": (3,) for layer in range(4)}
    assert list(bind(mapping(text), shapes, {}, {}).skipped) == ["h.1.k", "h.3.k"]
    text = text.replace("2*block+1", "block+own")
    with pytest.raises(LayoutError, match=r"skip 'h\.\{block\+own\}\.k' counts from own"):
        bind(mapping(text), shapes, {}, {})


def test_leaves_of_one_name_go_back_by_the_number_of_their_axes():
    text = """leaves:
- {param: "{layer}.dense", axes: up embed, leaf: {"layers/{layer}/w": embed up}, optional: true}
- {param: "{layer}.expert.{expert}", axes: up embed, leaf: {"layers/{layer}/w": expert embed up}, optional: true}
"""
    shapes = {"0.dense": (4, 3), **{f"1.expert.{i}": (4, 3) for i in range(2)}}
    forms = bind(mapping(text), shapes, {}, {}).leaves
    there = {name: form.layout.shape for name, form in forms.items()}
    assert there == {"layers/0/w": (3, 4), "layers/1/w": (2, 3, 4)}
    back = bind(mapping(text).inverse(), there, {}, {}).leaves
    assert {name: form.layout.shape for name, form in back.items()} == shapes
    with pytest.raises(LayoutError, match="claimed by no rule"):
        bind(mapping(text).inverse(), {"layers/0/w": (3,)}, {}, {})
    # A rule that is alone says what it is that differs.
    one = mapping("leaves:\n- {param: w, axes: up embed, leaf: {w: embed up}, optional: true}")
    with pytest.raises(LayoutError, match="w has 1 axes"):
        bind(one, {"w": (3,)}, {}, {})


def test_a_rule_that_finds_nothing_is_a_fault_unless_it_is_optional():
    assert "finds no parameter" in faults_of(FILE.replace("  optional: true\n", ""))[0]


def test_a_leaf_is_formed_once_and_has_no_leaf_above_it():
    twice = FILE.replace("leaf: embedder", "leaf: layers/0/in/scale")
    assert any("the leaf layers/0/in/scale is formed twice" in line for line in faults_of(twice))
    above = FILE.replace("leaf: embedder", "leaf: layers/q/up")
    assert faults_of(above) == ["layers/q is a leaf, so layers/q/up cannot be below it"]


def test_layers_may_be_counted_from_one():
    rules = "- {param: '{layer+1}.w', axes: a, leaf: {w: layer a}}\n"
    text = f"leaves:\n{rules}" + "- {param: '{i+1}.b', leaf: 'b/{i}'}"
    shapes = {f"{i}.{kind}": (2,) for i in (1, 2) for kind in "wb"}
    bound = bind(mapping(text), shapes, {}, {})
    assert bound.leaves.keys() == {"w", "b/0", "b/1"}
    layout = bound.leaves["w"].layout
    assert [layout.params[part.input] for part in layout.parts] == ["1.w", "2.w"]
    back = bind(mapping(text).inverse(), {"w": (2, 2), "b/0": (2,), "b/1": (2,)}, {}, {})
    assert back.leaves.keys() == shapes.keys()
    with pytest.raises(LayoutError, match=r"0\.b \[2\]: claimed by no rule"):
        bind(mapping(text), shapes | {"0.b": (2,)}, {}, {})


def test_the_rest_of_the_axes_may_differ_from_parameter_to_parameter():
    text = "leaves:\n- {param: '{name}.weight', leaf: 'm/{name}'}"
    bound = bind(mapping(text), {"a.weight": (2, 3), "b.weight": (4,), "c.weight": ()}, {}, {})
    found = {name: form.layout.shape for name, form in bound.leaves.items()}
    assert found == {"m/a": (2, 3), "m/b": (4,), "m/c": ()}


def test_what_is_more_than_moving_elements_is_noted():
    leaf = "{e: (vocab + _more) d, f: d (vocab + _more)}"
    text = f"leaves:\n- {{param: e, axes: (vocab + _rest) d, leaf: {leaf}}}"
    notes = bind(mapping(text), {"e": (12, 2)}, {"vocab": 10, "_more": 6}, {}).notes
    assert "my.yaml:2: the rule for e: _rest of e is dropped; going back gives zeros there" in notes
    assert "my.yaml:2: the rule for e: 12 elements of e are padding, zeros" in notes
    words = "one parameter becomes several leaves, which are independent from then on"
    assert f"my.yaml:2: the rule for e: {words}" in notes


@pytest.mark.parametrize(("grouped", "groups"), [(True, 2), (False, 8)])
def test_megatron_has_as_many_query_groups_as_heads_where_it_has_none(grouped, groups):
    args = {"num_attention_heads": 8, "num_query_groups": 2, "group_query_attention": grouped}
    record = {"!record": "argparse.Namespace", "fields": args}
    numbers = config_of({"model_optim_rng.pt": {"args": record}})
    assert numbers["query_groups"] == groups


@pytest.mark.parametrize(("frequency", "dense"), [
    ([0, 0, 1], 2),
    ([0, 1, 1], 1),
    ([1, 1], 0),
    (1, 0),
    (2, None),
    ([1, 0, 1], None),
    ("x", None),
])  # fmt: skip
def test_megatron_has_dense_layers_before_those_of_experts_or_in_between(frequency, dense):
    args = {"num_layers": 3, "moe_layer_freq": frequency}
    assert config_of({"common.pt": {"args": args}})["dense_layers"] == dense


BUFFERS = """\
leaves:
- {param: w, leaf: a/w}
- {param: bias, buffer: param, leaf: a/b}
"""


def test_a_buffer_becomes_a_leaf_and_a_buffer_again():
    arrays = {name: np.arange(3.0) + i for i, name in enumerate(("w", "bias", "table"))}
    checkpoint = ucp.Checkpoint.of(
        {
            "param": {"w": arrays["w"]},
            "exp_avg": {"w": arrays["w"]},
            "buffer": {"bias": arrays["bias"], "table": arrays["table"]},
        }
    )
    rules = mapping(BUFFERS)
    assert ucp.Mapping.from_dict(rules.inverse().to_dict()) == rules.inverse()
    mapped = checkpoint.map(rules)
    assert set(mapped) == {"param/a/w", "param/a/b", "exp_avg/a/w"}
    np.testing.assert_array_equal(mapped.read("param/a/b"), arrays["bias"])
    back = mapped.map(rules.inverse())
    assert set(back) == {"param/w", "buffer/bias", "exp_avg/w"}
    np.testing.assert_array_equal(back.read("buffer/bias"), arrays["bias"])


def test_moments_of_what_becomes_a_buffer_are_left_with_a_reason():
    own = {"a": {"w": np.zeros(3), "b": np.ones(3)}}
    checkpoint = ucp.Checkpoint.of({"param": own, "exp_avg": own})
    back = checkpoint.map(mapping(BUFFERS).inverse())
    assert set(back) == {"param/w", "buffer/bias", "exp_avg/w"}
    assert "exp_avg/bias is left out: bias is a buffer, which no optimizer changes" in back.notes


def test_a_name_of_a_parameter_and_of_a_buffer_is_refused():
    tree = {"param": {"w": np.zeros(3), "bias": np.ones(3)}, "buffer": {"bias": np.ones(3)}}
    with pytest.raises(TreeMismatch, match="bias is a parameter, and a buffer too: leave one out"):
        ucp.Checkpoint.of(tree).map(mapping(BUFFERS))


def test_what_is_known_of_a_model_comes_from_the_first_config_that_a_checkpoint_carries():
    extras = {
        "model.index.json": {"total_size": 12},
        "config.json": {"config": {"n_head": 3, "tie": True, "eps": 1e-5, "head_dim": None}},
        "mp_rank_00/model_optim_rng.pt": {
            "args": {"!record": "argparse.Namespace", "fields": {"kv_channels": 8}}
        },
    }
    assert config_of(extras) == {"n_head": 3, "tie": True, "eps": 1e-5, "head_dim": None}
    assert numbers_of(config_of(extras)) == {"n_head": 3}
    del extras["config.json"]
    assert config_of(extras) == {"kv_channels": 8}
    assert config_of({"a": {"args": None}, "b": {"config": {}}, "c": 1}) == {}


def test_two_names_of_one_stacked_place_are_refused():
    rule = MappingRule({"h.{layer+1}.w": "a"}, {"w": "layer a"})
    with pytest.raises(LayoutError, match=r"h\.01\.w \[2\]: claimed by no rule"):
        bind(Mapping([rule]), {"h.1.w": (2,), "h.01.w": (2,)}, {}, {})


def test_stacked_placeholders_mean_the_same_in_whatever_order_names_have_them():
    names = {"p.{layer}.{expert}": "q", "r.{expert}.{layer}": "k"}
    rule = MappingRule(names, {"w": "layer expert (q + k)"})
    names = [f"{name}.{i}.{j}" for name in "pr" for i in range(2) for j in range(2)]
    layout = bind(Mapping([rule]), dict.fromkeys(names, (2,)), {}, {}).leaves["w"].layout
    places = {layout.params[part.input]: part.target.offset[:2] for part in layout.parts}
    assert places["p.0.1"] == places["r.1.0"] == (0, 1)
    assert places["p.1.0"] == places["r.0.1"] == (1, 0)
