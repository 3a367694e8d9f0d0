"""The universal checkpoint language: text, sizes and shapes, each with its own errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.layout.patterns import Averaged, Fused, Padded, Replicated, Sharded, Unique
from jax_ucp.shard_spec.expressions import names_in, size_of
from jax_ucp.shard_spec.notation import built_in, load, parse, pattern_of
from jax_ucp.shard_spec.rules import Sentence, Spec, SpecShard, layouts
from spec_writer import node_of, to_yaml

EVERY_PATTERN = """
shards:
- {param: a, pattern: replicated}
- {param: b, pattern: averaged}
- {param: c, pattern: unique}
- {param: d, pattern: {sharded: 1}}
- {param: e, pattern: {sharded: [0, 1], grid: [2, 3]}}
- {param: f, pattern: {fused: {axis: 0, parts: {q: 8, k: 2, v: [1, 1]}, whole: [k]}}}
- {param: g, pattern: {fused: {axis: 0, parts: {q: 8, k: 4}, groups: 2}}}
- {param: h, pattern: {sharded: 0, padded: {axis: 0, to: 101, from: 112}}}
- {param: i, pattern: {replicated: , padded: [{axis: 0, to: 5}, {axis: 1, to: 3}]}}
"""


def shards(*shapes: tuple[int, ...]) -> list[SpecShard]:
    return [SpecShard(shape, f"rank{i}.pt") for i, shape in enumerate(shapes)]


def test_yaml_gives_the_pattern_objects_one_would_write_in_python():
    assert parse(EVERY_PATTERN).own == (
        Sentence("a", Replicated()),
        Sentence("b", Averaged()),
        Sentence("c", Unique()),
        Sentence("d", Sharded(1)),
        Sentence("e", Sharded(0, 1, grid=(2, 3))),
        Sentence("f", Fused(0, {"q": 8, "k": 2, "v": (1, 1)}, frozenset({"k"}))),
        Sentence("g", Fused(0, {"q": 8, "k": 4}, groups=2)),
        Sentence("h", Padded(Sharded(0), 0, 101, 112)),
        Sentence("i", Padded(Padded(Replicated(), 0, 5), 1, 3)),
    )


sizes = st.integers(1, 99)
axes = st.integers(0, 3)
simple = st.one_of(
    st.sampled_from([Unique(), Replicated(), Averaged()]),
    axes.map(Sharded),
    st.builds(
        lambda pair, grid: Sharded(*pair, grid=grid),
        st.sampled_from([(0, 1), (2, 0)]),
        st.tuples(sizes, sizes),
    ),
    st.builds(
        Fused,
        axes,
        st.dictionaries(
            st.sampled_from("qkvgu"), sizes | st.lists(sizes, min_size=1).map(tuple), min_size=1
        ),
    ),
    st.builds(
        Fused, axes, st.dictionaries(st.sampled_from("qkv"), sizes, min_size=1), groups=sizes
    ),
)


def padded(inner):
    return st.builds(Padded, inner, axes, sizes, st.none() | sizes)


any_pattern = st.recursive(simple, padded, max_leaves=3)


@given(st.lists(any_pattern, max_size=4))
def test_python_to_yaml_to_python_is_the_original(patterns):
    spec = Spec(tuple(Sentence(f"p{i}.*", pattern) for i, pattern in enumerate(patterns)))
    assert parse(to_yaml(spec)) == spec
    for pattern in patterns:
        assert pattern_of(node_of(pattern), lambda n: size_of(n, {})) == pattern


def test_rules_with_names_survive_the_round_trip_too():
    spec = built_in("megatron")
    again = parse(to_yaml(spec))
    assert (again.own, again.sizes) == (spec.own, spec.sizes)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_sizes_are_the_arithmetic_they_look_like(a, b, c):
    assert size_of("(a + b) * c // c + a * 2", {"a": a, "b": b, "c": c}) == a + b + a * 2
    assert names_in("a * (b + 1)") == {"a", "b"}


@pytest.mark.parametrize("text", [
    "__import__('os')", "a.b()", "a[0]", "f(a)", "a ** 9", "-a", "a / b", "1.5", "'x'", "a if b else c", "",
    "a b", "lambda: 1",
])  # fmt: skip
def test_nothing_but_sums_products_and_quotients_is_a_size(text):
    with pytest.raises(SpecError, match="is not a size"):
        size_of(text, {"a": 2, "b": 1, "c": 1})


@pytest.mark.parametrize(("text", "message"), [
    ("7 // 2",         "not divisible"),
    ("a // 0",         "not divisible"),
    ("2 - a",          "is -1"),
    ("b + 1",          "the size 'b . 1': 'b' has no number; give it in sizes"),
    (True,             "not True"),
    ("1+" * 200 + "1", "characters"),
])  # fmt: skip
def test_a_size_that_is_no_number_of_rows_is_refused(text, message):
    with pytest.raises(SpecError, match=message):
        size_of(text, {"a": 3})


@pytest.mark.parametrize(("text", "message"), [
    ("shards: [{param: a, pattern: shraded}]", "spec.yaml:1: 'shraded' is not a pattern"),
    ("shards:\n- {param: a, pattern: {sharded: -1}}", "spec.yaml:2: an axis is a number from 0"),
    ("shards:\n- {param: a, pattern: {sharded: [0, 1]}}", "spec.yaml:2: .*needs a grid"),
    ("shards:\n- {param: a, pattern: {sharded: 0, fused: {}}}", "a pattern is one of"),
    ("shards:\n- {param: a, pattern: {fused: {axis: 0, parts: {q: 'x+'}}}}", "is not a size"),
    ("shards:\n- {param: a, pattern: {fused: {axis: 0, parts: {q: 1}, whole: [k]}}}", "whole names"),
    ("shards:\n- {param: a, pattern: {fused: {axis: 0, part: {q: 1}}}}", "lacks parts"),
    ("shards:\n- {param: a, pattern: {fused: {axis: 0, parts: 3}}}", "mapping of names"),
    ("shards:\n- {param: a, pattern: {sharded: 0, padded: {axis: 0}}}", "padded lacks to"),
    ("shards:\n- {param: a, pattern: {replicated: 3}}", "says nothing more"),
    ("shards:\n- {param: a}", "lacks pattern"),
    ("shards:\n- {param: a, pattern: unique, wen: x}", "no field 'wen'"),
    ("shards:\n- {param: a, pattern: unique, when: a or b}", "when should be a name"),
    ("shards:\n- {param: 'a{', pattern: unique}", "a brace"),
    ("shards:\n- {param: '{0}', pattern: unique}", "not a placeholder"),
    ("shards: 3", "should be a list"),
    ("sizes: [a]", "should be a mapping"),
    ("sizes: {a: b c}", "sizes: a: "),
    ("\nshrads: []", "spec.yaml:2: 'shrads' is not a section"),
    ("extends: nothing", "no spec 'nothing'"),
    ("shards: [{param: a, param: b, pattern: unique}]", "'param' is there twice"),
    ("[1]", "should be a mapping"),
    ("a: [", r'(?s)spec.yaml is not YAML: .* in "[^"]*spec.yaml", line \d, column \d:\n    a: \['),
])  # fmt: skip
def test_what_is_not_in_the_language_is_refused_with_its_line(tmp_path, text, message):
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(SpecError, match=message):
        load(tmp_path / "spec.yaml")


def test_all_faults_of_notation_come_in_one_report():
    with pytest.raises(SpecError, match=r"(?s)s:2: .*s:3: .*s:4: "):
        parse("shards:\n- {param: a}\n- {param: b, pattern: x}\n- 7", "s")


def test_all_that_does_not_fit_the_shards_comes_in_one_report_with_rule_parameter_shapes_and_files():
    spec = parse(
        """
shards:
- {param: "*.weight", pattern: {sharded: 0}}
- {param: "up.*", pattern: replicated}
- {param: "gone.*", pattern: unique}
- {param: "one", pattern: unique}
- {param: "sized", pattern: {fused: {axis: 0, parts: {a: rows}}}}
""",
        "mine.yaml",
    )
    params = {
        "up.weight": shards((2, 3), (2, 3)),
        "ragged.weight": shards((2, 3), (2, 4)),
        "one": shards((1,), (1,)),
        "stray": shards((5,)),
        "sized": shards((4,), (4,)),
    }
    with pytest.raises(LayoutError) as caught:
        layouts(spec, params)
    text = str(caught.value)
    assert "up.weight is claimed by 2 rules: mine.yaml:3: '*.weight'; mine.yaml:4: 'up.*'" in text
    assert "the rule mine.yaml:5: 'gone.*' claims no parameter" in text
    assert "one, by the rule mine.yaml:6: 'one': Unique needs 1 shard, found 2" in text
    assert "ragged.weight, by the rule mine.yaml:3" in text
    assert "rank1.pt [2, 4]" in text
    assert "stray is claimed by no rule" in text
    assert "'rows' has no number; give it in sizes" in text


def test_names_in_sizes_come_from_the_checkpoint_the_spec_and_the_spec_it_extends():
    spec = parse(
        "extends: megatron\nsizes: {ffn: 2 * width}\n"
        "shards: [{param: extra, pattern: {fused: {axis: 0, parts: {a: qkv_rows}}}}]"
    )
    params = {
        "extra": shards((16, 4), (16, 4)),
        "decoder.layers.0.mlp.linear_fc2.weight": shards((3, 4), (3, 4)),
    }
    given = {
        "heads": 2, "query_groups": 1, "head_dim": 8, "width": 4, "ffn": 99, "swiglu": 0, "down_is_cut": 0,
    }  # fmt: skip
    found = layouts(spec, params, given)
    assert found["decoder.layers.0.mlp.linear_fc2.weight"].shape == (3, 8)


def test_a_rule_of_ones_own_wins_over_that_of_the_spec_it_extends():
    name = "decoder.final_layernorm.weight"
    given = {"swiglu": 1, "down_is_cut": 0}
    found = layouts(Spec(extends=built_in("megatron")), {name: shards((4,), (4,))}, given)
    assert found[name].shape == (4,)
    own = parse(f"extends: megatron\nshards: [{{param: {name}, pattern: {{sharded: 0}}}}]")
    assert layouts(own, {name: shards((4,), (4,))}, given)[name].shape == (8,)


@pytest.mark.parametrize("swiglu", [0, 1])
def test_a_rule_is_there_only_when_its_size_says_so(swiglu):
    name = "decoder.layers.7.mlp.linear_fc1.weight"
    rows = 3 * (1 + swiglu)
    spec = Spec(extends=built_in("megatron"))
    given = {"swiglu": swiglu, "ffn": 6, "down_is_cut": 0}
    found = layouts(spec, {name: shards((rows, 4), (rows, 4))}, given)[name]
    assert found.shape == (2 * rows, 4)
    assert [f.target.offset[0] for f in found.parts if f.input == 0] == ([0, 6] if swiglu else [0])


def test_a_placeholder_is_one_part_of_a_name_and_a_star_is_any_text():
    rules = "{param: 'a.{layer}.w', pattern: unique}, {param: 'b.*', pattern: unique}"
    spec = parse(f"shards: [{rules}]")
    params = {"a.3.w": shards((1,)), "b.3.4.w": shards((1,))}
    assert set(layouts(spec, params)) == set(params)
    with pytest.raises(LayoutError, match=r"a\.3\.4\.w is claimed by no rule"):
        layouts(spec, {**params, "a.3.4.w": shards((1,))})
