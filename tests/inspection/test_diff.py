"""What two checkpoints have that differs: nothing is missed, and nothing is invented."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jax_ucp as ucp
from commands import run, run_json
from jax_ucp.errors import TreeMismatch
from jax_ucp.inspection.diff import Difference
from jax_ucp.layout.blocks import run_boxes

DATA = Path(__file__).parents[1] / "data"
CASE = DATA / "deepspeed" / "z2_bf16_dp3"
DTYPES = st.sampled_from(["float32", "float16", "int32", "uint8", "bool", "complex64"])
ARRAYS = hnp.arrays(DTYPES.map(np.dtype), hnp.array_shapes(max_dims=3, max_side=4))


def compare(a, b, **options) -> Difference:
    return ucp.diff(ucp.Checkpoint.of(a), ucp.Checkpoint.of(b), **options)


@given(ARRAYS)
def test_a_checkpoint_is_the_same_as_itself(array):
    found = compare({"x": array}, {"x": array.copy()})
    assert found.same
    assert found.equal == 1


@given(ARRAYS, st.data(), st.integers(1, 2000))
def test_each_changed_element_is_counted_whatever_the_budget(array, data, budget):
    flipped = data.draw(hnp.arrays(np.bool_, array.shape))
    other = array.copy()
    bits = other.reshape(-1).view(np.uint8).reshape(other.size, -1)
    bits[flipped.ravel(), 0] ^= 1
    found = compare({"x": array}, {"x": other}, budget_bytes=budget)
    assert sum(each.changed for each in found.values) == np.count_nonzero(flipped)
    assert found.same == (not flipped.any())


@given(hnp.array_shapes(max_dims=4, max_side=6), st.integers(1, 50))
def test_blocks_hold_an_array_once_each_within_the_bound(shape, most):
    seen = np.zeros(shape, int)
    for box in run_boxes(shape, 1, most):
        assert box.size <= most
        seen[box.index] += 1
    assert (seen == 1).all()


def test_numbers_are_those_of_the_arrays():
    a = np.array([[1.0, 2.0], [-3.0, np.nan]], np.float32)
    b = np.array([[1.0, 2.5], [3.0, np.inf]], np.float32)
    (found,) = compare({"x": a}, {"x": b}).values
    assert (found.elements, found.changed, found.share) == (4, 3, 0.75)
    assert found.largest == 6.0
    assert found.relative == 2.0
    assert found.not_finite == (1, 1)
    finite = a.ravel()[:3].astype(float), b.ravel()[:3].astype(float)
    cosine = np.dot(*finite) / np.linalg.norm(finite[0]) / np.linalg.norm(finite[1])
    assert found.cosine == pytest.approx(cosine, rel=1e-12)


def test_opposite_arrays_have_the_cosine_of_opposite_vectors():
    a = np.arange(1, 5, dtype=np.float32)
    assert compare({"x": a}, {"x": -a}).values[0].cosine == -1.0


def test_a_rounded_copy_is_called_one():
    a = np.random.default_rng(0).normal(size=100).astype(np.float32)
    b = a.astype(ml_dtypes.bfloat16)
    found = compare({"x": a}, {"x": b})
    assert [(each.first, each.second) for each in found.recast] == [("float32", "bfloat16")]
    assert found.values[0].rounded
    b[3] += 1
    assert not compare({"x": a}, {"x": b}).values[0].rounded


def test_large_integers_are_not_compared_as_floats():
    a = np.array([(1 << 60) + 1], np.int64)
    b = np.array([1 << 60], np.uint64)
    assert compare({"x": a}, {"x": b}).values[0].changed == 1


INTEGERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(INTEGERS, INTEGERS), min_size=1, max_size=5))
@example([(2**62 + 1, 2**62)])
@example([(2**63 - 1, -(2**63))])
def test_how_far_integers_are_apart_is_what_python_says(pairs):
    a, b = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    found = compare({"x": a}, {"x": b}).values
    largest = max(abs(one - other) for one, other in pairs)
    assert [each.largest for each in found] == [float(largest)] * bool(largest)


@given(INTEGERS, st.floats(-(2.0**64), 2.0**64))
@example(2**53 + 1, 2.0**53)
@example(2**63 - 1, 2.0**63)
def test_an_integer_and_a_float_are_equal_where_python_says_so(number, other):
    found = compare({"x": np.array([number])}, {"x": np.array([other])})
    assert sum(each.changed for each in found.values) == (number != other)


@pytest.mark.parametrize(("number", "other"), [(2**64 - 1, 2.0**64), (2**64 - 2**11, 2.0**64)])
def test_an_unsigned_integer_that_no_float_has_is_equal_to_none(number, other):
    found = compare({"x": np.array([number], np.uint64)}, {"x": np.array([other])})
    assert [each.changed for each in found.values] == [1]


def test_what_is_not_in_both_or_is_something_else_is_named():
    a = {"both": np.ones(2), "only_a": np.ones(1), "shape": np.ones(2), "s": "x", "n": None}
    b = {"both": np.ones(2), "only_b": np.ones(1), "shape": np.ones(3), "s": "y", "n": np.ones(1)}
    found = compare(a, b)
    assert (found.missing, found.added) == (("only_a",), ("only_b",))
    assert [(x.label, x.first, x.second) for x in found.reshaped] == [("shape", "[2]", "[3]")]
    assert {x.label for x in found.replaced} == {"s", "n"}
    assert found.equal == 1
    assert not found.same


def test_a_rename_that_would_make_two_leaves_one_is_refused(tmp_path):
    a, b = {"param": {"w": np.ones(2)}, "params": {"w": np.zeros(2)}}, {"params": {"w": np.ones(2)}}
    with pytest.raises(TreeMismatch, match=r"param/w and params/w would both be params/w"):
        compare(a, b, rename={"param": "params"})
    for name, tree in (("a", a), ("b", b)):
        ucp.Checkpoint.of(tree).save(tmp_path / name)
    refused = run("diff", tmp_path / "a", tmp_path / "b", "--rename", "param=params", code=1)
    assert "Error: by rename" in refused
    twice = ("--rename", "param=params", "--rename", "param=other")
    refused = run("diff", tmp_path / "a", tmp_path / "b", *twice, code=2)
    assert "--rename gives param twice: params and other" in refused


def test_an_array_of_zeros_has_no_cosine_with_another(tmp_path):
    for name, b in (("a", np.arange(3.0)), ("b", np.zeros(3))):
        tree = {"param": {"b": b, "w0": b, "w1": np.array([1.0, -1 if b.any() else 1])}}
        ucp.Checkpoint.of(tree).export(tmp_path / name, "dcp")
    text = run("diff", tmp_path / "a", tmp_path / "b", "--json", code=1)
    found = json.loads(text, parse_constant=pytest.fail)["values"]
    assert [each["cosine"] for each in found] == [None, None, pytest.approx(0)]
    rows = run("diff", tmp_path / "a", tmp_path / "b", code=1).splitlines()
    (alone,) = (row.split() for row in rows if row.startswith("b "))
    (folded,) = (row.split() for row in rows if row.startswith("w"))
    assert "undefined" in alone
    assert "0.000000" in folded


@pytest.mark.filterwarnings("error")
def test_what_doubles_do_not_hold_is_null_in_json(tmp_path):
    for name, sign in (("a", 1), ("b", -1)):
        ucp.Checkpoint.of({"param": {"w": sign * np.full(3, 1e200)}}).export(tmp_path / name, "dcp")
    text = run("diff", tmp_path / "a", tmp_path / "b", "--json", code=1)
    found = json.loads(text, parse_constant=pytest.fail)["values"][0]
    assert (found["largest"], found["relative"], found["cosine"]) == (2e200, 2, None)


def test_leaves_that_share_a_label_are_compared_each_by_its_path():
    a, b = ({"a": {"b/c": np.full(2, n)}, "a/b": {"c": np.ones(2)}} for n in (2.0, 3.0))
    assert compare(a, a).equal == 2
    found = compare(a, b)
    assert [each.label for each in found.values] == ["['a', 'b/c']"]
    assert found.equal == 1


def test_headers_alone_read_no_element():
    found = compare({"x": np.ones(2)}, {"x": np.zeros(2)}, headers=True)
    assert found.same
    assert found.headers_only


def test_labels_are_renamed_by_whole_names():
    a, b = {"param": {"w": np.ones(2)}, "params2": 1}, {"params": {"w": np.ones(2)}, "params2": 1}
    assert compare(a, b, rename={"param": "params"}).same
    assert not compare(a, b).same
    assert compare(a, b, only="^params2").same


def test_two_formats_of_one_state_are_the_same(tmp_path):
    checkpoint = ucp.open(CASE)
    checkpoint.save(tmp_path / "copy")
    found = ucp.diff(CASE, tmp_path / "copy")
    assert found.same
    assert found.equal == len(checkpoint.leaves)


def test_a_setting_that_differs_alike_is_one_fact():
    cases = DATA / "deepspeed"
    found = ucp.diff(cases / "z1_fp32_dp2_sgd", cases / "z1_fp32_dp2_lion", headers=True)
    facts = {fact.label: (fact.first, fact.second) for fact in found.facts}
    assert facts["lr"] == ("0.027500000000000004", "0.00055")
    assert facts["betas"] == ("", "[0.9, 0.99]")
    [decay] = [label for label in facts if label.startswith("weight_decay")]
    assert decay == "weight_decay of 11, such as embed.word_embeddings.weight"
    assert facts[decay] == ("0.01", "0.1")


def test_a_model_is_compared_through_its_mapping(tmp_path):
    source = ucp.open(DATA / "torch" / "hf_gpt2" / "ckpt")
    mapped = source.map("hf-gpt2-to-flax")
    mapped.save(tmp_path / "tunix")
    assert ucp.diff(source, tmp_path / "tunix", mapping="hf-gpt2-to-flax").same


def test_the_command_folds_and_has_an_exit_code(tmp_path):
    rng = np.random.default_rng(0)
    tree = {f"layer_{i}": {"w": rng.normal(size=(4, 4))} for i in range(3)} | {"e": np.ones(3)}
    other = {name: {"w": v["w"] + 1} if "layer" in name else v for name, v in tree.items()}
    ucp.Checkpoint.of(tree).save(tmp_path / "a")
    ucp.Checkpoint.of(other).save(tmp_path / "b")
    text = run("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "layer_{0..2}/w  100.000%" in text
    assert "3 leaves differ, 1 equal in all elements" in text
    assert "layer_1/w" in run("diff", tmp_path / "a", tmp_path / "b", "--all", code=1)
    found = run_json("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert not found["same"]
    assert [each["changed"] for each in found["values"]] == [16, 16, 16]
    text = run("diff", tmp_path / "a", tmp_path / "b", "--headers")
    assert "0 leaves differ, 4 equal in names, shapes and dtypes" in text
    assert run_json("diff", tmp_path / "a", tmp_path / "a")["same"]
    assert json.dumps(found)


@pytest.mark.slow
def test_one_flipped_bit_in_ten_thousand_arrays_is_found_and_nothing_else():
    names = [f"layers.{i}.w" for i in range(10_000)]
    array = np.linspace(-1, 1, 6, dtype=np.float32)
    flipped = array.copy()
    flipped.view(np.uint32)[3] ^= 1
    params = dict.fromkeys(names, array)
    found = compare({"param": params}, {"param": params | {names[7777]: flipped}})
    assert [(each.label, each.changed) for each in found.values] == [("param/layers.7777.w", 1)]
    assert found.equal == 9_999
    tree = {"param": dict.fromkeys(names, array)}
    assert compare(tree, {"param": dict.fromkeys(names, array)}).same


@pytest.mark.parametrize("place", [0, 8191, 8192, 20_000])
def test_a_change_is_found_wherever_it_is_among_more_elements_than_are_looked_at_at_once(place):
    array = np.random.default_rng(0).normal(size=20_001)
    other = array.copy()
    other[place] += 1
    (found,) = compare({"x": array}, {"x": other}).values
    assert (found.changed, found.largest) == (1, pytest.approx(1.0))
    cosine = np.dot(array, other) / np.linalg.norm(array) / np.linalg.norm(other)
    assert found.cosine == pytest.approx(cosine, rel=1e-12)
