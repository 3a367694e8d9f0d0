"""Conditions on a model's config: what they mean, what is none, and that nothing but a
comparison comes of them.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.errors import SpecError
from jax_ucp.shard_spec.expressions import UndecidedCondition, condition, holds, unmet, within

ROPE = {"type": "llama3", "factor": 8.0, "inner": {"deep": -1}}
CONFIG = {
    "act": "silu",
    "kinds": ["near", "near", "far", "near"],
    "layers": 3,
    "eps": 1e-5,
    "tied": True,
    "window": None,
    "rope": ROPE,
}


@pytest.mark.parametrize(("text", "truth"), [
    ('act == "silu"', True),
    ('repeats(kinds, "near", "near", "far")', True),  # the last time cut short
    ('repeats(kinds, "near", "far")', False),
    ('repeats(kinds, "far", "near")', False),
    ('repeats(first(none, kinds), "near", "near", "far", "near", "far")', True),
    ("act == 'silu'", True),
    ('act != "silu"', False),
    ('act in ["gelu", "silu"]', True),
    ('act not in ["gelu", "silu"]', False),
    ("tied", True),
    ("not tied", False),
    ("tied == true", True),
    ("tied == 1", False),  # nothing is converted
    ("layers == 3.0", True),  # but numbers are numbers
    ("layers in [1, true]", False),
    ("window == null", True),
    ("window == false", False),
    ("kinds == []", False),
    ("kinds != []", True),
    ("first(none, []) == []", True),
    ("layers < 4 and layers >= 3", True),
    ("rope.inner.deep == -1", True),
    ('rope.factor > 7.5 or act == "gelu"', True),
    ("layers > eps", True),
    ('first(rope.kind, rope.type, "default") == "llama3"', True),
    ('first(kind, window, "default") == "default"', False),  # a null is there
    ("first(window.size, 4) == 4", True),  # and nothing is in it
    ("first(act.size, layers.size, 4) == 4", True),
    ('not (act == "gelu" or first(bias, false))', True),
    ("tied or nothing == 1", True),  # from left to right
])  # fmt: skip
def test_a_condition_is_true_or_false_of_a_config(text, truth):
    condition(text)
    assert holds(text, CONFIG) is truth
    assert bool(unmet(text, CONFIG)) is not truth
    assert holds(within("text.inner", text), {"text": {"inner": CONFIG}}) is truth


@pytest.mark.parametrize("section", ["rope", "rope.inner", "first"])
def test_a_condition_on_a_section_names_its_keys_and_leaves_texts_as_they_are(section):
    text = 'first(rope.type,\n"é rope") == "first" and not rope and repeats(rope, "rope", true)'
    of_section = condition(within(section, text)).keys
    assert of_section == tuple(f"{section}.{key}" for key in condition(text).keys)
    got, want = within(section, text), text.replace("\n", " ")
    assert got.replace(f"{section}.", "") == want.replace(f"{section}.", "")


@pytest.mark.parametrize(("text", "has"), [
    ("nothing == 1", "no nothing"),
    ("first(nothing, rope.nothing) == 1", "none of nothing, rope.nothing"),
    ("not nothing", "no nothing"),
    ("nothing != 1", "no nothing"),
    ("nothing not in [1]", "no nothing"),
    ("nothing == 1 or tied", "no nothing"),
    ("none in []", "no none"),
    ("none not in []", "no none"),
    ("act < 3", '"silu" in `act < 3`, which is not a number'),
    ("window >= 3", "null in `window >= 3`, which is not a number"),
    ("tied < 2", "true in `tied < 2`, which is not a number"),
    ("layers", "layers = 3, which is neither true nor false"),
    ("not rope", 'rope = {"type": "llama3", "factor": 8.0, "inner": {"deep": -1}}, which is neither'),
])  # fmt: skip
def test_what_a_config_does_not_decide_is_not_met(text, has):
    with pytest.raises(UndecidedCondition):
        holds(text, CONFIG)
    assert f"is needed, and the config has {has}" in unmet(text, CONFIG)


def test_of_several_conditions_the_first_that_is_not_met_is_told():
    text = 'tied and act == "gelu" and layers == 4'
    assert unmet(text, CONFIG) == '`act == "gelu"` is needed, and the config has act = "silu"'
    assert condition(text).keys == ("tied", "act", "layers")


@pytest.mark.parametrize("text", [
    "1", "true", "1 == 2", "a is b", "a = 1", "a == 1 == b", "a < 'x'", "a < null", "a in b", "a in 'abc'",
    "a in [b]", "a in [[1]]", "a == [1]", "a == None", "True == a", "a + 1 == 2", "a[0] == 1", "a and 1",
    "first(a)", "first(a, *b)", "first(a, b=c)", "second(a, 1) == 1", "a.first(b, 1)", "a()", "a.b().c == 1",
    "__import__('os').system('true')", "(lambda: a)()", "[a for a in b]", "a if b else c", "(a := 1)",
    "f'{a}' == 'x'", "b'x' == a", "a == 1j", "null.a == 1", "", "a\nb", "a == 1;",
    "(" * 400 + "a" + ")" * 400, "a" * 1201, "not " * 120 + "a == 1" + " " * 1100, 3, None, ["a"],
])  # fmt: skip
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(SpecError):
        condition(text)


def test_values_of_a_config_are_shown_short_and_without_control_characters():
    told = unmet('act == "silu"', {"act": "\x1b[31m\u202e" + "x" * 500})
    assert told.isascii()
    assert told.isprintable()
    assert len(told) < 150
    assert "act = {1, 2}" not in unmet("act == 1", {"act": {1, 2}})  # no JSON: its repr as a text


VALUES = st.none() | st.booleans() | st.integers(-5, 5)
VALUES |= st.floats(allow_nan=False) | st.text("ab", max_size=2)


@given(VALUES, VALUES)
def test_a_literal_equals_what_json_gives_for_it_and_nothing_else(value, other):
    config = json.loads(json.dumps({"a": value}))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    both = number and not isinstance(other, bool)
    same = value == other and (both or type(value) is type(other))
    text = f"a == {json.dumps(other)}"
    if other in (float("inf"), float("-inf")):
        return
    assert holds(text, config) is same
    assert holds(f"not a == {json.dumps(other)}", config) is not same
    assert holds(f"a in [{json.dumps(other)}, {json.dumps(other)}]", config) is same


@given(st.text("()[]{}<>=! .,'\"aANDornotfirstnulltrue0123456789_-+*:\n\\", max_size=60))
def test_any_text_is_a_condition_or_refused_and_a_condition_is_decided_or_not(text):
    try:
        condition(text)
    except SpecError:
        return
    try:
        assert holds(text, CONFIG) in (True, False)
    except UndecidedCondition:
        assert unmet(text, CONFIG)
