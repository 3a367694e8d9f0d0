"""YAML of others: aliases, depth, numbers and axes without end are refused, with the line."""

import pytest

from hostile.inputs import aliases
from jax_ucp.errors import LayoutError, SpecError
from jax_ucp.layout import axes
from jax_ucp.mapping.binding import Given, bind, given_before
from jax_ucp.mapping.model_config import config_of, numbers_of
from jax_ucp.mapping.rules import Mapping
from jax_ucp.shard_spec.document import document
from jax_ucp.shard_spec.notation import parse
from spec_writer import to_yaml

pytestmark = pytest.mark.timeout(60)


BOMBS = {
    "aliases": aliases(12), "one alias": "sizes: &a {x: 1}\nmore: *a", "merged": "a: &a {x: 1}\nb: {<<: *a}",
    "lists": "a: " + "[" * 400_000, "mappings": "a: " + "{a: " * 100_000, "blocks": "- " * 400_000,
    "keys": "? " * 300_000, "base 60": "a: 1" + ":1" * 100_000, "long": "a: x\n" * 400_000,
    "text": "a: '" + "x" * 20_000 + "'", "digits": "sizes: {a: " + "9" * 9_000 + "}",
    "hexadecimal": "sizes: {a: 0x" + "f" * 9_000 + "}", "date": "a: 2001-99-99", "NUL": "a: \0",
    "escape": "a: \x1b[31m", "surrogate": "a: \ud800", "number for a name": "1: 2",
    "list for a name": "? [a, b]\n: 1", "set": "!!set {a, b}",
    "code": "a: !!python/object/apply:os.system [x]", "two documents": "a: 1\n---\nb: 2",
    "binary": "a: !!binary '\xff'",
}  # fmt: skip


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.parametrize("read", [document, parse, Mapping.parse])
def test_what_no_person_writes_is_refused(read, text):
    with pytest.raises(SpecError):
        read(text, "hostile.yaml")


def test_an_error_quotes_little_of_what_it_refuses():
    deep = "{k: 1, z: [" + "y, " * 900 + "y]}"
    for text in ("shards: [" + "x, " * 300 + "x]", f"shards: [{{param: a, pattern: {deep}}}]"):
        with pytest.raises(SpecError) as refused:
            parse(text, "hostile.yaml")
        assert max(map(len, str(refused.value).splitlines())) < 1000


@pytest.mark.parametrize("text", [
    "(" * 5000,
    "(" * 100 + "a" + ")" * 100,
    " ".join(f"(a{i} + b{i})" for i in range(40)),
    "a " * 400,
])  # fmt: skip
def test_axes_of_any_depth_and_any_number_of_parts_are_refused(text):
    with pytest.raises(SpecError):
        axes.parse(text)
    with pytest.raises(SpecError):
        Mapping.from_dict({"leaves": [{"param": "w", "axes": text, "leaf": "w"}]})


def test_a_mapping_made_in_python_may_share_its_parts():
    """They are written out: an alias is refused only where somebody wrote one."""
    rule = {"param": {"w": "a b"}, "leaf": {"v": "b a"}}
    skip = {"param": "x", "reason": "not wanted"}
    shared = {"leaves": [rule, {**rule, "leaf": {"u": "b a"}}], "skip": [skip, skip]}
    assert len(Mapping.from_dict(shared).skips) == 2
    spec = parse("shards: [{param: a, pattern: {fused: {axis: 0, parts: {q: 1, k: 1}}}}]")
    assert parse(to_yaml(spec)).own == spec.own


@pytest.mark.parametrize("value", [-1, 1 << 70, 10**4000, True, "12", 1.5, None, [1]])
def test_a_number_of_a_config_that_is_no_length_is_none(value):
    said = {"heads": value, "num_query_groups": 2, "num_attention_heads": value}
    for extras in ({"config.json": {"config": said}}, {"a": {"args": {"fields": said}}}):
        assert numbers_of(config_of(extras)) == {"num_query_groups": 2}
    assert numbers_of(config_of({"a": {"args": {"fields": [said]}}, "b": [1]})) == {}


@pytest.mark.parametrize(
    "done",
    [{"rules": [], "lengths": {}}, {"rules": {}, "lengths": []}, {"rules": 1}, {"lengths": 1}],
)
def test_a_source_that_says_no_mapping_is_not_undone(done):
    for record in (done, {"before": done}, {**done, "before": [1]}):
        assert given_before(Mapping(()), record) == Given(earlier=record)


@pytest.mark.parametrize("power", ["999999999", "-9.5"])
def test_a_power_that_is_no_number_is_refused(power):
    rule = {"param": "w", "axes": "a", "leaf": "v", "scale": f"zero ** {power}"}
    scaled = Mapping.from_dict({"leaves": [rule]})
    length = 0 if power.startswith("-") else 10
    with pytest.raises(LayoutError, match="the scale zero"):
        bind(scaled, {"w": (4,)}, {"zero": length}, {})
